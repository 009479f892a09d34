"""Kernels of draft runs (`ssd.drafting.runner`) over the SequenceState: their rows, look-up and storing of drafts.

`*_ptr` are int32 unless stated otherwise.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.state import StateView
from ssd.kernels.triton.rounds import FAR, ROWS, WORDS, token_at


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
    block, words = WORDS // 4, 0 if states is None else states.shape[1] * states.itemsize // 4
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
    token = token_at(slot, first + j, length, token_ids_ptr, drafts_ptr, token_stride, draft_stride, j < count)
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
    match = tl.min(tl.where(exact, i, FAR), axis=0)
    sibling = tl.min(tl.where(same_length, i, FAR), axis=0)
    chosen = tl.where(match < FAR, match, sibling)
    found = chosen < FAR
    j = tl.arange(0, BLOCK)
    row = sequence * width + tl.where(found, chosen, 0)
    at = row.to(tl.int64) * chain_stride + 1 + j
    inside = found & (j < depth)
    tl.store(drafts_ptr + slot * draft_stride + j, tl.load(chain_ptr + at, mask=inside, other=0), mask=inside)
    confidence = tl.load(chain_confidence_ptr + at, mask=inside, other=0.0)
    tl.store(confidence_ptr + slot * draft_stride + j, tl.where(match < FAR, confidence, 0.0), mask=j < draft_stride)
    tl.store(origin_ptr + slot, tl.where(match < FAR, hit, miss))
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
    _extend_kernel[(triton.cdiv(rows, ROWS),)](
        *(slots, first, count, count if after is None else after, chain),
        *(tokens, positions, slot_mapping, decided, row_slots),
        *(rows, 0 if after is None else after.stride(0), chain.stride(0)),
        *(width, depth, reads, first_slot, slots_per_branch, vocab_size),
        BRANCHES=after is not None,
        BLOCK=ROWS,
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
    _block_kernel[(triton.cdiv(rows, ROWS),)](
        *(slots, state.length, state.token_ids, tables),
        *(tokens, positions, slot_mapping, context_len, row_slots, decided, decided_slot),
        *(rows, rows // sequences, count, state.token_ids.stride(0), tables.stride(0), *decided.stride(), mask_token),
        KV_BLOCK=block_size,
        BLOCK=ROWS,
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
    _keep_kernel[(triton.cdiv(len(best), ROWS),)](
        *(best, scores, chain, confidence, len(best), best.stride(0), chain.stride(0), column, each),
        MAX=max_confidence,
        BLOCK=ROWS,
    )
