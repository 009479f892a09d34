"""A drafter in a process of its own: whatever happens to the process costs no text."""

from __future__ import annotations

import functools
import gc
import itertools
import logging
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import mostly_slow
from draft_workers import GOOD, HONEST, LIAR, LIES
from fakes import VOCAB, Expected, make_harness, make_sequence, naive

import ssd
from ssd.assembly import draft_workers, drafters
from ssd.config import EngineConfig, SpeculationConfig
from ssd.core import Origin, Outcome, Proposal, SamplingParams, Sequence, Work
from ssd.decoding.drafter import Drafter, never
from ssd.drafting.process import ProcessDrafter
from ssd.drafting.replica import DraftReplica
from ssd.drafting.wire import (
    Draft,
    Entry,
    Kind,
    decode_prepared,
    decode_proposals,
    decode_round,
    encode_prepared,
    encode_proposals,
    encode_round,
)
from ssd.drafting.worker import WorkerDrafter, serve
from ssd.execution.state import SequenceState
from ssd.parallel.process import WORKER_COMMAND, Worker
from ssd.parallel.supervisor import LONGEST_PAUSE, Supervisor
from ssd.parallel.transport import MAGIC, READY, Channel, ChannelClosed, Message, WireError

LOOKAHEAD = 4
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]

# --- the worker's loop ------------------------------------------------------------------------------------------------


class Recorder(Drafter):
    """A drafter that proposes two tokens with their distributions, and writes down what it is told."""

    lookahead = LOOKAHEAD

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[str, Any]] = []

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        facts = [(w.sequence.id, w.start, w.num_tokens, w.lookahead) for w in works]
        self.told += [("propose", facts), ("tokens", [list(w.sequence.tokens) for w in works])]
        return [Proposal((1, 2), torch.full((2, VOCAB), 1 / VOCAB), Origin.HIT) for _ in works]

    def settle(self, works: Seq[Work]) -> None:
        self.told.append(("settle", [w.sequence.id for w in works]))

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        assert not interrupted()
        self.told.append(("prepare", [w.proposal.token_ids for w in works]))

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        found = [o and (o.token_ids, o.draft, o.origin) for o in outcomes]
        self.told.append(("observe", (list(zip((w.sequence.id for w in works), found, strict=True)), seconds)))

    def prepared(self, sequence: Sequence) -> dict[tuple[int, int], tuple[int, ...]]:
        return {(0, 3): (4, 5), (1, 6): (7,)} if sequence.id == 1 else {}

    def prepared_confidence(self, sequence: Sequence) -> dict[tuple[int, int], tuple[float, ...]]:
        return {(0, 3): (0.5, 0.25)}

    def forget(self, sequence: Sequence) -> None:
        self.told.append(("forget", sequence.id))


def channels() -> tuple[Channel, Channel]:
    left, right = socket.socketpair()
    return Channel(left), Channel(right)


def received(channel: Channel) -> Message:
    message = channel.receive(timeout=10)
    assert message is not None
    return message


def test_the_worker_tells_its_drafter_what_it_heard() -> None:
    """Catches works that a drafter in the engine would not have been given, and rounds that are answered wrongly."""
    here, there = channels()
    recorder = Recorder()
    thread = threading.Thread(target=serve, args=(WorkerDrafter(recorder), there), daemon=True)
    thread.start()
    params = SamplingParams(temperature=0.5)
    first, second = make_sequence([5, 6, 7], id=1, params=params, seed=1 << 63), make_sequence([8], [9], id=2)
    script = [
        ([], [Entry(1, 0, [5, 6, 7], 4, sequence=first), Entry(2, 0, [8, 9], 3, sequence=second)]),
        ([2], [Entry(1, 3, [1, 11], 2)]),
        ([], [Entry(1, 5, [1, 2, 3, 4], 2)]),
    ]
    for number, round_ in enumerate(script):
        here.post(Message(Kind.ROUND, number, encode_round(*round_[:2]), times=(number * 10**9, 0)))
        reply = received(here)
        assert (reply.kind, reply.round) == (Kind.PROPOSALS, number)
        for proposal in decode_proposals(reply.payload, len(round_[1]), VOCAB):
            assert (proposal.token_ids, proposal.origin) == ((1, 2), Origin.HIT)
            assert proposal.distributions.tolist() == [[float(np.float32(1 / VOCAB))] * VOCAB] * 2
        prepared = received(here)
        assert (prepared.kind, prepared.round) == (Kind.PREPARED, number)
        [(sequence_id, found)] = decode_prepared(prepared.payload, VOCAB).items()
        assert (sequence_id, found.verified) == (1, (1, 2))
        assert found.outcomes.tolist() == [[0, 3, 4, 5], [1, 6, 7, -1]]
        assert found.find((3,)) == Draft((4, 5), pytest.approx((0.5, 0.25), abs=0.05))
    here.post(Message(Kind.ROUND, 3, encode_round([], [Entry(1, 9, [1, 2, 6], 2, Draft((7,), (0.5,)))])))
    assert received(here).kind == Kind.PREPARED  # the round has its draft: no proposals
    here.close()
    thread.join(10)
    assert not thread.is_alive()
    there.close()
    assert recorder.told == [
        ("propose", [(1, 0, 3, 4), (2, 1, 1, 3)]),
        ("tokens", [[5, 6, 7], [8, 9]]),
        ("settle", [1, 2]),
        ("prepare", [(1, 2), (1, 2)]),
        ("forget", 2),
        ("observe", ([(1, ((1, 11), (1, 2), Origin.HIT)), (2, None)], 1.0)),
        ("propose", [(1, 4, 1, 2)]),
        ("tokens", [[5, 6, 7, 1, 11]]),
        ("settle", [1]),
        ("prepare", [(1, 2)]),
        ("observe", ([(1, None)], 2.0)),  # it is not known what of the draft stood
        ("propose", [(1, 8, 1, 2)]),
        ("tokens", [[5, 6, 7, 1, 11, 1, 2, 3, 4]]),
        ("settle", [1]),
        ("prepare", [(1, 2)]),
        ("observe", ([(1, ((1, 2, 6), (1, 2), Origin.HIT))], 0.0)),
        ("propose", []),
        ("tokens", []),
        ("settle", [1]),
        ("prepare", [(7,)]),
    ]


class OnDevice(Drafter):
    """Leaves what it proposes in the state: the last token and those after it, as many as there is room for."""

    def __init__(self, state: SequenceState) -> None:
        super().__init__()
        self.state = state

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        for work in works:
            last = self.state.token_ids[work.slot, int(self.state.length[work.slot]) - 1]
            self.state.drafts[work.slot] = last + torch.arange(LOOKAHEAD)
            self.state.origin[work.slot] = Origin.DRAFT
        return [Proposal(num_on_device=work.lookahead, origin=Origin.HIT) for work in works]

    def settle(self, works: Seq[Work]) -> None:
        """The last moment at which drafts in the state may change."""
        self.state.origin[[work.slot for work in works]] = int(Origin.JIT)


def test_the_worker_keeps_a_state_of_its_own() -> None:
    """Catches slots that two sequences have, tokens at the wrong place, and drafts that are fetched too early."""
    state = SequenceState(2, max_len=32, lookahead=LOOKAHEAD, vocab_size=VOCAB, device=torch.device("cpu"))
    worker = WorkerDrafter(OnDevice(state), state)

    def new(i: int) -> Entry:
        return Entry(i, 0, [5, 6, 7 + i], 2 + i, sequence=make_sequence([5, 6, 7 + i], id=i))

    def told(*entries: Entry) -> dict[int, tuple[int, ...]]:
        works = worker.propose(worker.update(entries, 0.0), [entry.draft for entry in entries])
        assert {work.proposal.origin for work in works} == {Origin.JIT}
        assert len({work.slot for work in works}) == len(works)
        return {work.sequence.id: work.proposal.token_ids for work in works}

    assert told(new(0), new(1)) == {0: (7, 8), 1: (8, 9, 10)}
    assert told(Entry(1, 3, [8, 9, 20], 4)) == {1: (20, 21, 22, 23)}
    slot = worker.sequences[1].slot
    assert state.token_ids[slot, : int(state.length[slot])].tolist() == [5, 6, 8, 8, 9, 20]
    assert int(state.num_accepted[slot]) == 2
    with pytest.raises(WireError, match="more sequences than slots"):
        told(new(2))
    with pytest.raises(WireError, match="should be known"):
        told(Entry(0, 4, [1], 2))
    with pytest.raises(WireError, match="should be known"):
        told(Entry(9, 1, [1], 2))
    worker.forget(1)
    worker.forget(1)
    assert told(new(2), Entry(0, 3, [1], 2)) == {2: (9, 10, 11, 12), 0: (1, 2)}
    assert worker.sequences[2].slot == slot
    assert int(state.length[slot]) == 3


def test_a_draft_that_is_given_is_in_the_worker_s_state() -> None:
    """Catches branches that are planned for another draft than the one under verification, or without its confidence.

    And look-ups after drafts that were not the worker's own: what of them was accepted is not known.
    """
    state = SequenceState(2, max_len=32, lookahead=LOOKAHEAD, vocab_size=VOCAB, device=torch.device("cpu"))
    worker = WorkerDrafter(Drafter(), state)
    sequence = make_sequence([5, 6], id=1)
    given = Draft((7, 8, 9), (0.5, 2.0, 0.25))
    [work] = worker.propose(worker.update([Entry(1, 0, [5, 6], LOOKAHEAD, given, sequence)], 0.0), [given])
    assert (work.proposal.token_ids, work.proposal.origin) == ((7, 8, 9), Origin.HIT)
    assert state.drafts[work.slot].tolist() == [7, 8, 9, 0]
    assert state.confidence[work.slot].tolist() == [0.5, 2.0, 0.25, 0.0]
    assert int(state.origin[work.slot]) == Origin.HIT
    for known, new, accepted in [(2, [7, 8, 3], 2), (5, [7, 1, 3], -1), (8, [], -1), (8, [4], 0)]:
        [work] = worker.propose(worker.update([Entry(1, known, new, LOOKAHEAD, given)], 0.0), [given])
        assert work.sequence.last_accepted == int(state.num_accepted[work.slot]) == accepted


# --- what the worker is told ------------------------------------------------------------------------------------------


class Listener:
    """In the place of a worker: a thread that notes what it is told, and answers with nothing.

    It prepares (0, 7) of every sequence, and says so only with the answer to the next round: too late.
    """

    pid, exited = 0, True

    def __init__(self) -> None:
        self.channel, self._theirs = channels()
        self.rounds: list[tuple[list[int], list[Entry], float]] = []
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()

    def _listen(self) -> None:
        with suppress(ChannelClosed):
            self._theirs.post(Message(READY))
            prepared: Message | None = None
            while message := self._theirs.receive():
                forgotten, entries, *_ = decode_round(message.payload)
                self.rounds.append((forgotten, entries, message.times[0] / 1e9))
                if prepared is not None:
                    self._theirs.post(prepared)
                payload = encode_proposals([Proposal()] * len(entries))
                self._theirs.post(Message(Kind.PROPOSALS, message.round, payload))
                ready = encode_prepared({entry.id: ((), {(0, 7): (8, 9)}) for entry in entries})
                prepared = Message(Kind.PREPARED, message.round, ready)
        self._theirs.close()

    def die(self) -> None:
        self._theirs._socket.shutdown(socket.SHUT_RDWR)
        self._thread.join(10)

    def kill(self) -> None:
        self.channel.close()
        self._thread.join(10)

    close = kill


def test_what_the_worker_is_told() -> None:
    """Catches tokens that are told twice, and a loss that leaves traces."""
    listeners: list[Listener] = []

    def start() -> Any:
        listeners.append(Listener())
        return listeners[-1]

    now = 0.0
    drafter = ProcessDrafter([start], LOOKAHEAD, VOCAB, clock=lambda: now, patience=8.0)
    assert drafter.wait_ready(10)
    first, second = begun([5, 6], id=1), begun([8, 9], id=2)

    def told(*sequences: Sequence, forgotten: Seq[int] = ()) -> list[tuple[Any, ...]]:
        heard = len(listeners[-1].rounds)
        assert drafter.propose([work_for(sequence) for sequence in sequences]) == [Proposal()] * len(sequences)
        assert len(listeners[-1].rounds) == heard + 1
        gone, entries, seconds = listeners[-1].rounds[-1]
        assert gone == list(forgotten)
        assert seconds == pytest.approx(drafter._round_seconds)
        assert all(e.draft is None for e in entries)
        return [(e.known, e.new_tokens, e.sequence is not None) for e in entries]

    commit(drafter, work_for(first), [1])  # before the worker knows of it
    assert told(first) == [(0, [5, 6, 1], True)]
    commit(drafter, work_for(first), [2, 3], 1)
    assert told(first, second) == [(3, [2, 3], False), (0, [8, 9], True)]
    drafter.observe([work_for(second)], [None], 0.25)  # a prefill chunk
    assert told(second) == [(2, [], False)]
    commit(drafter, work_for(second), [7])  # what was prepared for that comes too late
    assert told(second) == [(2, [7], False)]
    commit(drafter, work_for(first), [4])
    commit(drafter, work_for(first), [4])
    drafter.forget(second)
    drafter.forget(second)
    assert told(first, forgotten=[2]) == [(5, [4, 4], False)]
    assert told(second) == [(0, [8, 9, 7], True)]
    commit(drafter, work_for(first), [1, 2, 3], 2)
    drafter.forget(second)
    listeners[-1].die()
    assert drafter.propose([work_for(second)]) == [Proposal()]
    now += 1.0
    assert drafter.propose([work_for(second)]) == [Proposal()]
    assert drafter.wait_ready(10)
    assert len(listeners) == 2
    assert told(first, second) == [(0, first.tokens, True), (0, [8, 9, 7], True)]
    assert (drafter.at_hand, drafter.replicas[0].supervisor.failures) == (0, 1)
    drafter.close()


def test_a_message_that_arrives_in_pieces_is_a_sign_of_life(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a worker that is given up while it sends, and one that is not though it has stopped sending."""
    ours, theirs = socket.socketpair()
    worker: Any = SimpleNamespace(channel=Channel(ours), pid=0, exited=True, close=ours.close, kill=ours.close)
    now = 0.0
    supervisor = Supervisor("it", lambda: worker, clock=lambda: now, hang_limit=1.0, start_limit=2.0)
    replica = DraftReplica(supervisor, LOOKAHEAD, VOCAB)
    ready = struct.pack("=6q", MAGIC, READY, 0, 0, 0, 0)
    for i in range(0, len(ready), 8):
        theirs.sendall(ready[i : i + 8])
        now += 1.9
        assert replica.available() == (i + 8 == len(ready))
    assert replica.supervisor.ready
    replica.send([work_for(begun(TEXT[:3]))], [None], 0.0, budget=16, reply=True, ahead=True)
    reply = struct.pack("=9q", MAGIC, Kind.PROPOSALS, 1, 0, 0, 3, 1, 2, 3)
    for i in range(0, len(reply) - 8, 8):
        theirs.sendall(reply[i : i + 8])
        now += 0.9
        assert replica.receive(0.0) is None
    assert replica.supervisor.failures == 0
    now += 1.1
    assert replica.receive(0.0) is None
    assert replica.supervisor.failures == 1
    assert "silent for 1.1 s" in caplog.text
    replica.close()
    theirs.close()


# --- the process ------------------------------------------------------------------------------------------------------


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
        return self.replicas((code, setup or {}), **options)

    def replicas(self, *workers: tuple[str, dict[str, Any]], **options: Any) -> ProcessDrafter:
        """A drafter with one worker of each kind."""

        def start(code: str, setup: dict[str, Any]) -> Worker:
            worker = Worker(setup, [sys.executable, "-c", code])
            self.pids.append(worker.pid)
            return worker

        starts = [functools.partial(start, *each) for each in workers]
        self.drafters.append(ProcessDrafter(starts, LOOKAHEAD, VOCAB, clock=self.clock, **options))
        return self.drafters[-1]

    def honest(
        self, *texts: list[int], sleeps: Seq[float] = (), prepare: Any = None, ahead: bool = False, **options: Any
    ) -> Any:
        setup = {"texts": texts, "sleeps": list(sleeps), "prepare": prepare, "ahead": ahead}
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
    assert len(os.listdir("/proc/self/fd")) <= before  # a server of other tests may close a connection meanwhile
    assert not [pid for pid in nursery.pids if Path(f"/proc/{pid}").exists()]


def begun(tokens: Seq[int], id: int = 0) -> Sequence:
    """A sequence whose first token is decided: before that it gets no draft."""
    return make_sequence(tokens[:-1], tokens[-1:], id=id)


def work_for(sequence: Sequence, lookahead: int = LOOKAHEAD) -> Work:
    return Work(sequence, sequence.num_pending, sequence.kv.num_computed, lookahead=lookahead)


def commit(drafter: ProcessDrafter, work: Work, new: Seq[int], num_accepted: int = 0) -> None:
    """What a round decided: the first `num_accepted` of the new tokens had been drafted."""
    assert len(new) == num_accepted + 1
    work.sequence.tokens += new
    drafter.observe([work], [Outcome(tuple(new), (), work.proposal.token_ids, work.proposal.origin)], 0.01)


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
    sequence = begun(TEXT[:2])
    asked = 0
    for number, accepted in enumerate([0, 2, 1, LOOKAHEAD]):
        work = work_for(sequence)
        [proposal] = propose_soon(drafter, [work])
        rest = TEXT[len(sequence.tokens) :]
        assert proposal.token_ids == tuple(rest[:LOOKAHEAD])
        asked += proposal.origin is not Origin.HIT
        assert drafter.replies == asked == 1
        assert drafter.at_hand == number
        until(lambda: bool(drafter.replicas[0].available() and drafter.replicas[0]._prepared))
        commit(drafter, work.with_proposal(proposal), rest[: accepted + 1], accepted)
    [proposal] = propose_soon(drafter, [work_for(sequence)])
    assert (proposal.origin, drafter.at_hand) == (Origin.HIT, 4)
    until(lambda: bool(drafter.replicas[0].available() and drafter.replicas[0]._prepared))
    commit(drafter, work_for(sequence).with_proposal(proposal), [VOCAB - 1])  # nothing is prepared for that
    assert propose_soon(drafter, [work_for(sequence)]) == [Proposal()]  # the worker knows no such text
    assert (drafter.replies, drafter.replicas[0].supervisor.failures, drafter.late) == (2, 0, 0)


def test_one_message_each_way_where_most_rounds_hit(nursery: Nursery) -> None:
    """Catches proposals that are sent though the engine has the draft. The first round's are asked for."""
    drafter = nursery.honest(TEXT, ahead=True, patience=8.0)
    channel = drafter.replicas[0].supervisor.channel
    sequence = begun(TEXT[:2])
    for _ in range(6):
        work = work_for(sequence)
        work = work.with_proposal(propose_soon(drafter, [work])[0])
        until(lambda: bool(drafter.replicas[0].available() and drafter.replicas[0]._prepared))
        commit(drafter, work, TEXT[len(sequence.tokens) :][:2], 1)
    assert channel.sent.num_messages == 6 + 1  # and the setup
    assert channel.received.num_messages == 6 + 2  # READY, and the first round's proposals


def test_one_message_each_way_where_most_rounds_miss(nursery: Nursery) -> None:
    """Catches drafts that are sent ahead in vain: some sequence has to be asked for in each round."""
    drafter = nursery.honest(TEXT, ahead=True, patience=8.0)
    channel = drafter.replicas[0].supervisor.channel
    sequences = [begun(TEXT[:2]), begun([9, 9, 9], id=1)]  # the worker has only heard of the first
    for number in range(20):
        before = channel.sent.num_messages, channel.received.num_messages
        propose_soon(drafter, [work_for(sequence) for sequence in sequences])
        if number > 10:
            assert (channel.sent.num_messages, channel.received.num_messages) == (before[0] + 1, before[1] + 1)


def test_branches_are_sent_to_whoever_watches_and_waited_for_once_a_round(nursery: Nursery) -> None:
    """Catches branches that stay in the process where most rounds miss, and an observer that waits for what is late."""
    drafter = nursery.honest(TEXT, ahead=True, patience=8.0, prepare=0.02)
    sequence, unknown = begun(TEXT[:2]), begun([9, 9, 9], id=1)
    for _ in range(12):  # after which what is prepared is not sent ahead
        propose_soon(drafter, [work_for(sequence), work_for(unknown)])
    drafter.prepared(sequence)  # the next round's is sent
    propose_soon(drafter, [work_for(sequence), work_for(unknown)])
    rest = TEXT[2:]
    expected = {(i, rest[i]): tuple(rest[i + 1 : i + 5]) for i in range(LOOKAHEAD + 1)}
    assert drafter.prepared(sequence) == expected
    assert drafter.prepared(unknown) == {}
    assert drafter.prepared(begun(TEXT[:4])) == {}, "the worker was not told of a round after these tokens"
    os.kill(nursery.pids[0], signal.SIGSTOP)
    propose_soon(drafter, [work_for(sequence), work_for(unknown)], limit=20)
    drafter.prepared(sequence)
    began = time.monotonic()
    assert [drafter.prepared(sequence) for _ in range(20)] == [{}] * 20
    assert time.monotonic() - began < drafter.patience
    os.kill(nursery.pids[0], signal.SIGCONT)  # it ends when it is told to


def test_what_was_prepared_is_for_the_outcome_of_its_own_round(nursery: Nursery) -> None:
    """Catches a draft that is taken for its last token alone: after two rounds, or after another number of tokens."""
    text = [3, 1, 7, 7, 8, 9, 2, 6, 5, 3, 5, 8]
    drafter = nursery.honest(text, ahead=True, patience=8.0)
    sequence = begun(text[:2])
    propose_soon(drafter, [work_for(sequence)])
    until(lambda: bool(drafter.replicas[0].available() and drafter.replicas[0]._prepared))
    commit(drafter, work_for(sequence), [7])  # prepared for, but then the same once more
    commit(drafter, work_for(sequence), [7])
    [proposal] = propose_soon(drafter, [work_for(sequence)])
    assert (proposal.origin, proposal.token_ids) == (Origin.HIT, (8, 9, 2, 6))  # both together are an outcome
    assert (drafter.replies, drafter.at_hand) == (1, 1)
    until(lambda: bool(drafter.replicas[0].available() and drafter.replicas[0]._prepared))
    drafter.observe([work_for(sequence)], [None], 0.01)  # a prefill chunk says nothing
    commit(drafter, work_for(sequence).with_proposal(proposal), [8, 9], 1)
    [proposal] = propose_soon(drafter, [work_for(sequence)])
    assert (proposal.origin, proposal.token_ids) == (Origin.HIT, (2, 6, 5, 3))


def test_the_first_token_of_a_sequence_waits_for_no_draft(nursery: Nursery) -> None:
    """The worker reads a long prompt meanwhile, and prepares for what the target may decide."""
    drafter = nursery.honest(TEXT, ahead=True, sleeps=[0.5], patience=8.0)
    sequence = make_sequence(TEXT[:2])
    assert drafter.propose([work_for(sequence)]) == [Proposal()]
    assert drafter.wait_seconds == 0
    until(lambda: bool(drafter.replicas[0].available() and drafter.replicas[0]._prepared))
    commit(drafter, work_for(sequence), TEXT[2:3])
    assert propose_soon(drafter, [work_for(sequence)]) == [Proposal(tuple(TEXT[3:7]))]
    assert (drafter.replies, drafter.at_hand) == (0, 2)


def test_a_worker_catches_up_while_nobody_waits(nursery: Nursery) -> None:
    """Catches rounds that wait until a worker has read what it rested for; few tokens are read by the way."""
    text = list(range(1, 31)) * 10
    drafter = nursery.honest(text)
    sequence = begun(text[:200])
    commit(drafter, work_for(sequence), text[200:201])
    assert not drafter.catch_up([work_for(sequence)])
    assert drafter.wait_seconds == 0
    until(lambda: drafter.catch_up([work_for(sequence)]))
    commit(drafter, work_for(sequence), text[201:220], 18)
    assert drafter.catch_up([work_for(sequence)])  # nothing is sent for these
    assert drafter.replicas[0].num_unknown(sequence) == 19
    assert propose_soon(drafter, [work_for(sequence)])[0].token_ids == tuple(text[220 : 220 + LOOKAHEAD])


def test_drafts_come_from_the_process(nursery: Nursery) -> None:
    """Catches sequences that the worker does not follow: several at once, growing, joining and leaving."""
    texts = [TEXT, TEXT[::-1]]
    drafter = nursery.honest(*texts, patience=8.0)
    sequences = [begun(text[:2], id=i) for i, text in enumerate(texts)]
    rounds: list[list[int]] = [[0], [0, 1], [1], [1, 0], [0]]
    for number, ids in enumerate(rounds):
        wanted = [tuple(texts[i][len(sequences[i].tokens) :][:LOOKAHEAD]) for i in ids]
        got = propose_soon(drafter, [work_for(sequences[i]) for i in ids])
        assert [(p.token_ids, p.origin) for p in got] == [(w, Origin.SIBLING) for w in wanted]
        for i in ids:
            commit(drafter, work_for(sequences[i]), texts[i][len(sequences[i].tokens) :][: number + 1], number)
        if number == 3:
            drafter.forget(sequences[1])
    assert drafter.replies == len(rounds)
    assert (drafter.replicas[0].supervisor.failures, drafter.replicas[0].supervisor.restarts, drafter.late) == (0, 0, 0)
    assert 0 < drafter.stats.hand_over_seconds <= drafter.wait_seconds
    assert drafter.stats.busy_seconds == 0.125 * len(rounds)


def test_rounds_that_want_nothing_do_not_wait(nursery: Nursery) -> None:
    drafter = nursery.honest(TEXT)
    assert drafter.propose([]) == []
    assert drafter.propose([work_for(begun(TEXT[:3]), lookahead=0)]) == [Proposal()]
    assert (drafter.replies, drafter.late, drafter.wait_seconds) == (0, 0, 0.0)


def test_nothing_waits_for_a_worker_that_starts(nursery: Nursery) -> None:
    drafter = nursery.drafter(f"import time; time.sleep(0.5){HONEST}", {"texts": [TEXT]})
    works = [work_for(begun(TEXT[:3]))]
    assert propose_soon(drafter, works) == [Proposal()]
    assert not drafter.wait_ready(0.0)
    assert drafter.wait_ready(30)
    assert (drafter.replicas[0].supervisor.failures, drafter.late, drafter.wait_seconds) == (0, 0, 0.0)
    until(lambda: propose_soon(drafter, works) == [Proposal(tuple(TEXT[3:7]))])


def test_a_late_reply_is_dropped(nursery: Nursery) -> None:
    """Catches a stale reply that is taken for the present one, and rounds that wait for what is late already."""
    drafter = nursery.honest(TEXT, sleeps=[1.2], patience=0.1)
    sequence = begun(TEXT[:3])
    began = time.monotonic()
    assert propose_soon(drafter, [work_for(sequence)]) == [Proposal()]
    commit(drafter, work_for(sequence), TEXT[3:4])
    waited = drafter.wait_seconds
    for _ in range(5):
        assert propose_soon(drafter, [work_for(sequence)]) == [Proposal()]
    assert time.monotonic() - began < 1.2
    assert drafter.wait_seconds == waited
    assert drafter.late == 6
    until(lambda: propose_soon(drafter, [work_for(sequence)]) == [Proposal(tuple(TEXT[4:8]))])
    assert drafter.replicas[0].supervisor.failures == 0


def test_a_worker_that_is_late_again_and_again_is_asked_again(nursery: Nursery) -> None:
    """Catches late replies that are dropped and still counted as due: the worker would never be sent a round again."""
    drafter = nursery.honest(TEXT, sleeps=[0.3] * 4, patience=0.1)
    drafter._reply.add = lambda _: None  # patience stays as it is
    works = [work_for(begun(TEXT[:3]))]
    until(lambda: propose_soon(drafter, works) == [Proposal(tuple(TEXT[3:7]))])
    assert drafter.late >= 4
    assert drafter.replicas[0].supervisor.failures == 0


def test_patience_follows_the_replies(nursery: Nursery) -> None:
    """Catches a patience that is stuck: below what the replies take, or far above."""
    drafter = nursery.honest(TEXT, sleeps=[0.2] * 4, patience=0.06)
    works = [work_for(begun(TEXT[:3]))]
    until(lambda: propose_soon(drafter, works) != [Proposal()])
    assert drafter.late > 0
    slow = drafter.patience
    assert slow > 0.1
    until(lambda: bool(propose_soon(drafter, works)) and drafter.patience < slow / 2)
    assert drafter.replicas[0].supervisor.failures == 0


def test_preparing_is_interrupted_by_the_next_round(nursery: Nursery) -> None:
    """Catches a worker that cannot be asked while it prepares."""
    drafter = nursery.honest(TEXT, prepare="until interrupted", patience=8.0)
    for _ in range(3):
        assert propose_soon(drafter, [work_for(begun(TEXT[:3]))]) == [Proposal(tuple(TEXT[3:7]))]


@pytest.mark.parametrize("size", [3, pytest.param(1 << 20, marks=pytest.mark.slow)])
def test_a_hung_worker_is_replaced(nursery: Nursery, size: int) -> None:
    """Catches rounds that wait for it, also with a prompt that its socket does not take, and a kill that it ignores."""
    prompt = (TEXT * (size // len(TEXT) + 1))[:size]
    drafter = nursery.honest(prompt + TEXT, patience=0.1, hang_limit=0.5)
    works = [work_for(begun(prompt))]
    os.kill(nursery.pids[0], signal.SIGSTOP)
    until(lambda: propose_soon(drafter, works) == [Proposal()] and drafter.replicas[0].supervisor.failures == 1)
    drafter.replicas[0].supervisor.hang_limit = 5.0
    until(lambda: propose_soon(drafter, works) == [Proposal(tuple(TEXT[:4]))])
    assert (drafter.replicas[0].supervisor.failures, drafter.replicas[0].supervisor.restarts) == (1, 1)


@pytest.mark.parametrize(
    "lie", [pytest.param(lie, marks=[] if i % 3 == 0 else pytest.mark.slow) for i, lie in enumerate(LIES)]
)
def test_lies_cost_no_text(nursery: Nursery, lie: str, caplog: pytest.LogCaptureFixture) -> None:
    """Catches every lie that raises, blocks, reaches the text or leaves the liar at work."""
    code = LIAR.replace("READY", "send(2, 0)").replace("ROUND", LIES[lie])
    drafter = nursery.drafter(code, patience=0.1, hang_limit=0.2)
    assert drafter.wait_ready(30)
    params = SamplingParams(max_new_tokens=20)
    output = make_harness(drafter=drafter).run(TEXT[:5], params)
    assert output.token_ids == naive(TEXT[:5], params, max_model_len=64).token_ids
    works = [work_for(begun(TEXT[:5]))]
    until(lambda: bool(propose_soon(drafter, works)) and drafter.replicas[0].supervisor.failures >= 2)
    assert [record.levelname for record in caplog.records] == ["WARNING"] * drafter.replicas[0].supervisor.failures


def test_the_health_of_the_process_is_logged(nursery: Nursery, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a process that starts, is ready, is lost or starts again without a word."""
    code = LIAR.replace("READY", "send(2, 0)").replace("ROUND", next(iter(LIES.values())))
    with caplog.at_level(logging.INFO, logger="ssd"):
        drafter = nursery.drafter(code, patience=0.1, hang_limit=0.2)
        assert drafter.wait_ready(30)
        works = [work_for(begun(TEXT[:5]))]
        until(lambda: bool(propose_soon(drafter, works)) and drafter.replicas[0].supervisor.restarts > 0)
    first, second = nursery.pids[:2]
    said = [record.getMessage() for record in caplog.records]
    assert said[:2] == [f"the drafter's process {first} was started", f"the drafter's process {first} is ready"]
    assert "was lost" in said[2]
    assert said[3] == f"the drafter's process {second} was started"


@pytest.mark.parametrize("start", ["sys.exit()", "end.sendall(bytes(99))", "send(3, 0)", "send(2, 0, 5)", "1 / 0"])
def test_a_worker_that_fails_at_its_start_is_replaced(nursery: Nursery, start: str) -> None:
    drafter = nursery.drafter(LIAR.replace("READY", start).replace("ROUND", GOOD))
    assert not drafter.wait_ready(30)
    assert drafter.replicas[0].supervisor.failures == 1
    works = [work_for(begun(TEXT[:5]))]
    until(lambda: propose_soon(drafter, works) == [Proposal()] and drafter.replicas[0].supervisor.failures >= 2)


def test_a_worker_that_never_gets_ready_is_replaced(nursery: Nursery) -> None:
    drafter = nursery.drafter("import time; time.sleep(60)", start_limit=30.0)
    works = [work_for(begun(TEXT[:5]))]
    assert propose_soon(drafter, works) == [Proposal()]
    assert drafter.replicas[0].supervisor.failures == 0
    nursery.clock.leaps += 31
    assert propose_soon(drafter, works) == [Proposal()]
    assert drafter.replicas[0].supervisor.failures == 1


def test_pauses_double_up_to_a_limit() -> None:
    """Catches a worker that is started again and again, and one that is never."""
    now = 0.0
    attempts: list[float] = []

    def start() -> Worker:
        attempts.append(now)
        raise OSError("no such program")

    drafter = ProcessDrafter([start], LOOKAHEAD, VOCAB, clock=lambda: now)
    works = [work_for(begun(TEXT[:5]))]
    while len(attempts) < 10:
        now += 0.01
        assert drafter.propose(works) == [Proposal()]
    pauses = [b - a for a, b in itertools.pairwise(attempts)]
    wanted = [min(0.1 * 2**i, LONGEST_PAUSE) for i in range(9)]
    assert pauses == pytest.approx(wanted, abs=0.03)
    assert (drafter.replicas[0].supervisor.failures, drafter.replicas[0].supervisor.restarts) == (10, 9)
    drafter.close()


# --- replicas ---------------------------------------------------------------------------------------------------------


def honest_share(replica: int, *texts: list[int], replicas: int = 2) -> tuple[str, dict[str, Any]]:
    return HONEST, {"texts": texts, "ahead": True, "share": (replica, replicas)}


def wait_prepared(drafter: ProcessDrafter, *replicas: int) -> None:
    for each in (drafter.replicas[i] for i in replicas):
        until(lambda each=each: each.available() and each._last_prepared == each._round)  # type: ignore[misc]


def test_a_round_takes_the_draft_of_the_replica_that_has_it(nursery: Nursery) -> None:
    """Two replicas share the outcomes. Catches one that is not told what the round verifies, and prepares for nothing.

    The first one prepares for 0, 2 and 4 accepted tokens, the second one for 1 and 3.
    """
    drafter = nursery.replicas(honest_share(0, TEXT), honest_share(1, TEXT), patience=8.0)
    assert drafter.wait_ready(30)
    sequence = begun(TEXT[:2])
    work = work_for(sequence).with_proposal(propose_soon(drafter, [work_for(sequence)])[0])
    for accepted in [0, 1, 3, 2, 1]:
        wait_prepared(drafter, 0, 1)
        rest = TEXT[len(sequence.tokens) :]
        commit(drafter, work, rest[: accepted + 1], accepted)
        [proposal] = propose_soon(drafter, [work_for(sequence)])
        assert (proposal.origin, proposal.token_ids) == (Origin.HIT, tuple(TEXT[len(sequence.tokens) :][:LOOKAHEAD]))
        work = work_for(sequence).with_proposal(proposal)
    assert (drafter.replies, drafter.at_hand, drafter.late) == (1, 5, 0)


@pytest.mark.parametrize(
    ("victim", "fault"),
    [
        (0, signal.SIGKILL),
        pytest.param(1, signal.SIGSTOP, marks=pytest.mark.slow),
        pytest.param(1, signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param(0, signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
def test_a_replica_that_is_lost_is_a_smaller_cache_until_it_is_back(
    nursery: Nursery, victim: int, fault: signal.Signals
) -> None:
    """Catches rounds that wait for it, drafts of the other one that go with it, and a successor that stays out."""
    drafter = nursery.replicas(honest_share(0, TEXT), honest_share(1, TEXT), patience=0.1, hang_limit=0.3)
    assert drafter.wait_ready(30)
    lost, other = drafter.replicas[victim], drafter.replicas[1 - victim]
    sequence = begun(TEXT[:2])
    works = [work_for(sequence)]
    until(lambda: propose_soon(drafter, works) == [Proposal(tuple(TEXT[2:6]))])
    os.kill(nursery.pids[victim], fault)
    until(lambda: propose_soon(drafter, works) != [Proposal()] and lost.supervisor.failures == 1)
    lost.supervisor.hang_limit = other.supervisor.hang_limit = 5.0
    assert other.supervisor.failures == 0
    wait_prepared(drafter, 1 - victim)
    commit(drafter, works[0], TEXT[2 : 4 - victim], 1 - victim)  # what the other one has prepared for
    rest = TEXT[len(sequence.tokens) :]
    assert propose_soon(drafter, works) == [Proposal(tuple(rest[:LOOKAHEAD]))]
    until(lambda: lost.available() and lost.supervisor.restarts == 1)
    propose_soon(drafter, works)
    wait_prepared(drafter, 0, 1)
    commit(drafter, works[0], rest[: victim + 1], victim)  # what the lost one prepares for
    [proposal] = propose_soon(drafter, works)
    assert (proposal.origin, proposal.token_ids) == (Origin.HIT, tuple(TEXT[len(sequence.tokens) :][:LOOKAHEAD]))


@pytest.mark.parametrize("lie", ["noise", pytest.param("prepared twice", marks=pytest.mark.slow), "no reply"])
def test_a_replica_that_lies_costs_no_text_and_not_the_drafts_of_the_other(nursery: Nursery, lie: str) -> None:
    params = SamplingParams(max_new_tokens=40)
    expected = naive(TEXT[:5], params, max_model_len=64).token_ids
    liar = LIAR.replace("READY", "send(2, 0)").replace("ROUND", LIES[lie])
    honest = honest_share(1, [*TEXT[:5], *expected])
    drafter = nursery.replicas((liar, {}), honest, patience=0.1, hang_limit=0.2)
    assert drafter.wait_ready(30)
    harness = make_harness(drafter=drafter)
    assert harness.run(TEXT[:5], params).token_ids == expected
    assert harness.engine.metrics.spec_decode_num_accepted_tokens > 0
    assert drafter.replicas[1].supervisor.failures == 0


def test_what_was_prepared_for_a_large_round_may_come_in_a_small_one() -> None:
    """Catches a truthful worker that is lost because its message is longer than the present round allows."""
    ours, theirs = socket.socketpair()
    worker: Any = SimpleNamespace(channel=Channel(ours), pid=0, exited=True, close=ours.close, kill=ours.close)
    supervisor = Supervisor("it", lambda: worker, clock=time.monotonic, hang_limit=9.0, start_limit=9.0)
    replica = DraftReplica(supervisor, LOOKAHEAD, VOCAB)
    there = Channel(theirs)
    there.post(Message(READY))
    assert replica.available(9.0)
    works = [work_for(begun(TEXT[:3], id=i)) for i in range(8)]
    outcomes = {(i % 5, i // 5): (1, 2, 3, 4) for i in range(150)}
    for sent in (works, works[:1]):
        assert replica.available()
        replica.send(sent, [Draft((1, 2, 3, 4))] * len(sent), 0.0, budget=16, reply=False, ahead=True)
    there.post(Message(Kind.PREPARED, 1, encode_prepared({i: ((1, 2, 3, 4), outcomes) for i in range(8)})))
    there.post(Message(Kind.PREPARED, 2, encode_prepared({0: ((1, 2, 3, 4), {(0, 7): (8,)})})))
    assert replica.available()
    assert replica.supervisor.failures == 0
    works[0].sequence.tokens.append(7)
    assert replica.find(works[0].sequence) == Draft((8,), (0.0,))
    replica.close()
    there.close()


def test_a_slow_replica_is_not_sent_more_and_more_rounds(nursery: Nursery) -> None:
    """Catches rounds that pile up in the socket of a replica which the others' drafts make superfluous."""
    fast = HONEST, {"texts": [TEXT], "ahead": True}
    slow = HONEST, {"texts": [TEXT], "prepare": 0.5}
    drafter = nursery.replicas(fast, slow, patience=8.0)
    assert drafter.wait_ready(30)
    sequence = begun(TEXT[:2])
    work = work_for(sequence)
    for _ in range(8):
        [proposal] = propose_soon(drafter, [work])
        wait_prepared(drafter, 0)
        commit(drafter, work.with_proposal(proposal), TEXT[len(sequence.tokens) :][:1])
    assert drafter.at_hand == 7
    assert drafter.replicas[1]._round <= 4
    assert drafter.replicas[1].supervisor.failures == 0


def test_two_drafters_do_not_meet(nursery: Nursery) -> None:
    """Catches anything that two engines on a host would share, and an end of one that the other one's worker holds."""
    first, second = nursery.honest(TEXT), nursery.honest(TEXT[::-1])
    works = [work_for(begun(TEXT[:3])), work_for(begun(TEXT[::-1][:3], id=1))]
    until(lambda: [p.token_ids for p in propose_soon(first, works)] == [tuple(TEXT[3:7]), ()])
    first.close()
    assert not alive(nursery.pids[0])
    assert propose_soon(first, works) == [Proposal(), Proposal()]
    assert not first.wait_ready(1.0)
    until(lambda: [p.token_ids for p in propose_soon(second, works)] == [(), tuple(TEXT[::-1][3:7])])


ORPHANING = """
import os, signal, sys, time
from ssd.core import Request, SamplingParams, Sequence, Work
from ssd.drafting.process import ProcessDrafter
from ssd.parallel.process import Worker

code, end = sys.argv[1:]
setup = {"texts": [[1, 2, 3, 4]], "prepare": 0.5}
drafter = ProcessDrafter([lambda: Worker(setup, [sys.executable, "-c", code])], 4, 32)
assert drafter.wait_ready(30)
sequence = Sequence(0, Request("0", (1,), SamplingParams()), 0, 0, frozenset(), 99, tokens=[1, 2])
while not drafter.propose([Work(sequence, 1, 1, lookahead=4)])[0].token_ids:
    time.sleep(0.01)
print(drafter.replicas[0].supervisor.pid, flush=True)
eval(end)
"""


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize("end", mostly_slow(["sys.exit()", "os._exit(1)", KILL], fast={KILL}))
def test_a_worker_does_not_outlive_its_engine(end: str) -> None:
    """Catches orphans, however the engine ended and while the worker was preparing."""
    command = [sys.executable, "-c", ORPHANING, HONEST, end]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    pid = int(done.stdout)
    until(lambda: not alive(pid), seconds=10)
    assert done.stderr == b""


def test_a_kill_takes_the_worker_s_own_processes_along(tmp_path: Path) -> None:
    """Catches a rank of a split draft model that is stopped when its worker is killed: it cannot notice that."""
    code = f"""
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"])
open({str(tmp_path / "pid")!r}, "w").write(f"{{child.pid}}\\n")
time.sleep(60)
"""
    worker, file = Worker({}, [sys.executable, "-c", code]), tmp_path / "pid"
    until(lambda: file.exists() and file.read_text().endswith("\n"))
    pid = int(file.read_text())
    until(lambda: "\nState:\tT" in Path(f"/proc/{pid}/status").read_text())
    worker.kill()
    until(lambda: not alive(pid))
    worker.close()


def test_a_drafter_that_is_dropped_takes_its_worker_along(nursery: Nursery) -> None:
    nursery.honest(TEXT)
    nursery.drafters.clear()
    gc.collect()
    assert not alive(nursery.pids[0])


@pytest.mark.slow
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
    while kills < 8 or harness.engine.has_work:
        assert time.monotonic() < deadline
        if not harness.engine.has_work:
            for prompt, p, answer in zip(prompts, params, answers, strict=True):
                asked[harness.engine.add(prompt, p)] = answer
        before = harness.engine.metrics.spec_decode_num_accepted_tokens
        harness.step()
        accepted_since += harness.engine.metrics.spec_decode_num_accepted_tokens - before
        if accepted_since and kills < 8:
            pid = drafter.replicas[0].supervisor.pid
            assert pid is not None
            nursery.clock.leaps += 61
            os.kill(pid, signal.SIGKILL)
            kills, accepted_since = kills + 1, 0
    harness.engine.check()
    got = {i: Expected(o.token_ids, o.finish_reason or "abort") for i, o in harness.outputs.items()}
    assert got == asked
    assert drafter.replicas[0].supervisor.failures >= 7
    assert harness.engine.metrics.drafter_failures == drafter.replicas[0].supervisor.failures
    assert drafter.stats.busy_seconds >= 0.125 * drafter.replies  # what lost workers computed counts
    assert drafter.replicas[0].supervisor.restarts >= 7
    assert len(set(nursery.pids)) == 1 + drafter.replicas[0].supervisor.restarts


@pytest.mark.slow
def test_the_module_is_quiet_at_the_end() -> None:
    """Catches a trace of a worker whose engine went before it said anything."""
    here, there = socket.socketpair()
    with there:
        command = [*WORKER_COMMAND, str(there.fileno())]
        process = subprocess.Popen(command, pass_fds=(there.fileno(),), stderr=subprocess.PIPE)
    here.close()
    _, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (0, b"")


def test_a_worker_runs_no_code_of_the_current_directory(tmp_path: Path) -> None:
    """And it is this package, wherever that is, not another one of the same name."""
    for name in ("numpy", "ssd", "socket", "tokenizers"):
        (tmp_path / f"{name}.py").write_text(f"raise SystemExit('{name}.py of the current directory')")
    *interpreter, code = WORKER_COMMAND
    code = code.replace("main()", "import numpy, ssd; print(ssd.__file__)")
    done = subprocess.run([*interpreter, code], cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout.strip(), done.stderr) == (ssd.__file__, "")


SILENT = "import os, sys\nwhile os.read(int(sys.argv[-1]), 1 << 16): pass"  # until its drafter closes


def test_workers_are_launched_on_demand() -> None:
    """Catches a process for a mode that is never tried, and a first launch that counts as a restart."""
    launched: list[Worker] = []

    def start() -> Worker:
        launched.append(Worker({}, [sys.executable, "-c", SILENT]))
        return launched[-1]

    drafter = ProcessDrafter([start, start], LOOKAHEAD, VOCAB, on_demand=True)
    sequence = make_sequence([1, 2], id=1)
    drafter.observe([], [], 1.0)
    drafter.forget(sequence)
    assert not launched
    assert not drafter.catch_up([Work(sequence, 1, 1)])
    assert len(launched) == 2
    assert not drafter.catch_up([Work(sequence, 1, 1)])
    assert [(each.supervisor.restarts, each.supervisor.failures) for each in drafter.replicas] == [(0, 0)] * 2
    assert len(launched) == 2
    drafter.close()


def test_a_worker_chooses_for_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a draft that gets the target's dtype, block size or number of blocks; what the user says is for both."""
    configs: list[EngineConfig] = []
    monkeypatch.setattr(drafters, "start_workers", lambda config, _: configs.append(config) or Drafter())
    speculation = {"mode": "ssd", "draft": "tiny-llama-draft", "placement": "process"}
    said = {"dtype": "bfloat16", "block_size": 8, "num_kv_blocks": 40, "max_num_batched_tokens": 100}
    lengths = []
    for options in ({}, said):
        with ssd.LLM("tiny-llama", device="cpu", max_num_seqs=3, speculation=speculation, **options) as llm:
            lengths.append(llm.engine.max_model_len)
            assert llm.config.num_kv_blocks is not None
    found = [{name: getattr(config, name) for name in said} for config in configs]
    assert found == [dict.fromkeys(said) | {"dtype": "auto"}, said]
    assert [config.max_model_len for config in configs] == lengths
    assert lengths[1] == 40 * 8


def test_a_worker_finds_a_relative_draft_after_a_change_of_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The main program may call chdir before the worker has to be started again."""
    home, elsewhere = tmp_path / "home", tmp_path / "elsewhere"
    (home / "draft").mkdir(parents=True)
    elsewhere.mkdir()
    starts, setups = list[Callable[[], object]](), list[Any]()

    class Recorded:
        def __init__(self, given: Seq[Callable[[], object]], *_: object, **__: object) -> None:
            starts.extend(given)

        def wait_ready(self, timeout: float) -> bool:
            return True

    monkeypatch.setattr(draft_workers, "ProcessDrafter", Recorded)
    monkeypatch.setattr(draft_workers, "Worker", lambda setup, **_: setups.append(setup))
    monkeypatch.setattr(draft_workers.torch, "set_num_threads", lambda _: None)
    monkeypatch.chdir(home)
    for draft in ("draft", "graft:./draft@llama-3.1-8b", "tiny-llama-draft", "org/name"):
        speculation = SpeculationConfig(mode="ssd", draft=draft, draft_device="cpu")
        state = SequenceState(1, max_len=8, lookahead=2, vocab_size=10, device=torch.device("cpu"))
        draft_workers.start_workers(EngineConfig(model="tiny-llama", device="cpu", speculation=speculation), state)
    monkeypatch.chdir(elsewhere)
    for start in starts:
        start()
    found = [setup["config"]["speculation"]["draft"] for setup in setups]
    assert found == [f"{home}/draft", f"graft:{home}/draft@llama-3.1-8b", "tiny-llama-draft", "org/name"]
