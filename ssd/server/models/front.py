"""The application in front of several models: each request goes to the application of the model that it names.

Connections, API keys and sizes are checked here, by the middleware of a server with one model. A request waits for the
load of its model; a stream has a comment every few seconds meanwhile, which clients skip.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import Response
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import Field
from starlette.datastructures import Headers, QueryParams
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from ssd.server import api_docs, errors, info
from ssd.server.admission import RETRY_AFTER, Admission
from ssd.server.answers import EVENT_STREAM, last_events
from ssd.server.app import ENDPOINTS, PATHS
from ssd.server.errors import ApiError, AsciiJSON
from ssd.server.generation import ServerState
from ssd.server.http import middleware
from ssd.server.http.asgi import replayed, scope_of
from ssd.server.http.bodies import JsonRoute, on_thread, read_json
from ssd.server.ignored import IgnoredFields
from ssd.server.metrics import HttpRequests, exposition, merged
from ssd.server.models.catalog import Catalog, Slot
from ssd.server.models.served import Served
from ssd.server.ollama import models as ollama_models
from ssd.server.ollama.protocol import seconds, unloads
from ssd.server.ollama.writer import done
from ssd.server.options import ServerOptions
from ssd.server.playground import endpoints as playground
from ssd.server.protocol import Strict
from ssd.version import VERSION

_PATHS: Final = PATHS | {"/models", "/models/load", "/models/unload"}
_COMMENTS: Final = 2.0  # seconds between two comments in a stream whose model is loaded
_STREAM_HEADERS: Final = [(b"content-type", f"{EVENT_STREAM}; charset=utf-8".encode()), (b"cache-control", b"no-cache")]
_NOTHING: Final = dict.fromkeys((*playground.TOTALS, "kv_usage"), 0)  # while the playground's model is not loaded


@dataclass
class FrontState:
    """`app.state.server`."""

    options: ServerOptions  # of the server
    admission: Admission
    catalog: Catalog
    http_requests: HttpRequests  # that no model's application has answered
    ignored: IgnoredFields = field(default_factory=IgnoredFields)  # of requests to its own endpoints
    started: int = field(default_factory=lambda: int(time.time()))
    lost: str | None = None  # a model that is lost is loaded again

    @property
    def served(self) -> list[Served]:
        return [_served(slot) for slot in self.catalog.slots.values()]

    @classmethod
    def of(cls, request: Request) -> FrontState:
        state: FrontState = request.app.state.server
        return state


def _served(slot: Slot) -> Served:
    model, llm = slot.model, slot.loaded[0] if slot.loaded is not None and slot.ready else None
    left = slot.keep_alive - (0 if slot.users else time.monotonic() - slot.last_used)
    return Served(model.options, str(model.config.model), llm, time.time() + left if slot.expires else None)


def create_front(catalog: Catalog, options: ServerOptions) -> FastAPI:
    """The ASGI application in front of the models. It does not close them."""
    app = FastAPI(title="ssd", version=VERSION, openapi_url=None, docs_url=None, redoc_url=None, redirect_slashes=False)
    admission = Admission(options.max_connections, 0, None)
    app.state.server = FrontState(options, admission, catalog, HttpRequests(_PATHS, ""))
    errors.install(app)
    app.include_router(router)
    app.include_router(ollama_models.router)
    app.openapi = lambda: _schema()  # type: ignore[method-assign]
    app.add_api_route("/openapi.json", lambda: app.openapi())
    app.include_router(api_docs.router)
    app.add_api_route("/version", info.version)
    app.include_router(playground.page())
    app.mount("/", _Forward(app.state.server))
    middleware.install(app, options)
    return app


def _schema() -> dict[str, Any]:
    """That of a model's application, and the endpoints of this one."""
    shown, own = FastAPI(title="ssd", version=VERSION, responses=errors.ERROR_RESPONSES), APIRouter()
    shown.include_router(router)
    paths = {route.path for route in router.routes if isinstance(route, Route)}
    for module in ENDPOINTS:
        own.routes += [each for each in module.router.routes if isinstance(each, Route) and each.path not in paths]
    shown.include_router(own)
    return shown.openapi()


# --- endpoints --------------------------------------------------------------------------------------------------------

router = APIRouter(route_class=JsonRoute)


class ModelName(Strict):
    model: str = Field(description="The name of a model, or an alias.")


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    state = FrontState.of(request)
    return {"object": "list", "data": [_model(state, slot) for slot in state.catalog.slots.values()]}


@router.get("/v1/models/{model:path}")
async def model(model: str, request: Request) -> dict[str, Any]:
    state = FrontState.of(request)
    return _model(state, state.catalog.find(model))


def _model(state: FrontState, slot: Slot) -> dict[str, Any]:
    """As OpenAI describes a model, and whether it is loaded."""
    described = {"id": slot.model.name, "object": "model", "created": state.started, "owned_by": "ssd"}
    return described | {"aliases": [*slot.model.options.aliases], "state": slot.state}


@router.get("/models")
async def states(request: Request) -> dict[str, Any]:
    """All models with their state."""
    return {"models": [_state(slot) for slot in FrontState.of(request).catalog.slots.values()]}


@router.post("/models/load")
async def load(body: ModelName, request: Request) -> dict[str, Any]:
    """Loads a model, and answers when it is loaded."""
    catalog = FrontState.of(request).catalog
    slot = catalog.find(body.model)
    async with catalog.using(slot):
        return _state(slot)


@router.post("/models/unload")
async def unload(body: ModelName, request: Request) -> dict[str, Any]:
    """Unloads a model when its requests have ended; the next request loads it again."""
    catalog = FrontState.of(request).catalog
    slot = catalog.find(body.model)
    await catalog.unload(slot)
    return _state(slot)


def _state(slot: Slot) -> dict[str, Any]:
    model = slot.model
    return {
        "id": model.name,
        "aliases": [*model.options.aliases],
        "model": str(model.config.model),
        "state": slot.state,
        "error": slot.error if slot.state == "failed" else None,
        "pinned": model.pinned,
        "keep_alive": model.keep_alive if model.keep_alive >= 0 else None,
        "requests": slot.users,
        "loads": slot.loads,
        "idle_seconds": round(time.monotonic() - slot.last_used, 1) if slot.ready and not slot.users else None,
    }


@router.get("/health")
async def health() -> dict[str, str]:
    """Liveness of this process: a model whose engine has failed is loaded again by its next request."""
    return {"status": "ok"}


@router.get("/health/ready")
async def ready(request: Request) -> dict[str, str]:
    """Readiness: fails while the server drains."""
    if FrontState.of(request).admission.draining:
        raise ApiError(503, "the server is shutting down", code="draining")
    return {"status": "ok"}


@router.get("/metrics", include_in_schema=False)
async def metrics(request: Request) -> Response:
    """Those of all loaded models, by `model_name`, and which are loaded."""
    state = FrontState.of(request)
    return exposition(_Models(state.catalog), state.http_requests)


class _Models(Collector):
    def __init__(self, catalog: Catalog) -> None:
        self._slots = list(catalog.slots.values())

    def collect(self) -> Iterable[Metric]:
        loaded = GaugeMetricFamily("ssd_model_loaded", "Whether a model is loaded.", labels=["model_name"])
        loads = CounterMetricFamily("ssd_model_loads", "How often a model was loaded.", labels=["model_name"])
        for slot in self._slots:
            loaded.add_metric([slot.model.name], slot.state == "ready")
            loads.add_metric([slot.model.name], slot.loads)
        states: list[ServerState] = [slot.loaded[1].state.server for slot in self._slots if slot.loaded is not None]
        own = (metric for state in states for each in (state.metrics, state.http_requests) for metric in each.collect())
        yield from (loaded, loads, *merged((metric, {}) for metric in own))


@router.get("/playground/state", include_in_schema=False)
async def playground_state(request: Request, model: str | None = None) -> dict[str, Any]:
    """That of a model (`?model=NAME`), with the names of all."""
    catalog = FrontState.of(request).catalog
    slot = catalog.find(model)
    found = {"models": [*catalog.slots], "state": slot.state}
    if slot.loaded is not None and slot.ready:
        return found | playground.state_of(slot.loaded[1].state.server)
    wanted = slot.model.config.speculation
    described = {"model": slot.model.name, "mode": wanted.mode, "draft": wanted.draft_model, "branches": False}
    return found | _NOTHING | described | {"note": f"model: {slot.state}", "seconds": time.perf_counter()}


# --- forwarding -------------------------------------------------------------------------------------------------------


class _Forward:
    """Sends requests to the applications of their models."""

    def __init__(self, state: FrontState) -> None:
        self._state = state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        permit = self._state.admission.admit(1, "")
        try:
            whole = await receive()
            body = await _fields(scope, whole["body"])
            slot = self._state.catalog.find(_name(body.get("model") or QueryParams(scope["query_string"]).get("model")))
            if unloads(scope["path"], body) and not slot.model.pinned:
                await self._state.catalog.unload(slot)
                ended = done(slot.model.name, "unload", in_message=scope["path"] == "/api/chat")
                await AsciiJSON(ended)(scope, receive, send)
                return
            keep_alive = seconds(body.get("keep_alive"))
            answer = _Answer(scope, send)
            task = asyncio.create_task(self._answer(slot, keep_alive, scope, replayed(whole, receive), answer))
            try:
                commented = body.get("stream") is True and not scope["path"].startswith("/api/")
                await self._wait(slot, task, answer, commented=commented)
                await task
            except Exception as error:
                if not answer.begun:
                    raise
                await answer.fail(errors.api_error(error))
            finally:
                task.cancel()
        finally:
            permit.release()

    async def _answer(
        self, slot: Slot, keep_alive: float | None, scope: Scope, receive: Receive, answer: _Answer
    ) -> None:
        own: dict[str, Any] = {"arrived": scope["state"]["arrived"]}
        async with self._state.catalog.using(slot, keep_alive) as app:
            answer.loading = False
            scope["state"]["forwarded"] = True
            await app({**scope_of(scope), "state": own}, receive, answer.add)
        scope["state"]["user"] = own.get("user")  # for the access log

    async def _wait(self, slot: Slot, task: asyncio.Task[None], answer: _Answer, *, commented: bool) -> None:
        """Waits until a model is loaded. A stream of events gets comments meanwhile; what takes too long ends with an
        error."""
        began = time.monotonic()
        while not task.done() and answer.loading:
            await asyncio.wait((task,), timeout=_COMMENTS)
            seconds = time.monotonic() - began
            if task.done() or not answer.loading:
                break
            if seconds > self._state.catalog.options.load_timeout:
                raise ApiError(
                    503, f"model {slot.model.name!r} is still {slot.state}", code="model_loading", headers=RETRY_AFTER
                )
            if commented:
                await answer.comment(f"model {slot.model.name} is {slot.state}, {seconds:.0f} s")


class _Answer:
    """Forwards an answer. Where comments came before it, it has begun: what is no stream becomes its last event."""

    def __init__(self, scope: Scope, send: Send) -> None:
        self._scope, self._send = scope, send
        self.loading = True
        self.begun = False  # with comments
        self._error: list[bytes] | None = None  # parts of an answer that is no stream

    async def comment(self, text: str) -> None:
        if not self.begun:
            self.begun = True
            await self._send({"type": "http.response.start", "status": 200, "headers": [*_STREAM_HEADERS]})
        await self._send({"type": "http.response.body", "body": f": {text}\n\n".encode(), "more_body": True})

    async def fail(self, error: ApiError) -> None:
        body = last_events(self._scope["path"], error, self._scope["state"]["request_id"], 0)
        await self._send({"type": "http.response.body", "body": body, "more_body": False})

    async def add(self, message: Message) -> None:
        if not self.begun:
            await self._send(message)
        elif message["type"] == "http.response.start":
            stream = Headers(raw=message["headers"]).get("content-type", "").startswith(EVENT_STREAM)
            self._error = None if stream else []
        elif self._error is None:
            await self._send(message)
        else:
            self._error.append(message.get("body", b""))
            if not message.get("more_body", False):
                await self.fail(_error_of(b"".join(self._error)))


def _error_of(body: bytes) -> ApiError:
    """The error that an answer describes."""
    error = json.loads(body)["error"]
    return ApiError(400, error["message"], param=error.get("param"), code=error.get("code"))


async def _fields(scope: Scope, body: bytes) -> Mapping[str, Any]:
    """The fields of a body; its model's application reports what is wrong with any but the model."""
    if scope["method"] != "POST":
        return {}
    try:
        found = await on_thread(scope["state"]["large"], read_json, body)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _name(value: object) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ApiError(400, "model: must be a text, the name of a model", param="model")
    return value
