"""The CUDA kernel for latent attention on a CPU, in an emulator (`emulated_ptx.h`)."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow

from tests.kernels.emulation import COMPILER, TensorMap, addresses, emulated_kernel, params_of_source

kernel = pytest.importorskip("ssd.kernels.cuda.latent_attention", reason="triton is not installed")
BLOCK_SIZE, BLOCKS, CAPACITY, WIDTH = 256, 40, 64, kernel.HEAD_DIM
SCALE = 0.06


@dataclass(frozen=True)
class Sequence:
    """Some tokens, the first at `position`. share: pieces of each of its items, groups of 8 or fewer than 8."""

    table: int
    position: int
    tokens: int
    share: int = 64


@functools.cache
def latents() -> tuple[torch.Tensor, torch.Tensor]:
    """A cache, and tables of sequences in it."""
    torch.manual_seed(0)
    return torch.randn(BLOCKS, BLOCK_SIZE, WIDTH).bfloat16(), torch.randperm(BLOCKS).int().view(4, 10)


def items_of(sequences: list[Sequence]) -> torch.Tensor:
    """Row, tokens, position, table, first piece, last, pieces, items, place, tokens before, unit; two of padding."""
    items: list[list[int]] = []
    row, place = 0, 3
    for each in sequences:
        pieces, unit = -(-(each.position + each.tokens) // 128), 8 if each.share >= 8 else 1
        firsts = range(0, pieces, each.share)
        for first in firsts:
            at = place if len(firsts) > 1 else -1
            span = first, min(pieces, first + each.share), pieces, len(firsts)
            items.append([row, each.tokens, each.position, each.table, *span, at, each.position, unit])
        row, place = row + each.tokens, place + -(-pieces // unit)
    made = torch.full((len(items) + 2, 16), -1, dtype=torch.int32)
    made[: len(items), :11] = torch.tensor(items)
    return made


def attend(q: torch.Tensor, sequences: list[Sequence], blocks: int, parts: int = 1, seed: int = 0) -> torch.Tensor:
    cache, tables = latents()
    tokens, heads, _ = q.shape
    group = heads // parts
    tile = kernel.Tile(parts, group, group * max(each.tokens for each in sequences))
    items = items_of(sequences)
    out = torch.full((tokens, heads, 512), torch.nan).bfloat16()
    partial, stats = (torch.full((CAPACITY * parts * tile.padded * n,), torch.nan) for n in (512, 2))
    count = torch.zeros(CAPACITY * parts, dtype=torch.int32)
    params = kernel.Params(
        *(tensor.data_ptr() for tensor in (out, partial, stats, count, items, tables)),
        *(tables.stride(0), SCALE * 1.4426950408889634, len(items), parts, BLOCK_SIZE, seed % 2, 0),
    )
    maps = [
        TensorMap(q.data_ptr(), tokens * heads, WIDTH, WIDTH // 64, WIDTH // 64, tile.padded),
        TensorMap(cache.data_ptr(), BLOCKS * BLOCK_SIZE, WIDTH, WIDTH // 64, kernel.BOX, kernel.STEP),
    ]
    library = emulated_kernel(kernel.SOURCE, "attend", {**tile.macros, "CHUNK": 16})
    blocks = min(blocks, len(items) * parts)
    assert library.launch(addresses(*maps, params), blocks, kernel.THREADS, tile.shared, seed), "a wait is endless"
    assert not count.any()
    return out


def expected(q: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    cache, tables = latents()
    found: list[torch.Tensor] = []
    for each in sequences:
        keys = cache[tables[each.table].long()].flatten(0, 1).float()
        for token in range(each.tokens):
            seen = keys[: each.position + token + 1]
            weights = (q[len(found)].float() @ seen.T * SCALE).softmax(1)
            found.append(weights @ seen[:, :512])
    return torch.stack(found)


# One item of each, or several: of one piece, two, or a group; steps and pieces that end in the middle.
SEQUENCES = [Sequence(0, 1099, 1, 8), Sequence(1, 63, 1), Sequence(2, 2100, 1, 1), Sequence(3, 300, 1, 2)]


def test_params_are_those_of_the_source() -> None:
    assert [name for name, _ in kernel.Params._fields_] == params_of_source(kernel.SOURCE)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("blocks", mostly_slow([1, 3, 7], fast=[3]))
def test_rows_keep_their_bits(blocks: int) -> None:
    """As plain torch has it, and the same bits alone, in one item of one block. Catches pieces that are folded in
    another order or read too soon, and boxes of the ring that are overwritten while they are used."""
    torch.manual_seed(1)
    q = torch.randn(4, 20, WIDTH).bfloat16()
    found, wanted = attend(q, SEQUENCES, blocks), expected(q, SEQUENCES)
    for row in range(4):
        assert (found[row].float() - wanted[row]).norm() < 4e-3 * wanted[row].norm(), row
    for row, each in enumerate(SEQUENCES):
        alone = Sequence(each.table, each.position, 1)
        assert same_bits(attend(q[row : row + 1], [alone], 1, seed=row)[0], found[row]), row


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(("heads", "parts", "tokens"), mostly_slow([(58, 2, 1), (5, 1, 3)], fast=[(5, 1, 3)]))
def test_parts_of_heads_and_several_tokens(heads: int, parts: int, tokens: int) -> None:
    """A row has the bits that its token has in a tile of its own."""
    torch.manual_seed(2)
    q = torch.randn(3 * tokens, heads, WIDTH).bfloat16()
    sequences = [Sequence(i, position, tokens, 3) for i, position in enumerate((126, 1100, 62))]
    found, wanted = attend(q, sequences, 2, parts), expected(q, sequences)
    for row in range(3 * tokens):
        assert (found[row].float() - wanted[row]).norm() < 4e-3 * wanted[row].norm(), row
    each = [Sequence(s.table, s.position + i, 1, 8) for s in sequences for i in range(tokens)]
    assert same_bits(attend(q, each, 4, parts), found)
