"""Requests of the OpenAI-compatible endpoints. A field that is not listed here is refused.

Types and choices are checked here, ranges by `SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, NonNegativeInt, model_validator

from ssd.core import SamplingParams

MAX_TOP_LOGPROBS: Final = 20
MAX_STOPS: Final = 1000
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]


def one_invalid(*types: type) -> BeforeValidator:
    """`fail_fast` for a dict: of values of other types, the first one is left."""

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
        """Of unknown fields, the first one is left."""
        unknown = [name for name in fields if name not in cls.model_fields] if isinstance(fields, dict) else []
        dropped = set(unknown[1:])
        return {name: value for name, value in fields.items() if name not in dropped} if dropped else fields


class StreamOptions(Strict):
    include_usage: bool = False  # a last chunk with the usage


class SamplingRequest(Strict):
    """What all endpoints that generate share. None: the default, as if the field were left out."""

    model: str
    stream: bool | None = None
    temperature: float | None = None  # OpenAI's default, 1; `SamplingParams` has 0
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

    def sampling_params(self, max_tokens: int, logprobs: int | None) -> SamplingParams:
        """`max_tokens`: the default of the endpoint; `logprobs`: how many per token."""
        given = {name: value for name in _SAMPLING if (value := getattr(self, name)) is not None}
        given["top_k"] = max(0, given.get("top_k", 0))
        return SamplingParams(**{"temperature": 1.0, "max_tokens": max_tokens, **given, "logprobs": logprobs})

    @property
    def include_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


_SAMPLING: Final = (
    *("n", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "stop_token_ids", "min_tokens"),
    *("ignore_eos", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty", "speculate"),
    "priority",
)


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
