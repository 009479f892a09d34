"""Rounds rows to 8 bits before a product, in one Triton kernel: see `codes.rounded_rows`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.codes import LEAST_SCALE, ROW_LIMITS
from ssd.kernels.cuda.launch import early_launch
from ssd.kernels.triton.e4m3 import encode, encode_by_cvt, widen_bits
from ssd.kernels.weights import RoundedRows, RowRounding

_BLOCK = 16384  # numbers of a group that one program rounds at a time
_TOGETHER = 2048  # numbers of small groups, likewise


@triton.jit
def _rounded(
    x, scale, dtype: tl.constexpr,
    INTEGERS: tl.constexpr, NARROW: tl.constexpr, RESTORED: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr,
):  # fmt: skip
    if NARROW:
        return encode_by_cvt(x, scale)
    else:
        if INTEGERS:
            scaled = tl.minimum(tl.maximum(tl.div_rn(x, scale), LOWEST), HIGHEST)
            rounded = (scaled + 12582912.0) - 12582912.0  # 1.5 * 2^23: to the nearest integer, ties to even
        else:
            rounded = widen_bits(encode(x, scale).to(tl.int32), tl.float32)
        if RESTORED:
            rounded *= scale
        return rounded.to(dtype)


@triton.jit
def _scale(largest, HIGHEST: tl.constexpr, LEAST: tl.constexpr, POWERS: tl.constexpr):
    """Of groups with these largest numbers; POWERS: the power of two that is not below it."""
    scale = tl.maximum(tl.div_rn(largest, HIGHEST), LEAST)
    if POWERS:
        scale = ((scale.to(tl.int32, bitcast=True) + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)
    return scale


@triton.jit
def _round_kernel(
    x_ptr, out_ptr, scale_ptr, stored_ptr, K, group, x_stride,
    INTEGERS: tl.constexpr, NARROW: tl.constexpr, RESTORED: tl.constexpr,
    LOWEST: tl.constexpr, HIGHEST: tl.constexpr, LEAST: tl.constexpr, POWERS: tl.constexpr,
    TOGETHER: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some groups of one row, each in one block, or one group in several blocks (TOGETHER is 0). stored_ptr: the scale,
    or None: those of the groups' largest numbers."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    dtype = out_ptr.dtype.element_ty
    if TOGETHER:
        groups = tl.program_id(1) * TOGETHER + tl.arange(0, TOGETHER)
        within = tl.arange(0, BLOCK)
        k = groups[:, None] * group + within[None, :]
        mask = (within < group)[None, :] & (k < K)
        x = tl.load(x_ptr + row * x_stride + k, mask=mask, other=0.0).to(tl.float32)
        if stored_ptr is None:
            scale = _scale(tl.max(tl.abs(x), 1), HIGHEST, LEAST, POWERS)
            count = tl.cdiv(K, group)
            tl.store(scale_ptr + row * count + groups, scale, mask=groups < count)
            scales = tl.broadcast_to(scale[:, None], x.shape)
        else:
            scales = tl.broadcast_to(tl.load(stored_ptr), x.shape)
        rounded = _rounded(x, scales, dtype, INTEGERS, NARROW, RESTORED, LOWEST, HIGHEST)
        tl.store(out_ptr + row * K + k, rounded, mask=mask)
    else:
        first = tl.program_id(1) * group
        end = tl.minimum(K, first + group)
        if stored_ptr is None:
            largest = tl.zeros((BLOCK,), tl.float32)
            for start in range(first, end, BLOCK):
                k = start + tl.arange(0, BLOCK)
                x = tl.load(x_ptr + row * x_stride + k, mask=k < end, other=0.0).to(tl.float32)
                largest = tl.maximum(largest, tl.abs(x))
            scale = _scale(tl.max(largest, 0), HIGHEST, LEAST, POWERS)
            tl.store(scale_ptr + row * tl.num_programs(1) + tl.program_id(1), scale)
        else:
            scale = tl.load(stored_ptr)
        for start in range(first, end, BLOCK):
            k = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + row * x_stride + k, mask=k < end, other=0.0).to(tl.float32)
            rounded = _rounded(x, scale, dtype, INTEGERS, NARROW, RESTORED, LOWEST, HIGHEST)
            tl.store(out_ptr + row * K + k, rounded, mask=k < end)


def rounded_rows(x: torch.Tensor, how: RowRounding, *, narrow: bool = False, restored: bool = False) -> RoundedRows:
    """See `codes.rounded_rows`. narrow: e4m3 numbers instead of such of the type of x. restored: values are times their
    scales, rounded to the type of x."""
    (num_rows, depth), size = x.shape, how.group or x.shape[1]
    out = torch.empty(x.shape, dtype=torch.uint8 if narrow else x.dtype, device=x.device)
    groups, scales = triton.cdiv(depth, size), how.scale
    if scales is None:
        scales = torch.empty(num_rows, groups, dtype=torch.float32, device=x.device)
    lowest, highest = ROW_LIMITS[how.kind]
    block = min(_BLOCK, triton.next_power_of_2(size))
    together = min(triton.next_power_of_2(groups), max(1, _TOGETHER // block)) if size <= block else 0
    _round_kernel[(num_rows, triton.cdiv(groups, together or 1))](
        *(x, out, scales, how.scale, depth, size, x.stride(0)),
        INTEGERS=how.kind == "int8",
        NARROW=narrow,
        RESTORED=restored,
        LOWEST=lowest,
        HIGHEST=highest,
        LEAST=LEAST_SCALE,
        POWERS=how.powers,
        TOGETHER=together,
        BLOCK=block,
        num_warps=max(1, min(16, block * (together or 1) // 512)),
        **early_launch(x.device),
    )
    scales = scales if how.scale is None else scales.expand(num_rows, 1)
    return RoundedRows(out.view(torch.float8_e4m3fn) if narrow else out, scales)
