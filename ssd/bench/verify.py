"""Holds a model against itself: every mode, in company, in chunks, from the prefix cache and after preemption, must
write what plain decoding writes for each request alone.

One engine does all of it: drafters are replaced between two ways, and the scheduler's limits are changed.
"""

from __future__ import annotations

import functools
import itertools
import platform
import time
from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, replace
from typing import Any, Final, NamedTuple

from ssd.assembly.device import resolve_device
from ssd.assembly.open import feature_draft_kind, open_checkpoint
from ssd.assembly.placement import placed
from ssd.bench.answers import NO_PROGRESS, Progress, RequestSettings
from ssd.bench.comparison import Asked, Comparison, Verification
from ssd.bench.config import BenchConfig
from ssd.bench.ours import answer_of
from ssd.bench.record import origin
from ssd.bench.run import workloads_of
from ssd.bench.serve import Result
from ssd.config import K_DEFAULT, SUFFIX, SpeculationConfig
from ssd.core import SamplingParams
from ssd.decoding.drafter import Drafter
from ssd.drafting.controller import DepthController
from ssd.engine.engine import Engine
from ssd.errors import ConfigError
from ssd.kv.blocks import BlockTable
from ssd.llm import LLM
from ssd.models.block import BlockCheckpoint
from ssd.version import VERSION

TEMPERATURES: Final = (0.0, 1.0)
_COUNTED: Final = ("drafted", "accepted", "look_ups", "hits", "cached_tokens", "preemptions")  # of RequestMetrics
_MISSING: Final = {  # why a way would show nothing, by what it must have counted
    "drafted": "nothing was drafted",
    "look_ups": "no draft was prepared",
    "cached_tokens": "no prompt fills a KV block: take longer ones",
    "preemptions": "no request was preempted: raise --max-tokens or --batch",
    "chunked": "no prompt is longer than a chunk: take longer ones, or lower --batch",
}


class Condition(NamedTuple):
    """Under which all requests are answered."""

    name: str
    batch: int
    chunk: int | None = None  # most tokens of a round; None: those of the engine
    caching: bool = False  # with the prefix cache
    warm: bool = False  # what the cache has stays
    crowded: bool = False  # with too few KV blocks for the batch
    needs: str = ""  # what must have been counted


def _conditions(batch: int) -> list[Condition]:
    chunk = 2 * batch + 1  # an odd number: chunks begin anywhere in a block
    return [
        Condition("one at a time", 1),
        Condition(f"{batch} at a time", batch, caching=True),
        Condition("prompts from the prefix cache", batch, caching=True, warm=True, needs="cached_tokens"),
        Condition(f"prompts in chunks, {chunk} tokens a round", batch, chunk=chunk, needs="chunked"),
        Condition("short of KV blocks", batch, crowded=True, needs="preemptions"),
    ]


def verify(config: BenchConfig, progress: Progress = NO_PROGRESS) -> Verification:
    """Loads the model once, answers all requests in every mode and condition, and compares."""
    if config.batch < 2:
        raise ConfigError(f"batch={config.batch}: must be at least 2, for company")
    workloads = workloads_of(config, open_checkpoint(config.model).tokenizer())
    settings = RequestSettings(config.output_len, ignore_eos=False, logprobs=True)
    choices = itertools.product([prompt for each in workloads for prompt in each.prompts], TEMPERATURES)
    asked = [(prompt, replace(settings, temperature=t, seed=config.seed + i)) for i, (prompt, t) in enumerate(choices)]
    fitting = -(-(max(workload.longest for workload in workloads) + config.output_len) // 64) * 64
    engine = {"max_model_len": fitting} | config.engine
    with LLM(config.model, max_num_seqs=config.batch, speculation=_speculation(config), **engine) as llm:
        comparisons, not_compared = _compare(llm, asked, config, progress)
        notes = [f"{each.name}: {each.origin}" for each in workloads]
        title = f"{config.model} + {llm.config.speculation.draft}, {llm.config.dtype}, {llm.config.device}"
        header = header_of(config, {"engine": asdict(llm.config)})
        return Verification(title, header, comparisons, not_compared, [*filter(None, [llm.note]), *notes])


def header_of(config: BenchConfig, target: Mapping[str, Any]) -> dict[str, Any]:
    """Versions, machine and settings. `target`: what was asked."""
    names = ("sets", "num_prompts", "output_len", "chat", "batch", "seed")
    settings = {**target, "temperatures": TEMPERATURES, **{name: getattr(config, name) for name in names}}
    return {"ssd": VERSION, "python": platform.python_version(), **origin(), "settings": settings}


def _speculation(config: BenchConfig) -> SpeculationConfig:
    """That of mode="auto", which has the drafters of all modes, with a draft placed as in mode="ssd"."""
    if config.draft is None:  # with drafts of K_SUFFIX tokens there would be room for all requests
        return SpeculationConfig.of({"k": K_DEFAULT, **config.speculation, "mode": "auto", "draft": SUFFIX})
    speculation = SpeculationConfig.of({**config.speculation, "mode": "auto", "draft": config.draft})
    if speculation.draft_model is None:
        return speculation
    kind = feature_draft_kind(speculation.draft_model)
    device, ranks = resolve_device(config.engine.get("device", "auto")), config.engine.get("tensor_parallel_size", 1)
    head, prepares = kind is not None, kind is not BlockCheckpoint
    ssd = placed(replace(speculation, mode="ssd"), device, head=head, prepares=prepares, ranks=ranks)
    return replace(ssd, mode="auto")


def _compare(
    llm: LLM, asked: Seq[Asked], config: BenchConfig, progress: Progress
) -> tuple[list[Comparison], dict[str, str]]:
    controller = llm.engine.round.drafter
    assert isinstance(controller, DepthController)
    modes: dict[str, Drafter] = {**controller.drafters, "auto": controller}
    not_compared: dict[str, str] = {}
    if "ssd" not in modes:
        not_compared["ssd"] = f"draft {config.draft or SUFFIX} prepares nothing: name a draft model or an EAGLE head"
    conditions = _conditions(min(config.batch, len(asked)))
    done = progress.begin("ar", len(modes) * len(conditions) * len(asked))
    ways = _Ways(llm, asked)
    reference: list[Result] = []
    comparisons: list[Comparison] = []
    for mode, drafter in modes.items():
        for condition in conditions:
            name = f"{mode}, {condition.name}"
            found, counts = ways.answer(mode, drafter, condition, functools.partial(done, name))
            reference = reference or found
            comparison = Comparison.of(name, asked, reference, found)
            comparison.counts = {each: count for each, count in counts.items() if count}
            needed = [{"sd": "drafted", "ssd": "look_ups"}.get(mode, ""), condition.needs]
            missing = [_MISSING[each] for each in needed if each and not counts[each]]
            if missing and not comparison.different and not comparison.errors:
                not_compared[name] = missing[0]
            else:
                comparisons.append(comparison)
            progress.tell(f"{name}: {missing[0] if missing else comparison.verdict}")
    comparisons[0].way += ": the reference"
    return comparisons, not_compared


class _Ways:
    """Answers the same requests of an engine under other conditions."""

    def __init__(self, llm: LLM, asked: Seq[Asked]) -> None:
        self._llm = llm
        self._requests = [
            (
                llm.encode(prompt),
                SamplingParams(each.temperature, seed=each.seed, max_tokens=each.max_new_tokens, logprobs=0),
            )
            for prompt, each in asked
        ]
        self._most_tokens = llm.engine.scheduler.max_num_batched_tokens
        self._withheld = BlockTable()

    def answer(
        self, mode: str, drafter: Drafter, condition: Condition, done: Callable[[], object]
    ) -> tuple[list[Result], Counter[str]]:
        self._llm.driver.call(lambda engine: self._set_up(engine, mode, drafter, condition))
        results, counts = list[Result](), Counter[str]()
        if condition.chunk:
            counts["chunked"] = sum(len(tokens) > condition.chunk for tokens, _ in self._requests)
        began = time.perf_counter()
        for submission in self._llm.driver.submit_many(self._requests):
            output = submission.result()
            counts.update({each: getattr(output.metrics, each) for each in _COUNTED})
            failed = output.error is not None
            results.append(Result(began, None if failed else answer_of(output, began), output.error or ""))
            done()
        return results, counts

    def _set_up(self, engine: Engine, mode: str, drafter: Drafter, condition: Condition) -> None:
        scheduler, pool = engine.scheduler, engine.scheduler.pool
        engine.use(drafter, condition.batch)
        pool.release(self._withheld)
        if not condition.warm:
            pool.clear_prefix_cache()
        pool.prefix_caching = condition.caching
        scheduler.max_num_batched_tokens = min(condition.chunk or self._most_tokens, self._most_tokens)
        if mode != "auto":  # SD and SSD may have one drafter, which prepares branches or not
            drafter.budget = max(self._llm.config.speculation.budgets) if mode == "ssd" else 0
        if condition.crowded:
            # Enough for the longest request at its end, and for a batch of the shortest at its beginning.
            drafted = self._llm.config.speculation.lookahead
            begin = sorted(pool.missing(BlockTable(), len(tokens) + drafted) for tokens, _ in self._requests)
            end = max(pool.missing(BlockTable(), len(tokens) + p.max_new_tokens) for tokens, p in self._requests)
            left = max(end, sum(begin[: condition.batch]))
            pool.grow(self._withheld, (pool.num_free - left) // len(pool.windows) * pool.block_size)
