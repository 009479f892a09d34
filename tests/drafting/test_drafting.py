"""The parts of drafting: what a draft model writes and prepares, what it is told, which outcomes are prepared for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from fakes import make_sequence
from hypothesis import given
from hypothesis import strategies as st

from ssd import LLM, SamplingParams
from ssd.core import Origin, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter, PerRound, never
from ssd.drafting.estimate import Average
from ssd.drafting.fan_out import RANKS, Adaptive, FanOut, Geometric, Listed, OutcomeStatistics, Share
from ssd.drafting.model import DraftModel, ModelDrafter
from ssd.drafting.runner import DraftRunner
from ssd.drafting.ssd import BackupPolicy, SSDDrafter
from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.kernels.cuda.partition import Part
from ssd.kernels.ops import DeviceBatch

K = 4
TEXTS = [[5, 6, 7, 8, 9, 10, 11] * 5, [900, 12, 77], [2000, 31, 9] * 21]


# --- a draft model without a target -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner() -> Iterator[DraftRunner]:
    """The bundled draft, as the engine builds it."""
    speculation = {"mode": "ssd", "draft": "tiny-llama-draft", "k": K, "placement": "inline", "budget": 16}
    with LLM("tiny-llama", device="cpu", max_model_len=256, max_num_seqs=3, speculation=speculation) as llm:
        drafter = llm.engine.round.drafter
        assert isinstance(drafter, SSDDrafter)
        yield drafter.model.runner


@pytest.fixture
def model(runner: DraftRunner) -> DraftModel:
    """It, with an empty pool."""
    return DraftModel(runner, max_len=256, max_num_batched_tokens=512)


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """The same model by itself."""
    with LLM("tiny-llama-draft", device="cpu", max_model_len=256, max_num_seqs=32) as llm:
        yield llm


def continued(llm: LLM, tokens: Seq[int], count: int, params: SamplingParams) -> list[int]:
    """What the model writes next, with the noise of the positions where it writes it."""
    params = dataclasses.replace(params, max_new_tokens=count, ignore_eos=True)
    return llm.generate([list(tokens)], params)[0].token_ids


@dataclass
class Rounds:
    """Rounds of some sequences, in which the test decides instead of a target."""

    drafter: Drafter
    model: DraftModel
    params: SamplingParams = field(default_factory=SamplingParams)
    texts: Seq[Seq[int]] = tuple(map(tuple, TEXTS))
    sequences: list[Sequence] = field(default_factory=list)
    works: list[Work] = field(default_factory=list)
    shared: bool = False  # what `settle` returned

    def __post_init__(self) -> None:
        for slot, text in enumerate(self.texts):
            sequence = make_sequence(text[:-1], text[-1:], params=self.params, id=slot, seed=self.params.seed or 0)
            sequence.slot = slot
            self.sequences.append(sequence)
            self.state.admit(slot, sequence)

    @property
    def state(self) -> SequenceState:
        return self.model.runner.state

    def launch(
        self, drafts: Seq[Seq[int]] | None = None, *, lookahead: int = K, interrupted: Callable[[], bool] = never
    ) -> list[tuple[Origin, list[int]]]:
        """A round up to its verification; what is verified, and where it came from. `drafts`: in place of proposals."""
        works = [Work(s, 1, len(s.tokens) - 1, lookahead=lookahead, slot=s.slot) for s in self.sequences]
        proposals = self.drafter.propose(works)
        if drafts is not None:
            proposals = [Proposal(tuple(draft)) for draft in drafts]
            self.state.set_drafts([work.slot for work in works], drafts)
        self.works = [work.with_proposal(proposal) for work, proposal in zip(works, proposals, strict=True)]
        self.shared = self.drafter.settle(self.works)
        found = [self._verified(work) for work in self.works]
        self.drafter.prepare(self.works, interrupted)
        return found

    def _verified(self, work: Work) -> tuple[Origin, list[int]]:
        if not work.proposal.num_on_device:
            return work.proposal.origin, list(work.proposal.token_ids)
        draft = self.state.drafts[work.slot, : work.proposal.num_on_device].tolist()
        return Origin(int(self.state.origin[work.slot])), draft

    def decide(self, *decisions: tuple[int, int], seconds: float = 0.02) -> list[Outcome]:
        """Of each draft so many tokens stand, then comes this token."""
        outcomes = []
        for work, (accepted, token) in zip(self.works, decisions, strict=True):
            origin, draft = self._verified(work)
            new = [*draft[:accepted], token]
            self.state.append(work.slot, len(work.sequence.tokens), new, accepted)
            work.sequence.tokens += new
            work.sequence.last_accepted = accepted
            outcomes.append(Outcome(tuple(new), (), tuple(draft), origin))
        self.drafter.observe(self.works, outcomes, seconds)
        return outcomes

    def end(self) -> None:
        for sequence in self.sequences:
            self.drafter.forget(sequence)
        self.model.check()
        assert self.model.num_sequences == 0


def ahead(model: DraftModel, fan_out: FanOut | None = None, *, budget: int = 16, backup: str = "jit") -> SSDDrafter:
    return SSDDrafter(model, fan_out or Adaptive(), lookahead=K, budget=budget, backup=backup)


SOME_PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=3, top_k=50),
    SamplingParams(temperature=0.7, seed=5, logit_bias={9: -100.0, 10: 3.0}),
]
PARAMS = pytest.mark.parametrize("params", SOME_PARAMS, ids=["greedy", "sampled", "biased"])


@PARAMS
def test_a_draft_is_what_the_model_writes(model: DraftModel, alone: LLM, params: SamplingParams) -> None:
    rounds = Rounds(ModelDrafter(model, K), model, params)
    for _ in range(3):
        drafts = rounds.launch()
        for sequence, (origin, draft) in zip(rounds.sequences, drafts, strict=True):
            assert origin is Origin.DRAFT
            assert draft == continued(alone, sequence.tokens, K, params)
        rounds.decide((0, 40), (2, 41), (4, 42))
    assert rounds.drafter.stats.busy_seconds > 0
    rounds.end()


@PARAMS
def test_every_branch_is_what_the_model_writes_there(model: DraftModel, alone: LLM, params: SamplingParams) -> None:
    """Branches at any place of drafts of different lengths, each continued as if it had been decided."""
    counts = (3, 1, 2, 1, 2)
    rounds = Rounds(ahead(model, Listed(counts, counts)), model, params)
    drafts = [[40, 41, 42, 43], [50], []]
    rounds.launch(drafts)
    for sequence, draft in zip(rounds.sequences, drafts, strict=True):
        prepared = rounds.drafter.prepared(sequence)
        places = [after for after, _ in prepared]
        assert [places.count(after) for after in range(K + 1)] == [
            counts[after] if after <= len(draft) else 0 for after in range(K + 1)
        ]
        for (after, token), written in prepared.items():
            assert list(written) == continued(alone, [*sequence.tokens, *draft[:after], token], K, params)
        for after in range(len(draft) + 1):
            likeliest = next(token for place, token in prepared if place == after)
            best = continued(alone, [*sequence.tokens, *draft[:after]], 1, params)[0]
            assert best == likeliest or [best] == draft[after : after + 1]
            assert draft[after : after + 1] != [likeliest]  # had the target chosen that, it would stand
    rounds.decide((0, 7), (0, 7), (0, 7))
    rounds.end()


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The pieces of runs that are computed, instead of being repeated from a recording."""
    pieces: list[int] = []
    compute = DraftRunner._compute

    def counted(self: DraftRunner, shape: Any, piece: int) -> None:
        pieces.append(piece)
        compute(self, shape, piece)

    monkeypatch.setattr(DraftRunner, "_compute", counted)
    return pieces


def test_pieces_are_recorded_and_write_the_same(model: DraftModel, alone: LLM, computed: list[int]) -> None:
    """From their third time on the passes of branches are repeated by one call each, with the numbers of then."""
    rounds = Rounds(ahead(model), model)
    for turn in range(5):
        computed.clear()
        found = rounds.launch()
        for sequence, (_, draft) in zip(rounds.sequences, found, strict=True):
            for (after, token), written in list(rounds.drafter.prepared(sequence).items())[:3]:
                text = [*sequence.tokens, *draft[:after], token]
                assert list(written) == continued(alone, text, K, SamplingParams())
        rounds.decide((turn % 3, 7), (1, 8 + turn), (2, 9))
    assert all(piece < 0 for piece in computed)  # reading, which plans with torch
    rounds.end()


def test_runs_that_were_recorded_compute_nothing_anew(model: DraftModel, alone: LLM, computed: list[int]) -> None:
    """From the first round on: catches shapes that were left out, and drafts of the text they were recorded with."""
    recordings = model.runner.decoder.recordings
    assert recordings is not None
    recordings.clear()
    model.runner.record(Adaptive())
    computed.clear()
    for budget in (16, 6, 1):
        rounds = Rounds(ahead(model, budget=budget, backup="fast"), model, texts=TEXTS[2:])
        for drafts in ([[]], None, [[5, 6]]):
            [(_, draft)] = rounds.launch(drafts)
            [sequence] = rounds.sequences
            found = rounds.drafter.prepared(sequence)
            assert 0 < len(found) <= budget
            for (after, token), written in found.items():
                assert list(written) == continued(alone, [*sequence.tokens, *draft[:after], token], K, SamplingParams())
            rounds.decide((0, 9))
        rounds.end()
    assert all(piece < 0 for piece in computed)  # reading, which plans with torch


def test_what_was_prepared_is_the_next_draft(model: DraftModel, alone: LLM) -> None:
    """A hit is looked up; after a miss the target waits for a draft (jit)."""
    rounds = Rounds(ahead(model), model)
    rounds.launch()
    for _ in range(3):
        prepared = [rounds.drafter.prepared(sequence) for sequence in rounds.sequences]
        (hit, draft), *_ = prepared[0].items()
        _, (other, draft2), *_ = prepared[1].items()
        missing = next(token for token in range(100) if (2, token) not in prepared[2])
        rounds.decide(hit, other, (2, missing))
        found = rounds.launch()
        written = continued(alone, rounds.sequences[2].tokens, K, SamplingParams())
        assert found == [(Origin.HIT, list(draft)), (Origin.HIT, list(draft2)), (Origin.JIT, written)]
    rounds.decide((0, 1), (0, 1), (0, 1))
    rounds.end()


def test_the_fast_backup_is_what_was_prepared_for_another_token(model: DraftModel) -> None:
    rounds = Rounds(ahead(model, Listed((2,) * 5, (2,) * 5), backup="fast"), model)
    rounds.launch()
    prepared = [rounds.drafter.prepared(sequence) for sequence in rounds.sequences]
    missing = next(token for token in range(100) if all((1, token) not in each for each in prepared))
    rounds.decide((1, missing), (1, missing), (1, missing))
    siblings = [next(list(draft) for (after, _), draft in each.items() if after == 1) for each in prepared]
    assert rounds.launch() == [(Origin.SIBLING, sibling) for sibling in siblings]
    rounds.decide((0, 1), (0, 1), (0, 1))
    rounds.end()


def test_nothing_is_prepared_for_a_place_that_no_branch_has(model: DraftModel) -> None:
    """After a miss without a sibling the draft is an old one: it costs a verification, nothing else."""
    rounds = Rounds(ahead(model, Listed((0, 0, 0, 0, 2), (0, 0, 0, 0, 2)), backup="fast"), model)
    rounds.launch()
    rounds.decide((0, 1), (1, 1), (2, 1))
    assert [origin for origin, _ in rounds.launch()] == [Origin.SIBLING] * 3
    rounds.decide((0, 1), (0, 1), (0, 1))
    rounds.end()


@pytest.mark.parametrize("make", [lambda m: ModelDrafter(m, K), ahead, lambda m: ahead(m, budget=0)])
def test_what_is_forgotten_is_rebuilt(model: DraftModel, alone: LLM, make: Callable[[DraftModel], Drafter]) -> None:
    rounds = Rounds(make(model), model)
    rounds.launch()
    rounds.decide((1, 40), (2, 41), (4, 42))
    for sequence in rounds.sequences:
        rounds.drafter.forget(sequence)
        rounds.drafter.forget(sequence)  # twice is as good as once
    model.check()
    assert model.num_sequences == 0
    for sequence, (origin, draft) in zip(rounds.sequences, rounds.launch(), strict=True):
        assert (origin, draft) == (Origin.DRAFT, continued(alone, sequence.tokens, K, SamplingParams()))
    rounds.decide((0, 1), (0, 1), (0, 1))
    rounds.end()


def test_a_sequence_that_is_too_long_has_no_draft(model: DraftModel) -> None:
    """Catches a lookahead beyond the draft model's positions."""
    shorter = DraftModel(model.runner, max_len=len(TEXTS[0]) + K - 1, max_num_batched_tokens=512)
    for drafter in (ModelDrafter(shorter, K), ahead(shorter)):
        rounds = Rounds(drafter, shorter)
        assert [len(draft) for _, draft in rounds.launch()] == [0, K, 0]
        rounds.decide((0, 1), (4, 1), (0, 1))
        rounds.end()


@pytest.mark.parametrize("most", [512, 50])
def test_the_sequences_of_a_batch_are_read_together(
    model: DraftModel, alone: LLM, monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    """Catches a forward pass for each: 0.1 s on a GPU, with 64 of them, whenever a drafter had rested."""
    model.max_num_batched_tokens, sizes = most, list[int]()
    forward = model.model_runner.forward
    monkeypatch.setattr(model.model_runner, "forward", lambda batch: (sizes.append(batch.num_rows), forward(batch))[1])
    unread = sum(max(0, len(text) - model.runner.shapes.reads) for text in TEXTS)
    rounds = Rounds(ModelDrafter(model, K), model)
    for sequence, (_, draft) in zip(rounds.sequences, rounds.launch(), strict=True):
        assert draft == continued(alone, sequence.tokens, K, SamplingParams())
    assert sizes == ([unread] if most == 512 else [50, unread - 50])
    rounds.decide((0, 1), (0, 1), (0, 1))
    rounds.end()


def test_a_prompt_is_read_while_the_target_reads_it(model: DraftModel, alone: LLM) -> None:
    """The first token gets no draft; the second one's draft has nothing to read but that token."""
    for drafter in (ModelDrafter(model, K), ahead(model)):
        sequence = make_sequence(TEXTS[2], id=9)
        sequence.slot = 0
        model.runner.state.admit(0, sequence)
        chunks = [Work(sequence, 40, 0, decides=False, slot=0), Work(sequence, 23, 40, slot=0)]
        for work in chunks:
            works = [work.with_proposal(p) for p in drafter.propose([work] if work.decides else [])] or [work]
            assert works == [work]
            drafter.settle(works)
            drafter.prepare(works)
            if work.decides:
                model.runner.state.append(0, 63, [7], 0)
                sequence.tokens.append(7)
            drafter.observe(works, [Outcome((7,)) if work.decides else None], 0.1)
        last = Work(sequence, 1, 63, lookahead=K, slot=0)
        own = model.state_of(last, [last])
        assert own is not None
        assert own.kv.num_computed >= 62
        drafter.propose([last])
        assert model.runner.state.drafts[0].tolist() == continued(alone, sequence.tokens, K, SamplingParams())
        drafter.forget(sequence)


def test_an_interrupted_preparation_keeps_the_depth_it_has(model: DraftModel, alone: LLM) -> None:
    rounds, asked = Rounds(ahead(model), model), iter([False, False, True, False])
    rounds.launch(interrupted=lambda: next(asked))
    prepared = [rounds.drafter.prepared(sequence) for sequence in rounds.sequences]
    assert {len(draft) for each in prepared for draft in each.values()} == {2}
    rounds.decide(*(next(iter(each)) for each in prepared))
    for sequence, (origin, draft) in zip(rounds.sequences, rounds.launch(), strict=True):
        assert (origin, draft) == (Origin.HIT, continued(alone, sequence.tokens, 2, SamplingParams()))
    rounds.decide((0, 1), (0, 1), (0, 1))
    rounds.end()


def test_a_preparation_that_is_waited_for_is_narrower_next_time(model: DraftModel) -> None:
    rounds = Rounds(ahead(model), model, texts=TEXTS[:1])

    def width(late: bool) -> int:
        rounds.launch(interrupted=lambda: late)
        found = len(rounds.drafter.prepared(rounds.sequences[0]))
        rounds.decide((0, 9))
        return found

    widths = [width(late=True) for _ in range(8)]
    assert widths[0] == 16
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 2
    widths = [width(late=False) for _ in range(64)]
    assert widths == sorted(widths)
    assert widths[-1] == 16
    width(late=True)
    rounds.end()
    other = Rounds(rounds.drafter, model, texts=TEXTS[1:2])
    other.sequences[0].id = 7
    other.launch()
    assert len(other.drafter.prepared(other.sequences[0])) == 16  # the round that interrupted was another text's
    other.decide((0, 9))
    other.end()


def test_a_small_preparation_shares_the_gpu(model: DraftModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """16 branches beside the target are in the draft's part, more of them or some after the target are not."""
    monkeypatch.setattr(model.runner, "part", Part(8, None))  # type: ignore[arg-type]
    alone = SSDDrafter(model, Adaptive(), lookahead=K, budget=16, overlap=False)
    for drafter, texts, shared in (
        (ahead(model), TEXTS[:1], True),
        (ahead(model), TEXTS, False),
        (alone, TEXTS[:1], False),
    ):
        rounds = Rounds(drafter, model, texts=texts)
        rounds.launch()
        assert rounds.shared is shared
        rounds.decide(*[(0, 1)] * len(texts))
        rounds.end()


class CountedKernel:
    """In place of the kernel of a whole step: the model's own logits."""

    def __init__(self, runner: ModelRunner) -> None:
        self.runner, self.calls = runner, 0

    def takes(self, _: DeviceBatch) -> bool:
        return True

    def __call__(self, batch: DeviceBatch) -> torch.Tensor:
        self.calls += 1
        return self.runner.decoder(batch, self.runner.kv)


@pytest.mark.parametrize(("shared", "calls"), [(False, K + K + 1), (True, K)])
def test_branches_beside_the_target_are_several_kernels(runner: DraftRunner, shared: bool, calls: int) -> None:
    """Catches a kernel for the whole GPU that is launched beside the target, and one that is never used."""
    own = DraftRunner(runner.model_runner, runner.shapes, shared=shared)
    own.one_kernel = kernel = CountedKernel(runner.model_runner)  # type: ignore[assignment]
    model = DraftModel(own, max_len=256, max_num_batched_tokens=512)
    rounds = Rounds(ahead(model), model)
    rounds.launch()
    assert kernel.calls == calls
    rounds.decide((0, 1), (0, 1), (0, 1))
    rounds.end()


def test_sequences_share_what_the_draft_model_has_read(model: DraftModel) -> None:
    rounds = Rounds(ModelDrafter(model, K), model, texts=[[8, 9] * 20, [8, 9] * 20])
    first, second = rounds.sequences
    rounds.sequences = [first]
    rounds.launch()
    rounds.decide((0, 1))
    work = Work(second, 1, len(second.tokens) - 1, lookahead=K, slot=second.slot)
    own = model.state_of(work, [work])
    assert own is not None
    assert own.kv.num_computed == 32  # two whole blocks of 16
    rounds.sequences = [first, second]
    rounds.end()


# --- what a drafter is told -------------------------------------------------------------------------------------------


def test_outcomes_are_told_and_not_found_by_comparing_tokens(model: DraftModel) -> None:
    """Catches a drafter that works outcomes out from a sequence's tokens: those may be cut by a stop, or lag behind."""
    drafter = ahead(model)
    rounds = Rounds(drafter, model, texts=TEXTS[:1])
    rounds.launch()
    before = drafter.ahead.statistics.acceptance.value
    [_, draft] = rounds.launch()[0]
    rounds.state.append(0, len(rounds.sequences[0].tokens), [1], 0)
    rounds.sequences[0].tokens.append(1)  # nothing of the draft is there
    drafter.observe(rounds.works, [Outcome((*draft, 5), (), tuple(draft), Origin.DRAFT)], 0.02)
    assert drafter.ahead.statistics.acceptance.value > before
    assert drafter.policy.yields[Origin.DRAFT].value == K + 1
    rounds.end()


def test_a_round_that_it_took_no_part_in_is_nothing_to_learn_from(model: DraftModel) -> None:
    """The drafter was left alone, say because it had failed: the host decides, and it is told afterwards."""
    for drafter in (ModelDrafter(model, K), ahead(model)):
        rounds = Rounds(drafter, model)
        works = [Work(s, 1, len(s.tokens) - 1, slot=s.slot) for s in rounds.sequences]
        drafter.observe(works, [Outcome((3,))] * 3, 0.02)
        rounds.launch()
        rounds.decide((1, 5), (1, 5), (1, 5))
        rounds.end()


def test_statistics_follow_what_stands_and_which_rank_comes(model: DraftModel) -> None:
    drafter = ahead(model)
    rounds = Rounds(drafter, model, texts=TEXTS[:1])
    start = drafter.ahead.statistics
    before = start.acceptance.value, start.recovery.value.copy(), start.bonus.value.copy()
    rounds.launch()
    ranked = [token for after, token in rounds.drafter.prepared(rounds.sequences[0]) if after == 1]
    rounds.decide((1, ranked[0]))
    assert start.recovery.value[0] > before[1][0]
    rounds.launch()
    rounds.decide((K, next(t for t in range(5000, 6000) if t not in ranked)))
    assert start.acceptance.value > before[0]
    assert start.bonus.value[0] < before[2][0]
    rounds.end()


@pytest.mark.parametrize(("origin", "learns"), [(Origin.HIT, True), (Origin.SIBLING, False)])
def test_statistics_do_not_learn_from_a_siblings_draft(model: DraftModel, origin: Origin, learns: bool) -> None:
    """It was written for another outcome: how much of it stands says nothing about drafts for this one."""
    drafter = ahead(model)
    rounds = Rounds(drafter, model, texts=TEXTS[:1])
    before = drafter.ahead.statistics.acceptance.value
    [_, draft] = rounds.launch()[0]
    rounds.state.append(0, len(rounds.sequences[0].tokens), [1], 0)
    rounds.sequences[0].tokens.append(1)
    drafter.observe(rounds.works, [Outcome((1,), (), tuple(draft), origin)], 0.02)
    assert (drafter.ahead.statistics.acceptance.value < before) == learns
    rounds.end()


def test_rounds_are_kept_until_they_are_observed() -> None:
    """By identity of their works, and not for ever: those beyond the last two have failed."""
    kept, works = PerRound[str](), [[Work(make_sequence([1]), 1, 0)] for _ in range(3)]
    for i, each in enumerate(works):
        kept.put(each, str(i))
    assert kept.pop(works[0]) is None
    assert kept.pop(list(works[2])) is None
    assert [kept.pop(works[2]), kept.pop(works[1]), kept.pop(works[1])] == ["2", "1", None]


# --- waiting for a draft after a miss ---------------------------------------------------------------------------------


def test_waiting_pays_only_while_it_does() -> None:
    policy = BackupPolicy("auto")
    assert policy.waits(1, 1)  # nothing is known yet
    policy.round_seconds.add(0.020)
    for _ in range(5):
        policy.wrote(0.005)
    for origin, tokens in ((Origin.JIT, 3.0), (Origin.SIBLING, 1.2), (Origin.HIT, 3.5)):
        policy.yields[origin].add(tokens)
    assert policy.waits(1, 1)
    assert not policy.waits(1, 16)  # fifteen would wait for one
    assert policy.waits(16, 16)
    for _ in range(5):
        policy.wrote(0.050)
    assert not policy.waits(16, 16)
    assert any(policy.waits(16, 16) for _ in range(100))  # it is tried again
    policy.wrote(0.050)
    assert not any(policy.waits(16, 16) for _ in range(30))


@pytest.mark.parametrize(("backup", "waits"), [("jit", True), ("fast", False)])
def test_a_backup_that_was_asked_for_is_used(backup: str, waits: bool) -> None:
    policy = BackupPolicy(backup)
    assert policy.waits(1, 64) is waits
    policy.round_seconds.add(1.0)
    policy.wrote(1.0 if waits else 1e-6)
    policy.yields[Origin.JIT].add(1.0 if waits else 9.0)
    assert policy.waits(1, 64) is waits


# --- estimates --------------------------------------------------------------------------------------------------------


def test_an_average_forgets() -> None:
    average = Average(0.5)
    assert not average.known
    average.add(4.0)
    assert (average.known, average.value) == (True, 4.0)
    average.add(1.0)
    assert average.value == pytest.approx((0.5 * 4.0 + 1.0) / 1.5)
    for _ in range(60):
        average.add(7.0)
    assert average.value == pytest.approx(7.0)


def test_a_guess_fades_and_a_prior_does_not() -> None:
    guess, prior = Average(0.9, 5.0, 10.0), Average(0.9, prior_total=5.0, prior_weight=10.0)
    assert guess.value == prior.value == 0.5
    for _ in range(300):
        guess.add(1.0)
        prior.add(1.0)
    assert guess.value == pytest.approx(1.0)
    assert prior.value == pytest.approx((10.0 + 5.0) / (10.0 + 10.0))  # ten observations are remembered


def test_an_average_of_vectors_and_weights() -> None:
    average = Average(1.0, np.zeros(2))
    average.add(np.array([2.0, 0.0]), 2.0)
    average.add(np.array([0.0, 6.0]), 2.0)
    assert average.value.tolist() == [0.5, 1.5]


# --- which outcomes ---------------------------------------------------------------------------------------------------

POLICIES: list[FanOut] = [Listed((3, 2, 1, 0, 4), (9, 0, 0, 0, 0)), Geometric(), Adaptive()]


def plan(
    policy: FanOut, statistics: OutcomeStatistics, drafts: Seq[Seq[float]], hits: Seq[bool], budget: int
) -> list[list[tuple[int, int]]]:
    """The outcomes of drafts with these confidences, planned together."""
    width = policy.width(budget)
    confidence = torch.tensor([[*draft, *[0.0] * (K - len(draft))] for draft in drafts])
    constants = torch.zeros(4 * (K + 1) * 80 + 64)  # as long as a buffer that is used for all policies and widths
    found = policy.constants(statistics, K, width)
    assert found.dtype == np.float32
    constants[: len(found)] = torch.from_numpy(found)
    drafted = torch.tensor([len(draft) for draft in drafts], dtype=torch.int32)
    after, rank = policy.plan(constants, confidence, torch.tensor(hits, dtype=torch.int32), drafted, width)
    assert after.shape == rank.shape == (len(drafts), width)
    return [list(zip(a, r, strict=True)) for a, r in zip(after.tolist(), rank.tolist(), strict=True)]


@pytest.mark.parametrize("counts", [(0, 2, 2), (0, 0, 1), (2, 0, 0), (0, 16, 0)])
@pytest.mark.parametrize("width", [1, 3, 20])
def test_lists_without_branches_for_a_short_draft_have_one_after_it(counts: tuple[int, ...], width: int) -> None:
    policy = Listed(counts, counts)
    for drafted in range(3):
        outcomes = policy.outcomes(OutcomeStatistics(), drafted, True, width)
        assert outcomes
        assert all(after <= drafted for after, _ in outcomes)
    assert len(policy.constants(OutcomeStatistics(), 2, width)) == 2 * 3 * width * 2


@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.lists(st.floats(0, 20, width=32), max_size=K), st.booleans()), min_size=1, max_size=4),
    st.integers(1, 80),
    st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, RANKS - 1)), max_size=30),
)
def test_plans_are_within_their_means(
    policy: FanOut, drafts: list[tuple[list[float], bool]], budget: int, past: list[tuple[int, int | None]]
) -> None:
    """Every outcome is possible, none is there twice before all are there, and no draft depends on another."""
    statistics = OutcomeStatistics()
    for accepted, rank in past:
        statistics.learn([1.0] * 4, accepted, rank)
    plans = plan(policy, statistics, [d for d, _ in drafts], [h for _, h in drafts], budget)
    for (confidence, hit), outcomes in zip(drafts, plans, strict=True):
        assert [outcomes] == plan(policy, statistics, [confidence], [hit], budget)
        assert len(outcomes) <= budget
        assert all(0 <= after <= len(confidence) and 0 <= rank < RANKS for after, rank in outcomes)
        distinct = set(outcomes)
        assert len(set(outcomes[: len(distinct)])) == len(distinct)
        if not isinstance(policy, Listed):
            assert len(distinct) == min(budget, RANKS * (len(confidence) + 1))
        if not isinstance(policy, Adaptive):  # which goes by what it has seen
            assert all(rank == 0 or (after, rank - 1) in distinct for after, rank in distinct)


@pytest.mark.parametrize("replicas", [2, 3, 4])
@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_replicas_share_the_outcomes(policy: Any, replicas: int) -> None:
    """Catches outcomes that two replicas prepare for, and a share that is less than what one alone would have."""
    statistics, drafts, hits = OutcomeStatistics(), [[9.0, 0.1, 2.0, 9.0], [1.0] * 4], [True, True]
    shares = [
        plan(dataclasses.replace(policy, share=Share(replica, replicas)), statistics, drafts, hits, 6)
        for replica in range(replicas)
    ]
    for alone, *parts in zip(plan(policy, statistics, drafts, hits, 6), *shares, strict=True):
        together = [outcome for part in parts for outcome in set(part)]
        assert len(set(together)) == len(together)
        assert replicas * (len(set(alone)) - 1) < len(together) <= replicas * len(set(alone))
        assert set(alone) <= set(together)


def test_a_share_without_outcomes_has_one_all_the_same() -> None:
    policy = Listed((0, 1, 0, 0, 0), (0, 0, 0, 0, 0), Share(1, 2))
    for hit in (True, False):
        [found] = plan(policy, OutcomeStatistics(), [[1.0] * 4], [hit], 3)
        assert len(set(found)) == 1


def test_lists_differ_after_a_miss() -> None:
    policy = Listed((1, 1, 1, 0, 0), (3, 0, 0, 0, 0))
    hit, miss, short = plan(policy, OutcomeStatistics(), [[1.0, 1.0], [1.0, 1.0], []], [True, False, True], 9)
    assert sorted(set(hit)) == [(0, 0), (1, 0), (2, 0)]
    assert sorted(set(miss)) == [(0, 0), (0, 1), (0, 2)]
    assert set(short) == {(0, 0)}


def test_geometric_follows_the_formula() -> None:
    """F_k is proportional to a^(k/(1+r)), the last one also to (1-a)^(-1/(1+r))."""
    statistics = OutcomeStatistics()
    a, r = statistics.acceptance.value, statistics.tail_exponent
    weights = [a ** (k / (1 + r)) * ((1 - a) ** (-1 / (1 + r)) if k == 4 else 1) for k in range(5)]
    [outcomes] = plan(Geometric(), statistics, [[1.0] * 4], [True], 24)
    counts = [sum(after == k for after, _ in outcomes) for k in range(5)]
    assert sum(counts) == 24
    assert all(abs(n - 24 * w / sum(weights)) < 1.5 for n, w in zip(counts, weights, strict=True))


def test_adaptive_looks_where_the_draft_was_unsure() -> None:
    statistics = OutcomeStatistics()
    for _ in range(300):
        statistics.learn([9.0, 0.01], 1, 0)  # a sure token stands, an unsure one falls
    unsure, sure = plan(Adaptive(), statistics, [[9.0, 9.0, 0.01, 9.0], [9.0] * 4], [True, True], 4)
    assert unsure[0] == (2, 0)
    assert sure[0] == (4, 0)


def test_adaptive_takes_the_likeliest_outcomes() -> None:
    """Against the definition: the product of what must stand, what must fall, and how often the rank comes."""
    statistics, dice = OutcomeStatistics(), np.random.default_rng(0)
    for _ in range(500):
        statistics.learn(dice.exponential(2.0, 4).tolist(), int(dice.integers(5)), int(dice.integers(RANKS)))
    draft = [0.1, 3.0, 0.7]
    [outcomes] = plan(Adaptive(), statistics, [draft], [True], 12)
    bins = np.searchsorted([0.05, 0.15, 0.3, 0.6, 1.0, 1.6, 2.5, 4.0, 7.0], draft, side="right")
    stands = [statistics.by_confidence[b].value for b in bins]
    chances = {}
    for after in range(4):
        reached = np.prod(stands[:after])
        for rank in range(RANKS):
            last = statistics.bonus.value[rank] if after == 3 else (1 - stands[after]) * statistics.recovery.value[rank]
            chances[after, rank] = reached * last
    best = sorted(chances, key=lambda outcome: -chances[outcome])[:12]
    assert [chances[outcome] for outcome in outcomes] == pytest.approx([chances[outcome] for outcome in best], rel=1e-5)
