"""The soak itself: clients at changing concurrency, drafters that are killed, and what must hold at the end."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Literal, Protocol

import httpx
import serve_process
from serve_process import DRAFT, MODEL, Held, gauges, serve

from soak.asks import Ask, Choice, long_ask, random_ask
from soak.clients import plain, slow, vanishing
from ssd import LLM
from ssd.server.app import create_app
from ssd.server.options import ServerOptions

Kind = Literal["plain", "vanishing", "slow"]
OPTIONS = (
    *("--mode", "ssd", "--draft", DRAFT, "--placement", "process"),
    *("--k", "2", "--budget", "4", "--max-model-len", "512"),
)
BLOCK = 20  # requests of each of the clients that work at the same time
CONCURRENCY = (1, 2, 4, 8, 16, 32, 48, 64)
KILL_SECONDS = 1.0
TIMEOUT = 120.0  # seconds that an answer may take
SETTLE_SECONDS = 60.0


@dataclass(frozen=True)
class Plan:
    requests: int = 20_000
    seed: int = 0
    warm_up: int = 1000  # requests before the first measurement, of `requests`
    filling: int = 90  # long prompts before that, so that all of the KV's memory is in use
    distinct: int = 300  # different requests among the plain ones
    vanishing: int = 200
    slow: int = 50
    growth: float = 16.0  # MiB of RSS and of PSS that the server may have more at the end than after the warm-up

    def kinds(self, draw: random.Random) -> list[Kind]:
        """Of all requests, shuffled."""
        num_plain = self.requests - self.vanishing - self.slow
        kinds: list[Kind] = ["plain"] * num_plain + ["vanishing"] * self.vanishing + ["slow"] * self.slow
        draw.shuffle(kinds)
        return kinds


class Target(Protocol):
    """A server, and what its process holds."""

    @property
    def url(self) -> str: ...
    def held(self) -> Held: ...
    def drafters(self) -> list[int]: ...


@dataclass
class Report:
    counts: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    before: Held | None = None  # after the warm-up
    after: Held | None = None
    seconds: float = 0.0
    metrics: dict[str, float] = field(default_factory=dict)


def soak(llm: LLM, plan: Plan, on_progress: Callable[[], object] = lambda: None) -> Report:
    """Runs a plan. The answers of `llm` are the right ones."""
    with serve(*OPTIONS) as server:
        report = drive(server, llm, plan, on_progress)
        if (code := server.stop()) != 0:
            report.problems.append(f"the server's exit code is {code}")
        report.problems += [line for line in server.log.splitlines() if "Traceback" in line or "bug" in line]
    if report.metrics["drafter_failures_total"] < 1 or report.counts["killed"] < 1:
        report.problems.append("no drafter was killed")
    return report


def drive(server: Target, llm: LLM, plan: Plan, on_progress: Callable[[], object] = lambda: None) -> Report:
    """Runs a plan on a server that is there."""
    draw = random.Random(plan.seed)
    asks = [random_ask(draw) for _ in range(plan.distinct)]
    longs = [long_ask(draw) for _ in range(5)]
    expected = asyncio.run(answers_alone(llm, [*asks, *longs]))
    report = Report()
    asyncio.run(_Run(server, plan, report, asks, longs, expected, draw, on_progress).run())
    return report


async def answers_alone(llm: LLM, asks: list[Ask]) -> dict[int, list[Choice]]:
    """What an engine without drafts writes for each request alone; by the request's identity."""
    app = create_app(llm, ServerOptions(served_model_name="tiny-llama", access_log=False))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://oracle") as client:
        return {id(ask): await plain(client, ask, stream=False) for ask in asks}


@dataclass
class _Run:
    server: Target
    plan: Plan
    report: Report
    asks: list[Ask]
    longs: list[Ask]
    expected: dict[int, list[Choice]]
    draw: random.Random
    on_progress: Callable[[], object]

    async def run(self) -> None:
        kinds = iter(self.plan.kinds(self.draw))
        await self._fill_kv()
        await self._blocks(islice(kinds, self.plan.warm_up), CONCURRENCY[-1:])  # starts all threads
        self.report.before = await self._settled()
        start = time.monotonic()
        async with _killing(self.server, self.report):
            await self._blocks(kinds, CONCURRENCY)
        self.report.seconds = time.monotonic() - start
        self.report.after = await self._settled()
        self._compare()

    async def _fill_kv(self) -> None:
        """On a CPU the memory of a KV block is taken when it is first used."""
        prompts = [[self.draw.randrange(300, 8000) for _ in range(480)] for _ in range(self.plan.filling)]
        async with _client(self.server) as client:
            bodies = ({"model": MODEL, "prompt": p, "max_tokens": 8, "ignore_eos": True} for p in prompts)
            for answer in await asyncio.gather(*(client.post("/v1/completions", json=body) for body in bodies)):
                answer.raise_for_status()

    async def _blocks(self, kinds: Iterator[Kind], concurrency: Sequence[int]) -> None:
        number = self.draw.choice(concurrency)
        while block := list(islice(kinds, BLOCK * number)):
            await self._block(block, number)
            number = self.draw.choice(concurrency)

    async def _block(self, kinds: list[Kind], concurrency: int) -> None:
        left = iter(kinds)

        async def work(client: httpx.AsyncClient) -> None:
            for kind in left:
                await self._one(client, kind)
                self.on_progress()

        async with _client(self.server) as client:
            await asyncio.gather(*(work(client) for _ in range(concurrency)))

    async def _one(self, client: httpx.AsyncClient, kind: Kind) -> None:
        ask = self.draw.choice(self.asks if kind == "plain" else self.longs)
        stream = self.draw.random() < 0.5
        try:
            async with asyncio.timeout(TIMEOUT):
                if kind == "vanishing":
                    await vanishing(client, ask, self.draw)
                    answer = None
                elif kind == "slow":
                    answer = await slow(self.server.url, ask)
                else:
                    answer = await plain(client, ask, stream=stream)
        except (ValueError, KeyError, OSError, httpx.HTTPError) as error:  # TimeoutError is an OSError
            self.report.problems.append(f"{kind} client: {error!r}, {ask}")
            return
        self.report.counts[kind] += 1
        if answer is not None:
            self.report.counts["tokens"] += sum(len(choice.token_ids) for choice in answer)
            if answer != self.expected[id(ask)]:
                self.report.problems.append(f"wrong answer, stream={stream}: {answer} to {ask}")

    async def _settled(self) -> Held:
        """What the server holds when its drafter works again and all clients are gone."""
        async with _client(self.server) as client:
            drafts = (await _metrics(client))["spec_decode_num_drafts_total"]
            end = time.monotonic() + SETTLE_SECONDS
            while (metrics := await _metrics(client))["spec_decode_num_drafts_total"] == drafts:
                await plain(client, self.longs[0], stream=True)
                if time.monotonic() > end:
                    self.report.problems.append("no drafter comes back")
                    break
            while any(
                metrics[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
            ):
                if time.monotonic() > end:
                    self.report.problems.append(f"requests or KV blocks are left: {metrics}")
                    break
                await asyncio.sleep(0.05)
                metrics = await _metrics(client)
            self.report.metrics = metrics
        await asyncio.sleep(serve_process.GIVE_BACK_SECONDS)  # meanwhile the server sees that connections are closed
        return self.server.held()

    def _compare(self) -> None:
        report, before, after = self.report, self.report.before, self.report.after
        assert before is not None
        assert after is not None
        report.problems += after.problems_since(before, self.plan.growth, "rss", "pss")


@asynccontextmanager
async def _killing(server: Target, report: Report) -> AsyncIterator[None]:
    """Meanwhile the drafter is killed every second; every other one only once it has drafted: a start takes longer."""
    spared: dict[int, float] = {}  # by process id: drafts before

    async def kill() -> None:
        async with _client(server) as client:
            while True:
                drafts = (await _metrics(client))["spec_decode_num_drafts_total"]
                for pid in server.drafters():
                    if drafts > spared.setdefault(pid, drafts if len(spared) % 2 == 0 else -1):
                        with suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                            report.counts["killed"] += 1
                await asyncio.sleep(KILL_SECONDS)

    task = asyncio.create_task(kill())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


def _client(server: Target) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=server.url, timeout=TIMEOUT, limits=limits)


async def _metrics(client: httpx.AsyncClient) -> dict[str, float]:
    return gauges((await client.get("/metrics")).text)
