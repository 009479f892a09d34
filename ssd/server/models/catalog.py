"""The models of one server: loaded when a request asks for them, unloaded when they are idle or memory is needed.

Each has an engine, KV and an application of its own; nothing is shared between two of them. Loads and unloads are one
at a time, on another thread; all else is for the event loop's thread.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Final, Literal

import torch
from fastapi import FastAPI

from ssd.errors import ConfigError, NotEnoughMemory, one_line
from ssd.llm import LLM
from ssd.server.app import create_app
from ssd.server.errors import ApiError, no_model
from ssd.server.models.options import CatalogOptions, ServedModel
from ssd.server.options import TAG

log = logging.getLogger("ssd")

State = Literal["unloaded", "loading", "ready", "unloading", "failed"]
Loaded = tuple[LLM, FastAPI]
_NO_MEMORY: Final = (NotEnoughMemory, MemoryError, torch.OutOfMemoryError)
_SAME_FAILURE: Final = 10.0  # seconds for which a model that could not be loaded is not tried again


@dataclass(eq=False)
class Slot:
    """A model and what has become of it."""

    model: ServedModel
    state: State = "unloaded"
    loaded: Loaded | None = None
    error: str = ""  # why it could not be loaded
    waiting: int = 0  # requests that wait for its load
    users: int = 0  # requests that are served
    since: float = 0.0  # when its state changed
    last_used: float = 0.0
    keep_alive: float = -1.0  # of the last request: seconds for which it stays loaded after its last use; below 0: ever
    loads: int = 0
    loading: asyncio.Task[None] | None = field(default=None, repr=False)

    def become(self, state: State) -> None:
        self.state, self.since = state, time.monotonic()

    @property
    def expires(self) -> bool:
        """Whether it is unloaded some time after its last use."""
        return self.keep_alive >= 0 and not self.model.pinned

    @property
    def ready(self) -> bool:
        return self.state == "ready" and self.loaded is not None and self.loaded[0].driver.failure is None


def make(model: ServedModel) -> Loaded:
    """Loads a model; returns it with its application."""
    llm = LLM(model.config)
    try:
        return llm, create_app(llm, model.options)
    except BaseException:
        llm.close()
        raise


class Catalog:
    """The models by name; the first one is for requests that name none."""

    def __init__(
        self, models: Seq[ServedModel], options: CatalogOptions, load: Callable[[ServedModel], Loaded] = make
    ) -> None:
        self.options = options
        self.slots = {model.name: Slot(model) for model in models}
        self._load_model = load
        self._names = {name: slot for slot in self.slots.values() for name in (*slot.model.options.aliases,)}
        self._names |= self.slots
        if len(self._names) != sum(1 + len(model.options.aliases) for model in models):
            raise ConfigError("two models have the same name or alias: give each one its own")
        self._changes = asyncio.Lock()  # held while a model is loaded or unloaded
        self._idle = asyncio.Event()  # set when a model has no users any more
        self._tasks: set[asyncio.Task[None]] = set()  # the event loop refers to its tasks weakly

    def find(self, name: str | None) -> Slot:
        """The slot of a name or alias."""
        if name is None:
            return next(iter(self.slots.values()))
        slot = self._names.get(name) or self._names.get(name.removesuffix(TAG))
        if slot is None:
            raise no_model(name, [*self.slots])
        return slot

    @asynccontextmanager
    async def using(self, slot: Slot, keep_alive: float | None = None) -> AsyncIterator[FastAPI]:
        """The application of a model, which stays loaded meanwhile. Waits for its load; one that fails is an error.

        `keep_alive`: of this request, in place of the model's.
        """
        slot.waiting += 1
        try:
            while not slot.ready:
                if slot.loading is None:
                    slot.loading = self._started(self._load(slot))
                await asyncio.shield(slot.loading)
        finally:
            slot.waiting -= 1
            self._idle.set()  # it may be gone
        assert slot.loaded is not None
        slot.users += 1
        slot.keep_alive = slot.model.keep_alive if keep_alive is None else keep_alive
        try:
            yield slot.loaded[1]
        finally:
            slot.users -= 1
            slot.last_used = time.monotonic()
            if not slot.users:
                self._idle.set()
                self._expire_later(slot)

    async def unload(self, slot: Slot) -> None:
        """Unloads a model when the requests that it serves have ended; new ones wait for its next load."""
        async with self._changes:
            if slot.loaded is not None:
                slot.become("unloading")
            while slot.users:
                await self._next_idle()
            await self._close(slot)

    def preload(self, model: ServedModel) -> None:
        """Loads a model before there are requests."""
        slot = self.slots[model.name]
        slot.loaded = self._load_model(model)
        slot.loads += 1
        slot.become("ready")

    def close(self) -> None:
        """Unloads all models, after the last request."""
        for slot in self.slots.values():
            if slot.loaded is not None:
                slot.loaded[0].close()
                slot.loaded = None

    async def _load(self, slot: Slot) -> None:
        """Sets `slot.loaded`; ApiError if it cannot."""
        try:
            async with self._changes:
                if slot.state == "failed" and time.monotonic() - slot.since < _SAME_FAILURE:
                    raise _failed(slot)
                await self._close(slot)  # an engine that has failed
                slot.become("loading")
                slot.loaded = await self._made(slot)
                slot.loads += 1
                log.info("%s was loaded in %.1f s", slot.model.name, time.monotonic() - slot.since)
                slot.become("ready")
        finally:
            slot.loading = None

    async def _made(self, slot: Slot) -> Loaded:
        most = self.options.max_loaded_models
        try:
            while most is not None and sum(each.loaded is not None for each in self.slots.values()) >= most:
                if not await self._evict():
                    raise ConfigError(f"max_loaded_models={most}: all of them are pinned")
            while True:
                try:
                    return await asyncio.to_thread(self._load_model, slot.model)
                except _NO_MEMORY as error:
                    log.info("%s does not fit into the memory that is free: %s", slot.model.name, error)
                    if not await self._evict():
                        raise
        except Exception as error:
            slot.error = one_line(error)
            slot.become("failed")
            log.warning("%s could not be loaded: %s", slot.model.name, slot.error)
            raise _failed(slot) from error

    async def _evict(self) -> bool:
        """Unloads the model that was used least recently, when one is idle; False if none will ever be."""
        while others := [s for s in self.slots.values() if s.loaded is not None and not s.model.pinned]:
            if idle := [slot for slot in others if not slot.users and not slot.waiting]:
                await self._close(min(idle, key=lambda slot: slot.last_used))
                return True
            await self._next_idle()
        return False

    async def _next_idle(self) -> None:
        self._idle.clear()
        await self._idle.wait()

    async def _close(self, slot: Slot) -> None:
        loaded, slot.loaded = slot.loaded, None
        if loaded is not None:
            slot.become("unloading")
            await asyncio.to_thread(loaded[0].close)
            log.info("%s was unloaded", slot.model.name)
            slot.become("unloaded")

    def _expire_later(self, slot: Slot) -> None:
        if slot.expires:
            asyncio.get_running_loop().call_later(slot.keep_alive, self._expire, slot, slot.last_used)

    def _expire(self, slot: Slot, last_used: float) -> None:
        if slot.ready and not slot.users and slot.last_used == last_used:
            self._started(self._unload_unused(slot, last_used))

    async def _unload_unused(self, slot: Slot, last_used: float) -> None:
        """Unloads a model unless it has been used meanwhile: the load of another one may take minutes."""
        async with self._changes:
            if not slot.users and not slot.waiting and slot.last_used == last_used:
                await self._close(slot)

    def _started(self, work: object) -> asyncio.Task[None]:
        task: asyncio.Task[None] = asyncio.create_task(work)  # type: ignore[arg-type]
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # its waiters have got it, if there still are any


def _failed(slot: Slot) -> ApiError:
    return ApiError(500, f"model {slot.model.name!r} cannot be loaded: {slot.error}", code="model_load_failed")
