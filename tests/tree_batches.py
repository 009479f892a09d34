"""A sequence with a random token tree in a paged cache, for tests of attention: its nodes have the bits of chains."""

from __future__ import annotations

import random
from dataclasses import replace

import torch
from bits import same_bits
from device_batches import make_device_batch

from ssd.kernels.ops import UNSCALED, DeviceBatch, HeadShape, KVScales, Ops, TreePaths

BLOCK_SIZE = 16
DEPTH = 5
NOT_DECIDED = 1 << 30
NODES = 11


class Tree:
    """A sequence of some decided tokens, and a random tree behind them. Node i is in the slot of the i-th position
    behind; unused slots hold NaN, unless whole blocks are read."""

    def __init__(
        self,
        decided: int,
        heads: HeadShape,
        dtype: torch.dtype,
        device: torch.device,
        dice: random.Random,
        *,
        block_size: int = BLOCK_SIZE,
        fp8: bool = False,
        sinks: bool = False,
    ) -> None:
        self.decided, self.heads, self.device, self.size = decided, heads, device, block_size
        self.sinks = torch.linspace(-4, 6, heads.num_heads, device=device) if sinks else None
        self.parents: list[int] = []
        self.paths: list[list[int]] = [[]]  # of the last decided token, then of each node
        while len(self.parents) < NODES:
            parent = dice.choice([-1, len(self.parents) - 1, dice.randint(-1, len(self.parents) - 1)])
            if len(self.paths[parent + 1]) < DEPTH:
                self.paths.append([*self.paths[parent + 1], len(self.parents)])
                self.parents.append(parent)
        blocks = -(-(decided + NODES) // block_size)
        self.table = torch.randperm(2 * blocks)[:blocks].tolist()
        self.chain_table = [b for b in range(2 * blocks) if b not in self.table]  # where each chain is in turn
        shape = (2 * blocks, block_size, heads.num_kv_heads, heads.head_dim)
        stored = torch.float8_e4m3fn if fp8 else dtype
        self.scales = KVScales(k=0.7, v=1.3) if fp8 else UNSCALED
        fill = 0.0 if block_size % 64 == 0 else float("nan")
        self.k, self.v = (torch.full(shape, fill, dtype=stored, device=device) for _ in range(2))
        slots = [self.slot(self.table, p) for p in range(decided + NODES)]
        for cache in (self.k, self.v):
            cache.flatten(0, 1)[slots] = torch.randn(len(slots), *shape[2:]).to(device, stored)
        if heads.latent_dim:  # latent attention: values are the first columns of keys
            self.v = self.k
        self.q = torch.randn(1 + NODES, heads.num_heads, heads.head_dim).to(device, dtype)

    def slot(self, table: list[int], position: int) -> int:
        return table[position // self.size] * self.size + position % self.size

    def batch(self, ops: Ops, rows: list[int], before: int) -> tuple[torch.Tensor, DeviceBatch]:
        """Some rows of the tree (0: the last decided token, i + 1: node i), behind the last `before` decided tokens,
        which are of a prompt: as a work of their own. If their ancestors are not all among them, paths name rows that
        are in no batch."""
        together = all(node + 1 in rows for row in rows for node in self.paths[row])
        start = self.decided - 1 - before
        slots = [self.slot(self.table, p) for p in range(start, self.decided)]
        positions = list(range(start, self.decided))
        paths, decided = [[0] * DEPTH for _ in positions], [NOT_DECIDED] * before + [self.decided]
        first = len(slots) - 1
        for row in rows:
            path = [first + 1 + rows.index(node + 1) if together else node for node in self.paths[row]]
            paths.append(path + [0] * (DEPTH - len(path)))
            positions.append(self.decided - 1 + len(path))
            slots.append(self.slot(self.table, self.decided + row - 1))
            decided.append(self.decided)
        starts = [0, before, len(slots)] if before else [0, len(slots)]
        context = [self.decided - 1, self.decided + len(rows)] if before else [self.decided + len(rows)]
        batch = make_device_batch(
            *(positions, slots, starts, context, [self.table] * len(context)),
            tile_tokens=ops.tile_tokens([self.heads], prefill=False),
            device=self.device,
        )
        named = slots if together else [self.slot(self.table, self.decided + node) for node in range(NODES)]
        tree = TreePaths(*(torch.tensor(x, dtype=torch.int32, device=self.device) for x in (paths, decided, named)))
        q = torch.cat((torch.randn(before, *self.q.shape[1:]).to(self.q), self.q[[0, *rows]]))
        return q, replace(batch, tree=tree)

    def run(self, ops: Ops, rows: list[int], before: int = 0) -> torch.Tensor:
        """Results of the last decided token and of these rows."""
        q, batch = self.batch(ops, rows, before)
        return ops.attention(q, batch, self.heads, self.k, self.v, self.scales, self.sinks)[before:]

    def chain(self, ops: Ops, row: int) -> torch.Tensor:
        """What the row has in a chain of its own, whose KV is in other blocks; in one batch with its ancestors."""
        path = self.paths[row]
        source = [*range(self.decided), *(self.decided + node for node in path)]
        for cache in (self.k, self.v):
            flat = cache.flatten(0, 1)
            flat[[self.slot(self.chain_table, p) for p in range(len(source))]] = flat[
                [self.slot(self.table, p) for p in source]
            ]
        positions = list(range(self.decided - 1, len(source)))
        batch = make_device_batch(
            *(positions, [-1] * len(positions), [0, len(positions)], [len(source)], [self.chain_table]),
            tile_tokens=ops.tile_tokens([self.heads], prefill=False),
            device=self.device,
        )
        q = self.q[[0, *(node + 1 for node in path)]]
        return ops.attention(q, batch, self.heads, self.k, self.v, self.scales, self.sinks)[-1]


def check_tree(ops: Ops, tree: Tree, dice: random.Random) -> None:
    """All rows together, a few with their ancestors or without, and behind rows of a prompt: the bits of chains."""
    expected = torch.stack([tree.chain(ops, row) for row in range(1 + NODES)])
    rows = list(range(1, 1 + NODES))
    assert not expected.isnan().any()
    assert same_bits(tree.run(ops, rows), expected)
    leaf = dice.choice(rows)
    some = sorted({node + 1 for node in tree.paths[leaf]} | {node + 1 for node in tree.paths[dice.choice(rows)]})
    assert same_bits(tree.run(ops, some), expected[[0, *some]])
    deep = sorted(rows, key=lambda row: -len(tree.paths[row]))[: NODES // 2]
    assert same_bits(tree.run(ops, deep), expected[[0, *deep]])
    if tree.decided > 4:
        assert same_bits(tree.run(ops, rows, before=4), expected)
