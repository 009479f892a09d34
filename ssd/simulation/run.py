"""From settings to figures: checks what fits, builds the times of steps, runs the rounds."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from ssd.errors import ConfigError, NotEnoughMemory
from ssd.models.repository import gib
from ssd.simulation.config import SimulationConfig
from ssd.simulation.hardware import DENSE_ROWS, FAN_OUT, GPUS, RESERVED, SHARED, SPREAD
from ssd.simulation.models import EAGLE, Model, eagle_head, open_model
from ssd.simulation.rounds import Load, Mode, Rules, Step, Times, World
from ssd.simulation.steps import Steps

_GIB = 2.0**30
_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Figures:
    """What a simulation gives. Shares are those of the time; latencies are in seconds."""

    mode: Mode
    gpus: int
    engines: int
    tokens_per_second: float  # of all engines
    ratio: float  # to the first mode
    tokens_per_second_per_gpu: float
    tokens_per_round: float
    round_ms: float
    verification_ms: float
    hits: float | None
    token_ms: float  # of a sequence, between two tokens, on average
    latency_50: float | None  # of whole requests, with --rate or --requests
    latency_99: float | None
    first_token_50: float | None  # with --rate
    target_busy: float
    draft_busy: float | None  # of servers with GPUs of their own
    cost: float | None  # of a million tokens


def simulate(config: SimulationConfig) -> list[Figures]:
    """All modes of a point."""
    found: list[Figures] = []
    for mode in config.modes:
        each = _figures(config, mode)  # type: ignore[arg-type]
        found.append(replace(each, ratio=each.tokens_per_second / (found or [each])[0].tokens_per_second))
    return found


def sweep(config: SimulationConfig, values: dict[str, list[Any]]) -> Iterator[tuple[dict[str, Any], list[Figures]]]:
    """All combinations of the values of some fields, the last field's varying fastest."""
    if not values:
        yield {}, simulate(config)
        return
    (name, own), others = next(iter(values.items())), dict(list(values.items())[1:])
    for value in own:
        for point, found in sweep(replace(config, **{name: value}), others):
            yield {name: value, **point}, found


def _figures(config: SimulationConfig, mode: Mode) -> Figures:
    engines, servers, draft_gpus = _layout(config, mode)
    world = World(_times(config, mode), Load(config.batch, config.tokens, config.requests, config.rate), _rules(config, mode), engines, servers, config.seed)
    world.run()
    seconds, totals, target_gpus = world.clock.now, world.totals, engines * config.tensor_parallel_size
    speed = totals.tokens / seconds
    hourly = (config.price or 0.0) * target_gpus + (config.draft_price or config.price or 0.0) * draft_gpus
    latencies = sorted(each.ended - each.arrived for each in totals.ended)
    firsts = sorted(each.first - each.arrived for each in totals.ended)
    whole = config.rate is not None or config.requests is not None
    return Figures(
        mode,
        target_gpus + draft_gpus,
        engines,
        tokens_per_second=speed,
        ratio=1.0,
        tokens_per_second_per_gpu=speed / (target_gpus + draft_gpus),
        tokens_per_round=totals.tokens / totals.decided,
        round_ms=1e3 * totals.round_seconds / totals.rounds,
        verification_ms=1e3 * sum(each.busy for each in world.engines) / totals.rounds,
        hits=totals.hits / totals.look_ups if mode == "ssd" and totals.look_ups else None,
        token_ms=1e3 * totals.sequence_seconds / totals.tokens,
        latency_50=_percentile(latencies, 50) if whole else None,
        latency_99=_percentile(latencies, 99) if whole else None,
        first_token_50=_percentile(firsts, 50) if config.rate is not None else None,
        target_busy=sum(each.busy for each in world.engines) / engines / seconds,
        draft_busy=sum(each.busy for each in world.servers) / len(world.servers) / seconds if draft_gpus else None,
        cost=hourly / 3600 / speed * 1e6 if config.price is not None else None,
    )


def _percentile(ordered: list[float], percent: int) -> float:
    return ordered[min(len(ordered) - 1, len(ordered) * percent // 100)]


def _layout(config: SimulationConfig, mode: Mode) -> tuple[int, int, int]:
    """Engines, draft servers, and the GPUs that drafts have to themselves."""
    ranks = config.tensor_parallel_size
    apart = mode == "ssd" and config.placement == "process"
    own = config.draft_replicas if apart and not config.shared_drafts else 0
    shared = config.shared_drafts * config.draft_replicas if apart else 0
    engines = 1 if config.gpus is None else (config.gpus - shared) // (ranks + own)
    if engines < 1:
        raise ConfigError(f"gpus={config.gpus}: {mode} needs {ranks + own + shared} at least")
    return engines, config.shared_drafts if shared else engines, engines * own + shared


def _rules(config: SimulationConfig, mode: Mode) -> Rules:
    """Replicas share the outcomes: more branches, so fewer misses."""
    more = config.draft_replicas**-FAN_OUT if config.placement == "process" else 1.0
    hits = 1 - (1 - config.hits) * more
    return Rules(mode, config.k, config.accepted, hits, config.budget, config.backup, SPREAD)


def _times(config: SimulationConfig, mode: Mode) -> Times:
    target, draft = models_of(config)
    gpu, own = GPUS[config.gpu], GPUS[config.draft_gpu or config.gpu]
    steps = functools.partial(Steps, context=_context(config), slowdown=_slowdown(config, target))
    verify = steps(target, gpu, config.tensor_parallel_size)
    prefill = verify.prefill(config.prompt) if config.rate is not None else 0.0
    if mode == "ar" or draft is None:
        _check_fits(config, config.gpu, target)
        return Times(verify.seconds, verify.seconds, verify.seconds, None, prefill)
    apart = mode == "ssd" and config.placement == "process"
    _check_fits(config, config.gpu, target, None if apart else draft)
    if apart:
        _check_fits(config, config.draft_gpu or config.gpu, None, draft)
    alone = steps(draft, own if apart else gpu, 1, alone=True)
    write: Step = alone.seconds if config.draft_step_ms is None else functools.partial(_fixed, config.draft_step_ms / 1e3)
    beside = _beside(alone, steps(_quantised(draft), gpu, 1)) if mode == "ssd" and not apart else None
    return Times(verify.seconds, write, write, beside, prefill, config.link_us / 1e6)


def _fixed(seconds: float, rows: int, sequences: int) -> float:
    return seconds


def _beside(dense: Steps, quantised: Steps) -> Step:
    """What a step of a draft adds to a verification on its GPU: bytes and arithmetic, not its latency."""
    return lambda rows, sequences: (quantised if rows <= DENSE_ROWS else dense).busy(rows, sequences) / SHARED


def _quantised(draft: Model) -> Model:
    """Beside a verification a draft model reads int8, as by the default of `draft_quantization`."""
    return replace(draft, format="int8", rounded_head=True) if draft.format == "bf16" and draft.name != EAGLE else draft


def _context(config: SimulationConfig) -> float:
    return config.prompt + config.tokens / 2


def _slowdown(config: SimulationConfig, target: Model) -> float:
    """Measured time of a step over the predicted one."""
    if config.measured_ar is None:
        return 1.0
    predicted = Steps(target, GPUS[config.gpu], config.tensor_parallel_size, _context(config)).seconds(1, 1)
    return 1 / config.measured_ar / predicted


@functools.lru_cache(maxsize=64)
def _opened(model: str, draft: str | None) -> tuple[Model, Model | None]:
    target = open_model(model)
    if draft is None:
        return target, None
    return target, eagle_head(target) if draft == EAGLE else open_model(draft, "draft", draft=True)


def models_of(config: SimulationConfig) -> tuple[Model, Model | None]:
    return _opened(config.model, config.draft)


def gpu_bytes(model: Model, ranks: int, sequences: int, length: int) -> float:
    """What one rank keeps: weights and KV."""
    return model.weight_bytes / ranks + sequences * model.kv_bytes(length, ranks)


def _check_fits(config: SimulationConfig, gpu: str, target: Model | None, draft: Model | None = None) -> None:
    """What is on one GPU."""
    length, ranks = config.prompt + config.tokens, config.tensor_parallel_size
    if target is not None and not target.config.splits(ranks):
        raise ConfigError(f"tensor_parallel_size={ranks}: {target.name} has no heads and MLPs to split so: use a divisor")
    held = [(each, ranks if each is target else 1) for each in (target, draft) if each is not None]
    needed = sum(gpu_bytes(each, split, config.batch, length) for each, split in held)
    if needed > usable(gpu):
        names = " and ".join(each.name for each, _ in held)
        raise NotEnoughMemory(
            f"gpu={gpu!r} has {gib(int(usable(gpu)))} for weights and KV, and {names} need {gib(int(needed))} of it: use "
            "a larger tensor_parallel_size, a smaller batch, weights in fp8 (NAME:fp8) or another gpu"
        )


def usable(gpu: str) -> float:
    """Bytes of a GPU for weights and KV."""
    return (GPUS[gpu].memory - RESERVED) * _GIB


def needs(config: SimulationConfig) -> list[dict[str, Any]]:
    """What the target alone needs, and what it gives on every type of GPU, at the least degree that holds it."""
    target, _ = models_of(config)
    length, rows = config.prompt + config.tokens, []
    for name, gpu in GPUS.items():
        fitting = (n for n in _DEGREES if target.config.splits(n) and gpu_bytes(target, n, 1, length) <= usable(name))
        ranks = next(fitting, None)
        row: dict[str, Any] = {"gpu": name, "gpus": ranks}
        if ranks is not None:
            steps = Steps(target, gpu, ranks, _context(config))
            left = usable(name) - target.weight_bytes / ranks
            row |= {
                "weights_gib": target.weight_bytes / ranks / _GIB,
                "kv_tokens": int(left / (target.kv_bytes(length, ranks) / length)),
                "floor_tokens_per_second": 1 / steps.floor,
                "tokens_per_second": 1 / steps.seconds(1, 1),
            }
        rows.append(row)
    return rows
