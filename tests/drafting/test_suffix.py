"""Suffix look-up as a drafter: alone, beside a learned draft, and while rounds are in flight.

On a CPU a stand-in for the kernel looks up what the host will answer, since a CPU cannot wait for the host.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from conftest import VOCAB, mostly_slow
from fakes import make_sequence
from hypothesis import given
from hypothesis import strategies as st
from random_requests import (
    MAX_LEN,
    UNPENALISED,
    Asked,
    Models,
    VerifiedDrafts,
    check_answers,
    plain_decoding,
    play,
    random_requests,
)

from ssd import LLM, SamplingParams
from ssd.assembly import drafters
from ssd.core import Origin, Outcome, Proposal, RequestOutput, Status, Work
from ssd.decoding.drafter import Drafter
from ssd.drafting import table
from ssd.drafting.arms import LOOK_UP, Arm
from ssd.drafting.controller import DepthController
from ssd.drafting.suffix import SuffixDrafter
from ssd.drafting.table import DraftAnswers
from ssd.kernels.cpu.suffix import SuffixTree
from ssd.kernels.device import kernels
from ssd.kernels.state import StateView

COUNT, FEW = 40, 5  # requests; tokens that their texts are made of


def work_of(tokens: Seq[int], lookahead: int = 4) -> Work:
    return Work(make_sequence(tokens), 1, len(tokens) - 1, lookahead=lookahead)


def looked_up(drafter: SuffixDrafter, tokens: Seq[int], lookahead: int = 4) -> tuple[int, ...]:
    [proposal] = drafter.propose([work_of(tokens, lookahead)])
    assert proposal.origin is (Origin.SUFFIX if proposal.token_ids else Origin.NONE)
    return proposal.token_ids


@pytest.mark.parametrize(
    ("tokens", "draft"),
    [
        ([1, 2, 3, 4, 5, 6, 1, 2], (3, 4)),  # as many as match
        ([1, 2, 3, 9, 1, 2, 3, 8, 1, 2, 3], (8, 1, 2)),  # of equally frequent ones the last
        ([1, 2, 3, 9, 1, 2, 3, 9, 5, 1, 2, 3, 8, 1, 2, 3], (9,)),  # the more frequent one; what follows it is not sure
        ([5, 5, 5, 5], (5, 5, 5)),  # on with what is being copied
        ([1, 2, 3, 4], ()),
        ([1], ()),
    ],
)
def test_look_up(tokens: list[int], draft: tuple[int, ...]) -> None:
    assert looked_up(SuffixDrafter(4), tokens)[: len(draft) or 1] == draft
    assert looked_up(SuffixDrafter(4), tokens, 0) == ()


@given(st.lists(st.integers(0, 3), min_size=2, max_size=40), st.integers(1, 39))
def test_looking_up_round_by_round_finds_the_same(tokens: list[int], cut: int) -> None:
    """Catches a tree that misses what came with later rounds, or is another sequence's."""
    drafter = SuffixDrafter(4)
    looked_up(drafter, tokens[: min(cut, len(tokens) - 1)])
    assert looked_up(drafter, tokens) == looked_up(SuffixDrafter(4), tokens)
    drafter.forget(make_sequence([]))
    assert looked_up(drafter, tokens) == looked_up(SuffixDrafter(4), tokens)


class Learned(Drafter):
    """Drafts 7s, and keeps for which works it was asked."""

    lookahead = 4

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Work] = []

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        self.asked += works
        return [Proposal((7,) * work.lookahead, origin=Origin.DRAFT) for work in works]


def test_the_surer_draft_is_verified() -> None:
    """Catches a learned draft that is written for nothing, and one that is given up where it is better."""
    learned = Learned()
    drafter = SuffixDrafter(4, learned=learned)
    sure, unsure = work_of([1, 2, 3, 5, 1, 2, 3]), work_of([1, 2, 3, 1])
    unsure.sequence.id = 1
    proposals = drafter.propose([sure, unsure])
    assert [(p.token_ids, p.origin) for p in proposals] == [
        ((5, 1, 2), Origin.SUFFIX),
        ((7,) * 4, Origin.DRAFT),
    ]
    assert learned.asked == [unsure]
    for accepted, origin in ((4, Origin.DRAFT), (2, Origin.SUFFIX)):
        for _ in range(50):
            drafter.observe([sure], [Outcome((7,) * accepted + (6,), (), (7,) * 4, Origin.DRAFT)], 0.1)
        assert drafter.propose([sure])[0].origin is origin
    for _ in range(50):
        drafter.observe([unsure], [Outcome((6,), (), (7,) * 4, Origin.DRAFT)], 0.1)
    assert drafter.propose([unsure])[0].origin is Origin.SUFFIX
    works = [sure]
    for _ in range(5):  # look-ups of this text are wrong
        drafter.propose(works)
        drafter.prepare(works)
        drafter.observe(works, [Outcome((6,), (), (5, 1, 2), Origin.SUFFIX)], 0.1)
    assert drafter.propose(works)[0].origin is Origin.DRAFT
    drafter.forget(sure.sequence)
    drafter.forget(unsure.sequence)
    assert not drafter._sequences


def test_earlier_answers() -> None:
    """Catches answers that are not found, prompts that are, and sequences that are preempted: they come twice."""
    drafter = SuffixDrafter(4, cached_tokens=100)
    first = make_sequence([1, 2], [3, 4, 5])
    drafter.propose([Work(first, 1, 4, lookahead=4)])
    drafter.forget(first)
    assert looked_up(drafter, [3, 4]) == ()
    drafter.forget(make_sequence([3, 4]))
    drafter.propose([Work(first, 1, 4, lookahead=4)])
    first.status = Status.FINISHED
    drafter.forget(first)
    drafter.forget(first)
    assert looked_up(drafter, [9, 3, 4]) == (5,)
    drafter.forget(make_sequence([]))
    assert looked_up(drafter, [9, 1, 2]) == ()


# --- engines ----------------------------------------------------------------------------------------------------------


@dataclass
class Waits:
    """Stands in for `ssd.kernels.triton.draft_table`: the device gets what the host must answer, and later does."""

    drafter: SuffixDrafter | None = None
    expected: dict[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)  # by slot and round
    found: list[tuple[tuple[int, ...], tuple[int, ...] | None]] = field(default_factory=list)  # answers, and these

    def await_answers(self, state: StateView, slots: torch.Tensor, answers: torch.Tensor, **how: Any) -> None:
        assert self.drafter is not None
        assert how["limit"] > 0
        for slot in slots.tolist():
            [work] = [each for each in self.drafter._awaited if each.slot == slot]
            tree = SuffixTree()
            tree.extend(state.token_ids[slot, : state.length[slot]].tolist())
            draft, score = tree.draft(work.lookahead, self.drafter._earlier)
            if not self.drafter._is_better(work, score):
                draft = []
            self.expected[slot, how["round_"]] = tuple(draft)
            if draft:
                state.drafts[slot, : len(draft)] = torch.tensor(draft, dtype=torch.int32)
                state.origin[slot] = int(how["written"])

    def answered(self, slot: int, round_: int, token_ids: Seq[int]) -> None:
        self.found.append((tuple(token_ids), self.expected.pop((slot, round_), None)))


@pytest.fixture(scope="module")
def waits() -> Iterator[Waits]:
    """Engines on a CPU have the kernel."""
    stand_in = Waits()
    own = kernels(torch.device("cpu"))._replace(draft_table=stand_in)
    answer = DraftAnswers.answer

    def answered(self: DraftAnswers, slot: int, round_: int, token_ids: Seq[int]) -> None:
        answer(self, slot, round_, token_ids)
        stand_in.answered(slot, round_, token_ids)

    with pytest.MonkeyPatch.context() as patch:
        for module in (drafters, table):
            patch.setattr(module, "kernels", lambda device: own)
        patch.setattr(DraftAnswers, "answer", answered)
        yield stand_in


def repetitive(requests: Seq[Asked]) -> list[Asked]:
    """The same requests over few tokens."""
    bias = dict.fromkeys(range(FEW, VOCAB), float("-inf"))
    changed = list[Asked]()
    for asked in requests:
        forbidden = {token for token, value in asked.params.logit_bias.items() if value < 0}
        params = asked.params if len(forbidden) > FEW else replace(asked.params, logit_bias=bias)
        changed.append(replace(asked, prompt=[token % FEW for token in asked.prompt], params=params))
    return changed


@pytest.fixture(scope="module")
def alone(models: Models) -> list[RequestOutput]:
    with plain_decoding(models) as answer:
        return answer(repetitive(random_requests(COUNT, 0)))


@contextmanager
def engine_with(models: Models, waits: Waits | None, speculation: dict[str, Any], **options: Any) -> Iterator[LLM]:
    """An engine with little memory; with `waits` its rounds are in flight."""
    speculation = {"mode": "sd", "k": 3, **speculation}
    speculation["draft"] = models.drafts.get(speculation["draft"], speculation["draft"])
    options = {"max_num_seqs": 4, "block_size": 4, "num_kv_blocks": 40, "max_num_batched_tokens": 24} | options
    with LLM(models.target, device="cpu", max_model_len=MAX_LEN, speculation=speculation, **options) as llm:
        drafter = llm.engine.round.drafter
        if isinstance(drafter, DepthController):
            drafter = drafter.drafters["sd"]
        if waits is not None:
            llm.driver.call(lambda engine: setattr(engine.round, "run_ahead", True))
            assert isinstance(drafter, SuffixDrafter)
            waits.drafter = drafter
            waits.expected.clear()
            waits.found.clear()
        yield llm


SPECULATIONS: dict[str, dict[str, Any]] = {
    "alone": {"draft": "suffix"},
    "earlier answers": {"draft": "suffix", "suffix_cache_tokens": 300},
    "beside a draft model": {"draft": "noisy", "suffix": True},
    "beside a head": {"draft": "head", "suffix": True},
}


@pytest.mark.parametrize("how", mostly_slow(SPECULATIONS, fast={"alone", "beside a draft model"}))
@pytest.mark.parametrize("batch", mostly_slow([1, 4, 8], fast={4}))
def test_in_flight(models: Models, waits: Waits, alone: list[RequestOutput], how: str, batch: int) -> None:
    """Catches any difference to plain decoding, and an answer that is not for the tokens that the device has."""
    with engine_with(models, waits, SPECULATIONS[how], max_num_seqs=batch) as llm:
        requests = repetitive(random_requests(COUNT, 0))
        outputs = llm.driver.call(lambda engine: play(engine, requests, preempt=0.03))
        check_answers(requests, outputs, alone)
        assert llm.engine.round.stats.drafter_failures == 0
        assert not llm.engine.round.synchronous
    answered = [(own, expected) for own, expected in waits.found if own]  # an empty one may be of a text that ended
    assert len(answered) > 5
    assert [pair for pair in answered if pair[0] != pair[1]] == []


@pytest.mark.parametrize("draft", mostly_slow(["noisy", "head", "block"], fast={"block"}))
@pytest.mark.parametrize("in_flight", mostly_slow([False, True], fast={True}))
def test_with_every_change_of_arms(
    models: Models, waits: Waits, alone: list[RequestOutput], draft: str, in_flight: bool
) -> None:
    """Look-up alone, with learned drafts of any length, and neither, in any order: catches drafts of another arm's
    length, and a draft model that goes on without what it has not read."""
    dice, speculation = random.Random(5), {"mode": "auto", "k": "auto", "k_max": 3, "draft": draft, "suffix": True}
    with engine_with(models, waits if in_flight else None, speculation, num_kv_blocks=120) as llm:
        controller: Any = llm.engine.round.drafter
        assert {arm.mode for arm in controller._arms} == {"ar", "suffix", "sd"}
        controller._wish = lambda *_: controller._take(dice.choice(controller._arms))
        requests = repetitive(random_requests(COUNT, 0))
        outputs = llm.driver.call(lambda engine: play(engine, requests, preempt=0.03))
        check_answers(requests, outputs, alone)
        assert llm.engine.round.stats.drafter_failures == 0
        assert set(controller.stats.rounds) == {"ar", "suffix", "sd"}


@pytest.mark.parametrize("in_flight", mostly_slow([False, True], fast={True}))
def test_a_model_drafts_on_after_look_up_alone(
    models: Models, waits: Waits, monkeypatch: pytest.MonkeyPatch, in_flight: bool
) -> None:
    """Catches draft KV that is missing after rounds in which nothing was drafted."""
    verified, dice = VerifiedDrafts(), random.Random(7)
    monkeypatch.setattr(SuffixDrafter, "_is_better", lambda self, work, score: not self.k)
    speculation = {"mode": "auto", "k": "auto", "k_max": 3, "draft": "self", "suffix": True}
    used = waits if in_flight else None
    with engine_with(models, used, speculation, num_kv_blocks=120) as llm, llm.driver.observing(verified):
        verified.synchronous = not in_flight
        controller: Any = llm.engine.round.drafter
        controller._wish = lambda *_: controller._take(dice.choice([LOOK_UP, Arm(3, 0, True)]))
        requests = repetitive(random_requests(COUNT, 0))
        requests = [replace(r, params=replace(r.params, **UNPENALISED)) for r in requests]
        llm.driver.call(lambda engine: play(engine, requests, preempt=0.03))
    origins = [origin for origin, _, _ in verified.drafts]
    assert origins.count(Origin.DRAFT) > 30
    assert origins.count(Origin.SUFFIX) > 5
    assert [each for each in verified.drafts if each[0] is Origin.DRAFT and each[1] != each[2]] == []


def test_a_model_drafts_on_after_suffixes(models: Models, waits: Waits, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches draft KV of tokens that a suffix has replaced: what the target drafts for itself is always accepted."""
    verified = VerifiedDrafts()
    monkeypatch.setattr(SuffixDrafter, "_is_better", lambda self, work, score: not (self._number + work.slot) % 3)
    with engine_with(models, waits, {"draft": "self", "suffix": True}) as llm, llm.driver.observing(verified):
        verified.synchronous = False
        requests = repetitive(random_requests(COUNT, 0))
        requests = [replace(r, params=replace(r.params, **UNPENALISED)) for r in requests]
        llm.driver.call(lambda engine: play(engine, requests, preempt=0.03, depths=(0, 1, 2, 3)))
    origins = [origin for origin, _, _ in verified.drafts]
    assert origins.count(Origin.DRAFT) > 50
    assert origins.count(Origin.SUFFIX) > 5
    assert [each for each in verified.drafts if each[0] is Origin.DRAFT and each[1] != each[2]] == []


def test_many_sequences_wait_for_each_other(models: Models, waits: Waits) -> None:
    """Catches rounds in flight whose drafts are mostly padding: from 128 draft tokens on drafts have their lengths."""
    memory = {"max_num_seqs": 8, "num_kv_blocks": 400, "max_num_batched_tokens": 512}
    with engine_with(models, waits, {"draft": "suffix", "k": 40}, **memory) as llm:
        prompts, params = [[5, 6, 7, 5, 6, i] for i in range(6)], SamplingParams(max_new_tokens=60, ignore_eos=True)
        seen = list[tuple[int, bool]]()
        propose = SuffixDrafter.propose

        def noted(self: SuffixDrafter, works: Seq[Work]) -> list[Proposal]:
            found = propose(self, works)
            seen.append((sum(work.lookahead for work in works), self.needs_tokens))
            return found

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(SuffixDrafter, "propose", noted)
            llm.generate(prompts, params)
    assert {needs for _, needs in seen} == {True, False}
    assert all(needs == (tokens > 128) for tokens, needs in seen)


def test_answers_speed_up_the_next_ones(models: Models) -> None:
    """Catches earlier answers that are kept though nobody asked, or not used."""
    params, rounds = SamplingParams(max_new_tokens=40, temperature=1.0, seed=1, ignore_eos=True), list[list[int]]()
    for cached in (0, 1000):
        with engine_with(models, None, {"draft": "suffix", "k": 16, "suffix_cache_tokens": cached}) as llm:
            answers = [llm.generate([[5, 6, 7]], params)[0] for _ in range(2)]
            assert answers[0].token_ids == answers[1].token_ids
            rounds.append([answer.metrics.rounds for answer in answers])
    assert rounds[0][0] == rounds[0][1]
    assert rounds[1][1] < rounds[1][0] / 3
