"""The functions of `ssd.kernels.triton.features` in plain torch."""

from __future__ import annotations

import torch

from ssd.kernels.state import LastRows, TreeRows


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
    work, kept_positions = row_work.clamp(min=0), kept.shape[1]
    slot = slots[work].clamp(min=0)
    row = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    known = (row_work >= 0) & (positions > start[slot])
    if tree is None:
        source, place, above = (positions - 1) % kept_positions, positions % kept_positions, row - 1
        last = row >= query_start[work + 1] - kept_positions
    else:
        node = tree.starts[work] < 0
        source, place, above = _last_rows(tree.last, slot), torch.where(node, row - query_start[work], 0), tree.before
        last = node | (row == query_start[work + 1] - 1)
    hidden = torch.where((row == query_start[work])[:, None], kept[slot, source], fused[above])
    last = (last & (row_work >= 0)).nonzero()[:, 0]
    kept[slot[last], place[last]] = fused[last]
    return hidden.masked_fill_((row_work < 0)[:, None], 0.0), torch.where(known, slot_mapping, -1)


def before(
    kept: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, last: LastRows | None, out: torch.Tensor
) -> None:
    out.copy_(kept[slots, (positions - 1) % kept.shape[1] if last is None else _last_rows(last, slots)])


def _last_rows(last: LastRows, slots: torch.Tensor) -> torch.Tensor:
    accepted = last.accepted[slots]
    node = last.path[slots, (accepted - 1).clamp(min=0)]
    return torch.where(accepted > 0, node + 1, 0)


def convolve(x: torch.Tensor, change: torch.Tensor, base: torch.Tensor, *, place: int, queries: int) -> torch.Tensor:
    taps, width = base.shape
    changes = change.view(len(x), 2, taps, -1)[:, place].float()
    own = (base.float() + changes.repeat_interleave(width // changes.shape[-1], dim=-1)).view(-1, queries, taps, width)
    blocks, out = x.float().view(-1, queries, width), torch.zeros(x.shape).view(-1, queries, width)
    for t in range(min(taps, queries)):
        out[:, t:] += own[:, t:, t] * blocks[:, : queries - t]
    return out.view(x.shape).to(x.dtype)
