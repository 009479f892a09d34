"""Two rounds of every method on a time line: host, kernels of the target, kernels of the draft.

Recorded by torch's profiler. Written in Chrome's trace format, for Perfetto (ui.perfetto.dev), or as a picture.
"""

from __future__ import annotations

import json
import os
import statistics
import tempfile
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch

from ssd.bench import drawing
from ssd.bench.answers import Prompt, RequestSettings
from ssd.bench.ours import OurContender
from ssd.core import SamplingParams
from ssd.decoding.observer import RoundObserver
from ssd.errors import SSDError

KINDS: Final = (".json", ".svg", ".png")
_ROUNDS: Final = 2  # that are shown
_BEFORE, _RECORDED = 12, 10  # rounds before the recording, and of it
_DEVICE: Final = frozenset({"kernel", "gpu_memcpy", "gpu_memset"})
_DRAFTING: Final = frozenset({"propose", "settle", "prepare"})
_COLOURS: Final = {"verify": "#4c8bf5", "draft": "#0b9e6b", "collect": "#d5dae0"}


@dataclass(frozen=True)
class Span:
    """A host call or a kernel; times in microseconds since the first round began."""

    track: str  # "host", "target" or "draft"
    name: str
    start: float
    duration: float

    @property
    def end(self) -> float:
        return self.start + self.duration


@dataclass(frozen=True)
class MethodTrace:
    """Some rounds of one method."""

    method: str
    spans: list[Span]
    idle_before_verify: float  # time without a kernel before a verification's first kernel: median, microseconds
    device_busy: float  # share of the time in which some kernel ran; 0 without a GPU


def record(contender: OurContender, prompts: Seq[Prompt], asked: RequestSettings) -> MethodTrace:
    """Records some rounds while `asked.batch` prompts are decoded."""
    driver = contender.llm.driver
    driver.call(lambda engine: contender.take_over(engine, asked.batch))
    params = SamplingParams(temperature=asked.temperature, seed=asked.seed, max_new_tokens=4096, ignore_eos=True)
    longest = contender.llm.engine.max_model_len // 2
    token_ids = [contender.llm.encode(prompt)[:longest] for prompt in prompts[: asked.batch]]
    submissions = driver.submit_many([(tokens, params) for tokens in token_ids])
    with _silent():
        profiler = driver.call(lambda _: torch.profiler.profile(acc_events=True))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        _wait_for_rounds(contender, _BEFORE)
        with driver.observing(Annotations()):
            with _silent():
                driver.call(lambda _: profiler.start())
            _wait_for_rounds(contender, _BEFORE + _RECORDED)
            with _silent():
                driver.call(lambda _: profiler.stop())
        for submission in submissions:
            submission.abort()
        profiler.export_chrome_trace(str(file))
        events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    return read_events(contender.name, events)


@contextmanager
def _silent() -> Iterator[None]:
    """Nothing is written to standard error inside: the profiler's library prints what it does, at any log level."""
    before = os.dup(2)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(nowhere)


def _wait_for_rounds(contender: OurContender, count: int) -> None:
    while contender.llm.driver.call(lambda engine: engine.has_work and engine.metrics.num_rounds < count):
        pass


class Annotations(RoundObserver):
    """Annotates the parts of rounds for the profiler."""

    def part(self, name: str) -> AbstractContextManager[object]:
        return torch.profiler.record_function(name)


def read_events(method: str, events: Iterable[dict[str, Any]]) -> MethodTrace:
    """Converts the profiler's events into spans of a few rounds."""
    complete = [event for event in events if event.get("ph") == "X"]
    host = [e for e in complete if e.get("cat") == "user_annotation" and not e["name"].startswith("ProfilerStep")]
    host.sort(key=lambda event: (event["ts"], -event["dur"]))
    calls = [e for cat in ("cuda_runtime", "cuda_driver") for e in complete if e.get("cat") == cat]
    labels = {e["args"]["correlation"]: _label(host, e["ts"]) for e in calls}
    device = sorted((e for e in complete if e.get("cat") in _DEVICE), key=lambda event: event["ts"])
    spans = [Span("host", event["name"], event["ts"], event["dur"]) for event in host]
    for event in device:
        label = labels.get(event["args"].get("correlation"), "verify")
        spans.append(Span("draft" if label in _DRAFTING else "target", event["name"], event["ts"], event["dur"]))
    kernels = [span for span in spans if span.track != "host"]
    begins = _verifications(kernels or [s for s in spans if s.name == "verify"], on_device=bool(kernels))
    if len(begins) < _ROUNDS + 2:
        raise SSDError(f"{method}: the profiler saw {len(begins)} rounds, too few to show {_ROUNDS}")
    middle = len(begins) // 2 - 1
    window = begins[middle], begins[middle + _ROUNDS]
    shown = [s for s in spans if s.end > window[0] and s.start < window[1]]
    moved = [Span(s.track, s.name, s.start - window[0], s.duration) for s in shown]
    gaps = [max(0.0, begin - max((k.end for k in kernels if k.start < begin), default=begin)) for begin in begins[1:-1]]
    busy = _covered([(s.start, s.end) for s in kernels], window) / (window[1] - window[0])
    return MethodTrace(method, moved, statistics.median(gaps) if kernels else 0.0, busy)


def _label(host: Seq[dict[str, Any]], moment: float) -> str:
    """The innermost annotation around a moment."""
    around = [event for event in host if event["ts"] <= moment <= event["ts"] + event["dur"]]
    return str(min(around, key=lambda event: event["dur"])["name"]) if around else ""


def _verifications(spans: Seq[Span], *, on_device: bool) -> list[float]:
    """When each verification's first kernel (or, on a CPU, its call) began."""
    if not on_device:
        return [span.start for span in spans]
    targets = [span for span in spans if span.track == "target"]
    first = next((s.name for s in targets if "rows_kernel" in s.name), None)  # the first kernel of every forward pass
    return [span.start for span in targets if span.name == first]


def _covered(spans: Iterable[tuple[float, float]], window: tuple[float, float]) -> float:
    """How much of a window is covered by spans, in order of their beginnings."""
    total, at = 0.0, window[0]
    for start, end in spans:
        start, end = max(start, at), min(end, window[1])
        if end > start:
            total += end - start
            at = end
    return total


def write(traces: Seq[MethodTrace], file: Path) -> None:
    if file.suffix == ".json":
        file.write_text(json.dumps({"traceEvents": list(_chrome_events(traces))}), encoding="utf-8")
    else:
        file.write_bytes(_drawn(traces, file.suffix[1:]))


def _chrome_events(traces: Seq[MethodTrace]) -> Iterator[dict[str, Any]]:
    tracks = ("host", "target", "draft")
    for process, trace in enumerate(traces, start=1):
        yield {"ph": "M", "name": "process_name", "pid": process, "args": {"name": trace.method}}
        for thread, track in enumerate(tracks, start=1):
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": track}}
        for span in trace.spans:
            place = {"pid": process, "tid": 1 + tracks.index(span.track)}
            yield {"ph": "X", "name": span.name, "ts": span.start, "dur": span.duration, **place}


def _drawn(traces: Seq[MethodTrace], kind: str) -> bytes:
    """One panel per method, with three rows: host, target and draft."""
    figure = drawing.new_figure(10, 1.5 * len(traces) + 0.6)
    for axes, trace in zip(figure.subplots(len(traces), squeeze=False)[:, 0], traces, strict=True):
        for row, track in enumerate(("draft", "target", "host")):
            for name, spans in _by_colour([s for s in trace.spans if s.track == track]).items():
                bars = [(span.start / 1e3, span.duration / 1e3) for span in spans]
                axes.broken_barh(bars, (row - 0.36, 0.72), color=name, linewidth=0)
        axes.set_yticks(range(3), ["draft", "target", "host"], fontsize=8)
        axes.set_xlim(0, max(span.end for span in trace.spans) / 1e3)
        axes.tick_params(axis="x", labelsize=8)
        idle = f"{trace.idle_before_verify:.0f} µs idle before a verification" if trace.device_busy else "on a CPU"
        axes.set_title(f"{trace.method}: {idle}", fontsize=9, loc="left")
        axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("ms", fontsize=8)
    return drawing.encode(figure, kind)


def _by_colour(spans: Seq[Span]) -> dict[str, list[Span]]:
    found: dict[str, list[Span]] = {}
    for span in spans:
        if span.track == "host":
            colour = _COLOURS["collect"] if span.name == "collect" else "#e07a1f"
        else:
            colour = _COLOURS["draft" if span.track == "draft" else "verify"]
        found.setdefault(colour, []).append(span)
    return found
