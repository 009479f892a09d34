"""Rounds rows to 8 bits before a product, in one Triton kernel: see `quantized.rounded_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.e4m3 import encode, widen_bits
from ssd.kernels.quantized import LEAST_SCALE, ROW_LIMITS, RowType

_BLOCK = 16384  # numbers that one program rounds at a time


@triton.jit
def _round_kernel(
    x_ptr, out_ptr, scale_ptr, stored_ptr, K, group, x_stride,
    INTEGERS: tl.constexpr, NARROW: tl.constexpr, LOWEST: tl.constexpr, HIGHEST: tl.constexpr, LEAST: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One group of one row. stored_ptr: its scale, or None: that of its largest number."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * group
    end = tl.minimum(K, first + group)
    if stored_ptr is None:
        largest = tl.zeros((BLOCK,), tl.float32)
        for start in range(first, end, BLOCK):
            k = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + k, mask=k < end, other=0.0).to(tl.float32)
            largest = tl.maximum(largest, tl.abs(x))
        scale = tl.maximum(tl.div_rn(tl.max(largest, 0), HIGHEST), LEAST)
        tl.store(scale_ptr + row * tl.num_programs(1) + tl.program_id(1), scale)
    else:
        scale = tl.load(stored_ptr)
    for start in range(first, end, BLOCK):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_stride + k, mask=k < end, other=0.0).to(tl.float32)
        if NARROW:
            rounded = encode(x, scale)
        elif INTEGERS:
            scaled = tl.minimum(tl.maximum(tl.div_rn(x, scale), LOWEST), HIGHEST)
            rounded = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, ties to even
        else:
            rounded = widen_bits(encode(x, scale).to(tl.int32), tl.float32)
        tl.store(out_ptr + row * K + k, rounded.to(out_ptr.dtype.element_ty), mask=k < end)


def rounded_rows(
    x: torch.Tensor, group: int | None, kind: RowType, stored: torch.Tensor | None, *, narrow: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `Ops.round_rows`. narrow: e4m3 numbers instead of such of the type of x."""
    (num_rows, depth), size = x.shape, group or x.shape[1]
    out = torch.empty(x.shape, dtype=torch.uint8 if narrow else x.dtype, device=x.device)
    groups = triton.cdiv(depth, size)
    scales = torch.empty(num_rows, groups, dtype=torch.float32, device=x.device) if stored is None else stored
    lowest, highest = ROW_LIMITS[kind]
    block = min(_BLOCK, triton.next_power_of_2(size))
    _round_kernel[(num_rows, groups)](
        *(x, out, scales, stored, depth, size, x.stride(0)),
        INTEGERS=kind == "int8",
        NARROW=narrow,
        LOWEST=lowest,
        HIGHEST=highest,
        LEAST=LEAST_SCALE,
        BLOCK=block,
        num_warps=max(1, min(16, block // 512)),
    )
    return out.view(torch.float8_e4m3fn) if narrow else out, scales if stored is None else stored.expand(num_rows, 1)
