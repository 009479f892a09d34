"""Running averages in which old observations lose weight."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Average:
    """Weighted mean of observations: numbers, or numpy vectors of one length.

    Every new observation multiplies the weight of all earlier ones by `keep`. `total` and `weight` may start with a
    guess, which fades like an observation; a prior is a guess that keeps its weight.
    """

    keep: float
    total: Any = 0.0
    weight: float = 0.0
    prior_total: Any = 0.0
    prior_weight: float = 0.0

    @property
    def known(self) -> bool:
        """Whether there is an observation, or a guess."""
        return self.weight + self.prior_weight > 0.0

    @property
    def value(self) -> Any:
        return (self.total + self.prior_total) / (self.weight + self.prior_weight)

    def add(self, value: Any, weight: float = 1.0) -> None:
        """Adds an observation; `value` is multiplied by its weight already."""
        self.total = self.keep * self.total + value
        self.weight = self.keep * self.weight + weight


@dataclass
class TypicalSeconds:
    """Mean of the last times, 16 unless `last` has another length, in seconds, without those above `most` medians."""

    mean: float = 0.0  # 0: not known
    last: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    most: float = 2.0

    def add(self, value: float) -> None:
        self.last.append(value)
        most = self.most * sorted(self.last)[len(self.last) // 2]
        usual = [each for each in self.last if each <= most]
        self.mean = sum(usual) / len(usual)
