"""Kernels of latent attention: every implementation against plain torch, and rows in any company.

Branches are in `test_branch_attention.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from device_batches import make_device_batch
from reference_ops import ReferenceOps
from test_quantized import CUDA, close, make_ops

from ssd.kernels.cpu.ops import CpuOps
from ssd.kernels.ops import DeviceBatch, HeadShape, Ops, Rope
from ssd.kernels.triton.ops import TritonOps

BLOCK_SIZE = 16
GLM, SMALL = HeadShape(20, 1, 576, latent_dim=512, softmax_scale=0.06), HeadShape(6, 1, 48, latent_dim=40)
FEW, MANY = HeadShape(3, 1, 576, latent_dim=512), HeadShape(58, 1, 72, latent_dim=64)  # tiles in place; parts of heads
KINDS = mostly_slow(
    [(kind, heads) for kind in ("c", "triton") for heads in (GLM, SMALL, FEW, MANY)],
    fast=[("c", GLM), ("c", SMALL), ("c", FEW), ("c", MANY), ("triton", SMALL), *([("triton", GLM)] if CUDA else [])],
)


@dataclass(frozen=True)
class Paged:
    """Sequences of these lengths in shuffled blocks of a cache of latents. Other slots hold NaN in C, where nothing may
    come of them; on a GPU `latent_rope_and_store` and `make_kv_cache` keep them finite."""

    ops: Ops
    heads: HeadShape
    lengths: tuple[int, ...]
    cache: torch.Tensor
    tables: list[list[int]]

    @classmethod
    def of(cls, kind: str, heads: HeadShape, lengths: tuple[int, ...], dtype: torch.dtype) -> Paged:
        ops, device, _ = make_ops(kind)
        width = -(-max(lengths) // BLOCK_SIZE)
        tables = torch.randperm(len(lengths) * width).view(len(lengths), width)
        unused = torch.nan if kind == "c" else 0.0
        cache = torch.full((tables.numel(), BLOCK_SIZE, 1, heads.head_dim), unused, dtype=dtype, device=device)
        for table, length in zip(tables, lengths, strict=True):
            own = cache[table.to(device)].flatten(0, 1)
            own[:length] = torch.randn(length, 1, heads.head_dim, device=device).to(dtype)
            cache[table.to(device)] = own.view(width, BLOCK_SIZE, 1, -1)
        ops.reserve([heads], device)
        return cls(ops, heads, lengths, cache, tables.tolist())

    def batch(self, spans: list[tuple[int, int, int]], prefill: bool) -> DeviceBatch:
        """Positions [first, last) of each (sequence, first, last)."""
        starts, positions, slots = [0], [], []
        for s, first, last in spans:
            positions += range(first, last)
            slots += [self.tables[s][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(first, last)]
            starts.append(len(positions))
        return make_device_batch(
            *(positions, slots, starts, [last for _, _, last in spans], [self.tables[s] for s, _, _ in spans]),
            tile_tokens=self.ops.tile_tokens([self.heads], prefill),
            device=self.cache.device,
            prefill=prefill,
        )

    def attend(self, q: torch.Tensor, spans: list[tuple[int, int, int]], *, prefill: bool = False) -> torch.Tensor:
        return self.ops.attention(q, self.batch(spans, prefill), self.heads, self.cache, self.cache)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
@pytest.mark.parametrize(("kind", "heads"), KINDS)
def test_attention_over_latents(kind: str, heads: HeadShape) -> None:
    """As plain torch has it; a row has the same bits alone, in chunks of a prompt and in company, however many programs
    or threads share it. Catches values of other columns, and a part of the heads that is left out."""
    torch.manual_seed(0)
    for dtype in make_ops(kind)[2]:
        lengths = (5, 1100 if kind == "triton" and CUDA else 100, 70)
        paged = Paged.of(kind, heads, lengths, dtype)
        spans = [(1, lengths[1] - 30, lengths[1]), (0, 0, 5), (2, 64, 67)]
        q = torch.randn(38, heads.num_heads, heads.head_dim, device=paged.cache.device).to(dtype)
        whole = paged.attend(q, spans, prefill=True)
        assert whole.shape[1] == heads.num_heads * heads.latent_dim
        expected = ReferenceOps().attention(
            *(q.float(), paged.batch(spans, True), heads), *[paged.cache.float().nan_to_num()] * 2
        )
        close(whole, expected, dtype)
        for programs in (1, 4, 8, 40) if CUDA else (40,):
            if isinstance(paged.ops, TritonOps):
                assert paged.ops._workspace is not None
                paged.ops._workspace.programs = lambda heads, programs=programs: programs  # type: ignore[method-assign]
            assert same_bits(paged.attend(q, spans), whole)
            last = lengths[1] - 1
            assert same_bits(paged.attend(q[29:30], [(1, last, last + 1)]), whole[29:30])
            company = paged.attend(torch.cat((q[36:], q[20:29])), [(2, 65, 67), (1, last - 9, last)])
            assert same_bits(company, torch.cat((whole[36:], whole[20:29])))


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
@pytest.mark.parametrize("programs", mostly_slow([2, 5, 12], fast=[12]))
def test_programs_that_share_groups_of_pieces(programs: int) -> None:
    """Nine pieces are a group and one: as groups, two pieces an item, and a piece an item. Catches pieces that are
    folded together in another order, or stored where others are."""
    torch.manual_seed(0)
    paged = Paged.of("triton", SMALL, (1100,), torch.float32)
    assert isinstance(paged.ops, TritonOps)
    assert paged.ops._workspace is not None
    q, span, found = torch.randn(1, 6, 48, device=paged.cache.device), [(0, 1099, 1100)], []
    for count in (1, programs):
        paged.ops._workspace.programs = lambda heads, count=count: count  # type: ignore[method-assign]
        found.append(paged.attend(q, span))
    assert same_bits(*found)
    expected = ReferenceOps().attention(q, paged.batch(span, False), SMALL, paged.cache, paged.cache)
    close(found[0], expected, torch.float32)


@pytest.mark.parametrize("threads", [1, 2, 7])
def test_threads_keep_the_bits(threads: int) -> None:
    """Catches chunks, parts of heads or products of heads that depend on how they are shared out."""
    torch.manual_seed(0)
    paged = Paged.of("c", MANY, (900, 700), torch.float32)
    assert isinstance(paged.ops, CpuOps)
    q, x = torch.randn(2, 58, 72), torch.randn(40, 58, 72)
    weight = paged.ops.prepare(torch.randn(58 * 64, 72), experts=58)
    spans, before = [(0, 899, 900), (1, 699, 700)], torch.get_num_threads()
    found = []
    try:
        for count in (3, threads):
            torch.set_num_threads(count)
            found.append((paged.attend(q, spans), weight.head_linear(x)))
    finally:
        torch.set_num_threads(before)
    assert all(same_bits(*pair) for pair in zip(*found, strict=True))


@pytest.mark.parametrize("kind", ["c", "triton"])
def test_products_of_heads(kind: str) -> None:
    """Rows and heads anywhere, results anywhere; a row has the same bits with any others."""
    ops, device, types = make_ops(kind)
    torch.manual_seed(0)
    for dtype in types:
        weight = torch.randn(5 * 70, 48, device=device).to(dtype)
        prepared, reference = ops.prepare(weight, experts=5), ReferenceOps().prepare(weight.float(), experts=5)
        x = torch.randn(75, 5, 60, device=device).to(dtype)[:, :, 6:54]
        y = torch.zeros(75, 5, 90, device=device, dtype=dtype)
        whole = prepared.head_linear(x, y[:, :, 12:82])
        close(whole, reference.head_linear(x.float()), dtype)
        assert not y[:, :, :12].any()
        assert not y[:, :, 82:].any()
        assert same_bits(prepared.head_linear(x), whole.contiguous())
        for rows in ([7], [3, 70], list(range(20, 50))):
            assert same_bits(prepared.head_linear(x[rows]), whole[rows])


@pytest.mark.parametrize("kind", ["c", "triton"])
def test_keys_and_rotated_queries(kind: str) -> None:
    """Norms of latents, and neighbours that are rotated; padding is stored nowhere, and other slots are left as they
    are. Rows keep their bits."""
    torch.manual_seed(0)
    for dtype in make_ops(kind)[2]:
        paged = Paged.of(kind, SMALL, (5, 70), dtype)
        device, batch = paged.cache.device, paged.batch([(1, 30, 60), (0, 0, 5)], False)
        batch.slot_mapping[3] = -1
        tables = torch.randn(2, 80, 4, device=device)
        rope = Rope(*tables, k_norm=torch.rand(40, device=device).to(dtype), eps=1e-6)
        q, kv = (torch.randn(*size, device=device).to(dtype) for size in ((35, 6, 19), (35, 60)))
        results = []
        for ops in (paged.ops, ReferenceOps()):
            cache = paged.cache.clone()
            queries = ops.latent_rope_and_store(q, kv[:, 7:], batch, rope, SMALL, cache)
            results.append((queries[:, :, 40:], cache.flatten(0, 2).nan_to_num(9.0)))
        for ours, theirs in zip(*results, strict=True):
            close(ours, theirs, dtype)
        (queries, cache), one = results[0], paged.cache.clone()
        alone = paged.batch([(1, 41, 42)], False)
        again = paged.ops.latent_rope_and_store(q[11:12], kv[11:12, 7:], alone, rope, SMALL, one)
        assert same_bits(again[:, :, 40:], queries[11:12])
        slot = int(alone.slot_mapping[0])
        assert same_bits(one.flatten(0, 2)[slot], cache[slot])
        kept = one.flatten(0, 2)[[i for i in range(len(cache)) if i != slot]].nan_to_num(9.0)
        before = paged.cache.flatten(0, 2)[[i for i in range(len(cache)) if i != slot]].nan_to_num(9.0)
        assert same_bits(kept, before)


def test_tokens_outside_of_the_tables_and_the_cache() -> None:
    """IndexError from C: catches memory of others that is read or written."""
    paged = Paged.of("c", SMALL, (5,), torch.float32)
    rope = Rope(torch.ones(8, 4), torch.ones(8, 4), k_norm=torch.ones(40), eps=1e-6)
    q, kv = torch.randn(1, 6, 16), torch.randn(1, 48)
    for position, slot in ((8, 0), (-1, 0), (0, BLOCK_SIZE), (0, 1 << 30)):
        batch = paged.batch([(0, 4, 5)], False)
        batch.positions[0], batch.slot_mapping[0] = position, slot
        with pytest.raises(IndexError, match="position is not in the rotary tables"):
            paged.ops.latent_rope_and_store(q, kv, batch, rope, SMALL, paged.cache)
