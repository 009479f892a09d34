"""Kernels over the features of a forward pass (`ssd.execution.features`). `*_ptr` are int32 unless stated otherwise."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.state import LastRows, TreeRows

_COLUMNS = 1024  # of one program


@triton.jit
def _last_row(slot, accepted_ptr, path_ptr, path_stride):
    """See `LastRows`."""
    accepted = tl.load(accepted_ptr + slot)
    return tl.where(accepted > 0, tl.load(path_ptr + slot * path_stride + tl.maximum(accepted - 1, 0)) + 1, 0)


@triton.jit(do_not_specialize=["path_stride"])
def _shift_kernel(
    fused_ptr,  # as wide as the head, like kept and hidden
    kept_ptr,
    hidden_ptr,
    row_work_ptr,
    slots_ptr,
    query_start_ptr,
    positions_ptr,
    mapping_ptr,
    start_ptr,
    out_mapping_ptr,
    before_ptr,
    accepted_ptr,
    path_ptr,
    path_stride,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    work = tl.load(row_work_ptr + row)
    real = work >= 0
    slot = tl.load(slots_ptr + work, mask=real, other=0)
    first = tl.load(query_start_ptr + work, mask=real, other=0) == row
    position = tl.load(positions_ptr + row)
    place, above = (position + KEPT - 1) % KEPT, row - 1
    if TREE:
        place, above = _last_row(slot, accepted_ptr, path_ptr, path_stride), tl.load(before_ptr + row)
    at = (slot * KEPT + place).to(tl.int64) * WIDTH
    kept = tl.load(kept_ptr + at + column, mask=inside & real & first, other=0.0)
    own = tl.load(fused_ptr + above.to(tl.int64) * WIDTH + column, mask=inside & real & (first == 0), other=0.0)
    tl.store(hidden_ptr + row.to(tl.int64) * WIDTH + column, tl.where(first, kept, own), mask=inside)
    known = real & (position > tl.load(start_ptr + slot))
    tl.store(out_mapping_ptr + row, tl.where(known, tl.load(mapping_ptr + row), -1), mask=tl.program_id(1) == 0)


@triton.jit
def _keep_kernel(
    fused_ptr,
    kept_ptr,
    row_work_ptr,
    slots_ptr,
    query_start_ptr,
    positions_ptr,
    starts_ptr,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
    TREE: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    work = tl.load(row_work_ptr + row)
    real = work >= 0
    slot = tl.load(slots_ptr + work, mask=real, other=0)
    end = tl.load(query_start_ptr + work + 1, mask=real, other=0)
    place, last = tl.load(positions_ptr + row) % KEPT, row >= end - KEPT
    if TREE:
        node = tl.load(starts_ptr + work, mask=real, other=0) < 0
        place = tl.where(node, row - tl.load(query_start_ptr + work, mask=real, other=0), 0)
        last = node | (row == end - 1)
    mask = (column < WIDTH) & real & last
    at = (slot * KEPT + place).to(tl.int64) * WIDTH
    own = tl.load(fused_ptr + row.to(tl.int64) * WIDTH + column, mask=mask, other=0.0)
    tl.store(kept_ptr + at + column, own, mask=mask)


def shift_and_keep(
    fused: torch.Tensor,
    *,
    row_work: torch.Tensor,
    slots: torch.Tensor,
    query_start: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    start: torch.Tensor,
    kept: torch.Tensor,
    tree: TreeRows | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Per row the feature of the position before it (0 for padding), and where its KV is written.

    That is the row before it, or for the first row of a sequence what was kept: `kept` [slots, positions, width] holds
    that of position p at p modulo their number. KV of positions up to `start` (per slot) is written nowhere. Then the
    features of the last positions of every sequence are kept. `tree`: those of all rows of a sequence that decodes are
    kept, in the order of the rows, and of a prompt the last one, as the first.
    """
    hidden, mapping = torch.empty_like(fused), torch.empty_like(slot_mapping)
    grid = len(fused), triton.cdiv(fused.shape[1], _COLUMNS)
    rows, sizes = (row_work, slots, query_start, positions), (fused.shape[1], kept.shape[1], _COLUMNS)
    starts, before, last = tree or (None, None, None)
    of_tree, last_rows = tree is not None, _last_rows(last)
    _shift_kernel[grid](fused, kept, hidden, *rows, slot_mapping, start, mapping, before, *last_rows, *sizes, of_tree)
    _keep_kernel[grid](fused, kept, *rows, starts, *sizes, of_tree)
    return hidden, mapping


def _last_rows(last: LastRows | None) -> tuple[torch.Tensor | None, torch.Tensor | None, int]:
    return (None, None, 0) if last is None else (*last, last.path.stride(0))


@triton.jit(do_not_specialize=["path_stride", "out_stride"])
def _before_kernel(
    kept_ptr,
    slots_ptr,
    positions_ptr,
    accepted_ptr,
    path_ptr,
    path_stride,
    out_ptr,
    out_stride,
    WIDTH: tl.constexpr,
    KEPT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row)
    if accepted_ptr is not None:
        place = _last_row(slot, accepted_ptr, path_ptr, path_stride)
    else:
        place = (tl.load(positions_ptr + row) + KEPT - 1) % KEPT
    at = (slot * KEPT + place).to(tl.int64) * WIDTH
    own = tl.load(kept_ptr + at + column, mask=column < WIDTH)
    tl.store(out_ptr + row.to(tl.int64) * out_stride + column, own, mask=column < WIDTH)


def before(
    kept: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, last: LastRows | None, out: torch.Tensor
) -> None:
    """Writes what `shift_and_keep` has kept of the positions before these, the last ones that have any, to `out`
    [rows, width]. `last`: with trees, whatever the positions are."""
    rows, width = out.shape
    _before_kernel[rows, triton.cdiv(width, _COLUMNS)](
        *(kept, slots, positions, *_last_rows(last), out, out.stride(0), width, kept.shape[1], _COLUMNS)
    )


@triton.jit(do_not_specialize=["queries"])
def _convolve_kernel(
    x_ptr,
    change_ptr,
    base_ptr,
    out_ptr,
    queries,
    x_stride,
    change_stride,
    first_change,
    WIDTH: tl.constexpr,
    GROUPS: tl.constexpr,
    TAPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    change = change_ptr + row.to(tl.int64) * change_stride + first_change + column // (WIDTH // GROUPS)
    total = tl.zeros((BLOCK,), tl.float32)
    for t in tl.static_range(TAPS):
        seen = inside & (row % queries >= t)
        x = tl.load(x_ptr + (row - t).to(tl.int64) * x_stride + column, mask=seen, other=0.0).to(tl.float32)
        tap = tl.load(base_ptr + t * WIDTH + column, mask=inside, other=0.0).to(tl.float32)
        total += (tap + tl.load(change + t * GROUPS, mask=inside, other=0.0).to(tl.float32)) * x
    tl.store(out_ptr + row.to(tl.int64) * WIDTH + column, total.to(out_ptr.dtype.element_ty), mask=inside)


def convolve(x: torch.Tensor, change: torch.Tensor, base: torch.Tensor, *, place: int, queries: int) -> torch.Tensor:
    """A causal convolution over the rows of each block, which has `queries` of them.

    The taps of a row are `base` [taps, width] and its own changes of them, each of a group of channels: those at
    `place` of `change` [rows, 2 * taps * groups]. Sums are in float32.
    """
    (rows, width), taps = x.shape, len(base)
    out, groups = torch.empty((rows, width), dtype=x.dtype, device=x.device), change.shape[1] // (2 * taps)
    _convolve_kernel[rows, triton.cdiv(width, _COLUMNS)](
        *(x, change, base, out, queries, x.stride(0), change.stride(0), place * taps * groups),
        WIDTH=width,
        GROUPS=groups,
        TAPS=taps,
        BLOCK=_COLUMNS,
    )
    return out
