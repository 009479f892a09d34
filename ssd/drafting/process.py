"""A drafter in a process of its own: it works while the target verifies.

Whatever happens to the process (it is slow, hangs, dies or lies), a round goes on without it: that costs speed, never a
request. What its tokens are worth is the target's to decide, as with every drafter.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from ssd.core import Proposal, Request, Sequence, Work
from ssd.decoding.drafter import Drafter, Outcomes
from ssd.drafting.wire import (
    Birth,
    Channel,
    ChannelClosed,
    Entry,
    Kind,
    Message,
    WireError,
    Words,
    decode_prepared,
    decode_proposals,
    decode_round,
    decode_setup,
    encode_prepared,
    encode_proposals,
    encode_round,
    encode_setup,
    most_prepared_words,
    most_proposal_words,
)

log = logging.getLogger("ssd")

LEAST_PATIENCE, MOST_PATIENCE = 0.05, 1.0  # seconds
SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # before a lost worker is replaced
HEALTHY = 60.0  # seconds after which an earlier loss no longer counts
GRACE = 1.0  # seconds that a worker has to end by itself
_PATIENCE_PER_REPLY = 8  # times the mean reply
_DRAIN = 0.005  # seconds a round gives to the rest of a late reply that has begun to arrive


# --- the worker's side ------------------------------------------------------------------------------------------------


@runtime_checkable
class Interruptible(Protocol):
    """A drafter that asks, while it anticipates, whether it should rather stop."""

    interrupted: Callable[[], bool]


def run(fd: int, build: Callable[[dict[str, Any]], Drafter]) -> None:
    """A worker's life: reads its setup from the socket `fd`, builds its drafter and serves until the other end goes."""
    channel = Channel(socket.socket(fileno=fd))
    with suppress(ChannelClosed):
        drafter = build(decode_setup(_receive(channel, Kind.SETUP).payload))
        _send(channel, Message(Kind.READY))
        serve(drafter, channel)


def serve(drafter: Drafter, channel: Channel) -> None:
    """Answers rounds until the other end goes; between them the drafter anticipates."""
    if isinstance(drafter, Interruptible):
        drafter.interrupted = channel.waiting
    sequences: dict[int, Sequence] = {}
    with suppress(ChannelClosed):
        while True:
            _serve_round(drafter, channel, sequences)


def _serve_round(drafter: Drafter, channel: Channel, sequences: dict[int, Sequence]) -> None:
    message = _receive(channel, Kind.ROUND)
    forgotten, entries = decode_round(message.payload)
    for sequence_id in forgotten:
        if sequence_id in sequences:
            drafter.forget(sequences.pop(sequence_id))
    works = [_work(entry, sequences) for entry in entries]
    drafter.round_seconds = message.times[0] / 1e9
    began = time.perf_counter_ns()
    proposals = drafter.propose(works)
    payload = encode_proposals(proposals)
    times = int(drafter.busy_seconds * 1e9), time.perf_counter_ns() - began
    _send(channel, Message(Kind.PROPOSALS, message.round, payload, times))
    drafter.anticipate([work.with_proposal(p) for work, p in zip(works, proposals, strict=True)])
    if channel.waiting():  # it is too late for that
        return
    prepared = {work.sequence.id: outcomes for work in works if (outcomes := drafter.outcomes(work.sequence))}
    if prepared:
        _send(channel, Message(Kind.PREPARED, message.round, encode_prepared(prepared)))


def _work(entry: Entry, sequences: dict[int, Sequence]) -> Work:
    """Brings a sequence up to date. As in the engine, all but the last token has been read once there is output."""
    if entry.birth is not None:
        sequences[entry.id] = _sequence(entry.id, entry.birth, entry.new_tokens)
    sequence = sequences.get(entry.id)
    if sequence is None or len(sequence.tokens) != entry.known:
        raise WireError(f"sequence {entry.id}: {entry.known} tokens should be known of it")
    sequence.tokens += entry.new_tokens
    sequence.num_computed = len(sequence.tokens) - 1 if sequence.num_output else 0
    return Work(sequence, sequence.num_pending, entry.lookahead)


def _sequence(sequence_id: int, birth: Birth, tokens: Seq[int]) -> Sequence:
    """A new sequence, still without its tokens."""
    request = Request(str(sequence_id), tuple(tokens[: birth.num_prompt]), birth.params)
    return Sequence(sequence_id, request, 0, birth.seed, birth.stop_token_ids, birth.max_tokens)


def _receive(channel: Channel, kind: Kind) -> Message:
    message = channel.receive()
    if message is None or message.kind != kind:
        raise WireError(f"a message of kind {kind.name} was due")
    return message


def _send(channel: Channel, message: Message) -> None:
    channel.post(message)
    channel.flush()


# --- the engine's side ------------------------------------------------------------------------------------------------


class Worker:
    """A process that drafts, and the channel to it. It ends with this object, however that goes.

    `argv` is given the number of its socket as a last argument, and `setup` as its first message.
    """

    def __init__(
        self,
        setup: Mapping[str, Any],
        argv: Seq[str] = (sys.executable, "-m", "ssd.worker"),
        environment: Mapping[str, str] | None = None,
    ) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            try:
                self._process = subprocess.Popen(
                    [*argv, str(theirs.fileno())],
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    start_new_session=True,  # Ctrl-C is for the engine
                )
            except OSError:
                ours.close()
                raise
        self._end = weakref.finalize(self, _end, self._process, self.channel)
        self.channel.post(Message(Kind.SETUP, payload=encode_setup(setup)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def gone(self) -> bool:
        """Whether the process has ended (and reaps it if so)."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """At once, and without waiting for it."""
        self.channel.close()
        self._process.kill()

    def close(self) -> None:
        """Lets it end by itself if it does so soon."""
        self._end()


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    channel.close()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


@dataclass
class _Awaited:
    """The message that a worker owes."""

    kind: Kind
    round: int
    moved: int  # bytes that had crossed when there was last a sign of life
    since: float  # when that was


class ProcessDrafter(Drafter):
    """Drafts in a worker that `start` launches, and launches again whenever it is lost.

    The worker sends all that it has prepared ahead of the next round. If every outcome of that round is among it, the
    drafts are at hand, and the worker is told without being waited for.

    A round waits for its proposals for a few times the usual reply at most (at first `patience` seconds), and while a
    reply is overdue not at all. A worker that is silent for `hang_limit` seconds (`start_limit` before it is ready) is
    lost, and so is one that says anything wrong. None of this raises.
    """

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
        self.lookahead = lookahead
        self.vocab_size = vocab_size
        self.hang_limit = hang_limit
        self.start_limit = start_limit
        self.failures = 0
        self.restarts = 0
        self.replies = 0  # in time
        self.at_hand = 0  # rounds that needed none
        self.late = 0  # rounds that went on without a reply
        self.wait_seconds = 0.0  # that rounds waited for replies
        self.hand_over_seconds = 0.0
        self._busy_seconds = 0.0  # of workers before this one
        self._worker_seconds = 0.0  # that this worker says it computed
        self._start = start
        self._clock = clock
        self._mean_reply = patience / _PATIENCE_PER_REPLY
        self._worker: Worker | None = None
        self._awaited: _Awaited | None = None
        self._ready_since: float | None = None
        self._lost: Worker | None = None  # killed, perhaps not yet gone
        self._restart_at = 0.0
        self._pause = SHORTEST_PAUSE
        self._round = 0
        self._last_prepared = 0  # the round for which that was last received
        self._limit = 0  # words of a message that it may send
        self._known: dict[int, int] = {}  # by sequence id: tokens that the worker has
        self._drafts: dict[int, tuple[int, ...]] = {}  # by sequence id: what was proposed in the last round
        self._prepared: dict[int, Outcomes] = {}  # by sequence id: for the outcomes of that
        self._forgotten: list[int] = []  # what it knows and should no longer
        self._closed = False
        self._ended = ended  # called after the worker's end
        self._launch()

    @property
    def patience(self) -> float:
        """Seconds that a round waits at most."""
        return min(MOST_PATIENCE, max(LEAST_PATIENCE, _PATIENCE_PER_REPLY * self._mean_reply))

    @property
    def busy_seconds(self) -> float:  # type: ignore[override]
        return self._busy_seconds + self._worker_seconds

    @property
    def pid(self) -> int | None:
        """The worker's process, while there is one."""
        return self._worker.pid if self._worker is not None else None

    def wait_ready(self, timeout: float) -> bool:
        """Waits until the worker can take rounds; False when it cannot by then, or is lost."""
        if self._worker is None:
            return False
        try:
            return self._settled(self._worker, timeout)
        except (WireError, OSError) as error:
            self._lose(str(error))
            return False

    # --- the seam -----------------------------------------------------------------------------------------------------

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """Nothing while the worker is not there or not done, and nothing when it does not answer soon."""
        nothing = [Proposal()] * len(works)
        if self._closed or not any(work.lookahead for work in works):
            return nothing
        if self._worker is None:
            self._relaunch_when_due()
            return nothing
        try:
            if self._settled(self._worker):
                proposals = self._look_up(self._worker, works) or self._ask(self._worker, works) or nothing
                self._drafts = {w.sequence.id: p.token_ids for w, p in zip(works, proposals, strict=True)}
                return proposals
            self.late += self._ready_since is not None
        except (WireError, OSError) as error:
            self._lose(str(error))
        return nothing

    def forget(self, sequence: Sequence) -> None:
        if self._known.pop(sequence.id, None) is not None:
            self._forgotten.append(sequence.id)
        self._prepared.pop(sequence.id, None)

    def close(self) -> None:
        """Ends the worker."""
        self._closed = True
        for worker in (self._worker, self._lost):
            if worker is not None:
                worker.close()
        self._worker = self._lost = None
        self._ended()

    # --- rounds -------------------------------------------------------------------------------------------------------

    def _look_up(self, worker: Worker, works: Seq[Work]) -> list[Proposal] | None:
        """What was prepared for all of these, of which the worker is told; None: it has to be asked."""
        found = [self._prepared_for(work) for work in works]
        proposals = [
            Proposal(work.usable(draft), None, "hit") for work, draft in zip(works, found, strict=True) if draft
        ]
        if len(proposals) < len(works):
            return None
        self._tell(worker, works)
        self.at_hand += 1
        return proposals

    def _prepared_for(self, work: Work) -> tuple[int, ...] | None:
        sequence = work.sequence
        new, draft = sequence.tokens[self._known.get(sequence.id, 0) :], self._drafts.get(sequence.id)
        if draft is None or not new or work.lookahead == 0 or tuple(new[:-1]) != draft[: len(new) - 1]:
            return None
        return self._prepared.get(sequence.id, {}).get((len(new) - 1, new[-1]))

    def _tell(self, worker: Worker, works: Seq[Work]) -> _Awaited:
        """What is new; a reply is due for that."""
        self._round += 1
        self._prepared = {}
        last = int(self.round_seconds * 1e9), 0
        worker.channel.post(Message(Kind.ROUND, self._round, self._news(works), last))
        proposals = most_proposal_words(len(works), self.lookahead, self.vocab_size)
        self._limit = max(proposals, most_prepared_words(len(works), self.lookahead))
        self._awaited = _Awaited(Kind.PROPOSALS, self._round, worker.channel.num_bytes, self._clock())
        return self._awaited

    def _ask(self, worker: Worker, works: Seq[Work]) -> list[Proposal] | None:
        """The worker's proposals; None when they are late. A late reply counts as one that took all the patience."""
        began = self._clock()
        message = self._receive(worker, self._tell(worker, works), self.patience)
        waited = self._clock() - began
        self.wait_seconds += waited
        self._mean_reply += (min(waited, MOST_PATIENCE) - self._mean_reply) / 8
        if message is None:
            self.late += 1
            return None
        self.replies += 1
        self.hand_over_seconds += max(0.0, waited - message.times[1] / 1e9)
        return decode_proposals(message.payload, len(works), self.vocab_size)

    def _news(self, works: Seq[Work]) -> Words:
        """All that the worker does not know yet, which it then does."""
        entries = []
        for work in works:
            sequence = work.sequence
            known = self._known.get(sequence.id, 0)
            birth = None if known else Birth.of(sequence)
            entries.append(Entry(sequence.id, known, sequence.tokens[known:], work.lookahead, birth))
            self._known[sequence.id] = len(sequence.tokens)
        forgotten, self._forgotten = self._forgotten, []
        return encode_round(forgotten, entries)

    def _settled(self, worker: Worker, timeout: float = 0.0) -> bool:
        """Whether the worker owes nothing. A reply that is not needed any more is taken in, and dropped."""
        if self._awaited is not None:
            drain = _DRAIN if worker.channel.arriving else 0.0
            if self._receive(worker, self._awaited, max(timeout, drain)) is None:
                return False
        while worker.channel.waiting() and (message := worker.channel.receive(self._limit, 0.0)) is not None:
            self._keep(message)
        return True

    def _receive(self, worker: Worker, awaited: _Awaited, timeout: float) -> Message | None:
        """What the worker owes, if it comes in time. What it had prepared for an earlier round may come first."""
        message = worker.channel.receive(self._limit, timeout)
        if message is not None and message.kind is Kind.PREPARED:
            self._keep(message)
            message = worker.channel.receive(self._limit, timeout)
        if message is None:
            self._check_silence(worker, awaited)
            return None
        if (message.kind, message.round) != (awaited.kind, awaited.round):
            raise WireError(f"it sent {message.kind.name} {message.round}, not {awaited.kind.name} {awaited.round}")
        if message.kind is Kind.READY:
            self._ready_since = self._clock()
        self._worker_seconds = message.times[0] / 1e9
        self._awaited = None
        return message

    def _keep(self, message: Message) -> None:
        """What was prepared, if it is for the round under way. It is said once."""
        if message.kind is not Kind.PREPARED or not self._round - 1 <= message.round <= self._round:
            raise WireError(f"it sent {message.kind.name} {message.round} without being asked")
        if message.round <= self._last_prepared:
            raise WireError(f"it sent PREPARED {message.round} twice")
        self._last_prepared = message.round
        prepared = decode_prepared(message.payload, self.vocab_size)
        if message.round == self._round:
            self._prepared = prepared

    def _check_silence(self, worker: Worker, awaited: _Awaited) -> None:
        now = self._clock()
        if worker.channel.num_bytes != awaited.moved:
            awaited.moved, awaited.since = worker.channel.num_bytes, now
        elif now - awaited.since > (self.start_limit if awaited.kind is Kind.READY else self.hang_limit):
            raise WireError(f"it has been silent for {now - awaited.since:.1f} s")

    # --- losing and replacing -----------------------------------------------------------------------------------------

    def _launch(self) -> None:
        try:
            self._worker = self._start()
        except (WireError, OSError) as error:
            self._lose(str(error))
        else:
            self._limit = 0
            self._awaited = _Awaited(Kind.READY, 0, self._worker.channel.num_bytes, self._clock())

    def _relaunch_when_due(self) -> None:
        """Not before the lost one has gone, and given back what it held."""
        if self._clock() >= self._restart_at and (self._lost is None or self._lost.gone):
            self._lost = None
            self.restarts += 1
            self._launch()

    def _lose(self, reason: str) -> None:
        """Gives a worker up. The next one knows nothing."""
        now = self._clock()
        if self._ready_since is not None and now - self._ready_since >= HEALTHY:
            self._pause = SHORTEST_PAUSE
        self.failures += 1
        log.warning("a drafter's process was lost (%s): the next one starts in %.1f s", reason, self._pause)
        if self._worker is not None:
            self._worker.kill()
        self._lost, self._worker = self._worker, None
        self._awaited = self._ready_since = None
        self._busy_seconds, self._worker_seconds = self.busy_seconds, 0.0
        self._restart_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._known.clear()
        self._drafts.clear()
        self._prepared.clear()
        self._forgotten.clear()
