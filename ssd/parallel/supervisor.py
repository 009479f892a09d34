"""Keeps a child process, or a connection to a server: notices that it is lost, and starts another one after a pause."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ssd.parallel.transport import MOST_REASON_WORDS, READY, REFUSED, Channel, Message, WireError, reason_of

log = logging.getLogger("ssd")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds before a lost process is replaced; doubles with every loss
HEALTHY = 60.0  # seconds of service after which the pause is short again


class Peer(Protocol):
    """A child process, or a server, and the channel to it."""

    channel: Channel

    @property
    def pid(self) -> int: ...
    @property
    def exited(self) -> bool:
        """Whether what it computes on is free again."""

    def kill(self) -> None:
        """Ends it, or the connection to it, without waiting."""

    def close(self) -> None: ...


@dataclass
class _Due:
    """The message that is due from the process."""

    kind: int
    round: int
    moved: int  # bytes transferred so far, at the last check
    since: float  # time of the last transfer


class Supervisor:
    """Keeps one process running; `start` launches it, at first and after every loss. `name`: for the log. Where `start`
    returns None, it is called again until there is one: a connection takes time.

    `on_demand`: it is launched by the first call of `running`, not now.

    `send` and `receive` raise WireError or OSError if the channel fails, if an invalid message comes, or if the message
    that is due is not transferred for `hang_limit` seconds (`start_limit` before the process is ready). The caller then
    calls `lose`.
    """

    def __init__(
        self,
        name: str,
        start: Callable[[], Peer | None],
        *,
        clock: Callable[[], float],
        hang_limit: float,
        start_limit: float,
        on_demand: bool = False,
    ) -> None:
        self.hang_limit = hang_limit
        self.start_limit = start_limit
        self.failures = 0
        self.restarts = 0
        self._name, self._start, self._clock = name, start, clock
        self._worker: Peer | None = None
        self._lost: Peer | None = None  # killed, may not have exited yet
        self._due: _Due | None = None
        self._ready_since: float | None = None
        self._restart_at = 0.0
        self._pause = SHORTEST_PAUSE
        self._closed = False
        if not on_demand:
            self._launch()

    @property
    def pid(self) -> int | None:
        """Process id, while there is a process."""
        return self._worker.pid if self._worker is not None else None

    @property
    def channel(self) -> Channel:
        """The channel to the process, while there is one."""
        if self._worker is None:
            raise AssertionError("there is no process")
        return self._worker.channel

    @property
    def ready(self) -> bool:
        """Whether the process has answered READY."""
        return self._ready_since is not None

    @property
    def due(self) -> int | None:
        """Kind of the message that is due."""
        return self._due.kind if self._due is not None else None

    def running(self) -> bool:
        """Whether there is a process. If not it is launched here, a lost one once its pause is over; False even so."""
        if self._worker is not None:
            return True
        exited = self._lost is None or self._lost.exited  # which frees its memory and device
        if exited and not self._closed and self._clock() >= self._restart_at:
            self._lost = None
            self._launch()
        return False

    def send(self, message: Message, due: int) -> None:
        """Sends a message; `due`: the kind of the answer to it, with the same round."""
        self.channel.post(message)
        self._expect(due, message.round)

    def receive(self, limit: int, timeout: float, other: int | None = None) -> Message | None:
        """The message that is due, or one of the kind `other`; None if neither comes in time."""
        message, due = self.channel.receive(max(limit, MOST_REASON_WORDS), timeout), self._due
        if message is None:
            self._check_silence()
        elif message.kind == REFUSED:
            raise WireError(reason_of(message))
        elif len(message.payload) > limit:
            raise WireError(f"a payload of {len(message.payload)} words, where {limit} are possible")
        elif due is not None and (message.kind, message.round) == (due.kind, due.round):
            self._due = None
            if message.kind == READY:
                self._ready_since = self._clock()
                log.info("%s %s is ready", self._name, self.pid)
        elif message.kind != other:
            wanted = f", not {due.kind} of round {due.round}" if due is not None else ""
            raise WireError(f"it sent a message of kind {message.kind} of round {message.round}{wanted}")
        return message

    def lose(self, reason: str) -> None:
        """Kills the process and schedules a new one."""
        now = self._clock()
        if self._ready_since is not None and now - self._ready_since >= HEALTHY:
            self._pause = SHORTEST_PAUSE
        self.failures += 1
        log.warning("%s was lost (%s): the next one starts in %.1f s", self._name, reason, self._pause)
        if self._worker is not None:
            self._worker.kill()
        self._lost, self._worker = self._worker, None
        self._due = self._ready_since = None
        self._restart_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)

    def close(self) -> None:
        """Stops the process for good."""
        self._closed = True
        for worker in (self._worker, self._lost):
            if worker is not None:
                worker.close()
        self._worker = self._lost = None

    def _expect(self, kind: int, round_: int) -> None:
        self._due = _Due(kind, round_, self.channel.num_bytes, self._clock())

    def _check_silence(self) -> None:
        due, now, moved = self._due, self._clock(), self.channel.num_bytes
        if due is not None and moved != due.moved:
            due.moved, due.since = moved, now
        elif due is not None and now - due.since > (self.start_limit if due.kind == READY else self.hang_limit):
            raise WireError(f"it has been silent for {now - due.since:.1f} s")

    def _launch(self) -> None:
        again = self.failures > 0
        try:
            self._worker = self._start()
        except (WireError, OSError) as error:
            self.restarts += again
            self.lose(str(error))
            return
        if self._worker is None:
            return
        self.restarts += again
        log.info("%s %s was started", self._name, self.pid)
        self._expect(READY, 0)
