"""Child processes with a connection to their parent: drafters and the ranks of a model.

A child gets one end of a socket as its last argument, its configuration in the first message (SETUP), and answers
READY. It ends when the connection is closed. Knows nothing of what it computes.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from pathlib import Path
from typing import Any

from ssd.parallel.launch import environment_without_torchrun
from ssd.parallel.transport import SETUP, Channel, Message, decode_json, encode_json

GRACE = 1.0  # seconds that a process has to exit by itself
HANG_UP = getattr(select, "POLLRDHUP", select.POLLHUP)  # the former where there is one, as on Linux

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


WORKER_COMMAND = _command("main")  # a drafter's process
FOLLOWER_COMMAND = _command("follow")  # another rank of a model


class Worker:
    """A child process and the channel to it. The process ends with this object.

    `setup` is sent as the first message. With `own_group` a kill includes the child's own children that have no group
    of their own.
    """

    def __init__(self, setup: Mapping[str, Any], argv: Seq[str] = WORKER_COMMAND, *, own_group: bool = True) -> None:
        ours, theirs = socket.socketpair()
        self.channel = Channel(ours)
        with theirs:
            try:
                self._process = spawn(argv, theirs, environment_without_torchrun(), own_group=own_group)
            except OSError:
                ours.close()
                raise
        self._end = weakref.finalize(self, _end, self._process, self.channel)
        self.channel.post(setup_message(setup))

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


def setup_message(setup: Mapping[str, Any]) -> Message:
    return Message(SETUP, payload=encode_json(setup))


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


def end_process(process: subprocess.Popen[bytes]) -> None:
    """Waits for a process whose connection was closed, and kills it if it does not exit within GRACE seconds."""
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        _kill(process)
        process.wait()


def _end(process: subprocess.Popen[bytes], channel: Channel) -> None:
    channel.close()
    end_process(process)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and its group: a child of it that is stopped would not notice its end."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()


# --- in the child -----------------------------------------------------------------------------------------------------


def connect(fd: int) -> tuple[Channel, dict[str, Any]]:
    """The channel over the socket `fd`, and the setup that comes first."""
    channel = Channel(socket.socket(fileno=fd))
    return channel, decode_json(channel.expect(SETUP).payload)


def exit_with(channel: Channel) -> None:
    """Ends this process when the other end of the channel is closed, whatever it is computing or waiting for."""

    def watch() -> None:
        poller = select.poll()
        poller.register(channel, HANG_UP)
        poller.poll()
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
