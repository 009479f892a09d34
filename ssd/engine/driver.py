"""The driver: a thread that owns an engine and runs its loop.

Any thread and any asyncio task can submit requests and read their deltas (`ssd.engine.submission`). The engine's thread
runs the commands in its inbox before every round, and puts the deltas into the queues of their requests after it.
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
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from queue import SimpleQueue
from typing import Final, TypeVar

from ssd.constraints.grammars import Grammar
from ssd.constraints.structured import StructuredOutput
from ssd.core import RequestOutput, SamplingParams
from ssd.decoding.observer import RoundObserver
from ssd.engine.engine import Engine
from ssd.engine.submission import AsyncSubmission, Item, LoopDelivery, Sink, Submission
from ssd.engine.validation import CheckedRequest, check_length, check_request
from ssd.errors import EngineClosed, EngineFailed, RequestError
from ssd.execution.threads import ThreadController

log = logging.getLogger("ssd")
T = TypeVar("T")
Listener = Callable[[RequestOutput], object]  # called on the engine's thread: must not block
Asked = tuple[Seq[int], SamplingParams] | CheckedRequest  # prompt and parameters, or what `Driver.check` returns

CLOSED: Final = "the engine was closed: load the model again"
FORKED: Final = (
    "this process was forked after the model was loaded, and has no engine: load the model here, or start processes "
    'with multiprocessing\'s method "spawn"'
)
_EXIT_SECONDS: Final = 10.0  # wait for the current round when the interpreter exits


class Driver:
    """Owns an engine and its thread."""

    def __init__(self, engine: Engine, threads: ThreadController | None = None) -> None:
        """`threads`: of an engine that computes on a CPU."""
        self.limits = engine.limits
        self._engine: Engine | None = engine
        self._inbox: SimpleQueue[_Command] = SimpleQueue()
        self._ids = itertools.count()
        self._pid = os.getpid()
        self._deliveries: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, LoopDelivery]
        self._deliveries = weakref.WeakValueDictionary()
        self._lock = threading.Lock()  # no request and no call may follow the stop
        self._listeners: list[Listener] = []
        loop = _Loop(engine, self._inbox, self._listeners, threads)
        self._loop: _Loop | None = loop
        self._thread = threading.Thread(target=loop.run, name="ssd-engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, self._inbox.put, _Loop.stop).atexit = False
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

    def check(
        self, prompt_token_ids: Seq[int], params: SamplingParams, grammar: Grammar | None = None
    ) -> CheckedRequest:
        """Raises RequestError for a request that cannot be served. `grammar`: from `compiled`; else it waits for it."""
        with self._counting_refusals():
            return check_request(prompt_token_ids, params, self.limits, grammar)

    def check_length(self, num_tokens: int, *, more: bool = False) -> None:
        """Raises PromptTooLong for a prompt of so many tokens that cannot be served. `more`: it may have more."""
        with self._counting_refusals():
            check_length(num_tokens, self.limits, more=more)

    async def compiled(self, params: SamplingParams) -> Grammar | None:
        """The compiled grammar of structured output, if any, for asyncio; RequestError if there can be none."""
        if self.limits.grammars is None or not isinstance(params.structured, StructuredOutput):
            return None
        with self._counting_refusals():
            return await asyncio.wrap_future(self.limits.grammars.compiled(params.structured))

    @contextmanager
    def _counting_refusals(self) -> Iterator[None]:
        try:
            yield
        except RequestError:
            self._inbox.put(_Loop.count_refusal)
            raise

    def submit(self, prompt_token_ids: Seq[int], params: SamplingParams, *, stream: bool = False) -> Submission:
        """Queues a request. With `stream` there is a delta for every round, otherwise one per sample at its end."""
        return self.submit_many([(prompt_token_ids, params)], stream=stream)[0]

    def submit_many(self, requests: Seq[Asked], *, stream: bool = False, group: str = "") -> list[Submission]:
        """Queues several requests for the same round. RequestError if one of them cannot be served.

        `group`: id of a request that was made together with them.
        """
        checked = [asked if isinstance(asked, CheckedRequest) else self.check(*asked) for asked in requests]
        submissions = [Submission(self._new_id(), self.abort, self._check_process) for _ in requests]
        self._add(submissions, checked, stream, group)
        return submissions

    def submit_async(
        self, prompt_token_ids: Seq[int], params: SamplingParams, *, stream: bool = False
    ) -> AsyncSubmission:
        """`submit` for asyncio. It may wait for a grammar: `submit_checked` does not."""
        return self.submit_checked(self.check(prompt_token_ids, params), stream=stream)

    def submit_checked(self, checked: CheckedRequest, *, stream: bool = False, group: str = "") -> AsyncSubmission:
        """Queues a request that `check` has returned, for asyncio; `group` as in `submit_many`."""
        submission = AsyncSubmission(self._new_id(), self.abort, self._delivery())
        self._add([submission], [checked], stream, group)
        return submission

    def abort(self, request_id: str) -> None:
        """Ends a request after the current round, if it still runs. Safe in a signal handler and a finalizer."""
        self._inbox.put(lambda loop: loop.abort(request_id))  # SimpleQueue.put is reentrant

    def on_end(self, listener: Listener) -> None:
        """Calls `listener` with the output of every request that ends from now on, whether it is read or not."""
        self._listeners.append(listener)

    def _delivery(self) -> LoopDelivery:
        """The delivery of items to the running event loop."""
        loop = asyncio.get_running_loop()
        return self._deliveries.setdefault(loop, LoopDelivery(loop))

    def call(self, function: Callable[[Engine], T]) -> T:
        """Calls function(engine) on the engine's thread, between two rounds; returns its result or raises its error."""
        if threading.current_thread() is self._thread:
            return function(self.engine)
        future: Future[T] = Future()
        self._post(lambda loop: loop.call(function, future))
        return future.result()

    @contextmanager
    def observing(self, observer: RoundObserver) -> Iterator[None]:
        """Tells the observer of all rounds inside of the context."""
        self.call(lambda engine: engine.round.observers.append(observer))
        try:
            yield
        finally:
            self.call(lambda engine: engine.round.observers.remove(observer))

    def close(self, timeout: float | None = None) -> None:
        """Ends all requests (with EngineClosed), the engine and its thread. Idempotent; for any thread."""
        if os.getpid() != self._pid:
            return  # engine and thread are the parent's
        with self._lock:
            if self._engine is not None:
                self._engine = self._loop = None
                self._inbox.put(_Loop.stop)
        if threading.current_thread() is not self._thread:
            self._thread.join(timeout)

    def _check_process(self) -> None:
        """Raises EngineClosed in a forked process, which has no engine's thread: it would wait for ever."""
        if os.getpid() != self._pid:
            raise EngineClosed(FORKED)

    def _new_id(self) -> str:
        return f"request-{next(self._ids)}"

    def _add(
        self,
        submissions: Seq[Submission | AsyncSubmission],
        requests: Seq[CheckedRequest],
        stream: bool,
        group: str,
    ) -> None:
        arrival, group = time.perf_counter(), group or (submissions[0].request_id if submissions else "")
        added = [  # without the submissions, which are garbage-collected when nobody reads them
            (submission.request_id, checked, submission.sink)
            for submission, checked in zip(submissions, requests, strict=True)
        ]
        self._post(lambda loop: loop.add(added, stream, arrival, group))

    def _post(self, command: _Command) -> None:
        self._check_process()
        with self._lock:
            if self._engine is None:
                raise EngineClosed(CLOSED)
            self._inbox.put(command)


# --- the engine's thread ----------------------------------------------------------------------------------------------


class _Loop:
    """The loop of the engine's thread. Refers to sinks only, so that dropped submissions are garbage collected."""

    def __init__(
        self,
        engine: Engine,
        inbox: SimpleQueue[_Command],
        listeners: list[Listener],
        threads: ThreadController | None,
    ) -> None:
        self._engine = engine
        self._threads = threads
        self._inbox = inbox
        self._sinks: dict[str, Sink] = {}
        self._listeners = listeners
        self.failure: str | None = None
        self._stopped = False

    def run(self) -> None:
        while not self._stopped:
            try:
                self._run_commands()
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

    # --- commands -----------------------------------------------------------------------------------------------------

    def add(
        self,
        requests: Seq[tuple[str, CheckedRequest, Sink]],
        stream: bool,
        arrival: float,
        group: str,
    ) -> None:
        """`requests`: id, request and sink of each."""
        for request_id, checked, sink in requests:
            try:
                if self.failure is not None:
                    raise EngineFailed(self.failure)
                self._engine.add_checked(checked, request_id, stream=stream, arrival=arrival, group=group)
            except Exception as error:
                self._deliver(sink, error)
            else:
                self._sinks[request_id] = sink

    def abort(self, request_id: str) -> None:
        self._engine.abort(request_id)

    def call(self, function: Callable[[Engine], T], future: Future[T]) -> None:
        try:
            future.set_result(function(self._engine))
        except BaseException as error:
            future.set_exception(error)

    def count_refusal(self) -> None:
        self._engine.metrics.num_refused += 1

    def stop(self) -> None:
        self._stopped = True

    # ------------------------------------------------------------------------------------------------------------------

    @property
    def _busy(self) -> bool:
        return self.failure is None and self._engine.has_work

    def _run_commands(self) -> None:
        """Runs all commands in the inbox; if the engine is idle, waits for one."""
        for _ in range(max(self._inbox.qsize(), not self._busy)):
            self._inbox.get()(self)

    def _step(self) -> None:
        if not self._stopped and self._busy:
            cores = self._engine.round.drafter.cores
            with self._threads.adapted(cores) if self._threads is not None else nullcontext():
                deltas = self._engine.step()
            for delta in deltas:
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


_Command = Callable[[_Loop], object]  # runs on the engine's thread, between two rounds
_drivers: weakref.WeakSet[Driver] = weakref.WeakSet()
_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    """A thread that computes while the interpreter shuts down may crash it."""
    for driver in list(_drivers):
        driver.close(_EXIT_SECONDS)
    for thread in list(_threads):  # those whose driver was garbage-collected just before
        thread.join(_EXIT_SECONDS)
