"""Requests of the OpenAI-compatible endpoints. A field that is not listed here is refused.

Types and choices are checked here, ranges by `SamplingParams`; `GenerationRequest.sampling_params` is the one way from
a request to those.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, model_validator

from ssd.constraints.structured import StructuredOutput
from ssd.core import SamplingParams
from ssd.errors import RequestError
from ssd.server.errors import ApiError, invalid, unsupported

MAX_TOP_LOGPROBS: Final = 20
MAX_STOPS: Final = 1000
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


def one_invalid(*types: type) -> BeforeValidator:
    """`fail_fast` for a dict: drops all values of other types but the first."""

    def checked(value: Any) -> Any:
        items = value.items() if isinstance(value, dict) else ()
        return next(({key: item} for key, item in items if type(item) not in types), value)

    return BeforeValidator(checked)


# A body may have a million invalid items. pydantic would report all of them, which takes gigabytes: it ends at one.
Json = dict[str, Any]
Jsons = Annotated[list[Json], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Stops = Annotated[Texts, Field(max_length=MAX_STOPS)]
Ids = Annotated[list[NonNegativeInt], Field(fail_fast=True)]
TokenIds = Annotated[Ids, Field(min_length=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _one_unknown(cls, fields: Any) -> Any:
        """Drops all unknown fields but the first, for the same reason."""
        unknown = [name for name in fields if name not in cls.model_fields] if isinstance(fields, dict) else []
        dropped = set(unknown[1:])
        return {name: value for name, value in fields.items() if name not in dropped} if dropped else fields


class StreamOptions(Strict):
    include_usage: bool = False  # a last chunk with the usage


class SamplingRequest(Strict):
    """What all endpoints that generate share. None: the default, as if the field were left out."""

    model: str
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None  # 0 and -1: all tokens
    min_p: float | None = None
    seed: int | None = None
    stop: str | Stops | None = None
    stop_token_ids: Ids | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: Annotated[dict[str, float], one_invalid(int, float)] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    speculate: bool | None = None  # False: no drafts for this request
    priority: int | None = None  # lower is served earlier
    user: str | None = None  # for the access log


class GenerationRequest(SamplingRequest):
    """What chats and completions share."""

    n: int | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    return_token_ids: bool | None = None  # the token ids beside the text
    response_format: Json | None = None
    structured_outputs: Json | None = None  # regex, choice, grammar, json

    def sampling_params(self, defaults: Json, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """`defaults`: the server's; `max_tokens`: the default of the endpoint; `logprobs`: how many per token."""
        same = SamplingParams.__dataclass_fields__.keys() & GenerationRequest.model_fields
        given = {name: value for name in same if (value := getattr(self, name)) is not None}
        given = {**defaults, "max_tokens": max_tokens, **given}
        given["top_k"] = max(0, given.get("top_k", 0))
        return SamplingParams(**given, logprobs=logprobs, structured=self._structured())

    @property
    def field_names(self) -> dict[str, str]:
        """The client's names of parameters that the library calls otherwise."""
        return {"structured": "response_format" if self.structured_outputs is None else "structured_outputs"}

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    def _structured(self) -> StructuredOutput | None:
        name, value = "response_format", self.response_format
        if self.structured_outputs is not None:
            name = "structured_outputs"
            if self.response_format is not None:
                raise unsupported(name, "cannot be combined with response_format: give one of them")
            if "type" in self.structured_outputs:
                raise invalid(name, "type: is not one of its fields")
            value = {"json_schema" if kind == "json" else kind: text for kind, text in self.structured_outputs.items()}
        try:
            return StructuredOutput.of(value)
        except RequestError as error:
            message = str(error)
            raise ApiError(400, message if message.startswith(name) else f"{name}: {message}", param=name) from error


class ChatRequest(GenerationRequest):
    messages: Jsons
    max_completion_tokens: int | None = None  # another name of max_tokens
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template: str | None = None  # the name of one of the checkpoint's
    chat_template_kwargs: Json | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: Jsons | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None

    @property
    def field_names(self) -> dict[str, str]:
        names = super().field_names
        if self.max_tokens is None:
            names["max_tokens"] = "max_completion_tokens"
        if self.response_format is None and self.structured_outputs is None:
            names["structured"] = "tools"  # the grammar of forced and strict calls
        return names


class CompletionRequest(GenerationRequest):
    prompt: (
        str
        | TokenIds
        | Annotated[Texts, Field(min_length=1)]
        | Annotated[list[TokenIds], Field(fail_fast=True, min_length=1)]
    )
    logprobs: TopLogprobs | None = None
    echo: bool | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """One or several prompts as a list."""
        prompt = self.prompt
        if isinstance(prompt, str) or isinstance(prompt[0], int):
            return [prompt]  # type: ignore[list-item]
        return prompt  # type: ignore[return-value]


class TokenizeRequest(Strict):
    model: str | None = None
    prompt: str | None = None
    messages: Jsons | None = None  # in place of a prompt
    add_special_tokens: bool = True  # to a prompt; a chat template writes its own
    add_generation_prompt: bool = True  # to messages
    chat_template_kwargs: Json | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: Ids
    skip_special_tokens: bool = False
