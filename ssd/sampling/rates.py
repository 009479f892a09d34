"""Acceptance as options say it: rates by position in the draft, or the mean number of tokens of a round."""

from __future__ import annotations

from typing import Final

_RATE: Final = r"(0(\.\d+)?|1(\.0+)?)"
PATTERN: Final = rf"\d+(\.\d+)?|{_RATE}(,{_RATE})+"
EXPECTS: Final = "a number above 1, or rates from 0 to 1 separated by commas"


def parsed(text: str) -> tuple[float, ...]:
    """The numbers of a text that matches `PATTERN`."""
    return tuple(map(float, text.split(",")))


def rates_of(accept: tuple[float, ...], k: int) -> list[float]:
    """Rates by position of drafts of `k` tokens. `accept`: such rates, the last of which is repeated; or one number
    above 1, the mean number of tokens of a round, the target's own among them, which equal rates give.

    ValueError if there are none.
    """
    if len(accept) != 1 or accept[0] <= 1:
        return [*accept, *[accept[-1]] * k][:k]
    if accept[0] > k + 1:
        raise ValueError(f"a round with {k} draft tokens has at most {k + 1} tokens")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(k + 1)) < accept[0] else (low, rate)
    return [low] * k
