"""The engine's side of one replica of a drafter in another process: the tokens it has, the drafts it has prepared.

A process that is slow, hangs, crashes or sends invalid messages raises nothing here; it has no drafts then.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from types import MappingProxyType

from ssd.core import Proposal, Sequence, Work
from ssd.drafting.wire import (
    Draft,
    Entry,
    Kind,
    PreparedDrafts,
    decode_prepared,
    decode_proposals,
    encode_round,
    max_reply_words,
)
from ssd.parallel.supervisor import Supervisor
from ssd.parallel.transport import Message, WireError


class DraftReplica:
    """A worker, which `supervisor` launches, and launches again whenever it is lost."""

    def __init__(self, supervisor: Supervisor, lookahead: int, vocab_size: int) -> None:
        self.supervisor = supervisor
        self.lookahead = lookahead
        self.vocab_size = vocab_size
        self.busy_seconds = 0.0  # computing time that the workers reported, in all
        self._busy_before = 0.0  # its part up to the last loss
        self._round = self._answered = 0  # the last round sent, and the last one that anything came back for
        self._last_prepared = 0  # the round of the last PREPARED message
        self._num_asked = 0  # proposals that the last round asks for
        self._limit = 0  # maximum payload of a message from the worker, in words
        self._known: dict[int, int] = {}  # by sequence id: number of tokens that the worker has
        self._prepared: dict[int, PreparedDrafts] = {}  # by sequence id
        self._forgotten: list[int] = []  # sequences that the worker has to drop

    def available(self, timeout: float = 0.0) -> bool:
        """Whether it can take a round: no proposals are due, and it has begun the last one. Late proposals are dropped.

        A worker may be a round behind, where the drafts of other replicas made its own unnecessary.
        """
        supervisor = self.supervisor
        with self._losing_on_error():
            if not supervisor.running():
                return False
            if supervisor.due not in (None, Kind.PREPARED) and self._receive(timeout) is None:
                return False
            self._receive(0.0)
            return self._round - self._answered <= 1
        return False

    @property
    def idle(self) -> bool:
        """Whether something came back for the last round."""
        return self._answered == self._round

    def num_unknown(self, sequence: Sequence) -> int:
        """Tokens of a sequence that the worker does not have."""
        return len(sequence.tokens) - self._known.get(sequence.id, 0)

    def find(self, sequence: Sequence) -> Draft | None:
        """The draft that was prepared for what has been decided since the last round."""
        prepared, known = self._prepared.get(sequence.id), self._known.get(sequence.id)
        return prepared.find(tuple(sequence.tokens[known:])) if prepared is not None and known is not None else None

    def send(
        self,
        works: Seq[Work],
        drafts: Seq[Draft | None],
        seconds: float,
        *,
        budget: int,
        reply: bool,
        ahead: bool,
        decided: Mapping[int, Seq[int]] = MappingProxyType({}),
    ) -> None:
        """Sends a round: the drafts that it verifies (None: to be written), and how long the last one took.

        `budget`: branches per sequence that are to be prepared. `reply`: what is written will be sent, for `receive`.
        `ahead`: so will what is prepared, for `find`; else the worker keeps it and is asked in the next round.
        `decided`: tokens that are not committed yet, by sequence id.
        """
        self._round += 1
        self._prepared = {}
        self._num_asked = sum(draft is None for draft in drafts) if reply else 0
        limit = max_reply_words(len(works), self.lookahead, self.vocab_size)
        self._limit = max(self._limit, limit)  # a reply to a larger round may be to come
        forgotten, self._forgotten = self._forgotten, []
        entries = [
            self._entry(work, draft, decided.get(work.sequence.id, ()))
            for work, draft in zip(works, drafts, strict=True)
        ]
        payload = encode_round(forgotten, entries, budget=budget, reply=reply, ahead=ahead)
        due = Kind.PROPOSALS if self._num_asked else Kind.PREPARED
        with self._losing_on_error():
            self.supervisor.send(Message(Kind.ROUND, self._round, payload, (int(seconds * 1e9), 0)), due)

    def receive(self, timeout: float) -> tuple[list[Proposal], float] | None:
        """The proposals asked for, if they come in time, and how many seconds the worker took for them."""
        with self._losing_on_error():
            message = self._receive(timeout) if self.supervisor.ready else None
            if message is not None:
                return decode_proposals(message.payload, self._num_asked, self.vocab_size), message.times[1] / 1e9
        return None

    @property
    def preparing(self) -> bool:
        """Whether a PREPARED message of the current round may still come."""
        return self.supervisor.ready and self._last_prepared < self._round

    @property
    def overdue(self) -> bool:
        """Whether nothing has come back for the round before the current one."""
        return self._round - self._answered > 1

    def take_prepared(self) -> Mapping[int, PreparedDrafts]:
        """What it has prepared for the current round, by sequence id, if that has come since the last call."""
        if self.preparing:
            with self._losing_on_error():
                self._receive(0.0)
        prepared, self._prepared = self._prepared, {}
        return prepared

    def forget(self, sequence: Sequence) -> None:
        if self._known.pop(sequence.id, None) is not None:
            self._forgotten.append(sequence.id)
        self._prepared.pop(sequence.id, None)

    def close(self) -> None:
        self.supervisor.close()

    def _receive(self, timeout: float) -> Message | None:
        """READY or PROPOSALS, if they are due and come in time. PREPARED messages are kept on the way."""
        while (message := self.supervisor.receive(self._limit, timeout, Kind.PREPARED)) is not None:
            self.busy_seconds = self._busy_before + message.times[0] / 1e9
            self._answered = max(self._answered, message.round)
            if message.kind != Kind.PREPARED:
                return message
            self._keep(message)
        return None

    def _entry(self, work: Work, draft: Draft | None, decided: Seq[int]) -> Entry:
        """The tokens of a sequence that the worker does not have, and for a new sequence its parameters."""
        sequence = work.sequence
        known = self._known.get(sequence.id, 0)
        tokens = [*sequence.tokens[known:], *decided[max(0, known - len(sequence.tokens)) :]]
        self._known[sequence.id] = known + len(tokens)
        new = sequence if not known else None
        return Entry(sequence.id, known, tokens, work.lookahead, draft, new)

    def _keep(self, message: Message) -> None:
        """Takes a PREPARED message: at most one per round, kept if it is for the current one."""
        if not self._round - 2 <= message.round <= self._round:
            raise WireError(f"it sent PREPARED of round {message.round} without being asked")
        if message.round <= self._last_prepared:
            raise WireError(f"it sent PREPARED of round {message.round} twice")
        self._last_prepared = message.round
        prepared = decode_prepared(message.payload, self.vocab_size)
        if message.round == self._round:
            self._prepared = prepared

    @contextmanager
    def _losing_on_error(self) -> Iterator[None]:
        """Kills the worker on an invalid message or a failing channel. Its successor has no sequences."""
        try:
            yield
        except (WireError, OSError) as error:
            self.supervisor.lose(str(error))
            self._known.clear()
            self._prepared.clear()
            self._forgotten.clear()
            self._answered, self._limit, self._busy_before = self._round, 0, self.busy_seconds
