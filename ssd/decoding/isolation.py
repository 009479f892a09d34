"""Which sequences a drafter is asked for after it has raised: one that it cannot serve is decoded without drafts.

A drafter raises for a whole round. The cause is searched for among the sequences of that round which it has not served
since, by bisection: half of them are left out until a round shows which half it is in.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from ssd.core import Work

MAX_BACKOFF = 1024  # rounds
RESET_AFTER = 256  # good rounds after which earlier failures no longer count
_PAUSE = 2  # rounds: those in flight are over then


class Isolation:
    """The sequences that are decoded without drafts for a while (backoff), and those among which the cause is."""

    def __init__(self) -> None:
        self.failures = 0  # each doubles the backoff
        self._pause = 0  # rounds until the drafter is asked at all
        self._good_rounds = 0  # since the last failure
        self._served: set[int] = set()  # sequences of good rounds
        self._candidates: set[int] = set()  # sequences, one of which made the drafter raise
        self._backoff: dict[int, int] = {}  # by sequence id: rounds until the drafter is asked for it again

    def asked(self, works: Seq[Work]) -> Seq[Work]:
        """The works of a new round that the drafter is asked for."""
        if not (self._pause or self._candidates or self._backoff):
            return works
        self._pause = max(0, self._pause - 1)
        if self._pause:
            return []
        self._backoff = {i: rounds - 1 for i, rounds in self._backoff.items() if rounds > 1}
        candidates = [work.sequence.id for work in works if work.sequence.id in self._candidates]
        left_out = {*self._backoff, *candidates[(len(candidates) + 1) // 2 :]}
        return [work for work in works if work.sequence.id not in left_out]

    def failed(self, asked: Seq[Work]) -> None:
        """The drafter has raised in a round for these works."""
        ids = _ids(asked)
        self.failures += 1
        backoff = min(2**self.failures, MAX_BACKOFF)
        self._pause = _PAUSE if self._good_rounds else backoff  # it may not work at all
        self._good_rounds = 0
        self._candidates = ids & self._candidates or ids - self._served or ids
        self._served -= self._candidates
        if len(self._candidates) == 1:
            self._backoff[self._candidates.pop()] = backoff

    def succeeded(self, asked: Seq[Work]) -> None:
        """The drafter has served these works in a round, from the proposal to the outcomes."""
        if asked:
            ids = _ids(asked)
            self._served |= ids
            self._candidates -= ids
            self._good_rounds += 1
            if self._good_rounds >= RESET_AFTER:
                self.failures = 0

    def forget(self, sequence_id: int) -> None:
        self._served.discard(sequence_id)
        self._candidates.discard(sequence_id)
        self._backoff.pop(sequence_id, None)


def _ids(works: Iterable[Work]) -> set[int]:
    return {work.sequence.id for work in works}
