"""The process that a drafter runs in, as the engine sees it: started, watched, given up and started again.

Whatever happens to the process (it is slow, hangs, dies or lies), nothing here raises: the caller is told that there is
no answer, and a lost process is replaced after a pause.
"""

from __future__ import annotations

import logging
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ssd.drafting.wire import Channel, Kind, Message, WireError, encode_setup

log = logging.getLogger("ssd")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds before a lost worker is replaced
HEALTHY = 60.0  # seconds after which an earlier loss no longer counts
GRACE = 1.0  # seconds that a worker has to end by itself
_DRAIN = 0.005  # seconds a round gives to the rest of a late reply that has begun to arrive


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


class Supervisor:
    """Keeps a worker that `start` launches, and launches it again whenever it is lost.

    A worker that owes a message and is silent for `hang_limit` seconds (`start_limit` before it is ready) is lost, and
    so is one that says anything wrong. `on_prepared` takes messages that come unasked, `on_loss` is called after a
    loss, `on_close` after the end.
    """

    def __init__(
        self,
        start: Callable[[], Worker],
        *,
        on_prepared: Callable[[Message], None],
        on_loss: Callable[[], None],
        on_close: Callable[[], None],
        clock: Callable[[], float],
        hang_limit: float,
        start_limit: float,
    ) -> None:
        self.hang_limit = hang_limit
        self.start_limit = start_limit
        self.failures = 0
        self.restarts = 0
        self.limit = 0  # words of a message that the worker may send
        self.busy_seconds = 0.0  # that all workers together say they computed
        self._busy_before = 0.0  # of those that are lost
        self._start, self._clock = start, clock
        self._on_prepared, self._on_loss, self._on_close = on_prepared, on_loss, on_close
        self._worker: Worker | None = None
        self._awaited: _Awaited | None = None
        self._ready_since: float | None = None
        self._lost: Worker | None = None  # killed, perhaps not yet gone
        self._restart_at = 0.0
        self._pause = SHORTEST_PAUSE
        self._closed = False
        self._launch()

    @property
    def pid(self) -> int | None:
        """The worker's process, while there is one."""
        return self._worker.pid if self._worker is not None else None

    @property
    def ready(self) -> bool:
        """Whether there is a worker that has been ready for rounds."""
        return self._ready_since is not None

    @contextmanager
    def losing_on_error(self) -> Iterator[None]:
        """Gives the worker up when something is wrong with what it says, or with the way to it."""
        try:
            yield
        except (WireError, OSError) as error:
            self._lose(str(error))

    def settled(self, timeout: float = 0.0) -> bool:
        """Whether there is a worker that owes nothing; what it still owed is waited for, and dropped.

        A lost worker is replaced here when it is time for that. Raises WireError or OSError.
        """
        if self._closed:
            return False
        if self._worker is None:
            self._relaunch_when_due()
            return False
        channel = self._worker.channel
        if self._awaited is not None:
            drain = _DRAIN if channel.arriving else 0.0
            if self.receive(max(timeout, drain)) is None:
                return False
        while channel.waiting() and (message := channel.receive(self.limit, 0.0)) is not None:
            self._take_unasked(message)
        return True

    def post(self, message: Message) -> None:
        """Sends a round, for which proposals are then due."""
        channel = self._channel()
        channel.post(message)
        self._awaited = _Awaited(Kind.PROPOSALS, message.round, channel.num_bytes, self._clock())

    def receive(self, timeout: float) -> Message | None:
        """What the worker owes, if it comes in time. What it had prepared for an earlier round may come first."""
        channel, awaited = self._channel(), self._awaited
        if awaited is None:
            raise AssertionError("the worker owes nothing")
        message = channel.receive(self.limit, timeout)
        if message is not None and message.kind is Kind.PREPARED:
            self._take_unasked(message)
            message = channel.receive(self.limit, timeout)
        if message is None:
            self._check_silence(channel, awaited)
            return None
        if (message.kind, message.round) != (awaited.kind, awaited.round):
            raise WireError(f"it sent {message.kind.name} {message.round}, not {awaited.kind.name} {awaited.round}")
        if message.kind is Kind.READY:
            self._ready_since = self._clock()
        self.busy_seconds = self._busy_before + message.times[0] / 1e9
        self._awaited = None
        return message

    def close(self) -> None:
        """Ends the worker."""
        self._closed = True
        for worker in (self._worker, self._lost):
            if worker is not None:
                worker.close()
        self._worker = self._lost = None
        self._on_close()

    def _channel(self) -> Channel:
        if self._worker is None:
            raise AssertionError("there is no worker")
        return self._worker.channel

    def _take_unasked(self, message: Message) -> None:
        if message.kind is not Kind.PREPARED:
            raise WireError(f"it sent {message.kind.name} {message.round} without being asked")
        self._on_prepared(message)

    def _check_silence(self, channel: Channel, awaited: _Awaited) -> None:
        now = self._clock()
        if channel.num_bytes != awaited.moved:
            awaited.moved, awaited.since = channel.num_bytes, now
        elif now - awaited.since > (self.start_limit if awaited.kind is Kind.READY else self.hang_limit):
            raise WireError(f"it has been silent for {now - awaited.since:.1f} s")

    def _launch(self) -> None:
        with self.losing_on_error():
            self._worker = self._start()
            self.limit = 0
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
        self._restart_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._busy_before = self.busy_seconds
        self._on_loss()
