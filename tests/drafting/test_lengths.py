"""Lengths of the drafts of a batch."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ssd.drafting.lengths import shared_lengths


@pytest.mark.parametrize("seed", range(30))
def test_the_likeliest_tokens_are_verified(seed: int) -> None:
    """As many as with equal lengths, at least one of each draft; no other lengths have a larger expected acceptance."""
    dice = random.Random(seed)
    n, most, k = dice.randint(1, 4), dice.randint(1, 5), dice.randint(1, 5)
    rates = np.array([[dice.choice([0.0, 0.3, 0.5, 0.9, 1.0]) for _ in range(most)] for _ in range(n)])
    chances, limits = rates.cumprod(1), [dice.randint(1, most) for _ in range(n)]
    found = shared_lengths(chances, limits, k)
    budget = sum(min(limit, k) for limit in limits)
    assert sum(found) == budget
    assert all(1 <= length <= limit for length, limit in zip(found, limits, strict=True))

    def expected(lengths: tuple[int, ...]) -> float:
        return float(sum(row[:length].sum() for row, length in zip(chances, lengths, strict=True)))

    possible = itertools.product(*(range(1, limit + 1) for limit in limits))
    best = max(expected(lengths) for lengths in possible if sum(lengths) == budget)
    assert expected(tuple(found)) == pytest.approx(best)
