"""Runs the application with uvicorn until a signal ends it."""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import time
from types import FrameType

import uvicorn
from fastapi import FastAPI

from ssd.server.generation import ServerState

log = logging.getLogger("ssd")


class Server(uvicorn.Server):
    """Drains before it stops: SIGTERM or SIGINT ends it when running requests have ended; a second one, at once."""

    def __init__(self, app: FastAPI, *, host: str, port: int) -> None:
        self._state: ServerState = app.state.server
        self._draining: asyncio.Task[None] | None = None
        config = uvicorn.Config(app, host=host, port=port, log_config=None, access_log=False)
        super().__init__(config)

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._event_loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._event_loop.call_soon_threadsafe(self.drain)

    def drain(self) -> None:
        """The first call refuses new requests and stops the server when the others have ended; the second stops it."""
        if self._draining is not None:
            self.should_exit = self.force_exit = True
        else:
            self._draining = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        log.info("draining: running requests end, new ones are refused")
        timeout, begin = self._state.options.drain_timeout, time.monotonic()
        if not await self._state.admission.drain(timeout):
            log.warning("some requests did not end within %g seconds", timeout)
        left = timeout - (time.monotonic() - begin)  # for clients that still read
        self.config.timeout_graceful_shutdown = max(1, math.ceil(left))
        self.should_exit = True
