"""The kernels of a device, chosen here and nowhere else: Triton on CUDA; C, numpy or plain torch on a CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ssd.kernels.ops import Ops
from ssd.kernels.quantized import Format, QuantizedOps


class Kernels(NamedTuple):
    """Modules, and functions, of the same interface on all devices; None: the caller computes it in plain torch."""

    ops: Callable[[Format | None], Ops]  # the operations of a model; their argument is the draft's quantization
    rounds: Any  # functions of `ssd.kernels.rounds`
    features: Any  # functions of `ssd.kernels.features`
    sampling: Any = None  # functions of `ssd.kernels.sampling`
    gumbel: Callable[..., torch.Tensor] | None = None  # `ssd.kernels.noise.gumbel`
    add_parts: Callable[..., torch.Tensor] | None = None  # `ssd.kernels.elementwise.add_parts`


def kernels(device: torch.device) -> Kernels:
    return _cuda_kernels() if device.type == "cuda" else _cpu_kernels()


@functools.cache
def _cuda_kernels() -> Kernels:
    from ssd.kernels import features, rounds, sampling  # Triton is imported for GPUs only
    from ssd.kernels.elementwise import add_parts
    from ssd.kernels.noise import gumbel
    from ssd.kernels.quantized_linear import TritonQuantizedOps
    from ssd.kernels.triton_ops import TritonOps

    def ops(quantization: Format | None) -> Ops:
        return TritonQuantizedOps(TritonOps(), quantization) if quantization is not None else TritonOps()

    return Kernels(ops, rounds, features, sampling, gumbel, add_parts)


@functools.cache
def _cpu_kernels() -> Kernels:
    from ssd.kernels import features_cpu, rounds_cpu
    from ssd.kernels.cpu_ops import CpuOps, CpuQuantizedOps
    from ssd.kernels.reference import ReferenceOps

    def ops(quantization: Format | None) -> Ops:
        compiled = CpuOps.load()  # None where there is no C compiler
        if quantization is None:
            return compiled or ReferenceOps()
        if compiled is None:
            return QuantizedOps(ReferenceOps(), quantization)
        return CpuQuantizedOps(compiled, quantization)

    return Kernels(ops, rounds_cpu, features_cpu)


def name_of(ops: Ops) -> str:
    """The kind of kernels, in words."""
    base = ops.ops if isinstance(ops, QuantizedOps) else ops
    return {"TritonOps": "Triton", "CpuOps": "C"}.get(type(base).__name__, "plain torch")
