"""Attention over paged KV in Triton: decoding and verification (few queries per sequence), prefill (many).

Row-invariant: KV is cut into pieces at fixed places (every `SPLIT` positions), a piece is reduced `BLOCK_N` positions
at a time in order, and the pieces are folded together from the first to the last. The arithmetic is the same whichever
program computes a piece, so the bits are too:

- `_decode_kernel`: the pieces of a tile of queries are shared by several programs, as many as keep the GPU busy
  (`_plan_kernel` decides that on the device, once per forward pass). The program that ends last folds them.
- `_prefill_kernel`: one program computes and folds all pieces of a larger tile. On Hopper GPUs `prefill.py` does the
  same faster.

Row sums are taken by the tensor cores (a product with ones), whose order of summation does not depend on the tile. The
own tokens of a branch are one more piece, folded last. Each branch of a tile has columns of its own, a multiple of the
tensor cores' step, so its index in the tile does not change its bits either.

Latent attention (`HeadShape.value_dim`) has kernels of its own (`latent.py`) and shares the plan and the workspace.

Nodes of token trees (`TreePaths`) have keys and values of their own in the steps from the last decided tokens on. These
are at the columns where a chain has them, each row for itself: so a node has the bits of a chain. The columns of some
nodes are side by side in one product; a row's weights in those of other nodes are 0, which adds nothing. In small
batches a tile's nodes are shared out to several programs.

With a sliding window, steps and pieces that no row of the tile sees are left out. A row that does not see a step which
another row sees has the same bits: its largest product stays -inf, and its sums stay exactly 0.

Where a step of `BLOCK_N` positions lies within one KV block, it is copied by the tensor memory accelerator (TMA) as a
whole, with positions of the block that hold no token yet. Their weight is 0, so their values must be finite:
`elementwise.rope_and_store` ensures that.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ssd.kernels.cuda import fp8_attention
from ssd.kernels.cuda.launch import early_launch, processors, shared_memory_of
from ssd.kernels.ops import UNSCALED, DeviceBatch, HeadShape, KVScales
from ssd.kernels.triton.e4m3 import as_bytes, beside, widen, widening

Prefill = Callable[
    [torch.Tensor, torch.Tensor, DeviceBatch, HeadShape, torch.Tensor, torch.Tensor, torch.Tensor | None], bool
]
SPLIT = 512
LATENT_SPLIT, LATENT_GROUP = 128, 8  # pieces of latent attention, and how many are folded together first
BLOCK_N = 64  # positions per step; part of the fixed order
MMA_COLUMNS = 16  # keys of one tensor-core step, at most
_DECODE_ROWS = 16  # of a tile: the tensor cores' minimum
PREFILL_ROWS = 128
_LATENT_ROWS = 32  # of latent attention, at most: sums of so many wide values are what registers hold
_PROGRAMS = 2  # of the decode kernel per multiprocessor, for which pieces are shared out
_DECODE_WARPS, _PREFILL_WARPS = 4, 8
_TMA_BYTES = 32  # of a head at one position, at least: shared memory is laid out by 32 bytes
_WORKSPACE_PIECES = 1024  # of tiles that several programs compute
_HALVINGS = 2  # of the nodes of a tile, at most: with fewer in each program KV is loaded more often
_TOGETHER_BYTES, _PATH_STAGES = 32 << 10, 2  # of keys that nodes of a tree have in one product; loads ahead of it
_MORE = tl.constexpr(7)  # pieces that an item can have beyond a program's share
ITEM = tl.constexpr(16)  # integers of a work item, see `_plan_kernel`
_FAR = tl.constexpr(1 << 30)  # behind all positions
_PLAN_SIZES = 128, 1024, 8192  # tiles of a batch, at most: a kernel for each
LOG2_E = 1.4426950408889634  # exp2 instead of exp
_LOG2_E = tl.constexpr(LOG2_E)


@triton.jit
def fold(m, l, acc, m_piece, l_piece, acc_piece, scale, AXIS: tl.constexpr = -1):
    """Merges one piece's softmax statistics into the running ones. AXIS: of `acc`, that of the columns of values."""
    m_new = tl.maximum(m, m_piece)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    old = tl.exp2((m - safe) * scale)  # a form that the compiler cannot contract to a fused multiply-add
    new = tl.exp2((m_piece - safe) * scale)
    l = tl.fma(l, old, l_piece * new)
    wide_old = tl.broadcast_to(tl.expand_dims(old, AXIS), acc.shape)
    wide_new = tl.broadcast_to(tl.expand_dims(new, AXIS), acc.shape)
    return m_new, l, tl.fma(acc, wide_old, acc_piece * wide_new)


@triton.jit
def _step(q, k, v, masked, visible, scale, ones, m, sums, acc):
    """Adds keys and values to the softmax sums of the query rows; m: the largest product so far, not scaled."""
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3")
    if masked:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    shift = tl.broadcast_to((safe * -scale)[:, None], scores.shape)
    p = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * scale, shift)).to(q.dtype)
    keep = tl.exp2((m - safe) * scale)  # exactly 1 where m is still the largest
    sums = tl.dot(p, ones, sums * keep[:, None], input_precision="tf32x3")
    acc = tl.dot(p, v, acc * keep[:, None], input_precision="tf32x3")
    return m_new, sums, acc


@triton.jit
def _load_kv(
    k, v, table, start, end, kv_head, slot_stride, d,
    TMA: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, D: tl.constexpr, WIDEN: tl.constexpr,
    dtype: tl.constexpr,
):  # fmt: skip
    """Keys and values of one head at BLOCK_N positions from `start`; without TMA only those before `end`."""
    if TMA:
        slot = tl.load(table + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
        keys, values = k.load([slot, kv_head * D]), v.load([slot, kv_head * D])
    else:
        n = start + tl.arange(0, BLOCK_N)
        block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0).to(tl.int64)
        slots = (block * BLOCK_SIZE + n % BLOCK_SIZE)[:, None] * slot_stride
        at = kv_head * D + slots + d[None, :]
        mask = (n < end)[:, None] & (d < D)[None, :]
        keys, values = tl.load(k + at, mask=mask, other=0.0), tl.load(v + at, mask=mask, other=0.0)
    return widen(keys, dtype, WIDEN), widen(values, dtype, WIDEN)


@triton.jit
def path_slots(table, path, slots_ptr, n, decided, last, BLOCK_SIZE: tl.constexpr):
    """KV slots of the positions n up to `last` that a node of a tree sees: its path's from `decided` on."""
    seen, own = n <= last, (n <= last) & (n >= decided)
    block = tl.load(table + n // BLOCK_SIZE, mask=seen & (n < decided), other=0).to(tl.int64)
    row = tl.load(path + n - decided, mask=own, other=0)
    slot = tl.maximum(tl.load(slots_ptr + row, mask=own, other=0), 0).to(tl.int64)
    return tl.where(own, slot, block * BLOCK_SIZE + n % BLOCK_SIZE)


@triton.jit
def _load_slots(
    k, v, slots, seen, kv_head, slot_stride, d,
    D: tl.constexpr, WIDEN: tl.constexpr, dtype: tl.constexpr,
):  # fmt: skip
    """Keys and values of one head in KV slots, where they are `seen`."""
    at, mask = kv_head * D + slots[:, None] * slot_stride + d[None, :], seen[:, None] & (d < D)[None, :]
    keys, values = tl.load(k + at, mask=mask, other=0.0), tl.load(v + at, mask=mask, other=0.0)
    return widen(keys, dtype, WIDEN), widen(values, dtype, WIDEN)


@triton.jit
def _branch_piece(
    q, branch, slots, num_branches, depth, head_offset, k_ptr, v_ptr, slot_stride, scale, d, d_mask,
    WIDTH: tl.constexpr, WINDOW: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Softmax sums of the query rows over their branches' own tokens: WIDTH columns per branch."""
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M, 16), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    ones = tl.full((BLOCK_N, 16), 1.0, q.dtype)
    for start in range(0, num_branches * WIDTH, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        last = tl.load(slots + n // WIDTH, mask=n // WIDTH < num_branches, other=-1).to(tl.int64)
        inside = (last >= 0) & (n % WIDTH <= depth)
        if WINDOW:
            inside = inside & (n % WIDTH > depth - WINDOW)
        at = head_offset + (last - depth + n % WIDTH)[:, None] * slot_stride
        mask = inside[:, None] & d_mask[None, :]
        k = widen(tl.load(k_ptr + at + d[None, :], mask=mask, other=0.0), q.dtype, WIDEN)
        v = widen(tl.load(v_ptr + at + d[None, :], mask=mask, other=0.0), q.dtype, WIDEN)
        visible = inside[None, :] & (n[None, :] // WIDTH == branch[:, None])
        m, sums, acc = _step(q, k, v, True, visible, scale, ones, m, sums, acc)
    return m, tl.max(sums, axis=1), acc


@triton.jit
def _output(acc, m, l, scale, v_scale, sinks_ptr, head, WIDEN: tl.constexpr):
    """The weighted means of the values, in float32; `head`: that of each row."""
    if sinks_ptr is not None:
        sink = tl.load(sinks_ptr + head) * _LOG2_E
        l += tl.exp2(tl.fma(m, tl.full(m.shape, 1.0, tl.float32) * -scale, sink))
    out = acc / l[:, None]
    if WIDEN != "":
        out = out * v_scale
    return out


@triton.jit
def _store_piece(stats_ptr, partial_ptr, at, d, m, l, acc, valid, mask, D: tl.constexpr):
    """Writes a piece's softmax statistics to rows `at` of the workspace."""
    tl.store(stats_ptr + at * 2, m, mask=valid)
    tl.store(stats_ptr + at * 2 + 1, l, mask=valid)
    tl.store(partial_ptr + at[:, None] * D + d[None, :], acc, mask=mask)


@triton.jit
def _end_piece(
    start, stop, m, sums, acc, m_all, l_all, acc_all, scale, stats_ptr, partial_ptr, first_at, num_items, kv_head, r, d,
    valid, mask,
    HKV: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
):  # fmt: skip
    """Folds what was summed up if the step at `start` is the last one of its piece; then the next piece begins."""
    if ((start + BLOCK_N) % SPLIT_LEN == 0) | (start + BLOCK_N >= stop):
        l = tl.max(sums, axis=1)
        if num_items > 1:
            at = ((first_at + start // SPLIT_LEN) * HKV + kv_head).to(tl.int64) * BLOCK_M + r
            _store_piece(stats_ptr, partial_ptr, at, d, m, l, acc, valid, mask, D)
        m_all, l_all, acc_all = fold(m_all, l_all, acc_all, m, l, acc, scale)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_M, 16), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    return m, sums, acc, m_all, l_all, acc_all


@triton.jit(do_not_specialize=["depth", "num_tiles", "max_items"])
def _plan_kernel(
    tiles_ptr, query_start_ptr, context_len_ptr, table_rows_ptr, positions_ptr, slots_ptr, items_ptr,
    num_tiles, max_items, depth, programs, capacity,
    TOKENS: tl.constexpr, BRANCHES: tl.constexpr, TREES: tl.constexpr, WINDOW: tl.constexpr, SPLIT_LEN: tl.constexpr,
    FOLDED: tl.constexpr, HALVINGS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_I: tl.constexpr,
):  # fmt: skip
    """Shares out the pieces of all tiles: program t writes the work items of tile t, the last one the padding.

    An item: first query row of the tile (-1: padding), number of query tokens, position of the first, row of the block
    tables; first piece of the item, piece after its last; the tile's pieces, its items, and the place of its first
    piece in the workspace (-1: one program computes all of them); with a window, the tile's first piece (else, with
    FOLDED, how many tokens of the sequence are there before this pass).

    FOLDED: pieces that are folded together before others are. If it is not 1, an item has a few pieces, or some such
    groups, and its last integer is how many pieces have a place together: 1, or FOLDED. Behind all items come those
    numbers of each tile that are the same for all of its items.

    HALVINGS: the tokens of a tile of nodes, where they have one piece, are shared out to items of half as many, up to
    so many times, if there are programs for all.
    """
    t = tl.arange(0, BLOCK_T)
    sequence = tl.load(tiles_ptr + t, mask=t < num_tiles, other=-1)
    live = sequence >= 0
    first = tl.load(tiles_ptr + num_tiles + t, mask=live, other=0)
    row0 = tl.load(query_start_ptr + sequence, mask=live, other=0)
    num_queries = tl.load(query_start_ptr + sequence + 1, mask=live, other=0) - row0
    tokens = tl.minimum(num_queries - first, TOKENS)
    if BRANCHES or TREES:  # tokens are at positions of their own
        before = -1  # what is shared ends so far before a token's position
        if BRANCHES:
            before = depth
        position = tl.zeros((BLOCK_T,), tl.int32)
        end = tl.zeros((BLOCK_T,), tl.int32)
        lowest = tl.full((BLOCK_T,), _FAR, tl.int32)
        for i in tl.static_range(TOKENS):
            real = live & (i < tokens)
            if BRANCHES:
                real = real & (tl.load(slots_ptr + row0 + first + i, mask=real, other=-1) >= 0)
            end = tl.maximum(end, tl.load(positions_ptr + row0 + first + i, mask=real, other=before) - before)
            if WINDOW:
                lowest = tl.minimum(lowest, tl.load(positions_ptr + row0 + first + i, mask=real, other=_FAR))
    else:
        position = tl.load(context_len_ptr + sequence, mask=live, other=0) - num_queries + first
        end = position + tokens
        lowest = position
    pieces = tl.where(live, (end + SPLIT_LEN - 1) // SPLIT_LEN, 0)
    if WINDOW:
        passed = tl.maximum(lowest - WINDOW + 1, 0) // SPLIT_LEN
        pieces = tl.maximum(pieces - passed, 0)
    # Pieces per item: as few as make no more items than programs, since a program's second item would begin when the
    # others end. With more tiles than programs there is no such number, and each has its share.
    share = tl.maximum(1, (tl.sum(pieces) + programs - 1) // programs)
    least = (share + FOLDED - 1) // FOLDED * FOLDED
    chunk = least
    for more in tl.static_range(_MORE, -1, -1):
        size = least + more * FOLDED
        fits = tl.sum((pieces + size - 1) // size) <= programs
        chunk = tl.where(fits, size, chunk)
    unit = FOLDED
    if FOLDED > 1:
        for size in tl.static_range(FOLDED // 2, 0, -1):
            fits = (tl.sum((pieces + size - 1) // size) <= programs) & (2 * size <= tl.max(pieces))
            chunk = tl.where(fits, size, chunk)
            unit = tl.where(fits, 1, unit)
    items = tl.where(live, tl.maximum(1, (pieces + chunk - 1) // chunk), 0)
    needed = tl.where(items > 1, (pieces + unit - 1) // unit + BRANCHES, 0)
    place = tl.cumsum(needed, 0) - needed
    shared = (items > 1) & (place + needed <= capacity)
    items = tl.where(shared, items, tl.minimum(items, 1))
    place = tl.where(shared, place, -1)
    each = TOKENS
    if TREES and FOLDED == 1:
        for less in tl.static_range(1, HALVINGS + 1):
            parts = tl.sum(tl.where(live, (tokens + (TOKENS >> less) - 1) // (TOKENS >> less), 0))
            each = tl.where((parts <= programs) & (tl.max(pieces) <= 1), TOKENS >> less, each)
        items *= tl.where(live, (tokens + each - 1) // each, 1)
    start = tl.cumsum(items, 0) - items

    tile = tl.program_id(0)
    i = tl.arange(0, BLOCK_I)
    if tile < num_tiles:
        mine = t == tile
        own_pieces = tl.sum(tl.where(mine, pieces, 0))
        own_items = tl.sum(tl.where(mine, items, 0))
        own_row = tl.sum(tl.where(mine, row0 + first, 0))
        own_tokens = tl.sum(tl.where(mine, tokens, 0))
        own_place = tl.sum(tl.where(mine, place, 0))
        own_sequence = tl.sum(tl.where(mine, sequence, 0))
        at = items_ptr + (tl.sum(tl.where(mine, start, 0)) + i) * ITEM
        mask = i < own_items
        part, item = 0, i
        if TREES and FOLDED == 1:
            spread = each < TOKENS
            part, item = tl.where(spread, i, 0), tl.where(spread, 0, i)
            own_items = tl.where(spread, 1, own_items)
        step = tl.where(own_items > 1, chunk, own_pieces)
        tl.store(at, own_row + part * each, mask=mask)
        tl.store(at + 1, tl.minimum(own_tokens - part * each, each), mask=mask)
        tl.store(at + 2, tl.sum(tl.where(mine, position, 0)), mask=mask)
        tl.store(at + 3, tl.load(table_rows_ptr + own_sequence, mask=own_sequence >= 0, other=0), mask=mask)
        own_first = 0
        if WINDOW:
            own_first = tl.sum(tl.where(mine, passed, 0))
            tl.store(at + 9, own_first, mask=mask)
        tl.store(at + 4, own_first + item * step, mask=mask)
        tl.store(at + 5, own_first + tl.minimum(own_pieces, (item + 1) * step), mask=mask)
        tl.store(at + 6, own_pieces, mask=mask)
        tl.store(at + 7, own_items, mask=mask)
        tl.store(at + 8, own_place, mask=mask)
        if FOLDED > 1:
            tl.store(at + 9, tl.sum(tl.where(mine, position - first, 0)), mask=mask)
            tl.store(at + 10, unit, mask=mask)
            tile_at = items_ptr + (max_items + tile) * ITEM
            tl.store(tile_at, own_row)
            tl.store(tile_at + 1, own_tokens)
            tl.store(tile_at + 6, own_pieces)
            tl.store(tile_at + 7, own_items)
            tl.store(tile_at + 8, own_place)
            tl.store(tile_at + 10, unit)
    else:
        for begin in range(tl.sum(items), max_items, BLOCK_I):
            tl.store(items_ptr + (begin + i) * ITEM, -1, mask=begin + i < max_items)


@triton.jit
def query_rows(
    r, first_row, tokens, first_position, positions_ptr, slots_ptr, depth,
    GROUP: tl.constexpr, WIDTH: tl.constexpr, PATHS: tl.constexpr,
):  # fmt: skip
    """Of a tile's rows r: the query token of each, which are there, the last position that each sees (of branches, of
    those that are shared; -1: none), and the end of them all."""
    row = first_row + r // GROUP
    valid = r // GROUP < tokens
    if WIDTH:
        valid = valid & (tl.load(slots_ptr + row, mask=valid, other=-1) >= 0)
        position = tl.load(positions_ptr + row, mask=valid, other=-1) - depth - 1
        position = tl.where(valid, position, -1)
        end = tl.max(position) + 1
    else:
        position = tl.where(valid, first_position + r // GROUP, -1)
        end = first_position + tokens
        if PATHS:
            position = tl.load(positions_ptr + row, mask=valid, other=-1)
            end = tl.max(position) + 1
    return row, valid, position, end


@triton.jit(do_not_specialize=["depth", "table_stride"])
def _decode_kernel(
    q_ptr, k, v, k_ptr, v_ptr, out_ptr, partial_ptr, stats_ptr, count_ptr, items_ptr, tables_ptr, positions_ptr,
    slots_ptr, sinks_ptr, paths_ptr, decided_ptr, table_stride, slot_stride, scale, v_scale, depth,
    HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT_LEN: tl.constexpr,
    WIDTH: tl.constexpr, FIRST: tl.constexpr, WINDOW: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr, LETS_NEXT: tl.constexpr, PLANNED: tl.constexpr,
    PATHS: tl.constexpr, TOGETHER: tl.constexpr, PATH_STAGES: tl.constexpr,
):  # fmt: skip
    """One item, one KV head. Rows of a tile: its query tokens times the GROUP heads of the KV head.

    k, v: what `_load_kv` takes; k_ptr, v_ptr: the same KV as pointers. WIDTH: columns for the own tokens of each
    branch; 0: the query tokens are no branches. FIRST: positions before it are not seen. WINDOW: positions that a query
    sees, its own included; 0: all. WIDEN: how KV is read; where it is in fp8, `scale` has the scale of k.
    PLANNED: items are read before the wait (`Workspace.items`). PATHS: columns of `paths`; 0: there are no trees.
    TOGETHER: nodes of a tree whose columns are in one product, where they see different ones.
    """
    if EARLY:
        if LETS_NEXT:
            tl.extra.cuda.gdc_launch_dependents()
        if not PLANNED:
            tl.extra.cuda.gdc_wait()
    kv_head = tl.program_id(0)
    item = items_ptr + tl.program_id(1) * ITEM
    first_row = tl.load(item)
    tokens = tl.load(item + 1)
    first_position = tl.load(item + 2)
    table = tables_ptr + tl.load(item + 3).to(tl.int64) * table_stride
    first_piece = tl.load(item + 4)
    last_piece = tl.load(item + 5)
    num_pieces = tl.load(item + 6)
    num_items = tl.load(item + 7)
    place = tl.load(item + 8)
    if EARLY and PLANNED:
        tl.extra.cuda.gdc_wait()
    if first_row < 0:  # after the wait: a kernel does not end before those before it, even if all items are padding
        return

    r = tl.arange(0, BLOCK_M)
    row, valid, position, end = query_rows(
        r, first_row, tokens, first_position, positions_ptr, slots_ptr, depth, GROUP, WIDTH, PATHS
    )
    d = tl.arange(0, BLOCK_D)
    d_mask = d < D
    flat = (row * (HKV * GROUP) + kv_head * GROUP + r % GROUP).to(tl.int64)  # row of [T, heads]
    mask = valid[:, None] & d_mask[None, :]
    q = beside(tl.load(q_ptr + flat[:, None] * D + d[None, :], mask=mask, other=0.0), WIDEN)
    stop = tl.minimum(end, last_piece * SPLIT_LEN)
    seen_by_all = (tl.min(tl.where(valid, position, end)) + 1) // BLOCK_N * BLOCK_N  # steps up to there need no mask
    begin = first_piece * SPLIT_LEN
    tile_piece = 0
    if WINDOW:
        oldest = position + 1 - WINDOW
        if WIDTH:
            oldest += depth + 1
        in_all_windows = tl.max(tl.where(valid, oldest, 0))
        begin = tl.maximum(begin, tl.min(tl.where(valid, tl.maximum(oldest, 0), _FAR)) // BLOCK_N * BLOCK_N)
        tile_piece = tl.load(item + 9)

    ones = tl.full((BLOCK_N, 16), 1.0, q.dtype)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M, 16), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m_all = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_all = tl.zeros((BLOCK_M,), tl.float32)
    acc_all = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    stop_common = stop  # steps from there on are different for each node of a tree
    if PATHS:
        decided = tl.load(decided_ptr + first_row)
        stop_common = tl.minimum(stop, decided // BLOCK_N * BLOCK_N)
    first_at = place - tile_piece
    for start in tl.range(begin, stop_common, BLOCK_N, num_stages=STAGES):
        keys, values = _load_kv(
            k, v, table, start, stop, kv_head, slot_stride, d, TMA, BLOCK_SIZE, BLOCK_N, D, WIDEN, q.dtype
        )
        n = start + tl.arange(0, BLOCK_N)
        visible = n[None, :] <= position[:, None]
        masked = start >= seen_by_all
        if FIRST:
            visible = visible & (n >= FIRST)[None, :]
            masked = masked | (start < FIRST)
        if WINDOW:
            visible = visible & (n[None, :] >= oldest[:, None])
            masked = masked | (start < in_all_windows)
        m, sums, acc = _step(q, keys, values, masked, visible, scale, ones, m, sums, acc)
        m, sums, acc, m_all, l_all, acc_all = _end_piece(
            start, stop, m, sums, acc, m_all, l_all, acc_all, scale, stats_ptr, partial_ptr, first_at, num_items,
            kv_head, r, d, valid, mask, HKV, D, BLOCK_M, BLOCK_N, BLOCK_D, SPLIT_LEN,
        )  # fmt: skip
    if PATHS:
        column = tl.arange(0, TOGETHER * BLOCK_N)
        wide_ones = tl.full((TOGETHER * BLOCK_N, 16), 1.0, q.dtype)
        for start in tl.range(tl.maximum(begin, stop_common), stop, BLOCK_N):
            n = start + column % BLOCK_N
            for first in tl.range(0, tokens, TOGETHER, num_stages=PATH_STAGES):
                token = first + column // BLOCK_N
                path = paths_ptr + (first_row + token) * PATHS
                last = tl.load(positions_ptr + first_row + token, mask=token < tokens, other=-1)
                slots = path_slots(table, path, slots_ptr, n, decided, last, BLOCK_SIZE)
                keys, values = _load_slots(k_ptr, v_ptr, slots, n <= last, kv_head, slot_stride, d, D, WIDEN, q.dtype)
                own = (token[None, :] == (r // GROUP)[:, None]) & ((n <= last) & (n >= FIRST))[None, :]
                if WINDOW:
                    own = own & (n[None, :] >= oldest[:, None])
                m, sums, acc = _step(q, keys, values, True, own, scale, wide_ones, m, sums, acc)
            m, sums, acc, m_all, l_all, acc_all = _end_piece(
                start, stop, m, sums, acc, m_all, l_all, acc_all, scale, stats_ptr, partial_ptr, first_at, num_items,
                kv_head, r, d, valid, mask, HKV, D, BLOCK_M, BLOCK_N, BLOCK_D, SPLIT_LEN,
            )  # fmt: skip
    if WIDTH:
        if last_piece == tile_piece + num_pieces:
            m_own, l_own, acc_own = _branch_piece(
                q, r // GROUP, slots_ptr + first_row, tokens, depth, kv_head * D, k_ptr, v_ptr, slot_stride, scale, d,
                d_mask, WIDTH, WINDOW, BLOCK_M, BLOCK_N, BLOCK_D, WIDEN,
            )  # fmt: skip
            if num_items > 1:
                at = ((place + num_pieces) * HKV + kv_head).to(tl.int64) * BLOCK_M + r
                _store_piece(stats_ptr, partial_ptr, at, d, m_own, l_own, acc_own, valid, mask, D)
            m_all, l_all, acc_all = fold(m_all, l_all, acc_all, m_own, l_own, acc_own, scale)
        num_pieces += 1
    if num_items > 1:
        tl.debug_barrier()  # all of this program's stores come before the count
        counter = count_ptr + place * HKV + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") < num_items - 1:
            return
        tl.store(counter, 0)
        m_all = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_all = tl.zeros((BLOCK_M,), tl.float32)
        acc_all = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for piece in tl.range(0, num_pieces, 4):
            for i in tl.static_range(4):  # unrolled, so that the loads do not wait for each other
                at = ((place + piece + i) * HKV + kv_head).to(tl.int64) * BLOCK_M + r
                real = valid & (piece + i < num_pieces)
                m = tl.load(stats_ptr + at * 2, mask=real, other=float("-inf"), cache_modifier=".cg")
                l = tl.load(stats_ptr + at * 2 + 1, mask=real, other=0.0, cache_modifier=".cg")
                partial = partial_ptr + at[:, None] * D + d[None, :]
                acc = tl.load(partial, mask=mask & real[:, None], other=0.0, cache_modifier=".cg")
                m_all, l_all, acc_all = fold(m_all, l_all, acc_all, m, l, acc, scale)
    head = kv_head * GROUP + r % GROUP
    out = _output(acc_all, m_all, l_all, scale, v_scale, sinks_ptr, head, WIDEN).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + flat[:, None] * D + d[None, :], out, mask=mask)


@triton.jit(do_not_specialize=["num_tiles", "table_stride"])
def _prefill_kernel(
    q_ptr, k, v, out_ptr, tiles_ptr, query_start_ptr, context_len_ptr, tables_ptr, table_rows_ptr, sinks_ptr,
    num_tiles, table_stride, slot_stride, scale, v_scale,
    HKV: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, SPLIT_LEN: tl.constexpr,
    WINDOW: tl.constexpr, TMA: tl.constexpr, WIDEN: tl.constexpr, STAGES: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """One tile of TOKENS query tokens, one KV head."""
    kv_head = tl.program_id(0)
    tile = num_tiles - 1 - tl.program_id(1)  # the last tiles of a prompt take longest: they begin first
    sequence = tl.load(tiles_ptr + tile)
    if sequence < 0:
        return
    first_token = tl.load(tiles_ptr + num_tiles + tile)
    row0 = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - row0
    before = tl.load(context_len_ptr + sequence) - num_queries
    table = tables_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * table_stride
    r = tl.arange(0, BLOCK_M)
    token = first_token + r // GROUP
    valid = (r < TOKENS * GROUP) & (token < num_queries)
    position = tl.where(valid, before + token, -1)
    d = tl.arange(0, BLOCK_D)
    flat = ((row0 + token) * (HKV * GROUP) + kv_head * GROUP + r % GROUP).to(tl.int64)  # row of [T, heads]
    mask = valid[:, None] & (d < D)[None, :]
    q = beside(tl.load(q_ptr + flat[:, None] * D + d[None, :], mask=mask, other=0.0), WIDEN)
    end = before + tl.minimum(first_token + TOKENS, num_queries)
    seen_by_all = (before + first_token + 1) // BLOCK_N * BLOCK_N  # steps up to there need no mask
    begin = 0
    if WINDOW:
        begin = tl.maximum(before + first_token + 1 - WINDOW, 0) // BLOCK_N * BLOCK_N

    ones = tl.full((BLOCK_N, 16), 1.0, q.dtype)
    m_all = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_all = tl.zeros((BLOCK_M,), tl.float32)
    acc_all = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    for piece in range(begin // SPLIT_LEN * SPLIT_LEN, end, SPLIT_LEN):
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sums = tl.zeros((BLOCK_M, 16), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        first = piece
        if WINDOW:
            first = tl.maximum(piece, begin)
        for start in tl.range(first, tl.minimum(end, piece + SPLIT_LEN), BLOCK_N, num_stages=STAGES):
            keys, values = _load_kv(
                k, v, table, start, end, kv_head, slot_stride, d, TMA, BLOCK_SIZE, BLOCK_N, D, WIDEN, q.dtype
            )
            n = start + tl.arange(0, BLOCK_N)
            visible = n[None, :] <= position[:, None]
            masked = start >= seen_by_all
            if WINDOW:
                visible = visible & (n[None, :] > position[:, None] - WINDOW)
                masked = masked | (start < end - WINDOW)
            m, sums, acc = _step(q, keys, values, masked, visible, scale, ones, m, sums, acc)
        m_all, l_all, acc_all = fold(m_all, l_all, acc_all, m, tl.max(sums, axis=1), acc, scale)
    head = kv_head * GROUP + r % GROUP
    out = _output(acc_all, m_all, l_all, scale, v_scale, sinks_ptr, head, WIDEN).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + flat[:, None] * D + d[None, :], out, mask=mask)


def columns(heads: HeadShape) -> tuple[int, int]:
    """Programs of a tile, and the query heads of each: those of a KV head, or a part of them in latent attention."""
    count = heads.num_kv_heads
    while heads.latent_dim and (heads.num_heads % count or heads.num_heads // count > _LATENT_ROWS):
        count += 1
    return count, heads.num_heads // count


def tile_rows(heads: HeadShape, prefill: bool) -> int:
    """Rows of an attention tile: the tensor cores' minimum for decode-size queries, more for prefill chunks."""
    few = max(_DECODE_ROWS, int(triton.next_power_of_2(columns(heads)[1])))
    return max(few, _LATENT_ROWS if heads.latent_dim else PREFILL_ROWS) if prefill else few


def tile_tokens(heads: Seq[HeadShape], prefill: bool) -> int:
    """Query tokens of a tile: as many as are in the rows of one, with any of these heads."""
    return min(tile_rows(each, prefill) // columns(each)[1] for each in heads)


def _nodes_together(heads: HeadShape, wide: bool) -> int:
    """Nodes of a tree whose keys and values are loaded together: what fits into registers and shared memory."""
    fits = _TOGETHER_BYTES // (BLOCK_N * int(triton.next_power_of_2(heads.head_dim)) * (4 if wide else 2))
    return max(1, min(fits, int(triton.next_power_of_2(tile_tokens([heads], False)))))


class Items(NamedTuple):
    """What `_plan_kernel` writes."""

    items: torch.Tensor
    tiles: torch.Tensor  # of latent attention: what is behind the items
    before_pass: bool  # written before the batch's forward pass: early launches may read it before they wait


class Workspace:
    """Scratch for tiles whose pieces are computed by several programs, in layers with any of these heads."""

    def __init__(self, heads: Seq[HeadShape], device: torch.device, *, ahead: bool = False) -> None:
        self.ahead = ahead  # see `Ops.reserve`
        self.capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)
        self.tokens, self.prefill_tokens = (tile_tokens(heads, prefill) for prefill in (False, True))
        self._processors = processors(device)
        pieces = [_WORKSPACE_PIECES * columns(each)[0] for each in heads]
        rows = [n * tile_rows(each, False) for n, each in zip(pieces, heads, strict=True)]
        wide = max(n * each.value_dim for n, each in zip(rows, heads, strict=True))
        self.partial = torch.empty(wide, dtype=torch.float32, device=device)
        self.stats = torch.empty(max(rows) * 2, dtype=torch.float32, device=device)
        self.count = torch.zeros(max(pieces), dtype=torch.int32, device=device)  # programs that are done with a tile
        self._planned: dict[tuple[int, int, int], tuple[DeviceBatch, Items]] = {}  # by window, piece and programs

    @property
    def small(self) -> bool:
        """Whether a program has less than 128 KB of shared memory."""
        return shared_memory_of(self.capability) < 128 << 10

    def programs(self, heads: HeadShape) -> int:
        """Per KV head, or part of its query heads. One of latent attention fills a multiprocessor's memory."""
        return max(1, (1 if heads.latent_dim else _PROGRAMS) * self._processors // columns(heads)[0])

    def items(
        self, batch: DeviceBatch, heads: HeadShape, programs: int | None = None, *, before_pass: bool = False
    ) -> Items:
        """Work items of a batch's decode-size tiles (see `_plan_kernel`) for so many programs (None: as many as there
        are), computed once for all layers of a kind."""
        programs = programs or self.programs(heads)
        split, folded = (LATENT_SPLIT, LATENT_GROUP) if heads.latent_dim else (SPLIT, 1)
        key = heads.window, split, programs
        planned = self._planned.get(key)
        if planned is not None and planned[0] is batch:
            return planned[1]
        num_tiles = batch.tiles.shape[1]
        count = num_tiles + programs
        made = torch.empty(
            (count + (num_tiles if folded > 1 else 0), ITEM.value), dtype=torch.int32, device=batch.tiles.device
        )
        _plan_kernel[(num_tiles + 1,)](
            *(batch.tiles, batch.query_start, batch.context_len, batch.table_rows, batch.positions, batch.slot_mapping),
            made,
            num_tiles,
            count,
            batch.branches.depth if batch.branches is not None else 0,
            programs,
            _WORKSPACE_PIECES,
            TOKENS=self.tokens,
            BRANCHES=batch.branches is not None,
            TREES=batch.tree is not None,
            WINDOW=heads.window,
            SPLIT_LEN=split,
            FOLDED=folded,
            HALVINGS=min(_HALVINGS, self.tokens.bit_length() - 1),
            BLOCK_T=next(size for size in _PLAN_SIZES if size >= num_tiles),
            BLOCK_I=triton.next_power_of_2(programs),
            num_warps=1 if num_tiles <= _PLAN_SIZES[0] else 4,
        )
        found = Items(made[:count], made[count:], before_pass)
        self._planned[key] = batch, found
        return found


def paged_attention(
    q: torch.Tensor,
    batch: DeviceBatch,
    heads: HeadShape,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    workspace: Workspace,
    prefill: Prefill | None = None,
    scales: KVScales = UNSCALED,
    sinks: torch.Tensor | None = None,
    *,
    lets_next: bool = False,
) -> torch.Tensor:
    """See `Ops.attention`. `prefill`: a faster kernel for prefill tiles, which says whether it has computed them; it
    reads no KV in fp8. `lets_next`: a kernel that is launched early begins at once (`launch`)."""
    num_kv_heads = heads.num_kv_heads
    out = q.new_empty((q.shape[0], heads.num_heads * heads.head_dim))
    block_size, block_d = k_cache.shape[1], triton.next_power_of_2(heads.head_dim)
    widen_how, wide = widening(k_cache, q.dtype, workspace.capability), q.element_size() == 4
    k_cache, v_cache = as_bytes(k_cache), as_bytes(v_cache)
    whole = block_size % BLOCK_N == 0 and block_d == heads.head_dim and block_d * k_cache.element_size() >= _TMA_BYTES
    tma = workspace.capability >= (9, 0) and whole and not wide
    # What fits into shared memory.
    decode_stages, prefill_stages = (2, 1) if wide else (5, 7 if tma else 3)
    k, v = (descriptor(cache, BLOCK_N, heads.head_dim) if tma else cache for cache in (k_cache, v_cache))
    table_stride, slot_stride = batch.block_tables.stride(0), k_cache.stride(1)
    softmax = heads.scale * scales.k * LOG2_E, scales.v
    shape = {
        "HKV": num_kv_heads,
        "GROUP": heads.group_size,
        "D": heads.head_dim,
        "BLOCK_SIZE": block_size,
        "BLOCK_N": BLOCK_N,
        "BLOCK_D": block_d,
        "SPLIT_LEN": SPLIT,
        "WINDOW": heads.window,
        "TMA": tma,
        "WIDEN": widen_how,
    }
    plain = sinks is None and batch.branches is None and batch.tree is None
    if batch.tiles.shape[1] and widen_how and fp8_attention.takes(heads, q.dtype, k_cache, plain=plain):
        items = workspace.items(batch, heads, fp8_attention.programs(heads, q.device)).items
        scratch = workspace.partial, workspace.stats, workspace.count
        fp8_attention.attend(q, out, batch, heads, k_cache, v_cache, items, scratch, *softmax)
    elif batch.tiles.shape[1]:
        items, _, planned = workspace.items(batch, heads)
        depth, width = branch_columns(batch)
        paths, decided, slots = batch.tree or (None, None, batch.slot_mapping)
        _decode_kernel[(num_kv_heads, len(items))](
            *(q, k, v, k_cache, v_cache, out, workspace.partial, workspace.stats, workspace.count, items),
            *(batch.block_tables, batch.positions, slots, sinks, paths, decided),
            *(table_stride, slot_stride, *softmax, depth),
            **shape,
            BLOCK_M=tile_rows(heads, False),
            WIDTH=width,
            FIRST=heads.first_position,
            STAGES=decode_stages,
            num_warps=_DECODE_WARPS,
            LETS_NEXT=lets_next,
            PLANNED=planned,
            PATHS=0 if paths is None else paths.shape[1],
            TOGETHER=_nodes_together(heads, wide),
            PATH_STAGES=1 if workspace.small else _PATH_STAGES,
            **early_launch(q.device),
        )
    if batch.prefill_tiles is not None:
        tiles = batch.prefill_tiles
        overlapped = prefill if tma and not heads.window and not widen_how else None
        if overlapped is not None and overlapped(q, out, batch, heads, k_cache, v_cache, sinks):
            return out
        _prefill_kernel[(num_kv_heads, tiles.shape[1])](
            *(q, k, v, out, tiles, batch.query_start, batch.context_len, batch.block_tables, batch.table_rows),
            *(sinks, tiles.shape[1], table_stride, slot_stride, *softmax),
            **shape,
            BLOCK_M=tile_rows(heads, True),
            TOKENS=workspace.prefill_tokens,
            STAGES=prefill_stages,
            num_warps=_PREFILL_WARPS,
        )
    return out


def descriptor(cache: torch.Tensor, step: int, width: int) -> TensorDescriptor:
    """Steps of so many columns of one head as TMA copies them."""
    slots, heads, dim = cache.shape[0] * cache.shape[1], cache.shape[2], cache.shape[3]
    return TensorDescriptor(cache, [slots, heads * dim], [heads * dim, 1], [step, width])


def branch_columns(batch: DeviceBatch) -> tuple[int, int]:
    """Depth of a batch's branches, and columns for the own tokens of each; 0: there are none."""
    if batch.branches is None:
        return 0, 0
    return batch.branches.depth, max(MMA_COLUMNS, triton.next_power_of_2(batch.branches.slots_per_branch))
