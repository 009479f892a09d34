"""Gates: what follows the sums of a gated product, whose columns are a gate and an up in turns.

Where numbers are rounded on the way is part of a model's definition, and the same in all kernels for a format:

- dense weights (`rounded_gate`): product, silu and result are rounded to the type of x, as PyTorch does one operation
  at a time. A product of the library is rounded when it is stored, so the fused kernel rounds as well.
- weights in groups that are widened: as dense ones.
- codes (`wide_gate`): one rounding, at the end. No library computes them, so sums stay in registers.
- e4m3 rows (`wide_gate`): the product is rounded to bfloat16, since the library's is; then as codes.
- experts: as codes, with the limits and the shift of `GLU`, for dense weights, too: all of them have one kernel.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def gate_and_up(pairs, N: tl.constexpr, M: tl.constexpr):
    """A tile [N, M] of alternating gate and up rows as two of [N / 2, M]."""
    return tl.split(tl.permute(tl.reshape(pairs, (N // 2, 2, M)), (0, 2, 1)))


@triton.jit
def silu(x, slope):
    return x / (1.0 + tl.exp(-slope * x))


@triton.jit
def wide_gate(gate, up):
    return silu(gate, 1.0) * up


@triton.jit
def rounded_gate(gate, up, dtype: tl.constexpr):
    gate, up = gate.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32)
    return silu(gate, 1.0).to(dtype).to(tl.float32) * up
