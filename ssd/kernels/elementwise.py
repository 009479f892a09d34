"""The small Triton kernels between the linear layers: RMS norm, SiLU, and rotary embedding with the KV write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.ops import DeviceBatch, HeadShape, Rope


@triton.jit
def _rms_norm_kernel(x_ptr, residual_ptr, w_ptr, y_ptr, x_stride, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    mask = k < width
    x = tl.load(x_ptr + row * x_stride + k, mask=mask, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + k, mask=mask, other=0.0)
    if residual_ptr is not None:
        at = residual_ptr + row * width + k
        total = (tl.load(at, mask=mask, other=0.0).to(tl.float32) + x).to(residual_ptr.dtype.element_ty)
        tl.store(at, total, mask=mask)
        x = total.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x) / width + eps)
    normed = (x * scale).to(y_ptr.dtype.element_ty)
    tl.store(y_ptr + row * width + k, normed * w, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None) -> torch.Tensor:
    """See `Ops.rms_norm`."""
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    _rms_norm_kernel[(x.shape[0],)](
        x, residual, weight, y, x.stride(0), x.shape[1], eps, BLOCK=block, num_warps=min(8, max(1, block // 512))
    )
    return y


@triton.jit
def _silu_kernel(pairs_ptr, y_ptr, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    at = 2 * start + tl.arange(0, 2 * BLOCK)
    pairs = tl.load(pairs_ptr + row * 2 * width + at, mask=at < 2 * width, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pairs, (BLOCK, 2)))
    dtype = y_ptr.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    n = start + tl.arange(0, BLOCK)
    tl.store(y_ptr + row * width + n, (silu * up).to(dtype), mask=n < width)


def silu_and_mul(pairs: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of alternating gate and up columns [M, 2 I]: [M, I]; the bits of a gated `linear`."""
    rows, width = pairs.shape[0], pairs.shape[1] // 2
    y = pairs.new_empty((rows, width))
    _silu_kernel[(rows, triton.cdiv(width, 1024))](pairs, y, width, BLOCK=1024, num_warps=4)
    return y


@triton.jit
def _half_pair(base, w_ptr, half, D: tl.constexpr, HALF: tl.constexpr, eps, dtype: tl.constexpr):
    """Both halves of one head, normed when there is a norm: float32."""
    mask = half < HALF
    low = tl.load(base + half, mask=mask, other=0.0).to(tl.float32)
    high = tl.load(base + HALF + half, mask=mask, other=0.0).to(tl.float32)
    if w_ptr is not None:
        scale = tl.rsqrt((tl.sum(low * low) + tl.sum(high * high)) / D + eps)
        low = ((low * scale).to(dtype) * tl.load(w_ptr + half, mask=mask, other=0.0)).to(tl.float32)
        high = ((high * scale).to(dtype) * tl.load(w_ptr + HALF + half, mask=mask, other=0.0)).to(tl.float32)
    return low, high


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
    H: tl.constexpr,
    HKV: tl.constexpr,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One head of one token: a query head, or (past those) a key head together with its value head."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    HALF: tl.constexpr = D // 2
    half = tl.arange(0, BLOCK)
    mask = half < HALF
    dtype: tl.constexpr = q_ptr.dtype.element_ty
    position = tl.load(positions_ptr + token).to(tl.int64)
    cos = tl.load(cos_ptr + position * HALF + half, mask=mask, other=0.0)
    sin = tl.load(sin_ptr + position * HALF + half, mask=mask, other=0.0)
    row = qkv_ptr + token * qkv_stride
    if head < H:
        low, high = _half_pair(row + head * D, q_norm_ptr, half, D, HALF, eps, dtype)
        out = q_ptr + (token * H + head) * D + half
        tl.store(out, (low * cos - high * sin).to(dtype), mask=mask)
        tl.store(out + HALF, (high * cos + low * sin).to(dtype), mask=mask)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        if slot >= 0:
            low, high = _half_pair(row + head * D, k_norm_ptr, half, D, HALF, eps, dtype)
            at = slot * slot_stride + (head - H) * D + half
            tl.store(k_ptr + at, (low * cos - high * sin).to(dtype), mask=mask)
            tl.store(k_ptr + at + HALF, (high * cos + low * sin).to(dtype), mask=mask)
            value = row + (head + HKV) * D + half
            tl.store(v_ptr + at, tl.load(value, mask=mask, other=0.0), mask=mask)
            tl.store(v_ptr + at + HALF, tl.load(value + HALF, mask=mask, other=0.0), mask=mask)


def rope_and_store(
    qkv: torch.Tensor,
    batch: DeviceBatch,
    rope: Rope,
    heads: HeadShape,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """See `Ops.rope_and_store`."""
    q = qkv.new_empty((qkv.shape[0], heads.num_heads, heads.head_dim))
    _rope_kernel[(qkv.shape[0], heads.num_heads + heads.num_kv_heads)](
        qkv,
        batch.positions,
        batch.slot_mapping,
        rope.cos,
        rope.sin,
        rope.q_norm,
        rope.k_norm,
        q,
        k_cache,
        v_cache,
        qkv.stride(0),
        k_cache.stride(1),
        rope.eps,
        H=heads.num_heads,
        HKV=heads.num_kv_heads,
        D=heads.head_dim,
        BLOCK=triton.next_power_of_2(heads.head_dim // 2),
        num_warps=1,
    )
    return q
