"""Times forward passes on a CPU: to split its cores between target and draft models, and to know what modes can pay.

A draft model in a process of its own has K + 1 steps over all branches while the target verifies. With too few cores
its drafts come late, and the target lacks every core that the draft has.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace

import torch

from ssd.assembly.device import kv_block_size
from ssd.assembly.draft_models import load_draft
from ssd.assembly.models import make_runner
from ssd.assembly.open import open_checkpoint
from ssd.config import EngineConfig, SpeculationConfig
from ssd.drafting.arms import Arm
from ssd.drafting.fan_out import RANKS
from ssd.execution.batch import Batch
from ssd.execution.runner import ModelRunner
from ssd.execution.threads import ThreadController, num_cores
from ssd.kernels.cpu.threads import use_threads

log = logging.getLogger("ssd")

_FEWEST_CORES = 4  # with fewer, a draft has one
_REPEATS = 5


def split_cores(config: EngineConfig, target: ModelRunner, draft: ModelRunner | None) -> SpeculationConfig:
    """The options with `draft_threads`: the fewest with which drafts are prepared within a verification.

    Both are measured for a batch of one. If no number is enough, the one with the shortest round is taken. `draft`: the
    runner in this process; without one the draft is loaded for the measurement. With ranks nothing is measured.
    """
    speculation, cores = config.speculation, num_cores()
    if target.decoder.device.type != "cpu" or speculation.placement != "process":
        return speculation
    replicas, ranks = (
        speculation.draft_replicas,
        max(config.tensor_parallel_size, speculation.draft_tensor_parallel_size),
    )
    choices = [n for n in (1, 2, 3, 4, 6, 8, 12, 16) if 2 * n * replicas <= cores]
    if speculation.draft_threads is not None or ranks > 1 or cores < _FEWEST_CORES or len(choices) < 2:
        return replace(speculation, draft_threads=speculation.draft_threads or 1)
    draft = draft or _loaded(config, target)
    branches = min(max(speculation.budgets), RANKS * (speculation.lookahead + 1))
    seconds: dict[int, float] = {}
    for threads in choices:
        verifying = _seconds(target, speculation.lookahead + 1, cores - threads * replicas)
        preparing = _seconds(draft, branches, threads) * (speculation.lookahead + 1)
        seconds[threads] = max(verifying, preparing)
        if preparing <= verifying:
            break
    return replace(speculation, draft_threads=min(seconds, key=seconds.__getitem__))


def times_passes(config: EngineConfig) -> bool:
    """Whether the choice of modes begins with times of forward passes.

    Not on a GPU, where streams, graphs and rounds in flight share its time, so that only whole rounds show what they
    take (`measure_modes`); and not with ranks, to which every change of threads would have to be told.
    """
    speculation, ranks = config.speculation, config.tensor_parallel_size
    on_cpu = config.device == "cpu" and speculation.draft_device in (None, "cpu")
    return speculation.mode == "auto" and on_cpu and ranks * speculation.draft_tensor_parallel_size == 1


def least_seconds(
    config: EngineConfig, target: ModelRunner, draft: ModelRunner | None
) -> Callable[[Arm], float] | None:
    """What a round of an arm takes with one sequence if nothing but forward passes costs time, and no outcome misses.

    `draft`: the runner in this process. None where it is not measured, as with heads, which are no models of their own.
    """
    if not times_passes(config) or target.features is not None:
        return None
    speculation, k, load = config.speculation, config.speculation.lookahead, ThreadController()
    first = _seconds(target, k + 1, num_cores(), 1)  # the load of the machine is measured meanwhile
    cores = load.count(num_cores())
    verify = min(first, _seconds(target, k + 1, cores, 1))
    plain = _seconds(target, 1, cores, 2)
    step = _seconds(draft, 1, cores, 2) if draft is not None else 0.0
    sd, ssd = verify + k * step, verify + (k + 1) * step  # SSD in turns, unless the draft has free cores of its own
    left = cores - speculation.draft_cores
    if draft is not None and speculation.placement == "process" and left > 0:
        ssd = (k + 1) * _seconds(draft, 1, speculation.draft_threads or 1, 1)
        if ssd < verify * cores / left:  # else a verification on the cores that are left is no longer
            ssd = max(ssd, _seconds(target, k + 1, left, 1))
    log.info("ms of a round at least: ar %.1f, sd %.1f, ssd %.1f with k=%d", 1e3 * plain, 1e3 * sd, 1e3 * ssd, k)
    return lambda arm: plain + ((ssd if arm.width else sd) - plain) * arm.k / k


def _loaded(config: EngineConfig, target: ModelRunner) -> ModelRunner:
    checkpoint = open_checkpoint(str(config.speculation.draft))
    size = kv_block_size(config, target.decoder.device)
    return make_runner(config, load_draft(config, checkpoint, target.state, size), target.state, 1)


def _seconds(runner: ModelRunner, rows: int, threads: int, repeats: int = _REPEATS) -> float:
    """The shortest of some forward passes over so many rows of padding."""
    batch = Batch([runner.state.padding] * rows, [0] * rows, [1] * rows, [1] * rows)
    found = []
    with use_threads(min(threads, torch.get_num_threads())):
        for _ in range(repeats):
            began = time.perf_counter()
            runner.forward(batch)
            found.append(time.perf_counter() - began)
    return min(found)
