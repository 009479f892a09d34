"""How much to speculate: as much as pays, by the clock.

For each size of the batch it learns how long a round takes with K drafted tokens, prepared ahead or not, and how often
the first, second, … of them stands; then it takes what yields the most tokens a second, plain decoding included. It
decides how much is drafted, never what is accepted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple

from ssd.core import Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter
from ssd.drafting.ahead import AheadDrafter

_ENOUGH = 3  # rounds that an arm is measured before it is believed
_REVIEW = 192  # rounds until another arm is measured again
_MARGIN = 1.02  # what another arm must promise to be taken


class Arm(NamedTuple):
    """A way to run a round."""

    k: int
    ahead: bool


PLAIN = Arm(0, False)


@dataclass
class _Seconds:
    """Of a round, of late."""

    mean: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.mean += (value - self.mean) / min(self.count, 12)


@dataclass
class Pace:
    """The clocks of one batch size."""

    arms: list[Arm]
    seconds: dict[Arm, _Seconds] = field(default_factory=dict)
    current: Arm = PLAIN
    rounds: int = 0  # since the last review
    reviewed: int = 0

    def record(self, arm: Arm, seconds: float) -> None:
        self.seconds.setdefault(arm, _Seconds()).add(seconds)

    def choose(self, tokens: Callable[[int], float]) -> Arm:
        """The next round's arm; `tokens(k)` is what a round with k drafted tokens yields."""
        self.rounds += 1
        pending = [arm for arm in self._samples() if self._count(arm) < _ENOUGH]
        if pending:
            self.current = pending[0]
        elif self.rounds >= _REVIEW:
            self._review(tokens)
        else:
            self.current = self._best(tokens)
        return self.current

    def _samples(self) -> list[Arm]:
        """Arms to begin with: plain decoding and one depth."""
        depths = sorted({arm.k for arm in self.arms if arm.k})
        return [arm for arm in self.arms if arm == PLAIN or arm.k == depths[len(depths) // 2]]

    def _review(self, tokens: Callable[[int], float]) -> None:
        """Measures an arm afresh; a hopeless one less often."""
        speed = {arm: tokens(arm.k) / self._expected(arm) for arm in self._samples()}
        hopeless = [arm for arm in speed if speed[arm] < 0.8 * max(speed.values())]
        hopeful = [arm for arm in speed if arm not in hopeless]
        arms = hopeless if hopeless and self.reviewed % 4 == 3 else hopeful
        self.current = arms[self.reviewed // 4 % len(arms)]
        self.seconds[self.current] = _Seconds()
        self.reviewed += 1
        self.rounds = 0

    def _best(self, tokens: Callable[[int], float]) -> Arm:
        speed = {arm: tokens(arm.k) / self._expected(arm) for arm in self.arms}
        best = max(self.arms, key=lambda arm: speed[arm])
        return best if speed[best] > _MARGIN * speed[self.current] else self.current

    def _count(self, arm: Arm) -> int:
        return self.seconds.get(arm, _Seconds()).count

    def _expected(self, arm: Arm) -> float:
        """Measured, or on the line through its measured neighbours, of which plain decoding is one."""
        if self._count(arm):
            return self.seconds[arm].mean
        like = {a.k: s.mean for a, s in self.seconds.items() if s.count and (a.ahead == arm.ahead or a == PLAIN)}
        known = sorted(like.items())
        (k0, s0), (k1, s1) = next((pair for pair in itertools.pairwise(known) if pair[1][0] > arm.k), known[-2:])
        return s0 + (s1 - s0) * (arm.k - k0) / (k1 - k0)


class Paced(Drafter):
    """Drafts with `inner`, as much as pays, at most `most` tokens for a sequence."""

    def __init__(self, inner: Drafter, most: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self.inner = inner
        self._clock = clock
        aheads = (True, False) if isinstance(inner, AheadDrafter) else (False,)
        depths = sorted({1, 2, 3, 4, 6, most} - set(range(most + 1, 7)))
        self._arms = [PLAIN, *(Arm(k, ahead) for k in depths for ahead in aheads)]
        self._paces: dict[int, Pace] = {}  # by the power of two that a batch fits in
        self._stands: list[tuple[float, float]] = [(3.0, 4.0)] * most  # of the i-th drafted token: stood, tried
        self._drafted: dict[int, tuple[int, tuple[int, ...]]] = {}  # by sequence id: decided tokens, then the draft
        self._arm = Arm(min(4, most), aheads[0])  # of the next round
        self.lookahead = self._arm.k
        self._began = 0.0  # the last round
        self._like = 0  # rounds up to it that can be compared: same arm, same size of batch, no prompts
        self._last: tuple[int, Arm] | None = None  # its batch and arm

    @property
    def failures(self) -> int:  # type: ignore[override]
        return self.inner.failures

    @property
    def busy_seconds(self) -> float:  # type: ignore[override]
        return self.inner.busy_seconds

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        for work in works:
            self._learn(work.sequence)
        pace = self._paces.setdefault((len(works) - 1).bit_length(), Pace(self._arms))
        self._time(pace, len(works))
        proposals = self.inner.propose(works) if any(work.lookahead for work in works) else super().propose(works)
        for work, proposal in zip(works, proposals, strict=True):
            tokens = work.sequence.tokens
            self._drafted[work.sequence.id] = len(tokens), proposal.token_ids[: work.lookahead]
        self._arm = pace.choose(self.tokens)
        self.lookahead = self._arm.k
        if isinstance(self.inner, AheadDrafter):
            self.inner.ahead = self._arm.ahead
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

    def tokens(self, k: int) -> float:
        """What a round with k drafted tokens yields, of late."""
        expected, reached = 1.0, 1.0
        for stood, tried in self._stands[:k]:
            reached *= stood / tried
            expected += reached
        return expected

    def _learn(self, sequence: Sequence) -> None:
        decided, draft = self._drafted.pop(sequence.id, (0, ()))
        accepted = len(sequence.tokens) - decided - 1
        if draft and 0 <= accepted <= len(draft):
            for i in range(min(accepted + 1, len(draft))):
                stood, tried = self._stands[i]
                self._stands[i] = 0.98 * stood + (i < accepted), 0.98 * tried + 1

    def _time(self, pace: Pace, batch: int) -> None:
        """Of the round that has just ended, if the one before it was like it: a change of arm takes a round."""
        now = self._clock()
        if self._last is not None and self._last[0] == batch and self._like > 1:
            pace.record(self._last[1], now - self._began)
        self._like = self._like + 1 if self._last == (batch, self._arm) else 0
        self._began, self._last = now, (batch, self._arm)
