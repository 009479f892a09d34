"""The protocol between the engine and a worker: messages of 64-bit integers over a socket.

A message is a header (magic with version, kind, round, two times, length of the payload) and a payload in a fixed
layout; floats are sent as their bits, tables of drafts packed. Decoding validates everything: an invalid message raises
WireError, and no buffer is allocated by a length that was not checked. Knows nothing of processes or of how drafts are
made.
"""

from __future__ import annotations

import itertools
import json
import math
import select
import socket
import struct
import time
from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ssd.core import Origin, Proposal, SamplingParams, Sequence
from ssd.decoding.drafter import Confidence, Prepared
from ssd.errors import RequestError, SSDError

Words = npt.NDArray[np.int64]

MAGIC = 0x5353_4457_0000_0004  # "SSDW", version 4
HEADER_WORDS = 6
MAX_WORDS = 1 << 26  # of a payload: half a gigabyte
MAX_OUTCOMES = 256  # prepared for a sequence

_LOWEST, _HIGHEST = -(1 << 63), (1 << 63) - 1
_BYTES = 8  # of a word
_CHUNK = 1 << 20  # bytes of one read
_CONFIDENCE_STEPS = 18.0  # of a code, while 1 + confidence doubles
_GRACE = 0.005  # seconds after the timeout in which a message that is arriving is still read


class WireError(SSDError):
    """An invalid message."""


class ChannelClosed(WireError):
    """The other end was closed."""


class Kind(IntEnum):
    SETUP = 1  # to the worker, once: its configuration
    READY = 2  # from the worker, once: it can take rounds
    ROUND = 3  # to the worker: sequences to draft for
    PROPOSALS = 4  # from the worker: the drafts that a round asks for
    PREPARED = 5  # from the worker, at the end of a round: the drafts it has prepared for the round's outcomes
    TABLES = 6  # to another rank of a model: new entries of its block tables
    FORWARD = 7  # to another rank of a model: the forward pass to launch
    START = 8  # to a process of torchrun: start a rank, which gets a connection to this port
    END = 9  # to a process of torchrun: an engine was closed
    DRAFT = 10  # to another rank of a draft model: the piece of a draft run to launch


_KINDS = frozenset(Kind)


@dataclass(frozen=True, eq=False)
class Message:
    kind: Kind
    round: int = 0
    payload: Words = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    times: tuple[int, int] = (0, 0)  # ns. ROUND: time of the last round; from the worker: computing in all, for this


@dataclass(frozen=True)
class SequenceSetup:
    """What a draft of a sequence depends on besides its tokens; sent once per sequence."""

    seed: int
    num_prompt: int
    max_tokens: int
    stop_token_ids: frozenset[int]
    params: SamplingParams

    @classmethod
    def of(cls, sequence: Sequence) -> SequenceSetup:
        stops = sequence.stop_token_ids
        return cls(sequence.seed, sequence.num_prompt, sequence.max_tokens, stops, sequence.params)


class Draft(NamedTuple):
    """A draft that was prepared."""

    token_ids: tuple[int, ...] = ()
    confidence: tuple[float, ...] = ()  # of each token, where it is known

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
    draft: Draft | None = None  # that the round verifies; None: the worker is asked for it
    setup: SequenceSetup | None = None  # of a new sequence


@dataclass(frozen=True)
class PreparedDrafts:
    """The drafts that a worker has prepared for a sequence."""

    verified: tuple[int, ...]  # the draft under verification
    outcomes: list[list[int]]  # accepted tokens of it, the target's own token, the draft, then -1
    confidence: npt.NDArray[np.uint8]  # of these drafts' tokens, as `_confidence_codes`

    def find(self, decided: tuple[int, ...]) -> Draft | None:
        """The draft for the outcome that decided these tokens."""
        if not decided or self.verified[: len(decided) - 1] != decided[:-1]:
            return None
        wanted = [len(decided) - 1, decided[-1]]
        for row, codes in zip(self.outcomes, self.confidence, strict=True):
            if row[:2] == wanted:
                tokens = tuple(itertools.takewhile(lambda token: token >= 0, row[2:]))
                return Draft(tokens, _confidence(codes[: len(tokens)]))
        return None


# --- payloads ---------------------------------------------------------------------------------------------------------


def encode_setup(config: Mapping[str, Any]) -> Words:
    text = json.dumps(config).encode()
    padded = text + bytes(-len(text) % _BYTES)
    return np.concatenate((_words([len(text)]), np.frombuffer(padded, dtype=np.int64)))


def decode_setup(payload: Words) -> dict[str, Any]:
    reader = _Reader(payload)
    length = reader.number(0, reader.left * _BYTES)
    text = reader.array(-(-length // _BYTES)).tobytes()[:length]
    reader.finish()
    try:
        config = json.loads(text)
    except ValueError as error:
        raise WireError(f"the setup is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise WireError("the setup is not a JSON object")
    return config


def encode_round(forgotten: Seq[int], entries: Seq[Entry], *, reply: bool = True, ahead: bool = True) -> Words:
    """`reply`: the drafts asked for are to be sent; else they are only prepared for, and another worker sends them.

    `ahead`: what is prepared is to be sent, too; else it is kept, and looked up in when the next round asks.
    """
    words = [reply + 2 * ahead, len(forgotten), *forgotten, len(entries)]
    for entry in entries:
        words += [entry.id, entry.known, len(entry.new_tokens), *entry.new_tokens, entry.lookahead]
        words += [-1] if entry.draft is None else _draft_words(entry.draft)
        words.append(entry.setup is not None)
        if entry.setup is not None:
            words += _setup_words(entry.setup)
    return _words(words)


def decode_round(payload: Words) -> tuple[list[int], list[Entry], bool, bool]:
    """The ids of sequences to drop, the sequences to draft for, `reply` and `ahead`."""
    reader = _Reader(payload)
    flags = reader.number(0, 3)
    forgotten = reader.numbers(reader.count())
    entries = [_read_entry(reader) for _ in range(reader.count())]
    reader.finish()
    return forgotten, entries, bool(flags & 1), bool(flags & 2)


def encode_proposals(proposals: Seq[Proposal]) -> Words:
    parts = [_words([len(proposals)])]
    for proposal in proposals:
        tokens, distributions = proposal.token_ids, proposal.distributions
        if not tokens or distributions is None:
            parts.append(_words([int(proposal.origin), len(tokens), 0, *tokens]))
        else:
            parts.append(_words([int(proposal.origin), len(tokens), distributions.shape[-1], *tokens]))
            parts.append(distributions[: len(tokens)].double().cpu().contiguous().numpy().view(np.int64).ravel())
    return np.concatenate(parts)


def decode_proposals(payload: Words, num_works: int, vocab_size: int) -> list[Proposal]:
    """One proposal per work; token ids and distributions are validated."""
    reader = _Reader(payload)
    reader.number(num_works, num_works)
    proposals = [_read_proposal(reader, vocab_size) for _ in range(num_works)]
    reader.finish()
    return proposals


def most_proposal_words(num_works: int, lookahead: int, vocab_size: int) -> int:
    """Maximum length of a valid PROPOSALS payload."""
    return 1 + num_works * (3 + lookahead * (1 + vocab_size))


def encode_prepared(
    prepared: Mapping[int, tuple[Seq[int], Prepared]], confidence: Mapping[int, Confidence] | None = None
) -> Words:
    """By sequence id: the draft under verification, and what was prepared for its outcomes.

    One table per sequence, drafts padded to one length: fast to decode, since the target waits for it.
    """
    parts = [_words([len(prepared)])]
    for sequence_id, (verified, outcomes) in prepared.items():
        depth = max(map(len, outcomes.values()), default=0)
        table = np.full((len(outcomes), 2 + depth), -1, dtype=np.int32)
        sure = np.zeros((len(outcomes), depth))
        known = (confidence or {}).get(sequence_id, {})
        for i, ((accepted, token), draft) in enumerate(outcomes.items()):
            table[i, : 2 + len(draft)] = [accepted, token, *draft]
            sure[i, : len(draft)] = known.get((accepted, token), 0.0)
        parts.append(_words([sequence_id, len(verified), depth, len(outcomes)]))
        parts += [_packed(np.array(verified, dtype=np.int32)), _packed(table), _packed(_confidence_codes(sure))]
    return np.concatenate(parts)


def decode_prepared(payload: Words, vocab_size: int) -> dict[int, PreparedDrafts]:
    """By sequence id; token ids are validated."""
    reader = _Reader(payload)
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
        found[sequence_id] = PreparedDrafts(tuple(verified.tolist()), table.tolist(), confidence)
    reader.finish()
    return found


def most_prepared_words(num_works: int, lookahead: int) -> int:
    """Maximum length of a valid PREPARED payload."""
    return 1 + num_works * (6 + lookahead + MAX_OUTCOMES * (2 + lookahead))


def _draft_words(draft: Draft) -> list[int]:
    confidence = _confidence_codes(np.array(draft.confidence or (0.0,) * len(draft.token_ids)))
    tokens = _packed(np.array(draft.token_ids, dtype=np.int32))
    return [len(draft.token_ids), *tokens.tolist(), *_packed(confidence).tolist()]


def _confidence_codes(confidence: npt.NDArray[np.float64]) -> npt.NDArray[np.uint8]:
    """One byte each, to about 2 percent of 1 + confidence."""
    return np.round(_CONFIDENCE_STEPS * np.log2(1.0 + confidence)).clip(0, 255).astype(np.uint8)


def _confidence(codes: npt.NDArray[np.uint8]) -> tuple[float, ...]:
    return tuple((np.exp2(codes / _CONFIDENCE_STEPS) - 1.0).tolist())


def _packed(values: npt.NDArray[Any]) -> Words:
    """The bytes of an array, padded to words."""
    data = values.tobytes()
    return np.frombuffer(data + bytes(-len(data) % _BYTES), dtype=np.int64)


def _setup_words(setup: SequenceSetup) -> list[int]:
    params, stops, bias = setup.params, setup.stop_token_ids, setup.params.logit_bias
    seed = setup.seed - (1 << 64) if setup.seed > _HIGHEST else setup.seed  # the same bits
    counts = [min(params.top_k, _HIGHEST), min(params.min_tokens, _HIGHEST)]
    reals = [params.temperature, params.top_p, params.min_p]
    reals += [params.repetition_penalty, params.presence_penalty, params.frequency_penalty]
    words = [seed, setup.num_prompt, setup.max_tokens, *counts, *map(_bits, reals), params.speculate]
    return [*words, len(stops), *stops, len(bias), *bias, *map(_bits, bias.values())]


def _read_entry(reader: _Reader) -> Entry:
    sequence_id, known = reader.number(0), reader.number(0)
    tokens = reader.numbers(reader.count(), low=0)
    lookahead, drafted = reader.number(0), reader.number(-1, 2 * reader.left)
    draft = _read_draft(reader, drafted) if drafted >= 0 else None
    setup = _read_setup(reader) if reader.number(0, 1) else None
    if setup and (known or setup.num_prompt > len(tokens)):
        raise WireError(f"sequence {sequence_id} is new, but not told from its first token on")
    return Entry(sequence_id, known, tokens, lookahead, draft, setup)


def _read_draft(reader: _Reader, length: int) -> Draft:
    tokens, codes = reader.packed((length,), np.int32), reader.packed((length,), np.uint8)
    if tokens.min(initial=0) < 0:
        raise WireError("a draft has a token below 0")
    return Draft(tuple(tokens.tolist()), _confidence(codes))


def _read_setup(reader: _Reader) -> SequenceSetup:
    seed, num_prompt, max_tokens = reader.number() % (1 << 64), reader.number(1), reader.number(1)
    top_k, min_tokens = reader.number(0), reader.number(0)
    temperature, top_p, min_p, repetition, presence, frequency = (reader.real() for _ in range(6))
    speculate = bool(reader.number(0, 1))
    stops = frozenset(reader.numbers(reader.count(), low=0))
    biased = reader.numbers(reader.count(), low=0)
    try:
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition,
            presence_penalty=presence,
            frequency_penalty=frequency,
            logit_bias={token: reader.real() for token in biased},
            max_new_tokens=max(1, max_tokens - num_prompt, min_tokens),
            min_tokens=min_tokens,
            speculate=speculate,
        )
    except RequestError as error:
        raise WireError(f"sampling parameters: {error}") from error
    return SequenceSetup(seed, num_prompt, max_tokens, stops, params)


def _read_proposal(reader: _Reader, vocab_size: int) -> Proposal:
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


def _words(values: Iterable[int]) -> Words:
    return np.array(list(values), dtype=np.int64)


def _bits(value: float) -> int:
    word: int = struct.unpack("=q", struct.pack("=d", value))[0]
    return word


class _Reader:
    """Reads a payload from front to back, with bounds checks."""

    def __init__(self, payload: Words) -> None:
        self._payload = payload
        self._at = 0

    @property
    def left(self) -> int:
        return len(self._payload) - self._at

    def array(self, count: int) -> Words:
        if count > self.left:
            raise WireError(f"{count} words are announced, {self.left} are left")
        self._at += count
        return self._payload[self._at - count : self._at]

    def packed(self, shape: tuple[int, ...], dtype: type) -> npt.NDArray[Any]:
        """An array of `_packed`."""
        count = math.prod(shape)
        words = self.array(-(-count * np.dtype(dtype).itemsize // _BYTES))
        return words.view(dtype)[:count].reshape(shape)

    def numbers(self, count: int, low: int = _LOWEST, high: int = _HIGHEST) -> list[int]:
        values: list[int] = self.array(count).tolist()
        if values and not (low <= min(values) and max(values) <= high):
            raise WireError(f"a number is not in {low}..{high}")
        return values

    def number(self, low: int = _LOWEST, high: int = _HIGHEST) -> int:
        if not self.left:
            raise WireError("a number is missing at the end")
        value: int = self._payload.item(self._at)
        self._at += 1
        if not low <= value <= high:
            raise WireError(f"{value} is not in {low}..{high}")
        return value

    def count(self) -> int:
        """The number of items that follow, of at least one word each."""
        return self.number(0, self.left - 1)

    def real(self) -> float:
        return float(self.array(1).view(np.float64)[0])

    def finish(self) -> None:
        if self.left:
            raise WireError(f"{self.left} words too many")


# --- the channel ------------------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What went over a channel in one direction."""

    num_messages: int = 0
    num_bytes: int = 0


class Channel:
    """Complete messages over one end of a connection; non-blocking, partial messages are buffered."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self.sent, self.received = Traffic(), Traffic()
        self._socket = end
        self._unsent: deque[memoryview] = deque()
        self._partial = bytearray()  # of the message that is arriving

    @property
    def num_bytes(self) -> int:
        """Transferred, in both directions."""
        return self.sent.num_bytes + self.received.num_bytes

    @property
    def arriving(self) -> bool:
        """Whether part of a message has arrived."""
        return bool(self._partial)

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def address(self) -> str:
        """Of this end, of a connection over a network; "" of a socket pair."""
        name = self._socket.getsockname()
        return str(name[0]) if name else ""

    def waiting(self) -> bool:
        """Whether there is something to receive (or the other end was closed)."""
        return self._poll(select.POLLIN, 0.0)

    def post(self, message: Message) -> None:
        """Sends without blocking; the rest is sent by `receive` or `flush`."""
        header = _words([MAGIC, message.kind, message.round, *message.times, len(message.payload)])
        self._unsent.append(np.concatenate((header, message.payload)).data.cast("B"))
        self.sent.num_messages += 1
        self._write()

    def flush(self) -> None:
        """Waits until everything has been sent."""
        while self._unsent:
            self._poll(select.POLLOUT, math.inf)
            self._write()

    def receive(self, limit: int = MAX_WORDS, timeout: float = math.inf) -> Message | None:
        """The next message, of at most `limit` words of payload; None if it is not complete after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self._write()
            moved = self._read(limit)
            if not self._missing(limit):
                return self._take()
            left = deadline - time.monotonic()
            if moved and left > -_GRACE:
                continue
            if left <= 0:
                return None
            self._poll(select.POLLIN | (select.POLLOUT if self._unsent else 0), left)

    def close(self) -> None:
        self._socket.close()

    def _poll(self, events: int, timeout: float) -> bool:
        poller = select.poll()
        poller.register(self._socket, events)
        return bool(poller.poll(None if timeout == math.inf else timeout * 1000))

    def _write(self) -> None:
        try:
            while self._unsent:
                sent = self._socket.send(self._unsent[0])
                self.sent.num_bytes += sent
                rest = self._unsent.popleft()[sent:]
                if rest:
                    self._unsent.appendleft(rest)
        except BlockingIOError:
            return
        except ConnectionError as error:
            raise ChannelClosed("the other end is closed") from error

    def _read(self, limit: int) -> bool:
        """Reads what has arrived of the current message; returns whether there was anything."""
        try:
            data = self._socket.recv(min(self._missing(limit), _CHUNK))
        except BlockingIOError:
            return False
        except ConnectionError as error:
            raise ChannelClosed("the other end is closed") from error
        if not data:
            raise ChannelClosed("the other end is closed")
        self.received.num_bytes += len(data)
        self._partial += data
        return True

    def _missing(self, limit: int) -> int:
        """Bytes that are missing of the message, or of its header."""
        header = HEADER_WORDS * _BYTES
        if len(self._partial) < header:
            return header - len(self._partial)
        magic, kind, number, *times, length = struct.unpack_from(f"={HEADER_WORDS}q", self._partial)
        if magic != MAGIC or kind not in _KINDS or min(number, *times) < 0:
            raise WireError("this is not the beginning of a message")
        if not 0 <= length <= limit:
            raise WireError(f"a payload of {length} words, where {limit} are possible")
        return int(header + length * _BYTES - len(self._partial))

    def _take(self) -> Message:
        data, self._partial = self._partial, bytearray()
        self.received.num_messages += 1
        words = np.frombuffer(data, np.int64)
        kind, number, *times = (int(word) for word in words[1:5])
        return Message(Kind(kind), number, words[HEADER_WORDS:], (times[0], times[1]))
