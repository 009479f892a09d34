"""What happened in a generation, round by round, as plain data: drafts, prepared branches, decisions."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

from ssd.core import Outcome, Sequence, Work
from ssd.decoding.drafter import Drafter
from ssd.decoding.round import Round
from ssd.drafting.ahead import AheadDrafter
from ssd.engine.engine import Engine
from ssd.engine.metrics import LOOKED_UP


@dataclass(frozen=True)
class Branch:
    """Prepared for one outcome: `accepted` drafted tokens stand, then the target adds `token`; the draft after that."""

    accepted: int
    token: int
    draft: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One round: what was drafted, what was prepared while the target verified it, and what the target decided."""

    draft: tuple[int, ...]
    origin: str  # of the draft, as `Proposal` has it
    branches: tuple[Branch, ...]  # the likeliest first
    accepted: int  # drafted tokens that stand
    written: tuple[int, ...]  # those, then the target's own one; fewer where the text ends before

    @property
    def hit(self) -> bool:
        """Whether the draft had been prepared in the round before."""
        return self.origin == "hit"

    @property
    def looked_up(self) -> bool:
        """Whether it could have been."""
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
        return sum(step.accepted for step in self.steps)

    @property
    def look_ups(self) -> int:
        return sum(step.looked_up for step in self.steps)

    @property
    def hits(self) -> int:
        return sum(step.hit for step in self.steps)


class Recorder(Round):
    """An engine's round that keeps notes, whoever drafts. Reading branches takes time: off where it is measured."""

    def __init__(self, engine: Engine, *, branches: bool = True) -> None:
        """Takes the place of the engine's own."""
        super().__init__(engine.round.target, engine.round.drafter, engine.round.acceptance)
        engine.round = self
        self._with_branches = branches
        self._steps: dict[str, list[Step]] = {}  # by request

    def run(self, works: Seq[Work]) -> tuple[list[Work], list[Outcome | None]]:
        verified, outcomes = super().run(works)
        for work, outcome in zip(verified, outcomes, strict=True):
            if outcome is not None:
                step = Step(
                    draft=work.proposal.token_ids,
                    origin=work.proposal.origin,
                    branches=_branches(self.drafter, work.sequence) if self._with_branches else (),
                    accepted=outcome.num_accepted,
                    written=outcome.token_ids,
                )
                self._steps.setdefault(work.sequence.request.id, []).append(step)
        return verified, outcomes

    def trace(self, request_id: str, num_tokens: int) -> Trace:
        """Of a text that has ended with so many tokens: what its last round decided beyond them is left out."""
        *steps, last = self._steps.pop(request_id)
        left = num_tokens - sum(len(step.written) for step in steps)
        return Trace((*steps, replace(last, written=last.written[:left])))


def _branches(drafter: Drafter, sequence: Sequence) -> tuple[Branch, ...]:
    """What is prepared for the next round; nothing if the drafter does not prepare, or does so elsewhere."""
    prepared = drafter.prepared(sequence) if isinstance(drafter, AheadDrafter) else None
    if prepared is None or prepared.num_decided != len(sequence.tokens):
        return ()
    tokens = prepared.run.tokens
    return tuple(Branch(after, token, tuple(tokens[row][1:])) for (after, token), row in prepared.branches().items())
