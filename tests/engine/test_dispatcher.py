"""Delivery of deltas to an event loop: at once, or less often when the event loop has too much to do."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from ssd.core import Delta
from ssd.engine import driver
from ssd.engine.driver import _Dispatcher

ROUND = 0.005  # seconds
ROUNDS, STREAMS = 200, 64


class SimulatedLoop:
    """An event loop whose time is simulated. Whatever is brought to a stream at a time costs `cost` seconds to read."""

    def __init__(self, cost: float) -> None:
        self.cost = cost
        self.now, self.cpu = 100.0, 3.0  # seconds
        self.read: list[tuple[float, int]] = []  # when, and of which round
        self._calls: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._numbers = itertools.count()
        self._woken: set[int] = set()  # streams, by the current call

    def is_closed(self) -> bool:
        return False

    def call_later(self, delay: float, call: Callable[..., None], *args: Any) -> None:
        heapq.heappush(self._calls, (self.now + delay, next(self._numbers), call, args))

    def call_soon_threadsafe(self, call: Callable[..., None], *args: Any) -> None:
        self.call_later(0.0, call, *args)

    def run_until(self, end: float) -> None:
        while self._calls and self._calls[0][0] <= end:
            at, _, call, args = heapq.heappop(self._calls)
            self.now = max(self.now, at)
            self._woken.clear()
            call(*args)
        self.now = max(self.now, end)

    def put(self, stream: int, item: Any) -> None:
        if stream not in self._woken:
            self._woken.add(stream)
            self.now, self.cpu = self.now + self.cost, self.cpu + self.cost
        self.read.append((self.now, item.index))

    # In place of the module `time`.
    def monotonic(self) -> float:
        return self.now

    def thread_time(self) -> float:
        return self.cpu


def delta(number: int) -> Delta:
    return Delta("request", number, [], "", [])


def play(loop: SimulatedLoop, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every round sends a delta to each stream; its index is the round's number."""
    monkeypatch.setattr(driver, "time", loop)
    dispatcher = _Dispatcher(loop)  # type: ignore[arg-type]
    for i in range(ROUNDS):
        for stream in range(STREAMS):
            dispatcher.send(partial(loop.put, stream), delta(i))
        loop.run_until(100.0 + (i + 1) * ROUND)


def test_deltas_that_cost_little_are_brought_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = SimulatedLoop(cost=10e-6)
    play(loop, monkeypatch)
    assert len(loop.read) == ROUNDS * STREAMS
    assert all(at - (100.0 + i * ROUND) < 0.001 for at, i in loop.read)


def test_an_event_loop_gets_its_share_of_a_core_and_loses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = SimulatedLoop(cost=100e-6)  # 6.4 ms for all streams, in rounds of 5 ms
    play(loop, monkeypatch)
    assert (loop.cpu - 3.0) / (loop.now - 100.0) == pytest.approx(driver._LOOP_SHARE, rel=0.2)
    loop.run_until(1000.0)
    assert [i for _, i in loop.read] == sorted(i for i in range(ROUNDS) for _ in range(STREAMS))
    assert all(at - (100.0 + i * ROUND) < 0.04 for at, i in loop.read)


def test_no_delta_waits_longer_than_the_limit_to_be_brought(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = SimulatedLoop(cost=0.0)
    monkeypatch.setattr(driver, "time", loop)
    dispatcher = _Dispatcher(loop)  # type: ignore[arg-type]
    dispatcher.send(partial(loop.put, 0), delta(0))
    loop.run_until(100.001)
    loop.cpu += 10.0  # the event loop did other things
    dispatcher.send(partial(loop.put, 0), delta(1))
    loop.run_until(200.0)
    assert loop.read[1][0] == pytest.approx(100.001 + driver._MAX_DELAY_SECONDS)
