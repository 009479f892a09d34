"""The server's fuzzer: a short run passes, and it finds planted defects. `make fuzz-server` is the long one."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import serve_process
from fuzz_server import run
from fuzz_server.mangled import BODIES, random_request
from fuzz_server.raw import exchange, status
from live_server import SMALL, Served, serving, until
from serve_process import CAN_BE_MEASURED, Held

from ssd import LLM

ANSWER = b"HTTP/1.1 %s\r\ncontent-length: 2\r\n\r\nok"


@pytest.fixture(scope="module")
def fragile() -> Iterator[Served]:
    """With the limits of the server that is fuzzed."""
    options = {"max_model_len": 128, "max_num_seqs": 8}
    with LLM(SMALL, device="cpu", **options) as llm, serving(llm, read_timeout=0.5, max_request_bytes=10**6) as served:
        yield served


def test_a_server_survives_broken_requests(fragile: Served, caplog: pytest.LogCaptureFixture) -> None:
    report = run.Report()
    asyncio.run(run._send_mangled(fragile, report, 150, 1, lambda: True))  # type: ignore[arg-type]
    assert report.problems == []
    assert report.statuses["200"] > 10
    assert report.statuses["400"] > 50
    until(lambda: not any(run._in_flight(fragile).values()))  # type: ignore[arg-type]
    assert not [record for record in caplog.records if record.exc_info]


@pytest.mark.slow  # schemathesis takes ten seconds to draw them
def test_a_server_keeps_to_its_schema(fragile: Served) -> None:
    """One valid and one invalid request of every kind."""
    pytest.importorskip("schemathesis")
    report = run.Report()
    run._send_by_schema(fragile, report, 1, 1, lambda: True)  # type: ignore[arg-type]
    assert report.problems == []
    assert report.statuses["by schema"] > 10


@pytest.mark.slow
@pytest.mark.skipif(not CAN_BE_MEASURED, reason="what a process holds is read from /proc")
def test_a_server_under_fire_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process of its own."""
    pytest.importorskip("schemathesis")
    monkeypatch.setattr(serve_process, "GIVE_BACK_SECONDS", 1.0)
    monkeypatch.setattr(run, "GROWTH", 128.0)  # MiB: it is still warming up, and has not given freed memory back
    report = run.fuzz(300, seed=1, filling=0)
    assert report.problems == []
    assert report.statuses["by schema"] > 10


def test_requests_are_the_same_for_the_same_seed_and_reach_every_endpoint() -> None:
    first, again = ([random_request(random.Random(seed)) for seed in range(400)] for _ in range(2))
    assert first == again
    lines = Counter(request.partition(b" HTTP/")[0] for request in first)
    assert {b"POST " + path.encode() for path, _ in BODIES} <= set(lines)


@pytest.mark.parametrize(
    ("answer", "problem"),
    [
        (ANSWER % b"200 OK", None),
        (ANSWER % b"400 Bad Request", None),
        (b"", None),
        (ANSWER % b"500 Internal Server Error", "status 500"),
        (
            ANSWER.replace(b"ok", b"internal error").replace(b"2\r", b"14\r") % b"200 OK",
            "an internal error in a stream",
        ),
        (None, "no answer within 0.2 seconds"),
    ],
)
def test_a_server_that_fails_or_hangs_is_found(
    monkeypatch: pytest.MonkeyPatch, answer: bytes | None, problem: str | None
) -> None:
    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        if answer is not None:
            writer.write(answer)
            writer.close()

    async def ask() -> str | None:
        async with await asyncio.start_server(handle, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await run._problem(f"http://127.0.0.1:{port}", b"GET / HTTP/1.1\r\n\r\n", Counter())

    monkeypatch.setattr(run, "TIMEOUT", 0.2)
    assert asyncio.run(ask()) == problem


@pytest.mark.parametrize("after", [Held(9, 9, 100, 0), Held(8, 10, 100, 0), Held(8, 9, 140, 0)])
def test_what_a_server_leaves_behind_is_found(after: Held) -> None:
    report = run.Report(before=Held(8, 9, 100, 0), after=after)
    run._compare(report)
    assert len(report.problems) == 1


@pytest.mark.parametrize(
    ("request_line", "expected"),
    [(b"GET /health HTTP/1.1", 200), (b"POST /health HTTP/1.1", 405), (b"GET /v1/completions HTTP/1.1", 405)],
)
def test_an_answer_is_read_to_its_end(served: Served, request_line: bytes, expected: int) -> None:
    """Over a connection that stays open: its length says where it ends."""
    answer = asyncio.run(exchange(served.url, request_line + b"\r\nHost: x\r\n\r\n", 4.0))
    assert status(answer) == expected
    assert answer.endswith(b"}")


def test_the_schema_knows_the_shapes_of_errors_and_streams(served: Served) -> None:
    """No 422 of FastAPI's own, which this server never sends."""
    schema: dict[str, Any] = served.server.config.app.openapi()  # type: ignore[union-attr]
    for path, operations in schema["paths"].items():
        [operation] = operations.values()
        assert set(operation["responses"]) == {"200", "4XX", "5XX"}, path
        shapes = {"/v1/messages": "MessagesErrorAnswer", "/api/": "OllamaErrorAnswer"}
        shape = next((shape for start, shape in shapes.items() if path.startswith(start)), "ErrorAnswer")
        for code in ("4XX", "5XX"):
            content = operation["responses"][code]["content"]["application/json"]
            assert content == {"schema": {"$ref": f"#/components/schemas/{shape}"}}
        streams = path in ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
        assert ("text/event-stream" in operation["responses"]["200"]["content"]) == streams, path
    for name, model in schema["components"]["schemas"].items():
        assert "additionalProperties" not in model, f"{name} is said to refuse what is ignored"
