"""How much to speculate: as much as pays, by the clock.

For each size of the batch the controller learns how long a round takes with K drafted tokens and so many outcomes
prepared ahead, and how often the first, second, … of them stands; then it takes what yields the most tokens a second,
plain decoding included. It decides how much is drafted, never what is accepted.
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
from ssd.core import MODEL_WRITTEN, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter, Prepared, never
from ssd.drafting.ahead import AheadDrafter
from ssd.drafting.estimate import Average

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
class _RoundSeconds:
    """Mean of the last rounds of an arm, in seconds; a round that took twice the median does not count."""

    last: deque[float] = field(default_factory=lambda: deque(maxlen=16))
    mean: float = 0.0

    def add(self, value: float) -> None:
        self.last.append(value)
        most = 2 * sorted(self.last)[len(self.last) // 2]
        usual = [each for each in self.last if each <= most]
        self.mean = sum(usual) / len(usual)


@dataclass
class ArmTimes:
    """How long rounds take with each arm, for one size of the batch; and the choice that follows."""

    arms: list[Arm]
    seconds: dict[Arm, _RoundSeconds] = field(default_factory=dict)  # in units of the level
    current: Arm = PLAIN
    level: float = 1.0  # how slow all arms are at present, against their means
    ready: Average = field(default_factory=lambda: Average(0.998, 9.0, 10.0))  # see `DepthController.tokens`
    interval: int = _SOON  # rounds between reviews
    rounds: int = 0  # since the last one
    reviews: int = 0
    reviewed: dict[Arm, int] = field(default_factory=dict)  # in which review each arm was last measured

    def like(self) -> ArmTimes:
        """For another size of the batch: starts with what is known of this one, and is soon reviewed."""
        known = {arm: s.mean for arm, s in self.seconds.items() if s.last}
        seconds = {arm: _RoundSeconds(deque([mean] * _ENOUGH, maxlen=16), mean) for arm, mean in known.items()}
        return ArmTimes(self.arms, seconds, self.current, self.level, replace(self.ready))

    def record(self, arm: Arm, seconds: float) -> None:
        """What makes this arm slower of late (longer texts, a busy machine) makes the others slower, too."""
        if self._count(arm) >= _ENOUGH:
            slower = seconds / self.level / self.seconds[arm].mean
            self.level *= 1 + (min(max(slower, 0.8), 1.25) - 1) / 16
        self.seconds.setdefault(arm, _RoundSeconds()).add(seconds / self.level)

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
        self.seconds[self.current] = _RoundSeconds()
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


class _Round(NamedTuple):
    """A round under way."""

    size: int  # of its batch: the exponent of the power of two that holds it
    arm: Arm
    comparable: bool  # same arm and size as the rounds before it, and no prompts: its time counts


class DepthController(Drafter):
    """Drafts with `inner`, as much as pays."""

    def __init__(self, inner: Drafter, arms: list[Arm]) -> None:
        super().__init__()
        self.inner = inner
        self.stats = inner.stats
        self.needs_tokens = inner.needs_tokens
        self._arms = arms
        self._times: dict[int, ArmTimes] = {}  # by size of the batch
        depth = max(arm.k for arm in arms)
        self._stands = [Average(0.99, 3.0, 4.0) for _ in range(depth)]  # the i-th drafted token
        self._rounds: dict[int, _Round] = {}  # by id of their lists of works
        self._last: tuple[int, Arm] | None = None  # size and arm of the last round; None: it read prompts
        self._alike = 0  # rounds in a row of that size and arm
        self._take(arms[-1])

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return self.inner.propose(works)

    def settle(self, works: Seq[Work]) -> None:
        self.inner.settle(works)

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        self.inner.prepare(works, interrupted)
        size = (max(1, sum(work.decides for work in works)) - 1).bit_length()
        key = None if _reads_prompts(works) else (size, self._arm)
        self._alike = self._alike + 1 if key is not None and key == self._last else 0
        self._last = key
        self._rounds[id(works)] = _Round(size, self._arm, self._alike > 1)  # a change of arm takes a round

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self.inner.observe(works, outcomes, seconds)
        round_ = self._rounds.pop(id(works), None)
        if round_ is None:
            return
        times = self._times_of(round_.size)
        for outcome in outcomes:
            if outcome is not None and outcome.draft:
                self._learn(outcome, times.ready if round_.arm.width else None)
        if round_.comparable:
            times.record(round_.arm, seconds)
        if any(outcome is not None for outcome in outcomes):
            self._take(times.choose(lambda arm: self.tokens(arm, times)))

    def prepared(self, sequence: Sequence) -> Prepared:
        return self.inner.prepared(sequence)

    def forget(self, sequence: Sequence) -> None:
        self.inner.forget(sequence)

    def close(self) -> None:
        self.inner.close()

    def tokens(self, arm: Arm, times: ArmTimes) -> float:
        """What a round of that arm yields.

        Texts differ more than arms do: so what stands is learned from all that the model drafts. Only, a prepared draft
        may not be there: `ready` is the share of first tokens that stand, of those that would if drafts were asked for.
        """
        expected, reached = 1.0, times.ready.value if arm.width else 1.0
        for stands in self._stands[: arm.k]:
            reached *= stands.value
            expected += reached
        return expected

    def _learn(self, outcome: Outcome, ready: Average | None) -> None:
        accepted = outcome.num_accepted
        if ready is not None:
            ready.add(accepted > 0, self._stands[0].value)
            if outcome.origin not in MODEL_WRITTEN:
                return
        for i in range(min(accepted + 1, len(outcome.draft), len(self._stands))):
            self._stands[i].add(i < accepted)

    def _take(self, arm: Arm) -> None:
        """For the rounds that are scheduled next."""
        self._arm, self.lookahead = arm, arm.k
        if isinstance(self.inner, AheadDrafter):
            self.inner.budget = arm.width

    def _times_of(self, size: int) -> ArmTimes:
        if size not in self._times:
            near = min(self._times, key=lambda other: abs(other - size), default=None)
            self._times[size] = ArmTimes(self._arms) if near is None else self._times[near].like()
        return self._times[size]


def _reads_prompts(works: Seq[Work]) -> bool:
    return any(work.num_tokens > 1 for work in works)
