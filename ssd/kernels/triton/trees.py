"""Draft trees on a GPU: one kernel for each level, and one that keeps the best nodes. See `ssd.drafting.tree`."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.state import Candidates
from ssd.kernels.triton.compile import compiling

_BLOCK = 32  # candidates that all others are compared with at a time


@triton.jit(do_not_specialize=["first", "total", "stride"])
def _grow_kernel(
    tokens_ptr, scores_ptr, slots_ptr, temperature_ptr, best_ptr, chosen_ptr,
    all_tokens_ptr, all_scores_ptr, all_above_ptr, beam_tokens_ptr, rows_ptr, next_best_ptr, next_chosen_ptr,
    first, total, stride, column_stride, vocab_size, known, sharpness,
    WIDTH: tl.constexpr, RANKS: tl.constexpr, CHILDREN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One sequence: WIDTH rows with RANKS tokens each, of which the first CHILDREN are candidates."""
    sequence = tl.program_id(0).to(tl.int64)
    w = tl.arange(0, BLOCK)
    c = tl.arange(0, RANKS)
    row = sequence * WIDTH + w
    x = tl.load(scores_ptr + row[:, None] * RANKS + c[None, :], mask=(w < WIDTH)[:, None], other=float("-inf"))
    slot = tl.maximum(tl.load(slots_ptr + sequence), 0).to(tl.int64)
    if tl.load(temperature_ptr + slot * column_stride) == 0:
        x *= sharpness
    x -= tl.max(x, axis=1)[:, None]
    x -= tl.log(tl.sum(tl.exp(x), axis=1))[:, None]
    above = tl.full((BLOCK,), -1, tl.int32)
    if best_ptr is not None:
        beam = sequence * CHILDREN + w
        x += tl.load(best_ptr + beam, mask=w < WIDTH, other=0.0)[:, None]
        above = tl.load(chosen_ptr + beam, mask=w < WIDTH, other=0)
    x = tl.where(x == x, x, float("-inf"))
    token = tl.load(tokens_ptr + row[:, None] * RANKS + c[None, :], mask=(w < WIDTH)[:, None], other=0)
    token = tl.minimum(tl.maximum(token, 0), vocab_size - 1)  # rows of padding may have anything
    index = w[:, None] * CHILDREN + c[None, :]
    free = (w < WIDTH)[:, None] & (c < CHILDREN)[None, :]
    at = sequence * total + first + index
    tl.store(all_scores_ptr + at, x, mask=free)
    tl.store(all_tokens_ptr + at, token, mask=free)
    tl.store(all_above_ptr + at, tl.broadcast_to(above[:, None], at.shape), mask=free)
    for i in tl.static_range(CHILDREN):
        largest = tl.max(tl.max(tl.where(free, x, float("-inf")), axis=1), axis=0)
        equal = free & (x == largest)
        chosen = tl.min(tl.min(tl.where(equal, index, 2147483647), axis=1), axis=0)
        mine = index == chosen
        to = sequence * CHILDREN + i
        chosen_token = tl.sum(tl.sum(tl.where(mine & free, token, 0), axis=1), axis=0)
        tl.store(beam_tokens_ptr + to * stride, tl.minimum(chosen_token, known - 1))
        tl.store(rows_ptr + to, sequence * WIDTH + chosen // CHILDREN)
        tl.store(next_best_ptr + to, largest)
        tl.store(next_chosen_ptr + to, first + chosen)
        free = free & (index != chosen)


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
    """The next level of some trees, from the best tokens of its rows and their scores: [rows, ranks].

    `slots`: of the sequences; where the `temperature` of a slot is 0, scores are multiplied by `sharpness`.

    `beams`: scores of the rows, and which candidates they are; None: each sequence has one row, the root. Of each row
    the first `children` tokens become candidates, from `first` on; the best of these, as many, are the next beams.
    Their tokens are written to `following`, int32 [sequences * children]; those beyond `known`, the draft's vocabulary,
    as its last one. Returns the rows (int64) that they are behind, and `beams` of the next level.
    """
    n, total = candidates.scores.shape
    device = scores.device
    empty = torch.zeros if compiling() else torch.empty  # others read rows, which must be there
    rows = empty(n * children, dtype=torch.int64, device=device)
    chosen = torch.empty((n, children), dtype=torch.int32, device=device)
    best = torch.empty((n, children), dtype=torch.float32, device=device)
    width = len(scores) // n
    _grow_kernel[(n,)](
        *(tokens, scores, slots, temperature, *(beams or (None, None)), *candidates, following, rows, best, chosen),
        *(first, total, following.stride(0), temperature.stride(0), vocab_size, known, sharpness),
        WIDTH=width,
        RANKS=scores.shape[1],
        CHILDREN=children,
        BLOCK=triton.next_power_of_2(width),
        num_warps=1,
    )
    return rows, (best, chosen)


@triton.jit(do_not_specialize=["total", "stride", "origin"])
def _keep_kernel(
    tokens_ptr, scores_ptr, above_ptr, place_ptr, slots_ptr, parents_ptr, drafts_ptr, origin_ptr,
    total, nodes, stride, origin,
    SIZE: tl.constexpr, BLOCK: tl.constexpr, NODES: tl.constexpr,
):  # fmt: skip
    """One sequence: the place of each candidate is how many are better."""
    sequence = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    i = tl.arange(0, SIZE)
    own = sequence * total
    score = tl.load(scores_ptr + own + i, mask=i < total, other=float("-inf"))
    place = tl.zeros((SIZE,), tl.int32)
    for begin in range(0, total, BLOCK):
        j = begin + tl.arange(0, BLOCK)
        other = tl.load(scores_ptr + own + j, mask=j < total, other=float("-inf"))
        better = (other[None, :] > score[:, None]) | ((other[None, :] == score[:, None]) & (j[None, :] < i[:, None]))
        place += tl.sum((better & (j < total)[None, :]).to(tl.int32), axis=1)
    tl.store(place_ptr + own + i, place, mask=i < total)
    tl.debug_barrier()  # all places are stored before one is read
    kept = (i < total) & (place < nodes)
    above = tl.load(above_ptr + own + i, mask=kept, other=-1)
    parent = tl.load(place_ptr + own + above, mask=kept & (above >= 0), other=-1)
    parent = tl.where(score > float("-inf"), parent, nodes)
    to = slot * stride + place
    tl.store(parents_ptr + to, parent, mask=kept)
    tl.store(drafts_ptr + to, tl.load(tokens_ptr + own + i, mask=kept, other=0), mask=kept)
    left = tl.arange(0, NODES)
    missing = (left >= total) & (left < nodes)
    tl.store(parents_ptr + slot * stride + left, tl.full((NODES,), 0, tl.int32) + nodes, mask=missing)
    tl.store(drafts_ptr + slot * stride + left, tl.zeros((NODES,), tl.int32), mask=missing)
    tl.store(origin_ptr + slot, origin)


def keep(
    candidates: Candidates,
    slots: torch.Tensor,
    parents: torch.Tensor,
    drafts: torch.Tensor,
    origins: torch.Tensor,
    *,
    origin: int,
) -> None:
    """Makes the best candidates the drafts of the sequences in these slots, from the best to the worst; of equal ones
    the first. With fewer candidates than nodes, the others have `nodes` as parent, which is none of them; so have those
    with a score of -inf."""
    (n, total), nodes = candidates.scores.shape, drafts.shape[1]
    assert parents.stride(0) == drafts.stride(0)
    place = torch.empty((n, total), dtype=torch.int32, device=drafts.device)
    _keep_kernel[(n,)](
        *(candidates.tokens, candidates.scores, candidates.above, place, slots, parents, drafts, origins),
        *(total, nodes, drafts.stride(0), origin),
        SIZE=triton.next_power_of_2(total),
        BLOCK=_BLOCK,
        NODES=triton.next_power_of_2(nodes),
        num_warps=8,
    )
