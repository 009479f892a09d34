"""The driver: a thread that owns an engine and runs its loop.

Any thread and any asyncio task can submit requests and read their deltas. The engine's thread empties its inbox before
every round, and puts the deltas into the queues of their requests after it.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from ssd.core import Delta, RequestOutput, SamplingParams
from ssd.engine.engine import Engine
from ssd.engine.validation import check_request
from ssd.errors import EngineClosed, EngineFailed, RequestError
from ssd.kernels.cpu import release_threads

log = logging.getLogger("ssd")
T = TypeVar("T")
Item = Delta | Exception  # an exception ends the request
Sink = Callable[[Item], object]  # called on the engine's thread: must not block
Listener = Callable[[RequestOutput], object]  # the same

CLOSED: Final = "the engine was closed: load the model again"
FORKED: Final = (
    "this process was forked after the model was loaded, and has no engine: load the model here, or start processes "
    'with multiprocessing\'s method "spawn"'
)
_LOOP_SHARE: Final = 0.25  # share of a core that the readers of an event loop may use
_MAX_DELAY_SECONDS: Final = 0.05  # that items wait for a delivery at most
_EXIT_SECONDS: Final = 10.0  # wait for the current round when the interpreter exits


# --- commands in the inbox --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Add:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stream: bool
    sink: Sink
    arrival: float
    group: str


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(frozen=True)
class _Call:
    function: Callable[[Engine], Any]
    future: Future[Any]


class _Stop:
    pass


_Command = list[_Add] | _Abort | _Call | _Stop


# --- handles of requests ----------------------------------------------------------------------------------------------


class _Handle:
    """A submitted request. Garbage collection of the handle aborts the request."""

    def __init__(self, driver: Driver, request_id: str) -> None:
        self.request_id = request_id
        self.output: RequestOutput | None = None  # once the request has ended
        self._driver = driver
        self._error: Exception | None = None
        self._finalizer = weakref.finalize(self, driver._inbox.put, _Abort(request_id))  # SimpleQueue.put is reentrant
        self._finalizer.atexit = False

    @property
    def ended(self) -> bool:
        return self.output is not None or self._error is not None

    def abort(self) -> None:
        """Ends the request after the current round; its last delta still comes. Safe in a signal handler."""
        if not self.ended:
            self._driver._inbox.put(_Abort(self.request_id))

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
    """Iterates over the deltas of a request, waiting for each. For one thread at a time."""

    def __init__(self, driver: Driver, request_id: str) -> None:
        super().__init__(driver, request_id)
        self._items: SimpleQueue[Item] = SimpleQueue()
        self.sink: Sink = self._items.put

    def __next__(self) -> Delta:
        if self.ended:
            raise StopIteration
        self._driver.check_process()
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


class _Dispatcher:
    """Delivers items to the mailboxes of one event loop, waking it once for all that were sent meanwhile.

    The event loop shares the interpreter with the engine's thread. When its readers need more than _LOOP_SHARE of a
    core (many streams, short rounds), deliveries are less frequent, and mailboxes merge the items of each.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._items: deque[tuple[Sink, Item]] = deque()
        self._called = False  # `_deliver` will run
        self._delivered = self._cpu_seconds = 0.0  # time, and the event loop's CPU time, of the last delivery

    def send(self, put: Sink, item: Item) -> None:
        """On the engine's thread. RuntimeError if the event loop is closed."""
        if self._loop.is_closed():
            raise RuntimeError("the reader's event loop is closed")
        self._items.append((put, item))
        if not self._called:
            self._called = True
            self._loop.call_soon_threadsafe(self._deliver_in_time, time.monotonic() + _MAX_DELAY_SECONDS)

    def _deliver_in_time(self, latest: float) -> None:
        used = time.thread_time() - self._cpu_seconds  # since the last delivery
        delay = min(self._delivered + used / _LOOP_SHARE, latest) - time.monotonic()
        if delay > 0:
            self._loop.call_later(delay, self._deliver_in_time, latest)
        else:
            self._deliver()

    def _deliver(self) -> None:
        self._called = False  # first: what comes from now on may be too late for the loop below
        self._delivered, self._cpu_seconds = time.monotonic(), time.thread_time()
        while self._items:
            put, item = self._items.popleft()
            put(item)


class _Mailbox:
    """Items for an asyncio reader. Deltas of a sample that are not read in time become one: memory is bounded."""

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

    async def get(self) -> Item:
        while not self._deltas and self._error is None:
            self._arrived.clear()
            await self._arrived.wait()
        return self._deltas.pop(next(iter(self._deltas))) if self._deltas else self._error  # type: ignore[return-value]


class AsyncSubmission(_Handle, AsyncIterator[Delta]):
    """`Submission` for asyncio. Deltas that a slow reader has not read are merged, sample by sample."""

    def __init__(self, driver: Driver, request_id: str) -> None:
        super().__init__(driver, request_id)
        self._mailbox = _Mailbox()
        self.sink: Sink = partial(driver.dispatcher().send, self._mailbox.put)

    @property
    def done(self) -> asyncio.Future[RequestOutput | None]:
        """The output once the request has ended, whether its deltas were read or not; None if the engine has failed."""
        return self._mailbox.done

    async def __anext__(self) -> Delta:
        if self.ended:
            raise StopAsyncIteration
        return self._receive(await self._mailbox.get())

    async def result(self) -> RequestOutput:
        async for _ in self:
            pass
        return self._complete_output()


class Driver:
    """Owns an engine and its thread."""

    def __init__(self, engine: Engine) -> None:
        self.limits = engine.limits
        self._engine: Engine | None = engine
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._ids = itertools.count()
        self._pid = os.getpid()
        self._dispatchers = weakref.WeakValueDictionary[asyncio.AbstractEventLoop, _Dispatcher]()
        self._lock = threading.Lock()  # no _Add or _Call may follow _Stop
        self._listeners: list[Listener] = []
        loop = _Loop(engine, self._inbox, self._listeners)
        self._loop: _Loop | None = loop
        self._thread = threading.Thread(target=loop.run, name="ssd-engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._inbox.put, _Stop()).atexit = False
        _drivers.add(self)
        _threads.add(self._thread)

    @property
    def engine(self) -> Engine:
        """For reading (metrics, tokenizer) only; everything else goes through `call`."""
        if self._engine is None:
            raise EngineClosed(CLOSED)
        return self._engine

    @property
    def failure(self) -> str | None:
        """Why no request can be served any more; None while the engine works."""
        engine, loop = self._engine, self._loop
        return CLOSED if engine is None or loop is None else loop.failure or engine.failure

    def check(self, prompt_token_ids: Seq[int], params: SamplingParams) -> None:
        """Raises RequestError for a request that cannot be served."""
        try:
            check_request(prompt_token_ids, params, self.limits)
        except RequestError:
            self._inbox.put(_Call(_count_refusal, Future()))
            raise

    def submit(self, prompt_token_ids: Seq[int], params: SamplingParams, *, stream: bool = False) -> Submission:
        """Queues a request. With `stream` there is a delta for every round, otherwise one per sample at its end."""
        return self.submit_many([(prompt_token_ids, params)], stream=stream)[0]

    def submit_many(self, requests: Seq[tuple[Seq[int], SamplingParams]], *, stream: bool = False) -> list[Submission]:
        """Queues several requests for the same round. RequestError if one of them cannot be served."""
        for prompt, params in requests:
            self.check(prompt, params)
        return self.submit_checked(requests, stream=stream)

    def submit_checked(
        self, requests: Seq[tuple[Seq[int], SamplingParams]], *, stream: bool = False, group: str = ""
    ) -> list[Submission]:
        """`submit_many` of requests that `check` has passed. `group`: id of one that was made together with them."""
        submissions = [Submission(self, self._new_id()) for _ in requests]
        self._add(submissions, requests, stream, group)
        return submissions

    def submit_async(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        *,
        stream: bool = False,
        group: str = "",
        checked: bool = False,
    ) -> AsyncSubmission:
        """`submit` for asyncio. `group`: id of a request that was made together with it; `checked`: passed `check`."""
        if not checked:
            self.check(prompt_token_ids, params)
        submission = AsyncSubmission(self, self._new_id())
        self._add([submission], [(prompt_token_ids, params)], stream, group)
        return submission

    def on_end(self, listener: Listener) -> None:
        """Calls `listener` with the output of every request that ends from now on, whether it is read or not."""
        self._listeners.append(listener)

    def dispatcher(self) -> _Dispatcher:
        """The dispatcher of the running event loop."""
        loop = asyncio.get_running_loop()
        return self._dispatchers.setdefault(loop, _Dispatcher(loop))

    def call(self, function: Callable[[Engine], T]) -> T:
        """Calls function(engine) on the engine's thread, between two rounds; returns its result or raises its error."""
        if threading.current_thread() is self._thread:
            return function(self.engine)
        future: Future[T] = Future()
        self._post(_Call(function, future))
        return future.result()

    def close(self, timeout: float | None = None) -> None:
        """Ends all requests (with EngineClosed), the engine and its thread. Idempotent; for any thread."""
        if os.getpid() != self._pid:
            return  # all of it is the parent's
        with self._lock:
            if self._engine is not None:
                self._engine = self._loop = None
                self._inbox.put(_Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def check_process(self) -> None:
        """Raises EngineClosed in a forked process, which has no engine's thread: it would wait for ever."""
        if os.getpid() != self._pid:
            raise EngineClosed(FORKED)

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def _add(
        self,
        submissions: Seq[Submission | AsyncSubmission],
        requests: Seq[tuple[Seq[int], SamplingParams]],
        stream: bool,
        group: str = "",
    ) -> None:
        now, group = time.perf_counter(), group or (submissions[0].request_id if submissions else "")
        self._post(
            [
                _Add(submission.request_id, tuple(prompt), params, stream, submission.sink, now, group)
                for submission, (prompt, params) in zip(submissions, requests, strict=True)
            ]
        )

    def _post(self, command: _Command) -> None:
        self.check_process()
        release_threads()  # the caller's: it is about to wait
        with self._lock:
            if self._engine is None:
                raise EngineClosed(CLOSED)
            self._inbox.put(command)


# --- the engine's thread ----------------------------------------------------------------------------------------------


class _Loop:
    """The loop of the engine's thread. Refers to sinks only, so that dropped submissions are garbage collected."""

    def __init__(self, engine: Engine, inbox: SimpleQueue[_Command], listeners: list[Listener]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._sinks: dict[str, Sink] = {}
        self._listeners = listeners
        self.failure: str | None = None
        self._stopped = False

    def run(self) -> None:
        while not self._stopped:
            try:
                self._handle_inbox()
                self._step()
            except BaseException as error:  # errors of rounds are handled by the engine
                self.failure = f"the engine's loop failed, which is a bug: load the model again ({error!r})"
                log.error(self.failure)
                log.debug("how it failed", exc_info=error)
                self._end_all(EngineFailed)
        self.failure = CLOSED
        self._end_all(EngineClosed)
        try:
            self._engine.close()
        except Exception as error:
            log.warning("the engine could not be closed: %r", error)

    @property
    def _busy(self) -> bool:
        return self.failure is None and self._engine.has_work

    def _handle_inbox(self) -> None:
        """Handles all commands in the inbox; if the engine is idle, waits for one."""
        if not self._busy and self._inbox.empty():
            release_threads()
        for _ in range(max(self._inbox.qsize(), not self._busy)):
            self._handle(self._inbox.get())

    def _handle(self, command: _Command) -> None:
        match command:
            case list():
                for add in command:
                    self._add(add)
            case _Abort(request_id):
                self._engine.abort(request_id)
            case _Call(function, future):
                try:
                    future.set_result(function(self._engine))
                except BaseException as error:
                    future.set_exception(error)
            case _Stop():
                self._stopped = True

    def _add(self, add: _Add) -> None:
        try:
            if self.failure is not None:
                raise EngineFailed(self.failure)
            self._engine.add(
                add.prompt_token_ids,
                add.params,
                add.request_id,
                stream=add.stream,
                arrival=add.arrival,
                checked=True,
                group=add.group,
            )
        except Exception as error:
            self._deliver(add.sink, error)
        else:
            self._sinks[add.request_id] = add.sink

    def _step(self) -> None:
        if not self._stopped and self._busy:
            for delta in self._engine.step():
                if delta.output is not None:
                    self._notify(delta.output)
                find = self._sinks.get if delta.output is None else self._sinks.pop
                sink = find(delta.request_id, None)
                if sink is not None and not self._deliver(sink, delta):
                    self._engine.abort(delta.request_id)

    def _notify(self, output: RequestOutput) -> None:
        for listener in self._listeners:
            try:
                listener(output)
            except Exception as error:
                log.error("a listener failed, which is a bug", exc_info=error)

    def _deliver(self, sink: Sink, item: Item) -> bool:
        """False if the reader cannot take it (its event loop was closed)."""
        try:
            sink(item)
        except Exception as error:
            log.debug("a reader cannot be reached", exc_info=error)
            return False
        return True

    def _end_all(self, kind: type[EngineFailed | EngineClosed]) -> None:
        for sink in self._sinks.values():
            self._deliver(sink, kind(self.failure))
        self._sinks.clear()


def _count_refusal(engine: Engine) -> None:
    engine.metrics.num_refused += 1


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that computes while the interpreter shuts down may crash it."""
    for driver in list(_drivers):
        driver.close(_EXIT_SECONDS)
    for thread in list(_threads):  # of drivers that were garbage-collected just before
        thread.join(_EXIT_SECONDS)
