"""Rounds of engines as discrete events: verifications, drafts, preparations, misses, arrivals.

Times of steps come in as functions of rows, acceptance as rates by position, hits as a rate. Knows nothing of models
and GPUs. A draft server with waiting work takes all of it in one run, as the engine batches branches.
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
Step = Callable[[int, int], float]  # seconds of a step of so many rows, of so many sequences


@dataclass(frozen=True)
class Times:
    """Seconds of everything that a round consists of."""

    verify: Step
    draft: Step  # that the target waits for, on the GPU of its own or the target's
    prepare: Step  # of branches
    beside: Step | None  # SSD on one GPU: what a step of a preparation adds to a verification; None: a GPU of its own
    prefill: float = 0.0  # of one prompt
    link: float = 0.0  # a message between target and draft, one way


@dataclass(frozen=True)
class Load:
    """What is decoded. `rate` None: an engine always has `batch` sequences; else arrivals a second of all engines."""

    batch: int
    tokens: int  # of an answer
    requests: int | None = None  # None: a fixed number of rounds, of batches that are always full
    rate: float | None = None


@dataclass(frozen=True)
class Rules:
    """How rounds are drafted and decided."""

    mode: Mode
    k: int
    rates: Seq[float]  # by position: probability that a draft token is accepted if those before it are
    hits: float
    budget: int
    backup: Literal["jit", "fast", "auto"] = "auto"
    spread: float = 0.0  # deviation of the sequences' log-odds of acceptance


@dataclass(eq=False)
class Sequence:
    """A request in the simulation."""

    arrived: float
    left: int  # tokens
    rates: list[float]
    draws: random.Random
    hit_draws: random.Random
    prompted: bool  # its prompt has been read
    drafted: bool = True  # its draft is as good as any; not: a sibling's, taken after a miss
    first: float = math.nan
    ended: float = math.nan

    def decide(self, rules: Rules) -> int:
        """Tokens of a round: the accepted ones, and the target's own."""
        accepted = 0
        if rules.mode != "ar" and self.drafted:
            while accepted < rules.k and self.draws.random() < self.rates[accepted]:
                accepted += 1
        return min(self.left, accepted + 1)


class Clock:
    """The queue of events, in order of time; equal times in order of their entry."""

    def __init__(self) -> None:
        self.now = 0.0
        self._order = itertools.count()
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, time: float, event: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._order), event))

    def after(self, seconds: float, event: Callable[[], None]) -> None:
        self.at(self.now + seconds, event)

    def run(self) -> None:
        while self._events:
            self.now, _, event = heapq.heappop(self._events)
            event()

    def stop(self) -> None:
        self._events.clear()


@dataclass
class DraftServer:
    """A draft model on hardware of its own. It runs all waiting work at once: the steps of the longest, all rows."""

    clock: Clock
    busy: float = 0.0  # seconds
    _waiting: list[tuple[Step, int, int, int, Callable[[], None]]] = field(default_factory=list)
    _running: bool = False

    def submit(self, step: Step, steps: int, rows: int, sequences: int, done: Callable[[], None]) -> None:
        self._waiting.append((step, steps, rows, sequences, done))
        if not self._running:
            self._running = True
            self.clock.at(self.clock.now, self._run)  # what is submitted at the same time is in the same run

    def _run(self) -> None:
        taken, self._waiting = self._waiting, []
        rows, sequences = sum(each[2] for each in taken), sum(each[3] for each in taken)
        seconds = max(steps * step(rows, sequences) for step, steps, _, _, _ in taken)
        self.busy += seconds

        def end() -> None:
            for *_, done in taken:
                done()
            self._running = bool(self._waiting)
            if self._running:
                self._run()

        self.clock.after(seconds, end)


@dataclass
class Totals:
    """What all engines have done."""

    rounds: int = 0
    tokens: int = 0
    decided: int = 0  # rounds of single sequences
    look_ups: int = 0
    hits: int = 0
    round_seconds: float = 0.0
    sequence_seconds: float = 0.0  # of rounds, times their sequences
    in_system: float = 0.0  # integral of the number of sequences that have arrived and not ended, over time
    ended: list[Sequence] = field(default_factory=list)


class Engine:
    """One target, and the rounds of its batch."""

    def __init__(self, world: World, server: DraftServer) -> None:
        self.world, self.clock, self.server = world, world.clock, server
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        self.busy = 0.0  # seconds of verifications
        self.idle = True
        self._parts = self._count = 0  # of the round: what it waits for, its sequences
        self._began = self._seconds = 0.0

    @property
    def load(self) -> int:
        return len(self.running) + len(self.waiting)

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)
        if self.idle:
            self.idle = False
            self.clock.at(self.clock.now, self.start)

    def start(self) -> None:
        """A round of everything that runs, with the prompts of what is new. SD writes its drafts first."""
        rules, times = self.world.rules, self.world.times
        while self.waiting and len(self.running) < self.world.load.batch:
            self.running.append(self.waiting.popleft())
        self.idle = not self.running
        if self.idle:
            return
        count = self._count = len(self.running)
        drafting = rules.k * times.draft(count, count) if rules.mode == "sd" else 0.0
        verifying = times.verify(count * (1 if rules.mode == "ar" else rules.k + 1), count)
        verifying += times.prefill * sum(not each.prompted for each in self.running)
        self.busy += verifying
        branches = self.world.branches(count)
        self._parts = 1
        if rules.mode == "ssd" and times.beside is not None:
            drafting = (rules.k + 1) * times.beside(branches, count)
        elif rules.mode == "ssd":
            self._parts = 2
            work = (times.prepare, rules.k + 1, branches, count, self._back)
            self.clock.after(times.link, lambda: self.server.submit(*work))
        self._began, self._seconds = self.clock.now, drafting + verifying
        self.clock.after(self._seconds, self._part)

    def _back(self) -> None:
        self.clock.after(self.world.times.link, self._part)

    def _part(self) -> None:
        """Verification or preparation has ended; what is decided goes on when both have."""
        self._parts -= 1
        if not self._parts:
            self._decide()

    def _decide(self) -> None:
        world, rules = self.world, self.world.rules
        decided = [(each, each.decide(rules)) for each in self.running]
        for sequence, tokens in decided:
            world.account(sequence, tokens)
        self.running = [each for each in self.running if each.left]
        world.refill(self)
        for each in self.running:
            each.drafted = rules.mode != "ssd" or each.hit_draws.random() < rules.hits
        misses = sum(not each.drafted for each in self.running)
        world.totals.look_ups += len(self.running)
        world.totals.hits += len(self.running) - misses
        world.totals.rounds += 1
        if world.over:
            self.clock.stop()
        elif misses and self._waiting_pays(misses):
            for each in self.running:
                each.drafted = True
            self._write(misses)
        else:
            self._end()

    def _end(self) -> None:
        seconds = self.clock.now - self._began
        self.world.totals.round_seconds += seconds
        self.world.totals.sequence_seconds += self._count * seconds
        self.start()

    def _waiting_pays(self, misses: int) -> bool:
        """The engine's own rule (docs/algorithm.md, *After a miss*), with one token after a sibling's draft."""
        rules, times = self.world.rules, self.world.times
        if rules.backup != "auto":
            return rules.backup == "jit"
        full = self.world.tokens_per_round
        return misses * (full - 1) * self._seconds > len(self.running) * full * rules.k * times.draft(misses, misses)

    def _write(self, misses: int) -> None:
        """Drafts of those that missed, while all wait."""
        times, k = self.world.times, self.world.rules.k

        def written() -> None:
            self.clock.after(times.link, self._end)

        if times.beside is not None:
            self.clock.after(k * times.draft(misses, misses), self._end)
            return
        self.clock.after(times.link, lambda: self.server.submit(times.draft, k, misses, misses, written))


class World:
    """Engines with their draft servers under a load, from the first event to the last."""

    def __init__(
        self, times: Times, load: Load, rules: Rules, engines: int = 1, servers: int | None = None, seed: int = 0
    ) -> None:
        self.times, self.load, self.rules, self.seed = times, load, rules, seed
        self.clock, self.totals = Clock(), Totals()
        self.servers = [DraftServer(self.clock) for _ in range(servers or engines)]
        self.engines = [Engine(self, self.servers[i % len(self.servers)]) for i in range(engines)]
        self._made, self._changed, self._inside = 0, 0.0, 0
        self._odds = _centred(rules)
        self.tokens_per_round = _harmonic(rules, self._odds)
        # A fixed number of rounds: enough for means, not more than a second takes.
        self._rounds = engines * max(60, min(2000, 40000 // (load.batch * engines)))

    def run(self) -> None:
        if self.load.rate is not None:
            arrivals = random.Random(f"arrivals {self.seed}")
            time = 0.0
            for _ in range(self.load.requests or 200):
                time += arrivals.expovariate(self.load.rate)
                self.clock.at(time, self._arrive)
        else:
            for engine in self.engines:
                self.refill(engine)
        self.clock.run()
        self._integrate(0)

    @property
    def over(self) -> bool:
        return self.load.requests is None and self.load.rate is None and self.totals.rounds >= self._rounds

    def branches(self, sequences: int) -> int:
        """Of a batch: at most 256, or one for each sequence."""
        return max(sequences, min(sequences * self.rules.budget, 256))

    def refill(self, engine: Engine) -> None:
        """Without arrivals, batches are full: with sequences at all places of their texts, or whole ones if a number
        of requests is asked for."""
        requests = self.load.requests
        while self.load.rate is None and engine.load < self.load.batch and (requests is None or self._made < requests):
            left = self.load.tokens
            if requests is None and not self.totals.rounds:
                left = 1 + left * engine.load // self.load.batch
            engine.add(self._make(left, prompted=True))

    def account(self, sequence: Sequence, tokens: int) -> None:
        sequence.prompted = True
        sequence.left -= tokens
        self.totals.tokens += tokens
        self.totals.decided += 1
        if math.isnan(sequence.first):
            sequence.first = self.clock.now
        if not sequence.left:
            sequence.ended = self.clock.now
            self.totals.ended.append(sequence)
            self._integrate(-1)

    def _arrive(self) -> None:
        engine = min(self.engines, key=lambda each: each.load)
        engine.add(self._make(self.load.tokens, prompted=False))

    def _make(self, tokens: int, *, prompted: bool) -> Sequence:
        """Sequences differ in how well they can be drafted: evenly spread quantiles, in an order that mixes them."""
        self._made += 1
        self._integrate(1)
        odds = self._odds + self.rules.spread * NormalDist().inv_cdf(_mixed(self._made))
        draws = (random.Random(f"{kind} {self.seed} {self._made}") for kind in ("accepted", "hit"))
        return Sequence(self.clock.now, tokens, _shifted(self.rules.rates, odds), *draws, prompted)

    def _integrate(self, change: int) -> None:
        self.totals.in_system += self._inside * (self.clock.now - self._changed)
        self._changed, self._inside = self.clock.now, self._inside + change


def _mixed(number: int) -> float:
    """The van der Corput sequence in base 2: 1/2, 1/4, 3/4, 1/8, …"""
    found, part = 0.0, 0.5
    while number:
        found, number, part = found + part * (number & 1), number >> 1, part / 2
    return found


def _shifted(rates: Seq[float], odds: float) -> list[float]:
    return [rate if rate in (0.0, 1.0) else 1 / (1 + (1 / rate - 1) * math.exp(-odds)) for rate in rates]


def _mean(rates: Seq[float]) -> float:
    return 1 + sum(math.prod(rates[: i + 1]) for i in range(len(rates)))


def _harmonic(rules: Rules, odds: float) -> float:
    """Tokens of a round, over the rounds of sequences of equal lengths."""
    if rules.mode == "ar":
        return 1.0
    each = (odds + rules.spread * NormalDist().inv_cdf((i + 0.5) / 32) for i in range(32))
    return 32 / sum(1 / _mean(_shifted(rules.rates, own)) for own in each)


def _centred(rules: Rules) -> float:
    """Log-odds to add to all rates, so that rounds have the mean that they would have if all sequences were alike."""
    low, high, wanted = -2.0, 2.0, _mean(rules.rates)
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if _harmonic(rules, middle) < wanted else (low, middle)
    return low
