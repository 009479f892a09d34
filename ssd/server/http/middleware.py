"""Middleware for every HTTP request: request id, access log, count, size limit, host name, API key, CORS."""

from __future__ import annotations

import hmac
import logging
import re
import time
import uuid
from http import HTTPStatus
from typing import Final

from fastapi import FastAPI
from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd.server.errors import GONE, ApiError
from ssd.server.http.asgi import replayed
from ssd.server.http.bodies import LARGE
from ssd.server.options import ServerOptions, is_loopback
from ssd.server.playground.endpoints import PAGE

access_log = logging.getLogger("ssd.access")
_PROBES: Final = frozenset({"/health", "/health/ready"})  # served under any host name
OPEN_PATHS: Final = frozenset({*_PROBES, *PAGE})  # served without an API key
_POLLED: Final = frozenset({*_PROBES, "/metrics", "/playground/state"})  # not in the access log unless they fail
_REQUEST_ID: Final = re.compile(r"[A-Za-z0-9_.:-]{1,128}")


class RequestIdMiddleware:
    """Sets `x-request-id` (the client's, or a new one), writes the access log and counts.

    Closes connections while draining. HEAD is served as GET, whose body the connection leaves out.
    """

    def __init__(self, app: ASGIApp, *, log: bool) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = Headers(scope=scope).get("x-request-id", "")
        request_id = given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id
        begin, status = time.perf_counter(), 0
        scope["state"].setdefault("arrived", begin)

        async def tagged(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                headers = MutableHeaders(scope=message)
                headers["x-request-id"] = request_id
                if scope["app"].state.server.admission.draining:
                    headers["Connection"] = "close"
            await send(message)

        try:
            await self._app({**scope, "method": "GET"} if scope["method"] == "HEAD" else scope, receive, tagged)
        finally:
            status = scope["state"].get("status", status) or GONE  # the former: the connection has answered itself
            if not scope["state"].get("forwarded"):  # else what has answered it counts it
                scope["app"].state.server.http_requests.count(scope["path"], status)
            if self._log and not (scope["path"] in _POLLED and status < HTTPStatus.BAD_REQUEST):
                self._write_log(scope, status, time.perf_counter() - begin)

    @staticmethod
    def _write_log(scope: Scope, status: int, seconds: float) -> None:
        """Values from clients are escaped, so that they cannot add lines to the log."""
        client, state = (scope.get("client") or ("-",))[0], scope["state"]
        by = f", user {state['user']!a:.80}" if state.get("user") is not None else ""
        what = f"{scope['method']} {scope['path']!a:.200}"
        access_log.info("%s %s %d %.3f s, request %s%s", client, what, status, seconds, state["request_id"], by)


class AuthAndSizeMiddleware:
    """Refuses requests under another host's name (403), without a valid API key (401), with too large a body (413)."""

    def __init__(self, app: ASGIApp, *, options: ServerOptions) -> None:
        self._app = app
        self._keys = [key.encode() for key in options.api_keys]
        self._hosts = frozenset(host.lower() for host in options.allowed_hosts)
        self._max_bytes = options.max_request_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            if self._hosts and scope["path"] not in _PROBES:
                self._check_host(Headers(scope=scope))
            if self._keys and scope["path"] not in OPEN_PATHS:
                self._check_key(Headers(scope=scope))
            whole = await self._body(scope, receive)
        except ApiError as error:
            await error.response(scope)(scope, receive, send)
            return
        await self._app(scope, replayed(whole, receive), send)

    def _check_host(self, headers: Headers) -> None:
        """A page of a name that its owner lets point here (DNS rebinding) is of this origin for a browser.

        Browsers always send the header; what does not, is no page.
        """
        given = headers.get("host", "localhost").lower()
        name = re.sub(r":\d*$", "", given)
        if not is_loopback(name) and name.removesuffix(".") not in self._hosts:
            raise ApiError(403, f"host {given!r}: is not a name of this server; --allowed-hosts adds names")

    def _check_key(self, headers: Headers) -> None:
        """Compares with every key in constant time."""
        scheme, _, token = headers.get("authorization", "").partition(" ")
        given = token if scheme.lower() == "bearer" else headers.get("x-api-key", "")
        matches = [hmac.compare_digest(given.strip().encode(), key) for key in self._keys]
        if not any(matches):
            raise ApiError(
                401,
                "this server needs an API key: send 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    async def _body(self, scope: Scope, receive: Receive) -> Message:
        """The whole body, as one message; the request's state gets `large`."""
        length = Headers(scope=scope).get("content-length", "0")
        size, parts = 0, list[bytes]()
        while length.isdecimal() and int(length) <= self._max_bytes and size <= self._max_bytes:
            message = await receive()
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            if not message.get("more_body", False) and size <= self._max_bytes:
                scope["state"]["large"] = size > LARGE
                return {**message, "body": b"".join(parts)}
        limit = f"the limit is {self._max_bytes} bytes"
        raise ApiError(413, f"the request is too large: {limit}", code="request_too_large")


def install(app: FastAPI, options: ServerOptions) -> None:
    """Adds the middleware to the app; the last one that is added is the outermost."""
    app.add_middleware(AuthAndSizeMiddleware, options=options)
    if options.cors_origins:
        app.add_middleware(
            CORSMiddleware, allow_origins=list(options.cors_origins), allow_methods=["*"], allow_headers=["*"]
        )
    app.add_middleware(RequestIdMiddleware, log=options.access_log)
