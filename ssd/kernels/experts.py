"""Kernels of a mixture of experts in Triton: routing, grouped products, weighted sums.

A grouped product is that of `linear` or `quantized_linear` with the rows of one expert in each tile: pairs (see
`Routing`) are sorted by expert on the device, and a tile finds its expert from where the pairs of each expert begin.
Grids depend on the number of rows only, so that everything runs in CUDA graphs. Sums over the depth are taken in the
order of those kernels, whatever the tile shape, and pairs are independent: a row's bits are its own.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssd.kernels import linear, quantized_linear
from ssd.kernels.launching import shared_memory
from ssd.kernels.linear import sums as dense_sums
from ssd.kernels.ops import GLU, SWIGLU, Routing
from ssd.kernels.packing import PackedCodes
from ssd.kernels.quantized_linear import sums as code_sums

_PAIRS = 1024  # that one step of `_order_kernel` sorts
_WIDTH = 1024  # numbers of a row that one program of `_combine_kernel` adds up


@triton.jit
def _route_kernel(
    logits_ptr, ids_ptr, weights_ptr, experts,
    COUNT: tl.constexpr, CHOSEN: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row: its COUNT largest logits, the lower expert first where they are equal, and their softmax."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)
    place = tl.arange(0, PLACES)
    logits = tl.load(logits_ptr + row * experts + e, mask=e < experts, other=float("-inf"))
    left = tl.where(logits == logits, logits, float("-inf"))  # NaN would be chosen with any index
    ids = tl.zeros((PLACES,), tl.int32)
    values = tl.full((PLACES,), float("-inf"), tl.float32)
    for i in tl.static_range(COUNT):
        best = tl.argmax(left, 0)
        ids = tl.where(place == i, best, ids)
        values = tl.where(place == i, tl.sum(tl.where(e == best, logits, 0.0)), values)
        left = tl.where(e == best, float("-inf"), left)
    top = tl.max(values)
    weights = tl.exp(values - top)
    total = tl.sum(weights) if CHOSEN else tl.sum(tl.exp(logits - top))
    tl.store(ids_ptr + row * COUNT + place, ids, mask=place < COUNT)
    tl.store(weights_ptr + row * COUNT + place, weights / total, mask=place < COUNT)


@triton.jit(do_not_specialize=["pairs"])
def _order_kernel(ids_ptr, order_ptr, starts_ptr, pairs, BLOCK: tl.constexpr):
    """One expert: its pairs in order, after those of lower experts."""
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, pairs, BLOCK):
        ids = tl.load(ids_ptr + start + at, mask=start + at < pairs, other=expert)
        lower += (ids < expert).to(tl.int32)
    first = tl.sum(lower)
    tl.store(starts_ptr + expert, first)
    for start in range(0, pairs, BLOCK):
        ids = tl.load(ids_ptr + start + at, mask=start + at < pairs, other=-1)
        mine = (ids == expert).to(tl.int32)
        tl.store(order_ptr + first + tl.cumsum(mine, 0) - 1, start + at, mask=mine == 1)
        first += tl.sum(mine)
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, first)


def route(logits: torch.Tensor, count: int, *, chosen: bool) -> Routing:
    """See `Ops.route`."""
    rows, experts = logits.shape
    ids = logits.new_empty((rows, count), dtype=torch.int32)
    weights = logits.new_empty((rows, count))
    order, starts = ids.new_empty(rows * count), ids.new_empty(experts + 1)
    _route_kernel[(rows,)](
        *(logits, ids, weights, experts),
        COUNT=count,
        CHOSEN=chosen,
        PLACES=triton.next_power_of_2(count),
        BLOCK=triton.next_power_of_2(experts),
        num_warps=1,
    )
    _order_kernel[(experts,)](ids, order, starts, rows * count, BLOCK=_PAIRS, num_warps=4)
    return Routing(ids, weights, order, starts)


@triton.jit
def _expert_kernel(
    x_ptr, w_ptr, scale_ptr, offset_ptr, row_scale_ptr, row_sum_ptr, bias_ptr, y_ptr, order_ptr, starts_ptr,
    repeats, experts, N, K: tl.constexpr, w_stride, x_stride, groups, slope, limit, shift,
    GATED: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr,
    PARTS_OF_GROUP: tl.constexpr, WORDS: tl.constexpr, STRIPS: tl.constexpr, ROW_GROUPS: tl.constexpr,
):  # fmt: skip
    """y[p] = x[p // repeats] times the N rows of w of p's expert. GATED: these alternate gate, up, and y has half as
    many columns. FORMAT "": w is not quantised."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // tiles_n
    e = tl.arange(0, BLOCK_E)
    counts = tl.load(starts_ptr + e + 1, mask=e < experts, other=0) - tl.load(starts_ptr + e, mask=e < experts, other=0)
    tiles = tl.cdiv(counts, BLOCK_M)
    expert = tl.sum((tl.cumsum(tiles, 0) <= tile).to(tl.int32))
    if expert >= experts:  # there are fewer tiles than programs
        return
    before = tl.sum(tl.where(e < expert, tiles, 0))
    at = tl.load(starts_ptr + expert) + (tile - before) * BLOCK_M + tl.arange(0, BLOCK_M)
    m_mask = at < tl.load(starts_ptr + expert + 1)
    pair = tl.load(order_ptr + at, mask=m_mask, other=0)
    m = pair // repeats
    n0 = (tl.program_id(0) % tiles_n) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    n_mask = n < N
    row = expert * N + n  # of w
    if FORMAT == "":
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride + k[:, None]
        w_ptrs = w_ptr + row[:, None].to(tl.int64) * K + k[None, :]
        acc = dense_sums(x_ptrs, w_ptrs, m_mask, n_mask, K, BLOCK_K, STAGES)
    else:
        acc = code_sums(
            x_ptr, w_ptr, scale_ptr, offset_ptr, row_scale_ptr, row_sum_ptr, m, row, m_mask, n_mask, experts * N, K,
            w_stride, x_stride, groups, FORMAT, PAIRS, EVEN_K, PARTS, PARTS_OF_GROUP, WORDS, STRIPS, STAGES,
            ROW_GROUPS,
        )  # fmt: skip
        if PARTS_OF_GROUP == 0:
            if row_scale_ptr is not None:
                acc *= tl.load(row_scale_ptr + m, mask=m_mask, other=0.0)[None, :]
            acc *= tl.load(scale_ptr + row, mask=n_mask, other=0.0)[:, None]
    if bias_ptr is not None:  # of a gated weight: those of all gates, then those of all ups
        place = row % 2 * (experts * N // 2) + row // 2 if GATED else row
        acc += tl.load(bias_ptr + place, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    width = N
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(acc, (BLOCK_N // 2, 2, BLOCK_M)), (0, 2, 1)))
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        acc = gate / (1.0 + tl.exp(-slope * gate)) * (up + shift)
        width = N // 2
        n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
        n_mask = n < width
    to = y_ptr + pair[None, :].to(tl.int64) * width + n[:, None]
    tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=m_mask[None, :] & n_mask[:, None])


_DENSE: dict[str, Any] = {  # options of `code_sums`, which is not called
    "FORMAT": "",
    "PAIRS": False,
    "EVEN_K": False,
    "PARTS": 1,
    "PARTS_OF_GROUP": 0,
    "WORDS": 1,
    "STRIPS": False,
    "ROW_GROUPS": False,
}


def expert_linear(
    x: torch.Tensor,
    weight: torch.Tensor | PackedCodes,
    routing: Routing,
    bias: torch.Tensor | None = None,
    *,
    glu: GLU | None = None,
    out_dtype: torch.dtype | None = None,
    row_scales: torch.Tensor | None = None,
) -> torch.Tensor:
    """See `Ops.expert_linear`. A gated weight has alternating gate and up rows."""
    experts, pairs, depth = routing.num_experts, len(routing.order), x.shape[1]
    rows = triton.next_power_of_2(min(len(routing.weights), 2 * triton.cdiv(pairs, experts)))  # of most experts
    tile: linear.Tile | quantized_linear.Tile
    codes: tuple[torch.Tensor | None, ...]
    if isinstance(weight, PackedCodes):
        tile, words, groups = code_tile(rows, x, weight), weight.words, triton.cdiv(depth, weight.group)
        codes = (weight.scales, weight.offsets, row_scales, quantized_linear.row_sums(x, weight, row_scales))
        options = {**quantized_linear.sum_options(x, weight, row_scales), "BLOCK_K": 0}
    else:
        tile, words, groups, codes = dense_tile(rows, x), weight, 0, (None,) * 4
        options = {**_DENSE, "BLOCK_K": tile.depth * 2 // x.element_size()}
    columns, gate = len(words) // experts, glu or SWIGLU
    y = x.new_empty((pairs, columns if glu is None else columns // 2), dtype=out_dtype or x.dtype)
    tiles = min(pairs, pairs // tile.rows + experts)  # at most
    _expert_kernel[(tiles * triton.cdiv(columns, tile.columns),)](
        *(x, words, *codes, bias, y, routing.order, routing.starts),
        *(pairs // len(x), experts, columns, depth, words.shape[1], x.stride(0), groups),
        *(gate.slope, gate.limit, gate.shift),
        GATED=glu is not None,
        BLOCK_E=triton.next_power_of_2(experts),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **options,
    )
    return y


def dense_tile(rows: int, x: torch.Tensor) -> linear.Tile:
    """For experts with up to so many rows: the shapes of `linear`, which was measured."""
    tile = linear.Tile(max(16, rows), 64, 128, 4, 4) if rows <= 64 else linear.Tile(128, 128, 64, 4, 8)
    return linear.fitting(tile, x.element_size(), shared_memory(x.device))


def code_tile(rows: int, x: torch.Tensor, weight: PackedCodes) -> quantized_linear.Tile:
    """Likewise: the shapes of `quantized_linear`."""
    if rows > 64:
        tile = quantized_linear.Tile(64, 128, 4, 8)
    else:
        tile = quantized_linear.Tile(max(8, rows), 64, 3 if rows <= 16 else 4, 4)
    return quantized_linear.fitting(tile, x, weight)


@triton.jit
def _combine_kernel(x_ptr, weights_ptr, y_ptr, width, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(COUNT):
        pair = row * COUNT + i
        x = tl.load(x_ptr + pair * width + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * x
    tl.store(y_ptr + row * width + at, total.to(y_ptr.dtype.element_ty), mask=mask)


def combine(x: torch.Tensor, routing: Routing, *, float32: bool = False) -> torch.Tensor:
    """See `Ops.combine`."""
    (rows, count), width = routing.weights.shape, x.shape[1]
    y = x.new_empty((rows, width), dtype=torch.float32 if float32 else x.dtype)
    grid = (rows, triton.cdiv(width, _WIDTH))
    _combine_kernel[grid](x, routing.weights, y, width, COUNT=count, BLOCK=_WIDTH, num_warps=4)
    return y
