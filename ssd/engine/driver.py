"""The one way to drive an engine: a thread that owns it.

Any thread, and any asyncio task, submits requests and reads what is new of them. Between two rounds the engine's
thread takes everything out of its inbox; after each it hands the deltas to those who asked.
"""

from __future__ import annotations

import asyncio
import atexit
import itertools
import logging
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, Final, TypeVar

from ssd.core import Delta, RequestOutput, SamplingParams
from ssd.engine.engine import Engine
from ssd.engine.validation import check_request
from ssd.errors import EngineClosed, EngineFailed, RequestError

log = logging.getLogger("ssd")
T = TypeVar("T")
Item = Delta | Exception  # the exception is the end of a request
Sink = Callable[[Item], object]  # called on the engine's thread: it must not wait

CLOSED: Final = "the engine was closed: load the model again"
_EXIT_SECONDS: Final = 10.0  # that an interpreter waits at its end for the round that is under way


# --- what the inbox holds ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Add:
    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    stream: bool
    sink: Sink
    arrival: float


@dataclass(frozen=True)
class _Abort:
    request_id: str


@dataclass(frozen=True)
class _Call:
    function: Callable[[Engine], Any]
    future: Future[Any]


class _Stop:
    pass


_Order = list[_Add] | _Abort | _Call | _Stop


# --- what the caller holds --------------------------------------------------------------------------------------------


class _Handle:
    """One submitted request. Dropping it ends the request."""

    def __init__(self, driver: Driver, request_id: str) -> None:
        self.request_id = request_id
        self.output: RequestOutput | None = None  # the whole answer, once it has ended
        self._driver = driver
        self._error: Exception | None = None
        self._dropped = weakref.finalize(self, driver._inbox.put, _Abort(request_id))  # which is safe in a collection
        self._dropped.atexit = False

    @property
    def ended(self) -> bool:
        return self.output is not None or self._error is not None

    def abort(self) -> None:
        """Ends the request after the round that is under way; its last delta still comes. Safe in a signal handler."""
        if not self.ended:
            self._driver._inbox.put(_Abort(self.request_id))

    def _taken(self, item: Item) -> Delta:
        if isinstance(item, Exception):
            self._error = item
        else:
            self.output = item.output
        if self.ended:
            self._dropped.detach()
        if isinstance(item, Exception):
            raise item
        return item

    def _whole(self) -> RequestOutput:
        if self._error is not None:
            raise self._error
        assert self.output is not None
        return self.output


class Submission(_Handle, Iterator[Delta]):
    """The deltas of a request; waits for the next one. To be read by one thread at a time."""

    def __init__(self, driver: Driver, request_id: str) -> None:
        super().__init__(driver, request_id)
        self._items: SimpleQueue[Item] = SimpleQueue()
        self.sink: Sink = self._items.put

    def __next__(self) -> Delta:
        if self.ended:
            raise StopIteration
        try:
            item = self._items.get()
        except BaseException:  # Ctrl-C
            self.abort()
            raise
        return self._taken(item)

    def result(self) -> RequestOutput:
        """Waits for the whole answer. Raises EngineClosed or EngineFailed if there is none."""
        for _ in self:
            pass
        return self._whole()


class AsyncSubmission(_Handle, AsyncIterator[Delta]):
    """The same for a task of the running event loop."""

    def __init__(self, driver: Driver, request_id: str) -> None:
        super().__init__(driver, request_id)
        self._items: asyncio.Queue[Item] = asyncio.Queue()
        loop, put = asyncio.get_running_loop(), self._items.put_nowait
        self.sink: Sink = lambda item: loop.call_soon_threadsafe(put, item)

    async def __anext__(self) -> Delta:
        if self.ended:
            raise StopAsyncIteration
        return self._taken(await self._items.get())

    async def result(self) -> RequestOutput:
        async for _ in self:
            pass
        return self._whole()


class Driver:
    """Owns an engine and the thread that it runs on."""

    def __init__(self, engine: Engine) -> None:
        self.limits = engine.limits
        self._engine: Engine | None = engine
        self._inbox: SimpleQueue[_Order] = SimpleQueue()
        self._ids = itertools.count()
        self._lock = threading.Lock()  # so that nothing that is answered is posted after the stop
        self._thread = threading.Thread(target=_Loop(engine, self._inbox).run, name="ssd-engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._inbox.put, _Stop()).atexit = False
        _drivers.add(self)

    @property
    def engine(self) -> Engine:
        """To look at (metrics, tokenizer); what changes it, or must not see half a round, goes through `call`."""
        if self._engine is None:
            raise EngineClosed(CLOSED)
        return self._engine

    def check(self, prompt_token_ids: Seq[int], params: SamplingParams) -> None:
        """Raises RequestError when a request can never be served."""
        try:
            check_request(prompt_token_ids, params, self.limits)
        except RequestError:
            self._inbox.put(_Call(_count_refusal, Future()))
            raise

    def submit(self, prompt_token_ids: Seq[int], params: SamplingParams, *, stream: bool = False) -> Submission:
        """With `stream` there is a delta for every round, otherwise one for each sample when it has ended."""
        return self.submit_many([(prompt_token_ids, params)], stream=stream)[0]

    def submit_many(self, requests: Seq[tuple[Seq[int], SamplingParams]], *, stream: bool = False) -> list[Submission]:
        """They wait for the same next round. RequestError if one of them can never be served."""
        for prompt, params in requests:
            self.check(prompt, params)
        submissions = [Submission(self, self._new_id()) for _ in requests]
        self._add(submissions, requests, stream)
        return submissions

    def submit_async(
        self, prompt_token_ids: Seq[int], params: SamplingParams, *, stream: bool = False
    ) -> AsyncSubmission:
        """`submit` for a coroutine."""
        self.check(prompt_token_ids, params)
        submission = AsyncSubmission(self, self._new_id())
        self._add([submission], [(prompt_token_ids, params)], stream)
        return submission

    def call(self, function: Callable[[Engine], T]) -> T:
        """The function's result, or its error; it is called with the engine, on its thread, between two rounds."""
        if threading.current_thread() is self._thread:
            return function(self.engine)
        future: Future[T] = Future()
        self._post(_Call(function, future))
        return future.result()

    def close(self, timeout: float | None = None) -> None:
        """Ends all requests (EngineClosed), the engine and its thread. Safe to call twice, and from any thread."""
        with self._lock:
            if self._engine is not None:
                self._engine = None
                self._inbox.put(_Stop())
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def _add(
        self,
        submissions: Seq[Submission | AsyncSubmission],
        requests: Seq[tuple[Seq[int], SamplingParams]],
        stream: bool,
    ) -> None:
        now = time.perf_counter()
        self._post(
            [
                _Add(submission.request_id, tuple(prompt), params, stream, submission.sink, now)
                for submission, (prompt, params) in zip(submissions, requests, strict=True)
            ]
        )

    def _post(self, order: _Order) -> None:
        with self._lock:
            if self._engine is None:
                raise EngineClosed(CLOSED)
            self._inbox.put(order)


# --- the engine's thread ----------------------------------------------------------------------------------------------


class _Loop:
    """Knows the sinks of the requests only, so a submission that is dropped is collected."""

    def __init__(self, engine: Engine, inbox: SimpleQueue[_Order]) -> None:
        self._engine = engine
        self._inbox = inbox
        self._sinks: dict[str, Sink] = {}
        self._failure: str | None = None
        self._stopped = False

    def run(self) -> None:
        while not self._stopped:
            try:
                self._obey_all()
                self._step()
            except BaseException as error:  # not of a round: that is the engine's
                self._failure = f"the engine's loop failed, which is a bug: load the model again ({error!r})"
                log.error(self._failure)
                log.debug("how it failed", exc_info=error)
                self._end_all(EngineFailed)
        self._failure = CLOSED
        self._end_all(EngineClosed)
        try:
            self._engine.close()
        except Exception as error:
            log.warning("the engine could not be closed: %r", error)

    @property
    def _busy(self) -> bool:
        return self._failure is None and self._engine.has_work

    def _obey_all(self) -> None:
        """All that the inbox holds now; with nothing else to do, waits until it holds something."""
        for _ in range(max(self._inbox.qsize(), not self._busy)):
            self._obey(self._inbox.get())

    def _obey(self, order: _Order) -> None:
        match order:
            case list():
                for add in order:
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
            if self._failure is not None:
                raise EngineFailed(self._failure)
            self._engine.add(add.prompt_token_ids, add.params, add.request_id, stream=add.stream, arrival=add.arrival)
        except Exception as error:
            self._hand_out(add.sink, error)
        else:
            self._sinks[add.request_id] = add.sink

    def _step(self) -> None:
        if not self._stopped and self._busy:
            for delta in self._engine.step():
                find = self._sinks.get if delta.output is None else self._sinks.pop
                sink = find(delta.request_id, None)
                if sink is not None and not self._hand_out(sink, delta):
                    self._engine.abort(delta.request_id)

    def _hand_out(self, sink: Sink, item: Item) -> bool:
        """Whether anybody took it: the event loop of an asynchronous reader may have ended."""
        try:
            sink(item)
        except Exception as error:
            log.debug("a reader is gone", exc_info=error)
            return False
        return True

    def _end_all(self, kind: type[EngineFailed | EngineClosed]) -> None:
        for sink in self._sinks.values():
            self._hand_out(sink, kind(self._failure))
        self._sinks.clear()


def _count_refusal(engine: Engine) -> None:
    engine.metrics.num_refused += 1


_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that is still computing when the interpreter goes away may crash it."""
    for driver in list(_drivers):
        driver.close(_EXIT_SECONDS)
