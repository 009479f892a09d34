"""The kernels of a device, chosen here and nowhere else: Triton on CUDA, C on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ssd.kernels.ops import Ops


class Kernels(NamedTuple):
    """Functions of the same interface on all devices; None: the caller computes it in plain torch."""

    ops: Callable[[], Ops]  # makes the operations of a model
    rounds: Any  # functions of `ssd.kernels.triton.rounds`
    runs: Any  # functions of `ssd.kernels.triton.runs`
    features: Any  # functions of `ssd.kernels.triton.features`
    sampling: Any  # functions of `ssd.kernels.triton.sampling`
    trees: Any  # functions of `ssd.kernels.triton.trees`
    add_parts: Callable[..., torch.Tensor] | None = None  # `ssd.kernels.triton.elementwise.add_parts`
    draft_table: Any = None  # functions of `ssd.kernels.triton.draft_table`, for rounds in flight
    build: str = ""  # hash of the machine code of a CPU's kernels


def kernels(device: torch.device) -> Kernels:
    return _cuda_kernels() if device.type == "cuda" else _cpu_kernels()


@functools.cache
def _cuda_kernels() -> Kernels:
    from ssd.kernels.triton import draft_table, features, rounds, runs, sampling, trees  # imported for GPUs only
    from ssd.kernels.triton.elementwise import add_parts
    from ssd.kernels.triton.ops import TritonOps

    return Kernels(TritonOps, rounds, runs, features, sampling, trees, add_parts, draft_table)


@functools.cache
def _cpu_kernels() -> Kernels:
    from ssd.kernels.cpu import features, library, trees
    from ssd.kernels.cpu.ops import CpuOps
    from ssd.kernels.cpu.rounds import Rounds
    from ssd.kernels.cpu.runs import Runs
    from ssd.kernels.cpu.sampling import Sampling

    compiled = library.load()
    rounds, runs, sampling = Rounds(compiled), Runs(compiled), Sampling(compiled)
    return Kernels(lambda: CpuOps(compiled), rounds, runs, features, sampling, trees, build=compiled.build)


def name_of(ops: Ops) -> str:
    """The kind of kernels, in words."""
    return {"TritonOps": "Triton", "CpuOps": "C"}[type(ops).__name__]
