"""One of several servers of a model: an engine and its application in a process of its own, called by the proxy.

Ray Serve makes it, asks for its health and replaces it (`ssd.server.replicas.ray_serve`).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from typing import Any, Final

from prometheus_client.core import Metric
from starlette.types import Message, Scope

from ssd.config import EngineConfig
from ssd.errors import EngineFailed
from ssd.llm import LLM
from ssd.server.app import create_app
from ssd.server.generation import ServerState
from ssd.server.http import memory
from ssd.server.http.asgi import replayed
from ssd.server.options import ServerOptions
from ssd.server.playground.endpoints import state_of
from ssd.server.replicas.prefixes import Route

FAILED: Final = "ssd.engine_failed"  # type of a message that is not ASGI's: the request can be sent to another replica
HEALTH_CHECK_SECONDS: Final = memory.SECONDS
_MOST_PARTS: Final = 2000  # parts of streams per second, from all replicas: each costs the proxy up to 0.5 ms


class ServerReplica:
    """An engine behind the server's application."""

    def __init__(self, config: EngineConfig, options: ServerOptions, started: int, log_level: int) -> None:
        """`started`: when the proxy did, in seconds since the epoch."""
        from ray import serve

        logging.basicConfig(format="%(levelname)s %(message)s")
        logging.getLogger("ssd").setLevel(log_level)
        context = serve.get_replica_context()
        self._id, self._name = context.replica_id.unique_id, str(context.rank.rank)
        self._pause = context.world_size / _MOST_PARTS  # seconds for each request in flight
        self._llm = LLM(**vars(config))
        self._app = create_app(self._llm, options)
        self._state: ServerState = self._app.state.server
        self._state.started = started
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop refers to its tasks weakly

    async def answer(self, scope: Scope, body: bytes, route: Route) -> AsyncGenerator[list[Message]]:
        """The answer to a request, as ASGI messages that have gathered. The router has read `route`.

        The request ends when the caller cancels the call.
        """
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        whole = {"type": "http.request", "body": body, "more_body": False}
        gone = asyncio.Event()

        async def end() -> Message:
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._app(scope, replayed(whole, end), messages.put))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    if message["status"] >= 500 and self._llm.driver.failure is not None:
                        yield [{"type": FAILED, "reason": self._llm.driver.failure, "replica": self._id}]
                        return
                    message["user"] = scope["state"].get("user")
                gathered = [message]
                while not messages.empty() and (message := messages.get_nowait()) is not None:
                    gathered.append(message)
                yield gathered
                if message is None:
                    return
                await asyncio.sleep(self._pause * len(self._tasks))  # more gathers meanwhile
        finally:
            gone.set()

    async def metrics(self) -> tuple[str, list[Metric]]:
        """The replica's name and metrics."""
        return self._name, list(self._state.metrics.collect())

    async def state(self) -> dict[str, Any]:
        """`/playground/state` of this replica."""
        return state_of(self._state)

    async def check_health(self) -> None:
        """Called by Ray Serve every HEALTH_CHECK_SECONDS; a replica that raises is replaced."""
        if self._llm.driver.failure is not None:
            raise EngineFailed(self._llm.driver.failure)
        await memory.give_back()

    def __del__(self) -> None:
        """Called by Ray Serve at the end."""
        if hasattr(self, "_llm"):
            self._llm.close()
