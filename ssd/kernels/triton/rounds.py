"""Kernels over the SequenceState (`ssd.execution.state`): inputs of a batch, acceptance, inputs and drafts of drafters.

They let a round be launched before the host knows what the round before it decided. `*_ptr` are int32 unless stated
otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.state import StateView

_ROWS = 128  # rows of one program
_WORDS = 1024  # of 4 bytes that are moved at once
_FAR = tl.constexpr(1 << 30)


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
def _token_at(slot, position, length, token_ids_ptr, drafts_ptr, token_stride, draft_stride, mask):
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
    token = _token_at(slot, position, length, token_ids_ptr, drafts_ptr, token_stride, draft_stride, real)
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
    _rows_kernel[(triton.cdiv(max(num_rows, num_logits), _ROWS),)](
        *(row_work, slots, starts, query_start, logit_rows, state.length, state.token_ids, state.drafts, tables),
        *(tokens, positions, slot_mapping, context_len, gather, decided_slot, decided, num_drafted),
        *(num_rows, num_logits, state.token_ids.stride(0), state.drafts.stride(0), tables.stride(0)),
        KV_BLOCK=block_size,
        BLOCK=_ROWS,
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
    tl.store(out_shared_ptr + row, tl.where(tree, decided, _FAR), mask=inside)
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
    _nodes_kernel[(triton.cdiv(num_rows, _ROWS),)](
        *(*rows, state.length, parents, positions, paths, shared, before, num_rows, width), DEPTH=depth, BLOCK=_ROWS
    )
    _node_logits_kernel[(triton.cdiv(num_logits, _ROWS),)](
        *(logit_rows, *rows, slot_mapping, state.length, state.drafts, positions, paths),
        *(decided_slot, decided, num_drafted, path_tokens, num_logits, width),
        DEPTH=depth,
        BLOCK=_ROWS,
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
        node = tl.min(tl.where((parents == node) & (draft == token), j, _FAR), axis=0)
        found = node < _FAR
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
        BLOCK=_WORDS,
    )


@triton.jit
def _follow_words(memory, to, source, inside, i, words):
    mask = inside[:, None] & (i < words)[None, :]
    kept = tl.load(memory + source[:, None] + i[None, :], mask=mask)
    tl.debug_barrier()  # all rows are read before one is written
    tl.store(memory + to[:, None] + i[None, :], kept, mask=mask)


@triton.jit(do_not_specialize=["beams", "depth", "first_slot", "slots_per_branch"])
def _follow_kernel(
    above_ptr,  # int64
    caches_ptr,  # int64
    states_ptr,
    num_caches,
    state_words,
    beams,
    depth,
    first_slot,
    slots_per_branch,
    BEAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * beams + tl.arange(0, BEAMS)
    inside = tl.arange(0, BEAMS) < beams
    source = tl.load(above_ptr + row, mask=inside, other=0)
    part = tl.program_id(2)
    if tl.program_id(1) < num_caches:
        if part < depth:
            cache = tl.load(caches_ptr + 2 * tl.program_id(1)).to(tl.pointer_type(tl.int32))
            words = tl.load(caches_ptr + 2 * tl.program_id(1) + 1) // 4
            to = (first_slot + row * slots_per_branch + part) * words
            begin = (first_slot + source * slots_per_branch + part) * words
            for first in range(0, words, BLOCK):
                _follow_words(cache, to, begin, inside, first + tl.arange(0, BLOCK), words)
    elif states_ptr is not None:
        i = part * BLOCK + tl.arange(0, BLOCK)
        _follow_words(states_ptr, row * state_words, source * state_words, inside, i, state_words)


def follow_rows(
    *,
    above: torch.Tensor,
    caches: torch.Tensor,
    beams: int,
    depth: int,
    first_slot: int,
    slots_per_branch: int,
    states: torch.Tensor | None,
) -> None:
    """Gives each row of a draft run the KV of `depth` tokens of the row that it follows, and its hidden state.

    `above`: int64, one for each row; a sequence has `beams` rows, which follow each other only. KV slots are those of
    `extend_rows`, `caches` as for `move_accepted`. `states`: [rows, width], or None.
    """
    block, words = _WORDS // 4, 0 if states is None else states.shape[1] * states.itemsize // 4
    _follow_kernel[(len(above) // beams, len(caches) + (words > 0), max(depth, triton.cdiv(words, block)))](
        *(above, caches, None if states is None else states.view(torch.int32), len(caches), words),
        *(beams, depth, first_slot, slots_per_branch),
        BEAMS=triton.next_power_of_2(beams),
        BLOCK=block,
    )


@triton.jit(do_not_specialize=["token_stride", "draft_stride", "reads", "vocab_size", "hit_origin"])
def _stage_kernel(
    slots_ptr,
    num_drafted_ptr,
    length_ptr,
    token_ids_ptr,
    drafts_ptr,
    confidence_ptr,
    origin_ptr,
    computed_ptr,
    first_ptr,
    count_ptr,
    tokens_ptr,
    verified_ptr,
    hit_ptr,
    hit_origin,
    token_stride,
    draft_stride,
    reads,
    vocab_size,
    FORK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence)
    length = tl.load(length_ptr + slot)
    drafted = tl.load(num_drafted_ptr + sequence)
    first = length - 1
    if not FORK:
        first = tl.maximum(tl.minimum(tl.load(computed_ptr + slot), first), length - reads)
    count = length - first + drafted
    j = tl.arange(0, BLOCK)
    token = _token_at(slot, first + j, length, token_ids_ptr, drafts_ptr, token_stride, draft_stride, j < count)
    tl.store(first_ptr + sequence, first)
    tl.store(count_ptr + sequence, count)
    tl.store(tokens_ptr + sequence * (reads + 1) + j, tl.minimum(token, vocab_size - 1), mask=j <= reads)
    tl.store(computed_ptr + slot, first + count)
    if FORK:
        confidence = tl.load(confidence_ptr + slot.to(tl.int64) * draft_stride + j, mask=j < draft_stride, other=0.0)
        tl.store(verified_ptr + sequence * draft_stride + j, confidence, mask=j < draft_stride)
        tl.store(hit_ptr + sequence, (tl.load(origin_ptr + slot) == hit_origin).to(tl.int32))


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
    """Inputs of a draft model's run: first position, number of tokens and tokens of each sequence.

    Without `fork`: the decided tokens that have no KV in the draft model. With `fork`: the last decided token and the
    draft under verification, its confidence, and whether it was a hit. `computed` becomes the number of tokens with KV
    after the run.
    """
    _stage_kernel[(len(slots),)](
        *(slots, num_drafted, state.length, state.token_ids, state.drafts, state.confidence, state.origin),
        *(computed, first, count, tokens, verified_confidence, hit, hit_origin),
        *(state.token_ids.stride(0), state.drafts.stride(0), tokens.shape[1] - 1, vocab_size),
        FORK=fork,
        BLOCK=triton.next_power_of_2(max(tokens.shape[1], state.drafts.shape[1])),
    )


@triton.jit(
    do_not_specialize=[
        *("reads", "given_stride", "table_stride", "table_columns", "padding_slot", "sequences", "depths"),
        *("first_slot", "slots_per_branch"),
    ]
)
def _read_kernel(
    slots_ptr,
    first_ptr,
    count_ptr,
    given_ptr,
    tables_ptr,
    table_rows_ptr,
    tokens_ptr,
    positions_ptr,
    mapping_ptr,
    context_ptr,
    decided_ptr,
    last_ptr,  # int64
    beams_ptr,
    reads,
    given_stride,
    table_stride,
    table_columns,
    padding_slot,
    sequences,
    depths,
    first_slot,
    slots_per_branch,
    WIDTH: tl.constexpr,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    BEAMS: tl.constexpr,
):
    sequence = tl.program_id(0)
    first, count = tl.load(first_ptr + sequence), tl.load(count_ptr + sequence)
    table = tables_ptr + tl.load(table_rows_ptr + sequence).to(tl.int64) * table_stride
    j = tl.arange(0, BLOCK)
    inside, position = j < reads, first + j
    index = position // KV_BLOCK
    known = inside & (j < count) & (index < tl.minimum(tl.load(table), table_columns - 1))
    block = tl.load(table + 1 + index, mask=known, other=0)
    row = sequence * reads + j
    token = tl.load(given_ptr + sequence * given_stride + j, mask=inside, other=0)
    tl.store(tokens_ptr + row, token, mask=inside)
    tl.store(positions_ptr + row, position, mask=inside)
    slot = tl.where(known, block * KV_BLOCK + position % KV_BLOCK, padding_slot)
    tl.store(mapping_ptr + row, slot, mask=inside)
    read = tl.minimum(count, reads)
    tl.store(context_ptr + sequence, first + reads)
    tl.store(decided_ptr + sequence, first + read)
    tl.store(last_ptr + sequence, (sequence * reads + read - 1).to(tl.int64))
    if beams_ptr is not None:
        b = tl.arange(0, BEAMS)
        beam, rows = sequence * WIDTH + b, sequences * WIDTH
        for depth in range(depths):
            at = beams_ptr + depth * 4 * rows + beam
            tl.store(at, tl.zeros((BEAMS,), tl.int32) + first + read + depth, mask=b < WIDTH)
            tl.store(at + rows, first_slot + beam * slots_per_branch + depth, mask=b < WIDTH)
            tl.store(at + 2 * rows, tl.zeros((BEAMS,), tl.int32) + first + read + depth + 1, mask=b < WIDTH)
            tl.store(at + 3 * rows, tl.zeros((BEAMS,), tl.int32) + tl.load(slots_ptr + sequence), mask=b < WIDTH)


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
    """Inputs of the forward pass that reads `given` [sequences, some]: of each sequence as many tokens as rows are
    there for. Of its `count` tokens and no others the KV is written to its blocks, `table_rows` of the tables.

    Written, per row: token, position, KV slot. Per sequence: the end of the rows' positions, the position that its last
    token decides, and the row of that token (`last`, int64). `beams` [depths, 4, rows of beams] or None: positions, KV
    slots, positions decided and slots of sequences of the rows behind it, as those of `extend_rows`.
    """
    n = len(slots)
    width = 1 if beams is None else beams.shape[2] // n
    _read_kernel[(n,)](
        *(slots, first, count, given, tables, table_rows),
        *(tokens, positions, slot_mapping, context_len, decided, last, beams),
        *(len(tokens) // n, given.stride(0), tables.stride(0), tables.shape[1], padding_slot),
        *(n, 0 if beams is None else len(beams), first_slot, slots_per_branch),
        WIDTH=width,
        KV_BLOCK=block_size,
        BLOCK=triton.next_power_of_2(len(tokens) // n),
        BEAMS=triton.next_power_of_2(width),
        num_warps=1,
    )


@triton.jit(
    do_not_specialize=["width", "depth", "after_stride", "token_stride", "draft_stride", "chain_stride", "hit", "miss"]
)
def _look_up_kernel(
    slots_ptr,
    after_ptr,
    chain_ptr,
    chain_confidence_ptr,
    length_ptr,
    token_ids_ptr,
    accepted_ptr,
    drafts_ptr,
    confidence_ptr,
    origin_ptr,
    row_ptr,
    width,
    depth,
    after_stride,
    token_stride,
    draft_stride,
    chain_stride,
    hit,
    miss,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    last = tl.load(token_ids_ptr + slot * token_stride + tl.load(length_ptr + slot) - 1)
    accepted = tl.load(accepted_ptr + slot)
    i = tl.arange(0, WIDTH)
    row = sequence * width + i
    same_length = (tl.load(after_ptr + sequence * after_stride + i, mask=i < width, other=-1) == accepted) & (i < width)
    exact = same_length & (tl.load(chain_ptr + row.to(tl.int64) * chain_stride, mask=i < width, other=-1) == last)
    match = tl.min(tl.where(exact, i, _FAR), axis=0)
    sibling = tl.min(tl.where(same_length, i, _FAR), axis=0)
    chosen = tl.where(match < _FAR, match, sibling)
    found = chosen < _FAR
    j = tl.arange(0, BLOCK)
    row = sequence * width + tl.where(found, chosen, 0)
    at = row.to(tl.int64) * chain_stride + 1 + j
    inside = found & (j < depth)
    tl.store(drafts_ptr + slot * draft_stride + j, tl.load(chain_ptr + at, mask=inside, other=0), mask=inside)
    confidence = tl.load(chain_confidence_ptr + at, mask=inside, other=0.0)
    tl.store(confidence_ptr + slot * draft_stride + j, tl.where(match < _FAR, confidence, 0.0), mask=j < draft_stride)
    tl.store(origin_ptr + slot, tl.where(match < _FAR, hit, miss))
    tl.store(row_ptr + sequence, row)


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
    """Copies the draft that was prepared for the last outcome to the state; after a miss that of a sibling branch.

    `hit` and `miss` are the values of `origin` for the two. `rows`, written: the row of the chain that was copied for
    each sequence (its first, if there is neither).
    """
    width, (tokens, drafts) = after.shape[1], (state.token_ids, state.drafts)
    _look_up_kernel[(len(slots),)](
        *(slots, after, chain, chain_confidence, state.length, tokens, state.num_accepted, drafts),
        *(state.confidence, state.origin, rows),
        *(width, depth, after.stride(0), tokens.stride(0), drafts.stride(0), chain.stride(0), hit, miss),
        WIDTH=triton.next_power_of_2(width),
        BLOCK=triton.next_power_of_2(drafts.shape[1]),
    )


@triton.jit(do_not_specialize=["count", "draft_stride", "chain_stride", "value"])
def _store_kernel(
    slots_ptr,
    chain_ptr,
    chain_confidence_ptr,
    drafts_ptr,
    confidence_ptr,
    origin_ptr,
    count,
    draft_stride,
    chain_stride,
    value,
    BLOCK: tl.constexpr,
):
    sequence = tl.program_id(0)
    slot = tl.load(slots_ptr + sequence).to(tl.int64)
    j = tl.arange(0, BLOCK)
    inside = j < count
    at = sequence.to(tl.int64) * chain_stride + j
    tl.store(drafts_ptr + slot * draft_stride + j, tl.load(chain_ptr + at, mask=inside, other=0), mask=inside)
    confidence = tl.load(chain_confidence_ptr + at, mask=inside, other=0.0)
    tl.store(confidence_ptr + slot * draft_stride + j, confidence, mask=inside)
    tl.store(origin_ptr + slot, value)


def store(
    state: StateView,
    *,
    slots: torch.Tensor,
    chain: torch.Tensor,
    chain_confidence: torch.Tensor,
    count: int,
    value: int,
) -> None:
    """Copies the first `count` tokens of each sequence's chain to its draft, with origin `value`."""
    _store_kernel[(len(slots),)](
        *(slots, chain, chain_confidence, state.drafts, state.confidence, state.origin),
        *(count, state.drafts.stride(0), chain.stride(0), value),
        BLOCK=triton.next_power_of_2(state.drafts.shape[1]),
    )


@triton.jit(
    do_not_specialize=[
        *("num_rows", "after_stride", "chain_stride", "width", "depth", "reads", "first_slot", "slots_per_branch"),
    ]
)
def _extend_kernel(
    slots_ptr,
    first_ptr,
    count_ptr,
    after_ptr,
    chain_ptr,
    out_token_ptr,
    out_position_ptr,
    out_mapping_ptr,
    out_decided_ptr,
    out_slot_ptr,
    num_rows,
    after_stride,
    chain_stride,
    width,
    depth,
    reads,
    first_slot,
    slots_per_branch,
    vocab_size,
    BRANCHES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    sequence = row // width
    if BRANCHES:
        read = tl.load(after_ptr + sequence * after_stride + row % width, mask=inside, other=0) + 1
    else:
        read = tl.minimum(tl.load(count_ptr + sequence, mask=inside, other=0), reads)
    position = tl.load(first_ptr + sequence, mask=inside, other=0) + read + depth
    token = tl.load(chain_ptr + row.to(tl.int64) * chain_stride + depth, mask=inside, other=0)
    tl.store(out_token_ptr + row, tl.minimum(token, vocab_size - 1), mask=inside)
    tl.store(out_position_ptr + row, position, mask=inside)
    tl.store(out_mapping_ptr + row, first_slot + row * slots_per_branch + depth, mask=inside)
    tl.store(out_decided_ptr + row, position + 1, mask=inside)
    tl.store(out_slot_ptr + row, tl.load(slots_ptr + sequence, mask=inside, other=0), mask=inside)


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
    """Inputs of a draft run's next forward pass: the newest token of every row (column `depth` of the chain).

    Tokens beyond `vocab_size`, the draft's, become its last one: they have no embedding.
    `after`: accepted tokens before each branch of every sequence; None: one row per sequence, after the tokens read.
    Row r has the KV slots from `first_slot + r * slots_per_branch` on. Written, per row: token, position, KV slot,
    position that it decides, slot of its sequence.
    """
    rows, width = len(tokens), 1 if after is None else after.shape[1]
    _extend_kernel[(triton.cdiv(rows, _ROWS),)](
        *(slots, first, count, count if after is None else after, chain),
        *(tokens, positions, slot_mapping, decided, row_slots),
        *(rows, 0 if after is None else after.stride(0), chain.stride(0)),
        *(width, depth, reads, first_slot, slots_per_branch, vocab_size),
        BRANCHES=after is not None,
        BLOCK=_ROWS,
    )


@triton.jit(
    do_not_specialize=[
        *("num_rows", "queries", "count", "token_stride", "table_stride", "sequence_stride", "place_stride"),
        "mask_token",
    ]
)
def _block_kernel(
    slots_ptr,
    length_ptr,
    token_ids_ptr,
    tables_ptr,
    out_token_ptr,
    out_position_ptr,
    out_mapping_ptr,
    out_context_ptr,
    out_slot_ptr,
    out_decided_ptr,
    out_decided_slot_ptr,
    num_rows,
    queries,
    count,
    token_stride,
    table_stride,
    sequence_stride,
    place_stride,
    mask_token,
    KV_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = row < num_rows
    sequence, place = row // queries, row % queries
    slot = tl.load(slots_ptr + sequence, mask=inside, other=0)
    first = tl.load(length_ptr + slot, mask=inside, other=1) - 1
    at = slot.to(tl.int64) * token_stride + first
    token = tl.load(token_ids_ptr + at, mask=inside & (place == 0), other=0)
    position = first + place
    index = position // KV_BLOCK
    table = tables_ptr + slot.to(tl.int64) * table_stride
    inside_table = inside & (index < tl.load(table, mask=inside, other=0))
    block = tl.load(table + 1 + index, mask=inside_table, other=-1)
    tl.store(out_token_ptr + row, tl.where(place == 0, token, mask_token), mask=inside)
    tl.store(out_position_ptr + row, position, mask=inside)
    tl.store(out_mapping_ptr + row, tl.where(block >= 0, block * KV_BLOCK + position % KV_BLOCK, -1), mask=inside)
    tl.store(out_context_ptr + row, first + queries, mask=inside)
    tl.store(out_slot_ptr + row, slot, mask=inside)
    written = place - queries + count
    out = sequence * sequence_stride + written * place_stride
    tl.store(out_decided_ptr + out, first + 1 + written, mask=inside & (written >= 0))
    tl.store(out_decided_slot_ptr + out, slot, mask=inside & (written >= 0))


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
    """Inputs of a block draft: for each sequence its last decided token and, behind that, masks.

    Written for every row, those of a sequence in turn: token, position, KV slot (-1: none), end of the block, slot of
    the sequence; then, for every token that is written [sequences, count], its position and the slot. The two of these
    have the same strides.
    """
    rows, (sequences, count) = len(tokens), decided.shape
    _block_kernel[(triton.cdiv(rows, _ROWS),)](
        *(slots, state.length, state.token_ids, tables),
        *(tokens, positions, slot_mapping, context_len, row_slots, decided, decided_slot),
        *(rows, rows // sequences, count, state.token_ids.stride(0), tables.stride(0), *decided.stride(), mask_token),
        KV_BLOCK=block_size,
        BLOCK=_ROWS,
    )


@triton.jit(do_not_specialize=["num_rows", "best_stride", "chain_stride", "column", "each"])
def _keep_kernel(
    best_ptr,
    scores_ptr,
    chain_ptr,
    confidence_ptr,
    num_rows,
    best_stride,
    chain_stride,
    column,
    each,
    MAX: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = row < num_rows
    at = row // each * chain_stride + column + row % each
    token = tl.load(best_ptr + row * best_stride, mask=inside, other=0)
    tl.store(chain_ptr + at, tl.maximum(token, 0), mask=inside)  # -1: there is no choice
    one = tl.load(scores_ptr + row * best_stride, mask=inside, other=0.0)
    two = tl.load(scores_ptr + row * best_stride + 1, mask=inside, other=0.0)
    margin = one - two
    margin = tl.where(margin == margin, tl.minimum(margin, MAX), 0.0)  # NaN: there is no second token
    tl.store(confidence_ptr + at, margin, mask=inside)


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
    """Stores the best of two tokens per row in the chain, with the margin of its score as confidence.

    `each` rows in turn are those of one row of the chain, from `column` on.
    """
    _keep_kernel[(triton.cdiv(len(best), _ROWS),)](
        *(best, scores, chain, confidence, len(best), best.stride(0), chain.stride(0), column, each),
        MAX=max_confidence,
        BLOCK=_ROWS,
    )
