"""OpenTelemetry: one span for every request, sent to a collector. Needs the extra `otel`; nothing is imported without.

Attributes are those of OpenTelemetry's conventions for generative AI; latencies have vLLM's names, in seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any

from ssd.core import RequestMetrics, RequestOutput, SamplingParams
from ssd.errors import ConfigError, install_extra


def check_endpoint(endpoint: str) -> None:
    """Raises ConfigError if traces cannot be sent there."""
    if not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"otlp_traces_endpoint={endpoint!r}: must be an address as http://localhost:4318/v1/traces")
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace.export  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"otlp_traces_endpoint: needs {error.name}: {install_extra('otel')}") from error


class Tracer:
    """Sends spans in the background, over HTTP."""

    def __init__(self, endpoint: str, model: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        service = os.environ.get("OTEL_SERVICE_NAME", "ssd")
        self._provider = TracerProvider(resource=Resource.create({"service.name": service}))
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("ssd.server")
        self._propagator = TraceContextTextMapPropagator()
        self._model = model

    def record(
        self, operation: str, request_id: str, headers: Mapping[str, str], output: RequestOutput | None, begin: float
    ) -> None:
        """A request that has ended. `output` None: the engine has failed; `begin`: as `time.perf_counter`."""
        from opentelemetry.trace import SpanKind, StatusCode

        offset = time.time() - time.perf_counter()
        span = self._tracer.start_span(
            f"{operation} {self._model}",
            context=self._propagator.extract(headers),
            kind=SpanKind.SERVER,
            attributes={
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": "ssd",
                "gen_ai.request.model": self._model,
                "gen_ai.request.id": request_id,
            },
            start_time=int((begin + offset) * 1e9),
        )
        if output is not None:
            span.set_attributes(_request(output.params) | _response(output))
        error = "the engine has failed" if output is None else output.error
        if error is not None:
            span.set_attribute("error.type", "engine_failed" if output is None else "request_failed")
            span.set_status(StatusCode.ERROR, error)
        span.end()


def _request(params: SamplingParams) -> dict[str, Any]:
    return {
        "gen_ai.request.max_tokens": params.max_new_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.top_k": params.top_k,
        "gen_ai.request.presence_penalty": params.presence_penalty,
        "gen_ai.request.frequency_penalty": params.frequency_penalty,
        "gen_ai.request.stop_sequences": list(params.stop),
        "gen_ai.request.choice.count": params.n,
    }


def _response(output: RequestOutput) -> dict[str, Any]:
    samples = output.samples
    return {
        "gen_ai.usage.input_tokens": len(output.prompt_token_ids),
        "gen_ai.usage.output_tokens": sum(len(sample.token_ids) for sample in samples),
        "gen_ai.response.finish_reasons": [str(sample.finish_reason) for sample in samples],
        **_latencies([sample.metrics for sample in samples]),
    }


def _latencies(samples: list[RequestMetrics]) -> dict[str, float]:
    """Latencies of the first sample; `e2e` ends with the last sample."""
    first, arrival = samples[0], samples[0].arrival
    times = {
        "gen_ai.latency.time_in_queue": (arrival, first.first_scheduled),
        "gen_ai.latency.time_to_first_token": (arrival, first.first_token),
        "gen_ai.latency.time_in_model_prefill": (first.first_scheduled, first.first_token),
        "gen_ai.latency.time_in_model_decode": (first.first_token, first.finished),
        "gen_ai.latency.e2e": (arrival, max(sample.finished or arrival for sample in samples)),
    }
    return {name: end - begin for name, (begin, end) in times.items() if begin is not None and end is not None}
