"""Attention of token trees: a node sees its sequence, then its ancestors, wherever their KV is; its bits are those of a
chain."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch
from conftest import mostly_slow
from tree_batches import BLOCK_SIZE, NODES, Tree, check_tree

from ssd.kernels.cpu import library
from ssd.kernels.cpu.ops import CpuOps
from ssd.kernels.ops import HeadShape

CUDA = torch.cuda.is_available()
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


CASES = [
    (torch.float32, HeadShape(4, 2, 32), False),
    (torch.bfloat16, HeadShape(8, 2, 64), False),
    (torch.float32, HeadShape(5, 1, 20), False),
    (torch.bfloat16, HeadShape(6, 2, 32, window=97), False),
    (torch.float32, HeadShape(4, 4, 32, window=3), False),
    (torch.bfloat16, HeadShape(8, 2, 64), True),
    (torch.float32, HeadShape(6, 1, 48, latent_dim=32), False),
]


@pytest.mark.parametrize("decided", mostly_slow([1, 2, 59, 63, 64, 65, 127, 511, 512, 513, 4000], fast={1, 63, 513}))
@pytest.mark.parametrize(("dtype", "heads", "fp8"), CASES)
@pytest.mark.parametrize("threads", [1, 3])
def test_nodes_have_the_bits_of_chains_on_a_cpu(
    decided: int, dtype: torch.dtype, heads: HeadShape, fp8: bool, threads: int
) -> None:
    torch.set_num_threads(threads)
    dice = random.Random(decided)
    tree = Tree(decided, heads, dtype, CPU, dice, fp8=fp8, sinks=heads.num_heads == 8)
    check_tree(CpuOps(library.load()), tree, dice)


@pytest.mark.parametrize(("row", "value"), [(1, 99), (1, -1)])
def test_paths_to_what_is_not_there(row: int, value: int) -> None:
    """Rows of ancestors are used as indices: they are checked."""
    ops = CpuOps(library.load())
    tree = Tree(40, HeadShape(2, 1, 32), torch.float32, CPU, random.Random(0))
    q, batch = tree.batch(ops, list(range(1, 1 + NODES)), 0)
    assert batch.tree is not None
    batch.tree.paths[row, 0] = value
    with pytest.raises(IndexError):
        ops.attention(q, batch, tree.heads, tree.k, tree.v)


@pytest.mark.parametrize(
    ("decided", "heads", "block_size"),
    mostly_slow(
        [
            *[(n, HeadShape(4, 2, 32), BLOCK_SIZE) for n in (1, 59, 64, 512, 513, 1100)],
            (511, HeadShape(2, 1, 32), BLOCK_SIZE),
            *[(n, HeadShape(4, 2, 32, window=97), BLOCK_SIZE) for n in (100, 600)],
            *[(n, HeadShape(16, 2, 64), 64) for n in (505, 513)],
            (510, HeadShape(4, 2, 32, first_position=1), BLOCK_SIZE),
            (513, HeadShape(8, 1, 48, latent_dim=32), BLOCK_SIZE),
        ],
        fast={(511, HeadShape(2, 1, 32), BLOCK_SIZE), (59, HeadShape(4, 2, 32), BLOCK_SIZE)},
    ),
)
def test_nodes_have_the_bits_of_chains_in_triton(decided: int, heads: HeadShape, block_size: int) -> None:
    """On a CPU in Triton's interpreter, in float32. Across pieces, and in one, of which the nodes are shared out."""
    triton_ops = pytest.importorskip("ssd.kernels.triton.ops", reason="triton is not installed")
    device, dice = torch.device("cuda" if CUDA else "cpu"), random.Random(decided)
    for dtype in (torch.float32, torch.bfloat16) if CUDA else (torch.float32,):
        ops = triton_ops.TritonOps()
        ops.reserve([heads], device)
        tree = Tree(decided, heads, dtype, device, dice, block_size=block_size, sinks=heads.num_heads == 16)
        check_tree(ops, tree, dice)
