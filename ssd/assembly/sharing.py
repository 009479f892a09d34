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
from ssd.kernels.driver import DriverError
from ssd.kernels.partition import split

log = logging.getLogger("ssd")
_SIZES = (32, 40, 48)  # multiprocessors of the draft's part
_REPEATS = 3


@torch.inference_mode()
def share_gpu(target: ModelRunner, draft: DraftRunner, fan_out: FanOut) -> None:
    """Measures a round of one sequence on the whole GPU and in parts of several sizes, and keeps the fastest."""
    width, rows = min(draft.shapes.max_width, MAX_ROWS_IN_PART), 1 + draft.shapes.lookahead
    if target.followers is not None or draft.runner.decoder.tp.size > 1:
        return
    best, size = _seconds(target, draft, fan_out, width, in_part=False), None
    log.debug("a round on the whole GPU: %.2f ms", 1e3 * best)
    for processors in _SIZES:
        try:
            partition = split(draft.device, processors)
        except DriverError as error:
            log.info("the target and the draft share all multiprocessors: %s", error)
            return
        draft.part = partition.small
        target.capture_in_part(partition.large.stream, rows)
        seconds = _seconds(target, draft, fan_out, width, in_part=True)
        log.debug("a round with %d multiprocessors for the draft: %.2f ms", processors, 1e3 * seconds)
        if seconds < best:
            best, size = seconds, processors
    draft.part = None
    if size is not None:
        partition = split(draft.device, size)
        draft.part = partition.small
        most = max(1, MAX_ROWS_IN_PART // min(draft.shapes.widths))  # sequences
        target.capture_in_part(partition.large.stream, most * rows)
        log.info("preparations of up to %d branches have %d multiprocessors", MAX_ROWS_IN_PART, size)


def _seconds(target: ModelRunner, draft: DraftRunner, fan_out: FanOut, width: int, *, in_part: bool) -> float:
    """Median time of a verification of padding with a preparation beside it."""
    slot, k = draft.state.padding, draft.shapes.lookahead
    times = []
    for _ in range(1 + _REPEATS):  # the first captures graphs
        staged = draft.stage_branches(
            [slot], [k], [SamplingParams()], budget=width, fan_out=fan_out, statistics=OutcomeStatistics()
        )
        draft.snapshot(staged)
        batch = target.stage(Batch([target.state.padding], [0], [1 + k], [1 + k]))
        torch.cuda.synchronize(draft.device)
        began = now(draft.device)
        target.run(batch, in_part=in_part)
        draft.branch(staged, k, overlap=True)
        draft.join()
        ended = now(draft.device)
        ended.wait()
        times.append(ended.since(began))
    return statistics.median(times[1:])
