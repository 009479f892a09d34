"""The small Triton kernels between linear layers: RMS norm, SiLU, rotary embedding with the KV write, sums of ranks."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.codes import LEAST_SCALE
from ssd.kernels.cuda.launch import early_launch
from ssd.kernels.ops import UNSCALED, DeviceBatch, ExpertOutputs, HeadShape, KVScales, Rope
from ssd.kernels.triton.e4m3 import as_bytes, encode, encode_by_cvt
from ssd.kernels.triton.epilogue import rounded_gate
from ssd.kernels.weights import RoundedRows, Routing


@triton.jit
def _rms_norm_kernel(
    x_ptr, pair_weights_ptr, shared_ptr, residual_ptr, w_ptr, y_ptr, scale_ptr, x_stride, width, eps,
    COUNT: tl.constexpr, PLACES: tl.constexpr, BLOCK: tl.constexpr, LEAST: tl.constexpr, SETTLED: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """scale_ptr: None, or what is normed is rounded to e4m3, as by `row_codes`. pair_weights_ptr: None, or COUNT rows
    of x (and one of shared_ptr) are added up first, as by `experts.combine`. SETTLED: of their `Routing`; then the
    residual is, too."""
    row = tl.program_id(0).to(tl.int64)
    # 8 numbers of a thread are contiguous, as 16 bytes of bfloat16 are. With stores of bytes the compiler would take
    # 16, and where a thread has more than 8, the sum below would have another order than without rounding.
    k = tl.max_contiguous(tl.arange(0, BLOCK), 8)
    mask = k < width
    w = tl.load(w_ptr + k, mask=mask, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        if not SETTLED:
            tl.extra.cuda.gdc_wait()
    if residual_ptr is not None:
        at = residual_ptr + row * width + k
        before = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    if pair_weights_ptr is not None:
        place = tl.arange(0, PLACES)
        pair_weights = tl.load(pair_weights_ptr + row * COUNT + place, mask=place < COUNT, other=0.0)
    if EARLY and SETTLED:
        tl.extra.cuda.gdc_wait()
    if pair_weights_ptr is None:
        x = tl.load(x_ptr + row * x_stride + k, mask=mask, other=0.0).to(tl.float32)
    else:
        x = tl.zeros((BLOCK,), tl.float32)
        for i in tl.static_range(COUNT):
            one = tl.load(x_ptr + (row * COUNT + i) * x_stride + k, mask=mask, other=0.0).to(tl.float32)
            x += tl.sum(tl.where(place == i, pair_weights, 0.0)) * one
        if shared_ptr is not None:
            x += tl.load(shared_ptr + row * width + k, mask=mask, other=0.0)
        x = x.to(x_ptr.dtype.element_ty).to(tl.float32)
    if residual_ptr is not None:
        total = (before + x).to(residual_ptr.dtype.element_ty)
        tl.store(at, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    y = ((x * scale).to(w_ptr.dtype.element_ty) * w).to(x_ptr.dtype.element_ty)
    if scale_ptr is None:
        tl.store(y_ptr + row * width + k, y, mask=mask)
    else:
        wide = y.to(tl.float32)
        row_scale = tl.maximum(tl.div_rn(tl.max(tl.abs(wide), 0), 448.0), LEAST)
        tl.store(scale_ptr + row, row_scale)
        tl.store(y_ptr + row * width + k, encode_by_cvt(wide, row_scale), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """See `Ops.rms_norm`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch_rms_norm(x, residual, weight, y, None, eps)
    return y


def combine_and_norm(x: ExpertOutputs, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """See `Ops.combine_and_norm`."""
    y = x.pairs.new_empty((len(x.routing.weights), x.pairs.shape[1]))
    _launch_rms_norm(x.pairs, residual, weight, y, None, eps, x.routing, x.shared)
    return y


def rms_norm_and_round(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> RoundedRows:
    """`rms_norm`, then e4m3 numbers with one scale a row (`row_codes`)."""
    y = torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    scales = torch.empty((len(x), 1), dtype=torch.float32, device=x.device)
    _launch_rms_norm(x, residual, weight, y, scales, eps)
    return RoundedRows(y.view(torch.float8_e4m3fn), scales)


def _launch_rms_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    y: torch.Tensor,
    scales: torch.Tensor | None,
    eps: float,
    routing: Routing | None = None,
    shared: torch.Tensor | None = None,
) -> None:
    block, pair_weights = triton.next_power_of_2(x.shape[1]), None if routing is None else routing.weights
    count = 1 if pair_weights is None else pair_weights.shape[1]
    _rms_norm_kernel[(len(y),)](
        *(x, pair_weights, shared, residual, weight, y, scales, x.stride(0), x.shape[1], eps),
        COUNT=count,
        PLACES=triton.next_power_of_2(count),
        BLOCK=block,
        LEAST=LEAST_SCALE,
        SETTLED=routing is not None and routing.settled,
        num_warps=min(16, max(1, block // 256)),
        **early_launch(x.device),
    )


@triton.jit
def _silu_kernel(pairs_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    at = 2 * start + tl.arange(0, 2 * BLOCK)
    pairs = tl.load(pairs_ptr + row * 2 * width + at, mask=at < 2 * width, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
    dtype = y_ptr.dtype.element_ty
    n = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * width + n, rounded_gate(gate, up, dtype).to(dtype), mask=n < width)


def silu_and_mul(pairs: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of alternating gate and up columns [M, 2 I]: [M, I]; the bits of a gated `linear`."""
    rows, width = pairs.shape[0], pairs.shape[1] // 2
    y = pairs.new_empty((rows, width))
    _silu_kernel[(rows, triton.cdiv(width, 1024))](pairs, y, width, BLOCK=1024, num_warps=4)
    return y


@triton.jit
def _add_parts_kernel(parts_ptr, y_ptr, length, SIZE: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = at < length
    total = tl.load(parts_ptr + at, mask=mask, other=0.0)
    for rank in tl.static_range(1, SIZE):
        total += tl.load(parts_ptr + rank * length + at, mask=mask, other=0.0)
    tl.store(y_ptr + at, total.to(y_ptr.dtype.element_ty), mask=mask)


def add_parts(parts: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """The sum of `size` float32 vectors that are one after the other, added in order and rounded once."""
    length = parts.numel() // size
    y = parts.new_empty(length, dtype=dtype)
    _add_parts_kernel[(triton.cdiv(length, 1024),)](parts, y, length, SIZE=size, BLOCK=1024, num_warps=4)
    return y


_HEADS = 8  # heads of one program


@triton.jit
def _rotated(
    base, at, mask, w_ptr, half, cos, sin, eps,
    D: tl.constexpr, HALF: tl.constexpr, dtype: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Both halves of some heads [heads, HALF], normed when there is a norm, then rotated. `half`: [heads, HALF]. EARLY:
    waits for the kernel that computes them."""
    if w_ptr is not None:
        w_low = tl.load(w_ptr + half, mask=mask, other=0.0)
        w_high = tl.load(w_ptr + HALF + half, mask=mask, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    low = tl.load(base + at, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(base + at + HALF, mask=mask, other=0.0).to(tl.float32)
    if w_ptr is not None:
        square = tl.sum(low * low, axis=1) + tl.sum(high * high, axis=1)
        scale = tl.rsqrt(square / D + eps)[:, None]
        low = ((low * scale).to(dtype) * w_low).to(tl.float32)
        high = ((high * scale).to(dtype) * w_high).to(tl.float32)
    # Which product is rounded is said here: the compiler would choose by the order of the loads.
    return tl.fma(low, cos, -(high * sin)).to(dtype), tl.fma(low, sin, high * cos).to(dtype)


@triton.jit
def _finite(x):
    """Infinities and NaN as 0: attention multiplies values of positions that it does not see by 0."""
    return tl.where(tl.abs(x.to(tl.float32)) < float("inf"), x, 0.0)


@triton.jit
def _store(ptr, x, scale, mask, FP8: tl.constexpr):
    if FP8 == "cvt":
        tl.store(ptr, encode_by_cvt(x.to(tl.float32), scale), mask=mask)
    elif FP8 == "bits":
        tl.store(ptr, encode(x.to(tl.float32), scale), mask=mask)
    else:
        tl.store(ptr, x, mask=mask)


@triton.jit
def _rope_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    k_ptr,
    v_ptr,
    qkv_stride,
    slot_stride,
    eps,
    k_scale,
    v_scale,
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    FP8: tl.constexpr,
    EARLY: tl.constexpr,
):
    """Some heads of one token: query heads, or (past those) key heads together with their value heads. Positions,
    slots and tables are read before the wait (in `_rotated`)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    QUERY_PARTS: tl.constexpr = (H + HEADS - 1) // HEADS
    index = tl.arange(0, HEADS)[:, None]
    # Every head has its own copies of what all heads share: they come from the cache, without an exchange of registers.
    half = tl.arange(0, BLOCK)[None, :] + tl.zeros_like(index)
    inside = half < HALF
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + half, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + half, mask=inside, other=0.0)
    row = qkv_ptr + token * qkv_stride
    if part < QUERY_PARTS:
        head = part * HEADS + index
        mask = (head < H) & inside
        at = head * D + half
        low, high = _rotated(row, at, mask, q_norm_ptr, half, cos, sin, eps, D, HALF, dtype, EARLY)
        out = q_ptr + token * H * D + at
        tl.store(out, low, mask=mask)
        tl.store(out + HALF, high, mask=mask)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        head = (part - QUERY_PARTS) * HEADS + index
        mask = (head < HKV) & inside & (slot >= 0)
        at = head * D + half
        low, high = _rotated(row + H * D, at, mask, k_norm_ptr, half, cos, sin, eps, D, HALF, dtype, EARLY)
        to = slot * slot_stride + at
        _store(k_ptr + to, low, k_scale, mask, FP8)
        _store(k_ptr + to + HALF, high, k_scale, mask, FP8)
        value = row + (H + HKV) * D + at
        _store(v_ptr + to, _finite(tl.load(value, mask=mask, other=0.0)), v_scale, mask, FP8)
        _store(v_ptr + to + HALF, _finite(tl.load(value + HALF, mask=mask, other=0.0)), v_scale, mask, FP8)


def rope_and_store(
    qkv: torch.Tensor,
    batch: DeviceBatch,
    rope: Rope,
    heads: HeadShape,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    scales: KVScales = UNSCALED,
) -> torch.Tensor:
    """See `Ops.rope_and_store`."""
    q = qkv.new_empty((qkv.shape[0], heads.num_heads, heads.head_dim))
    fp8 = ""
    if k_cache.dtype is torch.float8_e4m3fn:
        fp8 = "cvt" if k_cache.is_cuda and torch.cuda.get_device_capability(k_cache.device) >= (8, 9) else "bits"
    parts = triton.cdiv(heads.num_heads, _HEADS) + triton.cdiv(heads.num_kv_heads, _HEADS)
    _rope_kernel[(qkv.shape[0], parts)](
        qkv,
        batch.positions,
        batch.slot_mapping,
        rope.cos,
        rope.sin,
        rope.q_norm,
        rope.k_norm,
        q,
        as_bytes(k_cache),
        as_bytes(v_cache),
        qkv.stride(0),
        k_cache.stride(1),
        rope.eps,
        scales.k,
        scales.v,
        H=heads.num_heads,
        HKV=heads.num_kv_heads,
        D=heads.head_dim,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(heads.head_dim // 2),
        FP8=fp8,
        num_warps=4 if fp8 else 1,  # divisions take longer than all the rest
        **early_launch(qkv.device),
    )
    return q


@triton.jit
def _latent_rope_kernel(
    q_ptr, kv_ptr, positions_ptr, slots_ptr, cos_ptr, sin_ptr, norm_ptr, out_ptr, cache_ptr,
    q_stride, q_head, kv_stride, slot_stride, eps,
    H: tl.constexpr, LATENT: tl.constexpr, HALF: tl.constexpr, HEADS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some query heads of one token, or (the last program) its key: pairs of neighbours are rotated."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    index = tl.arange(0, HEADS)[:, None]
    pair = tl.arange(0, BLOCK)[None, :] + tl.zeros_like(index)
    inside = pair < HALF
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    position = tl.load(positions_ptr + token).to(tl.int64)
    slot = tl.load(slots_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + pair, mask=inside, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + pair, mask=inside, other=0.0)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    if part < tl.num_programs(1) - 1:
        head = part * HEADS + index
        mask = inside & (head < H)
        x_ptrs = q_ptr + token * q_stride + head * q_head + 2 * pair
        to = out_ptr + (token * H + head) * (LATENT + 2 * HALF) + LATENT + 2 * pair
    else:
        mask = inside & (index == 0) & (slot >= 0)
        x_ptrs = kv_ptr + token * kv_stride + LATENT + 2 * pair
        to = cache_ptr + slot * slot_stride + LATENT + 2 * pair
        d = tl.arange(0, BLOCK_D)
        d_mask = (d < LATENT) & (slot >= 0)
        x = tl.load(kv_ptr + token * kv_stride + d, mask=d_mask, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x) / LATENT + eps)
        latent = (x * scale).to(dtype) * tl.load(norm_ptr + d, mask=d_mask, other=0.0)
        tl.store(cache_ptr + slot * slot_stride + d, _finite(latent.to(dtype)), mask=d_mask)
    even = tl.load(x_ptrs, mask=mask, other=0.0).to(tl.float32)
    odd = tl.load(x_ptrs + 1, mask=mask, other=0.0).to(tl.float32)
    tl.store(to, tl.fma(even, cos, -(odd * sin)).to(dtype), mask=mask)
    tl.store(to + 1, tl.fma(even, sin, odd * cos).to(dtype), mask=mask)


def latent_rope_and_store(
    q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, rope: Rope, heads: HeadShape, cache: torch.Tensor
) -> torch.Tensor:
    """See `Ops.latent_rope_and_store`."""
    tokens, half = len(q), (heads.head_dim - heads.latent_dim) // 2
    out = q.new_empty((tokens, heads.num_heads, heads.head_dim))
    _latent_rope_kernel[(tokens, triton.cdiv(heads.num_heads, _HEADS) + 1)](
        *(q[:, :, -2 * half :], kv, batch.positions, batch.slot_mapping, rope.cos, rope.sin, rope.k_norm, out, cache),
        *(q.stride(0), q.stride(1), kv.stride(0), cache.stride(1), rope.eps),
        H=heads.num_heads,
        LATENT=heads.latent_dim,
        HALF=half,
        HEADS=_HEADS,
        BLOCK=triton.next_power_of_2(half),
        BLOCK_D=triton.next_power_of_2(heads.latent_dim),
        num_warps=1,
        **early_launch(q.device),
    )
    return out
