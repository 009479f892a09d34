"""Splits the cores of a CPU between the target and draft models in processes of their own.

A draft model has K + 1 steps over all branches while the target verifies. With too few cores its drafts come late, and
the target lacks every core that the draft has.
"""

from __future__ import annotations

import time
from dataclasses import replace

import torch

from ssd.assembly.device import kv_block_size
from ssd.assembly.draft_models import load_draft
from ssd.assembly.models import make_runner
from ssd.assembly.open import open_checkpoint
from ssd.config import EngineConfig, SpeculationConfig
from ssd.drafting.fan_out import RANKS
from ssd.execution.batch import Batch
from ssd.execution.runner import ModelRunner
from ssd.execution.threads import num_cores
from ssd.kernels.cpu.threads import use_threads

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


def _loaded(config: EngineConfig, target: ModelRunner) -> ModelRunner:
    checkpoint = open_checkpoint(str(config.speculation.draft))
    size = kv_block_size(config, target.decoder.device)
    return make_runner(config, load_draft(config, checkpoint, target.state, size), target.state, 1)


def _seconds(runner: ModelRunner, rows: int, threads: int) -> float:
    """The shortest of some forward passes over so many rows of padding."""
    batch = Batch([runner.state.padding] * rows, [0] * rows, [1] * rows, [1] * rows)
    found = []
    with use_threads(min(threads, torch.get_num_threads())):
        for _ in range(_REPEATS):
            began = time.perf_counter()
            runner.forward(batch)
            found.append(time.perf_counter() - began)
    return min(found)
