"""Servers inside the test process, on free loopback ports. Without the extra `serve`, importing this skips a test."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from ssd import LLM
from ssd.server.app import create_app
from ssd.server.options import ServerOptions
from ssd.server.run import Server


class Lazy:
    """A client's package, imported when it is first used: it takes seconds, and every worker collects all tests."""

    def __init__(self, name: str) -> None:
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed", allow_module_level=True)
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # pytest looks for those of fixtures in whatever a module has
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


openai: Any = Lazy("openai")
MODEL = "tiny-llama"  # its name in requests
DRAFT = SMALL = "tiny-llama-draft"  # what writes the texts: a sixth of the time a token
ROUNDED = {"draft": DRAFT, "draft_quantization": "int4"}  # so that some drafts of the model for itself are rejected
SPECULATION: dict[str, Any] = {
    "ar": None,
    "sd": {"mode": "sd", **ROUNDED},
    "ssd": {"mode": "ssd", **ROUNDED, "placement": "inline", "k": 3, "budget": 6},  # few branches: a CPU is slow
}


@dataclass(frozen=True)
class Served:
    """A running server."""

    llm: LLM
    url: str
    server: Server
    thread: threading.Thread

    def client(self, **options: Any) -> Any:
        return openai.OpenAI(base_url=f"{self.url}/v1", **{"api_key": "none", "max_retries": 0, **options})

    def async_client(self) -> Any:
        return openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0)

    @property
    def admission(self) -> Any:
        return self.server.config.app.state.server.admission  # type: ignore[union-attr]


@contextmanager
def serving(llm: LLM, *, send_buffer: int | None = None, **options: Any) -> Iterator[Served]:
    """A server of this LLM. `send_buffer`: bytes that the system keeps for a client that does not read."""
    app = create_app(llm, ServerOptions(served_model_name=MODEL, **options))
    with running(app, send_buffer=send_buffer) as (url, server, thread):
        yield Served(llm, url, server, thread)


class Impatient:
    """`asyncio` for uvicorn, which lets a tenth of a second pass before it ends: most of the time of some tests."""

    def __getattr__(self, name: str) -> Any:
        return getattr(asyncio, name)

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / 10)


@contextmanager
def running(app: Any, *, send_buffer: int | None = None) -> Iterator[tuple[str, Server, threading.Thread]]:
    """An application on a port of its own: its address, the server and its thread."""
    with socket.socket() as listener:
        if send_buffer is not None:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
        server = Server(app)
        thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
        thread.start()
        try:
            until(lambda: server.started)
            yield f"http://127.0.0.1:{port}", server, thread
        finally:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr("uvicorn.server.asyncio", Impatient())
                server.should_exit = True
                thread.join(20)
        assert not thread.is_alive()


def until(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it does not happen"
        time.sleep(0.005)
