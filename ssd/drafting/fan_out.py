"""Which outcomes of a verification to prepare for: how many tokens stand, and which token the target adds.

An outcome is written `(after, rank)`: the first `after` drafted tokens stand, and the target adds the draft's
rank-likeliest token there (the drafted one itself left out, for had the target chosen it, it would stand).
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

from ssd.drafting.program import RANKS

Forks = list[tuple[int, int]]
_EDGES = (0.05, 0.15, 0.3, 0.6, 1.0, 1.6, 2.5, 4.0, 7.0)  # of confidence
_MEMORY = 0.998  # weight that older observations keep, per new one
_WEIGHT = 4.0  # of a guess, in observations


@dataclass
class _Share:
    """A frequency, of late, that starts from a guess."""

    guess: float
    seen: float = 0.0
    hits: float = 0.0

    def add(self, hit: bool) -> None:
        self.seen = self.seen * _MEMORY + 1
        self.hits = self.hits * _MEMORY + hit

    @property
    def value(self) -> float:
        return (self.hits + self.guess * _WEIGHT) / (self.seen + _WEIGHT)


class _Ranks:
    """How often each rank comes, of late; a half as often as the one before it, until seen otherwise."""

    def __init__(self, first: float) -> None:
        self._seen, self._hits = 0.0, [0.0] * RANKS
        self._guessed = [_WEIGHT * first / 2**rank for rank in range(RANKS)]
        self._values: list[float] | None = None

    def add(self, rank: int | None) -> None:
        self._seen = self._seen * _MEMORY + 1
        self._hits = [hits * _MEMORY for hits in self._hits]
        if rank is not None:
            self._hits[rank] += 1
        self._values = None

    @property
    def values(self) -> list[float]:
        if self._values is None:
            seen = self._seen + _WEIGHT
            self._values = [(hits + guessed) / seen for hits, guessed in zip(self._hits, self._guessed, strict=True)]
        return self._values


@dataclass
class Outlook:
    """What verifications have decided so far, and so what the next one may decide."""

    acceptance: _Share = field(default_factory=lambda: _Share(0.75))  # of a drafted token whose predecessors stand
    by_confidence: list[_Share] = field(
        default_factory=lambda: [_Share(0.45 + 0.06 * i) for i in range(len(_EDGES) + 1)]
    )
    recovery: _Ranks = field(default_factory=lambda: _Ranks(0.55))  # of a rejection: the target added rank r
    bonus: _Ranks = field(default_factory=lambda: _Ranks(0.75))  # of a whole draft that stood

    def learn(self, confidence: Seq[float], accepted: int, rank: int | None) -> None:
        """Of a draft with these confidences `accepted` tokens stood; then came rank `rank` (None: beyond all ranks)."""
        for i, value in enumerate(confidence[: accepted + 1]):
            self.acceptance.add(i < accepted)
            self.by_confidence[bisect.bisect(_EDGES, value)].add(i < accepted)
        (self.bonus if accepted == len(confidence) else self.recovery).add(rank)

    def stands(self, confidence: float) -> float:
        """How likely a drafted token stands, given that those before it do."""
        return self.by_confidence[bisect.bisect(_EDGES, confidence)].value

    @property
    def tail_exponent(self) -> float:
        """r, where a fan-out of F misses with a probability proportional to F^-r: from one fork and from eight."""
        recovery = self.recovery.values
        one, eight = max(1e-3, 1 - recovery[0]), max(1e-3, 1 - sum(recovery[:8]))
        return min(3.0, max(0.1, math.log(one / eight) / math.log(8)))


class FanOut(Protocol):
    """A policy."""

    def plan(self, outlook: Outlook, confidence: Seq[float], hit: bool, budget: int) -> Forks:
        """At most `budget` outcomes of a draft whose tokens have these confidences; `hit`: it had been prepared."""


@dataclass(frozen=True)
class Listed:
    """So many forks after 0, 1, … tokens: one list for prepared drafts, one for those made after a miss."""

    hit: tuple[int, ...]
    miss: tuple[int, ...]

    def plan(self, outlook: Outlook, confidence: Seq[float], hit: bool, budget: int) -> Forks:
        return _within(list(self.hit if hit else self.miss)[: len(confidence) + 1], budget)


@dataclass(frozen=True)
class Geometric:
    """The best split if every token stands with one probability and misses fall off as a power of the fan-out."""

    def plan(self, outlook: Outlook, confidence: Seq[float], hit: bool, budget: int) -> Forks:
        a, power = min(0.98, max(0.02, outlook.acceptance.value)), 1 / (1 + outlook.tail_exponent)
        weights = [a ** (k * power) for k in range(len(confidence) + 1)]
        weights[-1] *= (1 - a) ** -power
        return _within(_shared(weights, budget), budget)


@dataclass(frozen=True)
class Adaptive:
    """The likeliest outcomes of this very draft: tokens by how sure the draft was of them, ranks by their record."""

    def plan(self, outlook: Outlook, confidence: Seq[float], hit: bool, budget: int) -> Forks:
        reached, last = 1.0, len(confidence)
        ranked: list[tuple[float, int, int]] = []
        for after, sure in enumerate(confidence):
            stands = outlook.stands(sure)
            weight = -reached * (1 - stands)
            ranked += [(weight * value, rank, after) for rank, value in enumerate(outlook.recovery.values)]
            reached *= stands
        ranked += [(-reached * value, rank, last) for rank, value in enumerate(outlook.bonus.values)]
        return [(after, rank) for _, rank, after in sorted(ranked)[:budget]]


def _shared(weights: Seq[float], budget: int) -> list[int]:
    """Whole numbers in proportion to the weights that add up to the budget, none above the number of ranks."""
    counts = [0] * len(weights)
    for _ in range(min(budget, RANKS * len(weights))):
        free = [i for i, count in enumerate(counts) if count < RANKS]
        counts[max(free, key=lambda i: weights[i] / (counts[i] + 0.5))] += 1
    return counts


def _within(counts: Seq[int], budget: int) -> Forks:
    """The forks that the counts describe, the likeliest ranks of all places first."""
    forks = [(after, rank) for after, count in enumerate(counts) for rank in range(min(count, RANKS))]
    return sorted(forks, key=lambda fork: fork[1])[:budget]
