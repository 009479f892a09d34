"""Speculative speculative decoding: the draft runs ahead of the verification.

While the target verifies, the draft prepares the next draft for every likely outcome. If the outcome was prepared (a
hit), the next round's draft is there at once; if not (a miss), a backup answers: the draft model, which the target then
waits for (`jit`), or something that costs nothing (`fast`).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ssd.core import Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter
from ssd.drafting.fan_out import FanOut, Forks, Outlook
from ssd.drafting.model import DraftModel, Mirror, cut, write_now
from ssd.drafting.ngram import NgramDrafter
from ssd.drafting.program import Run


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
        tokens, first = self.run.tokens(), self.lane * self.run.form.width
        return {(after, tokens[first + i][0]): first + i for i, (after, _) in enumerate(self.forks)}

    def rank(self, accepted: int, token: int) -> int | None:
        ranked = self.run.likeliest()[self.lane][accepted]
        return ranked.index(token) if token in ranked else None


@dataclass
class _Record:
    """A sequence's drafter-side state."""

    prepared: Prepared | None = None
    confidence: list[float] = field(default_factory=list)  # of the draft under verification
    hit: bool = False  # whether that draft had been prepared


class AheadDrafter(Drafter):
    """Keeps, for every sequence, the drafts of its next round; `overlap` off prepares them before the target starts."""

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
        self.budget = budget  # forks of one sequence
        self.lookahead = lookahead
        self.outlook = Outlook()
        self._records: dict[int, _Record] = {}
        self._ngram = NgramDrafter(lookahead)

    @property
    def interrupted(self) -> Callable[[], bool]:
        """Says, between two depths, whether preparing has to end now: shallower drafts are better than late ones."""
        return self.model.program.interrupted

    @interrupted.setter
    def interrupted(self, ask: Callable[[], bool]) -> None:
        self.model.program.interrupted = ask

    # --- the seam -----------------------------------------------------------------------------------------------------

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        found = [self._look_up(work) for work in works]
        missed = [work for work, proposal in zip(works, found, strict=True) if proposal is None]
        backups = iter(self._back_up(missed, works))
        proposals = [next(backups) if proposal is None else proposal for proposal in found]
        self.model.program.join()
        return proposals

    def anticipate(self, works: Seq[Work]) -> None:
        """Prepares for every sequence that is about to decide a token; reads the others' prompts."""
        lanes: list[tuple[Work, Mirror]] = []
        for work in works:
            mirror = self.model.follow(work, works) if work.sequence.params.speculate else None
            if mirror is None:
                continue
            if work.decides:
                lanes.append((work, mirror))
            else:
                self.model.read(mirror, work.sequence.num_computed + work.num_tokens)
        lanes = lanes[: self.model.program.max_lanes]
        if lanes:
            self._prepare(lanes)

    def forget(self, sequence: Sequence) -> None:
        self._records.pop(sequence.id, None)
        self._ngram.forget(sequence)
        self.model.forget(sequence)

    def prepared(self, sequence: Sequence) -> Prepared | None:
        """What is prepared for the next round of a sequence."""
        record = self._records.get(sequence.id)
        return record.prepared if record is not None else None

    # --- looking up ---------------------------------------------------------------------------------------------------

    def _look_up(self, work: Work) -> Proposal | None:
        """The prepared draft of what was decided; nothing for a sequence that takes none; None after a miss."""
        record = self._records.setdefault(work.sequence.id, _Record())
        prepared, record.prepared = record.prepared, None
        record.hit, record.confidence = False, []
        if prepared is not None:
            self._learn(prepared, work.sequence)
        if work.lookahead == 0 or work.sequence.num_output == 0:
            return Proposal()
        row = self._row(prepared, work.sequence) if prepared is not None else None
        if prepared is None or row is None:
            return None
        run = prepared.run
        tokens = cut(work, run.tokens()[row][1:])
        record.hit, record.confidence = True, run.confidence()[row][1 : len(tokens) + 1]
        laws = run.laws(row, 1, len(tokens) + 1) if self.model.program.chooser.drawn else None
        return Proposal(tokens, laws, "hit")

    def _learn(self, prepared: Prepared, sequence: Sequence) -> None:
        new = sequence.tokens[prepared.num_decided :]
        if 0 < len(new) <= len(prepared.draft) + 1:
            self.outlook.learn(prepared.confidence, len(new) - 1, prepared.rank(len(new) - 1, new[-1]))

    def _row(self, prepared: Prepared, sequence: Sequence) -> int | None:
        *accepted, token = sequence.tokens[prepared.num_decided :]
        if tuple(accepted) != prepared.draft[: len(accepted)]:
            return None
        return prepared.branches().get((len(accepted), token))

    # --- missing ------------------------------------------------------------------------------------------------------

    def _back_up(self, missed: Seq[Work], works: Seq[Work]) -> list[Proposal]:
        if self.backup == "fast":
            return [self._fast(work) for work in missed]
        able = [(work, mirror) for work in missed if (mirror := self.model.follow(work, works))]
        written = {id(work): p for (work, _), p in zip(able, write_now(self.model, able, "jit"), strict=True)}
        return [written.get(id(work), Proposal(origin="jit")) for work in missed]

    def _fast(self, work: Work) -> Proposal:
        (proposal,) = self._ngram.propose([work])
        return Proposal(cut(work, proposal.token_ids), None, "ngram")

    # --- preparing ----------------------------------------------------------------------------------------------------

    def _prepare(self, lanes: Seq[tuple[Work, Mirror]]) -> None:
        budget = min(self.budget, self.model.program.width_of(len(lanes)))
        drafts = [work.proposal.token_ids for work, _ in lanes]
        records = [self._records.setdefault(work.sequence.id, _Record()) for work, _ in lanes]
        sure = [
            (record.confidence + [1.0] * len(draft))[: len(draft)]
            for record, draft in zip(records, drafts, strict=True)
        ]
        forks = [
            self.fan_out.plan(self.outlook, confidence, record.hit, budget)
            for record, confidence in zip(records, sure, strict=True)
        ]
        run = self.model.branch([mirror for _, mirror in lanes], drafts, forks, self.lookahead)
        for lane, record in enumerate(records):
            decided = len(lanes[lane][0].sequence.tokens)
            record.prepared = Prepared(decided, drafts[lane], sure[lane], forks[lane], run, lane)
        if not self.overlap:
            run.wait()
