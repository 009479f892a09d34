"""The plain data types that every package of the engine uses.

Request, Sequence, Work, Proposal and Outcome, and what a user hands in and gets back. Knows nothing of devices, models
or files.
"""

from __future__ import annotations

import copy
import hashlib
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import InitVar, dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from ssd.constraints.structured import StructuredOutput
from ssd.errors import RequestError
from ssd.kv.blocks import BlockTable
from ssd.options import described, is_int, option, options_of, plain, validate

if TYPE_CHECKING:
    from ssd.constraints.grammars import Constraint
    from ssd.constraints.processors import RowProcessor

FinishReason = Literal["stop", "length", "abort", "error"]


class _Default(int):
    """A default that can be told from the same number given by the user."""


@dataclass(frozen=True)
class SamplingParams:
    """Sampling parameters of one request. Validated on creation; the defaults decode greedily.

    Numbers become Python's own int and float, numpy's included. `max_tokens`: another name for `max_new_tokens`, for
    the constructor only. `logprobs=k` returns, for every emitted token, its log-probability under the model and those
    of the k most likely tokens (of the model's own distribution: before temperature, truncation and penalties).
    `prompt_logprobs=k` does so for the tokens of the prompt. Its KV does not come from the prefix cache then, nor with
    `pooling="mean"`.
    `structured`: what the text must look like; a dict has the fields of `StructuredOutput`.
    `logits_processor`: called as f(token_ids, logits) for every position, with all tokens before it (prompt and output)
    and the model's logits (numpy float32 [vocabulary]); returns the logits to use, before bias, penalties and
    temperature. It is called for positions behind draft tokens as well, so it must depend on its arguments only. If it
    fails, the sample ends with the finish reason "error". The logits come to the host for it, and the sequence is in
    every other round at most, as with `structured`.
    """

    temperature: float = option(
        0.0, "0: greedy decoding; higher: more varied text.", least=0, most=100, flags=("--temperature", "-t")
    )
    top_k: int = option(0, "Sample from the k most likely tokens; 0: from all.", least=0)
    top_p: float = option(1.0, "Sample from the most likely tokens whose probabilities sum to this.", above=0, most=1)
    min_p: float = option(0.0, "Exclude tokens below this share of the largest probability.", least=0, most=1)
    repetition_penalty: float = option(
        1.0, "Above 1: tokens of the prompt and the output become less likely.", above=0, most=100
    )
    presence_penalty: float = option(0.0, "Above 0: tokens of the output become less likely.", least=-100, most=100)
    frequency_penalty: float = option(
        0.0, "Above 0: tokens of the output become less likely, by how often they occur.", least=-100, most=100
    )
    logit_bias: Mapping[int, float] = field(
        default_factory=dict,
        metadata=described("Values that are added to the logits of tokens, by token id; -inf excludes a token."),
    )
    seed: int | None = option(None, "The same seed gives the same text; None: drawn for every request, and reported.")
    stop: str | Seq[str] = option((), "The text ends before this string.")
    stop_token_ids: Seq[int] = option((), "The text ends before these tokens.")
    max_new_tokens: int = option(
        _Default(256), "Maximum length of the output, in tokens.", least=1, flags=("--max-tokens", "-m")
    )
    min_tokens: int = option(0, "Minimum length of the output, in tokens.", least=0)
    ignore_eos: bool = option(False, "Continue after the model's own stop tokens.")
    logprobs: int | None = option(
        None, "Report the log-probability of each token, and of this many most likely ones.", least=0, most=100
    )
    prompt_logprobs: int | None = option(
        None, "Report the same for each token of the prompt, which is then computed as a whole.", least=0, most=100
    )
    pooling: Literal["mean", "last"] | None = option(
        None, "Report the prompt's embedding: the mean of its last hidden states, or that of its last token."
    )
    n: int = option(1, "Number of samples.", least=1, most=1024, flags=("-n",))
    speculate: bool = option(True, "False: no drafts for this request, one token per round.")
    structured: StructuredOutput | Mapping[str, Any] | None = option(
        None, "What the text must be: a JSON schema, a regular expression, a choice or a grammar."
    )
    shown_token_ids: Seq[int] = option((), "Special tokens that the text includes; others are left out.")
    priority: int = option(0, "Requests with lower numbers are served earlier. Never changes the text.")
    logits_processor: Callable[[list[int], Any], Any] | None = None

    max_tokens: InitVar[int | None] = None

    def __post_init__(self, max_tokens: int | None) -> None:
        if max_tokens is not None:
            self._rename(max_tokens)
        validate(self, RequestError)
        self._set("max_new_tokens", int(self.max_new_tokens))
        if self.min_tokens > self.max_new_tokens:
            raise RequestError(f"min_tokens={self.min_tokens}: must not exceed max_new_tokens={self.max_new_tokens}")
        self._set("top_k", min(self.top_k, _MOST_TOP_K))
        self._set("stop", _stop_strings(self.stop))
        for name in ("stop_token_ids", "shown_token_ids"):
            self._set(name, _token_ids(name, getattr(self, name)))
        self._set("logit_bias", _biases(self.logit_bias))
        self._set("structured", StructuredOutput.of(self.structured))
        if self.logits_processor is not None and not callable(self.logits_processor):
            raise RequestError(f"logits_processor={self.logits_processor!r}: must be a function of tokens and logits")
        if self.structured is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise RequestError(f"{name}: cannot be combined with structured, whose text ends where it is complete")

    def _rename(self, max_tokens: int) -> None:
        known = options_of(SamplingParams)["max_new_tokens"]
        if not known.accepts(plain(max_tokens)):
            raise RequestError(f"max_tokens={max_tokens!r}: must be {known.expected}")
        if not isinstance(self.max_new_tokens, _Default) and self.max_new_tokens != max_tokens:
            raise RequestError(
                f"max_tokens={max_tokens} and max_new_tokens={self.max_new_tokens!r} are the same parameter: give one"
            )
        self._set("max_new_tokens", max_tokens)

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


BINARY = (bytes, bytearray, memoryview)  # sequences of ints that are no token ids
_ID = re.compile("[0-9]{1,18}")  # a token id as text
_MOST_TOP_K = 2**31 - 1  # no vocabulary is larger: more keeps all tokens, too


def _stop_strings(stop: object) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(strings, (list, tuple)) or any(not isinstance(s, str) or not s for s in strings):
        raise RequestError(f"stop={stop!r}: must be a string or a list of strings, none of them empty")
    return tuple(strings)


def _token_ids(name: str, ids: object) -> tuple[int, ...]:
    if ids is None:
        return ()
    listed = isinstance(ids, Iterable) and not isinstance(ids, (str, *BINARY, Mapping))
    items = tuple(map(plain, ids)) if listed else None  # type: ignore[call-overload]
    if items is None or any(not is_int(t) or t < 0 for t in items):
        raise RequestError(f"{name}={ids!r}: must be a list of token ids (integers of at least 0)")
    return tuple(map(int, items))


def _biases(bias: object) -> dict[int, float]:
    """Keys may be strings, which is what JSON makes of them."""
    if bias is None:
        return {}
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias={bias!r}: must map token ids to numbers")
    keys = [int(key) if isinstance(key, str) and _ID.fullmatch(key) else key for key in bias]
    ids = _token_ids("logit_bias", keys)
    if len(set(ids)) < len(ids):
        raise RequestError(f"logit_bias={bias!r}: names a token twice")
    return dict(zip(ids, map(_bias, bias.values()), strict=True))


def _bias(value: object) -> float:
    number = plain(value)
    right = isinstance(number, (int, float)) and not isinstance(number, bool)
    if not right or not (number == -math.inf or -1000 <= number <= 1000):
        raise RequestError(f"logit_bias value={value!r}: must be a number from -1000 to 1000, or -inf")
    return float(number)


class Status(Enum):
    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass
class TokenLogprobs:
    """Log-probability of one emitted token, and of the most likely tokens at its position."""

    token_id: int
    logprob: float
    top: dict[int, float]
    decoded: dict[int, str] = field(default_factory=dict)  # text of these tokens; empty without a tokenizer


@dataclass
class RequestMetrics:
    """Times and counts of one sequence. Times are in seconds, as `time.perf_counter` gives them."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0  # prompt tokens whose KV came from the prefix cache at first admission
    output_tokens: int = 0
    rounds: int = 0
    preemptions: int = 0
    drafted: int = 0  # draft tokens verified
    accepted: int = 0  # draft tokens accepted
    accepted_per_position: list[int] = field(default_factory=list)  # accepted draft tokens, by position in the draft
    look_ups: int = 0  # rounds whose draft was looked up in the prepared branches (mode="ssd")
    hits: int = 0  # look-ups that found the outcome among them
    deliveries: list[tuple[float, int]] = field(default_factory=list)  # (time, number of tokens) of every round

    @property
    def time_to_first_token(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Speed after the first token; None for fewer than two tokens."""
        if self.finished is None or self.first_token is None or self.output_tokens < 2:
            return None
        return (self.output_tokens - 1) / max(self.finished - self.first_token, 1e-9)


@dataclass(frozen=True)
class Request:
    """One prompt with its sampling parameters; it becomes `params.n` sequences. A seed of None is drawn here, once.

    `group`: requests that were made together, and share what the scheduler grants to one of them; by default its id.
    """

    id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    group: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "group", self.group or self.id)
        if self.params.seed is None:
            params = copy.copy(self.params)  # not validated again: it may have as many biases as the vocabulary
            object.__setattr__(params, "seed", sequence_seed(None, 0))
            object.__setattr__(self, "params", params)


class Origin(IntEnum):
    """Where a draft came from."""

    NONE = 0  # no draft
    DRAFT = 1  # SD: written by the draft model, or a drafter of the user's own, while the target waited
    HIT = 2  # SSD: prepared for exactly this outcome
    JIT = 3  # SSD, after a miss: written by the draft model while the target waited
    SIBLING = 4  # SSD, after a miss: prepared for the same number of accepted tokens and another last token
    SUFFIX = 5  # suffix look-up: what followed the same tokens earlier, in the text or in other answers


LOOKED_UP = frozenset({Origin.HIT, Origin.JIT, Origin.SIBLING})  # origins after a look-up in prepared branches
MODEL_WRITTEN = frozenset({Origin.DRAFT, Origin.HIT, Origin.JIT})  # written by the draft model for this outcome


@dataclass(eq=False)
class Sequence:
    """One sample of a request: its committed tokens and its KV blocks in the target."""

    id: int
    request: Request
    index: int  # which of the request's n samples
    seed: int
    stop_token_ids: frozenset[int]
    max_tokens: int  # prompt and output together never exceed this
    tokens: list[int] = field(default_factory=list)
    kv: BlockTable = field(default_factory=BlockTable)
    slot: int = -1  # row of the device's SequenceState while it runs, else -1
    in_flight: Work | None = None  # its share of the last round that was launched and not yet collected
    status: Status = Status.WAITING
    finish_reason: FinishReason | None = None
    last_accepted: int = 0  # draft tokens accepted in the last round; -1 (a worker's copy): not known
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    num_prompt_read: int = 0  # prompt tokens of which `prompt_logprobs` and `pooling` have what they need
    metrics: RequestMetrics = field(default_factory=RequestMetrics)
    constraint: Constraint | None = None  # state of the grammar of `params.structured`, after the output so far
    processor: RowProcessor | None = None  # of `params.logits_processor`

    @classmethod
    def of(
        cls,
        request: Request,
        id_: int,
        index: int,
        max_model_len: int,
        stop_token_ids: frozenset[int],
        constraint: Constraint | None = None,
        processor: RowProcessor | None = None,
    ) -> Sequence:
        """A sample of a request; `stop_token_ids`: its own and the model's."""
        params, num_prompt = request.params, len(request.prompt_token_ids)
        return cls(
            id=id_,
            request=request,
            index=index,
            seed=sequence_seed(params.seed, index),
            stop_token_ids=stop_token_ids,
            max_tokens=min(num_prompt + params.max_new_tokens, max_model_len),
            tokens=list(request.prompt_token_ids),
            metrics=RequestMetrics(prompt_tokens=num_prompt),
            constraint=constraint,
            processor=processor,
        )

    @property
    def params(self) -> SamplingParams:
        return self.request.params

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        return len(self.tokens) - self.num_prompt

    @property
    def output_token_ids(self) -> list[int]:
        return self.tokens[self.num_prompt :]

    @property
    def num_pending(self) -> int:
        """Committed tokens that still need a forward pass: a prompt's remainder, or the last token alone."""
        return len(self.tokens) - self.kv.num_computed

    @property
    def num_remaining(self) -> int:
        """How many more tokens may be committed."""
        return self.max_tokens - len(self.tokens)

    @property
    def reads_prompt(self) -> bool:
        """Whether log-probabilities or hidden states of the prompt are still needed: by the first sample only."""
        wanted = self.params.prompt_logprobs is not None or self.params.pooling is not None
        return wanted and self.index == 0 and self.num_prompt_read < self.num_prompt

    @property
    def takes_prefix(self) -> bool:
        """Whether a cached prefix will do; otherwise all positions of the prompt must be computed."""
        return not self.reads_prompt or (self.params.prompt_logprobs is None and self.params.pooling == "last")

    @property
    def has_host_logits(self) -> bool:
        """Whether its logits are masked or processed on the host, which needs the tokens before them."""
        return self.constraint is not None or self.processor is not None

    @property
    def awaits_commit(self) -> bool:
        """Whether its next round can only be launched once the one in flight is committed."""
        return self.has_host_logits and self.in_flight is not None and self.in_flight.decides

    # The following hold after the round in flight is committed. A round that decides leaves exactly one pending token.

    @property
    def next_pending(self) -> int:
        """Tokens that the next round has to compute."""
        work = self.in_flight
        if work is None:
            return len(self.tokens) - self.kv.num_computed
        return 1 if work.decides else len(self.tokens) - work.end

    @property
    def least_len(self) -> int:
        """Lower bound of the number of tokens: the round in flight decides at least one, if any."""
        work = self.in_flight
        return len(self.tokens) + (work is not None and work.decides)

    @property
    def most_len(self) -> int:
        """Upper bound of the number of tokens: the round in flight accepts its whole draft."""
        work = self.in_flight
        return len(self.tokens) + (work.num_logits if work is not None else 0)


@dataclass(frozen=True)
class Proposal:
    """A drafter's draft for one sequence: tokens that may follow its last decided token.

    `distributions` [tokens, vocabulary] are those that the tokens were sampled from; the rejection rule needs them.
    None: the tokens were not sampled (suffix look-up), or the rule is the coupled one.
    `parents`: the tokens are nodes of a tree, each behind the node of this index (-1: the last decided token), which
    comes before it; () where they are on the device, too. None: a chain, each token behind the one before it.
    """

    token_ids: tuple[int, ...] = ()
    distributions: Any = field(default=None, compare=False, repr=False)
    origin: Origin = field(default=Origin.NONE, compare=False)
    num_on_device: int = 0  # length of a draft in the SequenceState; `token_ids` is empty then
    parents: tuple[int, ...] | None = None

    @property
    def num_tokens(self) -> int:
        return self.num_on_device or len(self.token_ids)


class Outcome(NamedTuple):
    """What a verification decided for one sequence: the accepted draft tokens, then one token chosen by the target."""

    token_ids: tuple[int, ...]  # the last is -1 if there is no token to choose: all are forbidden, or logits are NaN
    logprobs: tuple[TokenLogprobs, ...] = ()  # one per token, if requested
    draft: tuple[int, ...] = ()  # the draft that was verified; of a tree first the accepted nodes, then the others
    origin: Origin = Origin.NONE  # where the draft came from
    nodes: tuple[int, ...] = ()  # of a tree: the numbers of the accepted nodes

    @property
    def num_accepted(self) -> int:
        return len(self.token_ids) - 1


class PromptPart(NamedTuple):
    """What a forward pass has read of a prompt, from position `start` to `end`."""

    start: int
    end: int
    logprobs: tuple[TokenLogprobs, ...]  # of the tokens from start + 1 on, if requested
    pooled: Any  # float64 [hidden], if requested: the sum of the hidden states, or the last one


class Work(NamedTuple):
    """One sequence's share of a round, as scheduled. A snapshot: later rounds do not change it."""

    sequence: Sequence
    num_tokens: int  # decided tokens whose KV is computed
    start: int | None = None  # position of the first; None: that of the last decided token, which the device knows
    decides: bool = True  # False for a prefill chunk that ends before the sequence's last token
    lookahead: int = 0  # KV slots reserved for draft tokens
    slot: int = -1  # the sequence's row of the SequenceState
    proposal: Proposal = Proposal()

    @property
    def is_decode(self) -> bool:
        """Whether it computes just the last decided token (and a draft): no prefill."""
        return self.decides and self.num_tokens == 1

    @property
    def end(self) -> int:
        """Position after the decided tokens of a prefill chunk."""
        if self.start is None:
            raise AssertionError("only the device knows where this work starts")
        return self.start + self.num_tokens

    @property
    def prompt_tokens(self) -> int:
        """How many of them are tokens of the prompt."""
        return 0 if self.start is None else max(0, min(self.num_tokens, self.sequence.num_prompt - self.start))

    @property
    def num_queries(self) -> int:
        return self.num_tokens + self.proposal.num_tokens

    @property
    def num_logits(self) -> int:
        """Logit rows: one after the last decided token, one after every draft token."""
        return 1 + self.proposal.num_tokens if self.decides else 0

    @property
    def cost(self) -> int:
        """Its share of `max_num_batched_tokens`."""
        return self.num_tokens + self.lookahead

    def with_proposal(self, proposal: Proposal) -> Work:
        return self._replace(proposal=proposal)


_SHOWN = 60  # characters of a text in `str(output)`


@dataclass
class Sample:
    """One of a request's `n` continuations, as returned to the user."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: FinishReason | None
    logprobs: list[TokenLogprobs] | None
    metrics: RequestMetrics
    seed: int | None = None  # a request with this seed and n=1 gives the same sample; None: nothing was sampled


@dataclass(repr=False)
class RequestOutput:
    """The answer to one prompt: `n` samples. The plain attributes are those of the first sample.

    A request with the same `prompt_token_ids` and `params` gives the same samples.
    """

    request_id: str
    prompt_token_ids: list[int]
    samples: list[Sample]
    error: str | None = None  # why it was refused (its only sample is empty then), or its first failed sample failed
    params: SamplingParams = field(default_factory=SamplingParams)  # with the seed that was drawn, if it was None
    prompt_logprobs: list[TokenLogprobs | None] | None = None  # one per token, if requested; None for the first
    embedding: list[float] | None = None  # of length 1, if `pooling` was requested
    prompt: str | None = None  # its text (a chat's after the template), if `LLM.generate` or `LLM.stream` was given one

    def __str__(self) -> str:
        """One line: the beginning of the text, the number of tokens, and how it ended."""
        text = self.text if len(self.text) <= _SHOWN else self.text[: _SHOWN - 1] + "…"
        more = f", {len(self.samples)} samples" if len(self.samples) > 1 else ""
        ended = f"error: {self.error}" if self.error is not None else self.finish_reason
        return f"{self.request_id}: {text!r} ({len(self.token_ids)} tokens{more}, {ended})"

    __repr__ = __str__

    @property
    def text(self) -> str:
        return self.samples[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.samples[0].token_ids

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.samples[0].finish_reason

    @property
    def logprobs(self) -> list[TokenLogprobs] | None:
        return self.samples[0].logprobs

    @property
    def metrics(self) -> RequestMetrics:
        return self.samples[0].metrics


@dataclass
class Delta:
    """The new tokens and text of one sample.

    A streamed request gets one delta for every round that adds tokens; any other request one per sample, at its end.
    """

    request_id: str
    index: int  # which sample
    token_ids: list[int]
    text: str  # may lag behind the tokens: incomplete characters, the beginning of a stop string
    logprobs: list[TokenLogprobs]  # one per token, if requested
    num_accepted: int = 0  # accepted draft tokens; in each round they come before the target's own token
    finish_reason: FinishReason | None = None  # None: the sample goes on
    output: RequestOutput | None = None  # the complete output, on the last delta of the request
    outcomes: list[Outcome] = field(default_factory=list)  # one per round, if streamed; a stop may cut the last

    def extend(self, later: Delta) -> None:
        """Appends the next delta of the same sample."""
        self.token_ids += later.token_ids
        self.text += later.text
        self.logprobs += later.logprobs
        self.num_accepted += later.num_accepted
        self.outcomes += later.outcomes
        self.finish_reason, self.output = later.finish_reason, later.output


def sequence_seed(seed: int | None, index: int) -> int:
    """The 64-bit seed of one sample: the request's for the first, derived from it for the others; random if None."""
    if seed is None:
        return int.from_bytes(os.urandom(8), "little")
    if index == 0:
        return seed & 0xFFFF_FFFF_FFFF_FFFF
    digest = hashlib.blake2b(f"{seed}/{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")
