"""The number of branches that a worker prepares within a verification, by the times of its last rounds."""

from __future__ import annotations

from collections import deque

from ssd.drafting.shapes import widths_up_to

_FIRST = 16  # branches
_SAMPLES = 3  # rounds between two changes, of which the fastest counts: steps of a new shape are recorded in two
# Shares of a verification's time: with a preparation that takes more there are fewer branches next time; there are more
# if they would take less in proportion to their number. (They take less than that, so the number does not swing.)
_FULL, _ROOM = 0.95, 0.9


class WidthInTime:
    """`width`: branches per sequence of the next round, `most` at most."""

    def __init__(self, most: int) -> None:
        self._widths = widths_up_to(most)
        self._place = max(i for i, width in enumerate(self._widths) if width <= max(_FIRST, self._widths[0]))
        self._last: deque[float] = deque(maxlen=_SAMPLES)

    @property
    def width(self) -> int:
        return self._widths[self._place]

    def add(self, seconds: float, verification: float) -> None:
        """Adds what a round took from its message to what was prepared, and what a verification takes."""
        self._last.append(seconds)
        if len(self._last) < _SAMPLES:
            return
        least = min(self._last)
        wider = self._widths[min(self._place + 1, len(self._widths) - 1)]
        if least > _FULL * verification and self._place:
            self._place -= 1
        elif wider > self.width and least * wider / self.width < _ROOM * verification:
            self._place += 1
        else:
            return
        self._last.clear()
