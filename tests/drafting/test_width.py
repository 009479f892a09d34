"""How many branches a worker is asked for, by what its rounds take."""

from __future__ import annotations

import pytest

from ssd.drafting.shapes import widths_up_to
from ssd.drafting.width import WidthInTime

VERIFICATION = 0.016


def settled(most: int, fixed: float, each: float, rounds: int = 100) -> list[int]:
    """The last widths, of a draft whose round takes so many seconds, and so many for each branch."""
    chosen, widths = WidthInTime(most), list[int]()
    for _ in range(rounds):
        widths.append(chosen.width)
        chosen.add(fixed + each * chosen.width, VERIFICATION)
    return widths[-20:]


@pytest.mark.parametrize(
    ("most", "fixed", "each", "expected"),
    [
        (64, 0.004, 0.0001, 64),  # as many as there are to be
        (24, 0.004, 0.0001, 24),
        (64, 0.004, 0.0003, 24),  # 32 would take 13.6 ms, but 24 / 3 * 4 are 14.9
        (64, 0.010, 0.0005, 8),  # 12 take 16 ms
        (64, 0.030, 0.0, 1),  # never in time: as few as there can be
        (5, 0.004, 0.0, 5),
        (1, 0.1, 0.0, 1),
    ],
)
def test_as_many_branches_as_there_is_time_for(most: int, fixed: float, each: float, expected: int) -> None:
    """Catches a number that swings, since each change costs hits, and one that is late or too small."""
    assert set(settled(most, fixed, each)) == {expected}


def test_two_slow_rounds_change_nothing() -> None:
    """The first two of a shape are: catches fewer branches because of them, which are a new shape again."""
    chosen = WidthInTime(16)
    for i in range(50):
        chosen.add(0.3 if i % 3 else 0.01, VERIFICATION)
        assert chosen.width == 16


def test_widths_are_steps_up_to_a_number() -> None:
    assert widths_up_to(64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    assert widths_up_to(10) == (1, 2, 3, 4, 6, 8, 10)
    assert widths_up_to(1) == (1,)
