"""Validation of requests against a model's limits: safe on any thread. Grammars are compiled here."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ssd.constraints.grammars import Grammars
from ssd.constraints.structured import StructuredOutput
from ssd.core import SamplingParams
from ssd.errors import PromptTooLong, RequestError


@dataclass(frozen=True)
class Limits:
    """What a loaded model can serve."""

    vocab_size: int
    max_model_len: int  # tokens, prompt and output together
    has_tokenizer: bool
    longest: int | None = None  # what max_model_len could be at most
    grammars: Grammars | None = None  # for structured output; None without a tokenizer


def check_request(prompt_token_ids: Seq[int], params: SamplingParams, limits: Limits) -> None:
    """Raises RequestError when a request can never be served."""
    if not prompt_token_ids:
        raise RequestError("the prompt is empty: pass at least one token (a BOS token, say)")
    if set(map(type, prompt_token_ids)) != {int}:
        raise RequestError("the prompt holds token ids that are no integers: pass a list of Python's own")
    if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < limits.vocab_size:
        raise RequestError(f"the prompt holds token ids outside 0..{limits.vocab_size - 1}: use the model's tokenizer")
    if len(prompt_token_ids) >= limits.max_model_len:
        raise PromptTooLong(
            f"the prompt is too long: it has {len(prompt_token_ids)} tokens, and this model's maximum context length "
            f"is {limits.max_model_len} (max_model_len), with at least one new token: "
            f"{_shorter(len(prompt_token_ids), limits)}"
        )
    for name in ("logit_bias", "stop_token_ids"):
        if any(t >= limits.vocab_size for t in getattr(params, name)):
            raise RequestError(
                f"{name} holds token ids beyond the vocabulary of {limits.vocab_size} tokens: leave them out"
            )
    if params.stop and not limits.has_tokenizer:
        raise RequestError("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
    if isinstance(params.structured, StructuredOutput):
        if limits.grammars is None:
            raise RequestError("structured: needs a tokenizer, and this checkpoint has none")
        limits.grammars.check(params.structured)


def _shorter(num_tokens: int, limits: Limits) -> str:
    """The remedy for a prompt that is too long: max_model_len may not go far enough."""
    if limits.longest is None or num_tokens < limits.longest:
        return "shorten the prompt or raise max_model_len"
    if limits.longest == limits.max_model_len:
        return "shorten the prompt (max_model_len cannot be raised)"
    return f"shorten the prompt (max_model_len can be raised to {limits.longest}, which is too little)"
