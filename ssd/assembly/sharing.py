"""Shares one GPU between target and draft model during a round: in two parts, if that is faster."""

from __future__ import annotations

import logging
import statistics

import torch

from ssd.core import SamplingParams
from ssd.drafting.fan_out import FanOut, OutcomeStatistics
from ssd.drafting.runner import MAX_ROWS_IN_PART, DraftRunner
from ssd.execution.batch import Batch
from ssd.execution.clock import now
from ssd.execution.runner import ModelRunner
from ssd.kernels.cuda.driver import DriverError
from ssd.kernels.cuda.partition import split

log = logging.getLogger("ssd")
_SIZES = (32, 40, 48)  # multiprocessors of the draft's part
_REPEATS = 3


@torch.inference_mode()
def share_gpu(target: ModelRunner, draft: DraftRunner, fan_out: FanOut) -> None:
    """Measures a round of one sequence on the whole GPU and with parts of several sizes, and keeps the fastest."""
    widths = [width for width in draft.shapes.widths if width <= MAX_ROWS_IN_PART]
    if target.followers is not None or not widths:
        return
    seconds = {0: _round_seconds(target, draft, fan_out, widths[-1])}  # by size of the draft's part; 0: no parts
    try:
        for size in _SIZES:
            _split(target, draft, size)
            seconds[size] = _round_seconds(target, draft, fan_out, widths[-1])
    except DriverError as error:
        log.info("the GPU cannot be split further: %s", error)
    best = min(seconds, key=seconds.__getitem__)
    draft.part = None
    if best:
        _split(target, draft, best)
    times = ", ".join(f"{size}: {1e3 * time:.1f}" for size, time in seconds.items())
    log.info("multiprocessors for the draft alone, and ms of a round: %s; it gets %d", times, best)


def _split(target: ModelRunner, draft: DraftRunner, size: int) -> None:
    """Gives the draft that many multiprocessors, and the target the others in rounds of one sequence."""
    parts = split(draft.device, size)
    draft.part = parts.small
    target.capture_in_part(parts.large.stream, draft.shapes.reads)


def _round_seconds(target: ModelRunner, draft: DraftRunner, fan_out: FanOut, width: int) -> float:
    """Median time of a verification of padding, and of a preparation beside it."""
    count, times = draft.shapes.lookahead, []
    for _ in range(1 + _REPEATS):  # the first one captures graphs
        staged = draft.stage_branches(
            [draft.state.padding],
            [count],
            [SamplingParams()],
            budget=width,
            fan_out=fan_out,
            statistics=OutcomeStatistics(),
        )
        batch = target.stage(Batch([target.state.padding], [0], [1 + count], [1 + count]))
        torch.cuda.synchronize(draft.device)
        began = now(draft.device)
        target.run(batch, in_part=draft.part is not None)
        draft.branch(staged, count, overlap=True)
        draft.join()
        ended = now(draft.device)
        ended.wait()
        times.append(ended.since(began))
    return statistics.median(times[1:])
