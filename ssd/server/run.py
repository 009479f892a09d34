"""Runs the application with uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import errno
import logging
import math
import resource
import socket
from collections.abc import Callable
from types import FrameType
from typing import Any, Final, Protocol

import uvicorn
from fastapi import FastAPI

from ssd.errors import ConfigError
from ssd.server.admission import Admission
from ssd.server.http import memory
from ssd.server.http.connection import Connection
from ssd.server.options import ServerOptions

log = logging.getLogger("ssd")

_LAST_SECONDS: Final = 5  # time for handlers whose connection is closed
_OTHER_FILES: Final = 256  # file handles of a server beside its connections
_NO_SUCH_ADDRESS: Final = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # a name may have addresses that a host has not


def listen(host: str, port: int) -> list[socket.socket]:
    """Sockets that are bound to the addresses of a host. They refuse connections until a server runs on them."""
    sockets: list[socket.socket] = []
    missing: OSError | None = None
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        for family, *_, address in dict.fromkeys(found):
            try:
                sockets.append(_bound(family, address))
            except OSError as error:
                if error.errno not in _NO_SUCH_ADDRESS:
                    raise
                missing = error
        if missing is not None and not sockets:
            raise missing
    except OSError as error:
        for bound in sockets:
            bound.close()
        raise _unavailable(f"{host}, port {port}", error) from error
    return sockets


def _unavailable(address: str, error: OSError) -> ConfigError:
    return ConfigError(f"cannot listen on {address}: {error.strerror}: choose another --host or --port")


def _bound(family: int, address: tuple[Any, ...]) -> socket.socket:
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            made.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        made.bind(address)
    except OSError:
        made.close()
        raise
    return made


class _State(Protocol):
    """The part of `app.state.server` that a server uses."""

    options: ServerOptions
    admission: Admission

    @property
    def lost(self) -> str | None:
        """Why it must end."""


class Server(uvicorn.Server):
    """Drains before it stops: SIGTERM or SIGINT ends it when running requests have ended; a second one, at once.

    The loss of a rank of the model ends it, too.
    """

    def __init__(self, app: FastAPI, ready: Callable[[], object] = lambda: None) -> None:
        """`ready` is called when it accepts connections."""
        self._state: _State = app.state.server
        self._ready = ready
        self._draining: asyncio.Task[None] | None = None
        config = uvicorn.Config(
            app,
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            callback_notify=memory.give_back,
            timeout_notify=memory.SECONDS,
        )
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        _allow_files(self._state.options.max_connections + _OTHER_FILES)
        await super().serve(sockets)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        try:
            await super().startup(sockets)
        except OSError as error:  # two servers were bound to an address at the same time: the other one listens now
            raise _unavailable("its address", error) from error
        self._ready()

    async def on_tick(self, counter: int) -> bool:
        if self._state.lost is not None and self._draining is None:
            self.drain()
        return await super().on_tick(counter)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._event_loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """The first call refuses new requests and stops the server when the others have ended; the second stops it."""
        if self._draining is not None:
            self.should_exit = self.force_exit = True
            self._abort_connections()
        else:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        log.info("draining: running requests end, new ones are refused")
        timeout = self._state.options.drain_timeout
        self._event_loop.call_later(timeout, self._abort_connections)  # also of clients that still read
        if not await self._state.admission.drain(timeout):
            log.warning("some requests did not end within %g seconds", timeout)
        self.config.timeout_graceful_shutdown = math.ceil(timeout) + _LAST_SECONDS
        self.should_exit = True

    def _abort_connections(self) -> None:
        """Closes all connections; their requests are aborted, as when a client disconnects."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()


def _allow_files(count: int) -> None:
    """Raises this process's limit of file handles as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
