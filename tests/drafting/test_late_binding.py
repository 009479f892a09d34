"""Rounds in flight with a drafter in other processes: every answer stays what it was, whatever the drafter does.

On a CPU, where `reference_tables` stands in for the kernels of the look-up, and `run_ahead` keeps a round in flight.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import reference_tables
import torch
from conftest import mostly_slow
from draft_workers import LIAR, LIES
from fakes import make_sequence
from random_requests import (
    MAX_LEN,
    UNPENALISED,
    Models,
    VerifiedDrafts,
    check_answers,
    plain_decoding,
    play,
    random_requests,
)

from ssd import LLM, SamplingParams
from ssd.assembly import draft_workers
from ssd.cli.trace import record
from ssd.core import MODEL_WRITTEN, Origin, Outcome, Proposal, RequestOutput, Work
from ssd.drafting import table
from ssd.drafting.late import LateBindingDrafter
from ssd.drafting.table import DraftAnswers, DraftTables
from ssd.drafting.wire import Draft, Entry, Kind, PreparedDrafts, decode_round, encode_prepared
from ssd.engine.engine import Engine
from ssd.execution.state import SequenceState
from ssd.kernels.device import kernels
from ssd.parallel.process import Worker
from ssd.parallel.transport import READY, Channel, Message

COUNT = 10


@pytest.fixture(scope="module", autouse=True)
def on_cpu() -> Iterator[None]:
    """Targets on a CPU have the kernels; a look-up is made when the workers have prepared, as it is on a GPU."""
    own = kernels(torch.device("cpu"))._replace(draft_table=reference_tables)
    propose = LateBindingDrafter.propose

    def patient(self: LateBindingDrafter, works: list[Work]) -> Any:
        deadline = time.monotonic() + 0.3
        while any(each.preparing for each in self.replicas) and time.monotonic() < deadline:
            self._enter_prepared()
        return propose(self, works)

    with pytest.MonkeyPatch.context() as patch:
        for module in (draft_workers, table):
            patch.setattr(module, "kernels", lambda device: own)
        patch.setattr(LateBindingDrafter, "propose", patient)
        yield


@pytest.fixture(scope="module")
def alone(models: Models) -> list[RequestOutput]:
    with plain_decoding(models) as answer:
        return answer(random_requests(COUNT, 0))


@contextmanager
def engine_with(models: Models, draft: str = "noisy", **options: Any) -> Iterator[LLM]:
    speculation = {"mode": "ssd", "draft": models.drafts[draft], "k": 3, "placement": "process", "budget": 6} | options
    memory = {"max_num_seqs": 4, "block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 24}
    with LLM(models.target, device="cpu", max_model_len=MAX_LEN, speculation=speculation, **memory) as llm:
        llm.driver.call(lambda engine: setattr(engine.round, "run_ahead", True))
        yield llm


def drafter_of(llm: LLM) -> LateBindingDrafter:
    drafter = llm.engine.round.drafter
    assert isinstance(drafter, LateBindingDrafter)
    return drafter


@pytest.fixture(scope="module")
def own_draft(models: Models) -> Iterator[LLM]:
    """The target drafts for itself."""
    with engine_with(models, "self", backup="fast") as llm:
        yield llm


def check_everything_at_once(llm: LLM, alone: list[RequestOutput]) -> None:
    requests = random_requests(COUNT, 0)
    outputs = llm.driver.call(lambda engine: play(engine, requests, preempt=0.03))
    check_answers(requests, outputs, alone)
    assert llm.engine.round.stats.drafter_failures == 0
    assert not llm.engine.round.synchronous


def test_everything_at_once(own_draft: LLM, alone: list[RequestOutput]) -> None:
    """Catches any difference to plain decoding; requests come, are preempted and aborted while rounds are in flight."""
    check_everything_at_once(own_draft, alone)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"backup": "jit"}, {"backup": "fast"}, {"draft_replicas": 2}, {"budget": "auto"}])
def test_everything_at_once_with_a_draft_that_is_often_wrong(
    models: Models, alone: list[RequestOutput], options: dict[str, Any]
) -> None:
    with engine_with(models, **options) as llm:
        check_everything_at_once(llm, alone)


def test_what_the_target_drafts_for_itself_stands(own_draft: LLM) -> None:
    """Catches drafts for another outcome, sequence or round, which cost nothing but speed: so nobody notices."""
    verified = VerifiedDrafts()
    with own_draft.driver.observing(verified):
        requests = [replace(r, params=replace(r.params, **UNPENALISED)) for r in random_requests(12, 0)]
        own_draft.driver.call(lambda engine: play(engine, requests, preempt=0.03))
        assert own_draft.engine.round.synchronous == verified.synchronous
    written = [each for each in verified.drafts if each[0] in MODEL_WRITTEN]
    assert [each for each in written if each[1] != each[2]] == []
    assert sum(origin is Origin.HIT for origin, _, _ in written) > 50


def test_an_observer_sees_the_branches_of_the_round(own_draft: LLM) -> None:
    """Catches branches of another round, and none: the next draft is a hit if and only if a branch came true."""
    _, steps = record(own_draft, [5, 6, 7, 8], SamplingParams(max_new_tokens=24, ignore_eos=True))
    pairs = [(one, two) for one, two in pairwise(steps) if one.branches and two.looked_up]
    assert len(pairs) > len(steps) / 2
    assert all(two.hit == any(map(one.came_true, one.branches)) for one, two in pairs)
    assert any(two.hit for _, two in pairs)


@pytest.mark.slow  # tests/drafting/test_drafter_process.py does so to a fake target
@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_worker_costs_no_text(models: Models, alone: list[RequestOutput], sign: signal.Signals) -> None:
    """Catches a round that hangs, or an answer that changes, when the worker goes while rounds are in flight."""
    with engine_with(models, backup="jit") as llm:
        supervisor = drafter_of(llm).replicas[0].supervisor
        supervisor.hang_limit = 0.5
        signals = iter([None] * 8 + [sign])

        def lose(engine: Engine) -> None:
            if (found := next(signals, None)) is not None and supervisor.pid is not None:
                os.kill(supervisor.pid, found)

        check_generated(llm, alone, before_step=lose)
        assert next(signals, None) is None
        assert supervisor.failures >= (sign == signal.SIGKILL)


@pytest.mark.parametrize(
    "lie",
    mostly_slow(
        ["prepared an id too high", "an id too high", "prepared twice", "noise", "no reply"],
        fast={"prepared an id too high"},
    ),
)
def test_a_lying_worker_costs_no_text(
    models: Models, alone: list[RequestOutput], lie: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a message that is believed, and a wait for one that never comes."""
    source = LIAR.replace("READY", "send(2, 0)").replace("ROUND", LIES[lie])
    monkeypatch.setattr(draft_workers, "Worker", lambda setup: Worker(setup, [sys.executable, "-c", source]))
    with engine_with(models, backup="jit") as llm:
        check_generated(llm, alone)


@pytest.mark.slow
def test_torn_tables_cost_no_text(models: Models, alone: list[RequestOutput], monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a look-up that relies on what it reads: rows of another round are found half written, and valid."""
    write = DraftTables.write

    def torn(tables: DraftTables, replica: int, slot: int, round_: int, prepared: PreparedDrafts) -> None:
        half = len(prepared.outcomes) // 2
        write(tables, replica, slot, round_, replace(prepared, outcomes=np.roll(prepared.outcomes, half, axis=0)))
        tables._tables[replica, slot, 2::3] = 3

    monkeypatch.setattr(DraftTables, "write", torn)
    with engine_with(models, backup="fast") as llm:
        check_generated(llm, alone)
        assert llm.engine.round.stats.drafter_failures == 0


def check_generated(
    llm: LLM, alone: list[RequestOutput], before_step: Callable[[Engine], None] = lambda engine: None
) -> None:
    """The same requests, all at once: the answers are those of plain decoding."""

    def run(engine: Engine) -> dict[str, RequestOutput]:
        for i, output in enumerate(alone):
            engine.add(output.prompt_token_ids, output.params, str(i))
        outputs: dict[str, RequestOutput] = {}
        while engine.has_work:
            before_step(engine)
            outputs |= {delta.request_id: delta.output for delta in engine.step() if delta.output is not None}
        return outputs

    outputs = llm.driver.call(run)
    for i, expected in enumerate(alone):
        assert [s.token_ids for s in outputs[str(i)].samples] == [s.token_ids for s in expected.samples]


def test_tables_are_of_one_round_and_sequence() -> None:
    """Catches a draft of an earlier round, of the slot's last owner, or for another outcome."""
    state = SequenceState(3, max_len=16, lookahead=2, vocab_size=50, device=torch.device("cpu"))
    tables = DraftTables(state, replicas=2, width=4)
    state.token_ids[1, :3], state.length[1], state.num_accepted[1] = torch.tensor([5, 6, 7]), 3, 1
    codes = np.full((2, 2), 18, dtype=np.uint8)  # a confidence of 1
    outcomes = np.array([[1, 9, 30, 31], [1, 7, 40, -1]], dtype=np.int32)
    tables.write(1, 1, 12, PreparedDrafts((6,), outcomes, codes))
    tables.look_up([1, 2], [12, None], 0.0)
    (origin, draft), (other, nothing) = tables.found([1, 2])
    assert (origin, draft.token_ids, draft.confidence) == (Origin.HIT, (40,), (1.0,))
    assert (other, nothing.token_ids) == (Origin.NONE, ())
    assert (state.drafts[1].tolist(), int(state.origin[1])) == ([40, 0], Origin.HIT)
    tables.look_up([1], [11], 0.0)
    assert tables.found([1])[0][0] is Origin.NONE
    state.token_ids[1, 2] = 8
    tables.look_up([1], [12], 0.0)
    assert (tables.found([1])[0][0], state.drafts[1].tolist()) == (Origin.SIBLING, [30, 31])
    answers = DraftAnswers(state)
    answers.answer(1, 13, [20])
    answers.wait([1], 14, 0.0, Origin.JIT)
    assert state.drafts[1].tolist() == [30, 31]
    answers.wait([1], 13, 0.0, Origin.JIT)
    assert (state.drafts[1].tolist(), int(state.origin[1])) == ([20, 0], Origin.JIT)


# --- one sequence, and a worker that is played by the test ------------------------------------------------------------


class Played:
    """A drafter of up to 3 tokens that waits for backups, whose worker was told of the first round of a sequence."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        process: Any = SimpleNamespace(channel=Channel(ours), pid=0, exited=True, close=ours.close, kill=ours.close)
        self.worker = Channel(theirs)
        self.state = SequenceState(2, max_len=16, lookahead=3, vocab_size=50, device=torch.device("cpu"))
        self.drafter = LateBindingDrafter([lambda: process], 3, self.state, budget=4, backup="jit")
        self.worker.post(Message(READY))
        assert self.drafter.wait_ready(10)
        self.work = Work(make_sequence([5, 6], [7], id=1), 1, lookahead=3, slot=1)
        assert self.drafter.propose([self.work]) == [Proposal()]
        assert self.told() == Entry(1, 0, [5, 6, 7], 3, Draft(), self.work.sequence)

    def told(self) -> Entry:
        """What the worker is told of the sequence, once the round before is decided."""
        self.drafter.decided([], [])
        message = self.worker.receive(timeout=10)
        assert message is not None
        [entry] = decode_round(message.payload).entries
        return replace(entry, sequence=self.work.sequence)

    def decide(self, token: int) -> None:
        """The first round decides a token, for which the worker has prepared 10, 11, 12."""
        self.worker.post(Message(Kind.PREPARED, 1, encode_prepared({1: ((), {(0, token): (10, 11, 12)})})))
        self.work.sequence.tokens.append(token)
        self.state.token_ids[1, :4] = torch.tensor([5, 6, 7, token])
        self.state.length[1] = 4


@pytest.fixture
def played() -> Iterator[Played]:
    made = Played()
    made.decide(9)
    yield made
    made.drafter.close()
    made.worker.close()


def test_workers_are_told_what_of_a_draft_is_verified(played: Played) -> None:
    """Catches the whole draft that was prepared, where a sequence has room for less: branches would be prepared behind
    tokens that are not verified, so that no outcome of the round could be a hit."""
    work = played.work._replace(lookahead=2)
    [proposal] = played.drafter.propose([work])
    assert (proposal.num_on_device, proposal.origin) == (2, Origin.HIT)
    draft = played.told().draft
    assert draft is not None
    assert draft.token_ids == (10, 11)
    assert len(draft.confidence) == 2


def test_what_was_prepared_before_another_drafter_s_rounds_is_not_looked_up(played: Played) -> None:
    """Catches drafts for the outcome of the last round that the worker was told of, though others came after it."""
    played.drafter.catch_up([played.work])
    assert played.drafter.propose([played.work]) == [Proposal()]
    assert played.drafter.tables.looked_up is None


def test_a_late_worker_is_asked_for_fewer_branches(played: Played, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches rounds that wait for branches that nobody can prepare in time, and numbers that nobody reads."""
    drafter, now, budgets = played.drafter, 0.0, list[int]()
    monkeypatch.setattr(drafter, "_clock", lambda: now)
    for number in range(2, 30):
        drafter.propose([played.work])
        drafter.decided([], [])
        message = played.worker.receive(timeout=10)
        assert message is not None
        budgets.append(decode_round(message.payload).budget)
        now += 0.003 * budgets[-1]  # what the worker takes
        played.worker.post(Message(Kind.PREPARED, number, encode_prepared({})))
        drafter.observe([played.work], [Outcome((9,))], 0.0075)
    assert budgets[0] == 4
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[-1] == 2


@pytest.mark.parametrize("masked", [False, True])
def test_the_device_does_not_wait_for_a_host_that_waits_for_it(
    played: Played, masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches rounds with masks of the host that last until the device gives up: the host waits for the drafts before
    it could answer."""
    waits: list[int] = []
    monkeypatch.setattr(played.drafter.answers, "wait", lambda slots, round_, *_: waits.append(round_))
    played.work.sequence.constraint = SimpleNamespace() if masked else None  # type: ignore[assignment]
    played.drafter.propose([played.work])
    played.drafter.settle([played.work])
    assert waits == ([] if masked else [2])
