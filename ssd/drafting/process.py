"""A drafter in a process of its own, the worker, which prepares drafts while the target verifies.

The worker sends all drafts it has prepared before the next round. If they cover the outcomes of all sequences, the
next round uses them without waiting for a reply. A worker that is slow, hangs, crashes or sends invalid messages costs
speed, never a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from ssd.core import Origin, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter, Prepared
from ssd.drafting.estimate import Average
from ssd.drafting.supervisor import Supervisor, Worker
from ssd.drafting.wire import (
    Entry,
    Kind,
    Message,
    SequenceSetup,
    WireError,
    Words,
    decode_prepared,
    decode_proposals,
    encode_round,
    most_prepared_words,
    most_proposal_words,
)

LEAST_PATIENCE, MOST_PATIENCE = 0.05, 1.0  # seconds
_PATIENCE_PER_REPLY = 8  # times the mean reply


class ProcessDrafter(Drafter):
    """Drafts in a worker that `start` launches, and that is launched again whenever it is lost.

    A round waits for proposals at most 8 times as long as for the average reply (at first `patience` seconds), and not
    at all while an earlier reply is overdue.
    """

    needs_tokens = True

    def __init__(
        self,
        start: Callable[[], Worker],
        lookahead: int,
        vocab_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        patience: float = 0.25,
        hang_limit: float = 5.0,
        start_limit: float = 600.0,
        ended: Callable[[], None] = lambda: None,
    ) -> None:
        super().__init__()
        self.lookahead = lookahead
        self.vocab_size = vocab_size
        self.replies = 0  # rounds whose reply came in time
        self.at_hand = 0  # rounds that needed no reply
        self.late = 0  # rounds that went on without a reply
        self.wait_seconds = 0.0  # total wait for replies
        self._clock = clock
        self._reply = Average(7 / 8, patience / _PATIENCE_PER_REPLY, 1.0)  # seconds
        self._round = 0
        self._round_seconds = 0.0  # of the last round
        self._last_prepared = 0  # the round of the last PREPARED message
        self._known: dict[int, int] = {}  # by sequence id: number of tokens that the worker has
        self._decided: dict[int, tuple[int, int] | None] = {}  # outcome of its last proposal; None: several rounds
        self._prepared: dict[int, Prepared] = {}  # by sequence id
        self._forgotten: list[int] = []  # sequences that the worker has to drop
        self.supervisor = Supervisor(
            start,
            on_prepared=self._keep,
            on_loss=self._forget_all,
            on_close=ended,
            clock=clock,
            hang_limit=hang_limit,
            start_limit=start_limit,
        )

    @property
    def patience(self) -> float:
        """Maximum wait of a round, in seconds."""
        return float(min(MOST_PATIENCE, max(LEAST_PATIENCE, _PATIENCE_PER_REPLY * self._reply.value)))

    def wait_ready(self, timeout: float) -> bool:
        """Waits until the worker can take rounds; False on timeout or if it is lost."""
        with self.supervisor.losing_on_error():
            return self.supervisor.settled(timeout)
        return False

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """Empty proposals while the worker is starting or still owes a reply, and if it does not reply in time."""
        nothing = [Proposal()] * len(works)
        if not any(work.lookahead for work in works):
            return nothing
        with self.supervisor.losing_on_error():
            if self.supervisor.settled():
                return self._look_up(works) or self._ask(works) or nothing
            self.late += self.supervisor.ready
        return nothing

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self._round_seconds = seconds
        for work, outcome in zip(works, outcomes, strict=True):
            sequence_id = work.sequence.id
            if outcome is not None and sequence_id in self._known:
                again = sequence_id in self._decided
                self._decided[sequence_id] = None if again else (outcome.num_accepted, outcome.token_ids[-1])
        self.stats.failures = self.supervisor.failures
        self.stats.busy_seconds = self.supervisor.busy_seconds

    def forget(self, sequence: Sequence) -> None:
        if self._known.pop(sequence.id, None) is not None:
            self._forgotten.append(sequence.id)
        self._decided.pop(sequence.id, None)
        self._prepared.pop(sequence.id, None)

    def close(self) -> None:
        self.supervisor.close()

    def _look_up(self, works: Seq[Work]) -> list[Proposal] | None:
        """The prepared drafts, if every work has one; the worker is informed. None: it has to be asked."""
        proposals = []
        for work in works:
            decided = self._decided.get(work.sequence.id)
            draft = self._prepared.get(work.sequence.id, {}).get(decided) if decided is not None else None
            if draft is None or work.lookahead == 0:
                return None
            proposals.append(Proposal(draft[: work.lookahead], None, Origin.HIT))
        self._send_round(works)
        self.at_hand += 1
        return proposals

    def _ask(self, works: Seq[Work]) -> list[Proposal] | None:
        """The worker's proposals; None if they are late, which counts as a reply after `patience` seconds."""
        began = self._clock()
        self._send_round(works)
        message = self.supervisor.receive(self.patience)
        waited = self._clock() - began
        self.wait_seconds += waited
        self._reply.add(min(waited, MOST_PATIENCE))
        if message is None:
            self.late += 1
            return None
        self.replies += 1
        self.stats.hand_over_seconds += max(0.0, waited - message.times[1] / 1e9)
        return decode_proposals(message.payload, len(works), self.vocab_size)

    def _send_round(self, works: Seq[Work]) -> None:
        """Sends a round; a reply to it is due."""
        self._round += 1
        self._prepared = {}
        proposals = most_proposal_words(len(works), self.lookahead, self.vocab_size)
        self.supervisor.limit = max(proposals, most_prepared_words(len(works), self.lookahead))
        times = int(self._round_seconds * 1e9), 0
        self.supervisor.post(Message(Kind.ROUND, self._round, self._round_payload(works), times))

    def _round_payload(self, works: Seq[Work]) -> Words:
        """The round's payload: what the worker does not know yet of the sequences."""
        entries = []
        for work in works:
            sequence = work.sequence
            known = self._known.get(sequence.id, 0)
            decided = self._decided.pop(sequence.id, None)
            setup = None if known else SequenceSetup.of(sequence)
            accepted = decided[0] if decided is not None else -1
            entries.append(Entry(sequence.id, known, sequence.tokens[known:], work.lookahead, accepted, setup))
            self._known[sequence.id] = len(sequence.tokens)
        forgotten, self._forgotten = self._forgotten, []
        return encode_round(forgotten, entries)

    def _keep(self, message: Message) -> None:
        """Takes a PREPARED message: at most one per round, kept if it is for the current one."""
        if not self._round - 1 <= message.round <= self._round:
            raise WireError(f"it sent {message.kind.name} {message.round} without being asked")
        if message.round <= self._last_prepared:
            raise WireError(f"it sent PREPARED {message.round} twice")
        self._last_prepared = message.round
        prepared = decode_prepared(message.payload, self.vocab_size)
        if message.round == self._round:
            self._prepared = prepared

    def _forget_all(self) -> None:
        """Called when the worker is lost: its successor has no sequences."""
        self._known.clear()
        self._decided.clear()
        self._prepared.clear()
        self._forgotten.clear()
