"""Rounds of engines as discrete events: verifications, drafts, preparations, misses, arrivals.

Times of steps come in as functions of rows, acceptance as rates by position, hits as a rate. Knows nothing of models
and GPUs.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

Mode = Literal["ar", "sd", "ssd"]
Backup = Literal["auto", "jit", "fast"]
Step = Callable[[int, int], float]  # seconds of a step of so many rows, of so many sequences
_MOST_BRANCHES = 256  # of a batch, as in the engine


@dataclass(frozen=True)
class Setup:
    """What is decoded, how, and how long each part takes."""

    mode: Mode
    verify: Step
    draft: Step  # of the draft model, whether the target waits for it or not
    beside: Step | None = None  # SSD on one GPU: what a step of the draft adds to a verification; None: servers
    k: int = 0
    rates: Seq[float] = ()  # by position: probability that a draft token is accepted if those before it are
    spread: float = 0.0  # deviation of the sequences' log-odds of acceptance
    hits: float = 0.0  # share of drafts that `budget` branches of a sequence have prepared
    budget: int = 16
    replicas: int = 1  # draft models that share the outcomes
    fan_out: float = 0.0  # misses are branches ** -fan_out
    backup: Backup = "auto"
    link: float = 0.0  # seconds of a message between target and draft, one way
    prefill: float = 0.0  # seconds of a prompt
    batch: int = 1
    tokens: int = 128  # of an answer
    requests: int | None = None  # None: full batches for a fixed number of rounds; with `rate`: 200
    rate: float | None = None  # arrivals a second; None: all at once
    engines: int = 1
    servers: int = 1
    seed: int = 0

    def branches(self, sequences: int) -> int:
        """Rows of a preparation."""
        return max(sequences, min(sequences * self.budget, _MOST_BRANCHES))

    def hit_rate(self, sequences: int) -> float:
        more = self.replicas * self.branches(sequences) / sequences / self.budget
        return 1 - min(1.0, (1 - self.hits) * math.pow(more, -self.fan_out))

    def tokens_per_round(self, odds: float) -> float:
        """Over the rounds of sequences of equal lengths, whose log-odds are shifted by `odds` on average."""
        each = (_shifted(self.rates, odds + self.spread * NormalDist().inv_cdf((i + 0.5) / 32)) for i in range(32))
        return 32 / sum(1 / _mean(rates) for rates in each)

    def centre(self) -> float:
        """The shift with which rounds have as many tokens as if all sequences were alike."""
        low, high, wanted = -2.0, 2.0, _mean(self.rates)
        for _ in range(30):
            middle = (low + high) / 2
            low, high = (middle, high) if self.tokens_per_round(middle) < wanted else (low, middle)
        return low


def _mean(rates: Seq[float]) -> float:
    return 1 + sum(math.prod(rates[: i + 1]) for i in range(len(rates)))


def _shifted(rates: Seq[float], odds: float) -> list[float]:
    return [rate if rate in (0.0, 1.0) else 1 / (1 + (1 / rate - 1) * math.exp(-odds)) for rate in rates]


@dataclass(eq=False)
class Request:
    """A sequence in the simulation. Its draws are its own, so that modes see the same acceptance."""

    arrived: float
    left: int  # tokens
    rates: list[float]
    accepts: random.Random
    hits: random.Random
    prompted: bool  # its prompt has been read
    drafted: bool = True  # False: its draft is a sibling's, taken after a miss
    first: float = math.nan
    ended: float = math.nan

    def decide(self) -> int:
        """Tokens of a round: the accepted ones, and the target's own."""
        accepted = 0
        while self.drafted and accepted < len(self.rates) and self.accepts.random() < self.rates[accepted]:
            accepted += 1
        return min(self.left, accepted + 1)


class Clock:
    """The queue of events, in order of time; equal times in order of their entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self.now + seconds, next(self._order), event))

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def stop(self) -> None:
        self._events.clear()


class DraftServer:
    """A draft model on hardware of its own. It runs all waiting work at once: all rows, the steps of the longest."""

    def __init__(self, clock: Clock, step: Step) -> None:
        self.clock, self.step, self.busy = clock, step, 0.0
        self._waiting: list[tuple[int, int, int, Callable[[], None]]] = []
        self._running = False

    def submit(self, steps: int, rows: int, sequences: int, done: Callable[[], None]) -> None:
        self._waiting.append((steps, rows, sequences, done))
        if not self._running:
            self._running = True
            self.clock.after(0.0, self._run)  # what is submitted at the same time is in the same run

    def _run(self) -> None:
        taken, self._waiting = self._waiting, []
        self._running = bool(taken)
        if taken:
            steps, rows, sequences, done = zip(*taken, strict=True)
            seconds = max(steps) * self.step(sum(rows), sum(sequences))
            self.busy += seconds
            for each in done:
                self.clock.after(seconds, each)
            self.clock.after(seconds, self._run)


@dataclass
class Totals:
    """What all engines have done."""

    rounds: int = 0
    round_seconds: float = 0.0
    sequence_seconds: float = 0.0  # of rounds, times their sequences
    verify_seconds: float = 0.0
    tokens: int = 0
    decided: int = 0  # rounds of single sequences
    look_ups: int = 0
    hits: int = 0
    ended: list[Request] = field(default_factory=list)


class Engine:
    """One target, and the rounds of its batch."""

    def __init__(self, world: World, server: DraftServer) -> None:
        self.world, self.setup, self.clock, self.server = world, world.setup, world.clock, server
        self.running: list[Request] = []
        self.waiting: deque[Request] = deque()
        self._idle = True
        self._began = self._verifying = self._seconds = 0.0  # of the round; without waiting for missing drafts
        self._pending = 0  # verification and preparation

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, request: Request) -> None:
        self.waiting.append(request)
        if self._idle:
            self._idle = False
            self.clock.after(0.0, self._start)

    def _start(self) -> None:
        """A round of all that runs, with the prompts of what is new."""
        setup = self.setup
        while self.waiting and len(self.running) < setup.batch:
            self.running.append(self.waiting.popleft())
        count = len(self.running)
        self._idle = not count
        if self._idle:
            return
        verifying = setup.verify(count * (setup.k + 1), count)
        verifying += setup.prefill * sum(not each.prompted for each in self.running)
        branches, drafting = setup.branches(count), 0.0
        self._pending = 1
        if setup.mode == "sd":
            drafting = setup.k * setup.draft(count, count)
        elif setup.mode == "ssd" and setup.beside is not None:
            drafting = (setup.k + 1) * setup.beside(branches, count)
        elif setup.mode == "ssd":
            self._pending = 2
            self._ask(setup.k + 1, branches, count, self._part)
        self._began, self._verifying, self._seconds = self.clock.now, verifying, drafting + verifying
        self.clock.after(self._seconds, self._part)

    def _ask(self, steps: int, rows: int, sequences: int, then: Callable[[], None]) -> None:
        """Work of the server, with a message there and one back."""
        link = self.setup.link
        work = (steps, rows, sequences, lambda: self.clock.after(link, then))
        self.clock.after(link, lambda: self.server.submit(*work))

    def _part(self) -> None:
        self._pending -= 1
        if not self._pending:
            self._decide()

    def _decide(self) -> None:
        """Accepts, looks drafts up, and waits for those that are missing if that pays."""
        setup, totals, count = self.setup, self.world.totals, len(self.running)
        hits = setup.hit_rate(count)
        for request in self.running:
            self.world.account(request)
        self.running = [each for each in self.running if each.left]
        self.world.refill(self)
        for request in self.running:
            request.drafted = setup.mode != "ssd" or request.hits.random() < hits
        misses = sum(not each.drafted for each in self.running)
        totals.look_ups += len(self.running)
        totals.hits += len(self.running) - misses

        def end() -> None:
            totals.rounds += 1
            totals.verify_seconds += self._verifying
            totals.round_seconds += self.clock.now - self._began
            totals.sequence_seconds += count * (self.clock.now - self._began)
            if self.world.over:
                self.clock.stop()
            else:
                self._start()

        if not misses or not self._waiting_pays(misses):
            end()
            return
        for request in self.running:
            request.drafted = True
        if setup.beside is None:
            self._ask(setup.k, misses, misses, end)
        else:
            self.clock.after(setup.k * setup.draft(misses, misses), end)

    def _waiting_pays(self, misses: int) -> bool:
        """The engine's own rule (docs/algorithm.md, *After a miss*), with one token after a sibling's draft."""
        setup, full = self.setup, self.world.tokens_per_round
        if setup.backup != "auto":
            return setup.backup == "jit"
        waiting = setup.k * setup.draft(misses, misses)
        return misses * (full - 1) * self._seconds > len(self.running) * full * waiting


class World:
    """Engines with their draft servers under a load, from the first event to the last."""

    def __init__(self, setup: Setup) -> None:
        self.setup, self.clock, self.totals, self._made = setup, Clock(), Totals(), 0
        self.servers = [DraftServer(self.clock, setup.draft) for _ in range(setup.servers)]
        self.engines = [Engine(self, self.servers[i % setup.servers]) for i in range(setup.engines)]
        self._odds = setup.centre()
        self.tokens_per_round = setup.tokens_per_round(self._odds)
        # Enough rounds for means, and not more than a second takes.
        self._rounds = setup.engines * max(60, min(2000, 40000 // (setup.batch * setup.engines)))

    def run(self) -> None:
        if self.setup.rate is None:
            for engine in self.engines:
                self.refill(engine)
        else:
            arrivals, time = random.Random(f"arrivals {self.setup.seed}"), 0.0
            for _ in range(self.setup.requests or 200):
                time += arrivals.expovariate(self.setup.rate)
                self.clock.after(time, self._arrive)
        self.clock.run()

    @property
    def over(self) -> bool:
        return self.setup.requests is None and self.setup.rate is None and self.totals.rounds >= self._rounds

    def refill(self, engine: Engine) -> None:
        """Fills a batch, if requests do not arrive. Full batches begin with sequences at all places of their texts."""
        setup = self.setup
        while setup.rate is None and engine.load < setup.batch and self._made < (setup.requests or math.inf):
            begins = setup.requests is None and not self.totals.rounds
            engine.add(self._make(1 + setup.tokens * engine.load // setup.batch if begins else setup.tokens, True))

    def account(self, request: Request) -> None:
        """One round of a request."""
        tokens = request.decide()
        self.totals.tokens += tokens
        self.totals.decided += 1
        request.left -= tokens
        if math.isnan(request.first):
            request.prompted, request.first = True, self.clock.now
        if not request.left:
            request.ended = self.clock.now
            self.totals.ended.append(request)

    def _arrive(self) -> None:
        min(self.engines, key=lambda each: each.load).add(self._make(self.setup.tokens, False))

    def _make(self, tokens: int, prompted: bool) -> Request:
        """Requests differ in how well they can be drafted: evenly spread quantiles, in an order that mixes them."""
        self._made += 1
        odds = self._odds + self.setup.spread * NormalDist().inv_cdf(_mixed(self._made))
        accepts, hits = (random.Random(f"{kind} {self.setup.seed} {self._made}") for kind in ("accepts", "hits"))
        return Request(self.clock.now, tokens, _shifted(self.setup.rates, odds), accepts, hits, prompted)


def _mixed(number: int) -> float:
    """The van der Corput sequence in base 2: 1/2, 1/4, 3/4, 1/8, …"""
    return int(f"{number:b}"[::-1], 2) / (1 << number.bit_length())
