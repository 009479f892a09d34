"""The proxy in front of replicas, without Ray: what it retries, how it fails, what it checks and merges."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import httpx
from fastapi import FastAPI
from prometheus_client.core import GaugeMetricFamily, Metric

from ssd.server.errors import ApiError
from ssd.server.options import ServerOptions
from ssd.server.replicas.proxy import ReplicaLost, create_proxy

START = {"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]}
STREAM = {**START, "headers": [(b"content-type", b"text/event-stream; charset=utf-8")]}


def body(text: str, more: bool = False) -> dict[str, Any]:
    return {"type": "http.response.body", "body": text.encode(), "more_body": more}


class Scripted:
    """Replicas that play scripts, one for each call: messages, errors, pauses in seconds, None: for ever."""

    lost = None

    def __init__(self, *scripts: list[Any]) -> None:
        self.scripts = list(scripts)
        self.calls: list[tuple[dict[str, Any], bytes, list[str]]] = []
        self.closed = 0
        self.silent = asyncio.Event()

    async def answer(self, scope: Any, body: bytes, avoid: Sequence[str]) -> AsyncGenerator[Any]:
        self.calls.append((scope, body, list(avoid)))
        try:
            for step in self.scripts.pop(0):
                if isinstance(step, Exception):
                    raise step
                if step is None:
                    await self.silent.wait()
                elif isinstance(step, float):
                    await asyncio.sleep(step)
                else:
                    yield dict(step)
        finally:
            self.closed += 1

    async def running(self) -> int:
        return 0

    async def metrics(self) -> dict[str, list[Metric]]:
        def running(value: float) -> Metric:
            family = GaugeMetricFamily("ssd_running", "Sequences.", labels=["model_name"])
            family.add_metric(["m"], value)
            return family

        return {"1": [running(7)], "0": [running(3)]}

    async def states(self) -> list[dict[str, Any]]:
        counts = dict.fromkeys(("running", "waiting", "output_tokens", "drafted", "accepted", "look_ups", "hits"), 2)
        return [{"model": "m", **counts, "kv_usage": usage, "seconds": 1} for usage in (0.25, 0.75)]


def proxy(replicas: Scripted, **options: Any) -> FastAPI:
    return create_proxy(replicas, ServerOptions(served_model_name="m", **options))


def ask(app: FastAPI, method: str = "POST", path: str = "/v1/completions", **options: Any) -> httpx.Response:
    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://proxy") as client:
            return await client.request(method, path, **options)

    return asyncio.run(send())


def test_a_request_whose_replica_is_lost_before_the_first_byte_is_sent_to_another_one() -> None:
    """The start of the first answer is not seen, and a replica that still runs is avoided."""
    replicas = Scripted(
        [START, ReplicaLost("its engine has failed", "one")], [ReplicaLost("it has died")], [START, body("{}")]
    )
    answer = ask(proxy(replicas), content=b'{"prompt": "x"}')
    assert (answer.status_code, answer.text) == (200, "{}")
    assert [avoid for _, _, avoid in replicas.calls] == [[], ["one"], ["one"]]
    assert {sent for _, sent, _ in replicas.calls} == {b'{"prompt": "x"}'}


def test_a_request_that_ends_three_replicas_is_not_sent_to_a_fourth() -> None:
    replicas = Scripted(*[[ReplicaLost("it has died")]] * 4)
    answer = ask(proxy(replicas))
    assert answer.status_code == 500
    assert answer.json()["error"]["code"] == "replica_lost"
    assert len(replicas.calls) == 3


def test_a_request_waits_for_a_replica_as_long_as_the_server_allows() -> None:
    """And an answer that has begun goes on."""
    late = Scripted([None])
    answer = ask(proxy(late, request_timeout=0.01))
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "timeout")
    assert late.closed == 1
    slow = Scripted([START, 0.05, body("{}")])
    assert ask(proxy(slow, request_timeout=0.02)).text == "{}"


def test_a_stream_that_has_begun_ends_with_an_error_in_the_shape_of_its_api() -> None:
    def last(path: str) -> str:
        script = [STREAM, body("event: a\ndata: 1\n\ndata: 2\n\n", more=True), ReplicaLost("it has died")]
        answer = ask(proxy(Scripted(script)), path=path, headers={"x-request-id": "r1"})
        begun, _, error = answer.text.partition("data: 2\n\n")
        assert (answer.status_code, begun) == (200, "event: a\ndata: 1\n\n")
        return error

    message = "it has died: send the request again"
    data, done, _ = last("/v1/chat/completions").split("\n\n")
    assert json.loads(data.removeprefix("data: "))["error"]["message"] == message
    assert done == "data: [DONE]"
    name, data, *_ = last("/v1/messages").split("\n")
    assert name == "event: error"
    error = json.loads(data.removeprefix("data: "))
    assert (error["type"], error["error"]["message"], error["request_id"]) == ("error", message, "r1")
    name, data, *_ = last("/v1/responses").split("\n")
    assert name == "event: error"
    assert json.loads(data.removeprefix("data: ")) == {
        **{"type": "error", "code": "replica_lost", "message": message, "param": None, "sequence_number": 2}
    }


def test_a_client_that_goes_away_ends_its_call() -> None:
    replicas = Scripted([STREAM, body("data: 1\n\n", more=True), None])
    app = proxy(replicas)

    async def run() -> list[str]:
        got: list[str] = []
        begun = asyncio.Event()
        received = iter([{"type": "http.request", "body": b"{}", "more_body": False}])

        async def receive() -> dict[str, Any]:
            if (message := next(received, None)) is not None:
                return message
            await begun.wait()
            return {"type": "http.disconnect"}

        async def send(message: dict[str, Any]) -> None:
            got.append(message["type"])
            if message["type"] == "http.response.body":
                begun.set()

        scope = {"type": "http", "method": "POST", "path": "/v1/completions", "headers": [], "query_string": b""}
        scope |= {"asgi": {"version": "3.0"}, "http_version": "1.1", "scheme": "http", "raw_path": b"/v1/completions"}
        await asyncio.wait_for(app(scope, receive, send), 5)
        return got

    assert asyncio.run(run()) == ["http.response.start", "http.response.body"]
    assert replicas.closed == 1
    assert app.state.server.admission.sequences == 0


def test_keys_and_sizes_are_checked_before_a_replica_is_asked() -> None:
    replicas = Scripted([START, body("{}")])
    app = proxy(replicas, api_keys=("secret",), max_request_bytes=4)
    key = {"authorization": "Bearer secret"}
    assert ask(app).status_code == 401
    assert ask(app, path="/metrics", method="GET").status_code == 401
    assert ask(app, path="/playground/state", method="GET").status_code == 401
    assert ask(app, content=b"12345", headers=key).status_code == 413
    assert replicas.calls == []
    assert ask(app, content=b"1234", headers=key).status_code == 200


def test_a_request_has_one_id_and_its_user_is_in_the_access_log(caplog: pytest.LogCaptureFixture) -> None:
    replicas = Scripted([{**START, "user": "somebody"}, body("{}")])
    with caplog.at_level(logging.INFO, "ssd.access"):
        answer = ask(proxy(replicas), headers={"x-request-id": "not valid!"})
    [(scope, _, _)] = replicas.calls
    assert [value.decode() for name, value in scope["headers"] if name == b"x-request-id"] == [
        answer.headers["x-request-id"]
    ]
    assert "user 'somebody'" in caplog.text
    assert answer.headers["x-request-id"] in caplog.text


def test_requests_are_counted_by_the_proxy_while_no_replica_answers() -> None:
    """That is when 5xx must be seen; the labels are those of a server with one engine."""

    class Lost(Scripted):
        async def metrics(self) -> dict[str, list[Metric]]:
            raise ApiError(503, "no replica answers")

    app = proxy(Lost([START, body("{}")], *[[ReplicaLost("it has died")]] * 3))
    for path in ("/v1/models/x", "/v1/completions", "/v1/completions/"):
        ask(app, "GET", path)
    lines = ask(app, "GET", "/metrics").text.splitlines()
    assert "ssd_replicas 0.0" in lines
    counted = [line for line in lines if line.startswith("ssd_http_requests_total")]
    assert counted[:2] == [
        'ssd_http_requests_total{model_name="m",path="/v1/models/{model}",status="200"} 1.0',
        'ssd_http_requests_total{model_name="m",path="/v1/completions",status="500"} 1.0',
    ]
    assert 'path="other"' in counted[2]


def test_metrics_of_replicas_are_told_apart_and_the_playground_has_their_sums() -> None:
    app = proxy(Scripted())
    lines = ask(app, "GET", "/metrics").text.splitlines()
    assert "ssd_replicas 2.0" in lines
    assert [line for line in lines if line.startswith("ssd_running")] == [
        'ssd_running{model_name="m",replica="0"} 3.0',
        'ssd_running{model_name="m",replica="1"} 7.0',
    ]
    assert lines.count("# TYPE ssd_running gauge") == 1
    assert any(line.startswith("process_cpu_seconds_total ") for line in lines)
    state = ask(app, "GET", "/playground/state").json()
    assert (state["model"], state["running"], state["hits"], state["kv_usage"]) == ("m", 4, 4, 0.5)


def test_it_is_alive_but_not_ready_without_replicas_and_refuses_requests_while_it_drains() -> None:
    app = proxy(Scripted())
    assert ask(app, "GET", "/health").status_code == 200
    assert ask(app, "GET", "/health/ready").status_code == 503
    app.state.server.admission.draining = True
    answer = ask(app)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "draining")
    assert answer.headers["connection"] == "close"
