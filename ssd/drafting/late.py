"""A drafter in other processes, with rounds in flight: drafts are looked up when the device executes the look-up.

Round n + 1 is launched while round n is verified. Meanwhile the workers send what they have prepared for the outcomes
of round n, and the host enters it in tables (`ssd.drafting.table`). Right after the decision of round n, a kernel of
round n + 1 takes the draft for the outcome from there; so a hit costs no time. The host is told what was decided and
found, and tells the workers, before it commits round n. After a miss a kernel waits for a draft that a worker writes,
or takes the sibling's (`BackupPolicy`).
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from ssd.core import Origin, Outcome, Proposal, Sequence, Work
from ssd.drafting.estimate import Average
from ssd.drafting.process import ProcessDrafter
from ssd.drafting.replica import DraftReplica
from ssd.drafting.ssd import BackupPolicy
from ssd.drafting.table import DraftAnswers, DraftTables
from ssd.drafting.width import WidthInTime
from ssd.drafting.wire import Draft
from ssd.execution.clock import Clock
from ssd.execution.state import SequenceState
from ssd.parallel.supervisor import Peer

_POLL = 5e-5  # seconds between two looks for messages
_GRACE = 0.01  # seconds that the device waits longer than the host


@dataclass
class _Launched:
    """A round that the workers have not been told of yet."""

    number: int
    works: Seq[Work]
    looked_up: list[Work] = field(default_factory=list)
    awaits: bool = False  # the device waits for answers after misses


class LateBindingDrafter(ProcessDrafter):
    """Drafts in the workers that `starts` launch, for a target on a GPU and the coupled rule.

    `budget`: the most branches that each worker prepares per sequence; it is asked for as many as it prepares in time.
    `backup`: as `SpeculationConfig.backup`.
    """

    needs_tokens = False

    def __init__(
        self,
        starts: Seq[Callable[[], Peer | None]],
        lookahead: int,
        state: SequenceState,
        *,
        budget: int,
        backup: str,
        **limits: Any,
    ) -> None:
        super().__init__(starts, lookahead, state.vocab_size, budget=budget, **limits)
        self.tables, self.answers = DraftTables(state, len(starts), budget), DraftAnswers(state)
        self.policy = BackupPolicy(backup)
        self._hits = Average(31 / 32, 8.0, 10.0)  # share of look-ups
        self._number = 0  # of the last round proposed for
        self._launched: _Launched | None = None
        self._sent = [0] * len(starts)  # by replica: the last round that it was told of
        self._widths = [WidthInTime(budget) for _ in starts]
        # When it was, if nothing but branches was wanted; None: that is known, or not to be measured.
        self._sent_at: list[float | None] = [None] * len(starts)
        self._slots: dict[int, int] = {}  # of the sequences of that round, by id
        self._last: dict[int, int] = {}  # by sequence id: its last round
        self._told: dict[int, int] = {}  # the same: the last one that a worker was told of
        self._fastest: deque[float] = deque(maxlen=32)  # seconds of the last rounds

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """Launches a look-up for all sequences whose last round a worker knows."""
        self._enter_prepared()
        self._number += 1
        launched = self._launched = _Launched(self._number, works)
        rounds = [self._last.get(work.sequence.id, 0) for work in works]
        self._last |= dict.fromkeys((work.sequence.id for work in works), self._number)
        if any(each.supervisor.ready for each in self.replicas):
            known = [w.lookahead > 0 and self._told.get(w.sequence.id) == r for w, r in zip(works, rounds, strict=True)]
            launched.looked_up = list(itertools.compress(works, known))
        if not launched.looked_up:
            return [Proposal()] * len(works)
        slots = [work.slot for work in launched.looked_up]
        self.tables.look_up(slots, list(itertools.compress(rounds, known)), self._longest_wait())
        return [
            Proposal(num_on_device=w.lookahead, origin=Origin.HIT) if k else Proposal()
            for w, k in zip(works, known, strict=True)
        ]

    def _longest_wait(self) -> float:
        """Seconds for which it pays to wait for what a worker prepares: a round without a draft has one token.

        0 if an earlier answer is still due.
        """
        if not self._fastest or any(each.overdue for each in self.replicas):
            return 0.0
        hit = self.policy.yields[Origin.HIT]
        return min(self._fastest) * max(0.0, (hit.value if hit.known else 2.0) - 1.0)

    def settle(self, works: Seq[Work]) -> bool:
        """Launches a wait for the drafts that are written after misses, if that is worth it."""
        launched = self._launched
        if launched is None or not launched.looked_up or any(work.sequence.has_host_logits for work in works):
            return False  # masks need the drafts: the host waits for the device in this round, and could not answer it
        batch = len(launched.looked_up)
        missed = max(1, round(batch * (1 - self._hits.value)))
        if self.policy.waits(missed, batch):
            launched.awaits = True
            slots = [work.slot for work in launched.looked_up]
            self.answers.wait(slots, launched.number, self.patience + _GRACE, Origin.JIT)
        return False

    def serve(self, ended: Clock) -> None:
        while not ended.reached and any(each.preparing for each in self.replicas):
            self._enter_prepared()
            time.sleep(_POLL)

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        """Tells the workers what was decided, and of the round that was launched after it."""
        launched, self._launched = self._launched, None
        if launched is None:
            return
        ended = {w.sequence.id for w, o in zip(works, outcomes, strict=True) if o is not None and o.token_ids[-1] < 0}
        tokens = {w.sequence.id: o.token_ids for w, o in zip(works, outcomes, strict=True) if o is not None}
        told = [work for work in launched.works if work.sequence.id not in ended]
        self._tell(launched, told, tokens)

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        super().observe(works, outcomes, seconds)
        self.policy.observe(works, outcomes, seconds)
        if not any(work.num_tokens > 1 for work in works):  # rounds with prefill take longer
            self._fastest.append(seconds)

    def catch_up(self, works: Seq[Work]) -> bool:
        for work in works:  # what was prepared is for the outcome of an earlier round
            self._told.pop(work.sequence.id, None)
        return super().catch_up(works)

    def forget(self, sequence: Sequence) -> None:
        super().forget(sequence)
        self._last.pop(sequence.id, None)
        self._told.pop(sequence.id, None)

    def _tell(self, launched: _Launched, works: Seq[Work], decided: Mapping[int, Seq[int]]) -> None:
        """Sends a round to the workers, with the drafts that it verifies; asks one for those that are awaited."""
        looked_up, drafts, missed = launched.looked_up, dict[int, Draft | None](), list[Work]()
        if looked_up and self.tables.looked_up is not None:
            self.serve(self.tables.looked_up)  # which may wait for what is sent now
        found = self.tables.found([work.slot for work in looked_up]) if looked_up else []
        for work, (origin, draft) in zip(looked_up, found, strict=True):
            self._hits.add(origin is Origin.HIT)
            drafts[work.sequence.id] = draft.cut(work.lookahead)
            if launched.awaits and origin is not Origin.HIT:
                missed.append(work)
        available = [each for each in self.replicas if each.available()]
        answers: dict[int, tuple[int, ...]] = {}
        try:
            if available:
                drafts |= {work.sequence.id: None for work in missed}
                answers = self._send(launched.number, works, drafts, available, decided)
            else:
                self.late += any(each.supervisor.ready for each in self.replicas)
        finally:
            for work in missed:  # the device waits for it
                self.answers.answer(work.slot, launched.number, answers.get(work.sequence.id, ()))

    def _send(
        self,
        number: int,
        works: Seq[Work],
        drafts: Mapping[int, Draft | None],
        available: Seq[DraftReplica],
        decided: Mapping[int, Seq[int]],
    ) -> dict[int, tuple[int, ...]]:
        """Returns the drafts that were asked for, by sequence id."""
        asked = available[self.replies % len(available)]
        given = [drafts.get(work.sequence.id, Draft()) for work in works]
        usual = None not in given and not any(work.num_tokens > 1 for work in works)
        for each in available:
            seconds, reply, i = self._round_seconds, each is asked, self.replicas.index(each)
            budget = min(self.budget, self._widths[i].width)
            each.send(works, given, seconds, budget=budget, reply=reply, ahead=True, decided=decided)
            self._sent[i], self._sent_at[i] = number, self._clock() if usual else None
        self._slots = {work.sequence.id: work.slot for work in works}
        self._told |= dict.fromkeys(self._slots, number)
        if None not in given:
            self.at_hand += 1
            return {}
        began = time.perf_counter()
        written = self._ask(asked)
        self.policy.wrote(time.perf_counter() - began)
        if written is None:
            return {}
        names = [work.sequence.id for work, draft in zip(works, given, strict=True) if draft is None]
        return {name: proposal.token_ids for name, proposal in zip(names, written, strict=True)}

    def _enter_prepared(self) -> None:
        """Enters what the workers have sent in the tables."""
        for i, each in enumerate(self.replicas):
            for sequence_id, prepared in each.take_prepared().items():
                if (slot := self._slots.get(sequence_id)) is not None:
                    self.tables.write(i, slot, self._sent[i], prepared)
            began = self._sent_at[i]
            if began is not None and self._fastest and not each.preparing:
                self._widths[i].add(self._clock() - began, min(self._fastest))
                self._sent_at[i] = None
