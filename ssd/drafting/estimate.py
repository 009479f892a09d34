"""Running estimates that forget: the newest observations count most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Frequency:
    """How often something happens, of how often it might. `keep`: weight that the past keeps at every observation.

    It starts with `happened` of `expected`; with a prior that much of the initial guess never fades.
    """

    happened: float
    expected: float
    keep: float
    prior: float = 0.0
    prior_weight: float = 0.0

    @property
    def value(self) -> float:
        return self.happened / self.expected

    def add(self, happened: float, expected: float = 1.0) -> None:
        self.happened = self.keep * (self.happened - self.prior) + self.prior + happened
        self.expected = self.keep * (self.expected - self.prior_weight) + self.prior_weight + expected


@dataclass
class Mean:
    """An exponential moving average that starts with its first value."""

    value: float | None = None
    weight: float = 1 / 16  # of a new value

    def add(self, value: float) -> None:
        self.value = value if self.value is None else self.value + (value - self.value) * self.weight
