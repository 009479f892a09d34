"""The CUDA kernel for attention over KV in fp8 on a CPU, in an emulator (`emulated_ptx.h`)."""

from __future__ import annotations

import pytest
import torch
from conftest import mostly_slow

from tests.kernels.emulation import COMPILER, TensorMap, addresses, emulated_kernel

kernel = pytest.importorskip("ssd.kernels.cuda.fp8_attention", reason="triton is not installed")
KV_HEADS, GROUP, BLOCK_SIZE = 2, 3, 64


def expected(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, position: int, v_scale: float) -> torch.Tensor:
    """Of one query token [heads, dim]; keys and values: [positions, KV heads, dim]."""
    k, v = (each[: position + 1].float().repeat_interleave(GROUP, 1) for each in (keys, values))
    weights = (torch.einsum("hd,phd->hp", q.float(), k) / 16).softmax(1)
    return torch.einsum("hp,phd->hd", weights, v) * v_scale


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("tokens", mostly_slow([[1, 2, 1], [5, 1, 3]], fast=[[5, 1, 3]]), ids=str)
def test_attention(tokens: list[int]) -> None:
    """Three sequences: one whose pieces are shared by two items, one of few positions, one of two pieces in one item;
    tiles of up to 8 rows and of more. Pieces are folded in two batches."""
    lengths, blocks = [1100, 2, 700], 40
    tables = torch.randperm(blocks)[: 3 * 18].int()
    tables = torch.cat([tables, tables])[: 3 * 18].view(3, 18).contiguous()
    shape = (blocks, BLOCK_SIZE, KV_HEADS, kernel.HEAD_DIM)
    k, v = (torch.randn(shape).to(torch.float8_e4m3fn) for _ in range(2))
    rows = [sum(tokens[:i]) for i in range(3)]
    q = torch.randn(sum(tokens), KV_HEADS * GROUP, kernel.HEAD_DIM).bfloat16()
    first = [length - count for length, count in zip(lengths, tokens, strict=True)]
    items = torch.full((6, 16), -1, dtype=torch.int32)
    # row, tokens, position, table, first piece, last, pieces, items, place
    items[0, :9] = torch.tensor([rows[0], tokens[0], first[0], 0, 0, 2, 3, 2, 4])
    items[1, :9] = torch.tensor([rows[0], tokens[0], first[0], 0, 2, 3, 3, 2, 4])
    items[2, :9] = torch.tensor([rows[1], tokens[1], first[1], 1, 0, 1, 1, 1, -1])
    items[3, :9] = torch.tensor([rows[2], tokens[2], first[2], 2, 0, 2, 2, 1, -1])
    out = torch.full_like(q, torch.nan)
    partial, stats = torch.full((8 * KV_HEADS * 16 * 128,), torch.nan), torch.full((8 * KV_HEADS * 32,), torch.nan)
    count = torch.zeros(8 * KV_HEADS, dtype=torch.int32)
    params = kernel.Params(
        *(tensor.data_ptr() for tensor in (q, out, partial, stats, count, items, tables)),
        *(tables.stride(0), 1.4426950408889634 / 16, 0.5, len(items), KV_HEADS, BLOCK_SIZE),
    )
    width = KV_HEADS * kernel.HEAD_DIM // 2
    maps = [TensorMap(cache.data_ptr(), blocks * BLOCK_SIZE, width, width // 64, 1, kernel.STEP) for cache in (k, v)]
    macros = {**kernel.macros_of(GROUP), "WARPS": 3, "AT_ONCE": 2}
    library = emulated_kernel(kernel.SOURCE, "attend", macros)
    shared = 1024 + 3 * macros["UNITS"] * 8192
    assert library.launch(addresses(*maps, params), 2, 32 * 3, shared, tokens[0]), "a wait is endless"
    assert not count.any()
    for i, length in enumerate(lengths):
        keys, values = (cache[tables[i].long()].flatten(0, 1)[:length] for cache in (k, v))
        for token in range(tokens[i]):
            wanted = expected(q[rows[i] + token], keys, values, first[i] + token, 0.5)
            assert (out[rows[i] + token].float() - wanted).norm() < 4e-3 * wanted.norm(), (i, token)
