"""A linear layer in Triton whose weight is quantised (see `codes`): tiles are widened in registers.

Every code is a bfloat16 number, and products are summed as in `linear`: over the depth in one fixed order, sixteen at a
time, whatever the tile shape. A scale is applied to the float32 sum of its group before groups are added up; those of
fp4 are powers of two, and are applied to its numbers. So a row's bits depend neither on the number of rows nor on the
tile shape, except where SPLIT divides the depth (drafts only).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from ssd.kernels.cuda.launch import shared_memory
from ssd.kernels.triton.e4m3 import widen_bits
from ssd.kernels.triton.epilogue import gate_and_up, wide_gate
from ssd.kernels.triton.packing import FP4_PLACES, SHARED_BITS, STRIP, UNIT, PackedCodes

_WIDE_ROWS = 256  # products of more rows are bound by arithmetic: codes are widened first, and the library multiplies
STRIP_OUTPUTS, UNIT_WORDS = tl.constexpr(STRIP), tl.constexpr(UNIT)
_SUMS = 32  # groups of a row that one program adds up
_WIDE_COLUMNS = 8192  # outputs that are widened at a time

# Two words (all but int8: as `packing.paired` has them) to pairs of bfloat16, part by part. Integers are set as
# the last bits of 128, then 128 (and the zero point) is subtracted. The exponents of fp8 and fp4 are not moved, which
# divides by 2^120 or 2^126: they are multiplied.
_INT8_PAIRS = tl.constexpr("""{
    .reg .b32 p<4>, s<4>, one;
    mov.b32 one, 0x3F803F80;
    prmt.b32 p0, $4, $5, 0x0400;
    prmt.b32 p1, $4, $5, 0x1511;
    prmt.b32 p2, $4, $5, 0x2622;
    prmt.b32 p3, $4, $5, 0x3733;
    lop3.b32 s0, p0, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 s1, p1, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 s2, p2, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 s3, p3, 0x00800080, 0xC300C300, 0xEA;
    lop3.b32 p0, p0, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 p1, p1, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 p2, p2, 0x007F007F, 0x43004300, 0xEA;
    lop3.b32 p3, p3, 0x007F007F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, p0, one, s0;
    fma.rn.bf16x2 $1, p1, one, s1;
    fma.rn.bf16x2 $2, p2, one, s2;
    fma.rn.bf16x2 $3, p3, one, s3;
}""")
_FP8_PAIRS = tl.constexpr("""{
    .reg .b32 p<4>, l<2>, r<2>, up, none;
    mov.b32 up, 0x7B807B80;
    mov.b32 none, 0x80008000;
    and.b32 p0, $4, 0x87F087F0;
    shl.b32 l0, $4, 4;
    shr.u32 r0, $4, 4;
    and.b32 r0, r0, 0x07000700;
    lop3.b32 p1, l0, 0x80F080F0, r0, 0xEA;
    and.b32 p2, $5, 0x87F087F0;
    shl.b32 l1, $5, 4;
    shr.u32 r1, $5, 4;
    and.b32 r1, r1, 0x07000700;
    lop3.b32 p3, l1, 0x80F080F0, r1, 0xEA;
    fma.rn.bf16x2 $0, p0, up, none;
    fma.rn.bf16x2 $1, p1, up, none;
    fma.rn.bf16x2 $2, p2, up, none;
    fma.rn.bf16x2 $3, p3, up, none;
}""")
_INT4_PAIRS = tl.constexpr(
    """{
    .reg .b32 a<8>, one, zero;
    mov.b32 one, 0x3F803F80;
    mov.b32 zero, 0xC308C308;
"""
    + "".join(
        f"""    shr.u32 a{i}, ${8 + i // 4}, {i % 4 * 4};
    lop3.b32 a{i}, a{i}, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 ${i}, a{i}, one, zero;
"""
        for i in range(8)
    )
    + "}"
)
_UINT4_PAIRS = tl.constexpr(_INT4_PAIRS.value.replace("0xC308C308", "0xC300C300"))  # no zero point
# See `packing.FP4_PLACES`. A part's byte of `PackedCodes.exponents` is the exponent that it is multiplied with.
_FP4_PAIRS = tl.constexpr(
    """{
    .reg .b32 a, m, none, zero, both;
    mov.b32 none, 0x80008000;
    mov.b32 zero, 0;
"""
    + f"    lop3.b32 both, $8, $9, 0x{SHARED_BITS:08X}, 0xE4;\n"
    + "".join(
        f"""
    prmt.b32 m, ${10 + 2 * (i // 4)}, zero, 0x{i % 4}4{i % 4}4;
    shr.u32 m, m, 1;
    shf.l.wrap.b32 a, {word}, {word}, {turn % 32};
    and.b32 a, a, 0x81C081C0;
    fma.rn.bf16x2 ${i}, a, m, none;
"""
        for i, (first, turn) in enumerate(FP4_PLACES)
        for word in [{-1: "$8", 0: "$9"}.get(first, "both")]
    )
    + "}"
)


@triton.jit
def _pairs(words, low, high, FORMAT: tl.constexpr):
    """All parts of the words as bfloat16, part by part; fp4: times the powers of two of their groups, whose exponents
    are the eight bytes of `low` and `high` [N, 1]."""
    if FORMAT == "int4" or FORMAT == "uint4" or FORMAT == "fp4":
        return tl.inline_asm_elementwise(
            _INT4_PAIRS if FORMAT == "int4" else _UINT4_PAIRS if FORMAT == "uint4" else _FP4_PAIRS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r,r,r,r" if FORMAT == "fp4" else "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words, tl.broadcast_to(low, words.shape), tl.broadcast_to(high, words.shape)]
            if FORMAT == "fp4"
            else [words],
            dtype=(
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
                tl.bfloat16,
            ),
            is_pure=True,
            pack=2,
        )
    elif FORMAT == "int8":
        return tl.inline_asm_elementwise(
            _INT8_PAIRS,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        return tl.inline_asm_elementwise(
            _FP8_PAIRS,
            "=r,=r,=r,=r,r,r",
            [words],
            dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )


@triton.jit
def _fp4_part(words, low, high, i: tl.constexpr, dtype: tl.constexpr):
    """Part i of words of fp4, times the powers of two of their groups, of any type."""
    field = ((low if i < 4 else high) >> (8 * (i % 4))) & 255
    scale = (tl.maximum(field - 126, 0) << 23).to(tl.float32, bitcast=True)
    return (_part(words, i, "fp4", tl.float32) * scale).to(dtype)


@triton.jit
def _part(words, i: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Part i of the words, of any type."""
    if FORMAT == "int4":
        return (((words >> (4 * i)) & 15) - 8).to(dtype)
    elif FORMAT == "uint4":
        return ((words >> (4 * i)) & 15).to(dtype)
    elif FORMAT == "fp4":
        code = words >> (4 * i)
        exponent = (code >> 1) & 3
        size = ((code & 1) + tl.where(exponent > 0, 2, 0)) << tl.where(exponent > 0, exponent - 1, 0)
        return tl.where((code & 8) > 0, -0.5, 0.5).to(dtype) * size.to(dtype)
    elif FORMAT == "int8":
        return (words >> (8 * i)).to(tl.int8).to(dtype)
    else:
        return widen_bits(words >> (8 * i), dtype)


@triton.jit
def _places(w_ptr, n, k, w_stride, WORDS: tl.constexpr, STRIPS: tl.constexpr):
    """Pointers to words k [1, WORDS] of outputs n [N, 1] of the first block."""
    if not STRIPS:
        return w_ptr + n.to(tl.int64) * w_stride + k
    strips = w_ptr + n // STRIP_OUTPUTS * (STRIP_OUTPUTS * WORDS)
    return strips + n % STRIP_OUTPUTS * UNIT_WORDS + k // UNIT_WORDS * (STRIP_OUTPUTS * UNIT_WORDS) + k % UNIT_WORDS


@triton.jit
def sums(
    x_ptr, w_ptr, scale_ptr, offset_ptr, exponent_ptr, row_scale_ptr, row_sum_ptr, m, n, m_mask, n_mask, N, K,
    w_stride, x_stride, groups,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr, PARTS_OF_GROUP: tl.constexpr,
    WORDS: tl.constexpr, STRIPS: tl.constexpr, STAGES: tl.constexpr, ROW_GROUPS: tl.constexpr,
):  # fmt: skip
    """Sums of a tile [n, m], block by block; those of groups are scaled, others are not."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = tl.arange(0, WORDS)
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride + k[:, None]
    w_ptrs = _places(w_ptr, n[:, None], k[None, :], w_stride, WORDS, STRIPS)
    step = tl.cdiv(N, STRIP_OUTPUTS) * STRIP_OUTPUTS if STRIPS else 1
    of_block: tl.constexpr = PARTS // PARTS_OF_GROUP if PARTS_OF_GROUP else 1  # groups
    acc = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
    for start in tl.range(0, w_stride, WORDS, num_stages=STAGES):
        words = tl.load(w_ptrs + start * step, mask=n_mask[:, None], other=0)
        low, high = None, None
        if FORMAT == "fp4":
            exponents = exponent_ptr + (start // WORDS * N + n[:, None]) * 2
            low = tl.load(exponents, mask=n_mask[:, None], other=0)
            high = tl.load(exponents + 1, mask=n_mask[:, None], other=0)
        if PAIRS:
            pairs = _pairs(words, low, high, FORMAT)
        for i in tl.static_range(PARTS):
            first = start * PARTS + i * WORDS
            if EVEN_K:
                x = tl.load(x_ptrs + first, mask=m_mask[None, :], other=0.0)
            elif FORMAT == "fp4":  # a part is a group: all of it is there, or nothing
                x = tl.load(x_ptrs + first, mask=m_mask[None, :] & (first < K), other=0.0)
            else:
                x = tl.load(x_ptrs + first, mask=m_mask[None, :] & (first + k < K)[:, None], other=0.0)
            if PAIRS:
                w = pairs[i]
            elif FORMAT == "fp4":
                w = _fp4_part(words, low, high, i, dtype)
            else:
                w = _part(words, i, FORMAT, dtype)
            if PARTS_OF_GROUP == 0:
                acc = tl.dot(w, x, acc, input_precision="tf32x3")
            else:
                if i % PARTS_OF_GROUP == 0:
                    group = tl.dot(w, x, input_precision="tf32x3")
                else:
                    group = tl.dot(w, x, group, input_precision="tf32x3")
                if (i + 1) % PARTS_OF_GROUP == 0:
                    g = (start // WORDS * PARTS + i) // PARTS_OF_GROUP
                    if row_scale_ptr is not None:
                        at = m * groups + g if ROW_GROUPS else m
                        group *= tl.load(row_scale_ptr + at, mask=m_mask & (g < groups), other=0.0)[None, :]
                    if FORMAT == "fp4":
                        acc += group
                    else:
                        if STRIPS:
                            at = n // STRIP_OUTPUTS * of_block + i // PARTS_OF_GROUP
                            at = at * STRIP_OUTPUTS + n % STRIP_OUTPUTS
                            at += start // WORDS * (tl.cdiv(N, STRIP_OUTPUTS) * STRIP_OUTPUTS * of_block)
                        else:
                            at = g * N + n
                        acc += group * tl.load(scale_ptr + at, mask=n_mask, other=0.0)[:, None]
                    if offset_ptr is not None:
                        sums = tl.load(row_sum_ptr + m * groups + g, mask=m_mask & (g < groups), other=0.0)
                        acc += tl.load(offset_ptr + g * N + n, mask=n_mask, other=0.0)[:, None] * sums[None, :]
    return acc


@triton.jit
def _split_sums(
    x_ptr, w_ptr, scale_ptr, m, n, m_mask, n_mask, N, K, w_stride, x_stride,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, PARTS_OF_GROUP: tl.constexpr,
    WORDS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The same, of SPLIT blocks at a time, each by a warp of its own: for few outputs of a great depth. Not exact."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = tl.arange(0, WORDS)
    split = tl.arange(0, SPLIT)
    x_ptrs = x_ptr + m[None, None, :].to(tl.int64) * x_stride + (split * (WORDS * PARTS))[:, None, None]
    x_ptrs += k[None, :, None]
    w_ptrs = _places(w_ptr, n[None, :, None], k[None, None, :], w_stride, WORDS, False)
    w_ptrs += (split * WORDS)[:, None, None]
    acc = tl.zeros((SPLIT, n.shape[0], m.shape[0]), tl.float32)
    for start in tl.range(0, w_stride, WORDS * SPLIT, num_stages=STAGES):
        inside = start + split * WORDS < w_stride
        words = tl.load(w_ptrs + start, mask=n_mask[None, :, None] & inside[:, None, None], other=0)
        if PAIRS:
            pairs = _pairs(words, None, None, FORMAT)
        for i in tl.static_range(PARTS):
            first = start * PARTS + i * WORDS
            there = (first + (split * (WORDS * PARTS))[:, None] + k[None, :] < K)[:, :, None]
            x = tl.load(x_ptrs + first, mask=m_mask[None, None, :] & there, other=0.0)
            w = pairs[i] if PAIRS else _part(words, i, FORMAT, dtype)
            if PARTS_OF_GROUP == 0:
                acc = tl.dot(w, x, acc, input_precision="tf32x3")
            else:
                if i % PARTS_OF_GROUP == 0:
                    group = tl.dot(w, x, input_precision="tf32x3")
                else:
                    group = tl.dot(w, x, group, input_precision="tf32x3")
                if (i + 1) % PARTS_OF_GROUP == 0:
                    row = ((start // WORDS + split) * PARTS + i) // PARTS_OF_GROUP
                    scales = scale_ptr + row[:, None] * N + n[None, :]
                    acc += group * tl.load(scales, mask=inside[:, None] & n_mask[None, :], other=0.0)[:, :, None]
    return tl.sum(acc, 0)


@triton.jit
def _finish(
    acc, m, n, n0, m_mask, n_mask, scale_ptr, row_scale_ptr, bias_ptr, y_ptr, N, y_stride,
    SCALED: tl.constexpr, ROW_GROUPS: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales (if SCALED) and stores the sums of a tile [n, m]."""
    if SCALED:
        if row_scale_ptr is not None and not ROW_GROUPS:
            acc *= tl.load(row_scale_ptr + m, mask=m_mask, other=0.0)[None, :]
        acc *= tl.load(scale_ptr + n, mask=n_mask, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = gate_and_up(acc, BLOCK_N, BLOCK_M)
        acc = wide_gate(gate, up)
        n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
        n_mask = n < N // 2
    mask = m_mask[None, :] & n_mask[:, None]
    tl.store(y_ptr + m[None, :].to(tl.int64) * y_stride + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # avoids recompilation for other prompt lengths
def _quantized_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    offset_ptr,
    exponent_ptr,
    row_scale_ptr,
    row_sum_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    N,
    K,
    w_stride,
    x_stride,
    y_stride,
    groups,
    FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_OF_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    STRIPS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
    ROW_GROUPS: tl.constexpr,
):
    """y[m, n] = sum_k x[m, k] w[n, k]. GATED: w's rows alternate gate, up, and y has half as many columns."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = (tl.program_id(0) // tiles_m) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    m_mask = m < num_rows
    n_mask = n < N
    if SPLIT == 1:
        acc = sums(
            x_ptr, w_ptr, scale_ptr, offset_ptr, exponent_ptr, row_scale_ptr, row_sum_ptr, m, n, m_mask, n_mask, N, K,
            w_stride, x_stride, groups, FORMAT, PAIRS, EVEN_K, PARTS, PARTS_OF_GROUP, WORDS, STRIPS, STAGES,
            ROW_GROUPS,
        )  # fmt: skip
    else:
        acc = _split_sums(
            x_ptr, w_ptr, scale_ptr, m, n, m_mask, n_mask, N, K, w_stride, x_stride,
            FORMAT, PAIRS, PARTS, PARTS_OF_GROUP, WORDS, STAGES, SPLIT,
        )  # fmt: skip
    _finish(
        acc, m, n, n0, m_mask, n_mask, scale_ptr, row_scale_ptr, bias_ptr, y_ptr, N, y_stride,
        PARTS_OF_GROUP == 0 or FORMAT == "fp4", ROW_GROUPS, GATED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _widen_kernel(w_ptr, out_ptr, N, K, w_stride, step, FORMAT: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr,
                  BLOCK_N: tl.constexpr, WORDS: tl.constexpr, STRIPS: tl.constexpr):  # fmt: skip
    """The codes of a block of words as numbers of the type of out [N, K], without their scales; blocks are WORDS * step
    words apart."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, WORDS)
    start = tl.program_id(1) * WORDS
    n_mask = n < N
    places = _places(w_ptr, n[:, None], k[None, :], w_stride, WORDS, STRIPS)
    words = tl.load(places + start * step, mask=n_mask[:, None])
    if PAIRS:
        pairs = _pairs(words, None, None, FORMAT)
    for i in tl.static_range(PARTS):
        at = start * PARTS + i * WORDS + k
        part = pairs[i] if PAIRS else _part(words, i, FORMAT, out_ptr.dtype.element_ty)
        tl.store(out_ptr + n[:, None].to(tl.int64) * K + at[None, :], part, mask=n_mask[:, None] & (at < K)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(sum_ptr, scale_ptr, row_scale_ptr, bias_ptr, y_ptr, num_rows, N, sum_stride, y_stride,
                   GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):  # fmt: skip
    """What `_quantized_kernel` does with sums, for those [num_rows, N] of the widened codes."""
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    m_mask, n_mask = m < num_rows, n < N
    sums = sum_ptr + m[None, :].to(tl.int64) * sum_stride + n[:, None]
    acc = tl.load(sums, mask=m_mask[None, :] & n_mask[:, None], other=0.0)
    _finish(
        acc, m, n, n0, m_mask, n_mask, scale_ptr, row_scale_ptr, bias_ptr, y_ptr, N, y_stride,
        True, False, GATED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _row_sums_kernel(
    x_ptr, row_scale_ptr, sum_ptr, K, x_stride, groups,
    GROUP: tl.constexpr, GROUPS: tl.constexpr, ROW_GROUPS: tl.constexpr,
):  # fmt: skip
    """Sums of GROUPS groups of a row, times the row's scales. A row's bits are its own."""
    row = tl.program_id(0)
    g = tl.program_id(1) * GROUPS + tl.arange(0, GROUPS)
    k = g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    x = tl.load(x_ptr + row.to(tl.int64) * x_stride + k, mask=k < K, other=0.0)
    sums = tl.sum(x.to(tl.float32), 1)
    if row_scale_ptr is not None:
        at = row * groups + g if ROW_GROUPS else row + g * 0
        sums *= tl.load(row_scale_ptr + at, mask=g < groups, other=0.0)
    tl.store(sum_ptr + row * groups + g, sums, mask=g < groups)


def _in_pairs(x: torch.Tensor) -> bool:
    """Whether codes are widened two at a time, by instructions for bfloat16."""
    return x.device.type != "cpu" and x.dtype is torch.bfloat16


def is_wide(x: torch.Tensor, weight: PackedCodes) -> bool:
    """Whether `wide_linear` is for this product. Not in float32: there the order of sums depends on the tile shape."""
    exact = x.dtype is not torch.float32 or not x.is_cuda
    return exact and weight.parts_of_group == 0 and weight.exponents is None and len(x) > _WIDE_ROWS


@dataclass(frozen=True)
class Tile:
    """A tile shape. Its depth is that of a block, or of `split` blocks, one for each warp."""

    rows: int
    columns: int
    stages: int
    warps: int
    split: int = 1


def choose_tile(x: torch.Tensor, weight: PackedCodes) -> Tile:
    """Measured on an H200 for up to 16 rows: 64 outputs at a time where that makes enough programs."""
    num_rows, columns = len(x), weight.columns
    if num_rows <= 16:
        rows = 8 if num_rows <= 8 else 16
        narrow = Tile(rows, 16, 4, 2) if weight.exact else Tile(rows, 16, 3, 4, split=4)
        tile = Tile(rows, 64, 3, 4) if columns >= 6144 else narrow
    elif num_rows <= 64:
        tile = Tile(32, 64, 4, 4) if num_rows <= 32 else Tile(64, 64, 4, 4)
    else:
        tile = Tile(64, 128, 4, 8)
    return fitting(tile, x, weight)


def fitting(tile: Tile, x: torch.Tensor, weight: PackedCodes) -> Tile:
    """The tile shape, with as many stages as the GPU has shared memory for."""
    stage = tile.split * weight.block * (x.element_size() * weight.parts * tile.rows + 4 * tile.columns)  # bytes
    fitting = shared_memory(x.device) // stage + (tile.split > 1)  # a split tile needs one buffer less than stages
    return replace(tile, stages=max(2, min(tile.stages, fitting)))


def sum_options(x: torch.Tensor, weight: PackedCodes, row_scales: torch.Tensor | None) -> dict[str, Any]:
    """Options of `sums` that no tile shape decides."""
    by_group = row_scales is not None and row_scales.shape[1] > 1
    return {
        "FORMAT": weight.type,
        "PAIRS": _in_pairs(x),
        "EVEN_K": weight.width * weight.parts == weight.depth,
        "PARTS": weight.parts,
        "PARTS_OF_GROUP": 1 if weight.exponents is not None and by_group else weight.parts_of_group,
        "WORDS": weight.block,
        "STRIPS": weight.strips,
        "ROW_GROUPS": by_group,
    }


def row_sums(x: torch.Tensor, weight: PackedCodes, row_scales: torch.Tensor | None) -> torch.Tensor | None:
    """Sums of the groups of rows, which a weight with offsets needs."""
    if weight.offsets is None:
        return None
    groups = triton.cdiv(weight.depth, weight.group)
    total = x.new_empty((len(x), groups), dtype=torch.float32)
    by_group = row_scales is not None and row_scales.shape[1] > 1
    _row_sums_kernel[(len(x), triton.cdiv(groups, _SUMS))](
        *(x, row_scales, total, weight.depth, x.stride(0), groups),
        **{"GROUP": weight.group, "GROUPS": _SUMS, "ROW_GROUPS": by_group},
    )
    return total


def codes_linear(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] times a weight [N, K] transposed. A gated weight has alternating gate and up
    rows."""
    (num_rows, depth), columns, width = x.shape, weight.columns, weight.width
    tile = choose_tile(x, weight)
    y = x.new_empty((num_rows, columns // 2 if gated else columns), dtype=out_dtype or x.dtype)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    _quantized_kernel[grid](
        x,
        weight.words,
        weight.scales,
        weight.offsets,
        weight.exponents,
        row_scales,
        row_sums(x, weight, row_scales),
        bias,
        y,
        num_rows,
        columns,
        depth,
        width,
        x.stride(0),
        y.stride(0),
        triton.cdiv(depth, weight.group),
        GATED=gated,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        STAGES=tile.stages,
        SPLIT=tile.split,
        num_warps=tile.warps,
        **sum_options(x, weight, row_scales),
    )
    return y


def wide_linear(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None,
    product: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    *,
    gated: bool,
    out_dtype: torch.dtype,
    row_scales: torch.Tensor | None,
) -> torch.Tensor:
    """`codes_linear` for many rows, with the same bits: codes are widened, some outputs at a time, and multiplied
    by `product`, whose sums are float32. For weights with one scale a row."""
    (num_rows, depth), columns, width = x.shape, weight.columns, weight.width
    y = x.new_empty((num_rows, columns // 2 if gated else columns), dtype=out_dtype)
    block = _WIDE_COLUMNS
    wide = x.new_empty((min(block, columns), depth))
    step = weight.words.shape[1] * STRIP if weight.strips else 1
    for start in range(0, columns, block):
        count = min(block, columns - start)
        words = weight.words[:, start // STRIP :] if weight.strips else weight.words[start:]
        _widen_kernel[(triton.cdiv(count, 16), width // weight.block)](
            *(words, wide, count, depth, width, step, weight.type, _in_pairs(x)),
            **{"PARTS": weight.parts, "BLOCK_N": 16, "WORDS": weight.block, "STRIPS": weight.strips},
        )
        sums = product(x, wide[:count])
        part = y[:, start // 2 : (start + count) // 2] if gated else y[:, start : start + count]
        _finish_kernel[(triton.cdiv(num_rows, 16), triton.cdiv(count, 128))](
            *(sums, weight.scales.flatten()[start:], row_scales, None if bias is None else bias[start:], part),
            *(num_rows, count, sums.stride(0), y.stride(0)),
            **{"GATED": gated, "BLOCK_M": 16, "BLOCK_N": 128},
        )
    return y
