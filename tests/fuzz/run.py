"""Runs a case through the driver, as users do, and compares what comes out with the oracle.

Calls, aborts and faults happen between two rounds, on the engine's thread, so a case always runs in the same way; the
calling thread reads the answers meanwhile, and may be interrupted in it. (Only a draft in another process has times of
its own.)
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from fakes import wait_until_idle
from random_requests import MAX_LEN, check_empty

from fuzz.case import Call, Case
from fuzz.faults import Faults
from fuzz.oracle import Oracle, check_answer, check_deltas
from ssd import LLM, RequestOutput, SamplingParams
from ssd.core import Delta
from ssd.engine.engine import Engine
from ssd.engine.submission import Submission
from ssd.errors import ConfigError, EngineFailed

MOST_ROUNDS = 5000
HANG_SECONDS = 60.0
TICK_SECONDS = 0.05
LAST = Call([1, 2, 3, 4, 5], SamplingParams(max_new_tokens=8, logprobs=1))  # is still served after everything


class Invalid(Exception):
    """No engine can be configured like that."""


def run(case: Case, oracle: Oracle) -> Counter[str]:
    """Runs a case; returns what it covered. Raises whatever is wrong, mostly AssertionError."""
    with _open(case, oracle) as llm, _watchdog():
        player = Player(case, llm)
        player.play()
        for i, call in enumerate(case.calls):
            try:
                output = player.outputs[i]
                lost = output.request_id in player.faults.lost
                check_answer(output, oracle.answer(case, call), left=i in player.left, lost=lost)
                check_deltas(player.deltas[i], output.samples)
            except AssertionError as error:
                raise AssertionError(f"call {i}: {error}") from error
        last = llm.generate(LAST.prompt, LAST.params)[0]
        check_answer(last, oracle.answer(case, LAST), left=False, lost=False)
        wait_until_idle(llm.driver)
        llm.driver.call(check_empty)
        return player.covered()


@contextlib.contextmanager
def _open(case: Case, oracle: Oracle) -> Iterator[LLM]:
    models, speculation = oracle.paths(case.model), case.speculation
    if speculation:
        speculation = speculation | {"draft": models.drafts.get(speculation["draft"], speculation["draft"])}
    fixed: dict[str, Any] = {"device": "cpu", "dtype": case.dtype, "max_model_len": MAX_LEN}
    try:
        llm = LLM(models.target, speculation=speculation or None, **fixed, **case.options)
    except ConfigError as error:
        raise Invalid(str(error)) from error
    try:
        yield llm
    finally:
        llm.driver.close(timeout=10)


@contextlib.contextmanager
def _watchdog() -> Iterator[None]:
    """Raises in the calling thread when a case takes far too long.

    The timer ticks more often: a signal that comes just before a thread waits is seen when another one comes.
    """
    deadline = time.monotonic() + HANG_SECONDS

    def tick(number: int, frame: FrameType | None) -> None:
        assert time.monotonic() < deadline, f"nothing has come for {HANG_SECONDS} s"

    before = signal.signal(signal.SIGALRM, tick)
    signal.setitimer(signal.ITIMER_REAL, TICK_SECONDS, TICK_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Player:
    """Submits a case's calls and makes its events happen; keeps every delta and every answer."""

    def __init__(self, case: Case, llm: LLM) -> None:
        self.case = case
        self.driver, self.engine = llm.driver, llm.engine
        self.faults = Faults(self.engine)
        self.deltas: defaultdict[int, list[Delta]] = defaultdict(list)
        self.outputs: dict[int, RequestOutput] = {}
        self.left: set[int] = set()  # calls that were aborted, dropped or interrupted before their end
        self.seen: Counter[str] = Counter()  # events
        self._number = 0  # of the round
        self._agenda = sorted(self._plan(), key=lambda entry: entry[0])
        self._calls: dict[str, int] = {}  # by request id
        self._submissions: dict[int, Submission] = {}
        self._read: set[int] = set()  # calls that the calling thread is done with
        self._queues: list[weakref.ref[Any]] = []
        self._error: BaseException | None = None  # of the engine's thread
        self._begun = False
        self._reading: int | None = None  # by the calling thread
        self._caught = threading.Event()  # the interrupt that was sent
        self._done = threading.Event()

    # --- the calling thread -------------------------------------------------------------------------------------------

    def play(self) -> None:
        self._step = self.engine.step
        self.engine.step = self._watched_step  # type: ignore[method-assign]
        self.engine.round.run_ahead = self.case.run_ahead
        try:
            self._wait()
            wait_until_idle(self.driver)
        except EngineFailed as error:
            raise self._error or error from error
        if self._error is not None:
            raise self._error
        assert self.outputs.keys() == set(range(len(self.case.calls)))
        self._submissions.clear()
        assert not any(queue() is not None for queue in self._queues), "the driver keeps a reader"
        self.engine.step = self._step  # type: ignore[method-assign]

    def _wait(self) -> None:
        """Reads all answers, and goes on where an interrupt was planned."""
        while True:
            try:
                self._caught.set()  # the next interrupt may come
                return self._read_all()
            except KeyboardInterrupt:
                if self._caught.is_set():
                    raise  # it is the user's
                if self._reading is not None:
                    self._read.add(self._reading)
                    self._leave(self._reading)

    def _read_all(self) -> None:
        self._reading = None
        if not self._begun:
            self._begun = True
            self.driver.call(self._begin)
        for i in sorted(range(len(self.case.calls)), key=lambda i: self.case.calls[i].arrival):
            if i in self._read or self.case.calls[i].drop:
                continue
            while i not in self._submissions:
                if self._done.wait(0.001):
                    return  # something is wrong
            self._reading = i
            deltas = list(self._submissions[i])
            assert deltas == self.deltas[i], f"call {i}: the driver has changed the deltas"
            self._read.add(i)
            self._reading = None
        while not self._done.wait(0.001):
            self.driver.call(lambda engine: None)  # raises if the engine's loop has failed

    def covered(self) -> Counter[str]:
        case, metrics = self.case, self.engine.metrics
        failed = [o for o in self.outputs.values() if o.error is not None and o.request_id not in self.faults.lost]
        happened = {
            "run-ahead": case.run_ahead,
            case.dtype: True,
            "bundled models": case.model.startswith("tiny"),
            "structured output": any(call.params.structured is not None for call in case.calls),
            "rejection rule": case.speculation.get("acceptance") == "rejection",
            "preemption": metrics.num_preemptions,
            "prefix cache hit": metrics.cached_prompt_tokens,
            "drafts accepted": metrics.spec_decode_num_accepted_tokens,
            "prepared drafts hit": sum(metrics.ssd_hits_after),
            "abort": any(call.abort is not None and not call.drop for call in case.calls),
            "dropped stream": any(call.abort is not None and call.drop for call in case.calls),
            "failed request": metrics.num_failed,
            "no token to choose": failed,
            "other samples go on": any(len({s.finish_reason for s in output.samples}) > 1 for output in failed),
            "drafter failure": metrics.drafter_failures,
            **self.seen,
        }
        counts = {"requests": len(case.calls), "tokens": metrics.output_tokens, "rounds": metrics.num_rounds}
        return Counter({case.mode: 1} | {name: 1 for name, yes in happened.items() if yes} | counts)

    # --- the engine's thread ------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._error = error
            self._done.set()
            raise

    def _begin(self, engine: Engine) -> None:
        with self._reporting():
            self._go_on()

    def _watched_step(self) -> list[Delta]:
        with self._reporting():
            deltas = self._step()
            self.engine.check()
            for delta in deltas:
                self._record(delta)
            self._number += 1
            assert self._number < MOST_ROUNDS, "requests are not served"
            self._go_on()
        return deltas

    def _record(self, delta: Delta) -> None:
        i = self._calls[delta.request_id]
        assert i not in self.outputs, f"call {i} was answered twice"
        self.deltas[i].append(delta)
        if delta.output is not None:
            self.outputs[i] = delta.output

    def _plan(self) -> Iterator[tuple[int, Callable[[], None]]]:
        for i, call in enumerate(self.case.calls):
            yield call.arrival, lambda i=i, call=call: self._submit(i, call)  # type: ignore[misc]
            if call.abort is not None:
                yield call.arrival + call.abort, lambda i=i: self._leave(i)  # type: ignore[misc]
        for event in self.case.events:
            yield event.round, lambda event=event: self._happen(event.kind, event.choice)  # type: ignore[misc]

    def _go_on(self) -> None:
        """Does what is due after this round; while nothing runs, rounds pass at once."""
        while self._agenda and (self._agenda[0][0] <= self._number or len(self.outputs) == len(self._calls)):
            self._number, act = max(self._number, self._agenda[0][0]), self._agenda.pop(0)[1]
            act()
        if not self._agenda and len(self.outputs) == len(self.case.calls):
            self.faults.end()
            self._done.set()

    def _submit(self, i: int, call: Call) -> None:
        submission = self.driver.submit(call.prompt, call.params, stream=call.stream)
        self._queues.append(weakref.ref(submission._items))
        self._calls[submission.request_id] = i
        self._submissions[i] = submission

    def _leave(self, i: int) -> None:
        if i not in self.outputs:
            self.left.add(i)
        if self.case.calls[i].drop:
            del self._submissions[i]
        else:
            self._submissions[i].abort()

    def _happen(self, kind: str, choice: int) -> None:
        self.seen[kind] += 1
        if kind == "interrupt":
            self._interrupt()
        else:
            getattr(self.faults, kind)(random.Random(choice))

    def _interrupt(self) -> None:
        """Ctrl-C in the calling thread; the engine waits until that has seen it."""
        self._caught.clear()
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
        assert self._caught.wait(10), "an interrupt was not seen"
