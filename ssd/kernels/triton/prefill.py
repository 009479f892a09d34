"""Prefill attention for Hopper GPUs: the arithmetic of `attention._prefill_kernel`, with its products overlapped.

Written in Gluon, Triton's lower level. Three groups of warps: one copies keys and values to a ring in shared memory by
TMA, two compute 64 query rows each. The product of a step's weights and values runs while the next step's keys are
multiplied and its weights are computed, and the two groups take turns on the tensor cores. Every sum has the same order
as there, and so the same bits.
"""

from __future__ import annotations

import logging

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ssd.kernels.ops import DeviceBatch, HeadShape
from ssd.kernels.triton.attention import BLOCK_N, LOG2_E, PREFILL_ROWS, SPLIT, Workspace, paged_attention
from ssd.kernels.triton.compile import compiling

log = logging.getLogger("ssd")
_STAGES = 5  # of the ring: steps of keys, and of values
_COPY_REGISTERS, _COMPUTE_REGISTERS = 24, 240  # per thread; of the warps that copy, and of those that compute
_barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # its name in Triton 3.6, and later
_WARPS = gl.constexpr(4)  # that compute a half of the rows
_HALF = gl.constexpr(PREFILL_ROWS // 2)
_LOG2_E = gl.constexpr(LOG2_E)


@gluon.jit
def _weights(scores, start, position, m, scale, MASKED: gl.constexpr, dtype: gl.constexpr):
    """Softmax weights of the step at `start`, the new maximum of the scores, and the factor of the sums so far."""
    if MASKED:
        n = start + gl.arange(0, scores.shape[1], layout=gl.SliceLayout(0, scores.type.layout))
        scores = gl.where(n[None, :] <= position[:, None], scores, float("-inf"))
    m_new = gl.maximum(m, gl.max(scores, axis=1))
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    shift = (safe * -scale)[:, None]
    ones = gl.full(scores.shape, 1.0, gl.float32, layout=scores.type.layout)
    p = gl.exp2(gl.fma(scores, ones * scale, ones * shift)).to(dtype)
    keep = gl.exp2((m - safe) * scale)
    return p, m_new, keep


@gluon.jit
def _last_product(values, full_v, empty_v, ones, step, p, sums, acc, STAGES: gl.constexpr):
    """Adds the values of `step`, the last of a piece."""
    at = step % STAGES
    mbarrier.wait(full_v.index(at), (step // STAGES) & 1)
    acc = warpgroup_mma(p, values.index(at), acc, is_async=True)
    sums = warpgroup_mma(p, ones, sums, is_async=True)
    acc, sums = warpgroup_mma_wait(0, deps=(acc, sums))
    _barrier()
    mbarrier.arrive(empty_v.index(at))
    return sums, acc


@gluon.jit
def _fold(m, l, acc, m_piece, sums, acc_piece, scale):
    """`attention.fold`."""
    rows: gl.constexpr = l.type.layout
    wide: gl.constexpr = acc.type.layout
    m_new = gl.maximum(m, m_piece)
    safe = gl.where(m_new == float("-inf"), 0.0, m_new)
    old = gl.exp2((m - safe) * scale)
    new = gl.exp2((m_piece - safe) * scale)
    l = gl.fma(l, old, gl.convert_layout(gl.max(sums, axis=1), rows) * new)
    ones = gl.full(acc.shape, 1.0, gl.float32, layout=wide)
    wide_old = ones * gl.convert_layout(old, gl.SliceLayout(1, wide))[:, None]
    wide_new = ones * gl.convert_layout(new, gl.SliceLayout(1, wide))[:, None]
    return m_new, l, gl.fma(acc, wide_old, acc_piece * wide_new)


@gluon.jit
def _steps(
    q, keys, values, ones, full_k, empty_k, full_v, empty_v, step, stop, position, m, p, sums, acc, scale,
    MASKED: gl.constexpr, STAGES: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """Steps step..stop-1 of one piece. `p`: weights of the step before, whose values are still to be added."""
    s_layout: gl.constexpr = position.type.layout.parent
    p_layout: gl.constexpr = p.type.layout
    for i in range(step, stop):
        at = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(full_k.index(at), (i // STAGES) & 1)
        zeros = gl.zeros((_HALF, BLOCK_N), gl.float32, layout=s_layout)
        scores = warpgroup_mma(q, keys.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True)
        mbarrier.wait(full_v.index(before), ((i - 1) // STAGES) & 1)
        acc = warpgroup_mma(p, values.index(before), acc, is_async=True)
        sums = warpgroup_mma(p, ones, sums, is_async=True)
        scores = warpgroup_mma_wait(2, deps=(scores,))
        _barrier()
        mbarrier.arrive(empty_k.index(at))
        p_next, m, keep = _weights(scores, i * BLOCK_N, position, m, scale, MASKED, keys.dtype)
        acc, sums, p = warpgroup_mma_wait(0, deps=(acc, sums, p))
        _barrier()
        mbarrier.arrive(empty_v.index(before))
        acc = acc * gl.convert_layout(keep, gl.SliceLayout(1, acc.type.layout))[:, None]
        sums = sums * gl.convert_layout(keep, gl.SliceLayout(1, sums.type.layout))[:, None]
        p = gl.convert_layout(p_next, p_layout)
    return m, p, sums, acc


@gluon.jit
def _first_weights(q, keys, full_k, empty_k, step, position, scale, STAGES: gl.constexpr, BLOCK_N: gl.constexpr):
    """Weights of the first step of a piece."""
    s_layout: gl.constexpr = position.type.layout.parent
    at = step % STAGES
    mbarrier.wait(full_k.index(at), (step // STAGES) & 1)
    zeros = gl.zeros((_HALF, BLOCK_N), gl.float32, layout=s_layout)
    scores = warpgroup_mma(q, keys.index(at).permute((1, 0)), zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=(scores,))
    _barrier()
    mbarrier.arrive(empty_k.index(at))
    m = gl.full((_HALF,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
    p, m, _ = _weights(scores, step * BLOCK_N, position, m, scale, True, keys.dtype)
    return p, m


@gluon.jit
def _compute(
    q_ptr, out_ptr, sinks_ptr, q_all, keys, values, ones, full_k, empty_k, full_v, empty_v,
    row0, first_token, num_queries, before, kv_head, end, scale,
    HALF: gl.constexpr, HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """One half of the tile's rows."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, D, 16])
    one_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [_WARPS, 1], [16, 16, 16])
    p_layout: gl.constexpr = gl.DotOperandLayout(0, o_layout, 2)
    load_layout: gl.constexpr = gl.BlockedLayout([1, 8], [32 // (D // 8), D // 8], [_WARPS, 1], [1, 0])
    tokens: gl.constexpr = 2 * _HALF // GROUP

    r = HALF * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, load_layout))
    token = first_token + r // GROUP
    valid = (r < tokens * GROUP) & (token < num_queries)
    d = gl.arange(0, D, layout=gl.SliceLayout(0, load_layout))
    flat = ((row0 + token) * (HKV * GROUP) + kv_head * GROUP + r % GROUP).to(gl.int64)
    q = q_all.index(HALF)
    q.store(gl.load(q_ptr + flat[:, None] * D + d[None, :], mask=valid[:, None], other=0.0))
    fence_async_shared()
    _barrier()

    r = HALF * _HALF + gl.arange(0, _HALF, layout=gl.SliceLayout(1, s_layout))
    token = first_token + r // GROUP
    position = gl.where((r < tokens * GROUP) & (token < num_queries), before + token, -1)
    unmasked = (before + first_token + 1) // BLOCK_N  # steps whose positions all rows see
    num_steps = gl.cdiv(end, BLOCK_N)
    each: gl.constexpr = SPLIT // BLOCK_N

    m_all = gl.full((_HALF,), float("-inf"), gl.float32, layout=gl.SliceLayout(1, s_layout))
    l_all = gl.zeros((_HALF,), gl.float32, layout=gl.SliceLayout(1, s_layout))
    acc_all = gl.zeros((_HALF, D), gl.float32, layout=o_layout)
    for first in range(0, num_steps, each):
        p, m = _first_weights(q, keys, full_k, empty_k, first, position, scale, STAGES, BLOCK_N)
        p = gl.convert_layout(p, p_layout)
        sums = gl.zeros((_HALF, 16), gl.float32, layout=one_layout)
        acc = gl.zeros((_HALF, D), gl.float32, layout=o_layout)
        stop = gl.minimum(first + each, num_steps)
        middle = gl.minimum(gl.maximum(unmasked, first + 1), stop)
        m, p, sums, acc = _steps(
            q, keys, values, ones, full_k, empty_k, full_v, empty_v, first + 1, middle, position, m, p, sums, acc,
            scale, False, STAGES, BLOCK_N,
        )  # fmt: skip
        m, p, sums, acc = _steps(
            q, keys, values, ones, full_k, empty_k, full_v, empty_v, middle, stop, position, m, p, sums, acc,
            scale, True, STAGES, BLOCK_N,
        )  # fmt: skip
        sums, acc = _last_product(values, full_v, empty_v, ones, stop - 1, p, sums, acc, STAGES)
        m_all, l_all, acc_all = _fold(m_all, l_all, acc_all, m, sums, acc, scale)
    if sinks_ptr is not None:
        sink = gl.load(sinks_ptr + kv_head * GROUP + r % GROUP) * _LOG2_E
        one = gl.full((_HALF,), 1.0, gl.float32, layout=gl.SliceLayout(1, s_layout))
        l_all += gl.exp2(gl.fma(m_all, one * -scale, sink))
    out = acc_all / gl.convert_layout(l_all, gl.SliceLayout(1, o_layout))[:, None]
    out = gl.convert_layout(out.to(out_ptr.dtype.element_ty), load_layout)
    gl.store(out_ptr + flat[:, None] * D + d[None, :], out, mask=valid[:, None])


@gluon.jit
def _copy(
    k, v, table, keys, values, full_k, empty_k, full_v, empty_v, kv_head, end,
    D: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Copies all steps' keys and values to the ring."""
    num_steps = gl.cdiv(end, BLOCK_N)
    block = gl.load(table)
    for i in range(num_steps):
        slot = block * BLOCK_SIZE + i * BLOCK_N % BLOCK_SIZE
        block = gl.load(table + gl.minimum(i + 1, num_steps - 1) * BLOCK_N // BLOCK_SIZE)  # of the next step
        at, phase = i % STAGES, (i // STAGES) & 1
        mbarrier.wait(empty_k.index(at), phase ^ 1)
        mbarrier.expect(full_k.index(at), k.block_type.nbytes)
        tma.async_copy_global_to_shared(k, [slot, kv_head * D], full_k.index(at), keys.index(at))
        mbarrier.wait(empty_v.index(at), phase ^ 1)
        mbarrier.expect(full_v.index(at), v.block_type.nbytes)
        tma.async_copy_global_to_shared(v, [slot, kv_head * D], full_v.index(at), values.index(at))


@gluon.jit(do_not_specialize=["num_tiles", "table_stride"])
def _prefill_kernel(
    q_ptr, k, v, out_ptr, tiles_ptr, query_start_ptr, context_len_ptr, tables_ptr, table_rows_ptr, sinks_ptr,
    num_tiles, table_stride, scale,
    HKV: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
    SPLIT: gl.constexpr, STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr, COMPUTE_REGISTERS: gl.constexpr,
):  # fmt: skip
    """One tile of PREFILL_ROWS // GROUP query tokens, one KV head."""
    kv_head = gl.program_id(0)
    tile = num_tiles - 1 - gl.program_id(1)  # the last tiles of a prompt take longest: they begin first
    sequence = gl.load(tiles_ptr + tile)
    if sequence < 0:
        return
    first_token = gl.load(tiles_ptr + num_tiles + tile)
    row0 = gl.load(query_start_ptr + sequence)
    num_queries = gl.load(query_start_ptr + sequence + 1) - row0
    before = gl.load(context_len_ptr + sequence) - num_queries
    table = tables_ptr + gl.load(table_rows_ptr + sequence).to(gl.int64) * table_stride
    end = before + gl.minimum(first_token + 2 * _HALF // GROUP, num_queries)

    dtype: gl.constexpr = q_ptr.dtype.element_ty
    keys = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], k.layout)
    values = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, D], v.layout)
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([_HALF, D], dtype)
    q = gl.allocate_shared_memory(dtype, [2, _HALF, D], q_layout)
    ones_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, 16], dtype)
    fill_layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [_WARPS, 1], [1, 0])
    one = gl.full((BLOCK_N, 16), 1.0, dtype, layout=fill_layout)
    ones = gl.allocate_shared_memory(dtype, [BLOCK_N, 16], ones_layout, one)
    full_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_k = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty_v = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full_k.index(i), count=1)
        mbarrier.init(full_v.index(i), count=1)
        mbarrier.init(empty_k.index(i), count=2)
        mbarrier.init(empty_v.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_compute, (
                q_ptr, out_ptr, sinks_ptr, q, keys, values, ones, full_k, empty_k, full_v, empty_v,
                row0, first_token, num_queries, before, kv_head, end, scale,
                0, HKV, GROUP, D, BLOCK_N, SPLIT, STAGES,
            )),
            (_compute, (
                q_ptr, out_ptr, sinks_ptr, q, keys, values, ones, full_k, empty_k, full_v, empty_v,
                row0, first_token, num_queries, before, kv_head, end, scale,
                1, HKV, GROUP, D, BLOCK_N, SPLIT, STAGES,
            )),
            (_copy, (
                k, v, table, keys, values, full_k, empty_k, full_v, empty_v, kv_head, end,
                D, BLOCK_SIZE, BLOCK_N, STAGES,
            )),
        ],
        [_WARPS, 1],
        [COMPUTE_REGISTERS, COPY_REGISTERS],
    )  # fmt: skip


def prefill_attention(
    q: torch.Tensor,
    out: torch.Tensor,
    batch: DeviceBatch,
    heads: HeadShape,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scale: float,
    sinks: torch.Tensor | None = None,
) -> None:
    """Attention of the batch's prefill tiles. `scale`: of scores that are powers of 2."""
    tiles = batch.prefill_tiles
    assert tiles is not None
    _prefill_kernel[(heads.num_kv_heads, tiles.shape[1])](
        *(q, _descriptor(k_cache), _descriptor(v_cache), out),
        *(tiles, batch.query_start, batch.context_len, batch.block_tables, batch.table_rows, sinks),
        *(tiles.shape[1], batch.block_tables.stride(0), scale),
        HKV=heads.num_kv_heads,
        GROUP=heads.group_size,
        D=heads.head_dim,
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_N=BLOCK_N,
        SPLIT=SPLIT,
        STAGES=_STAGES,
        COPY_REGISTERS=_COPY_REGISTERS,
        COMPUTE_REGISTERS=_COMPUTE_REGISTERS,
        num_warps=_WARPS.value,
    )


def _descriptor(cache: torch.Tensor) -> TensorDescriptor:
    """Steps of one head as TMA copies them."""
    slots, heads, dim = cache.shape[0] * cache.shape[1], cache.shape[2], cache.shape[3]
    layout = gl.NVMMASharedLayout.get_default_for([BLOCK_N, dim], getattr(gl, str(cache.dtype).removeprefix("torch.")))
    return TensorDescriptor(cache, [slots, heads * dim], [heads * dim, 1], [BLOCK_N, dim], layout)


class OverlappedPrefill:
    """`prefill_attention` where it has the bits of the other kernel, which is checked at the first call."""

    def __init__(self, workspace: Workspace) -> None:
        self._workspace = workspace
        self._agrees: dict[tuple[HeadShape, torch.dtype, int, bool], bool] = {}  # KV's type and block size, sinks

    def __call__(
        self,
        q: torch.Tensor,
        out: torch.Tensor,
        batch: DeviceBatch,
        heads: HeadShape,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> bool:
        """False if it cannot be used."""
        if self._workspace.prefill_tokens != PREFILL_ROWS // heads.group_size:  # tiles for other heads
            return False
        key = heads, k_cache.dtype, k_cache.shape[1], sinks is not None
        if key not in self._agrees:
            if torch.cuda.is_current_stream_capturing():
                return False
            found = self._check(heads, k_cache, sinks)
            if compiling():
                return False
            self._agrees[key] = found
        if self._agrees[key]:
            prefill_attention(q, out, batch, heads, k_cache, v_cache, heads.scale * LOG2_E, sinks)
        return self._agrees[key]

    def _check(self, heads: HeadShape, cache: torch.Tensor, sinks: torch.Tensor | None) -> bool:
        try:
            found = _has_the_bits_of_the_other(self._workspace, heads, cache, sinks)
        except Exception as error:  # of Triton's compiler
            log.info("prompts are read by a slower attention kernel, since the faster one cannot be built: %r", error)
            return False
        if not found and not compiling():
            log.warning("prompts are read by a slower attention kernel: the faster one has other bits on this GPU")
        return found


def _has_the_bits_of_the_other(
    workspace: Workspace, heads: HeadShape, cache: torch.Tensor, sinks: torch.Tensor | None
) -> bool:
    """Compares `prefill_attention` on random tokens after a prefix of several pieces."""
    block_size, device = cache.shape[1], cache.device
    before, count, tokens = 2 * SPLIT + 10, 200, PREFILL_ROWS // heads.group_size

    def ints(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float32, device=device).to(cache.dtype)

    generator = torch.Generator(device).manual_seed(0)
    blocks, starts = -(-(before + count) // block_size), range(0, count, tokens)
    positions = ints(*range(before, before + count))
    batch = DeviceBatch(
        token_ids=positions,
        positions=positions,
        slot_mapping=positions,
        query_start=ints(0, count),
        context_len=ints(before + count),
        block_tables=ints(*range(blocks))[None],
        table_rows=ints(0),
        tiles=ints().view(2, 0),
        prefill_tiles=torch.stack((ints(*(0 for _ in starts)), ints(*starts))),
        logit_rows=None,
    )
    q = random(count, heads.num_heads, heads.head_dim)
    k, v = (random(blocks, block_size, heads.num_kv_heads, heads.head_dim) for _ in range(2))
    expected = paged_attention(q, batch, heads, k, v, workspace, sinks=sinks)
    found = torch.zeros_like(expected)
    prefill_attention(q, found, batch, heads, k, v, heads.scale * LOG2_E, sinks)
    return torch.equal(found, expected)
