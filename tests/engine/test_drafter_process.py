"""A drafter in a process of its own: what crosses the wire, and that whatever happens to the process costs no text."""

from __future__ import annotations

import gc
import itertools
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fakes import VOCAB, Expected, make_harness, make_sequence, naive
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd.core import Proposal, SamplingParams, Sequence, Work
from ssd.decoding.drafter import Drafter
from ssd.drafting.process import LONGEST_PAUSE, ProcessDrafter, Worker, serve
from ssd.drafting.wire import (
    MAGIC,
    ORIGINS,
    Birth,
    Channel,
    ChannelClosed,
    Entry,
    Kind,
    Message,
    WireError,
    Words,
    decode_prepared,
    decode_proposals,
    decode_round,
    decode_setup,
    encode_prepared,
    encode_proposals,
    encode_round,
    encode_setup,
)

LOOKAHEAD = 4
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]

# --- the wire ---------------------------------------------------------------------------------------------------------

int64 = st.integers(-(1 << 63), (1 << 63) - 1)
tokens = st.lists(st.integers(0, 1 << 40), max_size=9)
sampling_params = st.builds(
    SamplingParams,
    temperature=st.floats(0, 100),
    top_k=st.integers(0, 1 << 80),
    top_p=st.floats(0, 1, exclude_min=True),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0, 100, exclude_min=True),
    presence_penalty=st.floats(-100, 100),
    frequency_penalty=st.floats(-100, 100),
    logit_bias=st.dictionaries(st.integers(0, 1 << 40), st.floats(-1000, 1000) | st.just(-math.inf), max_size=3),
    min_tokens=st.integers(0, 5),
    speculate=st.booleans(),
)
sequences = st.builds(
    lambda id, prompt, output, params, seed, stops, max_tokens: make_sequence(
        prompt, output, params=params, id=id, seed=seed, stop_token_ids=stops, max_tokens=max_tokens
    ),
    st.integers(0, (1 << 63) - 1),
    st.lists(st.integers(0, 1 << 40), min_size=1, max_size=9),
    tokens,
    sampling_params,
    st.integers(0, (1 << 64) - 1),
    st.frozensets(st.integers(0, 1 << 40), max_size=3),
    st.integers(1, 1 << 40),
)
entries = st.lists(
    st.builds(lambda s, k: Entry(s.id, 0, s.tokens, k, Birth.of(s)), sequences, st.integers(0, 9))
    | st.builds(Entry, st.integers(0, 9), st.integers(0, 99), tokens, st.integers(0, 9)),
    max_size=4,
)
rounds = st.tuples(st.lists(st.integers(0, 1 << 40), max_size=4), entries)


drafts = st.lists(st.integers(0, VOCAB - 1), max_size=LOOKAHEAD).map(tuple)
outcomes = st.dictionaries(st.tuples(st.integers(0, LOOKAHEAD), st.integers(0, VOCAB - 1)), drafts, max_size=5)
prepared = st.dictionaries(st.integers(0, 1 << 40), outcomes, max_size=3)


@st.composite
def proposals(draw: st.DrawFn) -> list[Proposal]:
    made = []
    for _ in range(draw(st.integers(0, 4))):
        drafted = tuple(draw(st.lists(st.integers(0, VOCAB - 1), max_size=LOOKAHEAD)))
        seed = draw(st.integers(0, 99))
        laws = torch.rand(len(drafted), VOCAB, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        laws = laws / laws.sum(-1, keepdim=True) if drafted and draw(st.booleans()) else None
        made.append(Proposal(drafted, laws, draw(st.sampled_from(ORIGINS))))
    return made


def channels() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


def carried(payload: Words, kind: Kind = Kind.ROUND, number: int = 7) -> Words:
    """The payload, as it comes out at the other end."""
    here, there = channels()
    here.post(Message(kind, number, payload))
    message = there.receive(timeout=0.0)
    assert message is not None
    assert (message.kind, message.round) == (kind, number)
    here.close()
    there.close()
    return message.payload


def relevant(params: SamplingParams) -> dict[str, Any]:
    reals = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
    exact = {name: getattr(params, name) for name in (*reals, "min_tokens", "speculate", "logit_bias")}
    return {**exact, "top_k": min(params.top_k, (1 << 63) - 1)}


@given(rounds)
def test_a_round_crosses_unchanged(round_: tuple[list[int], list[Entry]]) -> None:
    """Catches a field that is lost, swapped or rounded on the way: also seeds of 64 bits and biases of -inf."""
    forgotten, sent = decode_round(carried(encode_round(*round_)))
    assert forgotten == round_[0]
    for got, wanted in zip(sent, round_[1], strict=True):
        assert got.id == wanted.id
        assert (got.known, got.new_tokens, got.lookahead) == (wanted.known, wanted.new_tokens, wanted.lookahead)
        assert (got.birth is None) == (wanted.birth is None)
        if got.birth is not None and wanted.birth is not None:
            assert relevant(got.birth.params) == relevant(wanted.birth.params)
            for name in ("seed", "num_prompt", "max_tokens", "stop_token_ids"):
                assert getattr(got.birth, name) == getattr(wanted.birth, name)


@given(proposals())
def test_proposals_cross_unchanged(sent: list[Proposal]) -> None:
    """Catches laws that lose a bit, and proposals that come back for another work."""
    got = decode_proposals(carried(encode_proposals(sent), Kind.PROPOSALS), len(sent), VOCAB)
    for a, b in zip(got, sent, strict=True):
        assert (a.token_ids, a.origin, a.laws is None) == (b.token_ids, b.origin, b.laws is None)
        assert a.laws is None or torch.equal(a.laws, b.laws)


@given(prepared)
def test_what_is_prepared_crosses_unchanged(sent: dict[int, dict[tuple[int, int], tuple[int, ...]]]) -> None:
    payload = encode_prepared(sent)
    assert decode_prepared(carried(payload, Kind.PREPARED), VOCAB) == sent
    for wrong in (payload[:-1], np.append(payload, 0)):
        with pytest.raises(WireError):
            decode_prepared(wrong, VOCAB)


@given(st.dictionaries(st.text(), st.none() | st.integers() | st.text() | st.lists(st.floats(0, 1))))
def test_a_setup_crosses_unchanged(setup: dict[str, Any]) -> None:
    assert decode_setup(carried(encode_setup(setup), Kind.SETUP)) == setup


def decode_anything(payload: Words, num_works: int) -> None:
    decoders = (decode_setup, decode_round, lambda p: decode_prepared(p, VOCAB))
    for decode in (*decoders, lambda p: decode_proposals(p, num_works, VOCAB)):
        with suppress(WireError):
            decode(payload)


@given(rounds, proposals(), st.data())
def test_truncated_payloads_are_refused(
    round_: tuple[list[int], list[Entry]], sent: list[Proposal], data: st.DataObject
) -> None:
    """Catches reading past the end, and what is left over."""
    for payload, decode in (
        (encode_round(*round_), decode_round),
        (encode_proposals(sent), lambda p: decode_proposals(p, len(sent), VOCAB)),
    ):
        cut = data.draw(st.integers(0, len(payload) - 1))
        with pytest.raises(WireError):
            decode(payload[:cut])
        with pytest.raises(WireError):
            decode(np.append(payload, 0))


@settings(max_examples=200)
@given(rounds, proposals(), st.data())
def test_corrupted_payloads_do_no_harm(
    round_: tuple[list[int], list[Entry]], sent: list[Proposal], data: st.DataObject
) -> None:
    """Catches any error but a WireError, and memory that a corrupted number asks for."""
    for payload in (encode_round(*round_), encode_proposals(sent)):
        corrupted = payload.copy()
        for _ in range(data.draw(st.integers(1, 3))):
            corrupted[data.draw(st.integers(0, len(payload) - 1))] = data.draw(int64 | st.integers(-2, 20))
        decode_anything(corrupted, len(sent))


@given(st.lists(int64, max_size=30))
def test_noise_is_no_payload(words: list[int]) -> None:
    decode_anything(np.array(words, dtype=np.int64), 1)


@pytest.mark.parametrize(
    "header",
    [
        [0, 3, 1, 0, 0, 0],
        [MAGIC + 1, 3, 1, 0, 0, 0],
        [MAGIC, 9, 1, 0, 0, 0],
        [MAGIC, 3, -1, 0, 0, 0],
        [MAGIC, 3, 1, -1, 0, 0],
        [MAGIC, 3, 1, 0, -1, 0],
        [MAGIC, 3, 1, 0, 0, -1],
        [MAGIC, 3, 1, 0, 0, 101],
        [MAGIC, 3, 1, 0, 0, 1 << 62],
    ],
)
def test_senseless_headers_are_refused(header: list[int]) -> None:
    """Catches a length that is believed: with `limit` no more than that is ever taken in."""
    left, right = socket.socketpair()
    with left, right:
        left.sendall(np.array(header, dtype=np.int64).tobytes())
        with pytest.raises(WireError):
            Channel(right).receive(limit=100, timeout=0.0)


def test_a_long_message_never_blocks_its_sender() -> None:
    """Catches a send that waits for the reader, and a message that comes in pieces and is put together wrongly."""
    here, there = channels()
    payload = np.arange(1 << 20, dtype=np.int64)
    assert there.receive(timeout=0.0) is None
    here.post(Message(Kind.ROUND, 1, payload))
    here.post(Message(Kind.ROUND, 2))
    message = there.receive(timeout=0.0)
    assert message is None
    assert there.arriving
    while message is None:
        assert here.receive(timeout=0.0) is None  # sends on what is left
        message = there.receive(timeout=0.0)
    assert np.array_equal(message.payload, payload)
    last = there.receive(timeout=0.0)
    assert last is not None
    assert last.round == 2
    assert not there.waiting()
    here.close()
    assert there.waiting()
    with pytest.raises(ChannelClosed):
        there.receive()
    with pytest.raises(ChannelClosed):
        there.post(Message(Kind.READY))
    there.close()


# --- the worker's loop ------------------------------------------------------------------------------------------------


class Recorder(Drafter):
    """A drafter that proposes two tokens with their laws, and writes down what it is told."""

    lookahead = LOOKAHEAD

    def __init__(self) -> None:
        self.interrupted: Callable[[], bool] = lambda: True
        self.told: list[tuple[str, Any]] = []

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        facts = [(w.sequence.id, w.sequence.num_computed, w.num_tokens, w.lookahead) for w in works]
        self.told += [("propose", facts), ("tokens", [list(w.sequence.tokens) for w in works])]
        return [Proposal((1, 2), torch.full((2, VOCAB), 1 / VOCAB), "hit") for _ in works]

    def anticipate(self, works: Seq[Work]) -> None:
        assert not self.interrupted()
        self.told.append(("anticipate", [w.proposal.token_ids for w in works]))

    def forget(self, sequence: Sequence) -> None:
        self.told.append(("forget", sequence.id))


def test_the_worker_tells_its_drafter_what_it_heard() -> None:
    """Catches works that a drafter in the engine would not have been given, and rounds that are answered wrongly."""
    here, there = channels()
    recorder = Recorder()
    thread = threading.Thread(target=serve, args=(recorder, there))
    thread.start()
    params = SamplingParams(temperature=0.5)
    first, second = make_sequence([5, 6, 7], id=1, params=params, seed=1 << 63), make_sequence([8], [9], id=2)
    births = [Birth.of(first), Birth.of(second)]
    script = [
        ([], [Entry(1, 0, [5, 6, 7], 4, births[0]), Entry(2, 0, [8, 9], 3, births[1])]),
        ([2], [Entry(1, 3, [10, 11], 2)]),
    ]
    for number, round_ in enumerate(script):
        here.post(Message(Kind.ROUND, number, encode_round(*round_)))
        reply = here.receive(timeout=10)
        assert reply is not None
        assert reply.round == number
        for proposal in decode_proposals(reply.payload, len(round_[1]), VOCAB):
            assert (proposal.token_ids, proposal.origin) == ((1, 2), "hit")
            assert proposal.laws.tolist() == [[float(np.float32(1 / VOCAB))] * VOCAB] * 2
        until(lambda: recorder.told[-1][0] == "anticipate")
    here.close()
    thread.join(10)
    assert not thread.is_alive()
    there.close()
    assert recorder.told == [
        ("propose", [(1, 0, 3, 4), (2, 1, 1, 3)]),
        ("tokens", [[5, 6, 7], [8, 9]]),
        ("anticipate", [(1, 2), (1, 2)]),
        ("forget", 2),
        ("propose", [(1, 4, 1, 2)]),
        ("tokens", [[5, 6, 7, 10, 11]]),
        ("anticipate", [(1, 2)]),
    ]


# --- the process ------------------------------------------------------------------------------------------------------

# Knows texts and proposes how they go on. `sleeps`: seconds before the first, second, … proposals.
HONEST = """
import sys, time
from ssd.core import Proposal
from ssd.decoding.drafter import Drafter
from ssd.drafting.process import run

class Honest(Drafter):
    lookahead = 4

    def __init__(self, setup):
        self.texts, self.sleeps, self.manner = setup["texts"], setup.get("sleeps", []), setup.get("anticipate")
        self.interrupted, self.ahead = None, setup.get("ahead")

    def propose(self, works):
        if self.sleeps:
            time.sleep(self.sleeps.pop(0))
        return [Proposal(self.after(w.sequence.tokens)[: w.lookahead], origin="sibling") for w in works]

    def after(self, tokens):
        return next((tuple(t[len(tokens) :]) for t in self.texts if t[: len(tokens)] == tokens), ())

    def anticipate(self, works):
        while self.manner == "until interrupted" and not self.interrupted():
            time.sleep(0.001)
        time.sleep(self.manner if isinstance(self.manner, float) else 0)

    def outcomes(self, sequence):
        rest = self.after(sequence.tokens)[: 5 if self.ahead else 0]
        return {(i, token): self.after([*sequence.tokens, *rest[: i + 1]])[:4] for i, token in enumerate(rest)}

    def forget(self, sequence):
        pass

run(int(sys.argv[1]), Honest)
"""

# Speaks the wire by itself, and not always the truth.
LIAR = """
import os, socket, struct, sys, time
end = socket.socket(fileno=int(sys.argv[1]))
MAGIC = 0x5353445700000002

def send(kind, number, *words):
    end.sendall(struct.pack(f"={6 + len(words)}q", MAGIC, kind, number, 7, 5, len(words), *words))

def receive():
    magic, kind, number, _, _, length = struct.unpack("=6q", end.recv(48, socket.MSG_WAITALL))
    end.recv(8 * length, socket.MSG_WAITALL)
    return number

receive()
READY
while True:
    number = receive()
    ROUND
"""
GOOD = "send(4, number, 1, 0, 2, 0, 7, 8)"  # one proposal of two tokens
LIES = {
    "noise": "end.sendall(bytes(range(100)))",
    "noise after a reply": f"{GOOD}; end.sendall(bytes(100))",
    "two replies": f"{GOOD}; {GOOD}",
    "another kind": "send(2, number)",
    "the round before": "send(4, number - 1, 1, 0, 0, 0)",
    "no proposals": "send(4, number, 0)",
    "too many proposals": "send(4, number, 2, 0, 0, 0, 0, 0, 0)",
    "an id too high": f"send(4, number, 1, 0, 2, 0, 7, {VOCAB})",
    "an id below zero": "send(4, number, 1, 0, 2, 0, 7, -1)",
    "an unknown origin": "send(4, number, 1, 99, 0, 0)",
    "words too many": "send(4, number, 1, 0, 0, 0, 0)",
    "tokens too many": f"send(4, number, 1, 0, 3000, 0, {'1, ' * 3000})",
    "laws too narrow": "send(4, number, 1, 0, 1, 1, 7, 0)",
    "laws of nothing": f"send(4, number, 1, 0, 1, {VOCAB}, 7, {'0, ' * VOCAB})",
    "laws that are no numbers": f"send(4, number, 1, 0, 1, {VOCAB}, 7, {'0x7ff8000000000000, ' * VOCAB})",
    "an absurd length": "end.sendall(struct.pack('=6q', MAGIC, 4, number, 0, 0, 1 << 60))",
    "a length below zero": "end.sendall(struct.pack('=6q', MAGIC, 4, number, 0, 0, -1))",
    "half a reply, then nothing": "end.sendall(struct.pack('=7q', MAGIC, 4, number, 0, 0, 4, 1)); time.sleep(60)",
    "half a reply, then the end": "end.sendall(struct.pack('=7q', MAGIC, 4, number, 0, 0, 4, 1)); sys.exit()",
    "the end": "sys.exit()",
    "no reply": "time.sleep(60)",
    "prepared twice": f"{GOOD}; send(5, number, 0); send(5, number, 0)",
    "prepared for a round to come": f"{GOOD}; send(5, number + 1, 0)",
    "prepared long ago": f"{GOOD}; send(5, number - 2, 0)",
    "prepared an id too high": f"{GOOD}; send(5, number, 1, 0, 0, 1, 0, {VOCAB}, 0)",
    "prepared a draft that is not there": f"{GOOD}; send(5, number, 1, 0, 2, 1, 0, 7, 3, 1, 2)",
    "prepared far too much": f"{GOOD}; send(5, number, 1, 0, 1, 3000, {'0, 7, 1, 1, ' * 3000})",
}


class SkippingClock:
    """The real one, with leaps."""

    def __init__(self) -> None:
        self.leaps = 0.0

    def __call__(self) -> float:
        return time.monotonic() + self.leaps


class Nursery:
    """Makes drafters and remembers the processes that they had."""

    def __init__(self) -> None:
        self.pids: list[int] = []
        self.drafters: list[ProcessDrafter] = []
        self.clock = SkippingClock()

    def drafter(self, code: str, setup: dict[str, Any] | None = None, **options: Any) -> ProcessDrafter:
        def start() -> Worker:
            worker = Worker(setup or {}, [sys.executable, "-c", code])
            self.pids.append(worker.pid)
            return worker

        self.drafters.append(ProcessDrafter(start, LOOKAHEAD, VOCAB, clock=self.clock, **options))
        return self.drafters[-1]

    def honest(
        self, *texts: list[int], sleeps: Seq[float] = (), anticipate: Any = None, ahead: bool = False, **options: Any
    ) -> Any:
        setup = {"texts": texts, "sleeps": list(sleeps), "anticipate": anticipate, "ahead": ahead}
        drafter = self.drafter(HONEST, setup, **options)
        assert drafter.wait_ready(30)
        return drafter


def alive(pid: int) -> bool:
    """Whether there is such a process, zombies that belong to somebody else apart."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def nursery() -> Iterator[Nursery]:
    """After every test: nothing open, nobody left, no zombies."""
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    nursery = Nursery()
    yield nursery
    for drafter in nursery.drafters:
        drafter.close()
        drafter.close()
    assert len(os.listdir("/proc/self/fd")) == before
    assert not [pid for pid in nursery.pids if Path(f"/proc/{pid}").exists()]


def work_for(sequence: Sequence, lookahead: int = LOOKAHEAD) -> Work:
    return Work(sequence, sequence.num_pending, lookahead)


def propose_soon(drafter: ProcessDrafter, works: Seq[Work], limit: float = 1.5) -> list[Proposal]:
    """Proposes, and checks what holds whatever happens. The limit leaves room for a busy machine."""
    began = time.monotonic()
    proposals = drafter.propose(works)
    assert time.monotonic() - began < limit
    assert len(proposals) == len(works)
    return proposals


def until(condition: Callable[[], bool], seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.01)


def test_what_was_prepared_is_at_hand(nursery: Nursery) -> None:
    """Catches a round that waits for what it has, and one that takes what was prepared for another text."""
    drafter = nursery.honest(TEXT, ahead=True, patience=8.0)
    sequence = make_sequence(TEXT[:2])
    asked = 0
    for number, accepted in enumerate([0, 2, 1, LOOKAHEAD]):
        [proposal] = propose_soon(drafter, [work_for(sequence)])
        assert proposal.token_ids == tuple(TEXT[len(sequence.tokens) :][:LOOKAHEAD])
        asked += proposal.origin != "hit"
        assert drafter.replies == asked == 1
        assert drafter.at_hand == number
        sequence.tokens += proposal.token_ids[: accepted + 1]
        until(lambda: bool(drafter._settled(drafter._worker) and drafter._prepared))
    sequence.tokens[-1] += 1  # nothing is prepared for that: the worker is asked, and knows no such text
    assert propose_soon(drafter, [work_for(sequence)])[0].origin == "sibling"
    assert (drafter.replies, drafter.failures, drafter.late) == (2, 0, 0)


def test_drafts_come_from_the_process(nursery: Nursery) -> None:
    """Catches sequences that the worker does not follow: several at once, growing, joining and leaving."""
    texts = [TEXT, TEXT[::-1]]
    drafter = nursery.honest(*texts, patience=8.0)
    sequences = [make_sequence(text[:2], id=i) for i, text in enumerate(texts)]
    rounds: list[list[int]] = [[0], [0, 1], [1], [1, 0], [0]]
    for number, ids in enumerate(rounds):
        wanted = [tuple(texts[i][len(sequences[i].tokens) :][:LOOKAHEAD]) for i in ids]
        got = propose_soon(drafter, [work_for(sequences[i]) for i in ids])
        assert [(p.token_ids, p.origin) for p in got] == [(w, "sibling") for w in wanted]
        for i in ids:
            sequences[i].tokens += texts[i][len(sequences[i].tokens) :][: number + 1]
        if number == 3:
            drafter.forget(sequences[1])
    assert drafter.replies == len(rounds)
    assert (drafter.failures, drafter.restarts, drafter.late) == (0, 0, 0)
    assert 0 < drafter.hand_over_seconds <= drafter.wait_seconds


def test_rounds_that_want_nothing_do_not_wait(nursery: Nursery) -> None:
    drafter = nursery.honest(TEXT)
    assert drafter.propose([]) == []
    assert drafter.propose([work_for(make_sequence(TEXT[:3]), lookahead=0)]) == [Proposal()]
    assert (drafter.replies, drafter.late, drafter.wait_seconds) == (0, 0, 0.0)


def test_nothing_waits_for_a_worker_that_starts(nursery: Nursery) -> None:
    drafter = nursery.drafter(f"import time; time.sleep(1){HONEST}", {"texts": [TEXT]})
    works = [work_for(make_sequence(TEXT[:3]))]
    assert propose_soon(drafter, works) == [Proposal()]
    assert not drafter.wait_ready(0.0)
    assert drafter.wait_ready(30)
    assert (drafter.failures, drafter.late, drafter.wait_seconds) == (0, 0, 0.0)
    until(lambda: propose_soon(drafter, works) == [Proposal(tuple(TEXT[3:7]))])


def test_a_late_reply_is_dropped(nursery: Nursery) -> None:
    """Catches a stale reply that is taken for the present one, and rounds that wait for what is late already."""
    drafter = nursery.honest(TEXT, sleeps=[2.0], patience=0.1)
    sequence = make_sequence(TEXT[:3])
    began = time.monotonic()
    assert propose_soon(drafter, [work_for(sequence)]) == [Proposal()]
    sequence.tokens.append(TEXT[3])
    waited = drafter.wait_seconds
    for _ in range(5):
        assert propose_soon(drafter, [work_for(sequence)]) == [Proposal()]
    assert time.monotonic() - began < 2.0
    assert drafter.wait_seconds == waited
    assert drafter.late == 6
    until(lambda: propose_soon(drafter, [work_for(sequence)]) == [Proposal(tuple(TEXT[4:8]))])
    assert drafter.failures == 0


def test_patience_follows_the_replies(nursery: Nursery) -> None:
    """Catches a patience that is stuck: below what the replies take, or far above."""
    drafter = nursery.honest(TEXT, sleeps=[0.2] * 4, patience=0.06)
    works = [work_for(make_sequence(TEXT[:3]))]
    until(lambda: propose_soon(drafter, works) != [Proposal()])
    assert drafter.late > 0
    slow = drafter.patience
    assert slow > 0.1
    until(lambda: bool(propose_soon(drafter, works)) and drafter.patience < slow / 2)
    assert drafter.failures == 0


def test_an_anticipation_is_interrupted_by_the_next_round(nursery: Nursery) -> None:
    """Catches a worker that cannot be asked while it prepares."""
    drafter = nursery.honest(TEXT, anticipate="until interrupted", patience=8.0)
    for _ in range(3):
        assert propose_soon(drafter, [work_for(make_sequence(TEXT[:3]))]) == [Proposal(tuple(TEXT[3:7]))]


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_a_hung_worker_is_replaced(nursery: Nursery, size: int) -> None:
    """Catches rounds that wait for it, also with a prompt that its socket does not take, and a kill that it ignores."""
    prompt = (TEXT * (size // len(TEXT) + 1))[:size]
    drafter = nursery.honest(prompt + TEXT, patience=0.1, hang_limit=0.5)
    works = [work_for(make_sequence(prompt))]
    os.kill(nursery.pids[0], signal.SIGSTOP)
    until(lambda: propose_soon(drafter, works) == [Proposal()] and drafter.failures == 1)
    drafter.hang_limit = 5.0
    until(lambda: propose_soon(drafter, works) == [Proposal(tuple(TEXT[:4]))])
    assert (drafter.failures, drafter.restarts) == (1, 1)


@pytest.mark.parametrize("lie", LIES)
def test_lies_cost_no_text(nursery: Nursery, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    """Catches every lie that raises, blocks, reaches the text or leaves the liar at work."""
    code = LIAR.replace("READY", "send(2, 0)").replace("ROUND", LIES[lie])
    drafter = nursery.drafter(code, patience=0.1, hang_limit=0.2)
    assert drafter.wait_ready(30)
    params = SamplingParams(max_new_tokens=20)
    output = make_harness(drafter=drafter).run(TEXT[:5], params)
    assert output.token_ids == naive(TEXT[:5], params, max_model_len=64).token_ids
    works = [work_for(make_sequence(TEXT[:5]))]
    until(lambda: bool(propose_soon(drafter, works)) and drafter.failures >= 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * drafter.failures


@pytest.mark.parametrize("start", ["sys.exit()", "end.sendall(bytes(99))", "send(3, 0)", "send(2, 0, 5)", "1 / 0"])
def test_a_worker_that_fails_at_its_start_is_replaced(nursery: Nursery, start: str) -> None:
    drafter = nursery.drafter(LIAR.replace("READY", start).replace("ROUND", GOOD))
    assert not drafter.wait_ready(30)
    assert drafter.failures == 1
    works = [work_for(make_sequence(TEXT[:5]))]
    until(lambda: propose_soon(drafter, works) == [Proposal()] and drafter.failures >= 2)


def test_a_worker_that_never_gets_ready_is_replaced(nursery: Nursery) -> None:
    drafter = nursery.drafter("import time; time.sleep(60)", start_limit=30.0)
    works = [work_for(make_sequence(TEXT[:5]))]
    assert propose_soon(drafter, works) == [Proposal()]
    assert drafter.failures == 0
    nursery.clock.leaps += 31
    assert propose_soon(drafter, works) == [Proposal()]
    assert drafter.failures == 1


def test_pauses_double_up_to_a_limit() -> None:
    """Catches a worker that is started again and again, and one that is never."""
    now = 0.0
    attempts: list[float] = []

    def start() -> Worker:
        attempts.append(now)
        raise OSError("no such program")

    drafter = ProcessDrafter(start, LOOKAHEAD, VOCAB, clock=lambda: now)
    works = [work_for(make_sequence(TEXT[:5]))]
    while len(attempts) < 10:
        now += 0.01
        assert drafter.propose(works) == [Proposal()]
    pauses = [b - a for a, b in itertools.pairwise(attempts)]
    wanted = [min(0.1 * 2**i, LONGEST_PAUSE) for i in range(9)]
    assert pauses == pytest.approx(wanted, abs=0.03)
    assert (drafter.failures, drafter.restarts) == (10, 9)
    drafter.close()


def test_two_drafters_do_not_meet(nursery: Nursery) -> None:
    """Catches anything that two engines on a host would share, and an end of one that the other one's worker holds."""
    first, second = nursery.honest(TEXT), nursery.honest(TEXT[::-1])
    works = [work_for(make_sequence(TEXT[:3])), work_for(make_sequence(TEXT[::-1][:3], id=1))]
    until(lambda: [p.token_ids for p in propose_soon(first, works)] == [tuple(TEXT[3:7]), ()])
    first.close()
    assert not alive(nursery.pids[0])
    assert propose_soon(first, works) == [Proposal(), Proposal()]
    assert not first.wait_ready(1.0)
    until(lambda: [p.token_ids for p in propose_soon(second, works)] == [(), tuple(TEXT[::-1][3:7])])


ORPHANING = """
import os, signal, sys, time
from ssd.core import Request, SamplingParams, Sequence, Work
from ssd.drafting.process import ProcessDrafter, Worker

code, end = sys.argv[1:]
setup = {"texts": [[1, 2, 3, 4]], "anticipate": 0.5}
drafter = ProcessDrafter(lambda: Worker(setup, [sys.executable, "-c", code]), 4, 32)
assert drafter.wait_ready(30)
sequence = Sequence(0, Request("0", (1, 2), SamplingParams()), 0, 0, frozenset(), 99, tokens=[1, 2])
while not drafter.propose([Work(sequence, 2, 4)])[0].token_ids:
    time.sleep(0.01)
print(drafter.pid, flush=True)
eval(end)
"""


@pytest.mark.parametrize("end", ["sys.exit()", "os._exit(1)", "os.kill(os.getpid(), signal.SIGKILL)"])
def test_a_worker_does_not_outlive_its_engine(end: str) -> None:
    """Catches orphans, however the engine ended and while the worker was anticipating."""
    command = [sys.executable, "-c", ORPHANING, HONEST, end]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    pid = int(done.stdout)
    until(lambda: not alive(pid), seconds=10)
    assert done.stderr == b""


def test_a_drafter_that_is_dropped_takes_its_worker_along(nursery: Nursery) -> None:
    nursery.honest(TEXT)
    nursery.drafters.clear()
    gc.collect()
    assert not alive(nursery.pids[0])


def test_texts_stand_while_the_worker_is_killed_again_and_again(nursery: Nursery) -> None:
    """Catches a death that costs text or a request, a worker that does not come back, and drafts after that are wrong.

    A worker that lived for a minute is replaced after the shortest pause: the clock leaps by that before each kill.
    """
    params = [SamplingParams(max_new_tokens=40, temperature=0.8 * (i % 2), seed=i) for i in range(4)]
    prompts = [[*TEXT[: 2 + i], i] for i in range(4)]
    answers = [naive(prompt, p, max_model_len=64) for prompt, p in zip(prompts, params, strict=True)]
    texts = [prompt + answer.token_ids for prompt, answer in zip(prompts, answers, strict=True)]
    drafter = nursery.honest(*texts, patience=0.5)
    harness = make_harness(drafter=drafter)
    asked: dict[str, Expected] = {}
    kills = accepted_since = 0
    deadline = time.monotonic() + 60
    while kills < 20 or harness.engine.has_work:
        assert time.monotonic() < deadline
        if not harness.engine.has_work:
            for prompt, p, answer in zip(prompts, params, answers, strict=True):
                asked[harness.engine.add(prompt, p)] = answer
        before = harness.engine.metrics.spec_decode_num_accepted_tokens
        harness.step()
        accepted_since += harness.engine.metrics.spec_decode_num_accepted_tokens - before
        if accepted_since and kills < 20:
            assert drafter.pid is not None
            nursery.clock.leaps += 61
            os.kill(drafter.pid, signal.SIGKILL)
            kills, accepted_since = kills + 1, 0
    harness.engine.check()
    got = {i: Expected(o.token_ids, o.finish_reason or "abort") for i, o in harness.outputs.items()}
    assert got == asked
    assert drafter.failures >= 19
    assert drafter.restarts >= 19
    assert len(set(nursery.pids)) == 1 + drafter.restarts


def test_the_module_is_quiet_at_the_end() -> None:
    """Catches a trace of a worker whose engine went before it said anything."""
    here, there = socket.socketpair()
    with there:
        command = [sys.executable, "-m", "ssd.worker", str(there.fileno())]
        process = subprocess.Popen(command, pass_fds=(there.fileno(),), stderr=subprocess.PIPE)
    here.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")
