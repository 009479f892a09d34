"""Submitted requests as seen by their readers: threads (`Submission`) and asyncio tasks (`AsyncSubmission`).

The engine's thread calls a submission's `sink` with each delta; the reader takes them from a queue. Knows nothing of
the driver.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from queue import SimpleQueue
from typing import Final

from ssd.core import Delta, RequestOutput

Item = Delta | Exception  # an exception ends the request
Sink = Callable[[Item], object]  # called on the engine's thread: must not block

_LOOP_SHARE: Final = 0.25  # share of a core's time that an event loop may spend on reading streams
_MAX_DELAY_SECONDS: Final = 0.05  # longest time that an item waits for delivery


class _Handle:
    """A submitted request. Garbage collection of the handle aborts the request."""

    def __init__(self, request_id: str, abort: Callable[[str], object]) -> None:
        """`abort(request_id)` ends the request; it must be reentrant."""
        self.request_id = request_id
        self.output: RequestOutput | None = None  # once the request has ended
        self._abort = abort
        self._error: Exception | None = None
        self._finalizer = weakref.finalize(self, abort, request_id)
        self._finalizer.atexit = False

    @property
    def ended(self) -> bool:
        return self.output is not None or self._error is not None

    def abort(self) -> None:
        """Ends the request after the current round; its last delta still comes. Safe in a signal handler."""
        if not self.ended:
            self._abort(self.request_id)

    def _receive(self, item: Item) -> Delta:
        if isinstance(item, Exception):
            self._error = item
        else:
            self.output = item.output
        if self.ended:
            self._finalizer.detach()
        if isinstance(item, Exception):
            raise item
        return item

    def _complete_output(self) -> RequestOutput:
        if self._error is not None or self.output is None:
            raise self._error or AssertionError("the request has not ended")
        return self.output


class Submission(_Handle, Iterator[Delta]):
    """Iterates over the deltas of a request, waiting for each. `output`: at its end. For one thread at a time."""

    def __init__(self, request_id: str, abort: Callable[[str], object], check_process: Callable[[], object]) -> None:
        """`check_process` raises in a process in which no delta will ever arrive."""
        super().__init__(request_id, abort)
        self._check_process = check_process
        self._items: SimpleQueue[Item] = SimpleQueue()
        self.sink: Sink = self._items.put

    def __next__(self) -> Delta:
        if self.ended:
            raise StopIteration
        self._check_process()
        try:
            item = self._items.get()
        except BaseException:  # Ctrl-C
            self.abort()
            raise
        return self._receive(item)

    def result(self) -> RequestOutput:
        """Waits for the complete output. Raises EngineClosed or EngineFailed if there is none."""
        for _ in self:
            pass
        return self._complete_output()


class LoopDelivery:
    """Delivers items to the output queues of one event loop, with one wake-up for all that are pending.

    The event loop shares the interpreter with the engine's thread. When its readers need more than _LOOP_SHARE of a
    core (many streams, short rounds), items are delivered less often, and the output queues merge them.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Sink, Item]] = deque()
        self._scheduled = False  # `_deliver` will run
        self._delivered = self._cpu_seconds = 0.0  # time, and the event loop's CPU time, of the last delivery

    def send(self, put: Sink, item: Item) -> None:
        """Called on the engine's thread. RuntimeError if the event loop is closed."""
        if self._loop.is_closed():
            raise RuntimeError("the reader's event loop is closed")
        self._items.append((put, item))
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon_threadsafe(self._deliver_in_time, time.monotonic() + _MAX_DELAY_SECONDS)

    def _deliver_in_time(self, latest: float) -> None:
        used = time.thread_time() - self._cpu_seconds  # since the last delivery
        delay = min(self._delivered + used / _LOOP_SHARE, latest) - time.monotonic()
        if delay > 0:
            self._loop.call_later(delay, self._deliver_in_time, latest)
        else:
            self._deliver()

    def _deliver(self) -> None:
        self._scheduled = False  # first: an item that is sent from now on may be too late for the loop below
        self._delivered, self._cpu_seconds = time.monotonic(), time.thread_time()
        while self._items:
            put, item = self._items.popleft()
            put(item)


class _OutputQueue:
    """Items for an asyncio reader. Unread deltas of a sample are merged into one, which bounds the memory."""

    def __init__(self) -> None:
        self.done: asyncio.Future[RequestOutput | None] = asyncio.get_running_loop().create_future()
        self._deltas: dict[int, Delta] = {}  # by sample, the latest last
        self._error: Exception | None = None
        self._arrived = asyncio.Event()

    def put(self, item: Item) -> None:
        if isinstance(item, Exception):
            self._error = item
        else:
            delta = self._deltas.pop(item.index, None)
            if delta is not None:
                delta.extend(item)
            self._deltas[item.index] = delta or item
        if (isinstance(item, Exception) or item.output is not None) and not self.done.done():
            self.done.set_result(None if isinstance(item, Exception) else item.output)
        self._arrived.set()

    async def wait(self) -> None:
        """Until there is an item."""
        while not self._deltas and self._error is None:
            self._arrived.clear()
            await self._arrived.wait()

    async def get(self) -> Item:
        await self.wait()
        return self._deltas.pop(next(iter(self._deltas))) if self._deltas else self._error  # type: ignore[return-value]


class AsyncSubmission(_Handle, AsyncIterator[Delta]):
    """`Submission` for asyncio. Deltas that a slow reader has not read are merged, sample by sample."""

    def __init__(self, request_id: str, abort: Callable[[str], object], delivery: LoopDelivery) -> None:
        super().__init__(request_id, abort)
        self._queue = _OutputQueue()
        self.sink: Sink = partial(delivery.send, self._queue.put)

    @property
    def done(self) -> asyncio.Future[RequestOutput | None]:
        """The output once the request has ended, whether its deltas were read or not; None if the engine has failed."""
        return self._queue.done

    async def __anext__(self) -> Delta:
        if self.ended:
            raise StopAsyncIteration
        return self._receive(await self._queue.get())

    async def arrived(self, seconds: float) -> bool:
        """Whether there is a delta to read, after so many seconds at most."""
        try:
            async with asyncio.timeout(seconds):
                await self._queue.wait()
        except TimeoutError:
            return False
        return True

    async def result(self) -> RequestOutput:
        async for _ in self:
            pass
        return self._complete_output()
