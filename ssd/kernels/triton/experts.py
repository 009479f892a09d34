"""Kernels of a mixture of experts in Triton: routing, grouped products, weighted sums.

A grouped product is that of `linear` or `codes_linear` with the rows of one expert in each tile: pairs (see
`Routing`) are sorted by expert on the device, and cut into tiles (`Routing.tiles`).
Grids depend on the number of rows only, so that everything runs in CUDA graphs. Sums over the depth are taken in the
order of those kernels, whatever the tile shape, and pairs are independent: a row's bits are its own.

All of them are launched early (`launch`): for one row they take a few microseconds each.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from ssd.kernels.cuda import expert_rows
from ssd.kernels.cuda.launch import early_launch, shared_memory
from ssd.kernels.triton import codes_linear, linear
from ssd.kernels.triton.codes_linear import sums as code_sums
from ssd.kernels.triton.epilogue import gate_and_up, silu
from ssd.kernels.triton.linear import sums as dense_sums
from ssd.kernels.triton.packing import PackedCodes
from ssd.kernels.weights import GLU, SWIGLU, Routing, RoutingRule

_ROUTER_DEPTH = 256  # of a piece of the router's product
_PAIRS = 1024  # that one step of `_order_kernel` sorts
_LEAST_ROWS = 8  # of a tile
_FEW_PAIRS = 64  # that one program routes, if weights are those of the chosen experts
_WIDTH = 1024  # numbers of a row that one program of `_combine_kernel` adds up


@triton.jit(do_not_specialize=["rows"])
def _router_kernel(
    x_ptr, w_ptr, bias_ptr, y_ptr, rows, experts, x_stride, K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A piece of the depth of the logits of some rows and experts; the first one with the bias."""
    piece = tl.program_id(0)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)
    k = piece * BLOCK_K + tl.arange(0, BLOCK_K)
    m_mask, n_mask, k_mask = m < rows, n < experts, k < K
    w = tl.load(w_ptr + n[:, None] * K + k[None, :], mask=n_mask[:, None] & k_mask[None, :], other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride + k[:, None]
    x = tl.load(x_ptrs, mask=m_mask[None, :] & k_mask[:, None], other=0.0)
    acc = tl.dot(w, x, input_precision="tf32x3")
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n_mask & (piece == 0), other=0.0).to(tl.float32)[:, None]
    to = y_ptr + (piece * rows + m[None, :]).to(tl.int64) * experts + n[:, None]
    tl.store(to, acc, mask=m_mask[None, :] & n_mask[:, None])


def router(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """See `Ops.router`: sums of `_ROUTER_DEPTH` products [pieces, rows, experts], by programs of their own. A whole sum
    would take one program as long as an expert's product takes them all."""
    (rows, depth), experts, tile = x.shape, len(weight), 8 if len(x) <= 8 else 16
    pieces = triton.cdiv(depth, _ROUTER_DEPTH)
    y = x.new_empty((pieces, rows, experts), dtype=torch.float32)
    _router_kernel[(pieces, triton.cdiv(experts, 32), triton.cdiv(rows, tile))](
        *(x, weight, bias, y, rows, experts, x.stride(0), depth),
        BLOCK_M=tile,
        BLOCK_N=32,
        BLOCK_K=_ROUTER_DEPTH,
        num_warps=4,
        **early_launch(x.device),
    )
    return y


@triton.jit
def _added_up(ptrs, mask, stride, PIECES: tl.constexpr):
    """Logits, whose pieces are added up in order."""
    logits = tl.load(ptrs, mask=mask, other=float("-inf"))
    for i in tl.static_range(1, PIECES):
        logits += tl.load(ptrs + i * stride, mask=mask, other=0.0)
    return logits


@triton.jit
def _ordered(numbers):
    """float32 numbers as integers in the same order (a warp finds the largest with one instruction), or such integers
    as the numbers."""
    bits = numbers.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _logit_keys(logits):
    """NaN is the least logit, and -0.0 is 0.0."""
    return _ordered(tl.where(logits == logits, logits + 0.0, float("-inf")))


@triton.jit
def _in_kept_groups(
    keys, e, size, GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The keys of scores [rows, BLOCK], those of groups that are not kept as if they were -inf."""
    lowest = _ordered(tl.full((1, 1), float("-inf"), tl.float32))
    left = keys
    for _ in tl.static_range(GROUPS - KEPT):  # without the worst group, the last one where they are equal
        worst = tl.full((keys.shape[0], 1), GROUPS, tl.int32)
        least = tl.full((keys.shape[0], 1), float("inf"), tl.float32)
        for g in tl.static_range(GROUPS):
            own = tl.where(e // size == g, left, -1 << 31)
            first = tl.max(own, 1)[:, None]
            place = tl.min(tl.where(own == first, e, BLOCK), 1)[:, None]
            second = tl.max(tl.where(e == place, -1 << 31, own), 1)[:, None]
            both = _ordered(first).to(tl.float32, bitcast=True) + _ordered(second).to(tl.float32, bitcast=True)
            worse = (first > lowest) & (both <= least)
            worst = tl.where(worse, g, worst)
            least = tl.where(worse, both, least)
        left = tl.where(e // size == worst, lowest, left)
    return left


@triton.jit
def _chosen(
    logits, e, place, correction_ptr, experts, scale, COUNT: tl.constexpr, NORMALIZED: tl.constexpr,
    SIGMOID: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr,
):  # fmt: skip
    """The experts of rows of logits, COUNT of each, and their weights by a `RoutingRule`: [rows, places]. Those of the
    places behind them are the shared ones."""
    BLOCK: tl.constexpr = logits.shape[1]
    scores = logits
    if SIGMOID:
        numbers = tl.sigmoid(logits)
        correction = tl.load(correction_ptr + e, mask=e < experts, other=0.0)
        scores = tl.where(e < experts, numbers + correction, float("-inf"))
    keys = _logit_keys(scores)
    if GROUPS > KEPT:
        keys = _in_kept_groups(keys, e, experts // GROUPS, GROUPS, KEPT, BLOCK)
    ids = tl.zeros((logits.shape[0], place.shape[1]), tl.int32) + experts - COUNT + place
    weights = tl.full((logits.shape[0], place.shape[1]), 1.0, tl.float32)
    top = tl.zeros((logits.shape[0], 1), tl.float32)
    total = tl.zeros((logits.shape[0], 1), tl.float32)
    for i in tl.static_range(COUNT):
        key = tl.max(keys, 1)[:, None]
        best = tl.min(tl.where(keys == key, e, BLOCK), 1)[:, None]
        if SIGMOID:
            weight = tl.sum(tl.where(e == best, numbers, 0.0), 1)[:, None]
        else:
            logit = _ordered(key).to(tl.float32, bitcast=True)
            top = logit if i == 0 else top
            weight = tl.exp(logit - top)
        ids = tl.where(place == i, best, ids)
        weights = tl.where(place == i, weight, weights)
        total += weight
        keys = tl.where(e == best, -1 << 31, keys)
    if SIGMOID:
        total = total + 1e-20 if NORMALIZED else tl.full(total.shape, 1.0, tl.float32)
    elif not NORMALIZED:
        total = tl.sum(tl.exp(logits - top), 1)[:, None]
    return ids, tl.where(place < COUNT, weights / total * scale, weights)


@triton.jit(do_not_specialize=["rows"])
def _route_kernel(
    logits_ptr, correction_ptr, ids_ptr, weights_ptr, rows, experts, scale, PIECES: tl.constexpr,
    COUNT: tl.constexpr, SHARED: tl.constexpr, NORMALIZED: tl.constexpr, SIGMOID: tl.constexpr, GROUPS: tl.constexpr,
    KEPT: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The experts of one row, and their weights."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, BLOCK)[None, :]
    place = tl.arange(0, PLACES)[None, :]
    logits = _added_up(logits_ptr + row * experts + e, e < experts, rows * experts, PIECES)
    ids, weights = _chosen(
        logits, e, place, correction_ptr, experts, scale, COUNT, NORMALIZED, SIGMOID, GROUPS, KEPT
    )  # fmt: skip
    to = row * (COUNT + SHARED) + place
    tl.store(ids_ptr + to, ids, mask=place < COUNT + SHARED)
    tl.store(weights_ptr + to, weights, mask=place < COUNT + SHARED)


@triton.jit(do_not_specialize=["rows", "tiles"])
def _route_few_kernel(
    logits_ptr, correction_ptr, ids_ptr, weights_ptr, order_ptr, starts_ptr, tiles_ptr, rows, experts, tiles, scale,
    PIECES: tl.constexpr, COUNT: tl.constexpr, SHARED: tl.constexpr, NORMALIZED: tl.constexpr, SIGMOID: tl.constexpr,
    GROUPS: tl.constexpr, KEPT: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """What `_route_kernel` and `_order_kernel` do, in one program, for so few rows that an expert has one tile.

    BLOCK_E: a power of two, not less than the number of all experts."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # see `route`
    e = tl.arange(0, BLOCK)[None, :]
    place = tl.arange(0, PLACES)[None, :]
    row = tl.arange(0, ROWS)[:, None]
    logits = _added_up(logits_ptr + row * experts + e, (row < rows) & (e < experts), rows * experts, PIECES)
    ids, weights = _chosen(
        logits, e, place, correction_ptr, experts, scale, COUNT, NORMALIZED, SIGMOID, GROUPS, KEPT
    )  # fmt: skip
    EACH: tl.constexpr = COUNT + SHARED
    there = (row < rows) & (place < EACH)
    tl.store(ids_ptr + row * EACH + place, ids, mask=there)
    tl.store(weights_ptr + row * EACH + place, weights, mask=there)
    PAIRS: tl.constexpr = ROWS * PLACES
    own = tl.reshape(tl.where(there, ids, BLOCK_E), (PAIRS,))  # the experts of all pairs, after them BLOCK_E
    pair = tl.reshape(row * EACH + place, (PAIRS,))
    p = tl.arange(0, PAIRS)
    before = (own[None, :] < own[:, None]).to(tl.int32)
    same = (own[None, :] == own[:, None]).to(tl.int32)
    earlier = tl.sum(same * (p[None, :] < p[:, None]).to(tl.int32), 1)  # pairs of the same expert
    start = tl.sum(before, 1)
    real = own < BLOCK_E
    tl.store(order_ptr + start + earlier, pair, mask=real)
    first = real & (earlier == 0)
    firsts = (tl.sum(same * (p[None, :] > p[:, None]).to(tl.int32), 0) == 0) & real  # the same, along the other axis
    tile = tl.sum(before * firsts.to(tl.int32)[None, :], 1)
    tl.store(tiles_ptr + 3 * tile, own, mask=first)
    tl.store(tiles_ptr + 3 * tile + 1, start, mask=first)
    tl.store(tiles_ptr + 3 * tile + 2, start + tl.sum(same, 1), mask=first)
    used = tl.sum(first.to(tl.int32))
    tl.store(tiles_ptr + 3 * (used + p), -1, mask=used + p < tiles)
    expert = tl.arange(0, BLOCK_E)
    starts = tl.sum((own[None, :] < expert[:, None]).to(tl.int32), 1)
    tl.store(starts_ptr + expert, starts, mask=expert < experts + SHARED)
    tl.store(starts_ptr + experts + SHARED, rows * EACH)


@triton.jit(do_not_specialize=["pairs", "tiles"])
def _order_kernel(
    ids_ptr, order_ptr, starts_ptr, tiles_ptr, pairs, tiles,
    BLOCK: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One expert: its pairs in order, after those of lower experts, and its tiles. The last one's program also marks
    the tiles that there are too many."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # see `route`
    expert = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    e = tl.arange(0, BLOCK_E)
    counts = tl.where(e == BLOCK_E - 1, pairs - tl.cdiv(pairs, BLOCK) * BLOCK, 0)  # what comes after the last pair
    for start in range(0, pairs, BLOCK):
        counts += tl.histogram(tl.load(ids_ptr + start + at, mask=start + at < pairs, other=BLOCK_E - 1), BLOCK_E)
    first = tl.sum(tl.where(e < expert, counts, 0))
    end = first + tl.sum(tl.where(e == expert, counts, 0))
    tile = tl.sum(tl.where(e < expert, tl.cdiv(counts, BLOCK_M), 0))
    tl.store(starts_ptr + expert, first)
    for start in range(first, end, BLOCK_M):
        tl.store(tiles_ptr + 3 * tile, expert)
        tl.store(tiles_ptr + 3 * tile + 1, start)
        tl.store(tiles_ptr + 3 * tile + 2, tl.minimum(start + BLOCK_M, end))
        tile += 1
    if expert == tl.num_programs(0) - 1:
        tl.store(starts_ptr + expert + 1, end)
        tl.store(tiles_ptr + 3 * (tile + e), -1, mask=tile + e < tiles)
    for start in range(0, pairs, BLOCK):
        mine = (tl.load(ids_ptr + start + at, mask=start + at < pairs, other=-1) == expert).to(tl.int32)
        tl.store(order_ptr + first + tl.cumsum(mine, 0) - 1, start + at, mask=mine == 1)
        first += tl.sum(mine)


def route(logits: torch.Tensor, count: int, rule: RoutingRule, correction: torch.Tensor | None = None) -> Routing:
    """See `Ops.route`. Logits are those of `router`, or [rows, experts].

    The last kernel lets the experts' product begin after its own wait: multiprocessors are free then. Before, some are
    still busy with the product before the norm, and the many programs that wait would fill up the few others."""
    (rows, choices), each = logits.shape[-2:], count + rule.shared
    pairs, experts = rows * each, choices + rule.shared
    ids = logits.new_empty((rows, each), dtype=torch.int32)
    weights = logits.new_empty((rows, each))
    order, starts, block = ids.new_empty(pairs), ids.new_empty(experts + 1), tile_rows(rows, each, experts)
    tiles = ids.new_empty((min(pairs, pairs // block + experts), 3))  # as many as there can be
    options = {
        "COUNT": count,
        "SHARED": rule.shared,
        "NORMALIZED": rule.normalized,
        "SIGMOID": rule.sigmoid,
        "GROUPS": rule.groups,
        "KEPT": rule.kept_groups,
        "PLACES": triton.next_power_of_2(each),
        "BLOCK": triton.next_power_of_2(choices),
        "PIECES": len(logits) if logits.dim() == 3 else 1,
        **early_launch(logits.device),
    }
    few_rows = triton.next_power_of_2(rows)
    of_chosen = rule.sigmoid or rule.normalized  # a sum over all experts has the bits of one warp
    if of_chosen and rows <= block and few_rows * options["PLACES"] <= _FEW_PAIRS:
        block_e = triton.next_power_of_2(experts)
        compared = few_rows * options["PLACES"] * block_e  # pairs with experts
        _route_few_kernel[(1,)](
            *(logits, correction, ids, weights, order, starts, tiles, rows, choices, len(tiles), rule.scale),
            BLOCK_E=block_e,
            ROWS=few_rows,
            num_warps=max(min(4, few_rows), min(8, compared // 1024)),
            **options,
        )
        return Routing(ids, weights, order, starts, tiles)
    _route_kernel[(rows,)](*(logits, correction, ids, weights, rows, choices, rule.scale), num_warps=1, **options)
    _order_kernel[(experts,)](
        *(ids, order, starts, tiles, pairs, len(tiles)),
        BLOCK=min(_PAIRS, max(128, triton.next_power_of_2(pairs))),
        BLOCK_E=max(16, triton.next_power_of_2(experts)),
        BLOCK_M=block,
        num_warps=4,
        **early_launch(logits.device),
    )
    return Routing(ids, weights, order, starts, tiles)


def tile_rows(rows: int, count: int, experts: int) -> int:
    """Pairs of a tile: twice as many as an expert has on average, so that most experts have one tile."""
    most: int = triton.next_power_of_2(min(rows, 2 * triton.cdiv(rows * count, experts)))
    return min(64, max(_LEAST_ROWS, most))


@triton.jit
def _expert_kernel(
    x_ptr, w_ptr, scale_ptr, number_ptr, exponent_ptr, row_scale_ptr, bias_ptr, y_ptr, order_ptr, tiles_ptr,
    repeats, experts, N, K: tl.constexpr, w_stride, x_stride, slope, limit, shift,
    GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
    STAGES: tl.constexpr, FORMAT: tl.constexpr, PAIRS: tl.constexpr, EVEN_K: tl.constexpr, PARTS: tl.constexpr,
    PARTS_OF_GROUP: tl.constexpr, WORDS: tl.constexpr, STRIPS: tl.constexpr, GROUP: tl.constexpr,
    NUMBERS: tl.constexpr, OFFSETS: tl.constexpr, SETTLED: tl.constexpr,
):  # fmt: skip
    """y[p] = x[p // repeats] times the N rows of w of p's expert. GATED: these alternate gate, up, and y has half as
    many columns. FORMAT "": w is not quantised. SETTLED: see `Routing`."""
    if EARLY:
        if not SETTLED:
            tl.extra.cuda.gdc_wait()
        if BLOCK_M <= 16:  # programs that wait would keep multiprocessors from a draft beside a large batch
            tl.extra.cuda.gdc_launch_dependents()
    tiles_n = tl.cdiv(N, BLOCK_N)
    tile = tiles_ptr + 3 * (tl.program_id(0) // tiles_n)
    expert = tl.load(tile)
    if expert < 0:  # there are fewer tiles than programs
        return
    at = tl.load(tile + 1) + tl.arange(0, BLOCK_M)
    m_mask = at < tl.load(tile + 2)
    pair = tl.load(order_ptr + at, mask=m_mask, other=0)
    n0 = (tl.program_id(0) % tiles_n) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    n_mask = n < N
    row = expert * N + n  # of w
    SCALED: tl.constexpr = scale_ptr is not None and PARTS_OF_GROUP == 0
    if SCALED:  # loaded behind the sums, their latency would be the kernel's
        scale = tl.load(scale_ptr + row, mask=n_mask, other=0.0)
    if EARLY and SETTLED:
        tl.extra.cuda.gdc_wait()
    m = pair // repeats
    if FORMAT == "":
        k = tl.arange(0, BLOCK_K)
        x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride + k[:, None]
        w_ptrs = w_ptr + row[:, None].to(tl.int64) * K + k[None, :]
        acc = dense_sums(x_ptrs, w_ptrs, m_mask, n_mask, K, BLOCK_K, STAGES)
    else:
        acc = code_sums(
            x_ptr, w_ptr, scale_ptr, number_ptr, exponent_ptr, m, row, m_mask, n_mask, experts * N, K, w_stride,
            x_stride, FORMAT, PAIRS, EVEN_K, PARTS, PARTS_OF_GROUP, WORDS, STRIPS, GROUP, NUMBERS, OFFSETS, STAGES,
        )  # fmt: skip
    if row_scale_ptr is not None:
        acc *= tl.load(row_scale_ptr + m, mask=m_mask, other=0.0)[None, :]
    if SCALED:
        acc *= scale[:, None]
    if bias_ptr is not None:  # of a gated weight: those of all gates, then those of all ups
        place = row % 2 * (experts * N // 2) + row // 2 if GATED else row
        acc += tl.load(bias_ptr + place, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    width = N
    if GATED:
        gate, up = gate_and_up(acc, BLOCK_N, BLOCK_M)
        gate = tl.where(gate > limit, limit, gate)
        up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
        acc = silu(gate, slope) * (up + shift)
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
    "GROUP": 0,
    "NUMBERS": "",
    "OFFSETS": False,
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
    """See `Weight.expert_linear`. A gated weight has alternating gate and up rows."""
    if routing.tiles is None:
        raise AssertionError("route() of the same kernels comes before expert_linear()")
    experts, pairs, depth = routing.num_experts, len(routing.order), x.shape[1]
    rows = tile_rows(len(routing.weights), pairs // len(routing.weights), experts)
    if isinstance(weight, PackedCodes) and expert_rows.takes(x, weight, routing, bias, rows, row_scales):
        y = expert_rows.linear(x, weight, routing, bias, rows, glu=glu, out_dtype=out_dtype or x.dtype)
        routing.settled = True
        return y
    tile: linear.Tile | codes_linear.Tile
    codes: tuple[torch.Tensor | None, ...]
    if isinstance(weight, PackedCodes):
        tile, words = code_tile(rows, x, weight), weight.words
        columns, width = weight.columns // experts, weight.width
        codes = (weight.scales, codes_linear.number_data(weight), weight.exponents, row_scales)
        options = {**codes_linear.code_options(weight, x.dtype), "BLOCK_K": 0}
    else:
        tile, words, codes = dense_tile(rows, x), weight, (None,) * 4
        columns, width = len(weight) // experts, depth
        options = {**_DENSE, "BLOCK_K": tile.depth * 2 // x.element_size()}
    gate = glu or SWIGLU
    y = x.new_empty((pairs, columns if glu is None else columns // 2), dtype=out_dtype or x.dtype)
    _expert_kernel[(len(routing.tiles) * triton.cdiv(columns, tile.columns),)](
        *(x, words, *codes, bias, y, routing.order, routing.tiles),
        *(pairs // len(x), experts, columns, depth, width, x.stride(0)),
        *(gate.slope, gate.limit, gate.shift),
        GATED=glu is not None,
        BLOCK_M=rows,
        BLOCK_N=tile.columns,
        STAGES=tile.stages,
        SETTLED=routing.settled,
        num_warps=tile.warps,
        **early_launch(x.device),
        **options,
    )
    routing.settled = True
    return y


def dense_tile(rows: int, x: torch.Tensor) -> linear.Tile:
    """For experts with up to so many rows. Measured on an H200 for up to 16."""
    tile = linear.Tile(rows, 64, 128, 4, 4) if rows < 64 else linear.Tile(rows, 128, 128, 4, 8)
    return linear.fitting(tile, x.element_size(), shared_memory(x.device))


def code_tile(rows: int, x: torch.Tensor, weight: PackedCodes) -> codes_linear.Tile:
    """Likewise. Those of fp4 are larger where there are enough programs: its widening takes many instructions, fewer
    for a warp with more outputs."""
    if rows >= 64:
        tile = codes_linear.Tile(rows, 128, 4, 8)
    elif rows <= 16:
        tile = codes_linear.Tile(rows, 64 if weight.type == "fp4" and rows > 8 else 32, 3, 2)
    else:
        tile = codes_linear.Tile(rows, 64, 4, 4)
    return codes_linear.fitting(tile, x, weight)


@triton.jit
def _combine_kernel(
    x_ptr, weights_ptr, shared_ptr, y_ptr, width, COUNT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    total = tl.zeros((BLOCK,), tl.float32)
    for i in tl.static_range(COUNT):
        pair = row * COUNT + i
        x = tl.load(x_ptr + pair * width + at, mask=mask, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + pair) * x
    if shared_ptr is not None:
        total += tl.load(shared_ptr + row * width + at, mask=mask, other=0.0)
    tl.store(y_ptr + row * width + at, total.to(y_ptr.dtype.element_ty), mask=mask)


def combine(
    x: torch.Tensor, routing: Routing, shared: torch.Tensor | None = None, *, float32: bool = False
) -> torch.Tensor:
    """See `Ops.combine`."""
    (rows, count), width = routing.weights.shape, x.shape[1]
    y = x.new_empty((rows, width), dtype=torch.float32 if float32 else x.dtype)
    grid = (rows, triton.cdiv(width, _WIDTH))
    options = {"COUNT": count, "BLOCK": _WIDTH, "num_warps": 4, **early_launch(x.device)}
    _combine_kernel[grid](x, routing.weights, shared, y, width, **options)
    return y
