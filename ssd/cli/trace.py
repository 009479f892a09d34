"""Records the rounds of a generation: drafts, prepared branches, outcomes."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from ssd.core import LOOKED_UP, Origin, Outcome, Sequence, Work
from ssd.decoding.drafter import PerRound, Prepared
from ssd.decoding.observer import RoundObserver


@dataclass(frozen=True)
class Branch:
    """A prepared draft and its outcome: `accepted` draft tokens, then the target's own `token`."""

    accepted: int
    token: int
    draft: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One round: the draft, the branches prepared while it was verified, and the outcome."""

    draft: tuple[int, ...]
    origin: Origin  # of the draft
    branches: tuple[Branch, ...]  # the likeliest first
    accepted: int  # accepted draft tokens
    written: tuple[int, ...]  # those and the target's own token; fewer if the text ends before

    @property
    def hit(self) -> bool:
        """Whether the draft had been prepared in the round before."""
        return self.origin is Origin.HIT

    @property
    def looked_up(self) -> bool:
        """Whether the draft was looked up in prepared branches."""
        return self.origin in LOOKED_UP

    @property
    def own(self) -> tuple[int, ...]:
        """The target's own token, unless the text ended before it."""
        return self.written[self.accepted :]

    def came_true(self, branch: Branch) -> bool:
        return (branch.accepted, (branch.token,)) == (self.accepted, self.own)


@dataclass(frozen=True)
class Trace:
    """All rounds of one text."""

    steps: tuple[Step, ...]

    @property
    def token_ids(self) -> list[int]:
        return [token for step in self.steps for token in step.written]

    @property
    def drafted(self) -> int:
        return sum(len(step.draft) for step in self.steps)

    @property
    def accepted(self) -> int:
        """Accepted draft tokens that were written."""
        return sum(min(step.accepted, len(step.written)) for step in self.steps)

    @property
    def look_ups(self) -> int:
        return sum(step.looked_up for step in self.steps)

    @property
    def hits(self) -> int:
        return sum(step.hit for step in self.steps)


class Recorder(RoundObserver):
    """Records rounds (`Driver.observing`).

    `branches`: records prepared branches, which makes target and draft take turns: not for measurements of speed.
    """

    def __init__(self, *, branches: bool = True) -> None:
        self.synchronous = branches
        self._prepared: PerRound[dict[int, Prepared]] = PerRound()  # by sequence id
        self._steps: dict[str, list[Step]] = {}  # by request

    def launched(self, works: Seq[Work], prepared: Callable[[Sequence], Prepared]) -> None:
        if self.synchronous:
            self._prepared.put(works, {w.sequence.id: prepared(w.sequence) for w in works if w.decides})

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        prepared = self._prepared.pop(works) or {}
        for work, outcome in zip(works, outcomes, strict=True):
            if outcome is not None:
                found = prepared.get(work.sequence.id, {})
                step = Step(
                    draft=outcome.draft,
                    origin=outcome.origin,
                    branches=tuple(Branch(after, token, draft) for (after, token), draft in found.items()),
                    accepted=outcome.num_accepted,
                    written=outcome.token_ids,
                )
                self._steps.setdefault(work.sequence.request.id, []).append(step)

    def trace(self, request_id: str, num_tokens: int) -> Trace:
        """The rounds of a finished request; what they decided beyond its `num_tokens` tokens is left out."""
        steps, left = [], num_tokens
        for step in self._steps.pop(request_id):
            if left > 0:
                steps.append(replace(step, written=step.written[:left]))
                left -= len(step.written)
        return Trace(tuple(steps))
