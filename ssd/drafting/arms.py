"""The arms of the controller: modes with K, number of branches and nodes of trees, and how fast each is expected to be.

For each batch size the seconds per round of every arm are measured, and its tokens per round are estimated from the
acceptance rate of each draft position, or of a tree's nodes. The arm with the most tokens per second is used; others
are measured again from time to time, as often as that costs a small share of the time. Knows nothing of drafters and
rounds.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from ssd.config import MOST_TREE_ROWS
from ssd.core import Outcome
from ssd.drafting.estimate import Average, TypicalSeconds

_MIN_SAMPLES = 3  # rounds that measure an arm
_SAMPLES, _MOST_SAMPLES = 12, 48  # that measure SSD and trees (`Arm.varies`), and the first drafts of a text
_HOPELESS = 0.85  # share of the fastest other arm's speed below which fewer are enough: one; _MIN_SAMPLES if it varies
_CLOSE = 0.08  # difference to that speed up to which _MOST_SAMPLES are measured instead of _SAMPLES
SETTLING = 1  # rounds after a change of arm that are not measured, besides those in flight
RECORDING = 3  # first rounds of an arm on a CPU that are not measured: its steps are recorded in them
_MAX_TRIAL = 64  # rounds after which a trial is given up: its drafter has not caught up
_TRIAL_SHARE = 0.01  # of the time that trials may lose
_MAX_DEBT = 512  # rounds after which there may be trials again, whatever the last ones have lost
_MAX_INTERVAL = 128  # rounds between two trials, at least
_FIRST_INTERVAL = 24  # rounds before the first one that nothing requires; doubles with every trial
_NEW_SIZE_INTERVAL = 8  # rounds before the trial of each mode at a new batch size
_DRIFT = 1.4  # change of `level` after which the modes are compared again: all arms need not change alike
_STRIDE = 4  # rounds between two choices
_CHEAP_ROWS = 64  # rows of a verification up to which more of them cost little: trees and plain decoding are just tried
_DEPTH_PENALTY = 0.015  # relative speed that each draft token after the shortest draft's must gain
_MARGIN = 1.02  # expected speed-up that a change of arm needs
_OPTIMISM = 1.08  # factor on an arm's expected speed for every trial since it was last measured
_DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48)
_NODES = (8, 16, 32, 64)
_GAIN, _GAIN_WEIGHT = 0.25, 4.0  # guess of the accepted tokens that a tree has more than the next smaller one


class Arm(NamedTuple):
    """One choice of the controller."""

    k: int  # draft tokens per round
    width: int  # branches per sequence; 0: none prepared, the draft is written in `propose`
    look_up: bool = False  # with suffix look-up, whose drafts have lengths of their own
    nodes: int = 0  # of a tree with paths of up to k tokens; 0: drafts are chains

    @property
    def mode(self) -> str:
        if not self.k:
            return "suffix" if self.look_up else "ar"
        return "ssd" if self.width else "tree" if self.nodes else "sd"

    @property
    def lookahead(self) -> int:
        """Draft tokens that a round verifies."""
        return self.nodes or self.k

    @property
    def levels(self) -> int:
        """Of trees; 0: drafts are chains."""
        return self.k if self.nodes else 0

    @property
    def varies(self) -> bool:
        """Whether its rounds differ in what they do, or its tokens per round are learned in them alone."""
        return self.width > 0 or self.look_up or self.nodes > 0

    def __str__(self) -> str:
        more = f", {self.width} branches" if self.width else f", {self.nodes} nodes" if self.nodes else ""
        return f"mode={self.mode}{f', k={self.k}' if self.k else ''}{more}"


PLAIN = Arm(0, 0)
LOOK_UP = Arm(0, 0, look_up=True)


def depths_up_to(most: int) -> list[int]:
    """The draft lengths to choose from."""
    return [*(k for k in _DEPTHS if k < most), most]


def make_arms(modes: Seq[str], depths: Seq[int], widths: Seq[int], nodes: int = 0) -> list[Arm]:
    """The arms of these modes: every depth, and for SSD every width. With the mode "suffix", SD has look-up, too.

    `nodes`: of the largest tree.
    """
    look_up = "suffix" in modes
    arms = [PLAIN] if "ar" in modes else []
    arms += [LOOK_UP] if look_up else []
    for k in depths:
        arms += [Arm(k, 0, look_up)] if "sd" in modes else []
        arms += [Arm(k, width) for width in widths] if "ssd" in modes else []
    sizes = [count for count in _NODES if depths[-1] < count < nodes] + [nodes]
    return arms + ([Arm(depths[-1], 0, nodes=count) for count in sizes] if "tree" in modes else [])


def arms_for(arms: Seq[Arm], batch: int) -> list[Arm]:
    """Those for batches of so many sequences."""
    return [arm for arm in arms if not arm.nodes or batch * (1 + arm.nodes) <= MOST_TREE_ROWS]


class AcceptanceRates:
    """How often each position of a draft is accepted. Of all arms together: it depends on the text more than on K.

    Of trees: how many of the nodes up to each number are accepted, more than of those up to the number before. The
    first nodes of a tree are a tree, so its rounds tell it of all that are smaller.
    """

    def __init__(self, arms: Seq[Arm]) -> None:
        self._depth = max(arm.k for arm in arms)
        self._sizes = sorted(arm.nodes for arm in arms if arm.nodes)
        self.reset()

    def reset(self) -> None:
        self._rates = [Average(0.99, 12.0, 16.0) for _ in range(self._depth)]
        guesses = [self.accepted(self._depth) + _GAIN, *(_GAIN for _ in self._sizes[1:])]
        self._gains = {
            size: Average(0.99, guess * _GAIN_WEIGHT, _GAIN_WEIGHT)
            for size, guess in zip(self._sizes, guesses, strict=False)
        }

    def accepted(self, k: int, nodes: int = 0) -> float:
        """Expected number of accepted tokens of a draft of k tokens, or of a tree."""
        if nodes:
            return float(sum(gain.value for size, gain in self._gains.items() if size <= nodes))
        reached = itertools.accumulate((rate.value for rate in self._rates[:k]), float.__mul__)
        return float(sum(reached))

    def learn(self, outcomes: Seq[Outcome]) -> None:
        """Adds the drafts of a round. A round has the weight of one draft, however many sequences it has."""
        for i, rate in enumerate(self._rates):
            reached = [each.num_accepted > i for each in outcomes if each.num_accepted >= i and len(each.draft) > i]
            if reached:
                rate.add(sum(reached) / len(outcomes), len(reached) / len(outcomes))

    def learn_trees(self, outcomes: Seq[Outcome]) -> None:
        """Likewise."""
        for before, size in itertools.pairwise([0, *self._sizes]):
            gained = [sum(before <= i < size for i in each.nodes) for each in outcomes if len(each.draft) >= size]
            if gained:
                self._gains[size].add(sum(gained) / len(outcomes), len(gained) / len(outcomes))


def _new_ready() -> Average:
    return Average(0.998, 9.0, 10.0)


def _new_gain() -> Average:
    return Average(0.99, 10.0, 10.0)


def _new_found() -> Average:
    return Average(0.99, 5.0, 5.0)


def times_of(arm: Arm) -> TypicalSeconds:
    """Rounds of look-up verify drafts of any length, and all of them count."""
    return TypicalSeconds(last=deque(maxlen=64), most=8.0) if arm.look_up else TypicalSeconds()


@dataclass
class ArmTimes:
    """Seconds per round of every arm for one batch size, and the arm chosen by them."""

    arms: list[Arm]
    accepted: Callable[..., float]  # see `AcceptanceRates`
    seconds: dict[Arm, TypicalSeconds] = field(default_factory=dict)  # divided by `level`
    best: Arm = PLAIN
    trial: Arm | None = None  # the arm that is being measured
    # Slow-down of all arms (longer contexts, a busy machine), relative to the means; None: a new batch size, not known.
    level: float | None = 1.0
    checked_level: float = 1.0  # when the modes were compared
    ready: Average = field(default_factory=_new_ready)  # see `tokens`
    gain: Average = field(default_factory=_new_gain)  # the same
    found: Average = field(default_factory=_new_found)  # the same
    untried: list[Arm] = field(default_factory=list)  # arms that are measured whatever it costs, the first one first
    first_interval: int = 0  # rounds before each of them
    thorough: bool = False  # until all are measured at the start, and SSD with the first text: no trial ends early
    interval: int = _FIRST_INTERVAL  # rounds between later trials
    rounds: int = 0  # since the last trial, or of the current one
    trials: int = 0
    tried: dict[Arm, int] = field(default_factory=dict)  # number of the trial in which each arm was last measured
    credit: float = 0.0  # seconds that trials may lose by now
    least: Mapping[Arm, float] = field(default_factory=dict)  # seconds of a round at least, where that is known
    batch: int = 1  # sequences, where there are trees at some sizes; 1: there are none

    def __post_init__(self) -> None:
        if not self.untried:
            self.best, *others = self._representatives()
            self.untried = [self.best, *filter(self._is_cheap, others)]

    @property
    def complete(self) -> bool:
        """Whether all that must be measured has been."""
        return self.trial is None and not self.untried

    def _representatives(self) -> list[Arm]:
        """The middle depth of SD, then plain decoding, look-up alone, SSD with each width, and trees, the largest
        first."""
        depths = sorted({arm.k for arm in self.arms if arm.k})
        usual = [arm for arm in self.arms if not arm.k or arm.nodes or arm.k == depths[len(depths) // 2]]
        return sorted(usual, key=lambda arm: (("sd", "ar", "suffix", "ssd", "tree").index(arm.mode), -arm.nodes))

    def _is_cheap(self, arm: Arm) -> bool:
        """Whether it is measured whatever that costs. In large batches a few rounds of trees, or of plain decoding,
        cost more than is gained in a short time."""
        return self.batch == 1 or self.batch * (1 + max(arm.nodes, self.best.lookahead)) <= _CHEAP_ROWS

    def like(self, arms: list[Arm], batch: int = 1) -> ArmTimes:
        """To start another batch size with, which has these arms: the same ratios, to be checked for the best arm of
        each mode and all trees, which cost more in larger batches."""
        known = {arm: s.mean for arm, s in self.seconds.items() if s.mean and arm in arms}
        seconds = {arm: replace(times_of(arm), mean=mean) for arm, mean in known.items()}
        if not seconds:
            return ArmTimes(arms, self.accepted, batch=batch)
        best = self.best if self.best in arms else max(seconds, key=self.speed)
        made = ArmTimes(
            arms,
            self.accepted,
            seconds,
            best,
            level=None,
            ready=replace(self.ready),
            gain=replace(self.gain),
            found=replace(self.found),
            untried=[best],
            first_interval=_NEW_SIZE_INTERVAL,
            least=self.least,
            batch=batch,
        )
        checked = [arm for arm in arms if (arm in self._others() or arm.nodes) and made._is_cheap(arm)]
        made.untried = [arm for arm in checked if arm != best] or [best]
        return made

    def _others(self) -> list[Arm]:
        """The fastest known arm of each mode but the best arm's."""
        known = sorted((self.speed(arm), arm) for arm, s in self.seconds.items() if s.mean and self._can_win(arm))
        fastest = {arm.mode: arm for _, arm in known}
        return [arm for mode, arm in fastest.items() if mode != self.best.mode]

    def forget_text(self) -> None:
        """Keeps the times, and measures with the next text what depends on it: how many tokens a round has.

        With SSD, from which that of SD is known, too, unless SSD would be slower even without a miss. Where plain
        decoding is expected to be the fastest, SD is tried if it is known to be faster when all drafts are accepted.
        """
        self.ready, self.gain, self.found = _new_ready(), _new_gain(), _new_found()
        self.best = self._best()
        fastest = self.speed(self.best)
        ssd = sorted((arm for arm, s in self.seconds.items() if arm.width and s.last), key=self.speed)[-1:]
        hopeful = [arm for arm in ssd if 1.0 + self.accepted(arm.k) > fastest * min(self.seconds[arm].last)]
        drafts = [arm for arm in self._others() if arm in self.least and not arm.width] if self.best == PLAIN else []
        self.untried = hopeful or [self.best, *drafts]
        self.first_interval, self.rounds, self.thorough, self.credit = 0, 0, True, 0.0

    def record(self, arm: Arm, seconds: float, *, comparable: bool = True) -> None:
        """Adds a round's time; `comparable`: False for one that was not like the rounds before it.

        A drift of this arm is assumed to apply to all arms: it changes `level`.
        """
        known = self.seconds.setdefault(arm, times_of(arm))
        if self.level is None and comparable:
            self.level = self.checked_level = seconds / known.mean if known.mean else 1.0
        elif self.level is not None and comparable and len(known.last) >= _MIN_SAMPLES:
            slower = seconds / self.level / known.mean
            self.level *= 1 + (min(max(slower, 0.8), 1.25) - 1) / 16
            if not 1 / _DRIFT < self.level / self.checked_level < _DRIFT and not self.untried:
                self.untried, self.first_interval = list(filter(self._is_cheap, self._others())), _NEW_SIZE_INTERVAL
                self.checked_level = self.level
        if self.level is None:
            return
        usual = seconds / self.level
        self.credit += _TRIAL_SHARE * usual
        if arm != self.best or (not comparable and self.trial is not None):
            self.credit -= self._lost(arm, usual)
        self.credit = max(self.credit, -_MAX_DEBT * _TRIAL_SHARE * usual)
        if comparable:
            known.add(usual)

    def choose(self) -> Arm:
        """The arm of the next round: the one to be measured, else the best."""
        self.rounds += 1
        if self.trial is not None and (self._measured(self.trial) or self.rounds > _MAX_TRIAL):
            self.trial, self.rounds = None, 0
            self.thorough = self.thorough and bool(self.untried)
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
        draft written in `propose`. `gain` is the same of learned drafts and those of look-up together, and `found` the
        number of accepted tokens of look-up alone.
        """
        if arm == LOOK_UP:
            return 1.0 + float(self.found.value)
        if arm.nodes:
            return 1.0 + self.accepted(arm.k, arm.nodes)
        ratio = self.ready.value if arm.width else self.gain.value if arm.look_up else 1.0
        return 1.0 + self.accepted(arm.k) * float(ratio)

    def speed(self, arm: Arm) -> float:
        """Expected tokens per second and sequence; 0: not known."""
        seconds = self._expected(arm)
        return self.tokens(arm) / seconds if seconds else 0.0

    def _try(self, arm: Arm) -> None:
        """Measures an arm in the next rounds."""
        self.trials += 1
        self.trial, self.rounds = arm, 0
        self.tried[arm] = self.trials
        self.seconds.setdefault(arm, times_of(arm)).last.clear()

    def _review(self) -> None:
        """Measures the arm with the best optimistic speed again, of those that cost no more than trials may."""
        self.tried[self.best] = self.trials
        others = [
            arm for arm in self.arms if arm != self.best and self._can_win(arm) and self._trial_cost(arm) <= self.credit
        ]
        if others:
            fastest = self.speed(self.best)
            self._try(max(others, key=lambda arm: (self.speed(arm) or fastest) * _OPTIMISM ** -self.tried.get(arm, 0)))
            self.interval = min(2 * self.interval, _MAX_INTERVAL)

    def _trial_cost(self, arm: Arm) -> float:
        """Seconds that a trial is expected to lose. Rounds that are not known, and not cheap, take at least as long as
        those of the best arm, and in proportion to the rows that they verify."""
        seconds = self._expected(arm)
        if not self._is_cheap(arm) and not (arm in self.seconds and self.seconds[arm].last):
            more = (1 + arm.lookahead) / (1 + self.best.lookahead)
            seconds = max(seconds, self._expected(self.best) * max(1.0, more))
        return ((_SAMPLES if arm.varies else _MIN_SAMPLES) + SETTLING) * self._lost(arm, seconds)

    def _can_win(self, arm: Arm) -> bool:
        """Whether it could be the fastest: SD if all drafts were accepted, SSD if every outcome were prepared.

        The acceptance that SSD would have is learned from SD, which is tried first.
        """
        tokens = 1.0 + (self.accepted(arm.k) if arm.width else arm.k)
        return arm == PLAIN or arm.look_up or tokens > self.speed(self.best) * self.least.get(arm, 0.0)

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
        count, other = len(self.seconds[arm].last), max([0.0, *(self.speed(a) for a in self.arms if a != arm)])
        ratio = self.speed(arm) / other if other else 1.0
        through = arm.width or arm.nodes or arm == self.best or arm not in self.least
        if ratio < _HOPELESS and not (self.thorough and through):
            return count >= (_MIN_SAMPLES if arm.varies else 1)
        if not arm.varies and not (arm.k and self.thorough):
            return count >= _MIN_SAMPLES
        close = other > 0.0 and abs(ratio - 1.0) < _CLOSE
        return count >= _SAMPLES and (not close or self.rounds > _MOST_SAMPLES)

    def _expected(self, arm: Arm) -> float:
        """Seconds per round: measured, or interpolated over the tokens that are verified, between arms of the same mode
        and width, and plain decoding where they are chains.

        0: not known.
        """
        if arm in self.seconds and self.seconds[arm].mean:
            return self.seconds[arm].mean
        if arm == LOOK_UP:
            return 0.0
        kind = arm.mode, arm.width
        alike = (a for a in self.seconds if (a.k and (a.mode, a.width) == kind) or (a == PLAIN and not arm.nodes))
        like = {a.lookahead: self.seconds[a].mean for a in alike if self.seconds[a].mean}
        known = sorted(like.items())
        if len(known) < 2:
            return 0.0
        count = arm.lookahead
        (n0, s0), (n1, s1) = next((pair for pair in itertools.pairwise(known) if pair[1][0] > count), known[-2:])
        return s0 + (s1 - s0) * (count - n0) / (n1 - n0)
