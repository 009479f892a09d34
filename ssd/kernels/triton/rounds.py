"""Kernels over the SequenceState (`ssd.execution.state`): inputs of a batch, acceptance; `runs.py` has those of drafts.

They let a round be launched before the host knows what the round before it decided. `*_ptr` are int32 unless stated
otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.state import StateView

ROWS = 128  # rows of one program
WORDS = 1024  # of 4 bytes that are moved at once
FAR = tl.constexpr(1 << 30)


@triton.jit
def _locate(row, work, slots_ptr, starts_ptr, query_start_ptr, length_ptr):
    """Slot, length and position of query rows; without a start, a work begins at the sequence's last token."""
    real = work >= 0
    slot = tl.load(slots_ptr + work, mask=real, other=0)
    start = tl.load(starts_ptr + work, mask=real, other=0)
    length = tl.load(length_ptr + slot, mask=real, other=1)
    first = tl.load(query_start_ptr + work, mask=real, other=0)
    base = tl.where(start >= 0, start, length - 1)
    return slot, length, base, tl.where(real, base + row - first, 0)


@triton.jit
def token_at(slot, position, length, token_ids_ptr, drafts_ptr, token_stride, draft_stride, mask):
    """The decided token at a position, or the draft token after them."""
    decided = position < length
    at = slot.to(tl.int64) * token_stride + position
    token = tl.load(token_ids_ptr + at, mask=mask & decided, other=0)
    behind = slot.to(tl.int64) * draft_stride + position - length
    inside = mask & (position >= length) & (position - length < draft_stride)
    return tl.where(decided, token, tl.load(drafts_ptr + behind, mask=inside, other=0))


@triton.jit(do_not_specialize=["num_rows", "num_logits", "token_stride", "draft_stride", "table_stride"])
def _rows_kernel(
    row_work_ptr,
    slots_ptr,
    starts_ptr,
    query_start_ptr,
    logit_rows_ptr,
    length_ptr,
    token_ids_ptr,
    drafts_ptr,
    tables_ptr,
    out_token_ptr,
    out_position_ptr,
    out_mapping_ptr,
    out_context_ptr,
    out_gather_ptr,
    out_slot_ptr,
    out_decided_ptr,
    out_drafted_ptr,
    num_rows,
    num_logits,
    token_stride,
    draft_stride,
    table_stride,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    work = tl.load(row_work_ptr + row, mask=inside, other=-1)
    real = work >= 0
    slot, length, base, position = _locate(row, work, slots_ptr, starts_ptr, query_start_ptr, length_ptr)
    token = token_at(slot, position, length, token_ids_ptr, drafts_ptr, token_stride, draft_stride, real)
    table = tables_ptr + slot.to(tl.int64) * table_stride
    num_blocks = tl.load(table, mask=real, other=0)
    index = position // KV_BLOCK
    block = tl.load(table + 1 + index, mask=real & (index < num_blocks), other=-1)
    tl.store(out_token_ptr + row, token, mask=inside)
    tl.store(out_position_ptr + row, position, mask=inside)
    tl.store(out_mapping_ptr + row, tl.where(block >= 0, block * KV_BLOCK + position % KV_BLOCK, -1), mask=inside)
    end = tl.load(query_start_ptr + work + 1, mask=real, other=0)
    begin = tl.load(query_start_ptr + work, mask=real, other=0)
    tl.store(out_context_ptr + work, base + end - begin, mask=real & (row == begin))

    source = tl.load(logit_rows_ptr + row, mask=row < num_logits, other=-1)
    chosen = tl.maximum(source, 0)
    work = tl.load(row_work_ptr + chosen, mask=(row < num_logits) & (source >= 0), other=-1)
    slot, length, base, position = _locate(chosen, work, slots_ptr, starts_ptr, query_start_ptr, length_ptr)
    tl.store(out_gather_ptr + row, chosen.to(tl.int64), mask=row < num_logits)
    tl.store(out_slot_ptr + row, tl.where(work >= 0, slot, -1), mask=row < num_logits)
    tl.store(out_decided_ptr + row, position + 1, mask=row < num_logits)
    tl.store(out_drafted_ptr + row, tl.maximum(position + 1 - length, 0), mask=row < num_logits)


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
    """Tokens, positions and KV slots of a batch's rows, context lengths of its works, positions of its logit rows.

    Written: `tokens`, `positions`, `slot_mapping` [rows], `context_len` [works], then for every logit row its query row
    (`gather`, int64), its sequence's slot (-1: padding), the position that it decides, and the number of draft tokens
    before that.
    """
    num_rows, num_logits = len(row_work), len(logit_rows)
    _rows_kernel[(triton.cdiv(max(num_rows, num_logits), ROWS),)](
        *(row_work, slots, starts, query_start, logit_rows, state.length, state.token_ids, state.drafts, tables),
        *(tokens, positions, slot_mapping, context_len, gather, decided_slot, decided, num_drafted),
        *(num_rows, num_logits, state.token_ids.stride(0), state.drafts.stride(0), tables.stride(0)),
        KV_BLOCK=block_size,
        BLOCK=ROWS,
    )


@triton.jit(do_not_specialize=["token_stride", "max_len", "draft_stride", "out_stride", "vocab_size"])
def _accept_kernel(
    chosen_ptr,
    slots_ptr,
    first_row_ptr,
    num_logits_ptr,
    length_ptr,
    token_ids_ptr,
    drafts_ptr,
    accepted_ptr,
    origin_ptr,
    out_ptr,
    token_stride,
    max_len,
    draft_stride,
    out_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    work = tl.program_id(0)
    first = tl.load(first_row_ptr + work)
    if first < 0:
        return
    slot = tl.load(slots_ptr + work).to(tl.int64)
    length = tl.load(length_ptr + slot)
    count = tl.load(num_logits_ptr + work)
    j = tl.arange(0, BLOCK)
    chosen = tl.load(chosen_ptr + first + j, mask=j < count, other=0)
    chosen = tl.minimum(chosen, vocab_size - 1)  # logits beyond the end of a sequence are undefined
    draft = tl.load(drafts_ptr + slot * draft_stride + j, mask=j < count - 1, other=-1)
    equal = (chosen == draft) & (j < count - 1)
    accepted = tl.min(tl.where(equal, BLOCK, j), axis=0)
    decided = (j <= accepted) & (length + j < max_len)
    tl.store(token_ids_ptr + slot * token_stride + length + j, tl.maximum(chosen, 0), mask=decided)
    tl.store(length_ptr + slot, tl.minimum(length + accepted + 1, max_len))
    tl.store(accepted_ptr + slot, accepted)
    out = out_ptr + work * out_stride
    tl.store(out, accepted + 1)
    tl.store(out + 1, tl.load(origin_ptr + slot))
    tl.store(out + 2 + j, chosen, mask=j < count)
    tl.store(out + 3 + draft_stride + j, draft, mask=j < count - 1)


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
    """Accepts draft tokens while they equal the target's choice, then adds the target's own token.

    Row w of `out`: number of new tokens, origin of the draft, the new tokens (K + 1 columns), the draft (K columns).
    A choice of -1 (there is none) is passed on to the host in `out`, and token 0 to the next round.
    """
    _accept_kernel[(len(slots),)](
        *(chosen, slots, first_row, num_logits, state.length, state.token_ids, state.drafts, state.num_accepted),
        *(state.origin, out),
        *(state.token_ids.stride(0), state.token_ids.shape[1], state.drafts.stride(0), out.stride(0), vocab_size),
        BLOCK=triton.next_power_of_2(state.drafts.shape[1] + 1),
    )


@triton.jit(do_not_specialize=["num_rows", "width"])
def _nodes_kernel(
    row_work_ptr,
    slots_ptr,
    starts_ptr,
    query_start_ptr,
    length_ptr,
    parents_ptr,
    out_position_ptr,
    out_paths_ptr,
    out_shared_ptr,
    out_before_ptr,
    num_rows,
    width,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    work = tl.load(row_work_ptr + row, mask=inside, other=-1)
    tree = work >= 0
    tree = tree & (tl.load(starts_ptr + work, mask=tree, other=0) < 0)
    slot = tl.load(slots_ptr + work, mask=tree, other=0).to(tl.int64)
    first = tl.load(query_start_ptr + work, mask=tree, other=0)
    decided = tl.load(length_ptr + slot, mask=tree, other=1)
    parents = parents_ptr + slot * width
    node = tl.where(tree, row - first - 1, -1)
    i, above, wrong = node, tl.zeros((BLOCK,), tl.int32), node < -1
    for _ in range(DEPTH + 1):
        climbs = i >= 0
        parent = tl.load(parents + i, mask=climbs, other=-1)
        wrong = wrong | (climbs & ((parent < -1) | (parent >= i)))
        above += climbs.to(tl.int32)
        i = tl.where(wrong, -1, tl.where(climbs, parent, i))
    above = tl.where(wrong | (above > DEPTH), 0, above)
    tl.store(out_position_ptr + row, decided - 1 + above, mask=tree)
    tl.store(out_shared_ptr + row, tl.where(tree, decided, FAR), mask=inside)
    parent = tl.load(parents + node, mask=above > 0, other=-1)
    tl.store(out_before_ptr + row, tl.where(tree, first + 1 + parent, tl.maximum(row - 1, 0)), mask=inside)
    i = node
    for j in range(DEPTH):
        climbs = j < above
        tl.store(out_paths_ptr + row * DEPTH + above - 1 - j, first + 1 + i, mask=climbs)
        i = tl.load(parents + i, mask=climbs, other=-1)


@triton.jit(do_not_specialize=["num_logits", "width"])
def _node_logits_kernel(
    logit_rows_ptr,
    row_work_ptr,
    slots_ptr,
    starts_ptr,
    query_start_ptr,
    mapping_ptr,
    length_ptr,
    drafts_ptr,
    positions_ptr,
    paths_ptr,
    out_slot_ptr,
    out_decided_ptr,
    out_drafted_ptr,
    out_tokens_ptr,
    num_logits,
    width,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(logit_rows_ptr + i, mask=i < num_logits, other=-1)
    work = tl.load(row_work_ptr + row, mask=row >= 0, other=-1)
    tree = work >= 0
    tree = tree & (tl.load(starts_ptr + work, mask=tree, other=0) < 0)
    slot = tl.load(slots_ptr + work, mask=tree, other=0).to(tl.int64)
    first = tl.load(query_start_ptr + work, mask=tree, other=0)
    next_position = tl.load(positions_ptr + row, mask=tree, other=0) + 1
    above = next_position - tl.load(length_ptr + slot, mask=tree, other=1)
    missing = (above == 0) | (tl.load(mapping_ptr + row, mask=tree, other=0) < 0)
    tl.store(out_slot_ptr + i, -1, mask=tree & (row > first) & missing)
    tl.store(out_decided_ptr + i, next_position, mask=tree)
    tl.store(out_drafted_ptr + i, above, mask=tree)
    for j in range(DEPTH):
        drafted = tree & (j < above)
        node = tl.load(paths_ptr + row * DEPTH + j, mask=drafted, other=0) - first - 1
        token = tl.load(drafts_ptr + slot * width + node, mask=drafted, other=0)
        tl.store(out_tokens_ptr + i * DEPTH + j, token, mask=drafted)


def place_nodes(
    state: StateView,
    *,
    parents: torch.Tensor,
    row_work: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    query_start: torch.Tensor,
    slot_mapping: torch.Tensor,
    logit_rows: torch.Tensor,
    positions: torch.Tensor,
    paths: torch.Tensor,
    shared: torch.Tensor,
    before: torch.Tensor,
    decided_slot: torch.Tensor,
    decided: torch.Tensor,
    num_drafted: torch.Tensor,
    path_tokens: torch.Tensor,
) -> None:
    """After `prepare_rows`, where drafts are trees: node i of a sequence is row 1 + i of its work, one without a start.

    Written: `positions` of these rows, `paths` and `shared` (see `TreePaths`), `before`: the row of the token before,
    then of their logit rows the position that each decides, and the draft tokens before that: `path_tokens` [logits,
    depth], `num_drafted` of them. A node without a KV slot, behind too many others, or before its parent is padding:
    its `decided_slot` is -1.
    """
    num_rows, depth, num_logits, width = len(row_work), paths.shape[1], len(logit_rows), parents.stride(0)
    rows = row_work, slots, starts, query_start
    _nodes_kernel[(triton.cdiv(num_rows, ROWS),)](
        *(*rows, state.length, parents, positions, paths, shared, before, num_rows, width), DEPTH=depth, BLOCK=ROWS
    )
    _node_logits_kernel[(triton.cdiv(num_logits, ROWS),)](
        *(logit_rows, *rows, slot_mapping, state.length, state.drafts, positions, paths),
        *(decided_slot, decided, num_drafted, path_tokens, num_logits, width),
        DEPTH=depth,
        BLOCK=ROWS,
    )


@triton.jit(do_not_specialize=["token_stride", "max_len", "width", "out_stride", "vocab_size"])
def _accept_node_kernel(
    chosen_ptr,
    slots_ptr,
    first_row_ptr,
    num_logits_ptr,
    decided_slot_ptr,
    length_ptr,
    token_ids_ptr,
    drafts_ptr,
    parents_ptr,
    path_ptr,
    accepted_ptr,
    origin_ptr,
    out_ptr,
    token_stride,
    max_len,
    width,
    out_stride,
    vocab_size,
    BLOCK: tl.constexpr,
):
    work = tl.program_id(0)
    first = tl.load(first_row_ptr + work)
    if first < 0:
        return
    slot = tl.load(slots_ptr + work).to(tl.int64)
    length = tl.load(length_ptr + slot)
    nodes = tl.load(num_logits_ptr + work) - 1
    j = tl.arange(0, BLOCK)
    draft = tl.load(drafts_ptr + slot * width + j, mask=j < nodes, other=-1)
    parents = tl.load(parents_ptr + slot * width + j, mask=j < nodes, other=-2)
    parents = tl.where(tl.load(decided_slot_ptr + first + 1 + j, mask=j < nodes, other=-1) < 0, -2, parents)
    after = tl.minimum(tl.load(chosen_ptr + first + 1 + j, mask=j < nodes, other=0), vocab_size - 1)
    token = tl.minimum(tl.load(chosen_ptr + first), vocab_size - 1)  # logits beyond a sequence's end are undefined
    text, out, path = token_ids_ptr + slot * token_stride + length, out_ptr + work * out_stride, path_ptr + slot * width
    tl.store(text, tl.maximum(token, 0), mask=length < max_len)
    tl.store(out + 2, token)
    node, accepted = tl.full((), -1, tl.int32), tl.full((), 0, tl.int32)
    for _ in range(nodes):
        node = tl.min(tl.where((parents == node) & (draft == token), j, FAR), axis=0)
        found = node < FAR
        token = tl.where(found, tl.sum(tl.where(j == node, after, 0), axis=0), token)
        tl.store(path + accepted, node, mask=found)
        tl.store(out + 3 + 2 * width + accepted, node, mask=found)
        accepted += found.to(tl.int32)
        tl.store(text + accepted, tl.maximum(token, 0), mask=found & (length + accepted < max_len))
        tl.store(out + 2 + accepted, token, mask=found)
    tl.store(length_ptr + slot, tl.minimum(length + accepted + 1, max_len))
    tl.store(accepted_ptr + slot, accepted)
    tl.store(out, accepted + 1)
    tl.store(out + 1, tl.load(origin_ptr + slot))
    tl.store(out + 3 + width + j, draft, mask=j < nodes)


def accept_node(
    state: StateView,
    *,
    parents: torch.Tensor,
    path: torch.Tensor,
    chosen: torch.Tensor,
    slots: torch.Tensor,
    first_row: torch.Tensor,
    num_logits: torch.Tensor,
    decided_slot: torch.Tensor,
    out: torch.Tensor,
    vocab_size: int,
) -> None:
    """`accept` of trees: from the last decided token on, the child that equals the choice is accepted, if there is one.

    Row w of `out` as there, then the accepted nodes (K columns), which are also written to `path`. A node whose
    `decided_slot` is -1 is not there.
    """
    _accept_node_kernel[(len(slots),)](
        *(chosen, slots, first_row, num_logits, decided_slot, state.length, state.token_ids, state.drafts),
        *(parents, path, state.num_accepted, state.origin, out),
        *(state.token_ids.stride(0), state.token_ids.shape[1], parents.stride(0), out.stride(0), vocab_size),
        BLOCK=triton.next_power_of_2(parents.shape[1]),
    )


@triton.jit(do_not_specialize=["columns", "width", "table_stride"])
def _move_kernel(
    slots_ptr,
    first_row_ptr,
    length_ptr,
    accepted_ptr,
    path_ptr,
    tables_ptr,
    caches_ptr,  # int64
    columns,
    width,
    table_stride,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    work = tl.program_id(0)
    if tl.load(first_row_ptr + work) < 0:
        return
    slot = tl.load(slots_ptr + work).to(tl.int64)
    accepted, length = tl.load(accepted_ptr + slot), tl.load(length_ptr + slot)
    if length >= columns:  # far beyond the sequence's end
        return
    first, table = length - accepted - 1, tables_ptr + slot * table_stride
    cache = tl.load(caches_ptr + 2 * tl.program_id(1)).to(tl.pointer_type(tl.int32))
    words = tl.load(caches_ptr + 2 * tl.program_id(1) + 1) // 4
    for j in range(accepted):
        source, to = first + tl.load(path_ptr + slot * width + j), first + j
        if (source != to) & (source // KV_BLOCK < tl.load(table)):
            block = tl.load(table + 1 + source // KV_BLOCK).to(tl.int64)
            own = cache + (block * KV_BLOCK + source % KV_BLOCK) * words
            block = tl.load(table + 1 + to // KV_BLOCK).to(tl.int64)
            target = cache + (block * KV_BLOCK + to % KV_BLOCK) * words
            for begin in range(0, words, BLOCK):
                i = begin + tl.arange(0, BLOCK)
                tl.store(target + i, tl.load(own + i, mask=i < words), mask=i < words)


def move_accepted(
    state: StateView,
    *,
    path: torch.Tensor,
    slots: torch.Tensor,
    first_row: torch.Tensor,
    tables: torch.Tensor,
    caches: torch.Tensor,
    block_size: int,
) -> None:
    """After `accept_node`: moves the KV of accepted nodes to the slots of their positions, unless it is there.

    `caches`: int64 [tensors, 2], address of each tensor and bytes of a token in it, a multiple of 4. None is read
    after it was overwritten: a node is never before its place in the path.
    """
    _move_kernel[(len(slots), len(caches))](
        *(slots, first_row, state.length, state.num_accepted, path, tables, caches),
        *(state.token_ids.shape[1], path.stride(0), tables.stride(0)),
        KV_BLOCK=block_size,
        BLOCK=WORDS,
    )
