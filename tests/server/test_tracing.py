"""Traces: what a collector gets of requests, and that nothing of OpenTelemetry is needed without them."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest
from live_server import MODEL, Served, openai, serving

from ssd import LLM
from ssd.errors import ConfigError
from ssd.server.options import ServerOptions

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """An OTLP collector over HTTP."""

    def __init__(self) -> None:
        self.bodies: list[bytes] = []
        collector = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                found = self.path == "/v1/traces"
                body = self.rfile.read(int(self.headers["Content-Length"]))
                collector.bodies += [body] if found else []
                self.send_response(200 if found else 404)
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1/traces"

    def spans(self) -> list[Any]:
        messages = pytest.importorskip("opentelemetry.proto.collector.trace.v1.trace_service_pb2")
        requests = [messages.ExportTraceServiceRequest.FromString(_plain(body)) for body in self.bodies]
        self.bodies.clear()
        return [s for r in requests for rs in r.resource_spans for ss in rs.scope_spans for s in ss.spans]


def _plain(body: bytes) -> bytes:
    return gzip.decompress(body) if body[:2] == b"\x1f\x8b" else body


def attributes(span: Any) -> dict[str, Any]:
    found = {}
    for item in span.attributes:
        kind = item.value.WhichOneof("value")
        value = getattr(item.value, kind)
        found[item.key] = [v.string_value for v in value.values] if kind == "array_value" else value
    return found


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    pytest.importorskip("opentelemetry.sdk", reason="the extra `otel` is not installed")
    made = Collector()
    thread = threading.Thread(target=made.server.serve_forever)
    thread.start()
    yield made
    made.server.shutdown()
    thread.join()
    made.server.server_close()


@pytest.fixture(scope="module")
def traced(llm: LLM, collector: Collector) -> Iterator[Served]:
    with serving(llm, otlp_traces_endpoint=collector.url) as served:
        yield served


def recorded(traced: Served, collector: Collector) -> list[Any]:
    traced.server.config.app.state.server.tracer._provider.force_flush()  # type: ignore[union-attr]
    return collector.spans()


@pytest.mark.parametrize("stream", [True, False])
def test_a_request_is_a_span_below_the_client_s(traced: Served, collector: Collector, stream: bool) -> None:
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    answer = traced.client().chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Hello"}],
        max_tokens=4,
        temperature=0.5,
        n=2,
        stream=stream,
        extra_headers=headers,
        extra_body={"ignore_eos": True},
    )
    if stream:
        list(answer)
    [span] = recorded(traced, collector)
    found = attributes(span)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    assert span.name == f"chat {MODEL}"
    assert span.kind == 2  # of a server
    assert span.status.code == 0
    expected = {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "ssd",
        "gen_ai.request.model": MODEL,
        "gen_ai.request.id": "mine",
        "gen_ai.request.max_tokens": 4,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.usage.output_tokens": 8,
        "gen_ai.response.finish_reasons": ["length", "length"],
    }
    assert found | expected == found
    assert found["gen_ai.usage.input_tokens"] > 5
    queue, first, e2e = (found[f"gen_ai.latency.{name}"] for name in ("time_in_queue", "time_to_first_token", "e2e"))
    assert 0 <= queue < first < e2e
    assert e2e == pytest.approx((span.end_time_unix_nano - span.start_time_unix_nano) / 1e9, abs=0.5)


def test_every_prompt_of_a_list_is_a_span_of_its_own_trace(traced: Served, collector: Collector) -> None:
    traced.client().completions.create(model=MODEL, prompt=["One", "Two"], max_tokens=1)
    spans = recorded(traced, collector)
    assert [span.name for span in spans] == [f"text_completion {MODEL}"] * 2
    assert len({span.trace_id for span in spans}) == 2
    assert all(not span.parent_span_id for span in spans)


def test_a_request_that_fails_is_marked(traced: Served, collector: Collector, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(works: Any) -> Any:
        raise MemoryError("out of memory")

    monkeypatch.setattr(traced.llm.engine.round, "launch", fails)
    with pytest.raises(openai.InternalServerError):
        traced.client().completions.create(model=MODEL, prompt="x")
    [span] = recorded(traced, collector)
    assert span.status.code == 2
    assert "out of memory" in span.status.message
    assert attributes(span)["error.type"] == "request_failed"


def test_a_collector_that_refuses_costs_nothing(llm: LLM, collector: Collector) -> None:
    with serving(llm, otlp_traces_endpoint=f"{collector.url}/elsewhere") as served:
        for _ in range(2):
            assert served.client().completions.create(model=MODEL, prompt="x", max_tokens=1).choices
            assert recorded(served, collector) == []


def test_nothing_is_imported_without_the_option(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with serving(llm) as served:
        assert served.client().completions.create(model=MODEL, prompt="x", max_tokens=1).choices


def test_without_the_extra_the_option_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.exporter.otlp.proto.http.trace_exporter", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[otel\]'"):
        ServerOptions(served_model_name=MODEL, otlp_traces_endpoint="http://localhost:4318/v1/traces")


def test_an_endpoint_that_is_no_address_is_refused() -> None:
    with pytest.raises(ConfigError, match="otlp_traces_endpoint='localhost:4317'"):
        ServerOptions(served_model_name=MODEL, otlp_traces_endpoint="localhost:4317")
