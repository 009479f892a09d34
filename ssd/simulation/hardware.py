"""GPU types, and what share of their speed this engine's kernels reach. Data only.

The sizes of GPUs are those of their makers' data sheets: dense arithmetic, memory in GiB, links in one direction. The
shares are measured on an H200 (`bench/results`, `docs/performance.md`); of other GPUs they are an assumption.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final, NamedTuple


class GPU(NamedTuple):
    """One type of GPU."""

    memory: float  # GiB
    bandwidth: float  # TB/s
    bf16: float  # TFLOP/s
    fp8: float  # TFLOP/s; those of bf16 where there are no such tensor cores
    link: float  # GB/s to another GPU of the host
    hopper: bool = False  # has the kernel for a draft's whole step


GPUS: Final[Mapping[str, GPU]] = {
    "b200": GPU(180, 8.0, 2250, 4500, 900, True),
    "h200": GPU(140, 4.8, 989, 1979, 450, True),
    "h100-sxm": GPU(80, 3.35, 989, 1979, 450, True),
    "h100-nvl": GPU(94, 3.9, 835, 1671, 300, True),
    "h100-pcie": GPU(80, 2.0, 756, 1513, 64, True),
    "a100-80g": GPU(80, 2.04, 312, 312, 300),
    "l40s": GPU(48, 0.864, 362, 733, 32),
    "rtx-5090": GPU(32, 1.79, 210, 419, 64, True),
    "rtx-4090": GPU(24, 1.01, 165, 330, 32),
}


class Format(NamedTuple):
    """How fast products with weights of one format are."""

    bits: float  # of a weight, with its scales
    read: float  # share of the copy bandwidth at which weights are read
    compute: float  # share of the peak of bf16, or of fp8 where both factors have 8 bits
    fp8: bool = False


FORMATS: Final[Mapping[str, Format]] = {
    "bf16": Format(16, 1.0, 0.80),  # vllm-8b.json; compute: a large product, docs/performance.md
    "fp8": Format(8, 0.97, 0.45),  # quantized-products.json, 1 to 32 rows; compute: 64 and 128 rows
    "int8": Format(8, 0.97, 0.45),  # the same
    "fp8_dynamic": Format(8, 0.98, 0.74, True),  # the same
    "int4": Format(4.25, 0.76, 0.40),  # the same
    "awq": Format(4.25, 0.50, 0.40),  # packed-products.json; also GPTQ
    "q4_k": Format(4.8, 0.55, 0.40),  # packed-products.json
    "mxfp4": Format(4.25, 0.77, 0.20),  # experts-mxfp4.json, 8, 64 and 256 rows
}

COPY: Final = 0.883  # of the data sheet's bandwidth: 4.24 of 4.8 TB/s, experts-models.json
KV: Final = 0.85  # share of a copy at which attention reads KV: vllm-8b.json, contexts of 300 and 16k tokens
# Seconds of a layer beside its products' reading (launches, attention, norms), by the MB of weights that it reads.
# Drafts: docs/performance.md; 8B in fp8 and bf16: vllm-8b-fp8.json, vllm-8b.json; 32B: ssd-one-gpu.json.
LAYER: Final = ((125.0, 30e-6), (218.0, 26e-6), (436.0, 19e-6), (975.0, 18e-6))
# What one kernel for a draft's whole step saves, by rows: docs/performance.md (*Drafts*).
WHOLE_STEP: Final = ((1.0, 300e-6), (16.0, 160e-6))
SUM: Final = 5e-6  # seconds of each sum over ranks, beside its bytes: docs/scaling.md
MESSAGE: Final = 4 << 20  # bytes that take as long as one more message: ssd/parallel/tensor.py
SHARED: Final = 0.70  # speed of a draft that prepares beside the verification on its GPU: ssd-one-gpu.json
DENSE_ROWS: Final = 32  # a draft in int8 beside its target computes more rows in bf16: docs/algorithm.md
FAN_OUT: Final = 0.45  # misses are branches ** -FAN_OUT: docs/scaling.md, draft-apart.json
SPREAD: Final = (
    0.6  # deviation of the sequences' log-odds of acceptance: draft-apart-batches.json (more), vllm-8b.json (less)
)
RESERVED: Final = 2.0  # GiB of a GPU for activations, graphs and the driver's context: an estimate


def interpolated(table: tuple[tuple[float, float], ...], at: float) -> float:
    """Between the table's points, linear in the logarithm; beyond its ends, the last value."""
    (low, value), *_ = table
    for high, end in table:
        if at <= high:
            return value if high <= low or at <= low else value + (end - value) * math.log(at / low, high / low)
        low, value = high, end
    return value
