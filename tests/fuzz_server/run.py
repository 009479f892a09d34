"""Runs the fuzzer against a server in a process of its own, and checks what must hold at the end."""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import serve_process
from serve_process import MODEL, Held, ServeProcess, gauges, serve

from fuzz_server.mangled import CHAT, random_request
from fuzz_server.raw import exchange, status

OPTIONS = (
    *("--max-model-len", "128", "--max-num-seqs", "8"),  # little KV: its memory is taken when it is first used
    *("--read-timeout", "0.5", "--max-request-bytes", "1000000", "--no-access-log"),
)
SHARE_OF_SCHEMA = 0.05  # of the requests: schemathesis takes far longer to make one than the server to answer it
WARM_UP = 0.1  # of the requests, before the first measurement
FILLING = 32  # large bodies before that
CLIENTS = 32
TIMEOUT = 60.0  # seconds that an answer may take
SETTLE_SECONDS = 30.0
GROWTH = 32.0  # MiB of RSS that the server may have more at the end than after the warm-up


@dataclass
class Report:
    statuses: Counter[str] = field(default_factory=Counter)
    problems: list[str] = field(default_factory=list)
    before: Held | None = None  # after the warm-up
    after: Held | None = None
    seconds: float = 0.0
    failing: list[bytes] = field(default_factory=list)  # requests that can be sent again


def fuzz(
    requests: int,
    seed: int,
    seconds: float = math.inf,
    on_progress: Callable[[], object] = lambda: None,
    filling: int = FILLING,
) -> Report:
    """Sends `requests` requests, or as many as `seconds` allow."""
    report, start = Report(), time.monotonic()

    def sent() -> bool:
        """Called after every request: whether there is time for more."""
        on_progress()
        return time.monotonic() - start < seconds

    with serve(*OPTIONS) as server:
        asyncio.run(_warm_up(server))
        asyncio.run(_fill(server, filling))
        for part, share in enumerate((WARM_UP, 1 - WARM_UP)):
            by_schema = int(requests * share * SHARE_OF_SCHEMA)
            _send_by_schema(server, report, by_schema, seed + part, sent)
            asyncio.run(_send_mangled(server, report, int(requests * share) - by_schema, seed + part, sent))
            held = _settled(server, report)
            report.before, report.after = report.before or held, held
        report.seconds = time.monotonic() - start
        _compare(report)
        if (code := server.stop()) != 0:
            report.problems.append(f"the server's exit code is {code}")
        report.problems += [line for line in server.log.splitlines() if "Traceback" in line or "bug" in line]
    return report


async def _warm_up(server: ServeProcess) -> None:
    """Has the server make what it keeps: its event loop's threads, the tokenizer's (for long texts), and grammars'."""
    await _post(server, "/v1/completions", {"model": MODEL, "prompt": "x", "structured_outputs": {"regex": "[a-z]+"}})
    prompts = ["x " * 100_000, *["x " * 20_000] * 64]  # long enough to keep all threads busy
    await asyncio.gather(*(_post(server, "/tokenize", {"prompt": prompt}) for prompt in prompts))


async def _fill(server: ServeProcess, count: int) -> None:
    """Sends what makes the server's memory grow up to a limit: large bodies (each leaves holes in it), and grammars."""
    large = {"model": MODEL, "messages": CHAT * 24_000, "max_tokens": 1}
    for _ in range(count):
        await _post(server, "/v1/chat/completions", large)
    for number in range(8 * count):
        structured = {"json_schema": {"type": "object", "properties": {f"a{number}": {"type": "boolean"}}}}
        body = {"model": MODEL, "prompt": "x", "max_tokens": 1, "structured_outputs": structured}
        await _post(server, "/v1/completions", body)


async def _post(server: ServeProcess, path: str, body: object) -> None:
    content = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n"
    await exchange(server.url, f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content, TIMEOUT)


def _send_by_schema(server: ServeProcess, report: Report, count: int, seed: int, sent: Callable[[], bool]) -> None:
    from fuzz_server.schema import problems  # here: the rest does without schemathesis

    for problem in problems(server.url, count, seed):
        report.statuses["by schema"] += 1
        if problem is not None:
            report.problems.append(problem)
        if not sent():
            return


async def _send_mangled(server: ServeProcess, report: Report, count: int, seed: int, sent: Callable[[], bool]) -> None:
    draw = random.Random(seed)
    left: Iterator[bytes] = (random_request(draw) for _ in range(count))

    async def client() -> None:
        for request in left:
            problem = await _problem(server.url, request, report.statuses)
            if problem is not None:
                report.problems.append(f"{problem}: {request[:300]!r}")
                report.failing.append(request)
            if not sent():
                return

    await asyncio.gather(*(client() for _ in range(CLIENTS)))


async def _problem(url: str, request: bytes, statuses: Counter[str]) -> str | None:
    """What is wrong with the answer to a request, if anything."""
    try:
        answer = await exchange(url, request, TIMEOUT)
    except TimeoutError:
        return f"no answer within {TIMEOUT:g} seconds"
    except OSError as error:
        return f"the server cannot be reached: {error}"
    code = status(answer)
    statuses[str(code)] += 1
    if code is not None and code >= 500:
        return f"status {code}"
    if b"internal error" in answer:
        return "an internal error in a stream"
    return None


def _settled(server: ServeProcess, report: Report) -> Held:
    """What the server holds when nothing is in flight any more."""
    end = time.monotonic() + SETTLE_SECONDS
    while any(_in_flight(server).values()):
        if time.monotonic() > end:
            report.problems.append(f"requests or KV blocks are left: {_in_flight(server)}")
            break
        time.sleep(0.05)
    time.sleep(serve_process.GIVE_BACK_SECONDS)  # meanwhile the server closes connections by its read time-out
    return server.held()


def _in_flight(server: ServeProcess) -> dict[str, float]:
    metrics = gauges(httpx.get(f"{server.url}/metrics", timeout=TIMEOUT).text)
    return {name: metrics[name] for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")}


def _compare(report: Report) -> None:
    before, after = report.before, report.after
    assert before is not None
    assert after is not None
    report.problems += after.problems_since(before, GROWTH, "rss")


def replay(path: Path) -> str | None:
    """Sends the request of a file to a new server; what is wrong with the answer, if anything."""
    with serve(*OPTIONS) as server:
        problem = asyncio.run(_problem(server.url, path.read_bytes(), Counter()))
        return problem and f"{problem}\n{server.log}"
