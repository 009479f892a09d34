"""Prometheus metrics of one LLM, under vLLM's names with the prefix `ssd_`, and this engine's own.

Counters and gauges are read from the engine when they are scraped; histograms are filled when a request ends.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Final

import torch
from fastapi import APIRouter, Request
from fastapi.responses import Response
from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from starlette.routing import compile_path

from ssd.core import RequestMetrics, RequestOutput
from ssd.engine.engine import Engine
from ssd.errors import EngineClosed
from ssd.server.ignored import IgnoredFields
from ssd.version import VERSION

if TYPE_CHECKING:
    from ssd.llm import LLM

router = APIRouter(include_in_schema=False)

_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_MODEL: Final = "model_name"
_REASONS: Final = ("stop", "length", "abort", "error")
_SECONDS: Final = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 20, 40, 80, 160, 640)
_TOKEN_SECONDS: Final = (0.0005, 0.001, 0.002, 0.003, 0.005, 0.0075, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 10)
_TOKENS: Final = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_SAMPLES: Final = (1, 2, 5, 10, 20)
_HISTOGRAMS: Final = {
    "time_to_first_token_seconds": ("From the arrival of a request to its first token.", _SECONDS),
    "inter_token_latency_seconds": ("Between two rounds that added tokens to a sample.", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": ("Decoding time of a sample per token after its first.", _TOKEN_SECONDS),
    "e2e_request_latency_seconds": ("From the arrival of a request to the end of a sample.", _SECONDS),
    "request_queue_time_seconds": ("From the arrival of a request to its first round.", _SECONDS),
    "request_prefill_time_seconds": ("From the first round of a sample to its first token.", _SECONDS),
    "request_decode_time_seconds": ("From the first token of a sample to its last.", _SECONDS),
    "request_inference_time_seconds": ("From the first round of a sample to its last token.", _SECONDS),
    "request_prompt_tokens": ("Tokens of a prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens of a sample.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens of the longest sample of a request.", _TOKENS),
    "request_params_n": ("Samples asked for.", _SAMPLES),
    "request_params_max_tokens": ("Tokens that a sample may have, as asked for.", _TOKENS),
}
_MOST_TOKENS: Final = 2**31  # a client may ask for more than a float can hold


class _Histogram:
    """A histogram of one writer: a value costs far less than prometheus_client's, which locks for every one."""

    def __init__(self, buckets: tuple[float, ...]) -> None:
        self._bounds = buckets
        self._counts = [0] * (len(buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def add_to(self, family: HistogramMetricFamily, labels: list[str]) -> None:
        bounds = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        family.add_metric(labels, list(zip(bounds, accumulate(self._counts), strict=True)), self._sum)


class _Requests:
    """Counts requests that have ended. Knows nothing of the LLM, whose engine refers to it."""

    def __init__(self) -> None:
        self.histograms = {name: _Histogram(buckets) for name, (_, buckets) in _HISTOGRAMS.items()}
        self.ended = Counter(dict.fromkeys(_REASONS, 0))

    def observe(self, output: RequestOutput) -> None:
        """Called once for every request, by the engine's thread."""
        for sample in output.samples:
            if sample.finish_reason is not None:
                self.ended[sample.finish_reason] += 1
            self._observe_times(sample.metrics)
            self.histograms["request_generation_tokens"].observe(sample.metrics.output_tokens)
        longest = max(sample.metrics.output_tokens for sample in output.samples)
        for name, value in (
            ("request_prompt_tokens", len(output.prompt_token_ids)),
            ("request_max_num_generation_tokens", longest),
            ("request_params_n", output.params.n),
            ("request_params_max_tokens", min(output.params.max_new_tokens, _MOST_TOKENS)),
        ):
            self.histograms[name].observe(value)

    def _observe_times(self, times: RequestMetrics) -> None:
        spans = {
            "time_to_first_token_seconds": (times.arrival, times.first_token),
            "e2e_request_latency_seconds": (times.arrival, times.finished),
            "request_queue_time_seconds": (times.arrival, times.first_scheduled),
            "request_prefill_time_seconds": (times.first_scheduled, times.first_token),
            "request_decode_time_seconds": (times.first_token, times.finished),
            "request_inference_time_seconds": (times.first_scheduled, times.finished),
        }
        for name, (start, end) in spans.items():
            if start is not None and end is not None:
                self.histograms[name].observe(end - start)
        gaps = self.histograms["inter_token_latency_seconds"]
        for (before, _), (after, _) in pairwise(times.deliveries):
            gaps.observe(after - before)
        speed = times.decode_tokens_per_second
        if speed is not None:
            self.histograms["request_time_per_output_token_seconds"].observe(1 / speed)


class HttpRequests(Collector):
    """Counts HTTP requests by path and status. For the event loop's thread only.

    A path is a template of `paths`, or "other": clients cannot add labels.
    """

    def __init__(self, paths: Iterable[str], model_name: str) -> None:
        self._model = model_name
        self._paths = frozenset(path for path in paths if "{" not in path)
        self._patterns = [compile_path(path)[:2] for path in sorted(set(paths) - self._paths)]
        self._counts = Counter[tuple[str, int]]()

    def count(self, path: str, status: int) -> None:
        self._counts[self._label(path), status] += 1

    def _label(self, path: str) -> str:
        if path in self._paths:
            return path
        return next((template for pattern, template in self._patterns if pattern.match(path)), "other")

    def collect(self) -> Iterator[Metric]:
        labels = [_MODEL, "path", "status"]
        family = CounterMetricFamily("ssd_http_requests", "HTTP requests that were answered.", labels=labels)
        for (path, status), count in self._counts.items():
            family.add_metric([self._model, path, str(status)], count)
        yield family


class Metrics(Collector):
    """The metrics of one LLM. Counts every request of the LLM that ends from now on."""

    def __init__(self, llm: LLM, model_name: str | None = None, fingerprint: str = "") -> None:
        self._llm = llm
        self._model = model_name or str(llm.config.model)
        self._fingerprint = fingerprint
        self._requests = _Requests()
        self.ignored = IgnoredFields()
        llm.driver.on_end(self._requests.observe)

    def collect(self) -> Iterator[Metric]:
        """The engine's totals, unless it is closed, and those of the requests."""
        yield self._build_info()
        with suppress(EngineClosed):
            yield from self._of_engine(self._llm.engine)
        yield self._labelled("request_success", "Samples that ended.", "finished_reason", self._requests.ended)
        yield self._labelled("ignored_parameters", "Fields of requests, ignored.", "parameter", self.ignored.counts)
        for name, (text, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(f"ssd_{name}", text, labels=[_MODEL])
            self._requests.histograms[name].add_to(family, [self._model])
            yield family

    def _build_info(self) -> Metric:
        config = self._llm.config
        labels = {
            _MODEL: self._model,
            "version": VERSION,
            "torch": str(torch.__version__),
            "device": config.device,
            "gpu": "" if config.device == "cpu" else torch.cuda.get_device_name(config.device),
            "dtype": config.dtype,
            "quantization": config.quantization or "",
            "kv_cache_dtype": config.kv_dtype,
            "mode": config.speculation.mode,
            "draft": str(config.speculation.draft or ""),
            "draft_quantization": config.speculation.draft_quantization or "",
            "system_fingerprint": self._fingerprint,
        }
        family = GaugeMetricFamily("ssd_build_info", "What is served, and by what; always 1.", labels=list(labels))
        family.add_metric(list(labels.values()), 1)
        return family

    def _of_engine(self, engine: Engine) -> Iterator[Metric]:
        for kind, found in ((GaugeMetricFamily, _gauges(engine)), (CounterMetricFamily, _counters(engine))):
            for name, (text, value) in found.items():
                family = kind(f"ssd_{name}", text, labels=[_MODEL])
                family.add_metric([self._model], value)
                yield family
        for name, (text, label, values) in _labelled_counters(engine).items():
            yield self._labelled(name, text, label, values)

    def _labelled(self, name: str, text: str, label: str, values: Mapping[str, float]) -> Metric:
        family = CounterMetricFamily(f"ssd_{name}", text, labels=[_MODEL, label])
        for key, value in values.items():
            family.add_metric([self._model, key], value)
        return family


@router.get("/metrics")
async def scrape(request: Request) -> Response:
    state = request.app.state.server
    return exposition(state.metrics, state.http_requests)


def exposition(*collectors: Collector) -> Response:
    """The text format of Prometheus, with metrics of this process."""
    registry = CollectorRegistry()
    for collector in (*collectors, ProcessCollector(registry=None)):
        registry.register(collector)
    return Response(generate_latest(registry), media_type=_CONTENT_TYPE)


def merged(found: Iterable[tuple[Metric, Mapping[str, str]]]) -> Iterator[Metric]:
    """One family for all metrics of a name; the samples of each get further labels."""
    families: dict[str, Metric] = {}
    for metric, labels in found:
        family = families.setdefault(metric.name, Metric(metric.name, metric.documentation, metric.type))
        family.samples += [sample._replace(labels={**sample.labels, **labels}) for sample in metric.samples]
    yield from families.values()


def _gauges(engine: Engine) -> dict[str, tuple[str, float]]:
    pool, metrics = engine.scheduler.pool, engine.metrics
    return {
        "num_requests_running": ("Sequences in the batch.", len(engine.scheduler.running)),
        "num_requests_waiting": ("Sequences that wait to be scheduled.", len(engine.scheduler.waiting)),
        "kv_cache_usage_perc": ("Share of KV blocks in use, 1 is all.", 1 - pool.num_free / max(1, pool.num_blocks)),
        "host_share": ("Share of the rounds' time in which the device waits for the host.", metrics.host_share),
        "hit_rate": ("Look-ups that found their draft prepared, since the start (SSD).", metrics.ssd_hit_rate),
    }


def _counters(engine: Engine) -> dict[str, tuple[str, float]]:
    """Their exported names end in `_total`."""
    metrics = engine.metrics
    return {
        "prompt_tokens": ("Prompt tokens.", metrics.prompt_tokens),
        "generation_tokens": ("Generated tokens.", metrics.output_tokens),
        "num_preemptions": ("Sequences preempted for want of room.", metrics.num_preemptions),
        "prefix_cache_queries": ("Prompt tokens looked up in the prefix cache.", metrics.prompt_tokens),
        "prefix_cache_hits": ("Prompt tokens found in the prefix cache.", metrics.cached_prompt_tokens),
        "spec_decode_num_drafts": ("Drafts verified.", metrics.spec_decode_num_drafts),
        "spec_decode_num_draft_tokens": ("Draft tokens verified.", metrics.spec_decode_num_draft_tokens),
        "spec_decode_num_accepted_tokens": ("Draft tokens accepted.", metrics.spec_decode_num_accepted_tokens),
        "requests_refused": ("Requests that could never be served.", metrics.num_refused),
        "rounds": ("Rounds.", metrics.num_rounds),
        "look_ups": ("Look-ups of drafts in prepared branches (SSD).", sum(metrics.ssd_look_ups_after)),
        "look_up_hits": ("Look-ups that found their draft prepared (SSD).", sum(metrics.ssd_hits_after)),
        "target_wait_seconds": ("The target waited for drafts.", metrics.target_wait_seconds),
        "verify_seconds": ("From the target's forward pass to its decision.", metrics.verify_seconds),
        "host_wait_seconds": ("From a decision to what the device computes next.", metrics.host_wait_seconds),
        "round_seconds": ("From a decision to the next, while there are requests.", metrics.round_seconds),
        "draft_busy_seconds": ("The draft model computed.", metrics.draft_busy_seconds),
        "hand_over_seconds": ("Messages to a drafter in another process.", metrics.hand_over_seconds),
        "drafter_failures": ("Exceptions of the drafter and restarts of its process.", metrics.drafter_failures),
    }


def _labelled_counters(engine: Engine) -> dict[str, tuple[str, str, dict[str, float]]]:
    metrics = engine.metrics
    accepted = {str(i): float(n) for i, n in enumerate(list(metrics.spec_decode_num_accepted_tokens_per_pos))}
    return {
        "spec_decode_num_accepted_tokens_per_pos": ("Draft tokens accepted, by position.", "position", accepted),
        "draft_rounds": ("Rounds after a look-up, by origin of the draft.", "origin", dict(metrics.ssd_rounds)),
        "mode_rounds": ("Rounds, by mode, where it is chosen in every round.", "mode", dict(metrics.mode_rounds)),
    }
