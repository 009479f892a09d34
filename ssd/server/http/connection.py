"""Connections: how many there may be, and how long a client may take to send a request and to read the answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ssd.server.admission import RETRY_AFTER
from ssd.server.errors import ApiError, AsciiJSON
from ssd.server.metrics import HttpRequests
from ssd.server.options import ServerOptions

_REFUSED_SECONDS: Final = 1.0  # how long a connection beyond the limit may send nothing; it gets 503 when it sends
_MOST_AHEAD: Final = 1 << 16  # bytes that are read behind a request before it is answered: the next one, sent early


class _Timer:
    """Calls a function unless it is stopped in time. Starting it twice does not prolong the time."""

    def __init__(self, loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
        self._loop, self._function = loop, function
        self._handle: asyncio.TimerHandle | None = None

    def start(self, seconds: float) -> None:
        if self._handle is None:
            self._handle = self._loop.call_later(seconds, self._function)

    def stop(self) -> None:
        if self._handle is not None:
            self._handle.cancel()
            self._handle = None


class Connection(H11Protocol):
    """One client's connection.

    A request is being sent from its first byte (of the first request: from the connection's beginning) to the end of
    its body. uvicorn itself closes connections that are idle between two requests.
    """

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        state = self.config.app.state.server  # type: ignore[union-attr]
        self._options: ServerOptions = state.options
        self._http_requests: HttpRequests = state.http_requests
        self._sending = _Timer(self.loop, self._refuse)  # while a request is being sent
        self._unread = _Timer(self.loop, self._check_reading)  # while there is more than the system can buffer
        transport.set_write_buffer_limits(0)  # `pause_writing` as soon as there is
        self._refused = len(self.connections) > self._options.max_connections
        self._sending.start(_REFUSED_SECONDS if self._refused else self._options.read_timeout)

    def data_received(self, data: bytes) -> None:
        if self._refused:
            self._refuse()
            return
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) <= _MOST_AHEAD:
            self.flow.resume_reading()  # uvicorn has paused it: what is not read does not tell that the client leaves
        if self.conn.their_state in (h11.IDLE, h11.SEND_BODY):
            self._sending.start(self._options.read_timeout)
        else:
            self._sending.stop()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._left = self.transport.get_write_buffer_size()
        self._unread.start(self._options.write_timeout)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._unread.stop()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._sending.stop()
        self._unread.stop()

    def _check_reading(self) -> None:
        """Goes on waiting for a client that has read something."""
        before, self._left = self._left, self.transport.get_write_buffer_size()
        if self._left < before:
            self._unread.stop()
            self._unread.start(self._options.write_timeout)
        else:
            self.transport.abort()

    def send_400_response(self, msg: str) -> None:
        """uvicorn's, for what is not HTTP: it raises after an answer has begun, and for HEAD."""
        self._close(ApiError(400, "this is not a valid HTTP request"))

    def _refuse(self) -> None:
        if self._refused:
            limit = self._options.max_connections
            error = ApiError(503, f"there are {limit} connections, which is the limit", headers=RETRY_AFTER)
        else:
            error = ApiError(408, f"the request did not come within {self._options.read_timeout:g} seconds")
        self._close(error)

    def _close(self, error: ApiError) -> None:
        """Sends an error, unless an answer has begun, and closes the connection."""
        if self.transport.is_closing():
            return
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            answer = AsciiJSON(error.body(), error.status, {**error.headers, "Connection": "close"})
            reason = HTTPStatus(error.status).phrase.encode()
            head = h11.Response(status_code=error.status, headers=answer.raw_headers, reason=reason)
            begun = self.conn.our_state is h11.SEND_RESPONSE  # the application has the request
            if begun:
                self.scope["state"]["status"] = error.status
            else:
                self._http_requests.count("", error.status)
            without_body = begun and self.scope["method"] == "HEAD"
            for event in (head, h11.Data(data=b"" if without_body else bytes(answer.body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
            if self.cycle is not None:
                self.cycle.disconnected = True  # what the application still sends is dropped
        self.transport.close()
