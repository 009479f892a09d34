"""Chooses by measured speed how a batch is decoded: `mode="auto"`, `k="auto"`, `tree="auto"`, `budget="auto"`.

A multi-armed bandit over the arms of `ssd.drafting.arms`. It decides how much is drafted, never what is accepted.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from ssd.core import MODEL_WRITTEN, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Confidence, Drafter, DrafterStats, PerRound, Prepared, never
from ssd.drafting.arms import PLAIN, RECORDING, SETTLING, AcceptanceRates, Arm, ArmTimes, arms_for, times_of
from ssd.execution.clock import Clock

log = logging.getLogger("ssd")

_SHORT_REST = 16  # rounds that a drafter may be left out of without catching up before its next one


class _Round(NamedTuple):
    """A round that was launched and not observed."""

    drafter: Drafter
    size: int  # ceil(log2(batch size))
    arm: Arm
    # Whether it is measured: the rounds before it had the same size and arm and no prefill, and no drafter catches up.
    settled: bool


class DepthController(Drafter):
    """Wraps the drafters of the modes, and chooses mode, draft length, branches and nodes of trees of every round.

    `drafters`: by mode; AR needs none. A drafter is told of its own rounds only. Before its first round after a rest it
    catches up with the sequences, while the rounds of another go on. `least`: seconds of a round of each arm with one
    sequence and nothing but forward passes, if they were measured: the choice begins with them.
    """

    def __init__(
        self, drafters: Mapping[str, Drafter], arms: list[Arm], least: Mapping[Arm, float] | None = None
    ) -> None:
        self.drafters: Mapping[str, Drafter] = {"ar": Drafter(), **drafters}  # by mode
        self.inner = list(dict.fromkeys(drafters.values()))
        super().__init__()
        self._rates = AcceptanceRates(arms)
        self._arms = arms
        self._times: dict[int, ArmTimes] = {}  # by batch size, see `_Round.size`
        self._rounds: PerRound[_Round] = PerRound()
        self._last: tuple[int, Arm] | None = None  # size and arm of the last round; None: it had prefill chunks
        self._num_alike = 0  # rounds in a row of that size and arm
        self._used: Counter[tuple[int, Arm] | None] = Counter()  # rounds of each
        self._rested = dict.fromkeys(self.drafters.values(), _SHORT_REST + 1)  # rounds since each drafter's last one
        self._next: Arm | None = None  # the arm whose drafter catches up
        self._chosen: dict[int, Arm] = {}  # by batch size, as logged
        self.timed = least is not None  # otherwise rounds have to be measured
        self._take((self._of_passes(least) if least else ArmTimes(arms, self._rates.accepted)).untried[0])
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
        catching_up = 0 if self._next is None else self.drafters[self._next.mode].cores
        return max(self._drafter.cores, catching_up)

    @property
    def _drafter(self) -> Drafter:
        return self.drafters[self.arm.mode]

    def slots(self, k: int) -> int:
        return self._drafter.slots(k)

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
        self._used[key] += 1
        recorded = not self.timed or self._used[key] > RECORDING
        settled = self._next is None and recorded and self._num_alike >= SETTLING + len(self._rounds)
        self._rounds.put(works, _Round(drafter, size, arm, settled))
        self._rested = {each: 0 if each is drafter else rest + 1 for each, rest in self._rested.items()}
        if self._next is not None and self.drafters[self._next.mode].catch_up(works):
            self._rested[self.drafters[self._next.mode]] = 1
            self._take(self._next)

    def catch_up(self, works: Seq[Work]) -> bool:
        return self._drafter.catch_up(works)

    def measure(self, batch: int) -> Callable[[], bool]:
        """Measures all modes in the next rounds of so many sequences; what is returned says whether that is done."""
        times = self._times[(batch - 1).bit_length()] = ArmTimes(
            arms_for(self._arms, batch), self._rates.accepted, thorough=True
        )
        return lambda: times.complete

    def forget_text(self) -> None:
        """Keeps the times of sizes that were measured, and forgets how often the drafts of a text were accepted."""
        self._rates.reset()
        self._times = {size: times for size, times in self._times.items() if times.complete}
        for times in self._times.values():
            times.forget_text()
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
        self._learn(works, outcomes, round_.arm, times if round_.settled else None)
        if not _has_prefill(works):
            times.record(round_.arm, seconds, comparable=round_.settled)
        if any(outcome is not None for outcome in outcomes):
            self._wish(times.choose(), times)
            self._log_choice(round_.size, times)

    def prepared(self, sequence: Sequence) -> Prepared:
        return self._proposer.prepared(sequence)

    def prepared_confidence(self, sequence: Sequence) -> Confidence:
        return self._proposer.prepared_confidence(sequence)

    def pin_hits(self, rate: float) -> None:
        for each in self.inner:
            each.pin_hits(rate)

    def forget(self, sequence: Sequence) -> None:
        for each in self.inner:
            each.forget(sequence)

    def close(self) -> None:
        for each in self.inner:
            each.close()

    def _learn(self, works: Seq[Work], outcomes: Seq[Outcome | None], arm: Arm, times: ArmTimes | None) -> None:
        """`times`: None where the round is not one of many alike."""
        found = [(work, outcome) for work, outcome in zip(works, outcomes, strict=True) if outcome is not None]
        written = [outcome for _, outcome in found if outcome.draft and (not arm.varies or _written(outcome))]
        if arm.look_up and times is not None:
            for work, outcome in found:
                if work.lookahead and not arm.k:
                    times.found.add(outcome.num_accepted)
                elif work.lookahead:
                    times.gain.add(outcome.num_accepted, self._rates.accepted(min(arm.k, work.lookahead)))
        if arm.width and times is not None:
            for work, outcome in found:
                if work.lookahead:
                    expected = self._rates.accepted(len(outcome.draft))  # varies less than how many were accepted
                    times.ready.add(
                        expected if _written(outcome) else float(outcome.num_accepted),
                        self._rates.accepted(min(arm.k, work.lookahead)),
                    )
        if written and arm.nodes:
            self._rates.learn_trees(written)
        elif written:
            self._rates.learn(written)

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
        return arm == PLAIN or self._rested[self.drafters[arm.mode]] <= _SHORT_REST

    def _take(self, arm: Arm, following: Arm | None = None) -> None:
        """Sets the arm of the rounds scheduled next."""
        self.arm, self._next = arm, following
        self.lookahead = arm.nodes or self._drafter.slots(arm.k)
        self._drafter.k, self._drafter.levels = arm.k, arm.levels
        self._drafter.budget = self.budget = arm.width

    def _log_choice(self, size: int, times: ArmTimes) -> None:
        if times.complete and self._chosen.get(size) != times.best:
            self._chosen[size] = times.best
            fastest = {arm.mode: speed for speed, arm in sorted((times.speed(arm), arm) for arm in times.arms)}
            others = [f"{mode} {speed / (times.level or 1.0):.0f}" for mode, speed in fastest.items() if speed]
            log.info(
                "batches of up to %d: %s; expected tokens/s of a sequence: %s", 1 << size, times.best, ", ".join(others)
            )

    def _of_passes(self, least: Mapping[Arm, float]) -> ArmTimes:
        seconds = {arm: times_of(arm) for arm in self._arms}
        for arm, typical in seconds.items():
            typical.add(least[arm])
        times = self._times[0] = ArmTimes(self._arms, self._rates.accepted, seconds, level=None, least=least)
        times.forget_text()
        return times

    def _times_of(self, size: int) -> ArmTimes:
        if size not in self._times:
            near = min(self._times, key=lambda other: abs(other - size), default=None)
            arms = arms_for(self._arms, 1 << size)
            batch = 1 << size if any(arm.nodes for arm in self._arms) else 1
            fresh = ArmTimes(arms, self._rates.accepted, batch=batch)
            self._times[size] = fresh if near is None else self._times[near].like(arms, batch)
        return self._times[size]


def _written(outcome: Outcome) -> bool:
    return outcome.origin in MODEL_WRITTEN


def _has_prefill(works: Seq[Work]) -> bool:
    return any(work.num_tokens > 1 for work in works)
