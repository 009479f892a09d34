"""Requests of the OpenAI-compatible endpoints. A field that is not listed here is refused.

Types and choices are checked here, ranges by `SamplingParams`.
"""

from __future__ import annotations

from typing import Annotated, Any, Final

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt

from ssd.core import SamplingParams

MAX_TOP_LOGPROBS: Final = 20
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)]
TokenIds = Annotated[list[NonNegativeInt], Field(min_length=1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)


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
    stop: str | list[str] | None = None
    stop_token_ids: list[NonNegativeInt] | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    logit_bias: dict[str, float] | None = None
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
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None  # regex, choice, grammar, json

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
    messages: list[dict[str, Any]]
    max_completion_tokens: int | None = None  # another name of max_tokens
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    chat_template: str | None = None  # the name of one of the checkpoint's
    chat_template_kwargs: dict[str, Any] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionRequest(GenerationRequest):
    prompt: str | TokenIds | Annotated[list[str], Field(min_length=1)] | Annotated[list[TokenIds], Field(min_length=1)]
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
    messages: list[dict[str, Any]] | None = None  # in place of a prompt
    add_special_tokens: bool = True  # to a prompt; a chat template writes its own
    add_generation_prompt: bool = True  # to messages
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(Strict):
    model: str | None = None
    tokens: list[NonNegativeInt]
    skip_special_tokens: bool = False
