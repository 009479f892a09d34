"""From settings to figures: checks what fits, builds the times of steps, runs the rounds."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

from ssd.errors import ConfigError, NotEnoughMemory
from ssd.models.repository import gib
from ssd.simulation.config import SimulationConfig
from ssd.simulation.hardware import DENSE_ROWS, FAN_OUT, GPUS, RESERVED, SHARED, SPREAD
from ssd.simulation.models import EAGLE, Model, eagle_head, open_model
from ssd.simulation.rounds import Mode, Setup, Step, World
from ssd.simulation.steps import Steps

_DEGREES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Figures:
    """What a simulation gives."""

    mode: Mode
    gpus: int  # idle ones are counted, too
    engines: int
    tokens_per_second: float  # of all engines
    ratio: float  # to the first mode
    tokens_per_second_per_gpu: float
    tokens_per_round: float
    round_ms: float
    verification_ms: float
    hits: float | None
    token_ms: float  # from one token of a sequence to the next
    latency_50: float | None  # seconds of whole requests, with --rate or --requests
    latency_99: float | None
    first_token_50: float | None  # with --rate
    target_busy: float  # share of the time
    draft_busy: float | None  # of draft servers
    cost: float | None  # of a million tokens


class Point(NamedTuple):
    """Values of the fields that are varied, and what they give."""

    values: dict[str, Any]
    figures: list[Figures]


def sweep(config: SimulationConfig, values: dict[str, list[Any]]) -> Iterator[Point]:
    """All combinations of the values of some fields, the last field's varying fastest."""
    for chosen in itertools.product(*values.values()):
        point = dict(zip(values, chosen, strict=True))
        yield Point(point, simulate(replace(config, **point)))


def simulate(config: SimulationConfig) -> list[Figures]:
    """All modes of a point."""
    found = [_figures(config, cast(Mode, mode)) for mode in config.modes]
    return [replace(each, ratio=each.tokens_per_second / found[0].tokens_per_second) for each in found]


def _figures(config: SimulationConfig, mode: Mode) -> Figures:
    engines, servers, draft_gpus = _layout(config, mode)
    world = World(_setup(config, mode, engines, servers))
    world.run()
    seconds, totals, price = world.clock.now, world.totals, config.price or 0.0
    speed, gpus = totals.tokens / seconds, config.gpus or engines * config.tensor_parallel_size + draft_gpus
    hourly = price * (gpus - draft_gpus) + (config.draft_price or price) * draft_gpus
    whole = totals.ended if config.rate is not None or config.requests is not None else []
    return Figures(
        mode,
        gpus,
        engines,
        tokens_per_second=speed,
        ratio=1.0,
        tokens_per_second_per_gpu=speed / gpus,
        tokens_per_round=totals.tokens / totals.decided,
        round_ms=1e3 * totals.round_seconds / totals.rounds,
        verification_ms=1e3 * totals.verify_seconds / totals.rounds,
        hits=totals.hits / totals.look_ups if mode == "ssd" and totals.look_ups else None,
        token_ms=1e3 * totals.sequence_seconds / totals.tokens,
        latency_50=_percentile([each.ended - each.arrived for each in whole], 50),
        latency_99=_percentile([each.ended - each.arrived for each in whole], 99),
        first_token_50=_percentile([each.first - each.arrived for each in whole if config.rate], 50),
        target_busy=totals.verify_seconds / engines / seconds,
        draft_busy=sum(each.busy for each in world.servers) / servers / seconds if draft_gpus else None,
        cost=hourly / 3600 / speed * 1e6 if config.price is not None else None,
    )


def _percentile(values: list[float], percent: int) -> float | None:
    return sorted(values)[min(len(values) - 1, len(values) * percent // 100)] if values else None


def _layout(config: SimulationConfig, mode: Mode) -> tuple[int, int, int]:
    """Engines, draft servers, and the GPUs that drafts have to themselves."""
    apart, shared = mode == "ssd" and config.placement == "process", config.shared_drafts
    own = config.draft_replicas if apart and not shared else 0
    common = config.draft_replicas * shared if apart else 0
    each = config.tensor_parallel_size + own
    engines = 1 if config.gpus is None else (config.gpus - common) // each
    if engines < 1:
        raise ConfigError(f"gpus={config.gpus}: {mode} needs {each + common} at least")
    return engines, shared if common else engines, engines * own + common


def _setup(config: SimulationConfig, mode: Mode, engines: int, servers: int) -> Setup:
    target, draft = models_of(config)
    apart = mode == "ssd" and config.placement == "process"
    own = config.draft_gpu if apart and config.draft_gpu else config.gpu
    steps = functools.partial(Steps, context=_context(config), slowdown=_slowdown(config, target))
    verify = steps(target, GPUS[config.gpu], config.tensor_parallel_size)
    setup = Setup(
        mode,
        verify.seconds,
        verify.seconds,
        prefill=verify.prefill(config.prompt) if config.rate is not None else 0.0,
        link=config.link_us / 1e6,
        engines=engines,
        servers=servers,
        **{name: getattr(config, name) for name in ("batch", "tokens", "requests", "rate", "budget", "backup", "seed")},
    )
    if mode == "ar" or draft is None:
        _check_fits(config, config.gpu, target)
        return setup
    if apart:
        _check_fits(config, own, draft)
    _check_fits(config, config.gpu, target, *([] if apart else [draft]))
    alone, measured = steps(draft, GPUS[own], 1, alone=True), config.draft_step_ms
    return replace(
        setup,
        k=config.k,
        rates=config.accepted,
        spread=SPREAD,
        hits=config.hits,
        replicas=config.draft_replicas if apart else 1,
        fan_out=FAN_OUT,
        draft=alone.seconds if measured is None else lambda rows, sequences: measured / 1e3,
        beside=_beside(alone, steps(_quantised(draft), GPUS[own], 1)) if mode == "ssd" and not apart else None,
    )


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


def models_of(config: SimulationConfig) -> tuple[Model, Model | None]:
    return _opened(config.model, config.draft)


@functools.lru_cache(maxsize=64)
def _opened(model: str, draft: str | None) -> tuple[Model, Model | None]:
    target = open_model(model)
    if draft is None:
        return target, None
    return target, eagle_head(target) if draft == EAGLE else open_model(draft, "draft", draft=True)


def _check_fits(config: SimulationConfig, gpu: str, *models: Model) -> None:
    """Refuses what one GPU does not hold, the target's share first. A draft is not split."""
    length, target = config.prompt + config.tokens, models_of(config)[0]
    ranks = [config.tensor_parallel_size if each is target else 1 for each in models]
    needed = sum(each.gpu_bytes(n, config.batch, length) for each, n in zip(models, ranks, strict=True))
    if not target.config.splits(config.tensor_parallel_size):
        raise ConfigError(
            f"tensor_parallel_size={config.tensor_parallel_size}: the heads or the MLP of {target.name} cannot be "
            "split so: use a power of 2 that divides them"
        )
    if needed > _usable(gpu):
        names = " and ".join(each.name for each in models)
        raise NotEnoughMemory(
            f"gpu={gpu!r} has {gib(int(_usable(gpu)))} for weights and KV, and {names} need {gib(int(needed))}: use a "
            "larger tensor_parallel_size, a smaller batch, weights in fp8 (NAME:fp8) or another gpu"
        )


def _usable(gpu: str) -> float:
    """Bytes of a GPU for weights and KV."""
    return (GPUS[gpu].memory - RESERVED) * (1 << 30)


def needs(config: SimulationConfig) -> list[dict[str, Any]]:
    """What the target alone needs and gives on every type of GPU, at the least degree that holds it."""
    target, _ = models_of(config)
    length, rows = config.prompt + config.tokens, []
    for name, gpu in GPUS.items():
        degrees = (n for n in _DEGREES if target.config.splits(n) and target.gpu_bytes(n, 1, length) <= _usable(name))
        row: dict[str, Any] = {"gpu": name, "gpus": next(degrees, None)}
        if (ranks := row["gpus"]) is not None:
            steps, weights = Steps(target, gpu, ranks, _context(config)), target.gpu_bytes(ranks)
            row |= {
                "weights_gib": weights / (1 << 30),
                "kv_tokens": int((_usable(name) - weights) / target.kv_bytes(length, ranks) * length),
                "floor_tokens_per_second": 1 / steps.floor,
                "tokens_per_second": 1 / steps.seconds(1, 1),
            }
        rows.append(row)
    return rows
