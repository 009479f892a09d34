"""`ssd.kernels.triton.rounds` and `runs` in numpy: what kernels of all devices must compute.

Padding is -1, as for them.
"""

from __future__ import annotations

import numpy as np
import torch

from ssd.kernels.state import StateView

_Ints = np.ndarray
_LOWEST = np.float32(-1e38)


def _token_at(slot: _Ints, position: _Ints, length: _Ints, token_ids: torch.Tensor, drafts: torch.Tensor) -> _Ints:
    behind = np.clip(position - length, 0, drafts.shape[1] - 1)
    decided = token_ids.numpy()[slot, np.minimum(position, token_ids.shape[1] - 1)]
    found: _Ints = np.where(position < length, decided, drafts.numpy()[slot, behind])
    return found


def prepare_rows(
    state: StateView,
    *,
    row_work: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    logit_rows: torch.Tensor,
    tables: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_len: torch.Tensor,
    gather: torch.Tensor,
    decided_slot: torch.Tensor,
    decided: torch.Tensor,
    num_drafted: torch.Tensor,
    block_size: int,
) -> None:
    row_token, position, mapping, context = (t.numpy() for t in (tokens, positions, slot_mapping, context_len))
    slot, begin, work, table, source = (t.numpy() for t in (slots, query_start, row_work, tables, logit_rows))
    lengths, start = state.length.numpy()[slot], starts.numpy()
    first = np.where(start < 0, lengths - 1, start)
    context[:] = np.where(slot < 0, 0, first + (begin[1:] - begin[:-1]))
    real = work >= 0  # the other rows are padding
    row_slot = np.where(real, slot[work], -1)
    position[:] = np.where(real, (first - begin[:-1])[work] + np.arange(len(work), dtype=np.int32), 0)
    row_token[:] = np.where(real, _token_at(row_slot, position, lengths[work], state.token_ids, state.drafts), 0)
    block = position // block_size
    slot_of_block = table[row_slot, np.minimum(block + 1, table.shape[1] - 1)] * block_size + position % block_size
    mapping[:] = np.where(real & (block < table[row_slot, 0]), slot_of_block, -1)
    row, known, next_ = np.maximum(source, 0), decided_slot.numpy(), decided.numpy()
    gather.numpy()[:] = row
    known[:] = np.where(source < 0, -1, row_slot[row])
    next_[:] = np.where(known < 0, 1, position[row] + 1)
    num_drafted.numpy()[:] = np.where(known < 0, 0, np.maximum(next_ - lengths[work[row]], 0))


def accept(
    state: StateView,
    *,
    chosen: torch.Tensor,
    slots: torch.Tensor,
    first_row: torch.Tensor,
    num_logits: torch.Tensor,
    out: torch.Tensor,
    vocab_size: int,
) -> None:
    width, lengths, texts, results = state.drafts.shape[1], state.length.numpy(), state.token_ids.numpy(), out.numpy()
    results[:] = 0
    tokens, origins, num_accepted = chosen.clamp(max=vocab_size - 1).tolist(), state.origin, state.num_accepted
    works = zip(slots.tolist(), first_row.tolist(), num_logits.tolist(), strict=True)
    for work, (slot, first, count) in enumerate(works):
        if first < 0:
            continue
        new, draft = tokens[first : first + count], state.drafts.numpy()[slot, : count - 1].tolist()
        accepted = next((j for j, token in enumerate(draft) if token != new[j]), count - 1)
        begin = int(lengths[slot])
        end = min(begin + accepted + 1, texts.shape[1])
        texts[slot, begin:end] = np.maximum(new[: end - begin], 0)
        lengths[slot], num_accepted[slot] = end, accepted
        results[work, 0], results[work, 1] = accepted + 1, origins[slot]
        results[work, 2 : 2 + count] = new
        results[work, 3 + width : 2 + width + count] = draft


def stage(
    state: StateView,
    *,
    slots: torch.Tensor,
    num_drafted: torch.Tensor,
    computed: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    tokens: torch.Tensor,
    verified_confidence: torch.Tensor,
    hit: torch.Tensor,
    hit_origin: int,
    vocab_size: int,
    fork: bool,
) -> None:
    reads = tokens.shape[1] - 1
    slot = slots.numpy()
    lengths = state.length.numpy()[slot]
    begin = lengths - 1
    if not fork:
        begin = np.maximum(np.minimum(computed.numpy()[slot], begin), lengths - reads)
    many = lengths - begin + num_drafted.numpy()
    position = begin[:, None] + np.arange(reads + 1, dtype=np.int32)
    found = _token_at(slot[:, None], position, lengths[:, None], state.token_ids, state.drafts)
    first.numpy()[:], count.numpy()[:] = begin, many
    tokens.numpy()[:] = np.minimum(found, vocab_size - 1)
    computed.numpy()[slot] = begin + many
    if fork:
        verified_confidence.numpy()[:] = state.confidence.numpy()[slot]
        hit.numpy()[:] = state.origin.numpy()[slot] == hit_origin


def look_up(
    state: StateView,
    *,
    slots: torch.Tensor,
    after: torch.Tensor,
    chain: torch.Tensor,
    chain_confidence: torch.Tensor,
    depth: int,
    rows: torch.Tensor,
    hit: int,
    miss: int,
) -> None:
    width = after.shape[1]
    slot = slots.numpy()
    last = state.token_ids.numpy()[slot, state.length.numpy()[slot] - 1]
    same_length = after.numpy() == state.num_accepted.numpy()[slot][:, None]
    exact = same_length & (chain.numpy()[: len(slot) * width, 0].reshape(-1, width) == last[:, None])
    for sequence, (at, hits, siblings) in enumerate(zip(slot.tolist(), exact, same_length, strict=True)):
        found = np.flatnonzero(hits if hits.any() else siblings)
        state.confidence[at] = 0.0
        state.origin[at] = hit if hits.any() else miss
        row = sequence * width + (int(found[0]) if len(found) else 0)
        rows[sequence] = row
        if len(found):
            state.drafts[at, :depth] = chain[row, 1 : depth + 1]
            if hits.any():
                state.confidence[at, :depth] = chain_confidence[row, 1 : depth + 1]


def store(
    state: StateView,
    *,
    slots: torch.Tensor,
    chain: torch.Tensor,
    chain_confidence: torch.Tensor,
    count: int,
    value: int,
) -> None:
    slot = slots.numpy()
    state.drafts.numpy()[slot, :count] = chain.numpy()[: len(slot), :count]
    state.confidence.numpy()[slot, :count] = chain_confidence.numpy()[: len(slot), :count]
    state.origin.numpy()[slot] = value


def read_rows(
    *,
    slots: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    given: torch.Tensor,
    tables: torch.Tensor,
    table_rows: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_len: torch.Tensor,
    decided: torch.Tensor,
    last: torch.Tensor,
    beams: torch.Tensor | None,
    padding_slot: int,
    block_size: int,
    first_slot: int,
    slots_per_branch: int,
) -> None:
    n, reads = len(slots), len(tokens) // len(slots)
    position = first.numpy()[:, None] + np.arange(reads)
    table, index = tables.numpy()[table_rows.numpy()], position // block_size
    real = (np.arange(reads) < count.numpy()[:, None]) & (index < table[:, :1])
    block = np.take_along_axis(table, np.where(real, 1 + index, 0), axis=1)
    read = np.minimum(count.numpy(), reads)
    tokens.numpy()[:] = given.numpy()[:, :reads].ravel()
    positions.numpy()[:] = position.ravel()
    slot_mapping.numpy()[:] = np.where(real, block * block_size + position % block_size, padding_slot).ravel()
    context_len.numpy()[:], decided.numpy()[:] = first.numpy() + reads, first.numpy() + read
    last.numpy()[:] = np.arange(n) * reads + read - 1
    if beams is not None:
        depth, rows = np.arange(len(beams))[:, None], np.arange(beams.shape[2])
        width = len(rows) // n
        beams.numpy()[:, 0] = np.repeat(decided.numpy(), width) + depth
        beams.numpy()[:, 1] = first_slot + rows * slots_per_branch + depth
        beams.numpy()[:, 2] = beams.numpy()[:, 0] + 1
        beams.numpy()[:, 3] = np.repeat(slots.numpy(), width)


def extend_rows(
    *,
    slots: torch.Tensor,
    first: torch.Tensor,
    count: torch.Tensor,
    after: torch.Tensor | None,
    chain: torch.Tensor,
    depth: int,
    reads: int,
    first_slot: int,
    slots_per_branch: int,
    vocab_size: int,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    decided: torch.Tensor,
    row_slots: torch.Tensor,
) -> None:
    rows, width = len(tokens), 1 if after is None else after.shape[1]
    read = np.minimum(count.numpy(), reads)[:, None] if after is None else after.numpy() + 1
    tokens.numpy()[:] = np.minimum(chain.numpy()[:rows, depth], vocab_size - 1)
    positions.numpy()[:] = (first.numpy()[:, None] + read + depth).ravel()
    slot_mapping.numpy()[:] = first_slot + np.arange(rows) * slots_per_branch + depth
    decided.copy_(positions + 1)
    row_slots.numpy()[:] = np.repeat(slots.numpy(), width)


def block_rows(
    state: StateView,
    *,
    slots: torch.Tensor,
    tables: torch.Tensor,
    tokens: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    context_len: torch.Tensor,
    row_slots: torch.Tensor,
    decided: torch.Tensor,
    decided_slot: torch.Tensor,
    mask_token: int,
    block_size: int,
) -> None:
    queries, count, slot, table = len(tokens) // len(slots), decided.shape[1], slots.numpy()[:, None], tables.numpy()
    first = state.length.numpy()[slot] - 1
    at = first + np.arange(queries)
    block = at // block_size
    known = table[slot, np.minimum(block + 1, table.shape[1] - 1)] * block_size + at % block_size
    found = np.full_like(at, mask_token)
    found[:, 0] = state.token_ids.numpy()[slot, first][:, 0]
    wanted = (found, at, np.where(block < table[slot, 0], known, -1), first + queries + 0 * at, slot + 0 * at)
    for out, values in zip((tokens, positions, slot_mapping, context_len, row_slots), wanted, strict=True):
        out.numpy()[:] = values.ravel()
    decided.numpy()[:] = first + 1 + np.arange(count)
    decided_slot.numpy()[:] = slot


def keep_best(
    *,
    best: torch.Tensor,
    scores: torch.Tensor,
    chain: torch.Tensor,
    confidence: torch.Tensor,
    column: int,
    each: int,
    max_confidence: float,
) -> None:
    rows = np.arange(len(best))
    at = rows // each, column + rows % each
    chain.numpy()[at] = np.maximum(best.numpy()[:, 0], 0)
    finite = np.maximum(scores.numpy(), _LOWEST)  # -inf less -inf, where there is no token at all, has to be 0
    confidence.numpy()[at] = np.minimum(finite[:, 0] - finite[:, 1], max_confidence)
