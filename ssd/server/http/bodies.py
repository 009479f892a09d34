"""JSON bodies: how they are read without making other requests wait.

json.loads and pydantic hold the GIL, and FastAPI calls them on the event loop: for seconds, if a body has megabytes. So
large bodies are read on another thread, in ways that let other threads run, and what is made of them is computed on
threads that no other request waits for.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from functools import partial
from typing import Any, Final, NoReturn, ParamSpec, TypeVar

from fastapi import Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from pydantic import BaseModel, ValidationError
from starlette.exceptions import HTTPException

from ssd.server.errors import ApiError, renaming
from ssd.server.ignored import reading

LARGE: Final = 1 << 16  # bytes; reading a body of this size takes some milliseconds
MAX_CONTAINERS: Final = 1 << 18  # arrays and objects of a body
_READER: Final = ThreadPoolExecutor(1, "ssd-reader")  # one at a time: they share the GIL with all others
_THREADS: Final = ThreadPoolExecutor(os.cpu_count(), "ssd-large")  # for what else is made of large bodies

P = ParamSpec("P")
T = TypeVar("T")


async def on_thread(large: bool, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a function on a thread. Requests with large bodies share a few, so that others never wait for those."""
    return await _run(_THREADS if large else None, lambda: function(*args, **kwargs))


async def _run(threads: ThreadPoolExecutor | None, function: Callable[[], T]) -> T:
    """With the context of the request."""
    return await asyncio.get_running_loop().run_in_executor(threads, copy_context().run, function)


def read_json(body: bytes) -> Any:
    """As json.loads, but other threads run meanwhile, and NaN and infinite numbers are refused: they are not JSON, and
    an answer could not repeat them."""
    text = body.decode(json.detect_encoding(body), "surrogatepass")
    _check_containers(text)
    return json.loads(text, parse_constant=_not_json, parse_float=_finite, parse_int=_integer)


def _check_containers(text: str) -> None:
    """Refuses more arrays and objects than json.loads reads in tenths of a second: it holds the GIL meanwhile, and each
    takes a microsecond with the garbage collections that they cause."""
    count = _containers(text)
    if count > MAX_CONTAINERS:  # with what is in strings
        outside = text.replace("\\\\", "").replace('\\"', "").split('"')[::2]
        count = _containers("".join(outside))
    if count > MAX_CONTAINERS:
        raise ApiError(400, f"the body has {count} arrays and objects; the limit is {MAX_CONTAINERS}: send fewer")


def _containers(text: str) -> int:
    return text.count("[") + text.count("{")


def _integer(text: str) -> int:
    """In place of `int`: where C calls Python, other threads get their turn."""
    return int(text)


def _finite(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _not_json(text)


def _not_json(constant: str) -> NoReturn:
    raise json.JSONDecodeError(f"{constant:.60} is not a finite number", "", 0)


class JsonRoute(APIRoute):
    """A route whose bodies are read by `read_json`, large ones on a thread, and whose ignored fields are counted."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()
        model: Any = None if self.body_field is None else self.body_field.field_info.annotation

        async def handle(request: Request) -> Response:
            server = request.app.state.server
            with reading(strict=server.options.strict_parameters) as ignored, renaming(ignored.names):
                try:
                    return await handler(_JsonRequest(request, model))
                except HTTPException as error:  # FastAPI makes one without a reason of whatever `json` raises
                    if isinstance(error.__cause__, (ApiError, RequestValidationError)):
                        raise error.__cause__ from None
                    raise
                finally:
                    server.ignored.add(ignored)

        return handle


class _JsonRequest(Request):
    """A body is JSON whatever its type says, as clients of Ollama need it; but not that of a page of another origin,
    which a browser sends without asking this server only if it claims to be something else."""

    def __init__(self, request: Request, model: type[BaseModel] | None) -> None:
        scope = request.scope
        if "origin" not in request.headers:
            others = [(name, value) for name, value in scope["headers"] if name != b"content-type"]
            scope = {**scope, "headers": [*others, (b"content-type", b"application/json")]}
        super().__init__(scope, request.receive)
        self._model = model

    async def json(self) -> Any:
        """The body; a large one is validated already, which FastAPI would do on the event loop."""
        body = await self.body()
        if self._model is None or not self.state.large:
            return read_json(body)
        return await _run(_READER, partial(_validated, self._model, body))


def _validated(model: type[BaseModel], body: bytes) -> BaseModel:
    try:
        return model.model_validate(read_json(body))
    except ValidationError as error:
        raise RequestValidationError([{**each, "loc": ("body", *each["loc"])} for each in error.errors()]) from error
