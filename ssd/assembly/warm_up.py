"""Compiles kernels and captures graphs before the first request, so that none waits for it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from itertools import pairwise

import torch

from ssd.kernels.triton.compile import compile_only

log = logging.getLogger("ssd")
loading = logging.getLogger("ssd.loading")
_Step = Callable[[], None]


def warm_up(model: str, rehearsals: Seq[_Step], captures: Seq[_Step]) -> None:
    """`rehearsals` launch all kinds of kernels on padding, `captures` capture graphs. `model`: for the log."""
    times = [time.perf_counter()]
    loading.info("compiling kernels of the %s", model)
    with compile_only():
        _run(rehearsals)
    times.append(time.perf_counter())
    _run(rehearsals)  # compares products of a library with ours, and loads the kernels of libraries
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    times.append(time.perf_counter())
    loading.info("capturing CUDA graphs of the %s", model)
    _run(captures)
    times.append(time.perf_counter())
    took = [end - begin for begin, end in pairwise(times)]
    log.info("%s: kernels compiled in %.1f s, checked in %.1f s, graphs captured in %.1f s", model, *took)


def _run(steps: Seq[_Step]) -> None:
    for step in steps:
        step()
