"""The interface of drafters: who proposes tokens. AR, SD and SSD differ in the drafter only.

A drafter can be local, remote, wrong or dead: whatever it proposes, the target's own rule decides, so it can cost
speed but never text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ssd.core import Outcome, Proposal, Sequence, Work

# What is prepared for the next round of a sequence: (accepted tokens, token that the target adds) -> the draft.
Prepared = Mapping[tuple[int, int], tuple[int, ...]]


@dataclass
class DrafterStats:
    """Totals of a drafter's life."""

    busy_seconds: float = 0.0  # that it computed
    hand_over_seconds: float = 0.0  # that messages to and from it took, where it is another process
    failures: int = 0  # times that it was lost and started again


def never() -> bool:
    return False


class Drafter:
    """Proposes tokens for each sequence that is about to decide one. This one never does: autoregressive decoding.

    A round is propose → settle → (the target verifies) → prepare, and later observe. Where the device runs ahead of the
    host, round n + 1 is proposed before round n is observed: proposals are then made from the device's state.
    """

    lookahead = 0  # the most tokens that it proposes for one sequence in the next round
    needs_tokens = False  # True: it proposes from the committed tokens, so every round before must be committed

    def __init__(self) -> None:
        self.stats = DrafterStats()

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """One proposal for each of these works, which all decide a token; at most `work.lookahead` tokens count."""
        return [Proposal()] * len(works)

    def settle(self, works: Seq[Work]) -> None:
        """The verification of these works (of all kinds) is about to be launched: the last moment before it.

        Drafts on the device may still change, and this is the place to wait for something that decides about them. What
        is prepared from the state of the sequences must be read now, because the verification changes it.
        """

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        """The target verifies these works now: prepare for what it may decide. Must not wait for it.

        `interrupted` says, now and then, whether preparing should end early.
        """

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        """What a round decided, after it was committed, and how long it took; None for a prefill chunk."""

    def prepared(self, sequence: Sequence) -> Prepared:
        """What is prepared for the next round of a sequence; on a GPU this waits for it."""
        return {}

    def forget(self, sequence: Sequence) -> None:
        """The sequence has finished, or is to be started afresh; no round in flight uses it."""

    def close(self) -> None:
        """The engine is done with it."""
