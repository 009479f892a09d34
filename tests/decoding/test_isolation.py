"""Isolation: which sequences a drafter is asked for after it has raised."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import make_sequence

from ssd.core import Work
from ssd.decoding.isolation import MAX_BACKOFF, RESET_AFTER, Isolation


def works(count: int) -> list[Work]:
    return [Work(make_sequence([1], id=i), 1) for i in range(count)]


def ids(asked: Sequence[Work]) -> list[int]:
    return [work.sequence.id for work in asked]


def until_asked(isolation: Isolation, batch: list[Work]) -> tuple[int, Sequence[Work]]:
    """Rounds that go by, and whom the drafter is asked for then."""
    for i in range(2 * MAX_BACKOFF):
        if asked := isolation.asked(batch):
            return i, asked
    raise AssertionError("the drafter is never asked again")


def test_a_new_sequence_is_left_out_before_those_that_were_served() -> None:
    isolation, batch = Isolation(), works(4)
    isolation.succeeded(isolation.asked(batch[:3]))
    isolation.failed(isolation.asked(batch))
    pause, asked = until_asked(isolation, batch)
    assert (pause, ids(asked)) == (1, [0, 1, 2])


@pytest.mark.parametrize("cause", range(8))
def test_the_cause_is_found_among_many_by_halving(cause: int) -> None:
    isolation, batch, failures = Isolation(), works(8), 0
    for _ in range(100):
        asked = isolation.asked(batch)
        if cause in ids(asked):
            isolation.failed(asked)
            failures += 1
        else:
            isolation.succeeded(asked)
        if len(asked) == 7 and cause not in ids(asked):
            break
    assert ids(asked) == [i for i in range(8) if i != cause]
    assert failures <= 4


def test_failures_are_forgotten_after_enough_good_rounds() -> None:
    isolation, batch = Isolation(), works(1)
    backoffs = []
    for _ in range(12):
        isolation.failed(until_asked(isolation, batch)[1])
        backoffs.append(until_asked(isolation, batch)[0])
    assert backoffs == sorted(backoffs)
    assert MAX_BACKOFF <= backoffs[-1] <= 2 * MAX_BACKOFF
    for _ in range(RESET_AFTER):
        isolation.succeeded(batch)
    isolation.failed(batch)
    assert until_asked(isolation, batch)[0] < 5


def test_a_sequence_that_has_ended_leaves_nothing_behind() -> None:
    isolation, batch = Isolation(), works(2)
    isolation.succeeded(batch[:1])
    isolation.failed(batch[1:])
    isolation.failed(batch)
    for i in range(2):
        isolation.forget(i)
    assert [*isolation._served, *isolation._candidates, *isolation._backoff] == []
