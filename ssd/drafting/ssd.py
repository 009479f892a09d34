"""Speculative speculative decoding (SSD): drafts are prepared during the verification before.

While the target verifies, the draft model prepares the next draft for each of its likely outcomes. If the outcome is
among them (a hit), the next round's draft is ready. If not (a miss), the backup is used: `jit`, a draft that is written
now while the target waits, or `fast`, the sibling: the draft prepared for the same number of accepted tokens and
another last token. Drafts are chains, or trees (`ssd.drafting.forest`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssd.core import MODEL_WRITTEN, Origin, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Confidence, Drafter, PerRound, Prepared, never
from ssd.drafting.estimate import Average, TypicalSeconds
from ssd.drafting.fan_out import FanOut, OutcomeStatistics
from ssd.drafting.forest import ForestRunner
from ssd.drafting.model import Able, DraftSource, wants_draft
from ssd.drafting.runner import DraftRun, StagedBranches
from ssd.errors import ConfigError

_DECREASE, _INCREASE = 0.75, 0.25  # AIMD limit of branches: multiplied after an interrupted preparation, else added to
_MIN_BRANCHES = 2.0
_MIN_SAMPLES = 5  # last times of jit that it is judged by
_RETRY = 32  # decisions against jit before it is tried again


@dataclass
class BackupPolicy:
    """Which backup to use after misses. "auto": jit if the tokens it adds exceed those lost by the batch's waiting."""

    backup: str  # "jit", "fast" or "auto"
    # Tokens per round by origin: moving averages over about 16 observations.
    yields: dict[Origin, Average] = field(default_factory=lambda: defaultdict(lambda: Average(15 / 16)))
    round_seconds: TypicalSeconds = field(default_factory=TypicalSeconds)
    write_seconds: TypicalSeconds = field(default_factory=lambda: TypicalSeconds(last=deque(maxlen=_MIN_SAMPLES)))
    num_declined: int = 0  # decisions against jit since it was last used

    def wrote(self, seconds: float) -> None:
        """Adds the time of a jit draft."""
        self.write_seconds.add(seconds)
        self.num_declined = 0

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        """Adds the tokens and the time of a committed round."""
        for outcome in outcomes:
            if outcome is not None and outcome.origin is not Origin.NONE:
                self.yields[outcome.origin].add(len(outcome.token_ids))
        if not any(work.num_tokens > 1 for work in works):  # rounds with prefill take longer
            self.round_seconds.add(seconds)

    def waits(self, missed: int, batch: int) -> bool:
        """Whether to use jit when `missed` of `batch` sequences missed. True until there are measurements.

        From time to time it is tried again: its first times are no measure of what it takes later.
        """
        if self.backup != "auto":
            return self.backup == "jit"
        written, fast, hit = (self.yields[origin] for origin in (Origin.JIT, Origin.SIBLING, Origin.HIT))
        if len(self.write_seconds.last) < _MIN_SAMPLES or not (written.known and self.round_seconds.last):
            return True
        added = missed * (written.value - (fast.value if fast.known else 1.0))
        lost = batch * (hit.value if hit.known else written.value)
        pays = bool(added * self.round_seconds.mean > lost * self.write_seconds.mean)
        self.num_declined += not pays
        return pays or self.num_declined > _RETRY


class _Round(NamedTuple):
    """The draft model's runs of one round."""

    run: DraftRun | None  # the preparation
    written: DraftRun | None  # drafts that the target waited for


class SSDDrafter(Drafter):
    """The drafter of SSD.

    `budget`: maximum number of branches per sequence; 0: drafts are written in `propose`, as in SD. `overlap`: on a GPU
    the draft model runs on a stream of its own, concurrently with the target. `levels`: of trees of `lookahead` nodes;
    0: chains.
    """

    def __init__(
        self,
        model: DraftSource,
        fan_out: FanOut,
        *,
        lookahead: int,
        budget: int,
        backup: str = "jit",
        overlap: bool = True,
        levels: int = 0,
    ) -> None:
        super().__init__()
        self.model, self.runner, self.levels = model, model.runner, levels
        self.forests: ForestRunner | None = None
        if levels:
            assert isinstance(model.runner, ForestRunner)
            self.forests = model.runner
        self.fan_out = fan_out
        self.lookahead = lookahead
        self.budget = budget
        self.overlap = overlap
        self.policy = BackupPolicy(backup)
        self.statistics = OutcomeStatistics()
        self._in_time = float(model.runner.shapes.max_width)  # branches per sequence that are prepared in time
        self._interrupted = 0  # branches of the last preparation, if it was
        self._run: DraftRun | None = None  # the last preparation
        self._places: dict[int, int] = {}  # by sequence id: its index in that run
        self._looked_up: list[Able] = []  # works whose drafts were looked up in that run
        self._staged: StagedBranches | None = None
        self._written: DraftRun | None = None  # drafts that the target waits for in this round
        self._rounds: PerRound[_Round] = PerRound()
        self._ended: deque[tuple[_Round, Seq[Work], Seq[Outcome | None]]] = deque()  # observed, not learned from yet

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """Looks up prepared drafts; for sequences without a preparation the draft model writes now."""
        run, places = self._run, self._places
        self._written, self._looked_up = None, []
        able = [(w, own) for w in works if wants_draft(w) and (own := self.model.state_of(w, works))]
        known = {work.sequence.id for work, _ in able if work.sequence.last_accepted >= 0}
        prepared = known & places.keys() if run is not None and run.depth else set()
        unprepared = [(work, own) for work, own in able if work.sequence.id not in prepared]
        proposals: dict[int, Proposal] = {}
        missed: list[Able] = []
        if run is not None and len(unprepared) < len(able):
            self._looked_up = [(work, own) for work, own in able if work.sequence.id in prepared]
            proposals, missed = self._look_up(run, places)
        if unprepared or missed:
            written, self._written = self.model.write(unprepared + missed, levels=self.levels)
            proposals |= {id(work): p for (work, _), p in zip(unprepared + missed, written, strict=True)}
            proposals |= {id(work): replace(proposals[id(work)], origin=Origin.JIT) for work, _ in missed}
        return [proposals.get(id(work), Proposal()) for work in works]

    def _look_up(self, run: DraftRun, places: dict[int, int]) -> tuple[dict[int, Proposal], list[Able]]:
        """Prepared drafts by id() of their works, and the works whose draft must be written now.

        On the device, misses get their sibling's draft. With the rejection rule the host looks up, too, and misses are
        written.
        """
        if self.forests is not None:
            self.forests.look_up_trees(run)
            trees = {
                id(work): Proposal(num_on_device=work.lookahead, origin=Origin.HIT, parents=())
                for work, _ in self._looked_up
            }
            return trees, []
        self.runner.look_up(run)
        if not self.runner.rejection:
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
                q = self.runner.distributions(row, 1, len(tokens) + 1)
                found[id(work)] = Proposal(tokens, q, Origin.HIT)
            else:
                missed.append((work, own))
        return found, missed

    def settle(self, works: Seq[Work]) -> bool:
        """Uses the backup after misses, then copies what branches are prepared from out of the SequenceState."""
        if self._interrupted and any(work.sequence.id in self._places for work in works):  # not by another text
            self._in_time = max(_MIN_BRANCHES, _DECREASE * self._interrupted)
        self._run, self._places, self._interrupted = None, {}, 0
        wanted = [w for w in works if w.sequence.params.speculate and (w.num_tokens > 1 or (w.decides and self.budget))]
        able = [(work, own) for work in wanted if (own := self.model.state_of(work, works))]
        self.model.read_prompts(able)
        deciding = [pair for pair in able if pair[0].decides and self.budget]
        branching = [work for work, _ in deciding] if self.forests is not None else self.model.branching(deciding)
        self._staged = None
        if any(work.lookahead for work in branching):
            if self.forests is not None:
                self.model.num_unread(deciding)  # reads what a run would not
            self._staged = self._stage(branching)
        for work in works:
            if work.proposal.origin is Origin.DRAFT:
                self.model.mark_read(work, branched=False)
        if self._back_up() and self._staged is not None:
            restage = self.runner.restage if self.forests is None else self.forests.restage_forest
            restage(self._staged)  # the backup has changed the drafts
        if self._staged is None:
            return False
        for work in branching:
            self.model.mark_read(work, branched=True)
        return self.overlap and self.forests is None and self.runner.part_of(self._staged.shape) is not None

    def _back_up(self) -> bool:
        """Writes drafts after misses if the policy says so (this waits for the look-up); returns whether it did."""
        looked_up = self._looked_up
        if self.runner.rejection or not looked_up or not self.policy.waits(len(looked_up), len(looked_up)):
            return False
        origins = self.runner.origins([work.slot for work, _ in looked_up])
        missed = [pair for pair, origin in zip(looked_up, origins, strict=True) if origin is not Origin.HIT]
        if not missed or not self.policy.waits(len(missed), len(looked_up)):
            return False
        _, self._written = self.model.write(missed, Origin.JIT, levels=self.levels)
        for work, _ in missed:
            self.model.mark_read(work, branched=False)
        return True

    def _stage(self, works: Seq[Work]) -> StagedBranches:
        shapes, slots = self.runner.shapes, [work.slot for work in works]
        drafted = [work.proposal.num_tokens for work in works]
        params = [work.sequence.params for work in works]
        budget = shapes.width_within(min(self.budget, shapes.width_of(len(works)), self._in_time))
        self._places = {work.sequence.id: place for place, work in enumerate(works)}
        if self.forests is not None:
            return self.forests.stage_forest(slots, drafted, params, budget=budget, fan_out=self.fan_out)
        return self.runner.stage_branches(
            slots, drafted, params, budget=budget, fan_out=self.fan_out, statistics=self.statistics
        )

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        staged, self._staged = self._staged, None
        if staged is not None and self.forests is not None:
            self._run = self.forests.grow(staged, self.levels, overlap=self.overlap)
        elif staged is not None:
            count = max(work.lookahead for work in works)
            self._run = self.runner.branch(staged, count, overlap=self.overlap, interrupted=interrupted)
            if interrupted():
                self._interrupted = staged.shape.width
            else:
                self._in_time = min(self.runner.shapes.max_width, self._in_time + _INCREASE)
        self._rounds.put(works, _Round(self._run, self._written))

    def catch_up(self, works: Seq[Work]) -> bool:
        self._run, self._places = None, {}  # prepared for outcomes of an earlier round
        return self.model.catch_up(works)

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        round_ = self._rounds.pop(works) or _Round(None, None)
        branched = set(round_.run.slots) if round_.run is not None else set()
        for work, outcome in zip(works, outcomes, strict=True):
            self.model.observe(work, outcome, branched=work.slot in branched)
        self.policy.observe(works, outcomes, seconds)
        self._ended.append((round_, works, outcomes))
        while self._ended and all(run is None or run.ended.reached for run in self._ended[0][0]):
            self._learn(*self._ended.popleft())

    def prepared(self, sequence: Sequence) -> Prepared:
        """Empty under the rejection rule: drafts are of no use without their distributions."""
        run, rows = self._run, self._rows(sequence)
        if run is not None and rows and self.forests is not None:
            place = self._places[sequence.id]
            trees = self.forests.trees_of(run, place)
            return {outcome: trees[row - place * run.width] for outcome, row in rows.items()}
        return {} if run is None else {outcome: tuple(run.tokens[row][1:]) for outcome, row in rows.items()}

    def prepared_confidence(self, sequence: Sequence) -> Confidence:
        run, rows = self._run, self._rows(sequence)
        if run is None or not rows or self.levels:
            return {}
        first = min(rows.values())
        sure = self.runner.confidence(run, first, max(rows.values()) + 1)
        return {outcome: tuple(sure[row - first]) for outcome, row in rows.items()}

    def _rows(self, sequence: Sequence) -> dict[tuple[int, int], int]:
        """By outcome: the row of its branch in the last preparation."""
        run, place = self._run, self._places.get(sequence.id)
        if run is None or place is None or self.runner.rejection:
            return {}
        rows: dict[tuple[int, int], int] = {}
        for row, after in enumerate(run.after[place], place * run.width):
            if run.tokens[row][0] >= 0:
                rows.setdefault((after, run.tokens[row][0]), row)
        return rows

    def pin_hits(self, rate: float) -> None:
        if self.levels:
            raise ConfigError("hits are drawn for chains only: leave trees out")
        self.runner.pin_hits(rate)

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence.id, None)
        self.model.forget(sequence)

    def _learn(self, round_: _Round, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        """Updates the statistics from a round whose runs have ended: acceptance, ranks, times of the draft model."""
        run, written = round_
        if written is not None:
            self.stats.busy_seconds += written.seconds
            self.policy.wrote(written.seconds)
        if run is None:
            return
        self.stats.busy_seconds += run.seconds
        if self.levels:
            return  # outcomes are ranked by scores
        place = {slot: i for i, slot in enumerate(run.slots)}
        for work, outcome in zip(works, outcomes, strict=True):
            i = place.get(work.slot)
            if i is None or outcome is None or (outcome.draft and outcome.origin not in MODEL_WRITTEN):
                continue
            accepted, ranked = outcome.num_accepted, run.likeliest[i][outcome.num_accepted]
            own = outcome.token_ids[-1]
            rank = ranked.index(own) if own in ranked else None
            self.statistics.learn(run.confidence[i][: len(outcome.draft)], accepted, rank)
