"""Ranks on several hosts: the processes that torchrun has started on them join.

Rank 0 goes on, and is the engine. Each other process stays here: it starts a follower (`ssd.assembly.ranks`) on its
host for every engine that rank 0 builds, and exits when rank 0 does. Torch's store at MASTER_ADDR:MASTER_PORT has the
port of rank 0 and a token; a connection that does not begin with the token is dropped.
"""

from __future__ import annotations

import ctypes
import hmac
import json
import logging
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from contextlib import suppress
from datetime import timedelta
from enum import IntEnum
from typing import Any

from ssd.errors import EngineFailed, SSDError, one_line
from ssd.parallel.group import listener
from ssd.parallel.launch import Launch
from ssd.parallel.process import FOLLOWER_COMMAND, end_process, setup_message, spawn
from ssd.parallel.transport import Channel, Message, Reader, WireError, words

log = logging.getLogger("ssd")
_JOIN_SECONDS = 600.0  # timeout of the first connection of every process
_ANSWER_SECONDS = 10.0  # timeout of a further connection of a process that has joined
_HELLO_SECONDS = 2.0  # timeout of the token on a new connection
_LOST_MILLISECONDS = 6000  # without an answer, after which the other host is lost
_KEY = "ssd"
_PR_SET_PDEATHSIG = 1
_hosts: Hosts | None = None  # on rank 0, once the other processes have joined


class Kind(IntEnum):
    """Messages between the processes of torchrun."""

    HELLO = 3  # to rank 0, first on every connection: the sender's rank, the token
    START = 4  # from rank 0: start a follower, and connect it to this port
    END = 5  # from rank 0: an engine was closed


def join(size: int) -> Hosts | None:
    """On rank 0 of torchrun: the other processes. None if torchrun has not started this one.

    The other processes do not return: they start followers for rank 0, and exit when it does.
    """
    global _hosts
    launch = Launch.found()
    if launch is None:
        return None
    launch.check(size)
    if _hosts is None:
        _end_with_torchrun()
        if launch.rank:
            sys.exit(_follow(launch))
        _hosts = Hosts(launch)
    return _hosts


class Hosts:
    """The processes of all ranks but the first."""

    def __init__(self, launch: Launch) -> None:
        """Returns when all of them have joined."""
        self.host = launch.host
        self._ranks = range(1, launch.size)
        self._lock = threading.Lock()
        self._token = [secrets.randbits(63), secrets.randbits(63)]
        self._store = _store()
        with listener("") as listening:
            self._store.set(_KEY, json.dumps([listening.getsockname()[1], *self._token]))
            log.info("waiting for ranks 1 to %d of torchrun", launch.size - 1)
            self.channels = self._accept(listening, _JOIN_SECONDS)
        self._store.delete_key(_KEY)  # torchrun may start all of them again

    def start(self, setup: Mapping[str, Any]) -> list[Channel]:
        """Starts a follower on each of them, which ends when its channel is closed."""
        with listener("") as listening:
            self._tell(Message(Kind.START, payload=words([listening.getsockname()[1]])))
            channels = self._accept(listening, _ANSWER_SECONDS)
        for rank, channel in enumerate(channels, 1):
            channel.post(setup_message({**setup, "rank": rank}))
        return channels

    def engine_closed(self) -> None:
        """Reports the regular end of an engine; without it they exit with an error."""
        with suppress(EngineFailed):
            self._tell(Message(Kind.END))

    def _tell(self, message: Message) -> None:
        for rank, channel in enumerate(self.channels, 1):
            try:
                with self._lock:  # engines may be closed by several threads
                    channel.send(message)
            except (OSError, WireError) as error:
                raise EngineFailed(f"rank {rank} of torchrun has ended: start all of them again") from error

    def _accept(self, listening: socket.socket, seconds: float) -> list[Channel]:
        """One connection from each of them, in order of rank."""
        found: dict[int, Channel] = {}
        deadline = time.monotonic() + seconds
        while missing := [rank for rank in self._ranks if rank not in found]:
            listening.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                end, _ = listening.accept()
            except TimeoutError:
                raise EngineFailed(
                    f"ranks {missing} of torchrun have not joined within {seconds:g} s: their own output says why"
                ) from None
            channel = Channel(_watched(end))
            rank = self._introduced(channel)
            if rank in missing:
                found[rank] = channel
            else:
                channel.close()
        return [found[rank] for rank in self._ranks]

    def _introduced(self, channel: Channel) -> int:
        """Rank of the sender of HELLO; 0 if it does not have the token."""
        try:
            hello = channel.expect(Kind.HELLO, 1 + len(self._token), _HELLO_SECONDS).payload
        except (OSError, WireError):
            return 0
        shown = hmac.compare_digest(hello[1:].tobytes(), words(self._token).tobytes())
        return int(hello[0]) if shown else 0


# --- the others -------------------------------------------------------------------------------------------------------


def _follow(launch: Launch) -> int:
    """Starts followers for rank 0 until it ends. Exit status: 0 if it had engines and has closed them all."""
    _leave_signals_to_rank_0(launch)
    followers: list[subprocess.Popen[bytes]] = []
    num_open, status = 0, 1
    try:
        port, *token = json.loads(_store().get(_KEY))
        with _connect(launch, port, token) as end:
            channel = Channel(end)
            while (message := channel.receive()) is not None:
                followers = [follower for follower in followers if follower.poll() is None]
                if message.kind == Kind.START:
                    with _connect(launch, Reader(message.payload).number(1, 65535), token) as own:
                        followers.append(spawn(FOLLOWER_COMMAND, own))
                num_open += 1 if message.kind == Kind.START else -1
                status = int(num_open > 0)
    except (OSError, RuntimeError, SSDError) as error:
        if status:
            log.error("rank %d ends, because rank 0 cannot be reached (%s)", launch.rank, one_line(error))
    finally:
        for follower in followers:
            end_process(follower)
    return status


def _connect(launch: Launch, port: int, token: Seq[int]) -> socket.socket:
    """A connection to rank 0."""
    end = _watched(socket.create_connection((launch.host, port), _ANSWER_SECONDS))
    Channel(end).send(Message(Kind.HELLO, payload=words([launch.rank, *token])))
    return end


def _leave_signals_to_rank_0(launch: Launch) -> None:
    """Torchrun passes signals on to all processes of its host: rank 0 acts on them, the others wait for its end.

    On another host a signal ends the process at once, and so the engine.
    """
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN if launch.beside_first else signal.SIG_DFL)


# --- both -------------------------------------------------------------------------------------------------------------


def _store() -> Any:
    from torch.distributed.rendezvous import rendezvous

    try:
        return next(rendezvous("env://", timeout=timedelta(seconds=_JOIN_SECONDS)))[0]
    except RuntimeError as error:
        where = "{MASTER_ADDR}:{MASTER_PORT}".format_map(os.environ)
        raise EngineFailed(f"torch's store at {where} cannot be used ({one_line(error)})") from error


def _watched(end: socket.socket) -> socket.socket:
    """A connection that ends within seconds when the other host is lost."""
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    end.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    wanted = {"TCP_KEEPIDLE": 2, "TCP_KEEPINTVL": 1, "TCP_KEEPCNT": 4, "TCP_USER_TIMEOUT": _LOST_MILLISECONDS}
    for name, value in wanted.items():
        if hasattr(socket, name):
            end.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return end


def _end_with_torchrun() -> None:
    """Makes the kernel kill this process when torchrun is killed."""
    if sys.platform == "linux" and "TORCHELASTIC_RUN_ID" in os.environ:
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
