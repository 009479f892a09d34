"""What one client sends must not stall the others: how long a neighbour waits under attack, and the event loop.

The server is a process of its own. Run as a script, with `tests` on PYTHONPATH, this prints the figures of all attacks.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("llguidance")

import httpx
from serve_process import MODEL, ServeProcess, serve

TIMEOUT = 120.0
SECONDS = 3.0  # of an attack at least
PROPERTIES = {f"p{i}": {"type": "string"} for i in range(3800)}  # 110 kB, all of them optional
NUMBERS = {"allOf": [{"type": "integer", "multipleOf": prime} for prime in (7, 11, 13, 17, 19, 23)]}
COMPLETIONS, EMBEDDINGS = "/v1/completions", "/v1/embeddings"
Attack = tuple[int, Callable[[], dict[str, Any]], str]  # requests at the same time, parameters ({} is a number), path
ATTACKS: dict[str, Attack] = {
    "large schemas": (
        8,
        lambda: {"structured_outputs": {"json": {"type": "object", "title": "{}", "properties": PROPERTIES}}},
        COMPLETIONS,
    ),
    "a long literal": (1, lambda: {"structured_outputs": {"regex": "ab" * 65_000}, "max_tokens": 64}, COMPLETIONS),
    "stop_token_ids": (1, lambda: {"stop_token_ids": [7] * 3_900_000}, COMPLETIONS),
    "logit_bias": (1, lambda: {"logit_bias": {str(i): 1 for i in range(560_000)}}, COMPLETIONS),
    "a bias for every token, 64 samples": (
        4,
        lambda: {"logit_bias": {str(i): 1 for i in range(4000)}, "n": 64},
        COMPLETIONS,
    ),
    "small schemas that compile for minutes": (
        8,
        lambda: {"structured_outputs": {"json": {"title": "{}", **NUMBERS}}},
        COMPLETIONS,
    ),
    "token ids": (4, lambda: {"prompt": [7] * 3_900_000}, COMPLETIONS),
    "lists of token ids": (4, lambda: {"prompt": [[7] * 1000] * 3900}, COMPLETIONS),
    "token ids to embed": (4, lambda: {"input": [7] * 3_900_000}, EMBEDDINGS),
    "short prompts": (4, lambda: {"input": [[7]] * 1_900_000}, EMBEDDINGS),
    "short texts": (4, lambda: {"input": ["a"] * 1_900_000}, EMBEDDINGS),
    "a long text": (8, lambda: {"input": "once upon a time " * 450_000}, EMBEDDINGS),
    "nested arrays": (4, lambda: {"prompt": [[[[]]]] * 950_000}, COMPLETIONS),
    "a long message": (
        8,
        lambda: {"messages": [{"role": "user", "content": "once upon a time " * 450_000}]},
        "/v1/chat/completions",
    ),
    "arrays in a message": (4, lambda: {"messages": [{"role": "user", "content": [[]] * 2_500_000}]}, "/v1/messages"),
}
NEIGHBOURS: dict[str, dict[str, Any]] = {
    "text": {"max_tokens": 2},
    "a grammar that is known": {"max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}},
    "a new grammar": {"max_tokens": 2, "structured_outputs": {"regex": "[ab]{1,9}{}?"}},
}


@dataclass
class Longest:
    """Longest waits under an attack, in seconds, and the statuses of its answers."""

    waits: dict[str, float]
    statuses: list[int]


def request(parameters: dict[str, Any], number: int, path: str = COMPLETIONS) -> bytes:
    more = {"prompt": "Once upon a time"} if path == COMPLETIONS else {}
    body = {"model": MODEL, **more, **({} if path == EMBEDDINGS else {"max_tokens": 4}), **parameters}
    return json.dumps(body, separators=(",", ":")).replace("{}", str(number)).encode()


def post(server: ServeProcess, body: bytes, path: str = COMPLETIONS) -> int:
    headers = {"content-type": "application/json"}
    return httpx.post(f"{server.url}{path}", content=body, headers=headers, timeout=TIMEOUT).status_code


def attack(server: ServeProcess, name: str) -> Longest:
    count, parameters, path = ATTACKS[name]
    bodies = [request(parameters(), number, path) for number in range(count)]
    over = threading.Event()
    longest: dict[str, float] = {}

    def watch(kind: str, ask: Callable[[int], int]) -> None:
        number = 1
        while not over.is_set():
            begin = time.monotonic()
            ask(number)
            longest[kind] = max(longest.get(kind, 0.0), time.monotonic() - begin)
            number += 1
            time.sleep(0.02)

    def neighbour(kind: str, number: int) -> int:
        return post(server, request(NEIGHBOURS[kind], 1000 * len(name) + number))

    asks: dict[str, Callable[[int], int]] = {kind: partial(neighbour, kind) for kind in NEIGHBOURS}
    for ask in asks.values():
        assert ask(0) == 200
    asks["event loop"] = lambda _: httpx.get(f"{server.url}/health", timeout=TIMEOUT).status_code
    threads = [threading.Thread(target=watch, args=item) for item in asks.items()]
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    try:
        with ThreadPoolExecutor(count) as clients:
            statuses = list(clients.map(partial(post, server, path=path), bodies))
        time.sleep(max(0.0, end - time.monotonic()))
    finally:
        over.set()
        for thread in threads:
            thread.join()
    return Longest(longest, statuses)


@pytest.fixture(scope="module")
def server() -> Iterator[ServeProcess]:
    with serve("--max-num-seqs", "64", "--no-access-log") as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_neighbours_do_not_wait_for_an_attack(server: ServeProcess, name: str) -> None:
    """Waits of many seconds mean that something is computed where others wait for it."""
    found = attack(server, name)
    assert max(found.waits.values()) < 8, found  # machines of tests are shared
    assert set(found.statuses) <= {200, 400}, found


def main() -> None:
    with serve("--max-num-seqs", "64", "--no-access-log") as served:
        for name in ATTACKS:
            if all(wanted in name for wanted in sys.argv[1:]):
                found = attack(served, name)
                waits = ", ".join(f"{kind}: {seconds:.2f}" for kind, seconds in found.waits.items())
                print(f"{name}: {waits}; statuses {sorted(set(found.statuses))}", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
