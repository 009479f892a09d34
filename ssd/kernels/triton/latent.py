"""Latent attention over paged KV in Triton: one KV head, whose keys begin with their values (`HeadShape.value_dim`).

The definition is that of `attention.py`, with other lengths: pieces of `LATENT_SPLIT` positions are folded together in
groups of `LATENT_GROUP`, from the first to the last, and then the groups. So one sequence of some thousand positions
is enough work for a GPU, and where a program computes whole groups, it writes few of the wide sums. Row-invariant: the
arithmetic of a row is the same in every tile, whichever programs compute its pieces.

Products are transposed: scores are [positions, rows], sums of values [columns, rows]. So keys are the wide side of the
tensor cores, of which there are many, and a tile has as few rows as registers hold sums for. Query heads are cut into
parts, which are programs of their own (`attention.columns`).

What several programs compute of a tile is folded by a kernel of its own, in which many programs share the columns.

On Hopper GPUs `cuda/latent_attention.py` does the same faster for few queries of heads of 576 dimensions.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.cuda import latent_attention as cuda
from ssd.kernels.cuda.launch import early_launch, processors
from ssd.kernels.ops import DeviceBatch, HeadShape
from ssd.kernels.triton.attention import (
    ITEM,
    LATENT_GROUP,
    LATENT_SPLIT,
    LOG2_E,
    MMA_COLUMNS,
    Workspace,
    branch_columns,
    columns,
    descriptor,
    fold,
    path_slots,
    query_rows,
    tile_rows,
)

# Positions per step, part of the fixed order. For want of shared memory half of it on small GPUs, a fourth in float32.
_STEP = 64
_MMA_ROWS = 64  # of the tensor cores' wide side
_WARPS = 8
_FOLD_COLUMNS = 16  # of a program that folds, at most


@triton.jit
def _add(m, l, acc, m_more, l_more, acc_more, scale):
    """`fold`, of statistics [..., rows] and sums [..., columns, rows]."""
    return fold(m, l, acc, m_more, l_more, acc_more, scale, -2)


@triton.jit
def _nothing(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """Softmax statistics of no position."""
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    return m, tl.zeros((BLOCK_M,), tl.float32), tl.zeros((BLOCK_D, BLOCK_M), tl.float32)


@triton.jit
def _step(q, q_rope, k, k_rope, masked, visible, scale, ones, m, sums, acc):
    """Adds keys and their values to the softmax sums of the query rows; m: the largest product so far, not scaled."""
    scores = tl.dot(k_rope, tl.trans(q_rope), input_precision="tf32x3")
    scores = tl.dot(k, tl.trans(q), scores, input_precision="tf32x3")
    if masked:
        scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=0))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    shift = tl.broadcast_to((safe * -scale)[None, :], scores.shape)
    p = tl.exp2(tl.fma(scores, tl.full(scores.shape, 1.0, tl.float32) * scale, shift)).to(k.dtype)
    keep = tl.exp2((m - safe) * scale)  # exactly 1 where m is still the largest
    sums = tl.dot(ones, p, sums * keep[None, :], input_precision="tf32x3")
    acc = tl.dot(tl.trans(k), p, acc * keep[None, :], input_precision="tf32x3")
    return m_new, sums, acc


@triton.jit
def _load(
    k, rope, table, start, end, slot_stride, d, e,
    TMA: tl.constexpr, BLOCK_SIZE: tl.constexpr, STEP: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr,
):  # fmt: skip
    """Keys at STEP positions from `start` (without TMA: before `end`), the columns that are values, and the others."""
    if TMA:
        slot = tl.load(table + start // BLOCK_SIZE) * BLOCK_SIZE + start % BLOCK_SIZE
        keys, others = k.load([slot, 0]), rope.load([slot, D])
    else:
        n = start + tl.arange(0, STEP)
        block = tl.load(table + n // BLOCK_SIZE, mask=n < end, other=0).to(tl.int64)
        keys, others = _gather(k, block * BLOCK_SIZE + n % BLOCK_SIZE, n < end, slot_stride, d, e, D, ROPE)
    return keys, others


@triton.jit
def _gather(k, slots, real, slot_stride, d, e, D: tl.constexpr, ROPE: tl.constexpr):
    """The same in these slots."""
    at = k + slots[:, None] * slot_stride
    keys = tl.load(at + d[None, :], mask=real[:, None] & (d < D)[None, :], other=0.0)
    return keys, tl.load(at + D + e[None, :], mask=real[:, None] & (e < ROPE)[None, :], other=0.0)


@triton.jit
def _store(stats_ptr, partial_ptr, at, r, d, m, l, acc, valid, D: tl.constexpr, BLOCK_M: tl.constexpr):
    """Writes softmax statistics to a place of the workspace."""
    at = at.to(tl.int64) * BLOCK_M
    tl.store(stats_ptr + (at + r) * 2, m, mask=valid)
    tl.store(stats_ptr + (at + r) * 2 + 1, l, mask=valid)
    tl.store(partial_ptr + at * D + d[:, None] * BLOCK_M + r[None, :], acc, mask=(d < D)[:, None] & valid[None, :])


@triton.jit
def _end_step(
    after, stop, m, sums, acc, m_group, l_group, acc_group, scale,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, ONES: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Folds what was summed up if the step before the position `after` ends a piece: then the next one begins."""
    if (after % SPLIT == 0) | (after >= stop):
        m_group, l_group, acc_group = _add(m_group, l_group, acc_group, m, tl.max(sums, axis=0), acc, scale)
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        sums = tl.zeros((ONES, BLOCK_M), tl.float32)
        acc = tl.zeros((BLOCK_D, BLOCK_M), tl.float32)
    return m, sums, acc, m_group, l_group, acc_group


@triton.jit(do_not_specialize=["depth", "num_tiles", "table_stride"])
def _attention_kernel(
    q_ptr, k, rope, k_ptr, out_ptr, partial_ptr, stats_ptr, items_ptr, tiles_ptr, query_start_ptr, context_len_ptr,
    tables_ptr, table_rows_ptr, positions_ptr, slots_ptr, paths_ptr, decided_ptr,
    num_tiles, table_stride, slot_stride, scale, depth,
    PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, ROPE: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, STEP: tl.constexpr, ONES: tl.constexpr,
    SPLIT: tl.constexpr, FOLDED: tl.constexpr, PREFILL: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr,
    FIRST: tl.constexpr, TMA: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr, LETS_NEXT: tl.constexpr,
    PLANNED: tl.constexpr, PATHS: tl.constexpr,
):  # fmt: skip
    """One item, or with PREFILL one tile, of one part of the heads. Rows: query tokens times the GROUP heads of a part.

    k, rope: what `_load` takes; k_ptr: the same KV as a pointer. ONES: rows of a product that sums up weights. FOLDED:
    pieces of a group. Other names are those of `attention._decode_kernel`.
    """
    if EARLY:
        if LETS_NEXT:
            tl.extra.cuda.gdc_launch_dependents()
        if not PLANNED:
            tl.extra.cuda.gdc_wait()
    part = tl.program_id(0)
    if PREFILL:
        tile = num_tiles - 1 - tl.program_id(1)  # the last tiles of a prompt take longest: they begin first
        sequence = tl.load(tiles_ptr + tile)
        if sequence < 0:
            return
        first_token = tl.load(tiles_ptr + num_tiles + tile)
        row0 = tl.load(query_start_ptr + sequence)
        num_queries = tl.load(query_start_ptr + sequence + 1) - row0
        first_row = row0 + first_token
        tokens = tl.minimum(num_queries - first_token, TOKENS)
        first_position = tl.load(context_len_ptr + sequence) - num_queries + first_token
        table_row = tl.load(table_rows_ptr + sequence)
        first_piece = 0
        last_piece = (first_position + tokens + SPLIT - 1) // SPLIT
        num_pieces = last_piece
        num_items = 1
        place = 0
        unit = FOLDED
    else:
        item = items_ptr + tl.program_id(1) * ITEM
        first_row = tl.load(item)
        tokens = tl.load(item + 1)
        first_position = tl.load(item + 2)
        table_row = tl.load(item + 3)
        first_piece = tl.load(item + 4)
        last_piece = tl.load(item + 5)
        num_pieces = tl.load(item + 6)
        num_items = tl.load(item + 7)
        place = tl.load(item + 8)
        unit = tl.load(item + 10)
    if EARLY and PLANNED:
        tl.extra.cuda.gdc_wait()
    if first_row < 0:  # after the wait: a kernel does not end before those before it, even if all items are padding
        return

    table = tables_ptr + table_row.to(tl.int64) * table_stride
    r = tl.arange(0, BLOCK_M)
    row, valid, position, end = query_rows(
        r, first_row, tokens, first_position, positions_ptr, slots_ptr, depth, GROUP, WIDTH, PATHS
    )
    d = tl.arange(0, BLOCK_D)
    e = tl.arange(0, BLOCK_R)
    flat = (row * (PARTS * GROUP) + part * GROUP + r % GROUP).to(tl.int64)  # row of [T, heads]
    q_at = q_ptr + flat[:, None] * (D + ROPE)
    q = tl.load(q_at + d[None, :], mask=valid[:, None] & (d < D)[None, :], other=0.0)
    q_rope = tl.load(q_at + D + e[None, :], mask=valid[:, None] & (e < ROPE)[None, :], other=0.0)
    stop = tl.minimum(end, last_piece * SPLIT)
    seen_by_all = (tl.min(tl.where(valid, position, end)) + 1) // STEP * STEP  # steps up to there need no mask

    ones = tl.full((ONES, STEP), 1.0, q.dtype)
    m, l, acc = _nothing(BLOCK_M, BLOCK_D)
    sums = tl.zeros((ONES, BLOCK_M), tl.float32)
    m_all, l_all, acc_all = _nothing(BLOCK_M, BLOCK_D)
    own_from = stop  # steps from there on are different for each node of a tree
    if PATHS:
        decided = tl.load(decided_ptr + first_row)
        own_from = tl.minimum(stop, decided // STEP * STEP)
    for begin in range(first_piece * SPLIT, stop, unit * SPLIT):
        ends = tl.minimum(stop, begin + unit * SPLIT)
        m_group, l_group, acc_group = _nothing(BLOCK_M, BLOCK_D)
        for start in tl.range(begin, tl.minimum(ends, own_from), STEP, num_stages=STAGES):
            keys, others = _load(k, rope, table, start, ends, slot_stride, d, e, TMA, BLOCK_SIZE, STEP, D, ROPE)
            n = start + tl.arange(0, STEP)
            visible = n[:, None] <= position[None, :]
            masked = start >= seen_by_all
            if FIRST:
                visible = visible & (n >= FIRST)[:, None]
                masked = masked | (start < FIRST)
            m, sums, acc = _step(q, q_rope, keys, others, masked, visible, scale, ones, m, sums, acc)
            m, sums, acc, m_group, l_group, acc_group = _end_step(
                start + STEP, ends, m, sums, acc, m_group, l_group, acc_group, scale, BLOCK_M, BLOCK_D, ONES, SPLIT
            )
        if PATHS:
            for start in tl.range(tl.maximum(begin, own_from), ends, STEP):
                n = start + tl.arange(0, STEP)
                for i in range(tokens):
                    last = tl.load(positions_ptr + first_row + i)
                    if start <= last:
                        path = paths_ptr + (first_row + i) * PATHS
                        slot = path_slots(table, path, slots_ptr, n, decided, last, BLOCK_SIZE)
                        keys, others = _gather(k_ptr, slot, n <= last, slot_stride, d, e, D, ROPE)
                        seen = (n <= last) & (n >= FIRST)
                        visible = seen[:, None] & (r // GROUP == i)[None, :]
                        m, sums, acc = _step(q, q_rope, keys, others, True, visible, scale, ones, m, sums, acc)
                m, sums, acc, m_group, l_group, acc_group = _end_step(
                    start + STEP, ends, m, sums, acc, m_group, l_group, acc_group, scale, BLOCK_M, BLOCK_D, ONES, SPLIT
                )
        if num_items > 1:
            at = (place + begin // (unit * SPLIT)) * PARTS + part
            _store(stats_ptr, partial_ptr, at, r, d, m_group, l_group, acc_group, valid, D, BLOCK_M)
        else:
            m_all, l_all, acc_all = _add(m_all, l_all, acc_all, m_group, l_group, acc_group, scale)
    if WIDTH:
        units = (num_pieces + unit - 1) // unit
        if last_piece == num_pieces:
            for start in range(0, tokens * WIDTH, STEP):
                n = start + tl.arange(0, STEP)
                last = tl.load(slots_ptr + first_row + n // WIDTH, mask=n // WIDTH < tokens, other=-1).to(tl.int64)
                inside = (last >= 0) & (n % WIDTH <= depth)
                keys, others = _gather(k_ptr, last - depth + n % WIDTH, inside, slot_stride, d, e, D, ROPE)
                visible = inside[:, None] & ((n // WIDTH)[:, None] == (r // GROUP)[None, :])
                m, sums, acc = _step(q, q_rope, keys, others, True, visible, scale, ones, m, sums, acc)
            l = tl.max(sums, axis=0)
            if num_items > 1:
                at = (place + units) * PARTS + part
                _store(stats_ptr, partial_ptr, at, r, d, m, l, acc, valid, D, BLOCK_M)
            else:
                m_all, l_all, acc_all = _add(m_all, l_all, acc_all, m, l, acc, scale)
    if num_items == 1:
        out = (acc_all / l_all[None, :]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + flat[None, :] * D + d[:, None], out, mask=(d < D)[:, None] & valid[None, :])


@triton.jit
def _load_units(stats_ptr, partial_ptr, unit, end, place, part, r, d, valid, PARTS: tl.constexpr, D: tl.constexpr):
    """Softmax statistics of units [G] of the workspace, and nothing of those from `end` on."""
    rows: tl.constexpr = r.shape[0]
    at = ((place + unit) * PARTS + part).to(tl.int64) * rows
    real = (unit < end)[:, None] & valid[None, :]
    stats = stats_ptr + (at[:, None] + r[None, :]) * 2
    m, l = tl.load(stats, mask=real, other=float("-inf")), tl.load(stats + 1, mask=real, other=0.0)
    places = (at * D)[:, None, None] + d[None, :, None] * rows + r[None, None, :]
    return m, l, tl.load(partial_ptr + places, mask=real[:, None, :] & (d < D)[None, :, None], other=0.0)


@triton.jit
def _fold_eight(
    m, l, acc, scale, stats_ptr, partial_ptr, unit, end, place, part, r, d, valid, PARTS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Folds eight units (LATENT_GROUP) from each of `unit` [G] on, which are loaded before any of them is folded."""
    m0, l0, acc0 = _load_units(stats_ptr, partial_ptr, unit, end, place, part, r, d, valid, PARTS, D)
    m1, l1, acc1 = _load_units(stats_ptr, partial_ptr, unit + 1, end, place, part, r, d, valid, PARTS, D)
    m2, l2, acc2 = _load_units(stats_ptr, partial_ptr, unit + 2, end, place, part, r, d, valid, PARTS, D)
    m3, l3, acc3 = _load_units(stats_ptr, partial_ptr, unit + 3, end, place, part, r, d, valid, PARTS, D)
    m4, l4, acc4 = _load_units(stats_ptr, partial_ptr, unit + 4, end, place, part, r, d, valid, PARTS, D)
    m5, l5, acc5 = _load_units(stats_ptr, partial_ptr, unit + 5, end, place, part, r, d, valid, PARTS, D)
    m6, l6, acc6 = _load_units(stats_ptr, partial_ptr, unit + 6, end, place, part, r, d, valid, PARTS, D)
    m7, l7, acc7 = _load_units(stats_ptr, partial_ptr, unit + 7, end, place, part, r, d, valid, PARTS, D)
    m, l, acc = _add(m, l, acc, m0, l0, acc0, scale)
    m, l, acc = _add(m, l, acc, m1, l1, acc1, scale)
    m, l, acc = _add(m, l, acc, m2, l2, acc2, scale)
    m, l, acc = _add(m, l, acc, m3, l3, acc3, scale)
    m, l, acc = _add(m, l, acc, m4, l4, acc4, scale)
    m, l, acc = _add(m, l, acc, m5, l5, acc5, scale)
    m, l, acc = _add(m, l, acc, m6, l6, acc6, scale)
    return _add(m, l, acc, m7, l7, acc7, scale)


@triton.jit
def _fold_kernel(
    out_ptr, partial_ptr, stats_ptr, tiles_ptr, slots_ptr, scale,
    PARTS: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, COLUMNS: tl.constexpr,
    TOGETHER: tl.constexpr, BRANCHES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of what several programs have computed of a tile. TOGETHER: groups of pieces folded at a time."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(0)
    tile = tiles_ptr + tl.program_id(2) * ITEM
    if tl.load(tile + 7) < 2:
        return
    first_row = tl.load(tile)
    tokens = tl.load(tile + 1)
    num_pieces = tl.load(tile + 6)
    place = tl.load(tile + 8)
    unit = tl.load(tile + 10)
    units = (num_pieces + unit - 1) // unit
    r = tl.arange(0, BLOCK_M)
    d = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = first_row + r // GROUP
    valid = r // GROUP < tokens
    if BRANCHES:
        valid = valid & (tl.load(slots_ptr + row, mask=valid, other=-1) >= 0)
    one = tl.zeros((1,), tl.int32)
    m = tl.full((1, BLOCK_M), float("-inf"), tl.float32)
    l = tl.zeros((1, BLOCK_M), tl.float32)
    acc = tl.zeros((1, COLUMNS, BLOCK_M), tl.float32)
    if (unit == 1) & (num_pieces > 8):  # several groups of pieces: side by side, then one after the other
        g = tl.arange(0, TOGETHER)
        for first in range(0, num_pieces, 8 * TOGETHER):
            m_groups, l_groups, acc_groups = _fold_eight(
                tl.full((TOGETHER, BLOCK_M), float("-inf"), tl.float32), tl.zeros((TOGETHER, BLOCK_M), tl.float32),
                tl.zeros((TOGETHER, COLUMNS, BLOCK_M), tl.float32), scale, stats_ptr, partial_ptr, first + 8 * g,
                num_pieces, place, part, r, d, valid, PARTS, D,
            )  # fmt: skip
            for i in tl.static_range(TOGETHER):  # -0.0 changes nothing that it is added to
                m_group = tl.max(tl.where((g == i)[:, None], m_groups, float("-inf")), axis=0, keep_dims=True)
                l_group = tl.sum(tl.where((g == i)[:, None], l_groups, -0.0), axis=0, keep_dims=True)
                acc_group = tl.sum(tl.where((g == i)[:, None, None], acc_groups, -0.0), axis=0, keep_dims=True)
                m, l, acc = _add(m, l, acc, m_group, l_group, acc_group, scale)
    else:
        for first in range(0, units, 8):
            m, l, acc = _fold_eight(
                m, l, acc, scale, stats_ptr, partial_ptr, one + first, units, place, part, r, d, valid, PARTS, D
            )
    if BRANCHES:
        own = _load_units(stats_ptr, partial_ptr, one + units, units + 1, place, part, r, d, valid, PARTS, D)
        m, l, acc = _add(m, l, acc, own[0], own[1], own[2], scale)
    flat = (row * (PARTS * GROUP) + part * GROUP + r % GROUP).to(tl.int64)
    out = tl.reshape(acc / l[:, None, :], (COLUMNS, BLOCK_M)).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + flat[None, :] * D + d[:, None], out, mask=(d < D)[:, None] & valid[None, :])


def latent_attention(
    q: torch.Tensor,
    batch: DeviceBatch,
    heads: HeadShape,
    cache: torch.Tensor,
    workspace: Workspace,
    *,
    lets_next: bool = False,
) -> torch.Tensor:
    """See `Ops.attention`. `lets_next`: see `attention.paged_attention`."""
    (parts, group), dim, rope_dim = columns(heads), heads.value_dim, heads.head_dim - heads.value_dim
    out = q.new_empty((q.shape[0], heads.num_heads * dim))
    block_size = cache.shape[1]
    block_d, block_r = triton.next_power_of_2(dim), max(MMA_COLUMNS, triton.next_power_of_2(rope_dim))
    wide = q.element_size() == 4
    step = _STEP // 4 if wide else _STEP // 2 if workspace.small else _STEP
    tma = (
        workspace.capability >= (9, 0) and block_size % step == 0 and (block_d, block_r) == (dim, rope_dim) and not wide
    )
    k, rope = ((descriptor(cache, step, n) if tma else cache) for n in (dim, rope_dim))
    softmax = heads.scale * LOG2_E
    sizes = {"PARTS": parts, "GROUP": group, "D": dim}
    early = early_launch(q.device)

    def launch(grid: tuple[int, int], items: torch.Tensor | None, depth: int, **options: int | bool) -> None:
        """Decode-size tiles have items, others not."""
        tiles, (paths, decided, slots) = batch.prefill_tiles, batch.tree or (None, None, batch.slot_mapping)
        prefill = items is None
        _attention_kernel[grid](
            *(q, k, rope, cache, out, workspace.partial, workspace.stats, items, tiles if prefill else None),
            *(batch.query_start, batch.context_len, batch.block_tables, batch.table_rows, batch.positions),
            *(slots, None if prefill else paths, None if prefill else decided),
            *(grid[1], batch.block_tables.stride(0), cache.stride(1), softmax, depth),
            **sizes,
            BLOCK_M=tile_rows(heads, prefill),
            ROPE=rope_dim,
            BLOCK_SIZE=block_size,
            BLOCK_D=block_d,
            BLOCK_R=block_r,
            STEP=step,
            ONES=_MMA_ROWS,
            SPLIT=LATENT_SPLIT,
            FOLDED=LATENT_GROUP,
            PREFILL=prefill,
            TMA=tma,
            STAGES=1 if wide or workspace.small else 2,
            PATHS=0 if prefill or paths is None else paths.shape[1],
            num_warps=_WARPS,
            **options,
        )

    num_tiles = batch.tiles.shape[1]
    if num_tiles and (tile := cuda.tile_of(batch, heads, cache, workspace)) is not None:
        cuda.attend(q, out, batch, heads, cache, workspace, tile, lets_next=lets_next)
    elif num_tiles:
        items, tiles, planned = workspace.items(batch, heads)
        depth, width = branch_columns(batch)
        form = {"WIDTH": width, "FIRST": heads.first_position, "TOKENS": 0}
        launch((parts, len(items)), items, depth, **form, LETS_NEXT=lets_next, PLANNED=planned, **early)
        share = triton.cdiv(parts * dim * num_tiles, processors(q.device))  # columns of a program
        share = min(_FOLD_COLUMNS, triton.next_power_of_2(share))
        _fold_kernel[(parts, triton.cdiv(dim, share), num_tiles)](
            *(out, workspace.partial, workspace.stats, tiles, batch.slot_mapping, softmax),
            **sizes,
            BLOCK_M=tile_rows(heads, False),
            COLUMNS=share,
            TOGETHER=2 * _FOLD_COLUMNS // share,
            BRANCHES=batch.branches is not None,
            **early,
        )
    if batch.prefill_tiles is not None:
        form = {"WIDTH": 0, "FIRST": 0, "TOKENS": workspace.prefill_tokens}
        launch((parts, batch.prefill_tiles.shape[1]), None, 0, **form, LETS_NEXT=False, PLANNED=False, EARLY=False)
    return out
