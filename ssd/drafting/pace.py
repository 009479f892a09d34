"""How much to speculate: as much as pays, by the clock.

For each size of the batch it learns how long a round takes with K drafted tokens and so many outcomes prepared ahead,
and how often the first, second, … of them stands; then it takes what yields the most tokens a second, plain decoding
included. It decides how much is drafted, never what is accepted.
"""

from __future__ import annotations

import functools
import itertools
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssd.config import K_MAX
from ssd.core import Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter
from ssd.drafting.ahead import WRITTEN, AheadDrafter

_ENOUGH = 3  # rounds that an arm is measured before it is believed
_REVIEW = 128  # rounds until another arm is measured again
_SOON = 24  # the same, at first
_STRIDE = 4  # rounds between two choices
_DEEP = 0.015  # what each drafted token has to be better for
_MARGIN = 1.02  # what another arm must promise to be taken
_HOPE = 1.08  # by how much an arm becomes more promising with every review of another one
_DEPTHS = (1, 2, 3, 4, 6, K_MAX)


class Arm(NamedTuple):
    """A way to run a round."""

    k: int
    width: int  # outcomes that are prepared for a sequence; 0: none, its draft is written when asked for


PLAIN = Arm(0, 0)


def make_arms(k: int | None, widths: Seq[int]) -> list[Arm]:
    """Depth k with each of the widths; without k every depth, with no preparation and with no draft as well."""
    if k is not None:
        return [Arm(k, width) for width in widths]
    return [PLAIN, *(Arm(depth, width) for depth in _DEPTHS for width in sorted({0, *widths}))]


@dataclass
class _Seconds:
    """Of a round, of late. A round that something else held up does not count."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    mean: float = 0.0

    def add(self, value: float) -> None:
        self.last.append(value)
        most = 2 * sorted(self.last)[len(self.last) // 2]
        usual = [each for each in self.last if each <= most]
        self.mean = sum(usual) / len(usual)


@dataclass
class _Rate:
    """How often something happens, of how often it might, of late."""

    happened: float
    expected: float
    keep: float  # what is left of the past at every trial

    @property
    def value(self) -> float:
        return self.happened / self.expected

    def add(self, happened: float, expected: float = 1.0) -> None:
        self.happened = self.keep * self.happened + happened
        self.expected = self.keep * self.expected + expected


@dataclass
class Pace:
    """The clocks of one size of the batch."""

    arms: list[Arm]
    seconds: dict[Arm, _Seconds] = field(default_factory=dict)  # in units of the level
    current: Arm = PLAIN
    level: float = 1.0  # how slow everything is
    ready: _Rate = field(default_factory=lambda: _Rate(9.0, 10.0, keep=0.998))  # see `Paced.tokens`
    interval: int = _SOON  # rounds between reviews
    rounds: int = 0  # since the last one
    reviews: int = 0
    reviewed: dict[Arm, int] = field(default_factory=dict)  # in which review each arm was last measured

    def like(self) -> Pace:
        """For another size: starts with what is known of this one, and is soon reviewed."""
        known = {arm: s.mean for arm, s in self.seconds.items() if s.last}
        seconds = {arm: _Seconds(deque([mean] * _ENOUGH, maxlen=16), mean) for arm, mean in known.items()}
        return Pace(self.arms, seconds, self.current, self.level, replace(self.ready))

    def record(self, arm: Arm, seconds: float) -> None:
        """What makes this arm slower of late (longer texts, a busy machine) makes the others slower, too."""
        if self._count(arm) >= _ENOUGH:
            slower = seconds / self.level / self.seconds[arm].mean
            self.level *= 1 + (min(max(slower, 0.8), 1.25) - 1) / 16
        self.seconds.setdefault(arm, _Seconds()).add(seconds / self.level)

    def choose(self, tokens: Callable[[Arm], float]) -> Arm:
        """The next round's arm; `tokens(arm)` is what a round of an arm yields."""
        self.rounds += 1
        wanted = [*self._samples, *self.reviewed]
        pending = [arm for arm in wanted if not self._measured(arm, tokens)]
        if pending:
            self.current = pending[0]
            self.rounds = -1
        elif self.rounds >= self.interval:
            self._review(tokens)
        elif self.rounds % _STRIDE == 0:
            self.current = self._best(tokens)
        return self.current

    @functools.cached_property
    def _samples(self) -> list[Arm]:
        """Arms to begin with: plain decoding, and one depth with every width."""
        depths = sorted({arm.k for arm in self.arms if arm.k})
        return [arm for arm in self.arms if arm == PLAIN or arm.k == depths[len(depths) // 2]]

    def _review(self, tokens: Callable[[Arm], float]) -> None:
        """Measures one arm afresh: the most hopeful, where hope grows with the time since it was last taken."""
        self.reviews += 1
        self.reviewed[self.current] = self.reviews
        hope = {arm: self._speed(arm, tokens) * _HOPE ** -self.reviewed.get(arm, 0) for arm in self.arms}
        others = [arm for arm in self.arms if arm != self.current] or self.arms
        self.current = max(others, key=lambda arm: hope[arm])
        self.reviewed[self.current] = self.reviews
        self.seconds[self.current] = _Seconds()
        self.interval = min(2 * self.interval, _REVIEW)
        self.rounds = 0

    def _best(self, tokens: Callable[[Arm], float]) -> Arm:
        speed = {arm: self._speed(arm, tokens) for arm in self.arms}
        best = max(self.arms, key=lambda arm: speed[arm])
        return best if speed[best] > _MARGIN * speed[self.current] else self.current

    def _speed(self, arm: Arm, tokens: Callable[[Arm], float]) -> float:
        """Deep drafts are worth a little less than they yield: easy texts gain most, and the others come last."""
        return tokens(arm) / self._expected(arm) * (1 - _DEEP * arm.k)

    def _measured(self, arm: Arm, tokens: Callable[[Arm], float]) -> bool:
        """Often enough; once, if that was bad enough."""
        if self._count(arm) >= _ENOUGH:
            return True
        known = {other: tokens(other) / s.mean for other, s in self.seconds.items() if s.last}
        return arm in known and known[arm] < max(known.values()) / 2

    def _count(self, arm: Arm) -> int:
        return len(self.seconds[arm].last) if arm in self.seconds else 0

    def _expected(self, arm: Arm) -> float:
        """Measured, or on the line through its measured neighbours, of which plain decoding is one."""
        if self._count(arm):
            return self.seconds[arm].mean
        like = {a.k: s.mean for a, s in self.seconds.items() if s.last and (a.width == arm.width or a == PLAIN)}
        known = sorted(like.items())
        (k0, s0), (k1, s1) = next((pair for pair in itertools.pairwise(known) if pair[1][0] > arm.k), known[-2:])
        return s0 + (s1 - s0) * (arm.k - k0) / (k1 - k0)


class _Drafted(NamedTuple):
    """A draft under verification."""

    decided: int  # tokens before it
    length: int
    origin: str
    ready: _Rate | None  # of its size of the batch, if drafts were to be prepared


class Paced(Drafter):
    """Drafts with `inner`, as much as pays."""

    def __init__(self, inner: Drafter, arms: list[Arm]) -> None:
        self.inner = inner
        self._arms = arms
        self._paces: dict[int, Pace] = {}  # by the power of two that holds a batch
        self._stands = [_Rate(3.0, 4.0, keep=0.99) for _ in range(max(arm.k for arm in arms))]  # the i-th token
        self._drafted: dict[int, _Drafted] = {}  # by sequence id
        self._take(arms[-1])
        self._like = 0  # rounds up to the last that can be compared: same arm, same size, no prompts
        self._last: tuple[int, Arm] | None = None  # size and arm of the last round

    @property
    def failures(self) -> int:  # type: ignore[override]
        return self.inner.failures

    @property
    def busy_seconds(self) -> float:  # type: ignore[override]
        return self.inner.busy_seconds

    @property
    def hand_over_seconds(self) -> float:  # type: ignore[override]
        return self.inner.hand_over_seconds

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        if not works:  # a round that only reads prompts
            return []
        for work in works:
            self._learn(work.sequence)
        size = (len(works) - 1).bit_length()
        pace = self._pace(size)
        self._time(size)
        self.inner.round_seconds = self.round_seconds
        proposals = self.inner.propose(works) if any(work.lookahead for work in works) else super().propose(works)
        for work, proposal in zip(works, proposals, strict=True):
            if work.lookahead and work.sequence.num_output:
                drafted = len(proposal.token_ids[: work.lookahead])
                ahead = pace.ready if self._arm.width else None
                self._drafted[work.sequence.id] = _Drafted(len(work.sequence.tokens), drafted, proposal.origin, ahead)
        self._take(pace.choose(lambda arm: self.tokens(arm, pace)))
        return proposals

    def anticipate(self, works: Seq[Work]) -> None:
        reading = any(work.num_tokens > 1 for work in works)
        if reading:
            self._last = None
        if self.lookahead or reading:
            self.inner.anticipate(works)

    def forget(self, sequence: Sequence) -> None:
        self._drafted.pop(sequence.id, None)
        self.inner.forget(sequence)

    def close(self) -> None:
        self.inner.close()

    def tokens(self, arm: Arm, pace: Pace) -> float:
        """What a round of that arm yields, of late.

        Texts differ more than arms do: so what stands is learned from all that the model drafts. Only, a prepared draft
        may not be there: `ready` is the share of first tokens that stand, of those that would if drafts were asked for.
        """
        expected, reached = 1.0, pace.ready.value if arm.width else 1.0
        for stands in self._stands[: arm.k]:
            reached *= stands.value
            expected += reached
        return expected

    def _learn(self, sequence: Sequence) -> None:
        draft = self._drafted.pop(sequence.id, None)
        accepted = len(sequence.tokens) - draft.decided - 1 if draft is not None else -1
        if draft is None or not 0 <= accepted <= draft.length:
            return
        if draft.ready is not None:
            draft.ready.add(accepted > 0, self._stands[0].value)
            if draft.origin not in WRITTEN:
                return
        for i in range(min(accepted + 1, draft.length)):
            self._stands[i].add(i < accepted)

    def _take(self, arm: Arm) -> None:
        """For the next round."""
        self._arm, self.lookahead = arm, arm.k
        if isinstance(self.inner, AheadDrafter):
            self.inner.budget = arm.width

    def _pace(self, size: int) -> Pace:
        if size not in self._paces:
            near = min(self._paces, key=lambda other: abs(other - size), default=None)
            self._paces[size] = Pace(self._arms) if near is None else self._paces[near].like()
        return self._paces[size]

    def _time(self, size: int) -> None:
        """Of the round that has just ended, if the one before it was like it: a change of arm takes a round."""
        before, self._last = self._last, (size, self._arm)
        if before is not None and before[0] == size and self._like > 1:
            self._paces[size].record(before[1], self.round_seconds)
        self._like = self._like + 1 if before == self._last else 0
