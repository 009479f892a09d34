"""Speculative speculative decoding (SSD): the draft runs ahead of the verification.

While the target verifies, the draft model prepares the next draft for every likely outcome. If the outcome was prepared
(a hit), the next round's draft is there at once; if not (a miss), a backup answers: the draft model, which the target
then waits for (`jit`), or what was prepared for another token in the place of the last one (`fast`), which costs
nothing.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from ssd.core import MODEL_WRITTEN, Origin, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter, Prepared, never
from ssd.drafting.estimate import Average
from ssd.drafting.fan_out import FanOut, OutcomeStatistics
from ssd.drafting.model import DraftModel, DraftSequence, wants_draft, write_drafts
from ssd.drafting.runner import DraftRun, StagedBranches

_NARROWER, _WIDER = 0.75, 0.25  # after a preparation that was interrupted times so many branches, else plus so many
_NARROWEST = 2.0


def _average() -> Average:
    return Average(15 / 16)


@dataclass
class BackupPolicy:
    """Is a draft that everybody waits for worth it? Tokens that it adds, against tokens that the wait costs."""

    backup: str  # "jit", "fast" or "auto"
    yields: dict[Origin, Average] = field(default_factory=lambda: defaultdict(_average))  # tokens a round, by origin
    round_seconds: Average = field(default_factory=_average)
    write_seconds: Average = field(default_factory=_average)

    def waits(self, missed: int, batch: int) -> bool:
        """Whether to wait when `missed` of `batch` sequences have no draft; yes as long as something is unknown."""
        if self.backup != "auto":
            return self.backup == "jit"
        written, fast, hit = (self.yields[origin] for origin in (Origin.JIT, Origin.SIBLING, Origin.HIT))
        if not (written.known and self.round_seconds.known and self.write_seconds.known):
            return True
        added = missed * (written.value - (fast.value if fast.known else 1.0))
        lost = batch * (hit.value if hit.known else written.value)
        return bool(added * self.round_seconds.value > lost * self.write_seconds.value)


class _Round(NamedTuple):
    """A round under way: what was prepared during it, and drafts that the target waited for."""

    run: DraftRun | None
    written: DraftRun | None


class AheadDrafter(Drafter):
    """Prepares, for every sequence, the drafts of its next round.

    `budget` is the most branches of one sequence; with 0 drafts are written when asked for, as in SD. `overlap`: on a
    GPU the draft model runs beside the target; otherwise after it.
    """

    def __init__(
        self,
        model: DraftModel,
        fan_out: FanOut,
        *,
        lookahead: int,
        budget: int,
        backup: str = "jit",
        overlap: bool = True,
    ) -> None:
        super().__init__()
        self.model = model
        self.fan_out = fan_out
        self.lookahead = lookahead
        self.budget = budget
        self.overlap = overlap
        self.policy = BackupPolicy(backup)
        self.statistics = OutcomeStatistics()
        self._in_time = float(model.runner.max_width)  # branches of one sequence that are ready when they are wanted
        self._run: DraftRun | None = None  # the last preparation
        self._places: dict[int, int] = {}  # by sequence id: its place in that
        self._looked_up: list[tuple[Work, DraftSequence]] = []  # works whose drafts it may have prepared
        self._staged: StagedBranches | None = None
        self._written: DraftRun | None = None  # what the target waits for in this round
        self._rounds: dict[int, _Round] = {}  # by id of their lists of works
        self._ended: deque[tuple[_Round, Seq[Work], Seq[Outcome | None]]] = deque()  # to be learned from

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """Prepared drafts where there are any; the others are written now."""
        run, places = self._run, self._places
        self._written, self._looked_up = None, []
        able = [(w, own) for w in works if wants_draft(w) and (own := self.model.follow(w, works))]
        prepared = places if run is not None and run.depth else {}
        unprepared = [(work, own) for work, own in able if work.sequence.id not in prepared]
        proposals: dict[int, Proposal] = {}
        if run is not None and len(unprepared) < len(able):
            self._looked_up = [(work, own) for work, own in able if work.sequence.id in prepared]
            proposals, missed = self._look_up(run, places)
            unprepared += missed
        if unprepared:
            written, self._written = write_drafts(self.model, unprepared)
            proposals |= {id(work): p for (work, _), p in zip(unprepared, written, strict=True)}
        return [proposals.get(id(work), Proposal()) for work in works]

    def _look_up(
        self, run: DraftRun, places: dict[int, int]
    ) -> tuple[dict[int, Proposal], list[tuple[Work, DraftSequence]]]:
        """Prepared drafts by id of their works, and the works that the draft model has to write for."""
        if not self.model.runner.rejection:
            self.model.runner.look_up(run)
            on_device = {
                id(work): Proposal(num_on_device=min(work.lookahead, run.depth), origin=Origin.HIT)
                for work, _ in self._looked_up
            }
            return on_device, []
        found: dict[int, Proposal] = {}
        missed = []
        for work, own in self._looked_up:
            sequence, place = work.sequence, places[work.sequence.id]
            outcome, first = (sequence.last_accepted, sequence.tokens[-1]), place * run.width
            outcomes = [(after, run.tokens[first + b][0]) for b, after in enumerate(run.after[place])]
            if outcome in outcomes:
                row = first + outcomes.index(outcome)
                tokens = tuple(run.tokens[row][1 : work.lookahead + 1])
                q = self.model.runner.distributions(row, 1, len(tokens) + 1)
                found[id(work)] = Proposal(tokens, q, Origin.HIT)
            else:
                missed.append((work, own))
        return found, missed

    def settle(self, works: Seq[Work]) -> None:
        """Waits for the outcome where a miss may be worth a draft; then reads what branches are prepared from."""
        self._run, self._places = None, {}
        branching: list[Work] = []
        for work in works:
            prepares = work.decides and self.budget > 0
            if not work.sequence.params.speculate or not (prepares or work.num_tokens > 1):
                continue
            own = self.model.follow(work, works)
            if own is None:
                continue
            if work.num_tokens > 1:
                self.model.read_prompt(work, own)
            if prepares and self.model.can_branch(work, own):
                branching.append(work)
        self._staged = self._stage(branching) if any(work.lookahead for work in branching) else None
        for work in works:
            if work.proposal.origin is Origin.DRAFT:
                self.model.mark_read(work, branched=False)
        if self._back_up() and self._staged is not None:
            self.model.runner.snapshot(self._staged)  # the drafts have changed since
        if self._staged is not None:
            for work in branching:
                self.model.mark_read(work, branched=True)

    def _back_up(self) -> bool:
        """After a miss, a draft that the target waits for, if that pays; whether there is one."""
        looked_up = self._looked_up
        if self.model.runner.rejection or not looked_up or not self.policy.waits(len(looked_up), len(looked_up)):
            return False
        origins = self.model.runner.origins([work.slot for work, _ in looked_up])
        missed = [pair for pair, origin in zip(looked_up, origins, strict=True) if origin is not Origin.HIT]
        if not missed or not self.policy.waits(len(missed), len(looked_up)):
            return False
        _, self._written = write_drafts(self.model, missed, Origin.JIT)
        for work, _ in missed:
            self.model.mark_read(work, branched=False)
        return True

    def _stage(self, works: Seq[Work]) -> StagedBranches:
        runner = self.model.runner
        staged = runner.stage_branches(
            [work.slot for work in works],
            [work.proposal.num_tokens for work in works],
            [work.sequence.params for work in works],
            budget=max(1, min(self.budget, runner.width_of(len(works)), int(self._in_time))),
            fan_out=self.fan_out,
            statistics=self.statistics,
        )
        runner.snapshot(staged)
        self._places = {work.sequence.id: place for place, work in enumerate(works)}
        return staged

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            count = max(work.lookahead for work in works)
            runner = self.model.runner
            self._run = runner.branch(staged, count, overlap=self.overlap, interrupted=interrupted)
            late, width = interrupted(), staged.shape.width
            self._in_time = (
                max(_NARROWEST, _NARROWER * width) if late else min(runner.max_width, self._in_time + _WIDER)
            )
        self._rounds[id(works)] = _Round(self._run, self._written)

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        round_ = self._rounds.pop(id(works), _Round(None, None))
        branched = set(round_.run.slots) if round_.run is not None else set()
        for work, outcome in zip(works, outcomes, strict=True):
            self.model.observe(work, outcome, branched=work.slot in branched)
            if outcome is not None and outcome.origin is not Origin.NONE:
                self.policy.yields[outcome.origin].add(len(outcome.token_ids))
        if not any(work.num_tokens > 1 for work in works):  # a round that reads prompts says nothing about others
            self.policy.round_seconds.add(seconds)
        self._ended.append((round_, works, outcomes))
        while self._ended and all(run is None or run.ended.reached for run in self._ended[0][0]):
            self._learn(*self._ended.popleft())

    def prepared(self, sequence: Sequence) -> Prepared:
        """Nothing where drafts are worth nothing without their distributions."""
        run, place = self._run, self._places.get(sequence.id)
        if run is None or place is None or self.model.runner.rejection:
            return {}
        rows = run.tokens[place * run.width : (place + 1) * run.width]
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for after, (root, *draft) in zip(run.after[place], rows, strict=True):
            found.setdefault((after, root), tuple(draft))
        return found

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence.id, None)
        self.model.forget(sequence)

    def _learn(self, round_: _Round, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        """From a round whose runs have ended: what stood, which rank came, how long the draft model took."""
        run, written = round_
        if written is not None:
            self.stats.busy_seconds += written.seconds
            self.policy.write_seconds.add(written.seconds)
        if run is None:
            return
        self.stats.busy_seconds += run.seconds
        place = {slot: i for i, slot in enumerate(run.slots)}
        for work, outcome in zip(works, outcomes, strict=True):
            i = place.get(work.slot)
            if i is None or outcome is None or (outcome.draft and outcome.origin not in MODEL_WRITTEN):
                continue
            accepted, ranked = outcome.num_accepted, run.likeliest[i][outcome.num_accepted]
            own = outcome.token_ids[-1]
            rank = ranked.index(own) if own in ranked else None
            self.statistics.learn(run.confidence[i][: len(outcome.draft)], accepted, rank)
