"""A row-invariant linear layer in Triton, for any number of rows.

Each output element is summed over the depth in one fixed order, sixteen products at a time, whatever the tile shape. So
a row's bits depend neither on the number of rows nor on the tile shape, which can be chosen by the number of rows. In
float32 (three products in TF32) a tile's depth is summed up by itself: there, tiles have the same depth. The product is
computed as W x^T: the wide side of the tensor cores is along the weight's rows, of which there are many.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from ssd.kernels.cuda.launch import early_launch, shared_memory
from ssd.kernels.triton.epilogue import gate_and_up, rounded_gate


@triton.jit
def sums(x_ptrs, w_ptrs, m_mask, n_mask, K: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr):
    """Sums over the depth of a tile [n, m]. Pointers: x's [BLOCK_K, m] and w's [n, BLOCK_K]."""
    k = tl.arange(0, BLOCK_K)
    acc = tl.zeros((w_ptrs.shape[0], x_ptrs.shape[1]), tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        if K % BLOCK_K == 0:
            x = tl.load(x_ptrs + start, mask=m_mask[None, :], other=0.0)
            w = tl.load(w_ptrs + start, mask=n_mask[:, None], other=0.0)
        else:
            x = tl.load(x_ptrs + start, mask=m_mask[None, :] & (start + k < K)[:, None], other=0.0)
            w = tl.load(w_ptrs + start, mask=n_mask[:, None] & (start + k < K)[None, :], other=0.0)
        acc = tl.dot(w, x, acc, input_precision="tf32x3")
    return acc


@triton.jit(do_not_specialize=["num_rows"])  # avoids recompilation for other prompt lengths
def _linear_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    y_ptr,
    num_rows,
    N,
    K: tl.constexpr,
    x_stride,
    y_stride,
    GATED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):
    """y[m, n] = sum_k x[m, k] w[n, k]. GATED: w's rows alternate gate, up, and y has half as many columns."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    # Neighbouring programs share weight tiles, and GROUP of them x tiles, for L2 hits.
    tiles_m = tl.cdiv(num_rows, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    band = tl.program_id(0) // (GROUP * tiles_m)
    width = min(tiles_n - band * GROUP, GROUP)
    within = tl.program_id(0) % (GROUP * tiles_m)
    m = (within // width) * BLOCK_M + tl.arange(0, BLOCK_M)
    n0 = (band * GROUP + within % width) * BLOCK_N
    n = n0 + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask = m < num_rows
    n_mask = n < N
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride + k[:, None]
    w_ptrs = w_ptr + n[:, None].to(tl.int64) * K + k[None, :]
    acc = sums(x_ptrs, w_ptrs, m_mask, n_mask, K, BLOCK_K, STAGES)
    if bias_ptr is not None:
        acc += tl.load(bias_ptr + n, mask=n_mask, other=0.0).to(tl.float32)[:, None]
    if GATED:
        gate, up = gate_and_up(acc, BLOCK_N, BLOCK_M)
        acc = rounded_gate(gate, up, x_ptr.dtype.element_ty)
        n = n0 // 2 + tl.arange(0, BLOCK_N // 2)
        n_mask = n < N // 2
    mask = m_mask[None, :] & n_mask[:, None]
    tl.store(y_ptr + m[None, :].to(tl.int64) * y_stride + n[:, None], acc.to(y_ptr.dtype.element_ty), mask=mask)


_PROCESSORS = 132  # of an H100 or H200
_EARLY_ROWS = 16  # at most, of products that are launched early


@dataclass(frozen=True)
class Tile:
    """A tile shape. Affects speed only: every shape gives the same bits."""

    rows: int
    columns: int
    depth: int
    stages: int
    warps: int


def choose_tile(num_rows: int, columns: int, depth: int) -> Tile:
    """Measured on an H200: deep tiles while the weights' bandwidth is the limit, square ones for prefill."""
    if num_rows <= 16:
        if columns >= 6144:  # enough tiles of 64 columns for all multiprocessors
            return Tile(16, 64, 128, 4 if columns > 8192 else 5, 4)
        return Tile(16, 16, 512, 4, 2)
    if num_rows > 128:
        return Tile(128, 128, 64, 4, 8) if columns <= 8192 and num_rows <= 512 else Tile(256, 128, 64, 3, 8)
    tiles = {rows: triton.cdiv(num_rows, rows) * triton.cdiv(columns, 64) for rows in (64, 32, 16)}
    fitting = [rows for rows in tiles if num_rows <= 4 * rows < 8 * num_rows and tiles[rows] <= 2 * _PROCESSORS]
    if not fitting:
        wide = Tile(64, 128, 64, 6, 8) if num_rows <= 64 else Tile(128, 128, 64, 5, 8)
        return Tile(32, 64, 128, 4, 4) if num_rows <= 32 else wide
    # Few columns: the tile shape with the most even load of the multiprocessors; weights are shared through the L2.
    rows = max(fitting, key=lambda rows: tiles[rows] / triton.cdiv(tiles[rows], _PROCESSORS))
    alone = tiles[rows] <= _PROCESSORS
    if rows == 64:
        return Tile(64, 64, 128, 4, 4) if alone else Tile(64, 128, 64, 6, 8)
    return Tile(rows, 64, 128, 5 if rows == 16 or alone else 4, 4)


@functools.cache
def fitting(tile: Tile, itemsize: int, limit: int) -> Tile:
    """The tile shape, or a smaller one on a GPU with less shared memory (`limit`, bytes) than an H200."""
    if itemsize == 4:  # the order of sums is that of this depth, and of the tensor cores' wide instructions
        tile = replace(tile, columns=max(64, tile.columns), depth=64, warps=max(4, tile.warps))
        if 4 * tile.rows * tile.columns > limit:  # float32 is rearranged before it is stored
            tile = replace(tile, rows=tile.rows // 2)
    stage = 2 * tile.depth * (tile.rows + tile.columns)  # bytes; one less than stages are in memory
    return replace(tile, stages=max(1, min(tile.stages, 1 + limit // stage)))


def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    out_dtype: torch.dtype | None = None,
    tile: Tile | None = None,
) -> torch.Tensor:
    """x [M, K] times weight [N, K] transposed. A gated weight has alternating gate and up rows."""
    num_rows, depth = x.shape
    columns = weight.shape[0]
    tile = fitting(tile or choose_tile(num_rows, columns, depth), x.element_size(), shared_memory(x.device))
    block_k = tile.depth * 2 // x.element_size()  # tile shapes are for 16-bit types
    y = x.new_empty((num_rows, columns // 2 if gated else columns), dtype=out_dtype or x.dtype)
    grid = (triton.cdiv(num_rows, tile.rows) * triton.cdiv(columns, tile.columns),)
    _linear_kernel[grid](
        x,
        weight,
        bias,
        y,
        num_rows,
        columns,
        depth,
        x.stride(0),
        y.stride(0),
        GATED=gated,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=block_k,
        GROUP=1 if num_rows <= 64 else 8,
        STAGES=tile.stages,
        num_warps=tile.warps,
        **early_launch(x.device, num_rows <= _EARLY_ROWS),
    )
    return y


@triton.jit(do_not_specialize=["num_rows"])
def _head_kernel(
    x_ptr, w_ptr, y_ptr, num_rows, N, K: tl.constexpr, x_stride, x_head, y_stride, y_head,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """y[m, h, n] = sum_k x[m, h, k] w[h, n, k], of one head h."""
    head = tl.program_id(2)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    m_mask, n_mask = m < num_rows, n < N
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x_ptrs = x_ptr + m[None, :].to(tl.int64) * x_stride + head * x_head + k[:, None]
    w_ptrs = w_ptr + (head * N + n[:, None]).to(tl.int64) * K + k[None, :]
    acc = sums(x_ptrs, w_ptrs, m_mask, n_mask, K, BLOCK_K, STAGES)
    to = y_ptr + m[None, :].to(tl.int64) * y_stride + head * y_head + n[:, None]
    tl.store(to, acc.to(y_ptr.dtype.element_ty), mask=m_mask[None, :] & n_mask[:, None])


def head_linear(x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
    """See `Weight.head_linear`. The order of sums is that of `linear`."""
    num_rows, heads, depth = x.shape
    columns = len(weight) // heads
    if y is None:
        y = x.new_empty((num_rows, heads, columns))
    # Of few rows all weights are copied at once: a head's depth is a few steps.
    shape = Tile(16, 64, 64, 8, 4) if num_rows <= 16 else Tile(64, 64, 64, 3, 4)
    tile = fitting(shape, x.element_size(), shared_memory(x.device))
    _head_kernel[(triton.cdiv(num_rows, tile.rows), triton.cdiv(columns, tile.columns), heads)](
        *(x, weight, y, num_rows, columns, depth, x.stride(0), x.stride(1), y.stride(0), y.stride(1)),
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth * 2 // x.element_size(),
        STAGES=tile.stages,
        num_warps=tile.warps,
        **early_launch(x.device, num_rows <= _EARLY_ROWS),
    )
    return y
