"""The protocol between the engine and a drafter's worker: kinds of messages, their payloads and their validation.

A worker is a child process or a draft server. To the latter an engine says HELLO first, which is answered by WELCOME or
REFUSED; from SETUP on the two are the same.

Decoding checks everything that a worker, or an engine, could get wrong: an invalid message raises WireError. Knows
nothing of sockets and processes (`ssd.parallel`) or of how drafts are made.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, fields
from enum import IntEnum
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.core import Origin, Proposal, Request, SamplingParams, Sequence
from ssd.decoding.drafter import Confidence, Prepared
from ssd.errors import RequestError
from ssd.parallel.transport import (
    HIGHEST,
    Reader,
    WireError,
    Words,
    decode_json,
    encode_json,
    float_bits,
    packed,
    words,
)

MAX_OUTCOMES = 256  # prepared for a sequence
PROTOCOL = 1  # version of the messages after HELLO; that of the frame is in `transport.MAGIC`
MOST_HELLO_WORDS = 512

_CONFIDENCE_STEPS = 18.0  # codes per doubling of 1 + confidence
# Sampling parameters that a draft depends on, in the order in which they are sent. `logit_bias` follows them.
_COUNTS = ("top_k", "min_tokens")
_REALS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")


class Kind(IntEnum):
    """Messages after SETUP and READY, with the meaning of their times."""

    ROUND = 3  # to the worker: sequences to draft for; the duration of the last round
    PROPOSALS = 4  # from the worker: the drafts that a round asks for; computing time in all, and for this round
    PREPARED = 5  # from the worker, at the end of a round: drafts for the round's outcomes; computing time in all
    HELLO = 6  # to a draft server, before SETUP
    WELCOME = 7  # its answer: its process id, and the CPU threads that it computes with


@dataclass(frozen=True)
class Hello:
    """What an engine is and wants of a draft server."""

    token: str  # of the tenant; "": none
    vocabulary: str  # hash of the tokens and their ids; "": the model has no tokenizer
    tokenizer: str  # hash of how texts become tokens; "": likewise
    vocab_size: int  # columns of the target's logits
    k: int  # most tokens of a draft
    budget: int  # most branches of a sequence
    max_sequences: int  # at the same time
    max_len: int  # tokens of a sequence
    backup: str  # as `SpeculationConfig.backup`
    protocol: int = PROTOCOL

    def encode(self) -> Words:
        return encode_json(asdict(self))

    @classmethod
    def decode(cls, payload: Words) -> Hello:
        """Unknown fields, which later versions may have, are left out: what has changed is said by `protocol`."""
        found = decode_json(payload)
        known = {each.name: found.get(each.name) for each in fields(cls)}
        for each in fields(cls):
            value, is_text = known[each.name], each.type == "str"
            right = isinstance(value, str) if is_text else type(value) is int and 0 <= value <= HIGHEST
            if not right:
                raise WireError(
                    f"HELLO says {each.name}={value!r}, which must be {'a text' if is_text else 'a number'}"
                )
        return cls(**known)  # type: ignore[arg-type]


class Draft(NamedTuple):
    """A draft that was prepared."""

    token_ids: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()  # per token, where it is known

    @property
    def proposal(self) -> Proposal:
        return Proposal(self.token_ids, origin=Origin.HIT if self.token_ids else Origin.NONE)

    def cut(self, length: int) -> Draft:
        return Draft(self.token_ids[:length], self.confidence[:length])


@dataclass(frozen=True)
class Entry:
    """One sequence of a round, with its tokens since the last message."""

    id: int
    known: int  # number of tokens that the worker has
    new_tokens: list[int]
    lookahead: int
    draft: Draft | None = None  # the draft under verification; None: the worker is asked for it
    sequence: Sequence | None = None  # a new one: its parameters are sent, too


@dataclass(frozen=True)
class PreparedDrafts:
    """The drafts that a worker has prepared for a sequence."""

    verified: tuple[int, ...]  # the draft under verification
    outcomes: npt.NDArray[np.int32]  # per row: accepted tokens of it, the target's own token, the draft, then -1
    codes: npt.NDArray[np.uint8]  # `_confidence_codes` of the drafts' tokens

    @property
    def confidence(self) -> npt.NDArray[np.float64]:
        """Of the drafts' tokens."""
        return _confidence(self.codes)

    def find(self, decided: tuple[int, ...]) -> Draft | None:
        """The draft for the outcome that decided these tokens."""
        if not decided or self.verified[: len(decided) - 1] != decided[:-1]:
            return None
        accepted, own = self.outcomes[:, 0], self.outcomes[:, 1]
        matches = np.flatnonzero((accepted == len(decided) - 1) & (own == decided[-1]))
        if not len(matches):
            return None
        tokens = _unpadded(self.outcomes[matches[0], 2:].tolist())
        return Draft(tokens, tuple(_confidence(self.codes[matches[0], : len(tokens)]).tolist()))

    @property
    def by_outcome(self) -> Prepared:
        return {(accepted, own): _unpadded(draft) for accepted, own, *draft in self.outcomes.tolist()}


def _unpadded(draft: Seq[int]) -> tuple[int, ...]:
    """The tokens before the first -1."""
    return tuple(itertools.takewhile(lambda token: token >= 0, draft))


def encode_round(
    forgotten: Seq[int], entries: Seq[Entry], *, budget: int = 16, reply: bool = True, ahead: bool = True
) -> Words:
    """`budget`: branches per sequence that are to be prepared.

    `reply`: the drafts asked for are to be sent; else they are only prepared for, and another worker sends them.
    `ahead`: what is prepared is to be sent, too; else it is kept, and looked up in when the next round asks.
    """
    numbers = [reply + 2 * ahead, budget, len(forgotten), *forgotten, len(entries)]
    for entry in entries:
        numbers += [entry.id, entry.known, len(entry.new_tokens), *entry.new_tokens, entry.lookahead]
        numbers += [-1] if entry.draft is None else _draft_numbers(entry.draft)
        numbers += [0] if entry.sequence is None else [1, *_parameter_numbers(entry.sequence)]
    return words(numbers)


class RoundMessage(NamedTuple):
    """A decoded ROUND, see `encode_round`."""

    forgotten: list[int]  # ids of sequences to drop
    entries: list[Entry]  # sequences to draft for
    budget: int
    reply: bool
    ahead: bool


def decode_round(payload: Words) -> RoundMessage:
    reader = Reader(payload)
    flags, budget = reader.number(0, 3), reader.number(0, MAX_OUTCOMES)
    forgotten = reader.numbers(reader.count())
    entries = [_read_entry(reader) for _ in range(reader.count())]
    reader.finish()
    return RoundMessage(forgotten, entries, budget, bool(flags & 1), bool(flags & 2))


def encode_proposals(proposals: Seq[Proposal]) -> Words:
    parts = [words([len(proposals)])]
    for proposal in proposals:
        tokens = proposal.token_ids
        distributions = proposal.distributions if tokens else None
        columns = distributions.shape[-1] if distributions is not None else 0
        parts.append(words([proposal.origin, len(tokens), columns, *tokens]))
        if distributions is not None:
            parts.append(distributions[: len(tokens)].double().cpu().contiguous().numpy().view(np.int64).ravel())
    return np.concatenate(parts)


def decode_proposals(payload: Words, num_works: int, vocab_size: int) -> list[Proposal]:
    """One proposal per work; token ids and distributions are validated."""
    reader = Reader(payload)
    reader.number(num_works, num_works)
    proposals = [_read_proposal(reader, vocab_size) for _ in range(num_works)]
    reader.finish()
    return proposals


def encode_prepared(
    prepared: Mapping[int, tuple[Seq[int], Prepared]], confidence: Mapping[int, Confidence] | None = None
) -> Words:
    """By sequence id: the draft under verification, and what was prepared for its outcomes.

    One table per sequence, drafts padded to one length: fast to decode, since the target waits for it.
    """
    parts = [words([len(prepared)])]
    for sequence_id, (verified, outcomes) in prepared.items():
        depth = max(map(len, outcomes.values()), default=0)
        table = np.full((len(outcomes), 2 + depth), -1, dtype=np.int32)
        sure = np.zeros((len(outcomes), depth))
        known = (confidence or {}).get(sequence_id, {})
        for i, ((accepted, token), draft) in enumerate(outcomes.items()):
            table[i, : 2 + len(draft)] = [accepted, token, *draft]
            sure[i, : len(draft)] = known.get((accepted, token), 0.0)
        parts.append(words([sequence_id, len(verified), depth, len(outcomes)]))
        parts += [packed(np.array(verified, dtype=np.int32)), packed(table), packed(_confidence_codes(sure))]
    return np.concatenate(parts)


def decode_prepared(payload: Words, vocab_size: int) -> dict[int, PreparedDrafts]:
    """By sequence id; token ids are validated."""
    reader = Reader(payload)
    found: dict[int, PreparedDrafts] = {}
    for _ in range(reader.number(0, reader.left)):
        sequence_id = reader.number(0)
        drafted, depth, count = (reader.number(0, 2 * reader.left) for _ in range(3))
        verified = reader.packed((drafted,), np.int32)
        table = reader.packed((count, 2 + depth), np.int32)
        confidence = reader.packed((count, depth), np.uint8)
        least = min(numbers.min(initial=0) for numbers in (verified, table[:, :2]))
        if least < 0 or max(tokens.max(initial=0) for tokens in (verified, table[:, 1:])) >= vocab_size:
            raise WireError(f"a number is negative, or a token not in 0..{vocab_size - 1}")
        if table[:, 0].max(initial=0) > drafted:
            raise WireError("more tokens are accepted than were drafted")
        found[sequence_id] = PreparedDrafts(tuple(verified.tolist()), table, confidence)
    reader.finish()
    return found


def max_reply_words(num_works: int, lookahead: int, vocab_size: int) -> int:
    """Maximum length of a valid PROPOSALS or PREPARED payload."""
    proposal = 3 + lookahead * (1 + vocab_size)
    prepared = 6 + lookahead + MAX_OUTCOMES * (2 + lookahead)
    return 1 + num_works * max(proposal, prepared)


def _draft_numbers(draft: Draft) -> list[int]:
    confidence = _confidence_codes(np.array(draft.confidence or (0.0,) * len(draft.token_ids)))
    tokens = packed(np.array(draft.token_ids, dtype=np.int32))
    return [len(draft.token_ids), *tokens.tolist(), *packed(confidence).tolist()]


def _confidence_codes(confidence: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """One byte each, to about 2 percent of 1 + confidence."""
    return np.round(_CONFIDENCE_STEPS * np.log2(1.0 + confidence)).clip(0, 255).astype(np.uint8)


def _confidence(codes: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = np.exp2(codes / _CONFIDENCE_STEPS) - 1.0
    return values


def _parameter_numbers(sequence: Sequence) -> list[int]:
    """Encodes what a draft depends on besides the tokens: seed, lengths, sampling parameters, stop tokens."""
    params, stops, bias = sequence.params, sequence.stop_token_ids, sequence.params.logit_bias
    seed = sequence.seed - (1 << 64) if sequence.seed > HIGHEST else sequence.seed  # the same bits
    counts = [min(getattr(params, name), HIGHEST) for name in _COUNTS]
    reals = [float_bits(getattr(params, name)) for name in _REALS]
    numbers = [seed, sequence.num_prompt, sequence.max_tokens, *counts, *reals, params.speculate]
    return [*numbers, len(stops), *stops, len(bias), *bias, *map(float_bits, bias.values())]


def _read_entry(reader: Reader) -> Entry:
    sequence_id, known = reader.number(0), reader.number(0)
    tokens = reader.numbers(reader.count(), low=0)
    lookahead, drafted = reader.number(0), reader.number(-1, 2 * reader.left)
    draft = _read_draft(reader, drafted) if drafted >= 0 else None
    sequence = _read_sequence(reader, sequence_id, tokens) if reader.number(0, 1) else None
    if sequence is not None and known:
        raise WireError(f"sequence {sequence_id} is new, but does not begin with its first token")
    return Entry(sequence_id, known, tokens, lookahead, draft, sequence)


def _read_draft(reader: Reader, length: int) -> Draft:
    tokens, codes = reader.packed((length,), np.int32), reader.packed((length,), np.uint8)
    if tokens.min(initial=0) < 0:
        raise WireError("a draft has a token below 0")
    return Draft(tuple(tokens.tolist()), tuple(_confidence(codes).tolist()))


def _read_sequence(reader: Reader, sequence_id: int, tokens: Seq[int]) -> Sequence:
    seed, num_prompt, max_tokens = reader.number() % (1 << 64), reader.number(1, len(tokens)), reader.number(1)
    counts = {name: reader.number(0) for name in _COUNTS}
    reals = {name: reader.real() for name in _REALS}
    speculate = bool(reader.number(0, 1))
    stops = frozenset(reader.numbers(reader.count(), low=0))
    bias = {token: reader.real() for token in reader.numbers(reader.count(), low=0)}
    most = max(1, max_tokens - num_prompt, counts["min_tokens"])
    try:
        params = SamplingParams(**counts, **reals, logit_bias=bias, max_new_tokens=most, speculate=speculate)  # type: ignore[arg-type]
    except RequestError as error:
        raise WireError(f"sampling parameters: {error}") from error
    request = Request(str(sequence_id), tuple(tokens[:num_prompt]), params)
    return Sequence(sequence_id, request, 0, seed, stops, max_tokens, tokens=list(tokens))


def _read_proposal(reader: Reader, vocab_size: int) -> Proposal:
    origin = Origin(reader.number(0, len(Origin) - 1))
    count, columns = reader.count(), reader.number(0)
    tokens = tuple(reader.numbers(count, low=0, high=vocab_size - 1))
    if not columns:
        return Proposal(tokens, origin=origin)
    if columns != vocab_size or not count:
        raise WireError(f"distributions of {columns} columns for {count} tokens and a vocabulary of {vocab_size}")
    distributions = reader.array(count * columns).view(np.float64).reshape(count, columns)
    if not (distributions.min(axis=1) >= 0).all() or not (abs(distributions.sum(axis=1) - 1) < 1e-3).all():
        raise WireError("distributions that are not probabilities")
    import torch  # slow to import, and needed for distributions only

    return Proposal(tokens, torch.from_numpy(distributions), origin)
