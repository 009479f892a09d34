"""The functions of `ssd.kernels.triton.trees` in torch."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

from ssd.kernels.state import Candidates


def grow(
    tokens: torch.Tensor,
    scores: torch.Tensor,
    slots: torch.Tensor,
    temperature: torch.Tensor,
    beams: tuple[torch.Tensor, torch.Tensor] | None,
    candidates: Candidates,
    following: torch.Tensor,
    *,
    first: int,
    children: int,
    vocab_size: int,
    known: int,
    sharpness: float,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    n = len(candidates.scores)
    width = len(scores) // n
    factors = torch.where(temperature[slots.clamp(min=0)] == 0, sharpness, 1.0)[:, None, None]
    found = (scores.view(n, width, -1) * factors).log_softmax(-1)[:, :, :children]
    above = torch.full((n, width), -1, dtype=torch.int32, device=scores.device)
    if beams is not None:
        found, above = found + beams[0][:, :, None], beams[1]
    found = torch.where(found.isnan(), -torch.inf, found).flatten(1)
    kept = tokens.view(n, width, -1)[:, :, :children].clamp(min=0, max=vocab_size - 1).flatten(1)
    own = slice(first, first + width * children)
    candidates.scores[:, own], candidates.tokens[:, own] = found, kept
    candidates.above[:, own] = above.repeat_interleave(children, dim=1)
    best, chosen = found.sort(dim=1, descending=True, stable=True)
    best, chosen = best[:, :children], chosen[:, :children]
    rows = torch.arange(n, device=scores.device)[:, None] * width + chosen // children
    following.copy_(kept.gather(1, chosen).flatten().clamp(max=known - 1))
    return rows.flatten(), (best, (first + chosen).int())


def keep(
    candidates: Candidates,
    slots: torch.Tensor,
    parents: torch.Tensor,
    drafts: torch.Tensor,
    origins: torch.Tensor,
    *,
    origin: int,
) -> None:
    tokens, scores, above = candidates
    order = scores.sort(dim=1, descending=True, stable=True).indices
    place = torch.empty_like(order).scatter_(
        1, order, torch.arange(scores.shape[1], device=order.device).expand_as(order)
    )
    nodes = drafts.shape[1]
    chosen = order[:, :nodes]
    behind = above.gather(1, chosen).long()
    found = torch.where(behind < 0, -1, place.gather(1, behind.clamp(min=0))).int()
    found = torch.where(scores.gather(1, chosen) > -torch.inf, found, nodes)
    rows, left = slots.long(), nodes - chosen.shape[1]
    parents[rows] = pad(found, (0, left), value=nodes)
    drafts[rows] = pad(tokens.gather(1, chosen), (0, left))
    origins[rows] = origin
