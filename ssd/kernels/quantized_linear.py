"""A linear layer in Triton whose weight is quantised (see `quantized`): tiles are widened in registers.

A weight is stored in words of 32 bits, in blocks of `WORDS` words of a row: part i (a byte, or half of one) of word j
is weight i * WORDS + j of the block. So the parts with one i are a tile of consecutive weights, widened two at a time.
For draft models: not row-invariant.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ssd.kernels.e4m3 import widen_bits
from ssd.kernels.launching import shared_memory
from ssd.kernels.quantized import Codes, Format

# Two words to pairs of bfloat16, part by part. Integers are set as the last bits of 128, then 128 (and the zero point)
# is subtracted. fp8's exponent is not moved, which divides by 2^120.
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
    .reg .b32 p<4>, m<4>;
    prmt.b32 p0, $4, $5, 0x4400;
    prmt.b32 p1, $4, $5, 0x5511;
    prmt.b32 p2, $4, $5, 0x6622;
    prmt.b32 p3, $4, $5, 0x7733;
    shr.u32 m0, p0, 4;
    shr.u32 m1, p1, 4;
    shr.u32 m2, p2, 4;
    shr.u32 m3, p3, 4;
    and.b32 m0, m0, 0x07F007F0;
    and.b32 m1, m1, 0x07F007F0;
    and.b32 m2, m2, 0x07F007F0;
    and.b32 m3, m3, 0x07F007F0;
    lop3.b32 $0, p0, 0x80008000, m0, 0xEA;
    lop3.b32 $1, p1, 0x80008000, m1, 0xEA;
    lop3.b32 $2, p2, 0x80008000, m2, 0xEA;
    lop3.b32 $3, p3, 0x80008000, m3, 0xEA;
}""")
_INT4_PAIRS = tl.constexpr("""{
    .reg .b32 p<4>, a<8>, one, zero;
    mov.b32 one, 0x3F803F80;
    mov.b32 zero, 0xC308C308;
    prmt.b32 p0, $8, $9, 0x0400;
    prmt.b32 p1, $8, $9, 0x1511;
    prmt.b32 p2, $8, $9, 0x2622;
    prmt.b32 p3, $8, $9, 0x3733;
    lop3.b32 a0, p0, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 a2, p1, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 a4, p2, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 a6, p3, 0x000F000F, 0x43004300, 0xEA;
    shr.u32 p0, p0, 4;
    shr.u32 p1, p1, 4;
    shr.u32 p2, p2, 4;
    shr.u32 p3, p3, 4;
    lop3.b32 a1, p0, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 a3, p1, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 a5, p2, 0x000F000F, 0x43004300, 0xEA;
    lop3.b32 a7, p3, 0x000F000F, 0x43004300, 0xEA;
    fma.rn.bf16x2 $0, a0, one, zero;
    fma.rn.bf16x2 $1, a1, one, zero;
    fma.rn.bf16x2 $2, a2, one, zero;
    fma.rn.bf16x2 $3, a3, one, zero;
    fma.rn.bf16x2 $4, a4, one, zero;
    fma.rn.bf16x2 $5, a5, one, zero;
    fma.rn.bf16x2 $6, a6, one, zero;
    fma.rn.bf16x2 $7, a7, one, zero;
}""")


@triton.jit
def _pairs(words, FORMAT: tl.constexpr):
    """All parts of the words as bfloat16, part by part."""
    if FORMAT == "int4":
        return tl.inline_asm_elementwise(
            _INT4_PAIRS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r",
            [words],
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
def _part(words, i: tl.constexpr, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Part i of the words, of any type."""
    if FORMAT == "int4":
        return (((words >> (4 * i)) & 15) - 8).to(dtype)
    elif FORMAT == "int8":
        return (words >> (8 * i)).to(tl.int8).to(dtype)
    else:
        return widen_bits(words >> (8 * i), dtype)


@triton.jit
def _sums(
    x_ptr, w_ptr, scale_ptr, m, n, m_mask, n_mask, N, K, w_stride, x_stride,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr, PARTS_OF_GROUP: tl.constexpr,
    WORDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Sums of a tile [n, m], block by block; int4's are scaled, others are not."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = tl.arange(0, WORDS)
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride + k[:, None]
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * w_stride + k[None, :]
    acc = tl.zeros((n.shape[0], m.shape[0]), tl.float32)
    for start in tl.range(0, w_stride, WORDS, num_stages=STAGES):
        words = tl.load(w_ptrs + start, mask=n_mask[:, None], other=0)
        if PAIRS:
            pairs = _pairs(words, FORMAT)
        for i in tl.static_range(PARTS):
            first = start * PARTS + i * WORDS
            if EVEN_K:
                x = tl.load(x_ptrs + first, mask=m_mask[None, :], other=0.0)
            else:
                x = tl.load(x_ptrs + first, mask=m_mask[None, :] & (first + k < K)[:, None], other=0.0)
            w = pairs[i] if PAIRS else _part(words, i, FORMAT, dtype)
            if FORMAT != "int4":
                acc = tl.dot(w, x, acc, input_precision="tf32x3")
            else:
                if i % PARTS_OF_GROUP == 0:
                    group = tl.dot(w, x, input_precision="tf32x3")
                else:
                    group = tl.dot(w, x, group, input_precision="tf32x3")
                if (i + 1) % PARTS_OF_GROUP == 0:
                    row = (start // WORDS * PARTS + i) // PARTS_OF_GROUP
                    acc += group * tl.load(scale_ptr + row * N + n, mask=n_mask, other=0.0)[:, None]
    return acc


@triton.jit
def _split_sums(
    x_ptr, w_ptr, scale_ptr, m, n, m_mask, n_mask, N, K, w_stride, x_stride,
    FORMAT: tl.constexpr, PAIRS: tl.constexpr, PARTS: tl.constexpr, PARTS_OF_GROUP: tl.constexpr,
    WORDS: tl.constexpr, STAGES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The same, of SPLIT blocks at a time, each by a warp of its own: for few outputs of a great depth."""
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    k = tl.arange(0, WORDS)
    split = tl.arange(0, SPLIT)
    x_ptrs = x_ptr + m[None, None, :].to(tl.int64) * x_stride + (split * (WORDS * PARTS))[:, None, None]
    x_ptrs += k[None, :, None]
    w_ptrs = w_ptr + n[None, :, None].to(tl.int64) * w_stride + (split * WORDS)[:, None, None] + k[None, None, :]
    acc = tl.zeros((SPLIT, n.shape[0], m.shape[0]), tl.float32)
    for start in tl.range(0, w_stride, WORDS * SPLIT, num_stages=STAGES):
        inside = start + split * WORDS < w_stride
        words = tl.load(w_ptrs + start, mask=n_mask[None, :, None] & inside[:, None, None], other=0)
        if PAIRS:
            pairs = _pairs(words, FORMAT)
        for i in tl.static_range(PARTS):
            first = start * PARTS + i * WORDS
            there = (first + (split * (WORDS * PARTS))[:, None] + k[None, :] < K)[:, :, None]
            x = tl.load(x_ptrs + first, mask=m_mask[None, None, :] & there, other=0.0)
            w = pairs[i] if PAIRS else _part(words, i, FORMAT, dtype)
            if FORMAT != "int4":
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


@triton.jit(do_not_specialize=["num_rows"])  # avoids recompilation for other prompt lengths
def _quantized_kernel(
    x_ptr,
    w_ptr,
    scale_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    N,
    K,
    w_stride,
    x_stride,
    y_stride,
    FORMAT: tl.constexpr,
    PAIRS: tl.constexpr,
    GATED: tl.constexpr,
    EVEN_K: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_OF_GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WORDS: tl.constexpr,
    STAGES: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """y[m, n] = sum_k x[m, k] w[n, k]. GATED: w's rows alternate gate, up, and y has half as many columns."""
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    m = (tl.program_id(0) % tiles_m) * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = (tl.program_id(0) // tiles_m) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    m_mask = m < num_rows
    n_mask = n < N
    if SPLIT == 1:
        acc = _sums(
            x_ptr, w_ptr, scale_ptr, m, n, m_mask, n_mask, N, K, w_stride, x_stride,
            FORMAT, PAIRS, EVEN_K, PARTS, PARTS_OF_GROUP, WORDS, STAGES,
        )  # fmt: skip
    else:
        acc = _split_sums(
            x_ptr, w_ptr, scale_ptr, m, n, m_mask, n_mask, N, K, w_stride, x_stride,
            FORMAT, PAIRS, PARTS, PARTS_OF_GROUP, WORDS, STAGES, SPLIT,
        )  # fmt: skip
    if PAIRS and FORMAT == "fp8":
        acc *= 1.329227995784916e36  # 2^120
    if FORMAT != "int4":
        acc *= tl.load(scale_ptr + n, mask=n_mask, other=0.0)[:, None]
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1)))
        acc = gate / (1.0 + tl.exp(-gate)) * up
        n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
        n_mask = n < N // 2
    mask = m_mask[None, :] & n_mask[:, None]
    tl.store(y_ptr + m[None, :].to(tl.int64) * y_stride + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class PackedCodes:
    """A quantised weight [rows, depth] in words."""

    words: torch.Tensor  # int32 [rows, blocks * block]
    scales: torch.Tensor  # float32 [groups, rows]
    format: Format
    depth: int
    block: int  # words of a block
    group: int  # weights of one scale

    @property
    def parts(self) -> int:
        """Weights of a word."""
        return 8 if self.format == "int4" else 4


def pack(codes: Codes) -> PackedCodes:
    """In blocks of 64 words, or of 32 where the depth or the groups are no multiple of that."""
    bits = 4 if codes.format == "int4" else 8
    parts = 32 // bits
    block = 64 if codes.depth % (64 * parts) == 0 and codes.group >= 64 else 32
    rows, width = codes.values.shape
    missing = -width % (parts * block)
    values = torch.nn.functional.pad(codes.values, (0, missing), value=8 if bits == 4 else 0)
    values = values.view(rows, -1, parts, block)
    words = values[:, :, 0].to(torch.int32)
    for i in range(1, parts):
        words |= values[:, :, i].to(torch.int32) << (bits * i)
    groups = codes.scales if bits == 8 else torch.nn.functional.pad(codes.scales, (0, missing // codes.group))
    return PackedCodes(words.flatten(1), groups.t().contiguous(), codes.format, codes.depth, block, codes.group)


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
    num_rows, columns = len(x), len(weight.words)
    if num_rows <= 16:
        rows = 8 if num_rows <= 8 else 16
        tile = Tile(rows, 64, 3, 4) if columns >= 6144 else Tile(rows, 16, 3, 4, split=4)
    elif num_rows <= 64:
        tile = Tile(32, 64, 4, 4) if num_rows <= 32 else Tile(64, 64, 4, 4)
    else:
        tile = Tile(64, 128, 4, 8)
    stage = tile.split * weight.block * (x.element_size() * weight.parts * tile.rows + 4 * tile.columns)  # bytes
    fitting = shared_memory(x.device) // stage + (tile.split > 1)  # a split tile needs one buffer less than stages
    return replace(tile, stages=max(2, min(tile.stages, fitting)))


def quantized_linear(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """x [M, K] times a weight [N, K] transposed; see `Ops.linear`. A gated weight has alternating gate and up rows."""
    num_rows, depth = x.shape
    columns, width = weight.words.shape
    tile = choose_tile(x, weight)
    y = x.new_empty((num_rows, columns // 2 if gated else columns), dtype=out_dtype or x.dtype)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    _quantized_kernel[grid](
        x,
        weight.words,
        weight.scales,
        bias,
        y,
        num_rows,
        columns,
        depth,
        width,
        x.stride(0),
        y.stride(0),
        FORMAT=weight.format,
        PAIRS=x.is_cuda and x.dtype is torch.bfloat16,
        GATED=gated,
        EVEN_K=width * weight.parts == depth,
        PARTS=weight.parts,
        PARTS_OF_GROUP=max(1, weight.group // weight.block),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        WORDS=weight.block,
        STAGES=tile.stages,
        SPLIT=tile.split,
        num_warps=tile.warps,
    )
    return y
