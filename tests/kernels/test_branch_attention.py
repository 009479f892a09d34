"""Attention of branches: alternative continuations of a sequence share its KV and have KV slots of their own."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from device_batches import make_device_batch
from reference_ops import ReferenceOps

from ssd.kernels.cpu import library
from ssd.kernels.cpu.ops import CpuOps
from ssd.kernels.ops import UNSCALED, Branches, DeviceBatch, HeadShape, KVScales, Ops

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
CPU = torch.device("cpu")
BLOCK_SIZE = 16
PADDING = (10**6, -1)  # position and slot: nothing may come of the position
FORKS = [[40, 37, 40, 38, 40], [300, 300, 299], [1], [128, 129, 127, 128, 130, 16, 15, 64, 65], [257] * 12, [0, 5]]


class Trees:
    """Sequences in shuffled KV blocks, and branches that leave them after `forks` tokens. Unused slots hold NaN."""

    def __init__(
        self,
        heads: HeadShape,
        forks: list[list[int]],
        branches: Branches,
        dtype: torch.dtype,
        device: torch.device,
        *,
        fp8: bool = False,
        sinks: bool = False,
    ) -> None:
        self.sinks = torch.linspace(-4, 6, heads.num_heads, device=device) if sinks else None
        self.heads, self.forks, self.branches, self.device = heads, forks, branches, device
        width = max(map(max, forks)) // BLOCK_SIZE + 1
        tables = torch.randperm(len(forks) * width).reshape(len(forks), width)
        self.tables = tables.tolist()
        first = tables.numel() * BLOCK_SIZE + 3  # the first slot, not aligned to a block
        starts = [first + branches.slots_per_branch * i for i in range(sum(map(len, forks)))]
        self.last_slots = [[starts.pop(0) + branches.depth for _ in own] for own in forks]
        blocks = tables.numel() + -(-(3 + branches.slots_per_branch * sum(map(len, forks))) // BLOCK_SIZE)
        shape = (blocks, BLOCK_SIZE, heads.num_kv_heads, heads.head_dim)
        stored = torch.float8_e4m3fn if fp8 else dtype
        self.scales = KVScales(k=0.7, v=1.3) if fp8 else UNSCALED
        self.k, self.v = (torch.full(shape, float("nan"), dtype=stored, device=device) for _ in range(2))
        self.q = [torch.randn(len(own), heads.num_heads, heads.head_dim).to(device, dtype) for own in forks]
        used = sorted({slot for s, own in enumerate(forks) for j in range(len(own)) for slot in self.seen(s, j)})
        self.v = self.k if heads.latent_dim else self.v
        for cache in (self.k, self.v):
            cache.flatten(0, 1)[used] = torch.randn(len(used), *shape[2:]).to(device, stored)

    def seen(self, s: int, j: int) -> list[int]:
        """All slots that branch j of sequence s sees, in order."""
        own = [self.last_slots[s][j] - i for i in range(self.branches.depth, -1, -1)]
        return self.slots(s, self.forks[s][j]) + own

    def slots(self, s: int, length: int) -> list[int]:
        """Slots of the first positions of a sequence."""
        return [self.tables[s][p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(length)]

    def batch(self, ops: Ops, picks: list[tuple[int, list[int]]], padding: int) -> tuple[torch.Tensor, DeviceBatch]:
        """Queries and batch of some branches of some sequences, each followed by rows of padding."""
        rows: list[tuple[int, int]] = []
        starts, q = [0], []
        for s, own in picks:
            rows += [(self.forks[s][j] + self.branches.depth, self.last_slots[s][j]) for j in own] + [PADDING] * padding
            starts.append(len(rows))
            q += [self.q[s][own], torch.zeros(padding, *self.q[s].shape[1:]).to(self.q[s])]
        positions, slots = map(list, zip(*rows, strict=True))
        tables = [self.tables[s] for s, _ in picks]
        batch = make_device_batch(
            *(positions, slots, starts, [0] * len(picks), tables),
            tile_tokens=ops.tile_tokens([self.heads], prefill=False),
            device=self.device,
            branches=self.branches,
        )
        return torch.cat(q), batch

    def run(self, ops: Ops, picks: list[tuple[int, list[int]]], padding: int = 0) -> list[torch.Tensor]:
        """Results of those branches, sequence by sequence, without the padding."""
        q, batch = self.batch(ops, picks, padding)
        out = ops.attention(q, batch, self.heads, self.k, self.v, self.scales, self.sinks)
        parts = out.split([len(own) + padding for _, own in picks])
        return [part[: len(own)] for part, (_, own) in zip(parts, picks, strict=True)]

    def run_all(self, ops: Ops, padding: int = 0) -> list[torch.Tensor]:
        return self.run(ops, [(s, list(range(len(own)))) for s, own in enumerate(self.forks)], padding)

    def dense(self, s: int, j: int, first: int = 0) -> torch.Tensor:
        return self.attend(s, j, self.seen(s, j)[first:][-self.heads.window :])

    def attend(self, s: int, j: int, seen: list[int]) -> torch.Tensor:
        """One branch's result from its full lists of keys and values, head by head, in float64."""
        k, v = (cache.flatten(0, 1)[seen].double() for cache in (self.k, self.v))
        out = []
        for h in range(self.heads.num_heads):
            scores = k[:, h // self.heads.group_size] @ self.q[s][j, h].double() * self.heads.scale
            if self.sinks is not None:
                scores = torch.cat((scores, self.sinks[h : h + 1].double()))
            values = v[:, h // self.heads.group_size, : self.heads.value_dim]
            out.append(scores.softmax(0)[: len(v)] @ values)
        return torch.cat(out)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def cpu() -> CpuOps:
    return CpuOps(library.load())


def close(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for s, (one, other) in enumerate(zip(ours, theirs, strict=True)):
        limit = 1e-5 if one.dtype is torch.float32 else 1e-2
        assert (one.float() - other.float()).norm(dim=-1).le(limit * other.float().norm(dim=-1)).all(), f"sequence {s}"


@pytest.mark.parametrize("window", mostly_slow([0, 1, 3, 40], fast={0, 3}))
@pytest.mark.parametrize(
    ("branches", "sinks"),
    mostly_slow(
        itertools.product([Branches(0, 1), Branches(0, 6), Branches(3, 4), Branches(2, 7)], [False, True]),
        fast=[(Branches(0, 6), True), (Branches(2, 7), False)],
    ),
    ids=str,
)
def test_reference_is_dense_attention(branches: Branches, window: int, sinks: bool) -> None:
    trees = Trees(HeadShape(6, 2, 32, window=window), FORKS, branches, torch.float32, CPU, sinks=sinks)
    dense = [torch.stack([trees.dense(s, j) for j in range(len(own))]) for s, own in enumerate(FORKS)]
    close(trees.run_all(ReferenceOps()), dense)
    close(trees.run_all(ReferenceOps(), padding=2), dense)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "heads",
    mostly_slow(
        [
            *[HeadShape(2, 2, 32), HeadShape(9, 3, 64), HeadShape(8, 2, 128), HeadShape(5, 1, 64)],
            *[HeadShape(4, 2, 32, window=window) for window in (1, 5, 68, 100)],
            *[HeadShape(5, 1, 24, latent_dim=16), HeadShape(50, 1, 576, latent_dim=512)],
        ],
        fast=[HeadShape(9, 3, 64), HeadShape(4, 2, 32, window=68), HeadShape(5, 1, 24, latent_dim=16)],
    ),
    ids=str,
)
def test_c_kernel(cpu: CpuOps, heads: HeadShape, dtype: torch.dtype) -> None:
    """The last branch is longer than one softmax chunk."""
    for branches in (Branches(0, 1), Branches(1, 8), Branches(7, 8), Branches(69, 70)):
        for fp8, sinks in ((False, False), (True, False), (False, True), (True, True)):
            trees = Trees(heads, FORKS, branches, dtype, CPU, fp8=fp8, sinks=sinks)
            close(trees.run_all(cpu), trees.run_all(ReferenceOps()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("heads", [HeadShape(4, 4, 64), HeadShape(9, 3, 32), HeadShape(4, 2, 32, window=70)], ids=str)
@pytest.mark.parametrize("sinks", [False, True])
def test_c_rows_keep_their_bits(cpu: CpuOps, heads: HeadShape, dtype: torch.dtype, sinks: bool) -> None:
    """Alone, in any company and order, beside padding, with any number of threads."""
    trees = Trees(heads, FORKS, Branches(4, 6), dtype, CPU, sinks=sinks)
    whole = trees.run_all(cpu)
    rows = torch.cat(whole)
    assert same_bits(torch.cat(trees.run_all(cpu, padding=3)), rows)
    alone = [trees.run(cpu, [(s, [j])])[0] for s, own in enumerate(FORKS) for j in range(len(own))]
    assert same_bits(torch.cat(alone), rows)
    picks = [(4, [11, 3, 7]), (3, [8, 0, 6, 2]), (2, []), (0, [4, 1])]
    for ours, (s, own) in zip(trees.run(cpu, picks), picks, strict=True):
        assert same_bits(ours, whole[s][own])
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        assert same_bits(torch.cat(trees.run_all(cpu)), rows)


def test_padding_alone(cpu: CpuOps) -> None:
    """Nothing but padding, in one of the sequences or all."""
    trees = Trees(HeadShape(4, 2, 32), [[20, 21], [33]], Branches(1, 3), torch.float32, CPU)
    for ops in (ReferenceOps(), cpu):
        expected = trees.run_all(ops)
        assert same_bits(trees.run(ops, [(0, []), (1, [0])], padding=2)[1], expected[1])
        trees.run(ops, [(0, []), (1, [])], padding=4)


@pytest.mark.parametrize("kernels", ["reference", "C", "triton"])
def test_positions_before_the_first_are_not_seen(kernels: str, request: pytest.FixtureRequest) -> None:
    """As an EAGLE head needs it, whose first position has no feature: in branches, and in a plain decode step."""
    heads, forks = HeadShape(6, 2, 16), [[1, 40], [2], [130]]
    from_one = dataclasses.replace(heads, first_position=1)
    ops: Ops = ReferenceOps()
    if kernels == "C":
        ops = request.getfixturevalue("cpu")
    elif kernels == "triton":
        ops = pytest.importorskip("ssd.kernels.triton.ops", reason="triton is not installed").TritonOps()
        ops.reserve([heads], DEVICE)
    device = DEVICE if kernels == "triton" else CPU
    trees = Trees(heads, forks, Branches(2, 4), torch.float32, device)
    for cache in (trees.k, trees.v):
        cache.nan_to_num_(7.0)  # what is not seen must be finite
    q, batch = trees.batch(ops, [(s, list(range(len(own)))) for s, own in enumerate(forks)], 0)
    out = ops.attention(q, batch, from_one, trees.k, trees.v)
    expected = [trees.dense(s, j, first=1) for s, own in enumerate(forks) for j in range(len(own))]
    close([out], [torch.stack(expected)])

    lengths = [2, 17, 130]  # query tokens at the last two positions; the first of them may see nothing
    slots = [slot for s, n in enumerate(lengths) for slot in trees.slots(s, n)[-2:]]
    positions = [p for n in lengths for p in (n - 2, n - 1)]
    tile = ops.tile_tokens([heads], prefill=False)
    plain = make_device_batch(positions, slots, [0, 2, 4, 6], lengths, trees.tables, tile_tokens=tile, device=device)
    q = torch.randn(6, heads.num_heads, heads.head_dim, device=device)
    out = ops.attention(q, plain, from_one, trees.k, trees.v)
    trees.q, trees.forks = list(q.split(2)), [[n - 2, n - 1] for n in lengths]
    for s, own in enumerate(trees.forks):
        for j, position in enumerate(own):
            if position > 0:
                close([out[None, 2 * s + j]], [trees.attend(s, j, trees.slots(s, position + 1)[1:])[None]])


ALSO_ON_A_GPU = (
    [
        (HeadShape(6, 2, 16), Branches(0, 1)),
        (HeadShape(2, 2, 24), Branches(2, 6)),
        (HeadShape(4, 1, 16), Branches(69, 70)),
        (HeadShape(20, 1, 576, latent_dim=512), Branches(3, 4)),
        (HeadShape(128, 1, 576, latent_dim=512), Branches(2, 6)),
    ]
    if CUDA
    else []
)


class TestTriton:
    """In Triton's interpreter on a CPU (float32: its bfloat16 dot is wrong), for real on a GPU."""

    DTYPES = (torch.float32, torch.bfloat16) if CUDA else (torch.float32,)

    @pytest.fixture
    def ops(self) -> Ops:
        triton_ops = pytest.importorskip("ssd.kernels.triton.ops", reason="triton is not installed")
        return triton_ops.TritonOps()

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize(
        ("heads", "branches"),
        mostly_slow(
            [
                (HeadShape(6, 2, 16), Branches(0, 1)),
                (HeadShape(8, 2, 32), Branches(3, 4)),
                (HeadShape(5, 1, 64), Branches(5, 17)),
                (HeadShape(2, 2, 24), Branches(2, 6)),
                (HeadShape(4, 1, 16), Branches(69, 70)),
                (HeadShape(4, 2, 16, window=70), Branches(2, 6)),
                (HeadShape(4, 1, 16, window=5), Branches(69, 70)),
                (HeadShape(20, 1, 72, latent_dim=64), Branches(3, 4)),
                (HeadShape(40, 1, 28, latent_dim=20), Branches(69, 70)),
            ],
            fast=[
                (HeadShape(4, 2, 16, window=70), Branches(2, 6)),
                (HeadShape(40, 1, 28, latent_dim=20), Branches(2, 6)),
                *ALSO_ON_A_GPU,
            ],
        ),
        ids=str,
    )
    @pytest.mark.parametrize("fp8", mostly_slow([False, True], fast={False}))
    def test_kernel(self, ops: Ops, heads: HeadShape, branches: Branches, dtype: torch.dtype, fp8: bool) -> None:
        if fp8 and heads.latent_dim:
            pytest.skip("an engine refuses it")
        forks, sinks = [[128, 300, 127, 16, 257], [40, 38], [0]], heads.num_kv_heads == 2
        trees = Trees(heads, forks, branches, dtype, DEVICE, fp8=fp8, sinks=sinks)
        ops.reserve([heads], DEVICE)
        expected = trees.run_all(ReferenceOps())
        close(trees.run_all(ops, padding=2), expected)
        close(trees.run(ops, [(1, [1]), (0, [3, 0])]), [expected[1][[1]], expected[0][[3, 0]]])

    def test_padded_tiles(self, ops: Ops) -> None:
        """As in a CUDA graph: tiles without a sequence, rows that no sequence has."""
        trees = Trees(HeadShape(4, 2, 32), [[20, 200], [33]], Branches(1, 3), torch.float32, DEVICE)
        ops.reserve([trees.heads], DEVICE)
        q, batch = trees.batch(ops, [(0, [0, 1]), (1, [0])], 0)
        position, slot = PADDING
        padded = dataclasses.replace(
            batch,
            positions=torch.nn.functional.pad(batch.positions, (0, 5), value=position),
            slot_mapping=torch.nn.functional.pad(batch.slot_mapping, (0, 5), value=slot),
            tiles=torch.nn.functional.pad(batch.tiles, (0, 5), value=-1),
        )
        ours = ops.attention(torch.cat((q, q, q))[:8].contiguous(), padded, trees.heads, trees.k, trees.v)[:3]
        assert same_bits(ours, ops.attention(q, batch, trees.heads, trees.k, trees.v))
        close([ours], [torch.cat(trees.run_all(ReferenceOps()))])

    @pytest.mark.gpu
    @pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
    @pytest.mark.parametrize("heads", [HeadShape(32, 8, 128), HeadShape(9, 3, 64), HeadShape(8, 8, 64)], ids=str)
    @pytest.mark.parametrize("sinks", [False, True])
    def test_rows_keep_their_bits(self, ops: Ops, heads: HeadShape, sinks: bool) -> None:
        """Whatever a branch's place among the others."""
        ops.reserve([heads], DEVICE)
        for depth, slots in itertools.chain(((d, 8) for d in range(8)), [(20, 24), (69, 70)]):
            trees = Trees(heads, FORKS, Branches(depth, slots), torch.bfloat16, DEVICE, sinks=sinks)
            whole = trees.run_all(ops)
            assert same_bits(torch.cat(trees.run_all(ops, padding=3)[:2]), torch.cat(whole[:2]))
            for s, own in enumerate(FORKS):
                for j in range(len(own)):
                    assert same_bits(trees.run(ops, [(s, [j])])[0][0], whole[s][j]), f"sequence {s}, branch {j}"
