"""Speculative speculative decoding: the draft runs ahead of the verification.

While the target verifies, the draft prepares the next draft for every likely outcome. If the outcome was prepared (a
hit), the next round's draft is there at once; if not (a miss), a backup answers: the draft model, which the target then
waits for (`jit`), or something that costs nothing (`fast`).
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ssd.core import Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter, Outcomes
from ssd.drafting.fan_out import FanOut, Forks, Outlook
from ssd.drafting.model import DraftModel, Mirror, write_now
from ssd.drafting.ngram import NgramDrafter
from ssd.drafting.program import Run

WRITTEN = frozenset({"draft", "hit", "jit"})  # origins of drafts that the model wrote
_FEWER, _MORE = 0.75, 0.25  # times so many forks after a preparation that somebody waited for, else plus so many
_NARROWEST = 2.0


@dataclass
class Prepared:
    """What was prepared for one sequence while its last draft was being verified."""

    num_decided: int  # tokens, when it was
    draft: tuple[int, ...]
    confidence: list[float]  # of the draft's tokens
    forks: Forks
    run: Run
    lane: int

    def branches(self) -> dict[tuple[int, int], int]:
        """(accepted, token that the target adds) -> row of the run."""
        tokens, first = self.run.tokens, self.lane * self.run.form.width
        return {(after, tokens[first + i][0]): first + i for i, (after, _) in enumerate(self.forks)}

    def row(self, sequence: Sequence) -> int | None:
        """Of what was decided since; None: it was not prepared."""
        new = sequence.tokens[self.num_decided :]
        if not new or tuple(new[:-1]) != self.draft[: len(new) - 1]:
            return None
        return self.branches().get((len(new) - 1, new[-1]))

    def sibling(self, sequence: Sequence) -> list[int]:
        """What was prepared for another token in the place of the last decided one, the likeliest; else nothing."""
        accepted = len(sequence.tokens) - 1 - self.num_decided
        row = next((row for (after, _), row in self.branches().items() if after == accepted), None)
        return [] if row is None else self.run.tokens[row][1:]

    def rank(self, accepted: int, token: int) -> int | None:
        ranked = self.run.likeliest[self.lane][accepted]
        return ranked.index(token) if token in ranked else None


@dataclass
class _Record:
    """A sequence's drafter-side state."""

    prepared: Prepared | None = None
    missed: Prepared | None = None  # what was prepared for other outcomes than the one that came
    confidence: list[float] = field(default_factory=list)  # of the draft under verification
    origin: str = ""  # of that draft


@dataclass
class _Mean:
    """Of late; starts with the first value."""

    value: float | None = None

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + (value - self.value) / 16


@dataclass
class Worth:
    """Is a draft that everybody waits for worth it? Tokens that it adds, against tokens that the wait costs."""

    yields: dict[str, _Mean] = field(default_factory=lambda: defaultdict(_Mean))  # tokens of a round, by origin
    round_seconds: _Mean = field(default_factory=_Mean)
    write_seconds: _Mean = field(default_factory=_Mean)

    def waiting_pays(self, missed: int, batch: int) -> bool:
        """True as long as something about it is unknown."""
        written, fast, hit = (self.yields[origin].value for origin in ("jit", "ngram", "hit"))
        seconds, wait = self.round_seconds.value, self.write_seconds.value
        if written is None or seconds is None or wait is None:
            return True
        added = missed * (written - (fast or 1.0))
        return added * seconds > batch * (hit or written) * wait


class AheadDrafter(Drafter):
    """Keeps, for every sequence, the drafts of its next round; `overlap` off waits until they are there."""

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
        self.model = model
        self.fan_out = fan_out
        self.backup = backup
        self.overlap = overlap
        self.budget = budget  # forks of one sequence; 0: drafts when asked, as in plain speculative decoding
        self._in_time = float(model.program.max_width)  # forks of one sequence that are ready when they are wanted
        self.lookahead = lookahead
        self.outlook = Outlook()
        self.worth = Worth()
        self._records: dict[int, _Record] = {}
        self._ngram = NgramDrafter(lookahead)
        self._run: Run | None = None  # the last preparation, until it is counted
        self._reading = True  # whether the last round read prompts: it says nothing about the others then

    @property
    def busy_seconds(self) -> float:  # type: ignore[override]
        return self.model.busy_seconds

    @property
    def interrupted(self) -> Callable[[], bool]:
        """Says, between two depths, whether preparing has to end now: shallower drafts are better than late ones."""
        return self.model.program.interrupted

    @interrupted.setter
    def interrupted(self, ask: Callable[[], bool]) -> None:
        self.model.program.interrupted = ask

    # --- the seam -----------------------------------------------------------------------------------------------------

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        if not self._reading:
            self.worth.round_seconds.add(self.round_seconds)
        found = [self._look_up(work) for work in works]
        if self._run is not None:
            self.model.busy_seconds += self._run.seconds
            self._run = None
        missed = [work for work, proposal in zip(works, found, strict=True) if proposal is None]
        backups = iter(self._back_up(missed, works) if missed else [])
        proposals = [next(backups) if proposal is None else proposal for proposal in found]
        for work, proposal in zip(works, proposals, strict=True):
            self._records[work.sequence.id].origin = proposal.origin
        self.model.program.join()
        return proposals

    def anticipate(self, works: Seq[Work]) -> None:
        """Prepares for every sequence that is about to decide a token; reads the others' prompts."""
        self._reading = any(work.num_tokens > 1 for work in works)
        lanes: list[tuple[Work, Mirror]] = []
        for work in works:
            prepares = work.decides and self.budget > 0
            if not work.sequence.params.speculate or not (prepares or work.num_tokens > 1):
                continue
            mirror = self.model.follow(work, works)
            if mirror is None:
                continue
            if prepares:
                lanes.append((work, mirror))
            if work.num_tokens > 1:
                self.model.read(work, mirror)
        if any(work.lookahead for work, _ in lanes):
            self._prepare(lanes)

    def forget(self, sequence: Sequence) -> None:
        self._records.pop(sequence.id, None)
        self._ngram.forget(sequence)
        self.model.forget(sequence)

    def outcomes(self, sequence: Sequence) -> Outcomes:
        """Nothing where drafts are worth nothing without their laws."""
        prepared = self.prepared(sequence)
        if prepared is None or self.model.program.chooser.drawn:
            return {}
        return {outcome: tuple(prepared.run.tokens[row][1:]) for outcome, row in prepared.branches().items()}

    def prepared(self, sequence: Sequence) -> Prepared | None:
        """What is prepared for the next round of a sequence."""
        record = self._records.get(sequence.id)
        return record.prepared if record is not None else None

    # --- looking up ---------------------------------------------------------------------------------------------------

    def _look_up(self, work: Work) -> Proposal | None:
        """The prepared draft of what was decided; nothing for a sequence that takes none; None after a miss."""
        record = self._records.setdefault(work.sequence.id, _Record())
        prepared, record.prepared = record.prepared, None
        record.confidence, record.missed = [], prepared
        if prepared is not None:
            self._learn(prepared, record.origin, work.sequence)
        if work.lookahead == 0 or work.sequence.num_output == 0:
            return Proposal()
        row = prepared.row(work.sequence) if prepared is not None else None
        if prepared is None or row is None:
            return None
        run = prepared.run
        tokens = work.usable(run.tokens[row][1:])
        record.confidence = run.confidence[row][1 : len(tokens) + 1]
        laws = run.laws(row, 1, len(tokens) + 1) if self.model.program.chooser.drawn else None
        return Proposal(tokens, laws, "hit")

    def _learn(self, prepared: Prepared, origin: str, sequence: Sequence) -> None:
        new = sequence.tokens[prepared.num_decided :]
        if 0 < len(new) <= len(prepared.draft) + 1:
            if origin in WRITTEN:
                self.outlook.learn(prepared.confidence, len(new) - 1, prepared.rank(len(new) - 1, new[-1]))
            self.worth.yields["ngram" if origin == "sibling" else origin].add(len(new))

    # --- missing ------------------------------------------------------------------------------------------------------

    def _back_up(self, missed: Seq[Work], works: Seq[Work]) -> list[Proposal]:
        """Only those that missed; the others' drafts are there."""
        unprepared = all(self._records[work.sequence.id].missed is None for work in missed)
        wait = (
            self.backup == "jit"
            or unprepared
            or (self.backup == "auto" and self.worth.waiting_pays(len(missed), len(works)))
        )
        if not wait:
            return [self._fast(work) for work in missed]
        able = [(work, mirror) for work in missed if (mirror := self.model.follow(work, works))]
        began = time.perf_counter()
        written = write_now(self.model, able, "draft" if unprepared else "jit")
        self.worth.write_seconds.add(time.perf_counter() - began)
        found = {work.sequence.id: proposal for (work, _), (proposal, _) in zip(able, written, strict=True)}
        for (work, _), (_, confidence) in zip(able, written, strict=True):
            self._records[work.sequence.id].confidence = confidence
        return [found.get(work.sequence.id, Proposal(origin="jit")) for work in missed]

    def _fast(self, work: Work) -> Proposal:
        """What followed these tokens before; else what was prepared for another token in the place of the last."""
        (proposal,) = self._ngram.propose([work])
        if proposal.token_ids:
            return Proposal(work.usable(proposal.token_ids), None, "ngram")
        prepared = self._records[work.sequence.id].missed
        return Proposal(work.usable(prepared.sibling(work.sequence) if prepared is not None else []), None, "sibling")

    # --- preparing ----------------------------------------------------------------------------------------------------

    def _prepare(self, lanes: Seq[tuple[Work, Mirror]]) -> None:
        budget = min(self.budget, self.model.program.width_of(len(lanes)), int(self._in_time))
        drafts = [work.proposal.token_ids for work, _ in lanes]
        records = [self._records.setdefault(work.sequence.id, _Record()) for work, _ in lanes]
        sure = [
            (record.confidence + [0.0] * len(draft))[: len(draft)]  # of a look-up nobody is sure
            for record, draft in zip(records, drafts, strict=True)
        ]
        forks = [
            self.fan_out.plan(self.outlook, confidence, record.origin == "hit", budget)
            for record, confidence in zip(records, sure, strict=True)
        ]
        count = max(work.lookahead for work, _ in lanes)
        self._run = run = self.model.branch([mirror for _, mirror in lanes], drafts, forks, count)
        late = self.interrupted()
        widest = self.model.program.max_width
        self._in_time = max(_NARROWEST, _FEWER * budget) if late else min(widest, self._in_time + _MORE)
        for lane, record in enumerate(records):
            decided = len(lanes[lane][0].sequence.tokens)
            record.prepared = Prepared(decided, drafts[lane], sure[lane], forks[lane], run, lane)
        if not self.overlap:
            run.wait()
