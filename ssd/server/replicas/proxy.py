"""The application in front of several replicas: it sends each request to one of them, and their answers to clients.

Connections, API keys and sizes are checked here, by the middleware of a server with one engine. A request whose replica
is lost before the client has got a byte is sent to another one: its text is a function of the request.
Knows nothing of Ray.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Iterable
from collections.abc import Sequence as Seq
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final, Protocol

from fastapi import FastAPI, Request
from fastapi.responses import Response
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from ssd.server import errors
from ssd.server.admission import RETRY_AFTER, Admission
from ssd.server.answers import is_stream, last_events
from ssd.server.app import PATHS
from ssd.server.errors import ApiError
from ssd.server.generation import NO_RETRY, TIMED_OUT
from ssd.server.http import middleware
from ssd.server.http.asgi import disconnected, scope_of
from ssd.server.metrics import HttpRequests, exposition, merged
from ssd.server.options import ServerOptions
from ssd.server.playground.endpoints import TOTALS

log = logging.getLogger("ssd")

_ATTEMPTS: Final = 3  # replicas that a request is sent to: one that makes engines fail must not reach all of them


class ReplicaLost(Exception):
    """A replica has ended, or its engine has failed. `replica`: its id, if it may still get requests."""

    def __init__(self, reason: str, replica: str | None = None) -> None:
        super().__init__(reason)
        self.replica = replica


class Replicas(Protocol):
    """Servers of one model."""

    lost: str | None  # why none of them will answer again; one that ends is replaced

    def answer(self, scope: Scope, body: bytes, avoid: Seq[str]) -> AsyncGenerator[Message]:
        """The answer of a replica, best not one of `avoid`, as ASGI messages; its start may have a `user`."""

    async def running(self) -> int:
        """How many replicas take requests."""

    async def metrics(self) -> dict[str, list[Metric]]:
        """Metrics by replica."""

    async def states(self) -> list[dict[str, Any]]:
        """`/playground/state` of each replica."""


@dataclass
class ProxyState:
    """`app.state.server`."""

    options: ServerOptions
    admission: Admission
    replicas: Replicas
    http_requests: HttpRequests

    @property
    def lost(self) -> str | None:
        return self.replicas.lost

    @classmethod
    def of(cls, request: Request) -> ProxyState:
        state: ProxyState = request.app.state.server
        return state


def create_proxy(replicas: Replicas, options: ServerOptions) -> FastAPI:
    """The ASGI application in front of replicas. It does not close them."""
    app = FastAPI(title="ssd", openapi_url=None, redirect_slashes=False)
    counts = HttpRequests(PATHS, options.served_model_name)
    app.state.server = state = ProxyState(options, Admission(options.max_connections, 0, None), replicas, counts)
    errors.install(app)
    app.add_api_route("/health", _health)
    app.add_api_route("/health/ready", _ready)
    app.add_api_route("/metrics", _metrics)
    app.add_api_route("/playground/state", _playground_state)
    app.mount("/", _Forward(state))
    middleware.install(app, options)
    return app


async def _health() -> dict[str, str]:
    """Liveness of this process."""
    return {"status": "ok"}


async def _ready(request: Request) -> dict[str, str]:
    """Readiness: fails while no replica runs, and while the server drains."""
    state = ProxyState.of(request)
    if state.admission.draining:
        raise ApiError(503, "the server is shutting down", code="draining")
    if not await state.replicas.running():
        raise ApiError(503, "no replica is running", headers=RETRY_AFTER)
    return {"status": "ok"}


async def _metrics(request: Request) -> Response:
    """Metrics of all replicas, with the label `replica`, and those of this process."""
    state = ProxyState.of(request)
    try:
        found = await state.replicas.metrics()
    except ApiError:  # no replica answers: that requests fail must be seen
        found = {}
    return exposition(_Merged(found), state.http_requests)


class _Merged(Collector):
    def __init__(self, found: dict[str, list[Metric]]) -> None:
        self._found = found

    def collect(self) -> Iterable[Metric]:
        yield GaugeMetricFamily("ssd_replicas", "Replicas that are running.", len(self._found))
        yield from merged(
            (metric, {"replica": replica}) for replica in sorted(self._found) for metric in self._found[replica]
        )


async def _playground_state(request: Request) -> dict[str, Any]:
    """Totals of all replicas."""
    states = await ProxyState.of(request).replicas.states()
    sums = {name: sum(state[name] for state in states) for name in TOTALS}
    usage = sum(state["kv_usage"] for state in states) / len(states)
    return {**states[0], **sums, "kv_usage": usage, "seconds": time.perf_counter()}


class _Forward:
    """Sends requests to replicas."""

    def __init__(self, state: ProxyState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        permit = self._state.admission.admit(1, "")
        try:
            whole = await receive()
            answering = asyncio.create_task(self._answer(scope, whole["body"], send))
            watching = asyncio.create_task(disconnected(receive))
            try:
                await asyncio.wait((answering, watching), return_when=asyncio.FIRST_COMPLETED)
            finally:
                watching.cancel()
                gone = not answering.done() and answering.cancel()
                await asyncio.wait((answering,))  # until the replica is told
            if not gone:
                answering.result()
        finally:
            permit.release()

    async def _answer(self, scope: Scope, body: bytes, send: Send) -> None:
        avoid: list[str] = []
        request_id, sent = scope["state"]["request_id"], scope_of(scope)
        timeout = self._state.options.request_timeout
        deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
        for _ in range(_ATTEMPTS):
            answer = _Answer(scope, send)
            try:
                async with (
                    asyncio.timeout_at(deadline) as limit,
                    aclosing(self._state.replicas.answer(sent, body, avoid)) as messages,
                ):
                    async for message in messages:
                        limit.reschedule(None)  # from now on the replica keeps it
                        await answer.add(message)
                return
            except TimeoutError:  # no replica was there
                raise ApiError(504, TIMED_OUT, code="timeout", headers=NO_RETRY) from None
            except ReplicaLost as lost:
                log.warning("%s: request %s %s", lost, request_id, "ends" if answer.begun else "is sent to another one")
                error = ApiError(500, f"{lost}: send the request again", code="replica_lost")
                if answer.begun:
                    await answer.fail(error)
                    return
                if lost.replica is not None:
                    avoid.append(lost.replica)
        raise error


class _Answer:
    """Forwards a replica's answer from the first part of its body on: before that, another replica may answer."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self._start: Message = {}
        self._num_events = 0  # server-sent events forwarded so far
        self.begun = False

    async def add(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._scope["state"]["user"] = message.pop("user", None)  # for the access log
            self._start = message
            return
        if not self.begun:
            self.begun = True
            await self._send(self._start)
        self._num_events += message.get("body", b"").count(b"\n\n")
        await self._send(message)

    async def fail(self, error: ApiError) -> None:
        """The last event of a stream. What is not a stream comes as a whole."""
        if not is_stream(Headers(raw=self._start["headers"]).get("content-type", "")):
            raise error
        body = last_events(self._scope["path"], error, self._scope["state"]["request_id"], self._num_events)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})
