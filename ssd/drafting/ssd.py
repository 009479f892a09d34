"""Speculative speculative decoding (SSD): drafts are prepared during the verification before.

While the target verifies, the draft model prepares the next draft for each of its likely outcomes. If the outcome is
among them (a hit), the next round's draft is ready. If not (a miss), the backup is used: `jit`, a draft that is written
now while the target waits, or `fast`, the sibling: the draft prepared for the same number of accepted tokens and
another last token. Drafts are chains, or trees (`ssd.drafting.ahead`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssd.core import Origin, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Confidence, Drafter, PerRound, Prepared, never
from ssd.drafting.ahead import ChainsAhead, TreesAhead
from ssd.drafting.estimate import Average, TypicalSeconds
from ssd.drafting.fan_out import FanOut
from ssd.drafting.model import Able, DraftSource, wants_draft
from ssd.drafting.runner import DraftRun, StagedBranches

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
        self.model, self.runner = model, model.runner
        self.ahead = TreesAhead(model, fan_out, levels) if levels else ChainsAhead(model, fan_out)
        self.lookahead = lookahead
        self.budget = budget
        self.overlap = overlap
        self.policy = BackupPolicy(backup)
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
            written, self._written = self.model.write(unprepared + missed, levels=self.ahead.levels)
            proposals |= {id(work): p for (work, _), p in zip(unprepared + missed, written, strict=True)}
            proposals |= {id(work): replace(proposals[id(work)], origin=Origin.JIT) for work, _ in missed}
        return [proposals.get(id(work), Proposal()) for work in works]

    def _look_up(self, run: DraftRun, places: dict[int, int]) -> tuple[dict[int, Proposal], list[Able]]:
        """Prepared drafts by id() of their works, and the works whose draft must be written now.

        On the device, misses get their sibling's draft. With the rejection rule the host looks up, too, and misses are
        written.
        """
        self.ahead.look_up(run)
        if not self.runner.rejection:
            return {id(work): self.ahead.proposal(work, run) for work, _ in self._looked_up}, []
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
        branching = self.ahead.able(deciding)
        self._staged = self._stage(branching) if any(work.lookahead for work in branching) else None
        for work in works:
            if work.proposal.origin is Origin.DRAFT:
                self.model.mark_read(work, branched=False)
        if self._back_up() and self._staged is not None:
            self.ahead.restage(self._staged)  # the backup has changed the drafts
        if self._staged is None:
            return False
        for work in branching:
            self.model.mark_read(work, branched=True)
        return self.overlap and self.ahead.in_part(self._staged)

    def _back_up(self) -> bool:
        """Writes drafts after misses if the policy says so (this waits for the look-up); returns whether it did."""
        looked_up = self._looked_up
        if self.runner.rejection or not looked_up or not self.policy.waits(len(looked_up), len(looked_up)):
            return False
        origins = self.runner.origins([work.slot for work, _ in looked_up])
        missed = [pair for pair, origin in zip(looked_up, origins, strict=True) if origin is not Origin.HIT]
        if not missed or not self.policy.waits(len(missed), len(looked_up)):
            return False
        _, self._written = self.model.write(missed, Origin.JIT, levels=self.ahead.levels)
        for work, _ in missed:
            self.model.mark_read(work, branched=False)
        return True

    def _stage(self, works: Seq[Work]) -> StagedBranches:
        shapes = self.runner.shapes
        self._places = {work.sequence.id: place for place, work in enumerate(works)}
        most = min(self.budget, shapes.width_of(len(works)), self._in_time)
        return self.ahead.stage(works, shapes.width_within(most))

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            self._run = self.ahead.prepare(staged, works, overlap=self.overlap, interrupted=interrupted)
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
        if run is None or not rows:
            return {}
        drafts = self.ahead.drafts(run, self._places[sequence.id], [*rows.values()])
        return dict(zip(rows, drafts, strict=True))

    def prepared_confidence(self, sequence: Sequence) -> Confidence:
        run, rows = self._run, self._rows(sequence)
        return {} if run is None else dict(zip(rows, self.ahead.confidence(run, [*rows.values()]), strict=False))

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
        self.ahead.pin_hits(rate)

    def forget(self, sequence: Sequence) -> None:
        self._places.pop(sequence.id, None)
        self.model.forget(sequence)

    def _learn(self, round_: _Round, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        """Learns from a round whose runs have ended: times of the draft model, and what `ahead` wants to know."""
        run, written = round_
        if written is not None:
            self.stats.busy_seconds += written.seconds
            self.policy.wrote(written.seconds)
        if run is None:
            return
        self.stats.busy_seconds += run.seconds
        self.ahead.learn(run, works, outcomes)
