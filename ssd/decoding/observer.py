"""Observers of rounds: for traces, explanations and measurements. They are told, and change nothing."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager

from ssd.core import Outcome, Sequence, Work
from ssd.decoding.drafter import Prepared


class RoundObserver:
    """Told of each event once, on the engine's thread. This base class ignores all of them."""

    synchronous: bool = False  # True: every round is collected before the next one is launched

    def part(self, name: str) -> AbstractContextManager[object] | None:
        """Entered around a part of a round: schedule, propose, settle, verify, prepare, collect or observe."""
        return None

    def launched(self, works: Seq[Work], prepared: Callable[[Sequence], Prepared]) -> None:
        """A round was launched. `prepared` returns the drafter's branches of a sequence; on a GPU it waits for them."""

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        """A round was committed: its works as they were launched, what was decided, and how long it took."""
