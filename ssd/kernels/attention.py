"""Attention over paged KV in Triton: one kernel for prefill chunks, decoding and verification.

Row-invariant: KV is cut at fixed places (every `SPLIT` positions), each piece is reduced in one fixed order, and the
pieces are folded together from the first to the last. With few queries the pieces are computed by different programs
and folded by a second kernel; with many, one program does both. The arithmetic is the same, so the bits are too.
Row sums are taken by the tensor cores (a product with ones), whose order of summation does not depend on the tile.
The own tokens of a branch are one more piece, folded last. Each branch of a tile has columns of its own, a multiple of
the tensor cores' step, so its index in the tile does not change its bits either.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.ops import DeviceBatch, HeadShape

SPLIT = 128
_BLOCK_N = 64  # positions per step; part of the fixed order
_PARALLEL_SPLITS = 32  # programs that share one row's pieces
_MMA_COLUMNS = 16  # keys of one tensor-core step, at most
_FEW_ROWS = 16
_MANY_ROWS = 64


@triton.jit
def _fold(m, l, acc, m_piece, l_piece, acc_piece):
    """Merges one piece's softmax statistics into the running ones."""
    m_new = tl.maximum(m, m_piece)
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    old = tl.exp2(m - safe)
    new = tl.exp2(m_piece - safe)
    l = tl.fma(l, old, l_piece * new)
    wide_old = tl.broadcast_to(tl.expand_dims(old, -1), acc.shape)
    wide_new = tl.broadcast_to(tl.expand_dims(new, -1), acc.shape)
    return m_new, l, tl.fma(acc, wide_old, acc_piece * wide_new)


@triton.jit
def _step(q, k_ptr, v_ptr, kv, kv_mask, visible, scale, ones, m, sums, acc):
    """Adds the keys and values at offsets `kv` to the softmax sums of the query rows that see them."""
    k = tl.load(k_ptr + kv, mask=kv_mask, other=0.0)
    scores = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale
    scores = tl.where(visible, scores, float("-inf"))
    m_new = tl.maximum(m, tl.max(scores, axis=1))
    safe = tl.where(m_new == float("-inf"), 0.0, m_new)
    p = tl.exp2(scores - safe[:, None]).to(q.dtype)
    keep = tl.exp2(m - safe)
    v = tl.load(v_ptr + kv, mask=kv_mask, other=0.0)
    sums = tl.dot(p, ones, sums * keep[:, None], input_precision="tf32x3")
    acc = tl.dot(p, v, acc * keep[:, None], input_precision="tf32x3")
    return m_new, sums, acc


@triton.jit
def _piece(
    q,
    position,
    table,
    kv_ptr_offset,
    k_ptr,
    v_ptr,
    slot_stride,
    first,
    last,
    scale,
    d,
    d_mask,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Softmax sums of the query rows over positions first..last-1."""
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M, 16), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    ones = tl.full((BLOCK_N, 16), 1.0, q.dtype)
    for start in range(first, last, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        inside = n < last
        block = tl.load(table + n // BLOCK_SIZE, mask=inside, other=0).to(tl.int64)
        kv = kv_ptr_offset + (block * BLOCK_SIZE + n % BLOCK_SIZE)[:, None] * slot_stride + d[None, :]
        kv_mask = inside[:, None] & d_mask[None, :]
        visible = n[None, :] <= position[:, None]
        m, sums, acc = _step(q, k_ptr, v_ptr, kv, kv_mask, visible, scale, ones, m, sums, acc)
    return m, tl.max(sums, axis=1), acc


@triton.jit
def _branch_piece(
    q,
    branch,
    slots,
    num_branches,
    depth,
    kv_ptr_offset,
    k_ptr,
    v_ptr,
    slot_stride,
    scale,
    d,
    d_mask,
    WIDTH: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Softmax sums of the query rows over their branches' own tokens: WIDTH columns per branch."""
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    sums = tl.zeros((BLOCK_M, 16), tl.float32)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    ones = tl.full((BLOCK_N, 16), 1.0, q.dtype)
    for start in range(0, num_branches * WIDTH, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        last = tl.load(slots + n // WIDTH, mask=n // WIDTH < num_branches, other=-1).to(tl.int64)
        inside = (last >= 0) & (n % WIDTH <= depth)
        kv = kv_ptr_offset + (last - depth + n % WIDTH)[:, None] * slot_stride + d[None, :]
        kv_mask = inside[:, None] & d_mask[None, :]
        visible = inside[None, :] & (n[None, :] // WIDTH == branch[:, None])
        m, sums, acc = _step(q, k_ptr, v_ptr, kv, kv_mask, visible, scale, ones, m, sums, acc)
    return m, tl.max(sums, axis=1), acc


@triton.jit(do_not_specialize=["depth", "num_tiles", "table_stride"])
def _attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    out_ptr,
    partial_ptr,
    stats_ptr,
    tiles_ptr,
    query_start_ptr,
    context_len_ptr,
    tables_ptr,
    table_rows_ptr,
    positions_ptr,
    slots_ptr,
    num_tiles,
    table_stride,
    slot_stride,
    scale,
    max_splits,
    depth,
    H: tl.constexpr,
    GROUP: tl.constexpr,
    D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    FOLD: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """Rows of a tile: BLOCK_M // GROUP query tokens times the GROUP heads that share one KV head.

    WIDTH: columns for the own tokens of each branch; 0: the query tokens are no branches.
    """
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    sequence = tl.load(tiles_ptr + tile)
    if sequence < 0:
        return
    first_token = tl.load(tiles_ptr + num_tiles + tile)
    row0 = tl.load(query_start_ptr + sequence)
    num_queries = tl.load(query_start_ptr + sequence + 1) - row0

    r = tl.arange(0, BLOCK_M)
    token = first_token + r // GROUP
    valid = (r < (BLOCK_M // GROUP) * GROUP) & (token < num_queries)
    if WIDTH:
        valid = valid & (tl.load(slots_ptr + row0 + token, mask=valid, other=-1) >= 0)
        position = tl.load(positions_ptr + row0 + token, mask=valid, other=-1) - depth - 1  # the last shared one
        position = tl.where(valid, position, -1)
    else:
        context = tl.load(context_len_ptr + sequence)
        position = tl.where(valid, context - num_queries + token, -1)
    d = tl.arange(0, BLOCK_D)
    d_mask = d < D
    head = kv_head * GROUP + r % GROUP
    flat = ((row0 + token) * H + head).to(tl.int64)  # row of [T, H]
    q = tl.load(q_ptr + flat[:, None] * D + d[None, :], mask=valid[:, None] & d_mask[None, :], other=0.0)
    table = tables_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * table_stride
    end = tl.max(position) + 1
    num_splits = (end + SPLIT_LEN - 1) // SPLIT_LEN

    if FOLD:
        m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l = tl.zeros((BLOCK_M,), tl.float32)
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for s in range(0, num_splits):
            m_s, l_s, acc_s = _piece(
                q, position, table, kv_head * D, k_ptr, v_ptr, slot_stride, s * SPLIT_LEN,
                tl.minimum(end, (s + 1) * SPLIT_LEN), scale, d, d_mask, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            m, l, acc = _fold(m, l, acc, m_s, l_s, acc_s)
        out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + flat[:, None] * D + d[None, :], out, mask=valid[:, None] & d_mask[None, :])
    else:
        for s in range(tl.program_id(2), num_splits, tl.num_programs(2)):
            m_s, l_s, acc_s = _piece(
                q, position, table, kv_head * D, k_ptr, v_ptr, slot_stride, s * SPLIT_LEN,
                tl.minimum(end, (s + 1) * SPLIT_LEN), scale, d, d_mask, BLOCK_SIZE, BLOCK_M, BLOCK_N, BLOCK_D,
            )  # fmt: skip
            at = flat * max_splits + s
            tl.store(stats_ptr + at * 2, m_s, mask=valid)
            tl.store(stats_ptr + at * 2 + 1, l_s, mask=valid)
            tl.store(partial_ptr + at[:, None] * D + d[None, :], acc_s, mask=valid[:, None] & d_mask[None, :])
        if WIDTH:
            at = flat * max_splits + max_splits - 1
            if tl.program_id(2) == tl.num_programs(2) - 1:  # the program with the fewest pieces
                m_s, l_s, acc_s = _branch_piece(
                    q, r // GROUP, slots_ptr + row0 + first_token,
                    tl.minimum(num_queries - first_token, BLOCK_M // GROUP), depth, kv_head * D, k_ptr, v_ptr,
                    slot_stride, scale, d, d_mask, WIDTH, BLOCK_M, BLOCK_N, BLOCK_D,
                )  # fmt: skip
                tl.store(stats_ptr + at * 2, m_s, mask=valid)
                tl.store(stats_ptr + at * 2 + 1, l_s, mask=valid)
                tl.store(partial_ptr + at[:, None] * D + d[None, :], acc_s, mask=valid[:, None] & d_mask[None, :])


@triton.jit(do_not_specialize=["depth"])
def _combine_kernel(
    partial_ptr,
    stats_ptr,
    out_ptr,
    positions_ptr,
    slots_ptr,
    max_splits,
    depth,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLIT_LEN: tl.constexpr,
    UNROLL: tl.constexpr,
    BRANCHES: tl.constexpr,
):
    """Folds the pieces of one row and head, first to last."""
    row = tl.program_id(0)
    if tl.load(slots_ptr + row) < 0:
        return
    flat = (row * H + tl.program_id(1)).to(tl.int64)
    position = tl.load(positions_ptr + row)
    num_splits = (position - depth + SPLIT_LEN - 1) // SPLIT_LEN if BRANCHES else position // SPLIT_LEN + 1
    d = tl.arange(0, BLOCK_D)
    d_mask = d < D
    m = tl.full((1,), float("-inf"), tl.float32)
    l = tl.zeros((1,), tl.float32)
    acc = tl.zeros((1, BLOCK_D), tl.float32)
    one = tl.arange(0, 1)
    for start in range(0, num_splits, UNROLL):
        for i in tl.static_range(UNROLL):  # unrolled, so that the loads do not wait for each other
            at = flat * max_splits + start + i
            real = start + i < num_splits
            m_s = tl.load(stats_ptr + at * 2 + one, mask=real, other=float("-inf"))
            l_s = tl.load(stats_ptr + at * 2 + 1 + one, mask=real, other=0.0)
            acc_s = tl.load(partial_ptr + at * D + one[:, None] + d[None, :], mask=real & d_mask[None, :], other=0.0)
            m, l, acc = _fold(m, l, acc, m_s, l_s, acc_s)
    if BRANCHES:
        at = flat * max_splits + max_splits - 1
        m_s = tl.load(stats_ptr + at * 2 + one)
        l_s = tl.load(stats_ptr + at * 2 + 1 + one)
        acc_s = tl.load(partial_ptr + at * D + one[:, None] + d[None, :], mask=d_mask[None, :], other=0.0)
        m, l, acc = _fold(m, l, acc, m_s, l_s, acc_s)
    out = (acc / l[:, None]).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + flat * D + one[:, None] + d[None, :], out, mask=d_mask[None, :])


def tile_rows(group_size: int, split_kv: bool) -> int:
    """Rows of an attention tile: the tensor cores' minimum for decode-size queries, more for prefill chunks."""
    few = max(_FEW_ROWS, int(triton.next_power_of_2(group_size)))
    return few if split_kv else max(few, _MANY_ROWS)


class Workspace:
    """Scratch for the pieces of a row that different programs compute."""

    def __init__(self, max_rows: int, max_context: int, heads: HeadShape, device: torch.device) -> None:
        self.max_splits = -(-max_context // SPLIT) + 1  # the last one: a branch's own tokens
        rows = max_rows * heads.num_heads * self.max_splits
        self.partial = torch.empty(rows * heads.head_dim, dtype=torch.float32, device=device)
        self.stats = torch.empty(rows * 2, dtype=torch.float32, device=device)


def paged_attention(
    q: torch.Tensor,
    batch: DeviceBatch,
    heads: HeadShape,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    workspace: Workspace,
) -> torch.Tensor:
    """See `Ops.attention`."""
    rows = tile_rows(heads.group_size, batch.split_kv)
    fold = not batch.split_kv
    num_tiles = batch.tiles.shape[1]
    out = q.new_empty((q.shape[0], heads.num_heads * heads.head_dim))
    block_d = triton.next_power_of_2(heads.head_dim)
    depth, width = 0, 0
    if batch.branches is not None:
        depth, width = batch.branches.depth, max(_MMA_COLUMNS, triton.next_power_of_2(batch.branches.slots_per_branch))
    grid = (num_tiles, heads.num_kv_heads, 1 if fold else min(workspace.max_splits, _PARALLEL_SPLITS))
    _attention_kernel[grid](
        q,
        k_cache,
        v_cache,
        out,
        workspace.partial,
        workspace.stats,
        batch.tiles,
        batch.query_start,
        batch.context_len,
        batch.block_tables,
        batch.table_rows,
        batch.positions,
        batch.slot_mapping,
        num_tiles,
        batch.block_tables.stride(0),
        k_cache.stride(1),
        heads.scale * 1.4426950408889634,  # exp2 instead of exp
        workspace.max_splits,
        depth,
        H=heads.num_heads,
        GROUP=heads.group_size,
        D=heads.head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_M=rows,
        BLOCK_N=_BLOCK_N,
        BLOCK_D=block_d,
        SPLIT_LEN=SPLIT,
        FOLD=fold,
        WIDTH=width,
        num_warps=4,
        num_stages=2,
    )
    if not fold:
        _combine_kernel[(q.shape[0], heads.num_heads)](
            workspace.partial,
            workspace.stats,
            out,
            batch.positions,
            batch.slot_mapping,
            workspace.max_splits,
            depth,
            H=heads.num_heads,
            D=heads.head_dim,
            BLOCK_D=block_d,
            SPLIT_LEN=SPLIT,
            UNROLL=8,
            BRANCHES=width > 0,
            num_warps=1,
        )
    return out
