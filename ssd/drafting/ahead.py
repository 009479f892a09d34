"""What SSD prepares for the likely outcomes of a verification: `ChainsAhead`, or `TreesAhead`."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

from ssd.core import MODEL_WRITTEN, Origin, Outcome, Proposal, SamplingParams, Work
from ssd.drafting.fan_out import FanOut, OutcomeStatistics
from ssd.drafting.forest import ForestRunner
from ssd.drafting.model import Able, DraftSource
from ssd.drafting.runner import DraftRun, StagedBranches
from ssd.errors import ConfigError


class ChainsAhead:
    """A chain for each likely outcome: a branch (`DraftRunner.branch`). Rows of a run are its branches."""

    levels = 0  # of trees, as `DraftSource.write` takes them

    def __init__(self, model: DraftSource, fan_out: FanOut) -> None:
        self.model, self.runner, self.fan_out = model, model.runner, fan_out
        self.statistics = OutcomeStatistics()

    def able(self, deciding: Seq[Able]) -> list[Work]:
        """The works for which drafts can be prepared while they are verified; what that needs is read."""
        return self.model.branching(deciding)

    def stage(self, works: Seq[Work], budget: int) -> StagedBranches:
        """Inputs of `prepare` for these works, with so many outcomes each."""
        return self.runner.stage_branches(
            *_inputs(works),
            budget=budget,
            fan_out=self.fan_out,
            statistics=self.statistics,
        )

    def restage(self, staged: StagedBranches) -> None:
        """Once more: drafts under verification have changed."""
        self.runner.restage(staged)

    def in_part(self, staged: StagedBranches) -> bool:
        """Whether `prepare` computes in a part of the GPU beside the target."""
        return self.runner.part_of(staged.shape) is not None

    def prepare(
        self, staged: StagedBranches, works: Seq[Work], *, overlap: bool, interrupted: Callable[[], bool]
    ) -> DraftRun:
        count = max(work.lookahead for work in works)
        return self.runner.branch(staged, count, overlap=overlap, interrupted=interrupted)

    def look_up(self, run: DraftRun) -> None:
        """Makes what was prepared for the outcomes the sequences' drafts, on the device."""
        self.runner.look_up(run)

    def proposal(self, work: Work, run: DraftRun) -> Proposal:
        """The draft of a work that was looked up."""
        return Proposal(num_on_device=min(work.lookahead, run.depth), origin=Origin.HIT)

    def drafts(self, run: DraftRun, place: int, rows: Seq[int]) -> list[tuple[int, ...]]:
        """Tokens that were prepared in rows of the run's sequence number `place`."""
        return [tuple(run.tokens[row][1:]) for row in rows]

    def confidence(self, run: DraftRun, rows: Seq[int]) -> list[tuple[float, ...]]:
        """Of the same tokens; empty where it is not known."""
        if not rows:
            return []
        first = min(rows)
        sure = self.runner.confidence(run, first, max(rows) + 1)
        return [tuple(sure[row - first]) for row in rows]

    def pin_hits(self, rate: float) -> None:
        self.runner.pin_hits(rate)

    def learn(self, run: DraftRun, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        """Updates the statistics that branches are allotted by, from an ended run and the outcomes it was for."""
        place = {slot: i for i, slot in enumerate(run.slots)}
        for work, outcome in zip(works, outcomes, strict=True):
            i = place.get(work.slot)
            if i is None or outcome is None or (outcome.draft and outcome.origin not in MODEL_WRITTEN):
                continue
            accepted, ranked = outcome.num_accepted, run.likeliest[i][outcome.num_accepted]
            own = outcome.token_ids[-1]
            rank = ranked.index(own) if own in ranked else None
            self.statistics.learn(run.confidence[i][: len(outcome.draft)], accepted, rank)


class TreesAhead(ChainsAhead):
    """A tree of `levels` levels for each likely outcome (`ForestRunner`). Rows of a run are its outcomes."""

    runner: ForestRunner

    def __init__(self, model: DraftSource, fan_out: FanOut, levels: int) -> None:
        super().__init__(model, fan_out)
        assert isinstance(model.runner, ForestRunner)
        self.levels = levels

    def able(self, deciding: Seq[Able]) -> list[Work]:
        if any(work.lookahead for work, _ in deciding):
            self.model.num_unread(deciding)  # reads what a run would not
        return [work for work, _ in deciding]

    def stage(self, works: Seq[Work], budget: int) -> StagedBranches:
        return self.runner.stage_forest(
            *_inputs(works),
            budget=budget,
            fan_out=self.fan_out,
        )

    def restage(self, staged: StagedBranches) -> None:
        self.runner.restage_forest(staged)

    def in_part(self, staged: StagedBranches) -> bool:
        return False

    def prepare(
        self, staged: StagedBranches, works: Seq[Work], *, overlap: bool, interrupted: Callable[[], bool]
    ) -> DraftRun:
        return self.runner.grow(staged, self.levels, overlap=overlap)

    def look_up(self, run: DraftRun) -> None:
        self.runner.look_up_trees(run)

    def proposal(self, work: Work, run: DraftRun) -> Proposal:
        return Proposal(num_on_device=work.lookahead, origin=Origin.HIT, parents=())

    def drafts(self, run: DraftRun, place: int, rows: Seq[int]) -> list[tuple[int, ...]]:
        trees = self.runner.trees_of(run, place)
        return [trees[row - place * run.width] for row in rows]

    def confidence(self, run: DraftRun, rows: Seq[int]) -> list[tuple[float, ...]]:
        return []

    def pin_hits(self, rate: float) -> None:
        raise ConfigError("hits are drawn for chains only: leave trees out")

    def learn(self, run: DraftRun, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        """Nothing: outcomes are ranked by scores."""


def _inputs(works: Seq[Work]) -> tuple[list[int], list[int], list[SamplingParams]]:
    """Slots, lengths of the drafts under verification, and parameters."""
    return (
        [work.slot for work in works],
        [work.proposal.num_tokens for work in works],
        [work.sequence.params for work in works],
    )
