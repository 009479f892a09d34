"""What Prometheus is told: names, values against the engine's own, and a dashboard that asks for nothing else."""

from __future__ import annotations

import json
import logging
import re
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("prometheus_client", reason="the extra `serve` is not installed")

import httpx
from live_server import serving, until
from prometheus_client.parser import text_string_to_metric_families

from ssd import LLM, SamplingParams
from ssd.server.app import PATHS, create_app
from ssd.server.metrics import HttpRequests, Metrics, exposition
from ssd.server.options import ServerOptions
from ssd.server.playground import endpoints as playground

DASHBOARD = Path(__file__).parents[2] / "deploy" / "grafana.json"
VLLM_NAMES = [
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "prompt_tokens_total",
    "generation_tokens_total",
    "num_preemptions_total",
    "prefix_cache_queries_total",
    "prefix_cache_hits_total",
    "request_success_total",
    "time_to_first_token_seconds_bucket",
    "inter_token_latency_seconds_bucket",
    "request_time_per_output_token_seconds_bucket",
    "e2e_request_latency_seconds_bucket",
    "request_queue_time_seconds_bucket",
    "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum",
    "request_decode_time_seconds_sum",
    "request_inference_time_seconds_sum",
    "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket",
    "request_max_num_generation_tokens_bucket",
    "request_params_n_bucket",
    "request_params_max_tokens_bucket",
    "time_to_first_token_seconds_sum",
    "time_to_first_token_seconds_count",
    "e2e_request_latency_seconds_sum",
    "e2e_request_latency_seconds_count",
    "spec_decode_num_drafts_total",
    "spec_decode_num_draft_tokens_total",
    "spec_decode_num_accepted_tokens_total",
    "spec_decode_num_accepted_tokens_per_pos_total",
]

Samples = dict[tuple[str, str], float]  # by name and the label that is not the model's


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    speculation = {"mode": "ssd", "draft": "tiny-llama-draft", "placement": "inline"}
    with LLM("tiny-llama", device="cpu", speculation=speculation) as llm:
        yield llm


def exported(llm: LLM) -> set[str]:
    """All names, once a draft has been verified: acceptance by position has no value before."""
    llm.generate("Once upon a time", SamplingParams(max_new_tokens=16, ignore_eos=True))
    counts = HttpRequests([], "tiny-llama")
    counts.count("", 200)
    return {name for name, _ in scraped(Metrics(llm), counts)}


def scraped(*metrics: Metrics | HttpRequests) -> Samples:
    found: Samples = {}
    for family in text_string_to_metric_families(bytes(exposition(*metrics).body).decode()):
        for sample in family.samples if family.name.startswith("ssd_") else ():
            assert sample.labels.pop("model_name") == "tiny-llama"
            found[sample.name, ",".join(sample.labels.values())] = sample.value
    return found


def test_values_are_the_engines(llm: LLM) -> None:
    """Catches a counter under another's name, and a request that is observed twice or not at all."""
    metrics, before = Metrics(llm), llm.engine.metrics.output_tokens
    outputs = llm.generate(["Once upon a time", "def add(a, b):"], SamplingParams(max_new_tokens=24, ignore_eos=True))
    outputs += llm.generate("A haiku:", SamplingParams(max_new_tokens=8, n=2, temperature=1.0, seed=1, ignore_eos=True))
    found, engine = scraped(metrics), llm.engine.metrics
    assert found["ssd_generation_tokens_total", ""] == engine.output_tokens == before + 24 + 24 + 8 + 8
    assert found["ssd_prompt_tokens_total", ""] == engine.prompt_tokens
    assert found["ssd_request_success_total", "length"] == 4
    assert found["ssd_request_success_total", "abort"] == 0
    assert found["ssd_spec_decode_num_accepted_tokens_total", ""] == engine.spec_decode_num_accepted_tokens > 0
    positions = [value for (name, _), value in found.items() if name.endswith("_per_pos_total")]
    assert positions == engine.spec_decode_num_accepted_tokens_per_pos
    assert found["ssd_look_ups_total", ""] == sum(engine.ssd_look_ups_after) > 0
    assert found["ssd_hit_rate", ""] == pytest.approx(engine.ssd_hit_rate)
    for name in ("time_to_first_token", "e2e_request_latency", "request_queue_time"):
        assert found[f"ssd_{name}_seconds_count", ""] == 4
    longest = max(s.metrics.finished - s.metrics.arrival for o in outputs for s in o.samples)
    assert found["ssd_e2e_request_latency_seconds_sum", ""] <= 4 * longest
    rounds = sum(s.metrics.rounds for o in outputs for s in o.samples)
    assert found["ssd_inter_token_latency_seconds_count", ""] == rounds - 4
    assert found["ssd_request_generation_tokens_sum", ""] == 64
    for name in ("request_max_num_generation_tokens", "request_params_max_tokens"):
        assert found[f"ssd_{name}_sum", ""] == 24 + 24 + 8
    assert found["ssd_request_params_n_sum", ""] == 4
    assert 0 < found["ssd_host_wait_seconds_total", ""] < found["ssd_round_seconds_total", ""]
    assert found["ssd_host_share", ""] == pytest.approx(engine.host_share)
    assert found["ssd_num_requests_running", ""] == found["ssd_kv_cache_usage_perc", ""] == 0


def test_names_are_those_of_vllm(llm: LLM) -> None:
    assert {f"ssd_{name}" for name in VLLM_NAMES} <= exported(llm)


def test_two_of_them_share_nothing(llm: LLM) -> None:
    """A global registry would refuse the second one's names."""
    first = Metrics(llm)
    llm.generate("One", SamplingParams(max_new_tokens=2, ignore_eos=True))
    second = Metrics(llm)
    assert scraped(first)["ssd_request_success_total", "length"] == 1
    assert scraped(second)["ssd_request_success_total", "length"] == 0


def test_a_huge_max_tokens_is_counted(llm: LLM) -> None:
    """Catches a number that no float can hold: the sum was lost, and the request not counted."""
    metrics = Metrics(llm)
    llm.generate("x", SamplingParams(max_tokens=10**400, stop=[" ", "e", "a", "\n", "t"]))
    samples = scraped(metrics)
    found = {name: value for (name, _), value in samples.items() if name.startswith("ssd_request_params_max_tokens_")}
    assert found["ssd_request_params_max_tokens_count"] == 1
    assert found["ssd_request_params_max_tokens_sum"] == 2**31


def test_the_dashboard_asks_for_what_there_is(llm: LLM) -> None:
    """Every name in the dashboard is exported, and the panels do not lie upon each other."""
    board = json.loads(DASHBOARD.read_text())
    asked = {
        name
        for panel in board["panels"]
        for target in panel.get("targets", [])
        for name in re.findall(r"ssd_\w+", target["expr"])
    }
    assert asked <= exported(llm)
    assert len(asked) >= 20
    variables = {variable["name"] for variable in board["templating"]["list"]}
    assert variables == {"datasource", "model", "instance"}
    for panel in board["panels"]:
        for target in panel["targets"]:
            selectors = re.findall(r"ssd_\w+\{([^}]*)\}", target["expr"])
            assert len(selectors) == len(re.findall(r"ssd_\w+", target["expr"])), (
                "every query is for the chosen servers"
            )
            assert all('model_name=~"$model", instance=~"$instance"' in selector for selector in selectors)
    places = [(p["gridPos"]["x"], p["gridPos"]["y"]) for p in board["panels"]]
    assert len(set(places)) == len(places)


def test_a_closed_engine_is_no_error() -> None:
    llm = LLM("tiny-llama", device="cpu")
    metrics = Metrics(llm)
    llm.close()
    assert b"ssd_request_success" in exposition(metrics).body


# --- HTTP -------------------------------------------------------------------------------------------------------------


def http_requests(url: str, **options: Any) -> dict[tuple[str, str], float]:
    """Counts by path and status."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", **options).text)
    samples = [s for family in families if family.name == "ssd_http_requests" for s in family.samples]
    return {(s.labels["path"], s.labels["status"]): s.value for s in samples}


def test_http_requests_are_counted_by_route_and_status(llm: LLM) -> None:
    """429, 401 and 5xx can be alerted on, and no client can add labels by asking for paths."""
    key = {"headers": {"authorization": "Bearer secret"}}
    with serving(llm, api_keys=("secret",), max_request_bytes=1000, max_tokens_in_flight=50) as served:
        assert httpx.post(f"{served.url}/v1/completions", json={}).status_code == 401
        assert httpx.get(f"{served.url}/v1/models/x").status_code == 401
        served.admission.tokens += 50
        body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 1}
        assert httpx.post(f"{served.url}/v1/completions", json=body, **key).status_code == 429
        served.admission.tokens -= 50
        for i in range(3):
            assert httpx.get(f"{served.url}/v1/models/{i}/../{i}", **key).status_code == 404
            assert httpx.get(f"{served.url}/unknown{i}", **key).status_code == 404
        served.admission.draining = True
        assert httpx.get(f"{served.url}/health/ready", **key).status_code == 503
        served.admission.draining = False
        assert http_requests(served.url, **key) == {
            ("/v1/completions", "401"): 1,
            ("/v1/models/{model}", "401"): 1,
            ("/v1/completions", "429"): 1,
            ("/v1/models/{model}", "404"): 3,
            ("other", "404"): 3,
            ("/health/ready", "503"): 1,
        }


def test_requests_that_the_connection_refuses_are_counted_once(llm: LLM) -> None:
    """A body that does not come (408), and what is not HTTP (400): the application does not answer these."""
    late = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n\r\n"
    with serving(llm, read_timeout=0.5) as served:
        for sent in (late, b"nonsense\r\n\r\n"):
            with socket.create_connection((httpx.URL(served.url).host, httpx.URL(served.url).port)) as connection:
                connection.sendall(sent)
                while connection.recv(4096):
                    pass
        until(lambda: not served.server.server_state.tasks)
        assert http_requests(served.url) == {("/v1/completions", "408"): 1, ("other", "400"): 1}


def test_every_route_has_a_label(llm: LLM) -> None:
    """Catches a route of the playground that is not in the table, which the proxy shares."""
    assert {route.path for route in playground.router(llm).routes} <= PATHS  # type: ignore[attr-defined]
    assert set(create_app(llm, ServerOptions(served_model_name="m")).openapi()["paths"]) <= {
        path.replace(":path", "") for path in PATHS
    }


def test_the_build_and_the_process_are_told(llm: LLM) -> None:
    text = bytes(exposition(Metrics(llm, "m", "fp_1")).body).decode()
    [build] = [line for line in text.splitlines() if line.startswith("ssd_build_info{")]
    for label in (
        "model_name",
        "version",
        "torch",
        "device",
        "dtype",
        "kv_cache_dtype",
        "mode",
        "draft",
        "system_fingerprint",
    ):
        assert re.search(rf'{label}="[^"]+"', build), label
    assert 'draft="tiny-llama-draft"' in build
    assert 'quantization="' in build
    assert build.endswith(" 1.0")
    if Path("/proc/self/stat").exists():
        assert re.search(r"^process_resident_memory_bytes [1-9]", text, re.MULTILINE)
        assert re.search(r"^process_cpu_seconds_total ", text, re.MULTILINE)


def test_probes_scrapes_and_polling_are_not_in_the_access_log(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    """Unless they fail."""
    with serving(llm) as served, caplog.at_level(logging.INFO, "ssd.access"):
        for path in ("/health", "/health/ready", "/metrics", "/playground/state", "/version"):
            httpx.get(served.url + path)
        served.admission.draining = True
        httpx.get(f"{served.url}/health/ready")
        until(lambda: len(caplog.messages) >= 2)
    assert [message.split()[2:4] for message in caplog.messages] == [["'/version'", "200"], ["'/health/ready'", "503"]]
