"""A linear layer in Triton whose weight is quantised (see `packing`): tiles are widened in registers.

Products are summed as in `linear`: over the depth in one fixed order, sixteen at a time, whatever the tile shape. So a
row's bits depend neither on the number of rows nor on the tile shape. What is multiplied:

* Codes, which are bfloat16 numbers. A scale is applied to the sum of its group before groups are added up, or to the
  whole sum; those of fp4 are powers of two, and are applied to its numbers, but for one of each output.
* Weights (`packing.is_widened`), rounded to the type of x. Those are the products of the widened weight (`linear`), to
  the bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl

from ssd.kernels.cuda.launch import early_launch, shared_memory
from ssd.kernels.triton.e4m3 import widen_bits
from ssd.kernels.triton.epilogue import gate_and_up, rounded_gate, wide_gate
from ssd.kernels.triton.packing import FP4_PLACES, SHARED_BITS, STRIP, UNIT, PackedCodes

_WIDE_ROWS = 256  # products of more rows are bound by arithmetic: codes are widened first, and the library multiplies
STRIP_OUTPUTS, UNIT_WORDS = tl.constexpr(STRIP), tl.constexpr(UNIT)
_WIDE_COLUMNS = 8192  # outputs that are widened at a time
_WIDE_TILE = 16  # outputs of one program

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
    if FORMAT == "int4" or FORMAT == "fp4":
        return tl.inline_asm_elementwise(
            _INT4_PAIRS if FORMAT == "int4" else _FP4_PAIRS,
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
    else:
        return tl.inline_asm_elementwise(
            _INT8_PAIRS if FORMAT == "int8" else _FP8_PAIRS,
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
def _float16(bytes_ptr, at, mask):
    return tl.load(bytes_ptr.to(tl.pointer_type(tl.float16)) + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _integer(bytes_ptr, at, mask):
    """An int8 number, by a load of 16 bits: Triton orders the depth of a product by the narrowest load."""
    pair = tl.load(bytes_ptr.to(tl.pointer_type(tl.int16)) + at // 2, mask=mask, other=0).to(tl.int32)
    return ((pair << (24 - at % 2 * 8)) >> 24).to(tl.float32)


@triton.jit
def _scale_and_offset(
    number_ptr, record, group, row, mask,
    GROUPS: tl.constexpr, NUMBERS: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Of groups of a block, for output `row` of the strip of that record; without OFFSETS, the second is not used. See
    `packing.GroupNumbers`."""
    ALL: tl.constexpr = GROUPS * STRIP_OUTPUTS  # scales of a block of a strip
    COUNT: tl.constexpr = 2 if OFFSETS else 1
    BYTES: tl.constexpr = (
        4 * COUNT * ALL if NUMBERS == "float32" else 2 * COUNT * ALL if NUMBERS == "float16"
        else 3 * ALL if NUMBERS == "zeros" else COUNT * (ALL + 2 * STRIP_OUTPUTS)
    )  # fmt: skip
    start = number_ptr + record.to(tl.int64) * BYTES
    at = group * STRIP_OUTPUTS + row
    if NUMBERS == "float32":
        floats = start.to(tl.pointer_type(tl.float32))
        scale = tl.load(floats + at, mask=mask, other=0.0)
        offset = scale
        if OFFSETS:
            offset = tl.load(floats + ALL + at, mask=mask, other=0.0)
    elif NUMBERS == "factors":
        unit = start + COUNT * ALL
        scale = _float16(unit, row, mask) * _integer(start, at, mask)
        offset = scale
        if OFFSETS:
            offset = _float16(unit, STRIP_OUTPUTS + row, mask) * _integer(start, ALL + at, mask)
    else:
        scale = _float16(start, at, mask)
        offset = scale
        if NUMBERS == "zeros":
            offset = -scale * _integer(start, 2 * ALL + at, mask)
        elif OFFSETS:
            offset = _float16(start, ALL + at, mask)
    return scale, offset


@triton.jit
def _weight(code, scale, offset, FORMAT: tl.constexpr, OFFSETS: tl.constexpr, dtype: tl.constexpr):
    """scale * code (+ offset) of a weight in groups, rounded to `dtype`: see `packing`."""
    if FORMAT == "fp8":
        wide = widen_bits(code, tl.float32)
    else:  # its bits as the last ones of 2^23, which is subtracted again: faster than a conversion
        wide = (code | 0x4B000000).to(tl.float32, bitcast=True) - (8388608.0 + (128 if FORMAT == "int8" else 0))
    if FORMAT == "uint4" and dtype == tl.bfloat16:
        scale, offset = scale.to(dtype).to(tl.float32), offset.to(dtype).to(tl.float32)
    if OFFSETS:
        return tl.fma(wide, tl.broadcast_to(scale, wide.shape), tl.broadcast_to(offset, wide.shape)).to(dtype)
    else:
        return (wide * scale).to(dtype)


@triton.jit
def _weights(
    words, number_ptr, strips, block, n, n_mask, FORMAT: tl.constexpr, PARTS: tl.constexpr, GROUP: tl.constexpr,
    NUMBERS: tl.constexpr, OFFSETS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """The weights [n, WORDS * PARTS] of words of a block of a weight in groups."""
    WORDS: tl.constexpr = words.shape[1]
    BITS: tl.constexpr = 32 // PARTS
    group = (tl.arange(0, WORDS) * PARTS // GROUP)[None, :]
    record, row = (block * strips + n // STRIP_OUTPUTS)[:, None], (n % STRIP_OUTPUTS)[:, None]
    scale, offset = _scale_and_offset(
        number_ptr, record, group, row, n_mask[:, None], WORDS * PARTS // GROUP, NUMBERS, OFFSETS
    )
    shift = (tl.arange(0, PARTS) * BITS)[None, None, :]
    code = (words[:, :, None] >> shift) & ((1 << BITS) - 1)
    wide = _weight(code, scale[:, :, None], offset[:, :, None], FORMAT, OFFSETS, dtype)
    return tl.reshape(wide, (n.shape[0], WORDS * PARTS))


@triton.jit
def _fragment_weights(
    w_ptr, number_ptr, strips, n, k, mask, FORMAT: tl.constexpr, PARTS: tl.constexpr, WORDS: tl.constexpr,
    GROUP: tl.constexpr, NUMBERS: tl.constexpr, OFFSETS: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Weights k of outputs n, from strips (`packing._fragments`)."""
    DEPTH: tl.constexpr = WORDS * PARTS
    BITS: tl.constexpr = 32 // PARTS
    record, row, at = k // DEPTH * strips + n // STRIP_OUTPUTS, n % STRIP_OUTPUTS, k % DEPTH
    lane = row % 8 * 4 + at % 8 // 2
    if BITS == 4:
        word, part = at // 16, at % 2 * 4 + at % 16 // 8 * 2 + 1 - row // 8
    else:
        word, part = at // 8, row // 8 * 2 + at % 2
    place = record.to(tl.int64) * (WORDS * STRIP_OUTPUTS) + word // 4 * 128 + lane * 4 + word % 4
    words = tl.load(w_ptr + place, mask=mask, other=0)
    scale, offset = _scale_and_offset(number_ptr, record, at // GROUP, row, mask, DEPTH // GROUP, NUMBERS, OFFSETS)
    return _weight((words >> (part * BITS)) & ((1 << BITS) - 1), scale, offset, FORMAT, OFFSETS, dtype)


@triton.jit
def _places(w_ptr, n, k, w_stride, WORDS: tl.constexpr, STRIPS: tl.constexpr):
    """Pointers to words k [1, WORDS] of outputs n [N, 1] of the first block."""
    if not STRIPS:
        return w_ptr + n.to(tl.int64) * w_stride + k
    strips = w_ptr + n // STRIP_OUTPUTS * (STRIP_OUTPUTS * WORDS)
    return strips + n % STRIP_OUTPUTS * UNIT_WORDS + k // UNIT_WORDS * (STRIP_OUTPUTS * UNIT_WORDS) + k % UNIT_WORDS


@triton.jit
def _scale_place(n, block, i, N, PARTS: tl.constexpr, PARTS_OF_GROUP: tl.constexpr, STRIPS: tl.constexpr):
    """Where the scales of outputs n are, of the group of codes that part i of a block belongs to."""
    if PARTS_OF_GROUP == 0:
        return n
    elif STRIPS:
        return (block * N + n).to(tl.int64) * (PARTS // PARTS_OF_GROUP) + i // PARTS_OF_GROUP
    else:
        return (block * PARTS + i) // PARTS_OF_GROUP * N + n


@triton.jit
def sums(
    x_ptr, w_ptr, scale_ptr, number_ptr, exponent_ptr, m, n, m_mask, n_mask, N, K, w_stride, x_stride,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr,
    PARTS_OF_GROUP: tl.constexpr, WORDS: tl.constexpr, STRIPS: tl.constexpr, GROUP: tl.constexpr,
    NUMBERS: tl.constexpr, OFFSETS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of a tile [n, m], block by block; those of groups of codes are scaled. GROUP: 0 if these are of codes; else
    not in strips."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = tl.arange(0, WORDS)
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride
    w_ptrs = _places(w_ptr, n[:, None], k[None, :], w_stride, WORDS, STRIPS)
    strips = tl.cdiv(N, STRIP_OUTPUTS)
    step = strips * STRIP_OUTPUTS if STRIPS else 1
    acc = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
    for start in tl.range(0, w_stride, WORDS, num_stages=STAGES):
        words = tl.load(w_ptrs + start * step, mask=n_mask[:, None], other=0)
        if GROUP > 0:
            at = start * PARTS + tl.arange(0, WORDS * PARTS)
            mask = m_mask[None, :] if EVEN_K else m_mask[None, :] & (at < K)[:, None]
            x = tl.load(x_ptrs + at[:, None], mask=mask, other=0.0)
            w = _weights(
                words, number_ptr, strips, start // WORDS, n, n_mask, FORMAT, PARTS, GROUP, NUMBERS, OFFSETS, dtype
            )
            acc = tl.dot(w, x, acc, input_precision="tf32x3")
        else:
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
                    mask = m_mask[None, :]
                elif FORMAT == "fp4":  # a part is a group: all of it is there, or nothing
                    mask = m_mask[None, :] & (first < K)
                else:
                    mask = m_mask[None, :] & (first + k < K)[:, None]
                x = tl.load(x_ptrs + (first + k)[:, None], mask=mask, other=0.0)
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
                        at = _scale_place(n, start // WORDS, i, N, PARTS, PARTS_OF_GROUP, STRIPS)
                        scale = tl.load(scale_ptr + at, mask=n_mask, other=0.0).to(tl.float32)
                        acc = tl.fma(group, tl.broadcast_to(scale[:, None], acc.shape), acc)
    return acc


@triton.jit
def _finish(
    acc, m, n, n0, m_mask, n_mask, scale_ptr, row_scale_ptr, bias_ptr, y_ptr, N, y_stride, dtype: tl.constexpr,
    SCALED: tl.constexpr, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Scales (rows, and outputs if SCALED) and stores the sums of a tile [n, m]. Without scales: those of weights."""
    if row_scale_ptr is not None:
        acc *= tl.load(row_scale_ptr + m, mask=m_mask, other=0.0)[None, :]
    if SCALED:
        acc *= tl.load(scale_ptr + n, mask=n_mask, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = gate_and_up(acc, BLOCK_N, BLOCK_M)
        acc = rounded_gate(gate, up, dtype) if scale_ptr is None else wide_gate(gate, up)
        n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
        n_mask = n < N // 2
    mask = m_mask[None, :] & n_mask[:, None]
    tl.store(y_ptr + m[None, :].to(tl.int64) * y_stride + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])  # avoids recompilation for other prompt lengths
def _quantized_kernel(
    x_ptr, w_ptr, scale_ptr, number_ptr, exponent_ptr, row_scale_ptr, bias_ptr, y_ptr,
    num_rows, N, K, w_stride, x_stride, y_stride,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr,
    EVEN_K: tl.constexpr, PARTS: tl.constexpr, PARTS_OF_GROUP: tl.constexpr, WORDS: tl.constexpr, STRIPS: tl.constexpr,
    GROUP: tl.constexpr, NUMBERS: tl.constexpr, OFFSETS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """y[m, n] = sum_k x[m, k] w[n, k]. GATED: w's rows alternate gate, up, and y has half as many columns."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = (tl.program_id(0) // tiles_m) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    m_mask = m < num_rows
    n_mask = n < N
    acc = sums(
        x_ptr, w_ptr, scale_ptr, number_ptr, exponent_ptr, m, n, m_mask, n_mask, N, K, w_stride, x_stride,
        FORMAT, PAIRS, EVEN_K, PARTS, PARTS_OF_GROUP, WORDS, STRIPS, GROUP, NUMBERS, OFFSETS, STAGES,
    )  # fmt: skip
    _finish(
        acc, m, n, n0, m_mask, n_mask, scale_ptr, row_scale_ptr, bias_ptr, y_ptr, N, y_stride,
        x_ptr.dtype.element_ty, scale_ptr is not None and PARTS_OF_GROUP == 0, GATED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


@triton.jit
def _widen_kernel(
    w_ptr, scale_ptr, number_ptr, exponent_ptr, index_ptr, out_ptr, first, count, N, K, w_stride,
    BLOCK_N: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr,
    PARTS_OF_GROUP: tl.constexpr, WORDS: tl.constexpr, STRIPS: tl.constexpr, GROUP: tl.constexpr,
    NUMBERS: tl.constexpr, OFFSETS: tl.constexpr,
):  # fmt: skip
    """Outputs from the first one, or those of an index, in the type of out [count, K]: a block of words of each.
    Without scales of outputs: codes."""
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = row < count
    n = first + row if index_ptr is None else tl.load(index_ptr + row, mask=mask, other=0).to(tl.int32)
    block = tl.program_id(1)
    strips = tl.cdiv(N, STRIP_OUTPUTS)
    to = out_ptr + row[:, None].to(tl.int64) * K
    at = block * (WORDS * PARTS) + tl.arange(0, WORDS * PARTS)
    inside = mask[:, None] & (at < K)[None, :]
    if GROUP > 0 and STRIPS:
        wide = _fragment_weights(
            w_ptr, number_ptr, strips, n[:, None], at[None, :], inside,
            FORMAT, PARTS, WORDS, GROUP, NUMBERS, OFFSETS, dtype,
        )  # fmt: skip
        tl.store(to + at[None, :], wide, mask=inside)
    else:
        k = tl.arange(0, WORDS)
        places = _places(w_ptr, n[:, None], k[None, :], w_stride, WORDS, STRIPS)
        words = tl.load(places + block * WORDS * (strips * STRIP_OUTPUTS if STRIPS else 1), mask=mask[:, None], other=0)
        if GROUP > 0:
            wide = _weights(words, number_ptr, strips, block, n, mask, FORMAT, PARTS, GROUP, NUMBERS, OFFSETS, dtype)
            tl.store(to + at[None, :], wide, mask=inside)
        else:
            low, high = None, None
            if FORMAT == "fp4":
                exponents = exponent_ptr + (block * N + n[:, None]) * 2
                low = tl.load(exponents, mask=mask[:, None], other=0)
                high = tl.load(exponents + 1, mask=mask[:, None], other=0)
            if PAIRS:
                pairs = _pairs(words, low, high, FORMAT)
            for i in tl.static_range(PARTS):
                if PAIRS:
                    part = pairs[i]
                elif FORMAT == "fp4":
                    part = _fp4_part(words, low, high, i, dtype)
                else:
                    part = _part(words, i, FORMAT, dtype)
                if scale_ptr is not None:
                    place = _scale_place(n, block, i, N, PARTS, PARTS_OF_GROUP, STRIPS)
                    scale = tl.load(scale_ptr + place, mask=mask, other=0.0).to(tl.float32)
                    part = (part.to(tl.float32) * scale[:, None]).to(dtype)
                here = (block * PARTS + i) * WORDS + k
                tl.store(to + here[None, :], part, mask=mask[:, None] & (here < K)[None, :])


@triton.jit(do_not_specialize=["num_rows"])
def _finish_kernel(sum_ptr, scale_ptr, row_scale_ptr, bias_ptr, y_ptr, num_rows, N, sum_stride, y_stride,
                   GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SEGMENTS: tl.constexpr,
                   EARLY: tl.constexpr):  # fmt: skip
    """What `_quantized_kernel` does with sums, for those [SEGMENTS, num_rows, N] of the widened codes, which are added
    in their order."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = tl.program_id(1) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    m_mask, n_mask = m < num_rows, n < N
    sums = sum_ptr + m[None, :].to(tl.int64) * sum_stride + n[:, None]
    acc = tl.load(sums, mask=m_mask[None, :] & n_mask[:, None], other=0.0)
    for _ in tl.static_range(1, SEGMENTS):
        sums += num_rows.to(tl.int64) * sum_stride
        acc += tl.load(sums, mask=m_mask[None, :] & n_mask[:, None], other=0.0)
    _finish(
        acc, m, n, n0, m_mask, n_mask, scale_ptr, row_scale_ptr, bias_ptr, y_ptr, N, y_stride,
        y_ptr.dtype.element_ty, scale_ptr is not None, GATED, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def is_wide(x: torch.Tensor, weight: PackedCodes) -> bool:
    """Whether codes are widened before this product. Not in float32: there the order of sums depends on the tile
    shape."""
    exact = x.dtype is not torch.float32 or not x.is_cuda
    return exact and weight.exponents is None and weight.parts_of_group == 0 and len(x) > _WIDE_ROWS


@dataclass(frozen=True)
class Tile:
    """A tile shape. Its depth is that of a block."""

    rows: int
    columns: int
    stages: int
    warps: int


def choose_tile(x: torch.Tensor, weight: PackedCodes) -> Tile:
    """Measured on an H200 for up to 16 rows: 64 outputs at a time where that makes enough programs."""
    num_rows, columns = len(x), weight.columns
    if num_rows <= 16:
        rows = 8 if num_rows <= 8 else 16
        tile = Tile(rows, 64, 3, 4) if columns >= 6144 else Tile(rows, 16, 4, 2)
    elif num_rows <= 64:
        tile = Tile(32, 64, 4, 4) if num_rows <= 32 else Tile(64, 64, 4, 4)
    else:
        tile = Tile(64, 128, 4, 8)
    return fitting(tile, x, weight)


def fitting(tile: Tile, x: torch.Tensor, weight: PackedCodes) -> Tile:
    """The tile shape, with as many stages as the GPU has shared memory for."""
    depth = weight.block * weight.parts
    loads = 1 if weight.numbers is None else 3  # of words, scales and offsets
    stage = x.element_size() * depth * tile.rows + 4 * loads * weight.block * tile.columns  # bytes
    widened = 0 if weight.numbers is None else x.element_size() * depth * tile.columns
    return replace(tile, stages=max(2, min(tile.stages, (shared_memory(x.device) - widened) // stage)))


def code_options(weight: PackedCodes, dtype: torch.dtype) -> dict[str, Any]:
    """Options of the kernels that no tile shape decides."""
    numbers = weight.numbers
    return {
        "FORMAT": weight.type,
        "PAIRS": numbers is None and weight.words.device.type != "cpu" and dtype is torch.bfloat16,  # see `_pairs`
        "EVEN_K": weight.width * weight.parts == weight.depth,
        "PARTS": weight.parts,
        "PARTS_OF_GROUP": weight.parts_of_group,
        "WORDS": weight.block,
        "STRIPS": weight.strips,
        "GROUP": 0 if numbers is None else weight.group,
        "NUMBERS": "" if numbers is None else numbers.kind,
        "OFFSETS": numbers is not None and numbers.offsets,
    }


def number_data(weight: PackedCodes) -> torch.Tensor | None:
    return None if weight.numbers is None else weight.numbers.data


def codes_linear(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [M, K] times a weight [N, K] transposed. A gated weight has alternating gate and up rows. `row_scales`: of rows
    of codes, not with groups."""
    (num_rows, depth), columns = x.shape, weight.columns
    tile = choose_tile(x, weight)
    y = x.new_empty((num_rows, columns // 2 if gated else columns), dtype=out_dtype or x.dtype)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    _quantized_kernel[grid](
        *(x, weight.words, weight.scales, number_data(weight), weight.exponents, row_scales, bias, y),
        *(num_rows, columns, depth, weight.width, x.stride(0), y.stride(0)),
        GATED=gated,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **code_options(weight, x.dtype),
    )
    return y


def widened(
    weight: PackedCodes,
    dtype: torch.dtype,
    *,
    index: torch.Tensor | None = None,
    outputs: slice | None = None,
    codes: bool = False,
) -> torch.Tensor:
    """Outputs of the weight, by an index or some in a row. `codes`: without the scales of outputs."""
    first = 0 if outputs is None else outputs.start
    count = (weight.columns if outputs is None else outputs.stop - first) if index is None else len(index)
    out = torch.empty((count, weight.depth), dtype=dtype, device=weight.words.device)
    _widen_kernel[(triton.cdiv(count, _WIDE_TILE), triton.cdiv(weight.depth, weight.block * weight.parts))](
        *(weight.words, None if codes else weight.scales, number_data(weight), weight.exponents, index, out),
        *(first, count, weight.columns, weight.depth, weight.width),
        BLOCK_N=_WIDE_TILE,
        **code_options(weight, dtype),
    )
    return out


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
    assert weight.scales is not None
    num_rows, columns = len(x), weight.columns
    y = x.new_empty((num_rows, columns // 2 if gated else columns), dtype=out_dtype)
    for start in range(0, columns, _WIDE_COLUMNS):
        count = min(_WIDE_COLUMNS, columns - start)
        sums = product(x, widened(weight, x.dtype, outputs=slice(start, start + count), codes=True))
        part = y[:, start // 2 : (start + count) // 2] if gated else y[:, start : start + count]
        _finish_kernel[(triton.cdiv(num_rows, 16), triton.cdiv(count, 128))](
            *(sums, weight.scales.flatten()[start:], row_scales, None if bias is None else bias[start:], part),
            *(num_rows, count, sums.stride(0), y.stride(0)),
            **{"GATED": gated, "BLOCK_M": 16, "BLOCK_N": 128, "SEGMENTS": 1},
            **early_launch(x.device),
        )
    return y


def finished(sums: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, *, gated: bool) -> None:
    """Adds up sums of segments [segments, rows, columns] of a weight in groups; y: with bias and activation. A gated
    weight has alternating gate and up rows."""
    segments, rows, columns = sums.shape
    _finish_kernel[(triton.cdiv(rows, 16), triton.cdiv(columns, 128))](
        *(sums, None, None, bias, y, rows, columns, sums.stride(1), y.stride(0)),
        **{"GATED": gated, "BLOCK_M": 16, "BLOCK_N": 128, "SEGMENTS": segments},
        **early_launch(sums.device),
    )
