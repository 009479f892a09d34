"""The function of `ssd.kernels.triton.features` in plain torch."""

from __future__ import annotations

import torch


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
) -> tuple[torch.Tensor, torch.Tensor]:
    work, kept_positions = row_work.clamp(min=0), kept.shape[1]
    slot = slots[work].clamp(min=0)
    row = torch.arange(len(positions), dtype=torch.int32, device=positions.device)
    before = kept[slot, (positions - 1) % kept_positions]
    hidden = torch.where((row == query_start[work])[:, None], before, fused.roll(1, 0))
    known = (row_work >= 0) & (positions > start[slot])
    last = ((row_work >= 0) & (row >= query_start[work + 1] - kept_positions)).nonzero()[:, 0]
    kept[slot[last], positions[last] % kept_positions] = fused[last]
    return hidden.masked_fill_((row_work < 0)[:, None], 0.0), torch.where(known, slot_mapping, -1)
