"""Chooses by measured speed how a batch is decoded: `mode="auto"`, `k="auto"`, `budget="auto"`.

A multi-armed bandit. An arm is a mode (AR, SD or SSD) with its K and number of branches. For each batch size the
seconds per round of each arm are measured, and its tokens per round are estimated from the acceptance rate of each
draft position; the arm with the most tokens per second is used. Other arms are measured again from time to time, as
often as that costs a small share of the time. The controller decides how much is drafted, never what is accepted.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssd.config import K_MAX
from ssd.core import MODEL_WRITTEN, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Confidence, Drafter, DrafterStats, PerRound, Prepared, never
from ssd.drafting.estimate import Average, TypicalSeconds
from ssd.execution.clock import Clock

log = logging.getLogger("ssd")

_MIN_SAMPLES = 3  # rounds that measure an arm
_HOPELESS = 0.85  # share of the best arm's speed below which one round is enough
_SETTLING = 1  # rounds after a change of arm that are not measured, besides those in flight
_MAX_TRIAL = 64  # rounds after which a trial is given up: its drafter has not caught up
_TRIAL_SHARE = 0.01  # of the time that trials may lose
_MAX_INTERVAL = 128  # rounds between two trials, at least
_FIRST_INTERVAL = 24  # rounds before the first one that nothing requires; doubles with every trial
_NEW_SIZE_INTERVAL = 8  # rounds before the trial of each mode at a new batch size
_DRIFT = 1.4  # change of `level` after which the modes are compared again: all arms need not change alike
_STRIDE = 4  # rounds between two choices
_SHORT_REST = 16  # rounds that a drafter may be left out of without catching up before its next one
_DEPTH_PENALTY = 0.015  # relative speed that each draft token after the shortest draft's must gain
_MARGIN = 1.02  # expected speed-up that a change of arm needs
_OPTIMISM = 1.08  # factor on an arm's expected speed for every trial since it was last measured
DEPTHS = (1, 2, 3, 4, 6, K_MAX)


class Arm(NamedTuple):
    """One choice of the controller."""

    k: int  # draft tokens per round
    width: int  # branches per sequence; 0: none prepared, the draft is written in `propose`

    @property
    def mode(self) -> str:
        return "ar" if not self.k else "ssd" if self.width else "sd"

    def __str__(self) -> str:
        branches = f", {self.width} branches" if self.width else ""
        return f"mode={self.mode}{f', k={self.k}' if self.k else ''}{branches}"


PLAIN = Arm(0, 0)


def make_arms(modes: Seq[str], depths: Seq[int], widths: Seq[int]) -> list[Arm]:
    """The arms of these modes: every depth, and for SSD every width."""
    arms = [PLAIN] if "ar" in modes else []
    for k in depths:
        arms += [Arm(k, 0)] if "sd" in modes else []
        arms += [Arm(k, width) for width in widths] if "ssd" in modes else []
    return arms


class AcceptanceRates:
    """How often each position of a draft is accepted. Of all arms together: it depends on the text more than on K."""

    def __init__(self, depth: int) -> None:
        self._depth = depth
        self.reset()

    def reset(self) -> None:
        self._rates = [Average(0.99, 3.0, 4.0) for _ in range(self._depth)]

    def accepted(self, k: int) -> float:
        """Expected number of accepted tokens of a draft of k tokens."""
        reached = itertools.accumulate((rate.value for rate in self._rates[:k]), float.__mul__)
        return float(sum(reached))

    def learn(self, outcome: Outcome) -> None:
        accepted = outcome.num_accepted
        for i in range(min(accepted + 1, len(outcome.draft), len(self._rates))):
            self._rates[i].add(float(i < accepted))


@dataclass
class ArmTimes:
    """Seconds per round of every arm for one batch size, and the arm chosen by them."""

    arms: list[Arm]
    accepted: Callable[[int], float]  # see `AcceptanceRates`
    seconds: dict[Arm, TypicalSeconds] = field(default_factory=dict)  # divided by `level`
    best: Arm = PLAIN
    trial: Arm | None = None  # the arm that is being measured
    level: float | None = 1.0  # slow-down of all arms (longer contexts, a busy machine), relative to the means; None:
    # not known yet, at a new batch size
    checked_level: float = 1.0  # when the modes were compared
    ready: Average = field(default_factory=lambda: Average(0.998, 9.0, 10.0))  # see `tokens`
    untried: list[Arm] = field(default_factory=list)  # arms that are measured whatever it costs, the first one first
    first_interval: int = 0  # rounds before each of them
    interval: int = _FIRST_INTERVAL  # rounds between later trials
    rounds: int = 0  # since the last trial, or of the current one
    trials: int = 0
    tried: dict[Arm, int] = field(default_factory=dict)  # number of the trial in which each arm was last measured
    credit: float = 0.0  # seconds that trials may lose by now

    def __post_init__(self) -> None:
        if not self.untried:
            self.untried = self._representatives()
            self.best = self.untried[0]

    def _representatives(self) -> list[Arm]:
        """The middle depth of SD, then plain decoding, then SSD with each width."""
        depths = sorted({arm.k for arm in self.arms if arm.k})
        usual = [arm for arm in self.arms if arm == PLAIN or arm.k == depths[len(depths) // 2]]
        return sorted(usual, key=lambda arm: ("sd", "ar", "ssd").index(arm.mode))

    def like(self) -> ArmTimes:
        """To start another batch size with: the same ratios, to be checked for the best arm of each mode."""
        seconds = {arm: TypicalSeconds(s.mean) for arm, s in self.seconds.items() if s.mean}
        if not seconds:
            return ArmTimes(self.arms, self.accepted)
        return ArmTimes(
            self.arms,
            self.accepted,
            seconds,
            self.best,
            level=None,
            ready=replace(self.ready),
            untried=self._fastest_of_modes(),
            first_interval=_NEW_SIZE_INTERVAL,
        )

    def _fastest_of_modes(self) -> list[Arm]:
        """The fastest known arm of each mode, the best one first."""
        known = sorted((self.speed(arm), arm) for arm, s in self.seconds.items() if s.mean)
        first = {arm.mode: arm for _, arm in known} | {self.best.mode: self.best}
        return sorted(first.values(), key=lambda arm: arm != self.best)

    def record(self, arm: Arm, seconds: float, *, comparable: bool = True) -> None:
        """Adds a round's time; `comparable`: False for one that was not like the rounds before it.

        A drift of this arm is assumed to apply to all arms: it changes `level`.
        """
        known = self.seconds.setdefault(arm, TypicalSeconds())
        if self.level is None and comparable:
            self.level = self.checked_level = seconds / known.mean if known.mean else 1.0
        elif self.level is not None and comparable and len(known.last) >= _MIN_SAMPLES:
            slower = seconds / self.level / known.mean
            self.level *= 1 + (min(max(slower, 0.8), 1.25) - 1) / 16
            if not 1 / _DRIFT < self.level / self.checked_level < _DRIFT and not self.untried:
                self.untried, self.first_interval = self._fastest_of_modes(), _NEW_SIZE_INTERVAL
                self.checked_level = self.level
        if self.level is None:
            return
        usual = seconds / self.level
        self.credit += _TRIAL_SHARE * usual
        if arm != self.best or not comparable:
            self.credit -= self._lost(arm, usual)
        if comparable:
            known.add(usual)

    def choose(self) -> Arm:
        """The arm of the next round: the one to be measured, else the best."""
        self.rounds += 1
        if self.trial is not None and (self._measured(self.trial) or self.rounds > _MAX_TRIAL):
            self.trial, self.rounds = None, 0
        if self.trial is None:
            if self.untried and self.rounds >= self.first_interval:
                self._try(self.untried.pop(0))
            elif self.rounds % _STRIDE == 0:
                self.best = self._best()
                if not self.untried and self.rounds >= self.interval:
                    self._review()
        return self.best if self.trial is None else self.trial

    def tokens(self, arm: Arm) -> float:
        """Estimated tokens per round and sequence.

        A prepared draft may miss, be late or be short: `ready` is the number of accepted tokens relative to that of a
        draft written in `propose`.
        """
        return 1.0 + self.accepted(arm.k) * (self.ready.value if arm.width else 1.0)

    def speed(self, arm: Arm) -> float:
        """Expected tokens per second and sequence; 0: not known."""
        seconds = self._expected(arm)
        return self.tokens(arm) / seconds if seconds else 0.0

    def _try(self, arm: Arm) -> None:
        """Measures an arm in the next rounds."""
        self.trials += 1
        self.trial, self.rounds = arm, 0
        self.tried[arm] = self.trials
        self.seconds.setdefault(arm, TypicalSeconds()).last.clear()

    def _review(self) -> None:
        """Measures the arm with the best optimistic speed again, once that costs no more than trials may."""
        self.tried[self.best] = self.trials
        others = [arm for arm in self.arms if arm != self.best]
        if not others:
            return
        fastest = self.speed(self.best)
        arm = max(others, key=lambda arm: (self.speed(arm) or fastest) * _OPTIMISM ** -self.tried.get(arm, 0))
        if (_MIN_SAMPLES + _SETTLING) * self._lost(arm, self._expected(arm)) <= self.credit:
            self._try(arm)
            self.interval = min(2 * self.interval, _MAX_INTERVAL)

    def _lost(self, arm: Arm, seconds: float) -> float:
        """Seconds that a round of an arm loses if it takes `seconds`: the best arm's tokens would come earlier."""
        fastest = self.speed(self.best)
        return max(0.0, seconds - self.tokens(arm) / fastest) if fastest else 0.0

    def _best(self) -> Arm:
        """The fastest arm. Longer drafts must gain more: they mostly speed up the easiest sequences of a batch."""
        least = min(arm.k for arm in self.arms if arm.k)
        value = {arm: self.speed(arm) * (1 - _DEPTH_PENALTY * max(0, arm.k - least)) for arm in self.arms}
        best = max(self.arms, key=lambda arm: value[arm])
        return best if value[best] > _MARGIN * value[self.best] else self.best

    def _measured(self, arm: Arm) -> bool:
        count = len(self.seconds[arm].last)
        clear = arm != self.best and self.speed(arm) < _HOPELESS * self.speed(self.best)
        return count >= _MIN_SAMPLES or (count > 0 and clear)

    def _expected(self, arm: Arm) -> float:
        """Seconds per round: measured, or interpolated over K between arms of the same width and plain decoding.

        0: not known.
        """
        if arm in self.seconds and self.seconds[arm].mean:
            return self.seconds[arm].mean
        like = {a.k: s.mean for a, s in self.seconds.items() if s.mean and (a.width == arm.width or a == PLAIN)}
        known = sorted(like.items())
        if len(known) < 2:
            return 0.0
        (k0, s0), (k1, s1) = next((pair for pair in itertools.pairwise(known) if pair[1][0] > arm.k), known[-2:])
        return s0 + (s1 - s0) * (arm.k - k0) / (k1 - k0)


class _Round(NamedTuple):
    """A round that was launched and not observed."""

    drafter: Drafter
    size: int  # ceil(log2(batch size))
    arm: Arm
    settled: (
        bool  # the rounds before it had the same size and arm, no prefill, and no drafter catches up: it is measured
    )


class DepthController(Drafter):
    """Wraps the drafters of the modes, and chooses mode, draft length and number of branches of every round.

    `drafters`: by mode; AR needs none. A drafter is told of its own rounds only. Before its first round after a rest it
    catches up with the sequences, while the rounds of another go on.
    """

    def __init__(self, drafters: Mapping[str, Drafter], arms: list[Arm]) -> None:
        self._drafters = {"ar": Drafter(), **drafters}
        self.inner = list(dict.fromkeys(drafters.values()))
        super().__init__()
        self._rates = AcceptanceRates(max(arm.k for arm in arms))
        self._arms = arms
        self._times: dict[int, ArmTimes] = {}  # by batch size, see `_Round.size`
        self._rounds: PerRound[_Round] = PerRound()
        self._last: tuple[int, Arm] | None = None  # size and arm of the last round; None: it had prefill chunks
        self._num_alike = 0  # rounds in a row of that size and arm
        self._rested = dict.fromkeys(self._drafters.values(), _SHORT_REST + 1)  # rounds since each drafter's last one
        self._next: Arm | None = None  # the arm whose drafter catches up
        self._chosen: dict[int, Arm] = {}  # by batch size, as logged
        self._take(ArmTimes(arms, self._rates.accepted).best)
        self._rested[self._drafter] = 0
        self._proposer = self._drafter  # of the last round; `prepare` may choose another one for the next

    @property
    def stats(self) -> DrafterStats:
        return functools.reduce(DrafterStats.plus, (each.stats for each in self.inner), self._own_stats)

    @stats.setter
    def stats(self, stats: DrafterStats) -> None:
        self._own_stats = stats

    @property
    def needs_tokens(self) -> bool:  # type: ignore[override]
        return self._drafter.needs_tokens

    @property
    def cores(self) -> int:  # type: ignore[override]
        catching_up = 0 if self._next is None else self._drafters[self._next.mode].cores
        return max(self._drafter.cores, catching_up)

    @property
    def _drafter(self) -> Drafter:
        return self._drafters[self.arm.mode]

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        if self._rested[self._drafter]:
            self._drafter.catch_up(works)
        self._proposer = self._drafter
        return self._proposer.propose(works)

    def settle(self, works: Seq[Work]) -> bool:
        return self._drafter.settle(works)

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        drafter, arm = self._drafter, self.arm
        drafter.prepare(works, interrupted)
        size = (max(1, sum(work.decides for work in works)) - 1).bit_length()
        key = None if _has_prefill(works) else (size, arm)
        self._num_alike = self._num_alike + 1 if key is not None and key == self._last else 0
        self._last = key
        settled = self._next is None and self._num_alike >= _SETTLING + len(self._rounds)
        self._rounds.put(works, _Round(drafter, size, arm, settled))
        self._rested = {each: 0 if each is drafter else rest + 1 for each, rest in self._rested.items()}
        if self._next is not None and self._drafters[self._next.mode].catch_up(works):
            self._rested[self._drafters[self._next.mode]] = 1
            self._take(self._next)

    def catch_up(self, works: Seq[Work]) -> bool:
        return self._drafter.catch_up(works)

    @property
    def measured(self) -> bool:
        """Whether all modes have been measured at some batch size."""
        return any(times.trial is None and not times.untried for times in self._times.values())

    def forget_text(self) -> None:
        """Keeps the times, and forgets how often the drafts of a text were accepted."""
        self._rates.reset()
        self._own_stats.rounds.clear()

    def serve(self, ended: Clock) -> None:
        self._proposer.serve(ended)

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        self._proposer.decided(works, outcomes)

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        round_ = self._rounds.pop(works)
        if round_ is None:
            return
        round_.drafter.observe(works, outcomes, seconds)
        self._own_stats.rounds[round_.arm.mode] += 1
        times = self._times_of(round_.size)
        for work, outcome in zip(works, outcomes, strict=True):
            if outcome is not None:
                self._learn(work, outcome, round_.arm, times if round_.settled else None)
        if not _has_prefill(works):
            times.record(round_.arm, seconds, comparable=round_.settled)
        if any(outcome is not None for outcome in outcomes):
            self._wish(times.choose(), times)
            self._log_choice(round_.size, times)

    def prepared(self, sequence: Sequence) -> Prepared:
        return self._drafter.prepared(sequence)

    def prepared_confidence(self, sequence: Sequence) -> Confidence:
        return self._drafter.prepared_confidence(sequence)

    def forget(self, sequence: Sequence) -> None:
        for each in self.inner:
            each.forget(sequence)

    def close(self) -> None:
        for each in self.inner:
            each.close()

    def _learn(self, work: Work, outcome: Outcome, arm: Arm, times: ArmTimes | None) -> None:
        """`times`: None where the round is not one of many alike."""
        if arm.width and work.lookahead and times is not None:
            times.ready.add(float(outcome.num_accepted), self._rates.accepted(min(arm.k, work.lookahead)))
        if outcome.draft and (not arm.width or outcome.origin in MODEL_WRITTEN):
            self._rates.learn(outcome)

    def _wish(self, arm: Arm, times: ArmTimes) -> None:
        """Takes an arm, after its drafter has caught up; until then the best arm whose drafter needs not."""
        self._next = None
        if self._up_to_date(arm):
            self._take(arm)
            return
        self._next = arm
        if self._up_to_date(times.best):
            self._take(times.best, following=arm)

    def _up_to_date(self, arm: Arm) -> bool:
        return arm == PLAIN or self._rested[self._drafters[arm.mode]] <= _SHORT_REST

    def _take(self, arm: Arm, following: Arm | None = None) -> None:
        """Sets the arm of the rounds scheduled next."""
        self.arm, self.lookahead, self._next = arm, arm.k, following
        self._drafter.budget = self.budget = arm.width

    def _log_choice(self, size: int, times: ArmTimes) -> None:
        if times.trial is None and not times.untried and self._chosen.get(size) != times.best:
            self._chosen[size] = times.best
            fastest = {arm.mode: speed for speed, arm in sorted((times.speed(arm), arm) for arm in self._arms)}
            others = [f"{mode} {speed / (times.level or 1.0):.0f}" for mode, speed in fastest.items() if speed]
            log.info(
                "batches of up to %d: %s; expected tokens/s of a sequence: %s", 1 << size, times.best, ", ".join(others)
            )

    def _times_of(self, size: int) -> ArmTimes:
        if size not in self._times:
            near = min(self._times, key=lambda other: abs(other - size), default=None)
            new = ArmTimes(self._arms, self._rates.accepted) if near is None else self._times[near].like()
            self._times[size] = new
        return self._times[size]


def _has_prefill(works: Seq[Work]) -> bool:
    return any(work.num_tokens > 1 for work in works)
