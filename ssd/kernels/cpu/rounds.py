"""The functions of `ssd.kernels.triton.rounds` for a CPU: in C, or in numpy where there is no compiler."""

from __future__ import annotations

import numpy as np
import torch

from ssd.kernels.cpu import library

_Ints = np.ndarray
_LOWEST = np.float32(-1e38)


def _token_at(slot: _Ints, position: _Ints, length: _Ints, token_ids: torch.Tensor, drafts: torch.Tensor) -> _Ints:
    behind = np.clip(position - length, 0, drafts.shape[1] - 1)
    decided = token_ids.numpy()[slot, np.minimum(position, token_ids.shape[1] - 1)]
    found: _Ints = np.where(position < length, decided, drafts.numpy()[slot, behind])
    return found


def prepare_rows(
    *,
    row_work: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    logit_rows: torch.Tensor,
    length: torch.Tensor,
    token_ids: torch.Tensor,
    drafts: torch.Tensor,
    tables: torch.Tensor,
    out: tuple[torch.Tensor, ...],
    block_size: int,
) -> None:
    kernels = library.load()
    if kernels is not None:
        inputs = (row_work, slots, starts, query_start, logit_rows, length, token_ids, drafts, tables)
        if kernels.prepare_rows(
            *(tensor.data_ptr() for tensor in (*inputs, *out)),
            *(row_work.shape[0], slots.shape[0], logit_rows.shape[0]),
            *(*token_ids.shape, drafts.shape[1], tables.shape[1], block_size),
        ):
            raise IndexError("a batch names a work, a slot, a row or a position that is not there")
        return
    tokens, positions, mapping, context, gather, decided_slot, decided, drafted = (t.numpy() for t in out)
    slot, begin, work, table, source = (t.numpy() for t in (slots, query_start, row_work, tables, logit_rows))
    lengths, start = length.numpy()[slot], starts.numpy()
    first = np.where(start < 0, lengths - 1, start)
    context[:] = np.where(slot < 0, 0, first + (begin[1:] - begin[:-1]))
    real = work >= 0  # the other rows are padding
    row_slot = np.where(real, slot[work], -1)
    positions[:] = np.where(real, (first - begin[:-1])[work] + np.arange(len(work), dtype=np.int32), 0)
    tokens[:] = np.where(real, _token_at(row_slot, positions, lengths[work], token_ids, drafts), 0)
    block = positions // block_size
    slot_of_block = table[row_slot, np.minimum(block + 1, table.shape[1] - 1)] * block_size + positions % block_size
    mapping[:] = np.where(real & (block < table[row_slot, 0]), slot_of_block, -1)
    gather[:] = np.maximum(source, 0)
    decided_slot[:] = np.where(source < 0, -1, row_slot[gather])
    decided[:] = np.where(decided_slot < 0, 1, positions[gather] + 1)
    drafted[:] = np.where(decided_slot < 0, 0, np.maximum(decided - lengths[work[gather]], 0))


def accept(
    chosen: torch.Tensor,
    *,
    slots: torch.Tensor,
    first_row: torch.Tensor,
    num_logits: torch.Tensor,
    length: torch.Tensor,
    token_ids: torch.Tensor,
    drafts: torch.Tensor,
    num_accepted: torch.Tensor,
    origin: torch.Tensor,
    out: torch.Tensor,
    vocab_size: int,
) -> None:
    kernels = library.load()
    if kernels is not None:
        tensors = (chosen, slots, first_row, num_logits, length, token_ids, drafts, num_accepted, origin, out)
        sizes = (chosen.shape[0], slots.shape[0], *token_ids.shape, drafts.shape[1], vocab_size)
        if kernels.accept(*(t.data_ptr() for t in tensors), *sizes):
            raise IndexError("a decision names a slot, a row or a draft token that is not there")
        return
    width, lengths, texts, results = drafts.shape[1], length.numpy(), token_ids.numpy(), out.numpy()
    results[:] = 0
    tokens, origins, num_accepted_of = chosen.clamp(max=vocab_size - 1).tolist(), origin.numpy(), num_accepted.numpy()
    works = zip(slots.tolist(), first_row.tolist(), num_logits.tolist(), strict=True)
    for work, (slot, first, count) in enumerate(works):
        if first < 0:
            continue
        new, draft = tokens[first : first + count], drafts.numpy()[slot, : count - 1].tolist()
        accepted = next((j for j, token in enumerate(draft) if token != new[j]), count - 1)
        begin = int(lengths[slot])
        end = min(begin + accepted + 1, texts.shape[1])
        texts[slot, begin:end] = np.maximum(new[: end - begin], 0)
        lengths[slot], num_accepted_of[slot] = end, accepted
        results[work, 0], results[work, 1] = accepted + 1, origins[slot]
        results[work, 2 : 2 + count] = new
        results[work, 3 + width : 2 + width + count] = draft


def stage(
    *,
    slots: torch.Tensor,
    num_drafted: torch.Tensor,
    length: torch.Tensor,
    token_ids: torch.Tensor,
    drafts: torch.Tensor,
    confidence: torch.Tensor,
    origin: torch.Tensor,
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
    kernels, reads = library.load(), tokens.shape[1] - 1
    if kernels is not None:
        inputs = (slots, num_drafted, length, token_ids, drafts, confidence, origin)
        outputs = (computed, first, count, tokens, verified_confidence, hit)
        sizes = (slots.shape[0], *token_ids.shape, drafts.shape[1], reads, hit_origin, vocab_size, fork)
        if kernels.stage(*(t.data_ptr() for t in (*inputs, *outputs)), *sizes):
            raise IndexError("a run names a slot that is not there")
        return
    slot = slots.numpy()
    lengths = length.numpy()[slot]
    begin = lengths - 1
    if not fork:
        begin = np.maximum(np.minimum(computed.numpy()[slot], begin), lengths - reads)
    many = lengths - begin + num_drafted.numpy()
    position = begin[:, None] + np.arange(reads + 1, dtype=np.int32)
    found = _token_at(slot[:, None], position, lengths[:, None], token_ids, drafts)
    first.numpy()[:], count.numpy()[:] = begin, many
    tokens.numpy()[:] = np.minimum(found, vocab_size - 1)
    computed.numpy()[slot] = begin + many
    if fork:
        verified_confidence.numpy()[:] = confidence.numpy()[slot]
        hit.numpy()[:] = origin.numpy()[slot] == hit_origin


def look_up(
    *,
    slots: torch.Tensor,
    after: torch.Tensor,
    chain: torch.Tensor,
    chain_confidence: torch.Tensor,
    depth: int,
    length: torch.Tensor,
    token_ids: torch.Tensor,
    num_accepted: torch.Tensor,
    drafts: torch.Tensor,
    confidence: torch.Tensor,
    origin: torch.Tensor,
    rows: torch.Tensor,
    hit: int,
    miss: int,
) -> None:
    kernels, width = library.load(), after.shape[1]
    if kernels is not None:
        inputs = (slots, after, chain, chain_confidence, length, token_ids, num_accepted)
        sizes = (slots.shape[0], width, after.stride(0), chain.shape[1], depth, *token_ids.shape, drafts.shape[1])
        if kernels.look_up(*(t.data_ptr() for t in (*inputs, drafts, confidence, origin, rows)), *sizes, hit, miss):
            raise IndexError("a run names a slot that is not there, or more tokens than a draft can have")
        return
    slot = slots.numpy()
    last = token_ids.numpy()[slot, length.numpy()[slot] - 1]
    same_length = after.numpy() == num_accepted.numpy()[slot][:, None]
    exact = same_length & (chain.numpy()[: len(slot) * width, 0].reshape(-1, width) == last[:, None])
    for sequence, (at, hits, siblings) in enumerate(zip(slot.tolist(), exact, same_length, strict=True)):
        found = np.flatnonzero(hits if hits.any() else siblings)
        confidence[at] = 0.0
        origin[at] = hit if hits.any() else miss
        row = sequence * width + (int(found[0]) if len(found) else 0)
        rows[sequence] = row
        if len(found):
            drafts[at, :depth] = chain[row, 1 : depth + 1]
            if hits.any():
                confidence[at, :depth] = chain_confidence[row, 1 : depth + 1]


def store(
    *,
    slots: torch.Tensor,
    chain: torch.Tensor,
    chain_confidence: torch.Tensor,
    count: int,
    drafts: torch.Tensor,
    confidence: torch.Tensor,
    origin: torch.Tensor,
    value: int,
) -> None:
    kernels = library.load()
    if kernels is not None:
        tensors = (slots, chain, chain_confidence, drafts, confidence, origin)
        sizes = (slots.shape[0], chain.shape[1], count, *drafts.shape, value)
        if kernels.store(*(t.data_ptr() for t in tensors), *sizes):
            raise IndexError("a run names a slot that is not there, or more tokens than a draft can have")
        return
    slot = slots.numpy()
    drafts.numpy()[slot, :count] = chain.numpy()[: len(slot), :count]
    confidence.numpy()[slot, :count] = chain_confidence.numpy()[: len(slot), :count]
    origin.numpy()[slot] = value


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
    out: tuple[torch.Tensor, ...],
) -> None:
    kernels, rows = library.load(), out[0].shape[0]
    width = 1 if after is None else after.shape[1]
    if kernels is not None:
        before = None if after is None else after.data_ptr()
        kernels.extend_rows(
            *(slots.data_ptr(), first.data_ptr(), count.data_ptr(), before, chain.data_ptr()),
            *(t.data_ptr() for t in out),
            *(rows, width, 0 if after is None else after.stride(0), chain.shape[1], depth, reads),
            *(first_slot, slots_per_branch, vocab_size),
        )
        return
    tokens, positions, mapping, decided, row_slots = (t.numpy() for t in out)
    read = np.minimum(count.numpy(), reads)[:, None] if after is None else after.numpy() + 1
    tokens[:] = np.minimum(chain.numpy()[:rows, depth], vocab_size - 1)
    positions[:] = (first.numpy()[:, None] + read + depth).ravel()
    mapping[:] = first_slot + np.arange(rows) * slots_per_branch + depth
    decided[:] = positions + 1
    row_slots[:] = np.repeat(slots.numpy(), width)


def keep_best(
    best: torch.Tensor,
    scores: torch.Tensor,
    chain: torch.Tensor,
    confidence: torch.Tensor,
    column: int,
    max_confidence: float,
) -> None:
    kernels = library.load()
    if kernels is not None:
        addresses = (t.data_ptr() for t in (best, scores, chain, confidence))
        kernels.keep_best(*addresses, *best.shape, chain.shape[1], column, max_confidence)
        return
    chain.numpy()[: len(best), column] = np.maximum(best.numpy()[:, 0], 0)
    finite = np.maximum(scores.numpy(), _LOWEST)  # -inf less -inf, where there is no token at all, has to be 0
    confidence.numpy()[: len(best), column] = np.minimum(finite[:, 0] - finite[:, 1], max_confidence)
