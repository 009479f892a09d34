"""The depth controller (`k="auto"`, `budget="auto"`): chooses K and the number of branches by measured speed.

A multi-armed bandit. For each batch size it measures the seconds per round of each arm (K, branches), plain decoding
included, and estimates the tokens per round from the acceptance rate of each draft position; then it takes the arm with
the most tokens per second. It decides how much is drafted, never what is accepted.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssd.config import K_MAX
from ssd.core import MODEL_WRITTEN, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Confidence, Drafter, PerRound, Prepared, never
from ssd.drafting.estimate import Average, TypicalSeconds
from ssd.execution.clock import Clock

log = logging.getLogger("ssd")

_MIN_SAMPLES = 3  # rounds measured before an arm's time is used
_MAX_INTERVAL = 128  # rounds between two reviews (each measures one other arm)
_FIRST_INTERVAL = 24  # rounds before the first review; doubles with every review
_STRIDE = 4  # rounds between two choices
_DEPTH_PENALTY = 0.015  # relative speed that each draft token must gain
_MARGIN = 1.02  # expected speed-up that a change of arm needs
_OPTIMISM = 1.08  # factor on an arm's expected speed for every review since it was last measured
_DEPTHS = (1, 2, 3, 4, 6, K_MAX)


class Arm(NamedTuple):
    """One choice of the controller."""

    k: int  # draft tokens per round
    width: int  # branches per sequence; 0: none prepared, the draft is written in `propose`


PLAIN = Arm(0, 0)


def make_arms(k: int | None, widths: Seq[int]) -> list[Arm]:
    """Depth k with each width; without k: plain decoding, and every depth with each width and with none."""
    if k is not None:
        return [Arm(k, width) for width in widths]
    return [PLAIN, *(Arm(depth, width) for depth in _DEPTHS for width in sorted({0, *widths}))]


@dataclass
class ArmTimes:
    """Seconds per round of every arm for one batch size, and the arm chosen by them."""

    arms: list[Arm]
    seconds: dict[Arm, TypicalSeconds] = field(default_factory=dict)  # divided by `level`
    current: Arm = PLAIN
    level: float = 1.0  # current slow-down of all arms (longer contexts, a busy machine), relative to the means
    ready: Average = field(default_factory=lambda: Average(0.998, 9.0, 10.0))  # see `DepthController.tokens`
    interval: int = _FIRST_INTERVAL  # rounds between reviews
    rounds: int = 0  # since the last review
    reviews: int = 0
    reviewed: dict[Arm, int] = field(default_factory=dict)  # number of the review in which each arm was last measured

    def like(self) -> ArmTimes:
        """A copy to start another batch size with."""
        known = {arm: s.mean for arm, s in self.seconds.items() if s.last}
        seconds = {arm: TypicalSeconds(deque([mean] * _MIN_SAMPLES, maxlen=16), mean) for arm, mean in known.items()}
        return ArmTimes(self.arms, seconds, self.current, self.level, replace(self.ready))

    def record(self, arm: Arm, seconds: float) -> None:
        """Adds a round's time. A drift of this arm is assumed to apply to all arms: it changes `level`."""
        if self._count(arm) >= _MIN_SAMPLES:
            slower = seconds / self.level / self.seconds[arm].mean
            self.level *= 1 + (min(max(slower, 0.8), 1.25) - 1) / 16
        self.seconds.setdefault(arm, TypicalSeconds()).add(seconds / self.level)

    def choose(self, tokens: Callable[[Arm], float]) -> Arm:
        """The next round's arm; `tokens(arm)` estimates the tokens per round of an arm."""
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
        """Arms measured first: plain decoding, and the middle depth with every width."""
        depths = sorted({arm.k for arm in self.arms if arm.k})
        return [arm for arm in self.arms if arm == PLAIN or arm.k == depths[len(depths) // 2]]

    def _review(self, tokens: Callable[[Arm], float]) -> None:
        """Switches to another arm to measure it again: the one with the best optimistic speed."""
        self.reviews += 1
        self.reviewed[self.current] = self.reviews
        optimistic = {arm: self._speed(arm, tokens) * _OPTIMISM ** -self.reviewed.get(arm, 0) for arm in self.arms}
        others = [arm for arm in self.arms if arm != self.current] or self.arms
        self.current = max(others, key=lambda arm: optimistic[arm])
        self.reviewed[self.current] = self.reviews
        self.seconds[self.current] = TypicalSeconds()
        self.interval = min(2 * self.interval, _MAX_INTERVAL)
        self.rounds = 0

    def _best(self, tokens: Callable[[Arm], float]) -> Arm:
        speed = {arm: self._speed(arm, tokens) for arm in self.arms}
        best = max(self.arms, key=lambda arm: speed[arm])
        return best if speed[best] > _MARGIN * speed[self.current] else self.current

    def _speed(self, arm: Arm, tokens: Callable[[Arm], float]) -> float:
        """Expected tokens per second, less a penalty on depth: deep drafts mostly speed up the easiest sequences."""
        return tokens(arm) / self._expected(arm) * (1 - _DEPTH_PENALTY * arm.k)

    def _measured(self, arm: Arm, tokens: Callable[[Arm], float]) -> bool:
        """Whether an arm has enough samples; one is enough if it was less than half as fast as the best."""
        if self._count(arm) >= _MIN_SAMPLES:
            return True
        known = {other: tokens(other) / s.mean for other, s in self.seconds.items() if s.last}
        return arm in known and known[arm] < max(known.values()) / 2

    def _count(self, arm: Arm) -> int:
        return len(self.seconds[arm].last) if arm in self.seconds else 0

    def _expected(self, arm: Arm) -> float:
        """Seconds per round: measured, or interpolated over K between arms of the same width and plain decoding."""
        if self._count(arm):
            return self.seconds[arm].mean
        like = {a.k: s.mean for a, s in self.seconds.items() if s.last and (a.width == arm.width or a == PLAIN)}
        known = sorted(like.items())
        (k0, s0), (k1, s1) = next((pair for pair in itertools.pairwise(known) if pair[1][0] > arm.k), known[-2:])
        return s0 + (s1 - s0) * (arm.k - k0) / (k1 - k0)


class _Round(NamedTuple):
    """A round that was launched and not observed."""

    size: int  # ceil(log2(batch size))
    arm: Arm
    comparable: bool  # same arm and size as the two rounds before it, and no prefill: its time is used


class DepthController(Drafter):
    """Wraps a drafter and sets its draft length (and number of branches) for every round."""

    def __init__(self, inner: Drafter, arms: list[Arm]) -> None:
        super().__init__()
        self.inner = inner
        self.stats = inner.stats
        self.needs_tokens = inner.needs_tokens
        self._arms = arms
        self._times: dict[int, ArmTimes] = {}  # by batch size, see `_Round.size`
        depth = max(arm.k for arm in arms)
        self._acceptance = [Average(0.99, 3.0, 4.0) for _ in range(depth)]  # rate of each position in the draft
        self._rounds: PerRound[_Round] = PerRound()
        self._last: tuple[int, Arm] | None = None  # size and arm of the last round; None: it had prefill chunks
        self._chosen: dict[int, Arm] = {}  # by batch size, as logged
        self._num_alike = 0  # rounds in a row of that size and arm
        self._take(arms[-1])

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return self.inner.propose(works)

    def settle(self, works: Seq[Work]) -> bool:
        return self.inner.settle(works)

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        self.inner.prepare(works, interrupted)
        size = (max(1, sum(work.decides for work in works)) - 1).bit_length()
        key = None if _has_prefill(works) else (size, self.arm)
        self._num_alike = self._num_alike + 1 if key is not None and key == self._last else 0
        self._last = key
        self._rounds.put(works, _Round(size, self.arm, self._num_alike > 1))  # a new arm needs a round to take effect

    def serve(self, ended: Clock) -> None:
        self.inner.serve(ended)

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        self.inner.decided(works, outcomes)

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self.inner.observe(works, outcomes, seconds)
        round_ = self._rounds.pop(works)
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
            self._log_choice(round_.size, measuring=times.rounds <= 0)

    def prepared(self, sequence: Sequence) -> Prepared:
        return self.inner.prepared(sequence)

    def prepared_confidence(self, sequence: Sequence) -> Confidence:
        return self.inner.prepared_confidence(sequence)

    def forget(self, sequence: Sequence) -> None:
        self.inner.forget(sequence)

    def close(self) -> None:
        self.inner.close()

    def tokens(self, arm: Arm, times: ArmTimes) -> float:
        """Estimated tokens per round of an arm.

        Acceptance rates are shared by all arms, since they depend on the text more than on the arm. A prepared draft
        may miss: `ready` is the acceptance of its first token relative to that of a draft written in `propose`.
        """
        expected, reached = 1.0, times.ready.value if arm.width else 1.0
        for rate in self._acceptance[: arm.k]:
            reached *= rate.value
            expected += reached
        return expected

    def _learn(self, outcome: Outcome, ready: Average | None) -> None:
        accepted = outcome.num_accepted
        if ready is not None:
            ready.add(accepted > 0, self._acceptance[0].value)
            if outcome.origin not in MODEL_WRITTEN:
                return
        for i in range(min(accepted + 1, len(outcome.draft), len(self._acceptance))):
            self._acceptance[i].add(i < accepted)

    def _log_choice(self, size: int, *, measuring: bool) -> None:
        if not measuring and self._chosen.get(size) != self.arm:
            self._chosen[size] = self.arm
            log.info("batches of up to %d: k=%d, %d branches", 1 << size, *self.arm)

    def _take(self, arm: Arm) -> None:
        """Sets the arm of the rounds scheduled next."""
        self.arm, self.lookahead = arm, arm.k
        self.inner.budget = self.budget = arm.width

    def _times_of(self, size: int) -> ArmTimes:
        if size not in self._times:
            near = min(self._times, key=lambda other: abs(other - size), default=None)
            self._times[size] = ArmTimes(self._arms) if near is None else self._times[near].like()
        return self._times[size]


def _has_prefill(works: Seq[Work]) -> bool:
    return any(work.num_tokens > 1 for work in works)
