"""Validation of requests against a model's limits: safe on any thread, and done before the engine's gets them."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from collections.abc import Sized
from dataclasses import dataclass

from ssd.constraints.grammars import Constraint, Grammar, Grammars
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
    stop_token_ids: frozenset[int] = frozenset()  # the model's


@dataclass(frozen=True)
class CheckedRequest:
    """A request that can be served, with what is made of its parameters: the engine's thread does not wait for that."""

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stop_token_ids: frozenset[int]  # its own and the model's
    constraints: tuple[Constraint, ...]  # one per sample, or none


def check_request(
    prompt_token_ids: Seq[int], params: SamplingParams, limits: Limits, grammar: Grammar | None = None
) -> CheckedRequest:
    """Raises RequestError when a request can never be served.

    `grammar`: that of its structured output, if it is compiled; otherwise the calling thread waits for it.
    """
    if not prompt_token_ids:
        raise RequestError("the prompt is empty: pass at least one token (a BOS token, say)")
    check_length(len(prompt_token_ids), limits)
    if set(map(type, prompt_token_ids)) != {int}:
        raise RequestError("the prompt holds token ids that are no integers: pass a list of Python's own")
    if not 0 <= min(prompt_token_ids) <= max(prompt_token_ids) < limits.vocab_size:
        raise RequestError(f"the prompt holds token ids outside 0..{limits.vocab_size - 1}: use the model's tokenizer")
    for name in ("logit_bias", "stop_token_ids"):
        check_count(name, getattr(params, name), limits.vocab_size)
        if max(getattr(params, name), default=0) >= limits.vocab_size:
            raise RequestError(
                f"{name} holds token ids beyond the vocabulary of {limits.vocab_size} tokens: leave them out"
            )
    if params.stop and not limits.has_tokenizer:
        raise RequestError("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
    constraints: tuple[Constraint, ...] = ()
    if isinstance(params.structured, StructuredOutput):
        if limits.grammars is None:
            raise RequestError("structured: needs a tokenizer, and this checkpoint has none")
        grammar = grammar or limits.grammars.compiled(params.structured).result()
        constraints = tuple(Constraint(grammar) for _ in range(params.n))
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else limits.stop_token_ids)
    return CheckedRequest(tuple(prompt_token_ids), params, stops, constraints)


def check_length(num_tokens: int, limits: Limits, *, more: bool = False) -> None:
    """Raises PromptTooLong if a prompt of so many tokens leaves no room for another. `more`: it may have more."""
    if num_tokens >= limits.max_model_len:
        count = f"at least {num_tokens}" if more else f"{num_tokens}"
        raise PromptTooLong(
            f"the prompt is too long: it has {count} tokens, and this model's maximum context length is "
            f"{limits.max_model_len} (max_model_len), with at least one new token: {_shorter(num_tokens, limits)}"
        )


def check_count(name: str, listed: Sized, vocab_size: int) -> None:
    """Raises RequestError if a parameter lists more tokens than there are."""
    if len(listed) > vocab_size:
        raise RequestError(f"{name}: has {len(listed)} entries, and the vocabulary has {vocab_size}: leave some out")


def _shorter(num_tokens: int, limits: Limits) -> str:
    """The remedy for a prompt that is too long: max_model_len may not go far enough."""
    if limits.longest is None or num_tokens < limits.longest:
        return "shorten the prompt or raise max_model_len"
    if limits.longest == limits.max_model_len:
        return "shorten the prompt (max_model_len cannot be raised)"
    return f"shorten the prompt (max_model_len can be raised to {limits.longest}, which is too little)"
