"""The seam of the engine: who proposes tokens. AR, SD and SSD differ in the drafter only.

A drafter can be local, remote, wrong or dead: whatever it proposes, the target's own rule decides, so it can cost
speed but never text.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq

from ssd.core import Proposal, Sequence, Work

Outcomes = Mapping[tuple[int, int], tuple[int, ...]]  # (accepted tokens, the one that the target adds) -> a draft


class Drafter:
    """Proposes tokens for each sequence that is about to decide one. This one never does: plain decoding.

    What the target decided is not announced: a sequence's tokens tell, when the next proposal is asked for.
    """

    lookahead = 0  # the most that it proposes for one sequence, in the next round
    failures = 0  # times that it was lost and started again
    busy_seconds = 0.0  # that it computed, as far as it knows
    hand_over_seconds = 0.0  # that messages to and from it took, where it is another process
    round_seconds = 0.0  # that the last round took: set by whoever runs the rounds

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """One proposal a work, for the tokens after its sequence's last decided one; at most `work.lookahead` count."""
        return [Proposal()] * len(works)

    def anticipate(self, works: Seq[Work]) -> None:
        """The target verifies these now: prepare for what it may decide. Must not wait for it."""

    def outcomes(self, sequence: Sequence) -> Outcomes:
        """What is prepared for the next round of a sequence, once it is."""
        return {}

    def forget(self, sequence: Sequence) -> None:
        """The sequence has finished."""

    def close(self) -> None:
        """The engine is done with."""
