"""What one client sends must not stall the others: how long a neighbour waits under attack, and the event loop.

The server is in a process of its own, and so are its interpreter and its threads. `python tests/server/test_neighbours.py`
prints the figures of every attack.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")
pytest.importorskip("llguidance")
httpx = pytest.importorskip("httpx")
from serve_process import MODEL, ServeProcess, serve

SECONDS = 3.0  # of an attack at least
PROPERTIES = {f"property{i}": {"type": "string"} for i in range(3000)}  # 110 kB, all of them optional
PRIMES = (7, 11, 13, 17, 19, 23)
ATTACKS: dict[str, tuple[int, dict[str, Any]]] = {  # requests at the same time, and their parameters; {} is a number
    "large schemas": (8, {"structured_outputs": {"json": {"type": "object", "title": "{}", "properties": PROPERTIES}}}),
    "small schemas that compile for minutes": (
        *(8,),
        {"structured_outputs": {"json": {"title": "{}", "allOf": [{"multipleOf": p, "type": "integer"} for p in PRIMES]}}},
    ),
    "a long literal": (1, {"structured_outputs": {"regex": "ab" * 65_000}, "max_tokens": 64}),
    "stop_token_ids": (1, {"stop_token_ids": [7] * 3_900_000}),
    "logit_bias": (1, {"logit_bias": {str(i): 1 for i in range(560_000)}}),
    "biases and stops of all tokens, 64 samples": (
        *(4,),
        {"logit_bias": {str(i): 1 for i in range(4000)}, "stop_token_ids": [*range(4000)], "n": 64, "max_tokens": 1},
    ),
}
NEIGHBOURS: dict[str, dict[str, Any]] = {
    "text": {"max_tokens": 2},
    "a grammar that is known": {"max_tokens": 2, "structured_outputs": {"regex": "[ab]+"}},
    "a new grammar": {"max_tokens": 2, "structured_outputs": {"regex": "[ab]{1,{}}"}},
}


@dataclass
class Longest:
    """Longest waits under an attack, in seconds, and the statuses of its answers."""

    waits: dict[str, float]
    statuses: list[int]


def request(parameters: dict[str, Any], number: int) -> bytes:
    text = json.dumps({"model": MODEL, "prompt": "Once upon a time", "max_tokens": 4, **parameters})
    return text.replace("{}", str(number)).encode()


def post(server: ServeProcess, body: bytes) -> int:
    headers = {"content-type": "application/json"}
    return int(httpx.post(f"{server.url}/v1/completions", content=body, headers=headers, timeout=120).status_code)


def attack(server: ServeProcess, name: str) -> Longest:
    count, parameters = ATTACKS[name]
    bodies = [request(parameters, number) for number in range(count)]
    attacking = threading.Event()
    attacking.set()
    longest = dict.fromkeys(("event loop", *NEIGHBOURS), 0.0)

    def watch(kind: str, ask: Callable[[int], object]) -> None:
        number = 1
        while attacking.is_set():
            begin = time.monotonic()
            ask(number)
            longest[kind] = max(longest[kind], time.monotonic() - begin)
            number += 1
            time.sleep(0.02)

    def watchers() -> Iterator[threading.Thread]:
        yield threading.Thread(target=watch, args=("event loop", lambda _: httpx.get(f"{server.url}/health", timeout=60)))
        for kind, parameters in NEIGHBOURS.items():
            body = lambda number, given=parameters: post(server, request(given, 1000 * len(name) + number))  # noqa: E731
            yield threading.Thread(target=watch, args=(kind, body))

    for kind in NEIGHBOURS.values():
        assert post(server, request(kind, 1)) == 200
    threads = list(watchers())
    for thread in threads:
        thread.start()
    end = time.monotonic() + SECONDS
    with ThreadPoolExecutor(count) as clients:
        statuses = list(clients.map(lambda body: post(server, body), bodies))
    time.sleep(max(0.0, end - time.monotonic()))
    attacking.clear()
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
    """Waits of seconds mean that something is computed where others wait for it."""
    found = attack(server, name)
    assert max(found.waits.values()) < 4, found
    assert set(found.statuses) <= {200, 400}, found


def main() -> None:
    with serve("--max-num-seqs", "64", "--no-access-log") as served:
        for name in ATTACKS:
            found = attack(served, name)
            waits = ", ".join(f"{kind}: {seconds:.2f}" for kind, seconds in found.waits.items())
            print(f"{name}: {waits}; statuses {sorted(set(found.statuses))}", flush=True)


if __name__ == "__main__":
    main()
