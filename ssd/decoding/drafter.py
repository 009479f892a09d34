"""The seam of the engine: who proposes tokens. AR, SD and SSD differ in the drafter only.

A drafter can be local, remote, wrong or dead: whatever it proposes, the target's own rule decides, so it can cost
speed but never text.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Protocol

from ssd.core import Outcome, Proposal, Sequence, Work


class Drafter(Protocol):
    """Proposes tokens for each sequence that is about to decide one."""

    lookahead: int  # the most that it ever proposes for one sequence

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """One proposal a work, for the tokens after its sequence's last decided one; at most `work.lookahead` count."""

    def anticipate(self, works: Seq[Work]) -> None:
        """The target starts verifying these now: prepare for what it may decide. Must not block."""

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        """What the target decided."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence has finished."""


class NoDrafter:
    """Proposes nothing: the round then is plain autoregressive decoding."""

    lookahead = 0

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return [Proposal()] * len(works)

    def anticipate(self, works: Seq[Work]) -> None:
        return

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        return

    def forget(self, sequence: Sequence) -> None:
        return
