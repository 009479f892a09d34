"""Which sequences a drafter is asked for after it has raised: one that it cannot serve is decoded without drafts.

A drafter raises for a whole round. The cause is looked for among the sequences of that round which it has not served
since: half of them are left out until a round tells which half it is in.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Seq

from ssd.core import Work

MAX_REST = 1024  # rounds
FORGIVEN = 256  # good rounds after which failures no longer count
_PAUSE = 2  # rounds: those in flight are over then


class Isolation:
    """The sequences that rest, and those that are suspected."""

    def __init__(self) -> None:
        self.failures = 0  # that count: each doubles the rests
        self._pause = 0  # rounds until the drafter is asked at all
        self._good_rounds = 0  # since the last failure
        self._served: set[int] = set()  # sequences of good rounds
        self._suspects: set[int] = set()  # sequences, one of which made the drafter raise
        self._rests: dict[int, int] = {}  # by sequence id: rounds until the drafter is asked for it again

    def asked(self, works: Seq[Work]) -> Seq[Work]:
        """The works of a new round that the drafter is asked for."""
        if not (self._pause or self._suspects or self._rests):
            return works
        self._pause = max(0, self._pause - 1)
        if self._pause:
            return []
        self._rests = {i: rounds - 1 for i, rounds in self._rests.items() if rounds > 1}
        suspects = [work.sequence.id for work in works if work.sequence.id in self._suspects]
        left_out = {*self._rests, *suspects[(len(suspects) + 1) // 2 :]}
        return [work for work in works if work.sequence.id not in left_out]

    def failed(self, asked: Seq[Work]) -> None:
        """The drafter has raised in a round for these works."""
        ids = _ids(asked)
        self.failures += 1
        rest = min(2**self.failures, MAX_REST)
        self._pause = _PAUSE if self._good_rounds else rest  # it may not work at all
        self._good_rounds = 0
        self._suspects = ids & self._suspects or ids - self._served or ids
        self._served -= self._suspects
        if len(self._suspects) == 1:
            self._rests[self._suspects.pop()] = rest

    def succeeded(self, asked: Seq[Work]) -> None:
        """A round for these works went well from the proposal to the outcomes."""
        if asked:
            ids = _ids(asked)
            self._served |= ids
            self._suspects -= ids
            self._good_rounds += 1
            if self._good_rounds >= FORGIVEN:
                self.failures = 0

    def forget(self, sequence_id: int) -> None:
        self._served.discard(sequence_id)
        self._suspects.discard(sequence_id)
        self._rests.pop(sequence_id, None)


def _ids(works: Iterable[Work]) -> set[int]:
    return {work.sequence.id for work in works}
