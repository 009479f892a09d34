"""The smallest case that still fails, found by trying simpler ones for a while.

Knows nothing of engines: whether a case fails is asked.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from typing import Any

from fuzz.case import Call, Case
from ssd import SamplingParams

PLAIN = SamplingParams(seed=0)  # sampling needs a seed to be reproducible
DEFAULT = Case([])


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float) -> Case:
    """Takes simplifications, the large ones first, until no simpler case fails or the time is up."""
    deadline = time.monotonic() + seconds
    start, simplified = 0, False  # what was in vain is tried again at the end only
    while True:
        for number, simpler in enumerate(simplifications(case)):
            if time.monotonic() > deadline:
                return case
            if number >= start and fails(simpler):
                case, start, simplified = simpler, number, True
                break
        else:
            if not simplified:
                return case
            start, simplified = 0, False


def simplifications(case: Case) -> Iterator[Case]:
    """Every case that is simpler by one step."""
    for calls in _fewer(case.calls):
        yield replace(case, calls=calls)
    for events in _fewer(case.events):
        yield replace(case, events=events)
    if case.model != DEFAULT.model:
        draft = {"draft": "noisy"} if case.speculation.get("draft", "").startswith(case.model) else {}
        yield replace(case, model=DEFAULT.model, speculation=case.speculation | draft)
    for name in ("dtype", "run_ahead"):
        if getattr(case, name) != getattr(DEFAULT, name):
            yield replace(case, **{name: getattr(DEFAULT, name)})
    if case.speculation:
        yield replace(case, speculation={})
        for changed in _simpler_speculation(case.speculation):
            yield replace(case, speculation=changed)
    for name in case.options:
        yield replace(case, options={key: value for key, value in case.options.items() if key != name})
    for i, call in enumerate(case.calls):
        for simpler in _simpler_call(call):
            yield replace(case, calls=[*case.calls[:i], simpler, *case.calls[i + 1 :]])
    for i, event in enumerate(case.events):
        for number in _smaller(event.round, 0):
            yield replace(case, events=[*case.events[:i], replace(event, round=number), *case.events[i + 1 :]])


def _fewer(items: list[Any]) -> Iterator[list[Any]]:
    """Without one half, then without one item."""
    middle = len(items) // 2
    if middle:
        yield items[:middle]
        yield items[middle:]
    for i in range(len(items)):
        yield items[:i] + items[i + 1 :]


def _smaller(number: int, least: int) -> Iterator[int]:
    yield from sorted({n for n in (least, number // 2, number - 1) if least <= n < number})


def _simpler_speculation(speculation: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for names in (
        {"tree"},
        {"draft_replicas"},
        {"acceptance"},
        {"budget"},
        {"backup"},
        {"fan_out"},
        {"fan_out_hit", "fan_out_miss"},
    ):
        if names & speculation.keys():
            yield {key: value for key, value in speculation.items() if key not in names}
    if speculation["k"] == "auto":
        yield speculation | {"k": 4}
    elif "fan_out_hit" not in speculation:
        for k in _smaller(speculation["k"], 1):
            yield speculation | {"k": k}
    if speculation["mode"] == "ssd":
        yield {"mode": "sd", "draft": speculation["draft"], "k": speculation["k"]}


def _simpler_call(call: Call) -> Iterator[Call]:
    params = call.params
    for f in fields(SamplingParams):
        if f.name != "max_new_tokens" and getattr(params, f.name) != getattr(PLAIN, f.name):
            yield replace(call, params=replace(params, **{f.name: getattr(PLAIN, f.name)}))
    for count in _smaller(params.max_new_tokens, max(1, params.min_tokens)):
        yield replace(call, params=replace(params, max_new_tokens=count))
    for length in _smaller(len(call.prompt), 1):
        yield replace(call, prompt=call.prompt[:length])
    for name in ("stream", "drop"):
        if getattr(call, name):
            yield replace(call, **{name: False})  # type: ignore[arg-type]
    if call.abort is not None:
        yield replace(call, abort=None)
        for number in _smaller(call.abort, 0):
            yield replace(call, abort=number)
    for number in _smaller(call.arrival, 0):
        yield replace(call, arrival=number)
