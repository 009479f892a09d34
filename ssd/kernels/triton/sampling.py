"""The kernels of the sampler on a GPU (see `ssd.sampling.sampler` for what it computes).

Truncation is a radix select, without a sort. A token's key is (distance from the largest logit, id) as an integer of 44
bits: the order in which top_k and top_p keep tokens. The last key that is kept is found 11 bits at a time: tokens whose
key begins with the bits found so far add their weight (1 for top_k, an integer probability mass for top_p) to one of
2048 bins by their next 11 bits; the bin that reaches the limit gives these. All sums are of integers, hence exact in
any order. The last program of a row to finish a level selects the bin.

Noise is float64, which is slow. For many rows a first kernel bounds all scores in float32; those whose upper bound is
below the lower bound of enough others cannot be among the best, and are not computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ssd.kernels.state import Columns

_BLOCK = 1024  # tokens per load
_TOKEN_BITS = tl.constexpr(19)
_BIN_BITS = tl.constexpr(11)
_BINS = tl.constexpr(2048)
_LEVELS = 4  # of 11 bits: 25 of the distance, 19 of the id
_TOP_K, _TOP_P = tl.constexpr(0), tl.constexpr(1)  # the two selections
# Scratch of a row, in int64: the bins, then
_ARRIVED = tl.constexpr(2048)  # programs that have finished this level
_TOTAL = tl.constexpr(2049)  # the mass of the tokens that top_k and min_p keep
_FOUND = tl.constexpr(2050)  # of both selections: the bits found so far, in the end the last key that is kept
_BEFORE = tl.constexpr(2052)  # of both: the weight of keys that begin with smaller bits
_SCRATCH = tl.constexpr(2056)
_BOUNDED_ROWS = 17  # and more: scores are bounded first
_NOISE_ERROR = tl.constexpr(2.0**-10)  # of `_rough_gumbel`, at most (a hundred times what it is)


# --- noise ------------------------------------------------------------------------------------------------------------


@triton.jit
def _mix(x, MIX1, MIX2):
    x = (x ^ (x >> 30)) * MIX1.to(tl.uint64)
    x = (x ^ (x >> 27)) * MIX2.to(tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _gumbel(bits):
    uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
    return (-tl.log(-tl.log(uniform))).to(tl.float32)


@triton.jit
def _gumbel_kernel(keys_ptr, out_ptr, vocab_size, GOLDEN, MIX1, MIX2, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(keys_ptr + row).to(tl.uint64) + token.to(tl.uint64) * GOLDEN.to(tl.uint64)
    noise = _gumbel(_mix(x, MIX1, MIX2) >> 32)
    tl.store(out_ptr + row * vocab_size + token, noise, mask=token < vocab_size)


def gumbel(keys: torch.Tensor, vocab_size: int, golden: int, mix1: int, mix2: int) -> torch.Tensor:
    """Rows of Gumbel noise, one for each int64 key. The constants are those of the generator, as signed int64."""
    out = torch.empty((len(keys), vocab_size), dtype=torch.float32, device=keys.device)
    grid = (len(keys), triton.cdiv(vocab_size, _BLOCK))
    _gumbel_kernel[grid](keys, out, vocab_size, golden, mix1, mix2, BLOCK=_BLOCK)
    return out


# --- bias and penalties -----------------------------------------------------------------------------------------------


@triton.jit
def _adjust_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    num_drafted_ptr,
    drafts_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    min_length_ptr,
    flags_ptr,
    bias_ptr,
    counts_ptr,
    row_stride,
    column_stride,
    drafts_stride,
    vocab_size,
    DRAFTED: tl.constexpr,
    PATHS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    column = slot * column_stride
    flags = tl.load(flags_ptr + column)
    if flags == 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    x = tl.load(logits_ptr + row * row_stride + token, mask=inside, other=0.0)
    if (flags & 1) != 0:
        x += tl.load(bias_ptr + slot * vocab_size + token, mask=inside, other=0.0)
    if (flags & 2) != 0:
        counts = tl.load(counts_ptr + slot * vocab_size + token, mask=inside, other=0)
        times = counts >> 2
        if DRAFTED:
            drafted = drafts_ptr + (row if PATHS else slot) * drafts_stride
            for i in range(tl.load(num_drafted_ptr + row)):
                times += (token == tl.load(drafted + i)).to(tl.int32)
        repetition = tl.load(repetition_ptr + column)
        penalised = tl.where(x > 0, tl.div_rn(x, repetition), x * repetition)
        x = tl.where((times > 0) | ((counts & 1) != 0), penalised, x)
        presence = tl.load(presence_ptr + column) * (times > 0).to(tl.float32)
        x -= presence + tl.load(frequency_ptr + column) * times.to(tl.float32)
        early = tl.load(positions_ptr + row) < tl.load(min_length_ptr + column)
        x = tl.where(((counts & 2) != 0) & early, float("-inf"), x)
    tl.store(logits_ptr + row * row_stride + token, x, mask=inside)


def adjust(
    logits: torch.Tensor,
    columns: Columns,
    slots: torch.Tensor,
    positions: torch.Tensor,
    num_drafted: torch.Tensor | None,
    drafts: torch.Tensor | None,
    paths: torch.Tensor | None,
) -> None:
    """Bias, penalties and min_tokens on logits [R, V], in place. The tables of `columns` must be allocated."""
    rows, vocab_size = logits.shape
    if not rows:
        return
    drafts = drafts if paths is None else paths
    _adjust_kernel[(rows, triton.cdiv(vocab_size, _BLOCK))](
        *(logits, slots, positions, num_drafted, drafts, columns.repetition, columns.presence, columns.frequency),
        *(columns.min_length, columns.flags, columns.bias, columns.counts),
        *(logits.stride(0), columns.flags.stride(0), 0 if drafts is None else drafts.stride(0), vocab_size),
        DRAFTED=num_drafted is not None,
        PATHS=paths is not None,
        BLOCK=_BLOCK,
        num_warps=_warps(rows),
    )


# --- masks ------------------------------------------------------------------------------------------------------------


@triton.jit
def _mask_kernel(logits_ptr, rows_ptr, masks_ptr, row_stride, masks_stride, vocab_size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = token < vocab_size
    words = tl.load(masks_ptr + i * masks_stride + (token >> 5), mask=inside, other=-1)
    excluded = ((words >> (token & 31)) & 1) == 0
    at = logits_ptr + tl.load(rows_ptr + i) * row_stride + token
    tl.store(at, tl.full((BLOCK,), float("-inf"), tl.float32), mask=inside & excluded)


def mask(logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
    """-inf for tokens whose bit is not set, in place; see `Sampler.mask`."""
    vocab_size = logits.shape[1]
    _mask_kernel[(len(rows), triton.cdiv(vocab_size, _BLOCK))](
        *(logits, rows, masks, logits.stride(0), masks.stride(0), vocab_size), BLOCK=_BLOCK
    )


# --- truncation -------------------------------------------------------------------------------------------------------


@triton.jit
def _is_last(arrived_ptr):
    """Whether this program is the last of its row to arrive, so that what the others wrote can be read."""
    tl.debug_barrier()  # all threads have written
    return tl.atomic_add(arrived_ptr, 1, sem="acq_rel") == tl.num_programs(1) - 1


@triton.jit
def _maxima_kernel(
    logits_ptr,
    maxima_ptr,
    largest_ptr,
    scratch_ptr,
    row_stride,
    vocab_size,
    BLOCK: tl.constexpr,
    CHUNKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    maxima_ptr += row * tl.num_programs(1)
    tl.store(maxima_ptr + tl.program_id(1), tl.max(x, axis=0))
    scratch_ptr += row * _SCRATCH
    if _is_last(scratch_ptr + _ARRIVED):
        i = tl.arange(0, CHUNKS)
        maxima = tl.load(maxima_ptr + i, mask=i < tl.num_programs(1), other=float("-inf"))
        tl.store(largest_ptr + row, tl.max(maxima, axis=0))
        tl.store(scratch_ptr + _ARRIVED, 0)


@triton.jit
def _tempered(x, largest, temperature):
    """(x - largest) / temperature; 0 for the largest, also if all are -inf."""
    return tl.where(x == largest, 0.0, tl.div_rn(x - largest, temperature))


@triton.jit
def _key(z, token):
    steps = tl.minimum(tl.minimum(z * -1048576.0, 33554432.0).to(tl.int32), 33554431)  # of 2**-20, below 2**25
    return (steps.to(tl.int64) << _TOKEN_BITS) | token


@triton.jit
def _last_of(scratch_ptr, SELECTION: tl.constexpr, needed):
    """The last key that a selection keeps, once it is done; above all keys if it is not needed."""
    return tl.where(needed, tl.load(scratch_ptr + _FOUND + SELECTION), 1 << 62)


@triton.jit
def _is_kept(z, token, scratch_ptr, log_min_p, top_k, top_p):
    last_k = _last_of(scratch_ptr, _TOP_K, top_k > 0)
    last_p = _last_of(scratch_ptr, _TOP_P, top_p < 1)
    return (z >= log_min_p) & (_key(z, token) <= tl.minimum(last_k, last_p))


@triton.jit(do_not_specialize=["shift", "span"])
def _level_kernel(
    logits_ptr,
    largest_ptr,
    scratch_ptr,
    slots_ptr,
    temperature_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    row_stride,
    column_stride,
    vocab_size,
    shift,
    span,
    SELECTION: tl.constexpr,
    FIRST: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One level of a selection: bits shift..shift+10 of the key, `span` tokens per program."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    column = slot * column_stride
    temperature = tl.load(temperature_ptr + column)
    top_k = tl.load(top_k_ptr + column)
    top_p = tl.load(top_p_ptr + column)
    needed = top_k > 0 if SELECTION == _TOP_K else top_p < 1
    if (temperature == 0) | (needed == 0):
        return
    scratch_ptr += row * _SCRATCH
    largest = tl.load(largest_ptr + row)
    log_min_p = tl.load(log_min_p_ptr + column)
    found = tl.load(scratch_ptr + _FOUND + SELECTION)
    if SELECTION == _TOP_P:
        last_k = _last_of(scratch_ptr, _TOP_K, top_k > 0)
        # The total is 2**32 or more (less one step), so the tokens lighter than this weigh less together than what
        # top_p drops: they need no bin.
        lightest = (1 - top_p) * 2147483648.0 / vocab_size
    total = tl.zeros((BLOCK,), tl.int64)
    first_token = tl.program_id(1) * span
    for start in range(first_token, tl.minimum(first_token + span, vocab_size), BLOCK):
        token = start + tl.arange(0, BLOCK)
        x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
        z = _tempered(x, largest, temperature)
        key = _key(z, token)
        kept = (token < vocab_size) & (z >= log_min_p)
        if SELECTION == _TOP_K:
            weight = tl.full((BLOCK,), 1, tl.int64)
        else:
            kept = kept & (key <= last_k)
            mass = tl.where(kept, tl.exp(z) * 4294967296.0, 0.0)
            weight = mass.to(tl.int64)
            if FIRST:
                total += weight
            kept = kept & (mass >= lightest)
        kept = kept & ((key >> (shift + _BIN_BITS)) == found)
        tl.atomic_add(scratch_ptr + ((key >> shift) & (_BINS - 1)), weight, mask=kept, sem="relaxed")
    if FIRST and SELECTION == _TOP_P:
        tl.atomic_add(scratch_ptr + _TOTAL, tl.sum(total, axis=0), sem="relaxed")
    if _is_last(scratch_ptr + _ARRIVED):
        limit = top_k.to(tl.float64)
        if SELECTION == _TOP_P:
            limit = top_p.to(tl.float64) * tl.load(scratch_ptr + _TOTAL).to(tl.float64)
        bins = tl.arange(0, _BINS)
        weights = tl.load(scratch_ptr + bins)
        before = tl.load(scratch_ptr + _BEFORE + SELECTION) + tl.cumsum(weights, axis=0) - weights
        begun = before.to(tl.float64) < limit  # from the first bin on, so that the last of these has the limit in it
        tl.store(scratch_ptr + _FOUND + SELECTION, found * _BINS + tl.sum(begun.to(tl.int32), axis=0) - 1)
        tl.store(scratch_ptr + _BEFORE + SELECTION, tl.max(tl.where(begun, before, 0), axis=0))
        tl.store(scratch_ptr + bins, tl.zeros((_BINS,), tl.int64))
        tl.store(scratch_ptr + _ARRIVED, 0)


@triton.jit
def _tempered_kernel(
    logits_ptr,
    largest_ptr,
    scratch_ptr,
    slots_ptr,
    temperature_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    out_ptr,
    row_stride,
    column_stride,
    vocab_size,
    MIN_TEMPERATURE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    column = tl.maximum(slot, 0) * column_stride
    temperature = tl.load(temperature_ptr + column)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    z = _tempered(x, tl.load(largest_ptr + row), tl.maximum(temperature, MIN_TEMPERATURE))
    if (temperature > 0) & (slot >= 0):
        top_k, top_p = tl.load(top_k_ptr + column), tl.load(top_p_ptr + column)
        kept = _is_kept(z, token, scratch_ptr + row * _SCRATCH, tl.load(log_min_p_ptr + column), top_k, top_p)
        z = tl.where(kept, z, float("-inf"))
    tl.store(out_ptr + row * vocab_size + token, z, mask=token < vocab_size)


def tempered(logits: torch.Tensor, columns: Columns, slots: torch.Tensor, min_temperature: float) -> torch.Tensor:
    """(logits - largest) / max(temperature, min_temperature), [R, V]; -inf for truncated tokens."""
    rows, vocab_size = logits.shape
    out = torch.empty((rows, vocab_size), dtype=torch.float32, device=logits.device)
    if not rows:
        return out
    _tempered_kernel[(rows, triton.cdiv(vocab_size, _BLOCK))](
        *(logits, *_truncate(logits, columns, slots), slots),
        *(columns.temperature, columns.log_min_p, columns.top_k, columns.top_p, out),
        *(logits.stride(0), columns.flags.stride(0), vocab_size),
        MIN_TEMPERATURE=min_temperature,
        BLOCK=_BLOCK,
        num_warps=_warps(rows),
    )
    return out


def _truncate(logits: torch.Tensor, columns: Columns, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest logit of each row, and the scratch from which `_is_kept` reads the last keys kept."""
    rows, vocab_size = logits.shape
    assert vocab_size <= 1 << _TOKEN_BITS.value
    grid = (rows, triton.cdiv(vocab_size, _BLOCK))
    maxima = torch.empty(grid, dtype=torch.float32, device=logits.device)
    largest = torch.empty(rows, dtype=torch.float32, device=logits.device)
    scratch = torch.zeros((rows, _SCRATCH.value), dtype=torch.int64, device=logits.device)
    _maxima_kernel[grid](
        *(logits, maxima, largest, scratch, logits.stride(0), vocab_size),
        BLOCK=_BLOCK,
        CHUNKS=triton.next_power_of_2(grid[1]),
        num_warps=_warps(rows),
    )
    span = _BLOCK if rows <= 16 else 8 * _BLOCK  # tokens per program
    for selection in (_TOP_K.value, _TOP_P.value):
        for level in reversed(range(_LEVELS)):
            _level_kernel[(rows, triton.cdiv(vocab_size, span))](
                *(logits, largest, scratch, slots),
                *(columns.temperature, columns.log_min_p, columns.top_k, columns.top_p),
                *(logits.stride(0), columns.flags.stride(0), vocab_size, level * _BIN_BITS.value, span),
                SELECTION=selection,
                FIRST=level == _LEVELS - 1,
                BLOCK=_BLOCK,
                num_warps=_warps(rows),
            )
    return largest, scratch


# --- the best tokens --------------------------------------------------------------------------------------------------


@triton.jit
def _random_bits(seed_key, position, token, GOLDEN, MIX1, MIX2):
    """32 bits for each token at one position, as in `ssd.sampling.noise`: uint64."""
    key = _mix(seed_key.to(tl.uint64) + position.to(tl.int64).to(tl.uint64) * GOLDEN.to(tl.uint64), MIX1, MIX2)
    return _mix(key + token.to(tl.uint64) * GOLDEN.to(tl.uint64), MIX1, MIX2) >> 32


@triton.jit
def _rough_gumbel(bits):
    """`_gumbel` in float32, up to _NOISE_ERROR."""
    low = bits.to(tl.uint32)
    uniform = (low.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((low ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - uniform, with all its digits
    series = rest * (1.0 + rest * (0.5 + rest * (0.33333334 + rest * 0.25)))  # -log(1 - rest)
    return -tl.log(tl.where(rest < 0.015625, series, -tl.log(uniform)))


@triton.jit
def _ids_of(token, inside, ids_ptr):
    """The ids of tokens: those of a table, if there is one."""
    if ids_ptr is not None:
        token = tl.where(inside, tl.load(ids_ptr + token, mask=inside, other=0), token)
    return token


@triton.jit
def _store_best(x, token, ids_ptr, tokens_ptr, scores_ptr, COUNT: tl.constexpr, NONE: tl.constexpr):
    """The ids of the COUNT tokens with the largest scores, and these; the lower token first where they are equal.

    -inf comes with id 0, and with NONE if it is the first.
    """
    for i in tl.static_range(COUNT):
        best = tl.max(x, axis=0)
        chosen = tl.min(tl.where(x == best, token, 2147483647), axis=0)
        real = best > float("-inf")
        found = _ids_of(chosen, real & (chosen >= 0), ids_ptr)
        tl.store(tokens_ptr + i, tl.where(real, found, NONE if i == 0 else 0))
        tl.store(scores_ptr + i, best)
        x = tl.where(token == chosen, float("-inf"), x)


@triton.jit
def _bound_kernel(
    logits_ptr,
    slots_ptr,
    positions_ptr,
    ids_ptr,
    seed_key_ptr,
    temperature_ptr,
    bounds_ptr,
    row_stride,
    column_stride,
    vocab_size,
    GOLDEN,
    MIX1,
    MIX2,
    BLOCK: tl.constexpr,
):
    """Lower and upper bound of the largest score of each block of tokens in a sampled row."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    temperature = tl.load(temperature_ptr + slot * column_stride)
    if temperature == 0:
        return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    seed_key = tl.load(seed_key_ptr + slot * (column_stride // 2))
    named = _ids_of(token, token < vocab_size, ids_ptr)
    noise = _rough_gumbel(_random_bits(seed_key, tl.load(positions_ptr + row), named, GOLDEN, MIX1, MIX2))
    x = tl.div_rn(x, temperature)
    valid = x < float("inf")  # NaN or +inf wins, as token -1: it must be looked at
    low = tl.max(tl.where(valid, x + (noise - _NOISE_ERROR), float("-inf")), axis=0)
    high = tl.max(tl.where(valid, x + (noise + _NOISE_ERROR), float("inf")), axis=0)
    at = bounds_ptr + (row * tl.num_programs(1) + tl.program_id(1)) * 2
    tl.store(at, low)
    tl.store(at + 1, high)


@triton.jit
def _reaches(bounds_ptr, block, num_blocks, COUNT: tl.constexpr, BLOCKS: tl.constexpr):
    """Whether a block of tokens may have one of the COUNT best scores: as many others are certain to be above it."""
    i = tl.arange(0, BLOCKS)
    low = tl.load(bounds_ptr + i * 2, mask=i < num_blocks, other=float("-inf"))
    for _ in tl.static_range(COUNT - 1):
        best = tl.min(tl.where(low == tl.max(low, axis=0), i, BLOCKS), axis=0)
        low = tl.where(i == best, float("-inf"), low)
    return tl.load(bounds_ptr + block * 2 + 1) >= tl.max(low, axis=0)


@triton.jit
def _score_kernel(
    logits_ptr,
    bounds_ptr,
    largest_ptr,
    scratch_ptr,
    slots_ptr,
    positions_ptr,
    excluded_ptr,
    ids_ptr,
    seed_key_ptr,
    temperature_ptr,
    log_min_p_ptr,
    top_k_ptr,
    top_p_ptr,
    tokens_ptr,
    scores_ptr,
    row_stride,
    column_stride,
    vocab_size,
    GOLDEN,
    MIX1,
    MIX2,
    TRUNCATED: tl.constexpr,
    EXCLUDED: tl.constexpr,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + row).to(tl.int64)
    if slot < 0:
        return
    column = slot * column_stride
    temperature = tl.load(temperature_ptr + column)
    out = (row * tl.num_programs(1) + tl.program_id(1)) * COUNT
    if bounds_ptr is not None:
        bounds = bounds_ptr + row * tl.num_programs(1) * 2
        if (temperature > 0) & (_reaches(bounds, tl.program_id(1), tl.num_programs(1), COUNT, BLOCKS) == 0):
            for i in tl.static_range(COUNT):
                tl.store(tokens_ptr + out + i, 0)
                tl.store(scores_ptr + out + i, float("-inf"))
            return
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    invalid = tl.max((x < float("inf")).to(tl.int32) ^ 1, axis=0) > 0  # NaN or +inf
    if temperature > 0:
        kept = token < vocab_size
        if TRUNCATED:
            z = _tempered(x, tl.load(largest_ptr + row), temperature)
            top_k, top_p = tl.load(top_k_ptr + column), tl.load(top_p_ptr + column)
            scratch_ptr += row * _SCRATCH
            kept = kept & _is_kept(z, token, scratch_ptr, tl.load(log_min_p_ptr + column), top_k, top_p)
        if tl.max(kept.to(tl.int32), axis=0) > 0:  # the noise is the most expensive part
            seed_key = tl.load(seed_key_ptr + slot * (column_stride // 2))  # its elements are twice as wide
            named = _ids_of(token, token < vocab_size, ids_ptr)
            noise = _gumbel(_random_bits(seed_key, tl.load(positions_ptr + row), named, GOLDEN, MIX1, MIX2))
            x = tl.where(kept, tl.div_rn(x, temperature) + noise, float("-inf"))
        else:
            x = tl.full((BLOCK,), float("-inf"), tl.float32)
    if EXCLUDED:
        named = _ids_of(token, token < vocab_size, ids_ptr)
        x = tl.where(named == tl.load(excluded_ptr + row), float("-inf"), x)
    if invalid:  # these win, as token -1
        x, token = tl.full((BLOCK,), float("inf"), tl.float32), tl.full((BLOCK,), -1, tl.int32)
    _store_best(x, token, None, tokens_ptr + out, scores_ptr + out, COUNT, 0)


@triton.jit
def _merge_kernel(
    slots_ptr, chunk_tokens_ptr, chunk_scores_ptr, ids_ptr, tokens_ptr, scores_ptr, num,
    COUNT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    inside = (i < num) & (tl.load(slots_ptr + row) >= 0)
    token = tl.load(chunk_tokens_ptr + row * num + i, mask=inside, other=2147483647)
    x = tl.load(chunk_scores_ptr + row * num + i, mask=inside, other=float("-inf"))
    _store_best(x, token, ids_ptr, tokens_ptr + row * COUNT, scores_ptr + row * COUNT, COUNT, -1)


def best(
    logits: torch.Tensor,
    columns: Columns,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    truncated: bool,
    count: int,
    excluded: torch.Tensor | None,
    ids: torch.Tensor | None,
    constants: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (int32) and scores (float32), both [R, count], of logits [R, V], as `Sampler.best` describes them.

    The constants are those of the noise generator, as signed int64.
    """
    rows, vocab_size = logits.shape
    assert all(each.is_contiguous() for each in (slots, positions))
    chunks = triton.cdiv(vocab_size, _BLOCK)
    shapes = ((rows, chunks * count), (rows, count))
    chunk_tokens, tokens = (torch.empty(shape, dtype=torch.int32, device=logits.device) for shape in shapes)
    chunk_scores, scores = (torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in shapes)
    if not rows:
        return tokens, scores
    largest, scratch = _truncate(logits, columns, slots) if truncated else (None, None)
    bounds = None
    if rows >= _BOUNDED_ROWS and not truncated and excluded is None:
        bounds = torch.empty((rows, chunks, 2), dtype=torch.float32, device=logits.device)
        _bound_kernel[(rows, chunks)](
            *(logits, slots, positions, ids, columns.seed_key, columns.temperature, bounds),
            *(logits.stride(0), columns.flags.stride(0), vocab_size),
            *constants,
            BLOCK=_BLOCK,
            num_warps=_warps(rows),
        )
    _score_kernel[(rows, chunks)](
        *(logits, bounds, largest, scratch, slots, positions, excluded, ids),
        *(columns.seed_key, columns.temperature, columns.log_min_p, columns.top_k, columns.top_p),
        *(chunk_tokens, chunk_scores, logits.stride(0), columns.flags.stride(0), vocab_size),
        *constants,
        TRUNCATED=truncated,
        EXCLUDED=excluded is not None,
        COUNT=count,
        BLOCK=_BLOCK,
        BLOCKS=triton.next_power_of_2(chunks),
        num_warps=_warps(rows),
    )
    merged = triton.next_power_of_2(chunks * count)
    _merge_kernel[(rows,)](
        slots, chunk_tokens, chunk_scores, ids, tokens, scores, chunks * count, COUNT=count, BLOCK=merged
    )
    return tokens, scores


def _warps(rows: int) -> int:
    """Few rows: more warps per program; many: more programs per multiprocessor."""
    return 8 if rows <= 16 else 4
