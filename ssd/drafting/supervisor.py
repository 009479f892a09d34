"""Starts, watches and restarts the worker, the process that a drafter runs in.

A worker that is slow, hangs, crashes or sends invalid messages raises nothing here: the caller gets no answer, and a
lost worker is replaced after a pause.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ssd.drafting.wire import Channel, Kind, Message, WireError, encode_setup
from ssd.parallel.launch import alone

log = logging.getLogger("ssd")

SHORTEST_PAUSE, LONGEST_PAUSE = 0.1, 10.0  # seconds before a lost worker is replaced
HEALTHY = 60.0  # seconds of service after which the pause is short again
GRACE = 1.0  # seconds that a worker has to exit by itself
_DRAIN = 0.005  # seconds that a round waits for the rest of a late reply

# `python -m ssd.worker`, but with this package wherever it is, and with no other module of the current directory (-P)
_START = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("ssd", {package!r})
sys.modules["ssd"] = importlib.util.module_from_spec(spec)
spec.loader.exec_module(sys.modules["ssd"])
from ssd.worker import {main}
{main}()
"""


def _command(main: str) -> tuple[str, ...]:
    package = str(Path(__file__).parents[1] / "__init__.py")
    return sys.executable, "-P", "-c", _START.format(package=package, main=main)


WORKER_COMMAND = _command("main")
FOLLOWER_COMMAND = _command("follow")  # another rank of a model


class Worker:
    """A process and the channel to it. The process ends with this object.

    `argv` gets the file descriptor of the socket as its last argument; `setup` is sent as the first message. With
    `own_group` a kill takes its own processes along that have none.
    """

    def __init__(self, setup: Mapping[str, Any], argv: Seq[str] = WORKER_COMMAND, *, own_group: bool = True) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            try:
                self._process = spawn(argv, theirs, alone(), own_group=own_group)
            except OSError:
                ours.close()
                raise
        self._end = weakref.finalize(self, _end, self._process, self.channel)
        self.channel.post(Message(Kind.SETUP, payload=encode_setup(setup)))

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def exited(self) -> bool:
        """Whether the process has ended (and reaps it if so)."""
        return self._process.poll() is not None

    def kill(self) -> None:
        """Kills the process without waiting for it."""
        self.channel.close()
        _kill(self._process)

    def close(self) -> None:
        """Closes the channel, and kills the process if it does not exit within GRACE seconds."""
        self._end()


def spawn(
    argv: Seq[str], end: socket.socket, env: Mapping[str, str] | None = None, *, own_group: bool = True
) -> subprocess.Popen[bytes]:
    """Starts a process with one end of a connection, which it gets as a file descriptor, its last argument."""
    return subprocess.Popen(
        [*argv, str(end.fileno())],
        stdin=subprocess.DEVNULL,
        pass_fds=(end.fileno(),),
        env=env,
        start_new_session=own_group,  # Ctrl-C is for the engine
    )


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    channel.close()
    end_process(process)


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process whose connection was closed, and kills it if it does not exit within GRACE seconds."""
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Also what it has started in its own group: a process that was stopped does not notice its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


@dataclass
class _Awaited:
    """The message that is due from the worker."""

    kind: Kind
    round: int
    moved: int  # bytes transferred so far, at the last check
    since: float  # time of the last transfer


class Supervisor:
    """Keeps one worker running; `start` launches it, at first and after every loss.

    A worker is lost (killed) if a due message is not transferred for `hang_limit` seconds (`start_limit` before it is
    ready), or if it sends anything invalid. Callbacks: `on_prepared` takes PREPARED messages, `on_loss` follows a loss.
    """

    def __init__(
        self,
        start: Callable[[], Worker],
        *,
        on_prepared: Callable[[Message], None],
        on_loss: Callable[[], None],
        clock: Callable[[], float],
        hang_limit: float,
        start_limit: float,
    ) -> None:
        self.hang_limit = hang_limit
        self.start_limit = start_limit
        self.failures = 0
        self.restarts = 0
        self.limit = 0  # maximum payload of a message from the worker, in words
        self.busy_seconds = 0.0  # computing time that the workers reported, in all
        self._busy_before = 0.0  # of earlier workers
        self._start, self._clock = start, clock
        self._on_prepared, self._on_loss = on_prepared, on_loss
        self._posted = self._answered = 0  # the last round sent, and the last one that anything came back for
        self._worker: Worker | None = None
        self._awaited: _Awaited | None = None
        self._ready_since: float | None = None
        self._lost: Worker | None = None  # killed, may not have exited yet
        self._restart_at = 0.0
        self._pause = SHORTEST_PAUSE
        self._closed = False
        self._launch()

    @property
    def pid(self) -> int | None:
        """Process id of the worker, if there is one."""
        return self._worker.pid if self._worker is not None else None

    @property
    def ready(self) -> bool:
        """Whether the worker has reported that it can take rounds."""
        return self._ready_since is not None

    @contextmanager
    def losing_on_error(self) -> Iterator[None]:
        """Kills the worker on an invalid message or a failing channel."""
        try:
            yield
        except (WireError, OSError) as error:
            self._lose(str(error))

    def settled(self, timeout: float = 0.0) -> bool:
        """Whether there is a worker that can take a round; late proposals are received and dropped.

        It owes no proposals, and has begun the last round: one that others' drafts make superfluous may be slower.

        A lost worker is replaced here, once its pause is over. Raises WireError or OSError.
        """
        if self._closed:
            return False
        if self._worker is None:
            self._relaunch_when_due()
            return False
        channel = self._worker.channel
        if self._awaited is not None and self._awaited.kind is not Kind.PREPARED:
            drain = _DRAIN if channel.arriving else 0.0
            if self.receive(max(timeout, drain)) is None:
                return False
        while channel.waiting() and (message := channel.receive(self.limit, 0.0)) is not None:
            self._take_prepared(message)
        if self._awaited is not None:
            self._check_silence(channel, self._awaited)
        return self._posted - self._answered <= 1

    def post(self, message: Message, due: Kind) -> None:
        """Sends a round; `due`: the first message that must come for it."""
        channel = self.channel
        channel.post(message)
        self._posted = message.round
        self._awaited = _Awaited(due, message.round, channel.num_bytes, self._clock())

    def receive(self, timeout: float) -> Message | None:
        """The message that is due, if it comes in time. PREPARED messages for earlier rounds may come first."""
        channel, awaited = self.channel, self._awaited
        if awaited is None:
            raise AssertionError("no message is due from the worker")
        message = channel.receive(self.limit, timeout)
        while message is not None and message.kind is Kind.PREPARED:
            self._take_prepared(message)
            message = channel.receive(self.limit, timeout)
        if message is None:
            self._check_silence(channel, awaited)
            return None
        if (message.kind, message.round) != (awaited.kind, awaited.round):
            raise WireError(f"it sent {message.kind.name} {message.round}, not {awaited.kind.name} {awaited.round}")
        if message.kind is Kind.READY:
            self._ready_since = self._clock()
            log.info("the drafter's process %s is ready", self.pid)
        else:
            self._answered = message.round
        self.busy_seconds = self._busy_before + message.times[0] / 1e9
        self._awaited = None
        return message

    def close(self) -> None:
        """Stops the worker for good."""
        self._closed = True
        for worker in (self._worker, self._lost):
            if worker is not None:
                worker.close()
        self._worker = self._lost = None

    @property
    def channel(self) -> Channel:
        """To the worker, while there is one."""
        if self._worker is None:
            raise AssertionError("there is no worker")
        return self._worker.channel

    def _take_prepared(self, message: Message) -> None:
        if message.kind is not Kind.PREPARED:
            raise WireError(f"it sent {message.kind.name} {message.round} without being asked")
        self._on_prepared(message)
        self._answered = message.round
        self.busy_seconds = self._busy_before + message.times[0] / 1e9
        awaited = self._awaited
        if awaited is not None and (awaited.kind, awaited.round) == (message.kind, message.round):
            self._awaited = None

    def _check_silence(self, channel: Channel, awaited: _Awaited) -> None:
        now = self._clock()
        if channel.num_bytes != awaited.moved:
            awaited.moved, awaited.since = channel.num_bytes, now
        elif now - awaited.since > (self.start_limit if awaited.kind is Kind.READY else self.hang_limit):
            raise WireError(f"it has been silent for {now - awaited.since:.1f} s")

    def _launch(self) -> None:
        with self.losing_on_error():
            self._worker = self._start()
            log.info("the drafter's process %s was started", self.pid)
            self.limit = 0
            self._awaited = _Awaited(Kind.READY, 0, self._worker.channel.num_bytes, self._clock())

    def _relaunch_when_due(self) -> None:
        """Waits for the exit of the lost worker, which frees its memory and device."""
        if self._clock() >= self._restart_at and (self._lost is None or self._lost.exited):
            self._lost = None
            self.restarts += 1
            self._launch()

    def _lose(self, reason: str) -> None:
        """Kills the worker and schedules a new one."""
        now = self._clock()
        if self._ready_since is not None and now - self._ready_since >= HEALTHY:
            self._pause = SHORTEST_PAUSE
        self.failures += 1
        log.warning("a drafter's process was lost (%s): the next one starts in %.1f s", reason, self._pause)
        if self._worker is not None:
            self._worker.kill()
        self._lost, self._worker = self._worker, None
        self._awaited = self._ready_since = None
        self._answered = self._posted
        self._restart_at = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self._busy_before = self.busy_seconds
        self._on_loss()
