"""Load on an OpenAI-compatible server: requests that arrive at random or a fixed number in flight, and their latencies.

Open loop: requests arrive as a Poisson process, whether or not earlier ones were answered, and latency counts from the
planned arrival. Closed loop: a fixed number of requests is in flight. Tokens are counted by the server's `usage`.
"""

from __future__ import annotations

import asyncio
import math
import random
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, Final

from ssd.bench.answers import NO_PROGRESS, Answer, Progress, Prompt, RequestSettings, percentiles
from ssd.bench.config import Requests
from ssd.bench.openai import ServerContender
from ssd.errors import ConfigError, ServerError

LATENCIES: Final = ("ttft", "tpot", "itl", "e2e")  # first token, per token after it, between two chunks, whole request
GOALS: Final = ("ttft", "tpot", "e2e")  # those that a single request has
_ERRORS_SHOWN: Final = 5

Row = dict[str, Any]


@dataclass(frozen=True)
class Load:
    """One point of a sweep."""

    request_rate: float = math.inf  # arrivals a second; inf: all at once
    concurrency: int | None = None  # most requests in flight; None: no limit

    def __post_init__(self) -> None:
        if not self.request_rate > 0:
            raise ConfigError(f"request_rate={self.request_rate}: must be above 0")
        if self.concurrency is not None and self.concurrency < 1:
            raise ConfigError(f"concurrency={self.concurrency}: must be at least 1")

    def __str__(self) -> str:
        rate = "" if math.isinf(self.request_rate) else f"{self.request_rate:g}/s"
        return ", ".join(filter(None, (rate, f"{self.concurrency} in flight" if self.concurrency else "")))

    def arrivals(self, count: int, seed: int) -> list[float]:
        """Seconds from the start to each arrival."""
        if math.isinf(self.request_rate):
            return [0.0] * count
        generator, when, found = random.Random(seed), 0.0, []
        for _ in range(count):
            found.append(when)
            when += generator.expovariate(self.request_rate)
        return found


@dataclass(frozen=True)
class Result:
    """A request and its answer, or why there is none. `began`: the time from which its latencies count."""

    began: float
    answer: Answer | None
    error: str = ""

    @property
    def latencies(self) -> dict[str, float]:
        """Seconds, by the names of GOALS; `tpot` for two tokens and more."""
        if self.answer is None or not self.answer.deliveries:
            return {}
        first, last = self.answer.deliveries[0][0], self.answer.deliveries[-1][0]
        found = {"ttft": first - self.began, "e2e": last - self.began}
        each = self.answer.seconds_per_token
        return found if each is None else found | {"tpot": each}

    def meets(self, goals: Mapping[str, float]) -> bool:
        """`goals` in milliseconds. A latency that a request does not have meets any goal."""
        latencies = self.latencies
        return bool(latencies) and all(1000 * latencies.get(name, 0.0) <= most for name, most in goals.items())


def sweep(
    servers: Seq[ServerContender],
    loads: Seq[Load],
    requests: Requests,
    goals: Mapping[str, float],
    progress: Progress = NO_PROGRESS,
) -> list[Row]:
    """One row per server and load."""
    wanted, rows = requests.draw(), []
    for server in servers:
        server.answer([wanted[0][0]], replace(wanted[0][1], max_new_tokens=8))  # warm-up, and an early failure
        for load in loads:
            ended = progress.begin(f"{server.name}, {load}", len(wanted))
            results = asyncio.run(answer_all(server, wanted, load, requests.seed, ended))
            rows.append({"server": server.name, "model": server.model} | figures(load, results, goals))
            progress.tell(f"{server.name}, {load}: {rows[-1]['output_throughput']:.1f} tokens/s")
    return rows


async def answer_all(
    server: ServerContender,
    wanted: Seq[tuple[Prompt, RequestSettings]],
    load: Load,
    seed: int,
    ended: Callable[[], object],
) -> list[Result]:
    places = asyncio.Semaphore(load.concurrency or len(wanted))
    start, open_loop = time.perf_counter(), not math.isinf(load.request_rate)
    async with server.connect() as client:

        async def one(prompt: Prompt, asked: RequestSettings, arrival: float) -> Result:
            await asyncio.sleep(start + arrival - time.perf_counter())
            async with places:
                began = start + arrival if open_loop else time.perf_counter()
                try:
                    return Result(began, await server.ask(client, prompt, asked))
                except ServerError as error:
                    return Result(began, None, str(error))
                finally:
                    ended()

        arrivals = load.arrivals(len(wanted), seed)
        return await asyncio.gather(*(one(*request, at) for request, at in zip(wanted, arrivals, strict=True)))


def figures(load: Load, results: Seq[Result], goals: Mapping[str, float]) -> Row:
    """Counts, throughput and latencies (milliseconds) of one load."""
    answers = [result.answer for result in results if result.answer is not None]
    ends = [answer.deliveries[-1][0] for answer in answers if answer.deliveries]
    seconds = max(ends) - min(result.began for result in results) if ends else 0.0
    written, read = sum(a.output_tokens for a in answers), sum(a.prompt_tokens for a in answers)
    errors = list(dict.fromkeys(result.error for result in results if result.error))
    row: Row = {
        "request_rate": None if math.isinf(load.request_rate) else load.request_rate,
        "concurrency": load.concurrency,
        "completed": len(answers),
        "failed": len(results) - len(answers),
        "errors": errors[:_ERRORS_SHOWN],
        "seconds": seconds,
        "input_tokens": read,
        "output_tokens": written,
        "request_throughput": _per(len(answers), seconds),
        "output_throughput": _per(written, seconds),
        "total_throughput": _per(written + read, seconds),
    }
    values = {name: [r.latencies[name] for r in results if name in r.latencies] for name in GOALS}
    values["itl"] = [gap for answer in answers for gap in answer.gaps]
    for name in LATENCIES:
        row[f"{name}_ms"] = percentiles(values[name])
    if goals:
        good = sum(result.meets(goals) for result in results)
        row |= {"goodput": _per(good, seconds), "good_share": good / len(results)}
    return row


def _per(count: float, seconds: float) -> float:
    return count / seconds if seconds else 0.0


def parse_goals(texts: Seq[str]) -> dict[str, float]:
    """`ttft:200,tpot:30` as {"ttft": 200.0, "tpot": 30.0}, in milliseconds."""
    found = {}
    for text in filter(None, (part.strip() for entry in texts for part in entry.replace(",", " ").split())):
        name, _, most = text.partition(":")
        try:
            found[name] = float(most)
        except ValueError:
            found[name] = math.nan
        if name not in GOALS or not found[name] > 0:
            raise ConfigError(f"goodput {text!r}: write {', '.join(GOALS)} with milliseconds, such as ttft:200,tpot:30")
    return found
