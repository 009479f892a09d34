"""The interface of drafters, which propose tokens. AR, SD and SSD differ in the drafter only.

The target verifies every proposal, so a drafter that is slow, wrong or has failed costs speed and changes no token.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Generic, TypeVar

from ssd.core import Outcome, Proposal, Sequence, Work

if TYPE_CHECKING:  # a worker's protocol needs no torch
    from ssd.execution.clock import Clock

T = TypeVar("T")

# Drafts prepared for the outcomes of a verification: (number of accepted tokens, the target's own token) -> draft.
Prepared = Mapping[tuple[int, int], tuple[int, ...]]
Confidence = Mapping[tuple[int, int], tuple[float, ...]]  # of these drafts' tokens, by outcome


@dataclass
class DrafterStats:
    """Totals since the drafter was created."""

    busy_seconds: float = 0.0  # the draft model computed
    hand_over_seconds: float = 0.0  # transfer of messages, for a drafter in another process
    failures: int = 0  # restarts of that process
    rounds: Counter[str] = field(default_factory=Counter)  # by mode, where it is chosen in every round

    def plus(self, other: DrafterStats) -> DrafterStats:
        return DrafterStats(
            self.busy_seconds + other.busy_seconds,
            self.hand_over_seconds + other.hand_over_seconds,
            self.failures + other.failures,
            self.rounds + other.rounds,
        )


def never() -> bool:
    return False


class PerRound(Generic[T]):
    """A drafter's data of the rounds between `prepare` and `observe`, by their lists of works."""

    _MOST = 2  # rounds in flight; older ones have failed and are never observed

    def __init__(self) -> None:
        self._rounds: deque[tuple[Seq[Work], T]] = deque(maxlen=self._MOST)

    def __len__(self) -> int:
        return len(self._rounds)

    def put(self, works: Seq[Work], value: T) -> None:
        self._rounds.append((works, value))

    def pop(self, works: Seq[Work]) -> T | None:
        """None: `put` was not called for this round."""
        found = next((entry for entry in self._rounds if entry[0] is works), None)
        if found is None:
            return None
        self._rounds = deque((e for e in self._rounds if e is not found), maxlen=self._MOST)
        return found[1]


class Drafter:
    """Proposes draft tokens. This base class proposes none, which is autoregressive decoding.

    Calls of a round, in order: propose, settle, prepare (see `Round.launch`), and observe once the round is committed.
    On a GPU round n + 1 is proposed before round n is observed: the proposal is made on the device, from the
    SequenceState.
    """

    lookahead: int = 0  # maximum draft length of the next round; KV slots are reserved for it
    k: int | None = None  # draft tokens that it proposes per sequence, on average; None: as many as there is room for
    budget: int = 0  # maximum number of branches per sequence that the next round prepares; 0: none
    levels: int = 0  # of the trees that the next round proposes; 0: chains
    needs_tokens: bool = False  # True: it proposes from `Sequence.tokens`: every earlier round must be committed first
    cores: int = 0  # CPU cores that its own processes compute on in the next round, which the target leaves to them

    def __init__(self) -> None:
        self.stats = DrafterStats()

    def slots(self, k: int) -> int:
        """KV slots that a sequence needs for drafts of k tokens on average."""
        return k

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """One proposal per work, all of which decide a token; tokens beyond `work.lookahead` are cut off."""
        return [Proposal()] * len(works)

    def settle(self, works: Seq[Work]) -> bool:
        """Called right before the verification of these works (prefill chunks included) is launched.

        Drafts in the SequenceState may still be changed here, after waiting for the device if need be. What `prepare`
        needs of the state must be copied here, because the verification changes it. Returns whether `prepare` computes
        in one part of the target's GPU, so that the verification is to compute in the other.
        """
        return False

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        """Called while the target verifies these works: prepare drafts for likely outcomes. Must not wait for it.

        `interrupted()` is polled; True: return early with what is prepared so far.
        """

    def serve(self, ended: Clock) -> None:
        """Called when the host has nothing to do until a round has ended: receive what other processes have sent.

        Returns at the latest then; the host waits for the rest of the time.
        """

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        """What a round decided, before it is committed and after the next round was launched.

        With no works: a round was launched and all earlier ones are committed.
        """

    def catch_up(self, works: Seq[Work]) -> bool:
        """Reads what was decided in rounds that it was not asked for, a chunk of it at most.

        Called during such rounds, with their works, and before its next proposal. False: there is more to read.
        """
        return True

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        """What a committed round decided (None for a prefill chunk), and how long it took."""

    def prepared(self, sequence: Sequence) -> Prepared:
        """The drafts that were prepared for a sequence; on a GPU this waits for them."""
        return {}

    def prepared_confidence(self, sequence: Sequence) -> Confidence:
        """How sure the draft model was of the drafts of `prepared`, where it says so."""
        return {}

    def pin_hits(self, rate: float) -> None:
        """Draws from now on whether what was prepared has the outcome, with this probability; for measurements."""

    def forget(self, sequence: Sequence) -> None:
        """Drops all state of a sequence, which no round in flight uses: it has finished or was preempted."""

    def close(self) -> None:
        """Releases what the drafter holds (such as its process)."""
