"""The Triton kernels against plain torch: in Triton's interpreter on a CPU (float32), for real on a GPU.

On a GPU also what the interpreter cannot show: that bits do not depend on tiles, batches or chunks.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from device_batches import make_device_batch, paged_batch
from reference_ops import ReferenceOps

from ssd.kernels.ops import UNSCALED, DeviceBatch, HeadShape, KVScales, Rope

triton_ops = pytest.importorskip("ssd.kernels.triton.ops", reason="triton is not installed")
attention = pytest.importorskip("ssd.kernels.triton.attention", reason="triton is not installed")
elementwise = pytest.importorskip("ssd.kernels.triton.elementwise", reason="triton is not installed")
CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]  # the interpreter's bfloat16 dot is wrong
gpu = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
BLOCK_SIZE = 16


@pytest.fixture
def ops() -> triton_ops.TritonOps:
    torch.manual_seed(0)
    return triton_ops.TritonOps()


def randn(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, device=DEVICE).to(dtype)


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    assert (ours.float() - theirs.float()).norm() <= limit * theirs.float().norm()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "depth"), [(1, 70, 96), (5, 64, 128), (20, 130, 200), (70, 96, 64)])
def test_linear(ops: triton_ops.TritonOps, dtype: torch.dtype, rows: int, columns: int, depth: int) -> None:
    """Odd sizes in every direction, every tile height, with and without bias."""
    reference = ReferenceOps()
    x, w = randn(rows, depth, dtype=dtype), randn(columns, depth, dtype=dtype)
    bias = randn(columns, dtype=dtype)
    ours, theirs = ops.prepare(w), reference.prepare(w)
    close(ours.linear(x), theirs.linear(x), dtype)
    close(ours.linear(x, bias), theirs.linear(x, bias), dtype)
    wide = ours.linear(x, float32=True)
    assert wide.dtype is torch.float32
    close(wide, x.float() @ w.float().t(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 20])
def test_gated_linear(ops: triton_ops.TritonOps, dtype: torch.dtype, rows: int) -> None:
    x, w, bias = randn(rows, 96, dtype=dtype), randn(2 * 44, 96, dtype=dtype), randn(2 * 44, dtype=dtype)
    ours, theirs = ops.prepare(w, gated=True), ReferenceOps().prepare(w, gated=True)
    close(ours.linear(x), theirs.linear(x), dtype)
    close(ours.linear(x, bias), theirs.linear(x, bias), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [48, 576])
def test_rms_norm(ops: triton_ops.TritonOps, dtype: torch.dtype, width: int) -> None:
    x, w = randn(3, 2 * width, dtype=dtype)[:, :width], randn(width, dtype=dtype)
    close(ops.rms_norm(x, w, 1e-5), ReferenceOps().rms_norm(x, w, 1e-5), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rms_norm_adds_to_the_residual_stream(ops: triton_ops.TritonOps, dtype: torch.dtype) -> None:
    """The sum is rounded once, and kept; its norm has the bits of the norm of that sum."""
    x, residual, w = randn(3, 2 * 576, dtype=dtype)[:, :576], randn(3, 576, dtype=dtype), randn(576, dtype=dtype)
    total = residual + x
    assert same_bits(ops.rms_norm(x, w, 1e-5, residual), ops.rms_norm(total, w, 1e-5))
    assert same_bits(residual, total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_parts_of_ranks_are_added_in_order_and_rounded_once(dtype: torch.dtype) -> None:
    parts = randn(4, 2500) * torch.tensor([1e4, 1.0, 1e-3, 1e4], device=DEVICE)[:, None]
    total = ((parts[0] + parts[1]) + parts[2]) + parts[3]
    assert same_bits(elementwise.add_parts(parts.flatten(), 4, dtype), total.to(dtype))


class Paged:
    """Some sequences over shuffled KV blocks, in a batch cut as the caller likes."""

    def __init__(
        self,
        heads: HeadShape,
        lengths: list[int],
        dtype: torch.dtype,
        block_size: int = BLOCK_SIZE,
        *,
        fp8: bool = False,
    ) -> None:
        self.heads = heads
        self.lengths = lengths
        self.block_size = block_size
        blocks = [-(-n // block_size) for n in lengths]
        order = torch.randperm(sum(blocks)).tolist()
        self.tables = [order[sum(blocks[:i]) : sum(blocks[: i + 1])] for i in range(len(blocks))]
        shape = (sum(blocks), block_size, heads.num_kv_heads, heads.head_dim)
        stored = torch.float8_e4m3fn if fp8 else dtype
        self.scales = KVScales(k=0.7, v=1.3) if fp8 else UNSCALED
        self.k, self.v = randn(*shape, dtype=stored), randn(*shape, dtype=stored)

    def batch(
        self,
        ops: triton_ops.TritonOps,
        spans: list[tuple[int, int, int]],
        prefill: bool,
        kinds: list[HeadShape] | None = None,
    ) -> DeviceBatch:
        """Query positions first..last-1 of each (sequence, first, last). `kinds`: the heads of all layers."""
        positions = [p for _, first, last in spans for p in range(first, last)]
        slots = [
            self.tables[s][p // self.block_size] * self.block_size + p % self.block_size
            for s, first, last in spans
            for p in range(first, last)
        ]
        starts = [0]
        for _, first, last in spans:
            starts.append(starts[-1] + last - first)
        lengths, tables = [last for _, _, last in spans], [self.tables[s] for s, _, _ in spans]
        tile_tokens = ops.tile_tokens(kinds or [self.heads], prefill=prefill)
        return make_device_batch(
            *(positions, slots, starts, lengths, tables), tile_tokens=tile_tokens, prefill=prefill, device=DEVICE
        )


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")  # rows of padding, never stored
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("prefill", "fp8"),
    mostly_slow(
        [(False, False), (False, True), (True, False), (True, True)],
        fast=[(False, True), *([(True, False), (False, False), (True, True)] if CUDA else [])],
    ),
)
@pytest.mark.parametrize(
    "heads",
    mostly_slow([HeadShape(6, 2, 16), HeadShape(5, 1, 32), HeadShape(2, 2, 24)], fast=[HeadShape(6, 2, 16)]),
    ids=str,
)
def test_rope_and_attention(
    ops: triton_ops.TritonOps, heads: HeadShape, prefill: bool, dtype: torch.dtype, fp8: bool
) -> None:
    """Ragged queries, shuffled blocks, split boundaries, odd groups and head sizes, with and without norms."""
    paged = Paged(heads, [5, 300, 40, 129], dtype, fp8=fp8)
    batch = paged.batch(ops, [(0, 4, 5), (1, 297, 300), (2, 38, 40), (3, 126, 129)], prefill)
    ops.reserve([heads], DEVICE)
    d, rows = heads.head_dim, len(batch.positions)
    qkv = randn(rows, (heads.num_heads + 2 * heads.num_kv_heads) * d, dtype=dtype)
    cos, sin = randn(512, d // 2), randn(512, d // 2)
    norms = (torch.rand(d, device=DEVICE).to(dtype), torch.rand(d, device=DEVICE).to(dtype))
    for rope in (Rope(cos, sin), Rope(cos, sin, *norms, 1e-6)):
        results = []
        for kernels in (ops, ReferenceOps()):
            k, v = paged.k.clone(), paged.v.clone()
            q = kernels.rope_and_store(qkv, batch, rope, heads, k, v, paged.scales)
            results.append((q, k, v, kernels.attention(q, batch, heads, k, v, paged.scales)))
        for ours, theirs in zip(*results, strict=True):
            close(ours, theirs, dtype)


OTHER_HEADS = [HeadShape(4, 4, 32), HeadShape(6, 2, 16), HeadShape(5, 1, 24)]


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
@pytest.mark.parametrize("heads", mostly_slow(OTHER_HEADS, fast=OTHER_HEADS[2:]), ids=str)
def test_layers_with_other_heads_do_not_change_the_bits(ops: triton_ops.TritonOps, heads: HeadShape) -> None:
    """Tiles and scratch for the heads of several layers; catches a tile that is taken for a longer one."""
    length = 600 if CUDA else 136
    paged = Paged(heads, [length, 40], torch.float32)
    q, found = randn(45, heads.num_heads, heads.head_dim), []
    for kinds in ([heads], [HeadShape(8, 1, 16), heads, HeadShape(4, 4, 64)]):
        ops.reserve(kinds, DEVICE)
        assert ops._workspace is not None
        ops._workspace.programs = lambda heads: 3
        for prefill in (False, True):
            batch = paged.batch(ops, [(0, length - 30, length), (1, 25, 40)], prefill, kinds)
            found.append(ops.attention(q, batch, heads, paged.k, paged.v))
    assert all(same_bits(found[0], each) for each in found[1:])
    close(found[0], ReferenceOps().attention(q, batch, heads, paged.k, paged.v), torch.float32)


@pytest.mark.filterwarnings("ignore:invalid value encountered in divide")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("window", "fp8", "sinks"),
    mostly_slow(
        [
            *[(1, False, False), (70, False, True), (70, True, False), (64, False, False), (0, False, True)],
            *((600, fp8, sinks) for fp8 in (False, True) for sinks in (False, True)),
        ],
        fast=[(70, False, True), *([(1, False, False), (70, True, False)] if CUDA else [])],
    ),
)
def test_rows_with_a_window_or_sinks_keep_their_bits(
    ops: triton_ops.TritonOps, window: int, dtype: torch.dtype, fp8: bool, sinks: bool
) -> None:
    """In decode and prefill tiles, alone and in company, however many programs share a tile's pieces; freed blocks are
    null."""
    if CUDA and fp8 and dtype is torch.float32:
        pytest.skip("an engine refuses it")
    heads = HeadShape(4, 2, 16, window=window)
    paged = Paged(heads, [1100, 40, 1100], dtype, fp8=fp8)
    ops.reserve([heads], DEVICE)
    assert ops._workspace is not None
    logits = torch.linspace(-4, 6, heads.num_heads, device=DEVICE) if sinks else None

    def run(spans: list[tuple[int, int, int]], prefill: bool, programs: int = 1) -> list[torch.Tensor]:
        ops._workspace.programs = lambda heads, programs=programs: programs
        batch = paged.batch(ops, spans, prefill)
        for row, (_, first, _) in enumerate(spans if window else ()):
            batch.block_tables[row, : max(0, first + 1 - window) // BLOCK_SIZE] = 0
        each = [queries[s][first:last] for s, first, last in spans]
        out = ops.attention(torch.cat(each), batch, heads, paged.k, paged.v, paged.scales, logits)
        return list(out.split([len(q) for q in each]))

    queries = [randn(n, heads.num_heads, heads.head_dim, dtype=dtype) for n in paged.lengths]
    spans = [(0, 1060, 1100), (1, 0, 40), (2, 500, 530)]
    whole = run(spans, prefill=True)
    batch = paged.batch(ops, spans, prefill=True)
    q = torch.cat([queries[s][first:last] for s, first, last in spans])
    close(torch.cat(whole), ReferenceOps().attention(q, batch, heads, paged.k, paged.v, paged.scales, logits), dtype)
    for programs in (1, 2, 64):
        for i, ours in enumerate(run([(0, 1090, 1100), (1, 38, 40), (2, 509, 516)], False, programs)):
            part = [slice(30, 40), slice(38, 40), slice(9, 16)][i]
            assert same_bits(ours, whole[i][part]), (programs, i)
    for row in (0, 4, 39):
        assert same_bits(run([(0, 1060 + row, 1061 + row)], False, 3)[0], whole[0][row : row + 1])
    assert same_bits(run([(0, 1075, 1100)], True)[0], whole[0][15:])


def test_padding_is_stored_nowhere(ops: triton_ops.TritonOps) -> None:
    paged = Paged(HeadShape(4, 2, 16), [40], torch.float32)
    batch = paged.batch(ops, [(0, 36, 40)], prefill=False)
    batch.slot_mapping[1:] = -1
    rope = Rope(randn(64, 8), randn(64, 8))
    for kernels in (ops, ReferenceOps()):
        k, v = paged.k.clone(), paged.v.clone()
        kernels.rope_and_store(randn(4, 8 * 16), batch, rope, paged.heads, k, v)
        for cache, before in ((k, paged.k), (v, paged.v)):
            changed = (cache != before).flatten(0, 1).any(-1).any(-1)
            assert changed.nonzero().flatten().tolist() == [int(batch.slot_mapping[0])]


def test_block_tables_are_looked_up_by_row(ops: triton_ops.TritonOps) -> None:
    """As in the engine: a table for every slot of the state, whose first column is something else."""
    paged = Paged(HeadShape(4, 2, 16), [5, 300, 40], torch.float32)
    ops.reserve([paged.heads], DEVICE)
    batch = paged.batch(ops, [(0, 4, 5), (1, 297, 300), (2, 38, 40)], prefill=False)
    q = randn(len(batch.positions), 4, 16)
    tables = torch.full((8, 1 + batch.block_tables.shape[1]), 10**6, dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([6, 0, 3], dtype=torch.int32, device=DEVICE)
    tables[rows, 1:] = batch.block_tables
    scattered = dataclasses.replace(batch, block_tables=tables[:, 1:], table_rows=rows)
    expected = ops.attention(q, batch, paged.heads, paged.k, paged.v)
    assert same_bits(ops.attention(q, scattered, paged.heads, paged.k, paged.v), expected)


def test_noise_is_the_same_function() -> None:
    """The kernel and the torch code must not be two different generators."""
    from ssd.kernels.triton.sampling import gumbel
    from ssd.sampling import noise

    keys = [noise.position_key(seed, position) for seed in (0, 7, 2**64 - 1) for position in (0, 5, 100000)]
    constants = [noise.signed(c) for c in (noise._GOLDEN, noise._MIX1, noise._MIX2)]
    signed = torch.tensor([noise.signed(k) for k in keys], device=DEVICE)
    ours = gumbel(signed, 2500, *constants).cpu()
    theirs = noise.gumbel(keys, 2500, torch.device("cpu"))
    assert (ours - theirs).abs().max() < 2e-6
    assert same_bits(gumbel(signed[3:4], 2500, *constants).cpu()[0], ours[3])


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("columns", "depth"), [(6144, 4096), (4096, 14336), (1024, 3072), (12800, 5120), (960, 576)])
def test_linear_rows_keep_their_bits(ops: triton_ops.TritonOps, columns: int, depth: int, dtype: torch.dtype) -> None:
    """Exactness on the GPU rests on this: whatever the number of rows (and so the tile), a row's bits stay."""
    x, w = randn(600, depth, dtype=dtype), randn(columns, depth, dtype=dtype)
    plain, both = ops.prepare(w), ops.prepare(w, gated=True)
    whole, gated, wide = plain.linear(x), both.linear(x), plain.linear(x, float32=True)
    for rows in (1, 2, 7, 16, 17, 32, 33, 64, 65, 100, 128, 129, 256, 300):
        assert same_bits(plain.linear(x[:rows]), whole[:rows]), f"{rows} rows"
        assert same_bits(plain.linear(x[-rows:]), whole[-rows:]), f"last {rows} rows"
        assert same_bits(both.linear(x[:rows]), gated[:rows]), f"gated, {rows} rows"
        assert same_bits(plain.linear(x[:rows], float32=True), wide[:rows]), f"float32 sums, {rows} rows"


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("block_size", [16, 64])
@pytest.mark.parametrize("heads", [HeadShape(32, 8, 128), HeadShape(32, 8, 64), HeadShape(40, 8, 128)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "fp8", "sinks"),
    [
        (torch.bfloat16, False, False),
        (torch.bfloat16, True, False),
        (torch.bfloat16, False, True),
        (torch.float32, False, False),
    ],
    ids=str,
)
def test_attention_rows_keep_their_bits(
    ops: triton_ops.TritonOps, heads: HeadShape, block_size: int, dtype: torch.dtype, fp8: bool, sinks: bool
) -> None:
    """A query's bits are the same in a prefill, a chunk, a decode step and a verification, in any company."""
    lengths = [700, 129, 64, 1000, 5000]
    paged = Paged(heads, lengths, dtype, block_size, fp8=fp8)
    ops.reserve([heads], DEVICE)
    logits = torch.linspace(-4, 6, heads.num_heads, device=DEVICE) if sinks else None
    whole = paged.batch(ops, [(s, 0, n) for s, n in enumerate(lengths)], prefill=True)
    q = randn(sum(lengths), heads.num_heads, heads.head_dim, dtype=dtype)
    expected = ops.attention(q, whole, heads, paged.k, paged.v, paged.scales, logits).split(lengths)
    parts = q.split(lengths)
    for s, n in enumerate(lengths):
        for first, last, prefill in ((n - 1, n, False), (n - 8, n, False), (n // 2, n, True), (n - 40, n - 3, True)):
            batch = paged.batch(ops, [(s, first, last)], prefill)
            q = parts[s][first:last].contiguous()
            ours = ops.attention(q, batch, heads, paged.k, paged.v, paged.scales, logits)
            assert same_bits(ours, expected[s][first:last]), f"sequence {s}, positions {first}..{last}"
    many = paged.batch(ops, [(s, n - 1, n) for s, n in enumerate(lengths)] * 60, prefill=False)  # one program per tile
    ops.plan(many, heads, paged.k)  # a kernel that is not launched early follows, as the rule is (`launching`)
    rows = torch.stack([part[-1] for part in parts] * 60)
    together = ops.attention(rows, many, heads, paged.k, paged.v, paged.scales, logits)
    assert same_bits(together, torch.stack([part[-1] for part in expected] * 60))


@pytest.mark.parametrize(
    ("contexts", "most"),
    mostly_slow(
        [([33 * 512] * 2, 3), ([32 * 512] * 2, 2), ([5000, 1, 700], 1), ([1000] * 35, 2)],
        fast=[([33 * 512] * 2, 3), ([5000, 1, 700], 1), *([([32 * 512] * 2, 2), ([1000] * 35, 2)] if CUDA else [])],
    ),
)
def test_pieces_are_shared_out_once_in_no_more_items_than_programs(contexts: list[int], most: int) -> None:
    """Where there are fewer tiles than the 33 programs. `most`: pieces of an item."""
    heads = HeadShape(8, 2, 128)
    workspace = attention.Workspace([heads], DEVICE)
    batch, _ = paged_batch([(context - 1, 1) for context in contexts], 64, tile_tokens=4, device=DEVICE)
    items = workspace.items(batch, heads, 33).items.tolist()
    assert not workspace.items(batch, heads, 33, before_pass=True).before_pass  # a plan made during the pass stays one
    assert workspace.items(batch.again(), heads, 33, before_pass=True).before_pass
    live = [item for item in items if item[0] >= 0]
    assert items[: len(live)] == live
    assert len(contexts) > 33 or len(live) <= 33
    found = sorted((row, piece) for row, _, _, _, first, end, *_ in live for piece in range(first, end))
    assert found == [(row, piece) for row, context in enumerate(contexts) for piece in range(-(-context // 512))]
    assert max(end - first for _, _, _, _, first, end, *_ in live) == most
