"""Look-up of drafts that the host has, or another process, when the device executes it rather than when it is launched.

The tables are in pinned host memory (`ssd.drafting.table`), which the host writes while the device computes. So they
are read with volatile loads, and a row is used if its first word is the round that is expected.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from ssd.kernels.state import StateView

_FAR = tl.constexpr(1 << 30)


@triton.jit
def _awaited(row_ptr, round_, began, limit):
    """Whether a row is that of a round, or becomes it until `limit` ns after `began`."""
    found = tl.load(row_ptr, volatile=True)
    while (found != round_) & (round_ >= 0) & (globaltimer() - began < limit):
        found = tl.load(row_ptr, volatile=True)
    return (found == round_) & (round_ >= 0)


@triton.jit
def _keep(tokens_ptr, at, inside, slot, drafts_ptr, confidence_ptr, draft_stride, j):
    """Makes the tokens and confidence at `at` a slot's draft; returns the tokens as they are, -1 beyond their end."""
    tokens = tl.load(tokens_ptr + at + j, mask=inside, other=-1, volatile=True)
    sure = tl.load(tokens_ptr + at + draft_stride + j, mask=inside, other=0, volatile=True)
    tl.store(drafts_ptr + slot * draft_stride + j, tl.maximum(tokens, 0), mask=inside)
    tl.store(confidence_ptr + slot * draft_stride + j, sure.to(tl.float32, bitcast=True), mask=inside)
    return tokens, sure


@triton.jit(do_not_specialize=["num_works", "num_slots", "token_stride", "limit", "hit", "miss"])
def _look_up_kernel(
    wanted_ptr,
    tables_ptr,
    length_ptr,
    token_ids_ptr,
    accepted_ptr,
    drafts_ptr,
    confidence_ptr,
    origin_ptr,
    record_ptr,
    num_works,
    num_slots,
    token_stride,
    limit,
    hit,
    miss,
    REPLICAS: tl.constexpr,
    ENTRIES: tl.constexpr,
    DRAFT: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    work = tl.program_id(0)
    slot = tl.load(wanted_ptr + work, volatile=True).to(tl.int64)
    round_ = tl.load(wanted_ptr + num_works + work, volatile=True)
    last = tl.load(token_ids_ptr + slot * token_stride + tl.load(length_ptr + slot) - 1)
    accepted = tl.load(accepted_ptr + slot)
    entry: tl.constexpr = 2 + 2 * DRAFT
    i = tl.arange(0, WIDTH)
    match = _FAR
    sibling = _FAR
    began = globaltimer()
    for replica in tl.static_range(REPLICAS):
        row = (replica * num_slots + slot) * (2 + ENTRIES * entry)
        there = _awaited(tables_ptr + row, round_, began, limit)
        count = tl.load(tables_ptr + row + 1, volatile=True)
        inside = there & (i < tl.minimum(count, ENTRIES))
        at = row + 2 + i * entry
        same_length = inside & (tl.load(tables_ptr + at, mask=inside, other=-1, volatile=True) == accepted)
        exact = same_length & (tl.load(tables_ptr + at + 1, mask=inside, other=-1, volatile=True) == last)
        place = replica * ENTRIES + i
        match = tl.minimum(match, tl.min(tl.where(exact, place, _FAR), axis=0))
        sibling = tl.minimum(sibling, tl.min(tl.where(same_length, place, _FAR), axis=0))
    chosen = tl.where(match < _FAR, match, sibling)
    found = chosen < _FAR
    chosen = tl.where(found, chosen, 0)
    row = ((chosen // ENTRIES) * num_slots + slot) * (2 + ENTRIES * entry)
    j = tl.arange(0, BLOCK)
    at = row + 2 + (chosen % ENTRIES) * entry + 2
    tokens, sure = _keep(tables_ptr, at, found & (j < DRAFT), slot, drafts_ptr, confidence_ptr, DRAFT, j)
    origin = tl.where(match < _FAR, hit, tl.where(found, miss, 0))
    tl.store(origin_ptr + slot, origin)
    record = record_ptr + slot * (1 + 2 * DRAFT)
    tl.store(record, origin)
    tl.store(record + 1 + j, tokens, mask=j < DRAFT)
    tl.store(record + 1 + DRAFT + j, sure, mask=j < DRAFT)


def look_up(
    state: StateView,
    wanted: torch.Tensor,
    tables: torch.Tensor,
    record: torch.Tensor,
    *,
    limit: int,
    hit: int,
    miss: int,
) -> None:
    """Looks up the outcomes of the last verification in the tables; what is found becomes the sequences' drafts.

    `wanted` [2, works]: slots, and the round that each one's table must be of (-1: none). `tables` [replicas, slots,
    words]: see `ssd.drafting.table`. `limit`: how long to wait for tables that are not there yet, in ns by the device's
    clock. After a miss the draft is the sibling's, if there is one. `record` [slots, 1 + 2 K] gets the
    origin (0: none), the tokens (-1 beyond their end) and the confidence of what was found. All of these are pinned.
    """
    replicas, num_slots, words = tables.shape
    count, draft = wanted.shape[1], state.drafts.shape[1]
    entries = (words - 2) // (2 + 2 * draft)
    _look_up_kernel[(count,)](
        *(wanted, tables, state.length, state.token_ids, state.num_accepted, state.drafts, state.confidence),
        *(state.origin, record, count, num_slots, state.token_ids.stride(0), limit, hit, miss),
        REPLICAS=replicas,
        ENTRIES=entries,
        DRAFT=draft,
        WIDTH=triton.next_power_of_2(entries),
        BLOCK=triton.next_power_of_2(draft),
    )


@triton.jit(do_not_specialize=["round_", "limit", "hit", "written"])
def _await_kernel(
    slots_ptr,
    answers_ptr,
    drafts_ptr,
    confidence_ptr,
    origin_ptr,
    round_,
    limit,
    hit,
    written,
    DRAFT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    slot = tl.load(slots_ptr + tl.program_id(0)).to(tl.int64)
    if tl.load(origin_ptr + slot) == hit:
        return
    answer = slot * (2 + 2 * DRAFT)
    there = _awaited(answers_ptr + answer, round_, globaltimer(), limit)
    count = tl.load(answers_ptr + answer + 1, volatile=True)
    if there & (count > 0):
        j = tl.arange(0, BLOCK)
        _keep(answers_ptr, answer + 2, j < DRAFT, slot, drafts_ptr, confidence_ptr, DRAFT, j)
        tl.store(origin_ptr + slot, written)


def await_answers(
    state: StateView,
    slots: torch.Tensor,
    answers: torch.Tensor,
    *,
    round_: int,
    limit: int,
    hit: int,
    written: int,
) -> None:
    """Waits, for those of `slots` whose draft is no hit, until the host has answered with a draft or without one.

    `answers` [slots, 2 + 2 K], pinned: the round, the number of tokens, the tokens and their confidence. `limit`: the
    longest wait, in ns by the device's clock, so that a host that does not answer costs time only.
    """
    draft = state.drafts.shape[1]
    _await_kernel[(len(slots),)](
        *(slots, answers, state.drafts, state.confidence, state.origin, round_, limit, hit, written),
        DRAFT=draft,
        BLOCK=triton.next_power_of_2(draft),
    )
