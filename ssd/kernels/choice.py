"""The best few tokens of each row, noise and temperature included, in two Triton kernels and without a host."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_CHUNK = 1024


@triton.jit
def _mix(x, MIX1, MIX2):
    x = (x ^ (x >> 30)) * MIX1.to(tl.uint64)
    x = (x ^ (x >> 27)) * MIX2.to(tl.uint64)
    return x ^ (x >> 31)


@triton.jit
def _store_best(x, token, ids_ptr, scores_ptr, COUNT: tl.constexpr):
    """The COUNT largest scores with their tokens, the lower token first where scores are equal."""
    for i in tl.static_range(COUNT):
        best = tl.max(x, axis=0)
        chosen = tl.min(tl.where(x == best, token, 2147483647), axis=0)
        tl.store(ids_ptr + i, chosen)
        tl.store(scores_ptr + i, best)
        x = tl.where(token == chosen, float("-inf"), x)


@triton.jit
def _chunk_kernel(
    logits_ptr,
    seeds_ptr,
    positions_ptr,
    temperatures_ptr,
    excluded_ptr,
    ids_ptr,
    scores_ptr,
    row_stride,
    vocab_size,
    GOLDEN,
    MIX1,
    MIX2,
    COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits_ptr + row * row_stride + token, mask=token < vocab_size, other=float("-inf"))
    temperature = tl.load(temperatures_ptr + row)
    if temperature > 0:
        position = tl.load(positions_ptr + row).to(tl.int64).to(tl.uint64)
        key = _mix(tl.load(seeds_ptr + row).to(tl.uint64) + position * GOLDEN.to(tl.uint64), MIX1, MIX2)
        bits = _mix(key + token.to(tl.uint64) * GOLDEN.to(tl.uint64), MIX1, MIX2) >> 32
        uniform = (bits.to(tl.float64) + 0.5) * 2.3283064365386963e-10  # 2 ** -32
        x = x / temperature + (-tl.log(-tl.log(uniform))).to(tl.float32)
    x = tl.where(token == tl.load(excluded_ptr + row), float("-inf"), x)
    out = (row * tl.num_programs(1) + tl.program_id(1)) * COUNT
    _store_best(x, token, ids_ptr + out, scores_ptr + out, COUNT)


@triton.jit
def _merge_kernel(chunk_ids_ptr, chunk_scores_ptr, ids_ptr, scores_ptr, num, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, BLOCK)
    token = tl.load(chunk_ids_ptr + row * num + i, mask=i < num, other=2147483647)
    x = tl.load(chunk_scores_ptr + row * num + i, mask=i < num, other=float("-inf"))
    _store_best(x, token, ids_ptr + row * COUNT, scores_ptr + row * COUNT, COUNT)


def best_tokens(
    logits: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
    temperatures: torch.Tensor,
    excluded: torch.Tensor,
    count: int,
    constants: tuple[int, int, int],
) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (int32) and scores (float32), both [R, count], of logits [R, V]; `excluded` has one token a row, or -1.

    A row of temperature 0 has no noise. The constants are those of the noise generator, as signed int64.
    """
    rows, vocab_size = logits.shape
    chunks = triton.cdiv(vocab_size, _CHUNK)
    shapes = ((rows, chunks * count), (rows, count))
    chunk_ids, ids = (torch.empty(shape, dtype=torch.int32, device=logits.device) for shape in shapes)
    chunk_scores, scores = (torch.empty(shape, dtype=torch.float32, device=logits.device) for shape in shapes)
    _chunk_kernel[(rows, chunks)](
        *(logits, seeds, positions, temperatures, excluded, chunk_ids, chunk_scores, logits.stride(0), vocab_size),
        *constants,
        COUNT=count,
        BLOCK=_CHUNK,
    )
    block = triton.next_power_of_2(chunks * count)
    _merge_kernel[(rows,)](chunk_ids, chunk_scores, ids, scores, chunks * count, COUNT=count, BLOCK=block)
    return ids, scores
