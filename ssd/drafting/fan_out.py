"""Fan-out policies: which outcomes of a verification to prepare drafts for.

An outcome is written (after, rank): the first `after` draft tokens are accepted, then the target adds the token which
the draft model ranks `rank`-th there (not counting the draft token: had the target chosen it, it would be accepted).
A policy plans on the device, from the draft's confidence; the host uploads the constants it has learned.
Several drafters can share the outcomes: a `Share` of one has those that no other one has.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from ssd.drafting.estimate import Average

RANKS = 16  # tokens per position that can be prepared for
_EDGES = (0.05, 0.15, 0.3, 0.6, 1.0, 1.6, 2.5, 4.0, 7.0)  # bins of confidence
_KEEP = 0.998  # weight that older observations keep, per new one
_WEIGHT = 4.0  # of the prior, in observations


def _frequency(guess: float) -> Average:
    """Relative frequency of an event, with a prior."""
    return Average(_KEEP, prior_total=_WEIGHT * guess, prior_weight=_WEIGHT)


def _rank_frequencies(first: float) -> Average:
    """Relative frequency of each rank; prior: half that of the rank before it."""
    return Average(_KEEP, np.zeros(RANKS), prior_total=_WEIGHT * first / 2.0 ** np.arange(RANKS), prior_weight=_WEIGHT)


_NO_RANK = np.zeros(RANKS)
_ONE_RANK = np.eye(RANKS)


@dataclass
class OutcomeStatistics:
    """Statistics of the outcomes of past verifications, which predict the next one."""

    acceptance: Average = field(default_factory=lambda: _frequency(0.75))  # per draft token that is reached
    by_confidence: list[Average] = field(
        default_factory=lambda: [_frequency(0.45 + 0.06 * i) for i in range(len(_EDGES) + 1)]
    )
    recovery: Average = field(default_factory=lambda: _rank_frequencies(0.55))  # ranks after a rejection
    bonus: Average = field(default_factory=lambda: _rank_frequencies(0.75))  # ranks after a whole draft

    def learn(self, confidence: Seq[float], accepted: int, rank: int | None) -> None:
        """Adds an outcome: confidence of the draft tokens, number accepted, rank of the target's token (or None)."""
        for i, value in enumerate(confidence[: accepted + 1]):
            self.acceptance.add(i < accepted)
            self.by_confidence[bisect.bisect(_EDGES, value)].add(i < accepted)
        ranks = self.bonus if accepted == len(confidence) else self.recovery
        ranks.add(_NO_RANK if rank is None else _ONE_RANK[rank])

    @property
    def tail_exponent(self) -> float:
        """r of P(miss) ~ F^-r for a fan-out of F, fitted to F = 1 and F = 8."""
        recovery = self.recovery.value
        one, eight = max(1e-3, 1 - recovery[0]), max(1e-3, 1 - float(recovery[:8].sum()))
        return min(3.0, max(0.1, math.log(one / eight) / math.log(8)))


class Share(NamedTuple):
    """The outcomes of one of several replicas. Every replica has a part of each position's, and of each rank's."""

    replica: int = 0
    replicas: int = 1

    def has(self, after: Any, rank: Any) -> Any:
        """Whether an outcome is its own; for numbers, arrays and tensors."""
        return (after + rank) % self.replicas == self.replica


_ALL = Share()


class FanOut(Protocol):
    """A fan-out policy."""

    def width(self, budget: int) -> int:
        """Branches per sequence that it uses of a budget."""

    def constants(self, statistics: OutcomeStatistics, lookahead: int, width: int) -> np.ndarray:
        """Learned constants for `plan`: float32, uploaded before every preparation."""

    def plan(
        self, constants: torch.Tensor, confidence: torch.Tensor, hit: torch.Tensor, drafted: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`width` outcomes (after, rank: int [L, width]) for each of L drafts, the likeliest first.

        `confidence` [L, K] is that of the drafts' tokens, `drafted` [L] their length, and `hit` [L] whether they
        had been prepared. Outcomes are repeated where there are fewer than `width`.
        """


@dataclass(frozen=True)
class Adaptive:
    """The likeliest outcomes of each draft: acceptance from the confidence of its tokens, ranks by frequency."""

    share: Share = _ALL

    def width(self, budget: int) -> int:
        return budget

    def constants(self, statistics: OutcomeStatistics, lookahead: int, width: int) -> np.ndarray:
        rates = [frequency.value for frequency in statistics.by_confidence]
        return np.concatenate([_EDGES, rates, statistics.recovery.value, statistics.bonus.value]).astype(np.float32)

    def plan(
        self, constants: torch.Tensor, confidence: torch.Tensor, hit: torch.Tensor, drafted: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        edges = len(_EDGES)
        sizes = [edges, edges + 1, RANKS, RANKS]
        edge, rates, recovery, bonus = torch.split(constants[: sum(sizes)], sizes)
        place = torch.arange(confidence.shape[1] + 1, device=confidence.device)
        drafted = drafted[:, None]
        accept = rates[torch.bucketize(confidence, edge, right=True)]
        reached = torch.nn.functional.pad(accept.cumprod(-1), (1, 0), value=1.0)  # [L, K + 1]
        reject = torch.nn.functional.pad(1.0 - accept, (0, 1))
        rejected = (reached * reject)[:, :, None] * recovery
        weight = torch.where((place == drafted)[:, :, None], reached[:, :, None] * bonus, rejected)
        weight = weight.masked_fill((place > drafted)[:, :, None], -1.0)
        if self.share.replicas > 1:
            weight = weight.masked_fill(~self.share.has(place[:, None], torch.arange(RANKS, device=place.device)), -1.0)
        weight = weight.flatten(1)
        chosen = weight.topk(width, dim=-1).indices
        real = weight.gather(-1, chosen) >= 0
        chosen = torch.where(real, chosen, chosen[:, :1])
        return chosen // RANKS, chosen % RANKS


class _Table:
    """A policy whose outcomes depend on the draft's length and on hit or miss only: a table, uploaded as constants."""

    share: Share

    def outcomes(self, statistics: OutcomeStatistics, drafted: int, hit: bool, budget: int) -> list[tuple[int, int]]:
        """Those of all replicas, whose branches are `budget` together."""
        raise NotImplementedError

    def width(self, budget: int) -> int:
        return budget

    def constants(self, statistics: OutcomeStatistics, lookahead: int, width: int) -> np.ndarray:
        table = np.zeros((2, lookahead + 1, width, 2), dtype=np.float32)
        for hit in (False, True):
            for drafted in range(lookahead + 1):
                everyone = self.outcomes(statistics, drafted, hit, width * self.share.replicas)
                found = [outcome for outcome in everyone if self.share.has(*outcome)] or everyone[:1]
                table[int(hit), drafted] = (found * width)[:width]
        return table.ravel()

    def plan(
        self, constants: torch.Tensor, confidence: torch.Tensor, hit: torch.Tensor, drafted: torch.Tensor, width: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lookahead = confidence.shape[1]
        table = constants[: 4 * (lookahead + 1) * width].view(-1, width, 2).int()
        found = table[hit.long() * (lookahead + 1) + drafted.long()]
        return found[..., 0], found[..., 1]


@dataclass(frozen=True)
class Listed(_Table):
    """Number of branches after 0, 1, … accepted tokens: one list for drafts that were hits, one for the others."""

    hit: tuple[int, ...]
    miss: tuple[int, ...]
    share: Share = _ALL  # of as many times these numbers as there are replicas

    def width(self, budget: int) -> int:
        return min(budget, max(sum(self.hit), sum(self.miss)))

    def outcomes(self, statistics: OutcomeStatistics, drafted: int, hit: bool, budget: int) -> list[tuple[int, int]]:
        counts = [self.share.replicas * n for n in (self.hit if hit else self.miss)[: drafted + 1]]
        return _by_rank(counts if any(counts) else [*counts[:-1], self.share.replicas])


@dataclass(frozen=True)
class Geometric(_Table):
    """The SSD paper's split: optimal if all tokens have the same acceptance rate and P(miss) ~ F^-r."""

    share: Share = _ALL

    def outcomes(self, statistics: OutcomeStatistics, drafted: int, hit: bool, budget: int) -> list[tuple[int, int]]:
        a, power = min(0.98, max(0.02, statistics.acceptance.value)), 1 / (1 + statistics.tail_exponent)
        weights = [a ** (k * power) for k in range(drafted + 1)]
        weights[-1] *= (1 - a) ** -power
        return _by_rank(_shared(weights, budget))


def _shared(weights: Seq[float], budget: int) -> list[int]:
    """Integers proportional to the weights that add up to the budget, none above RANKS (Sainte-Laguë)."""
    counts = [0] * len(weights)
    for _ in range(min(budget, RANKS * len(weights))):
        free = [i for i, count in enumerate(counts) if count < RANKS]
        counts[max(free, key=lambda i: weights[i] / (counts[i] + 0.5))] += 1
    return counts


def _by_rank(counts: Seq[int]) -> list[tuple[int, int]]:
    """The outcomes of `counts[after]` branches per position, ordered by rank."""
    found = [(after, rank) for after, count in enumerate(counts) for rank in range(min(count, RANKS))]
    return sorted(found, key=lambda outcome: outcome[1])
