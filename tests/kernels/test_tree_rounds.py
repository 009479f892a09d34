"""Kernels of rounds with token trees against plain Python: in C, and in Triton (in its interpreter on a CPU)."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from conftest import mostly_slow

from ssd.execution import batch as batches
from ssd.execution.batch import Batch, BatchInputs, TileSizes
from ssd.execution.state import SequenceState
from ssd.kernels.cpu import features as features_cpu
from ssd.kernels.device import kernels
from ssd.kernels.state import LastRows, TreeRows

triton_rounds = pytest.importorskip("ssd.kernels.triton.rounds", exc_type=ImportError)
triton_runs = pytest.importorskip("ssd.kernels.triton.runs", exc_type=ImportError)
triton_features = pytest.importorskip("ssd.kernels.triton.features", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
ALL = ((kernels(CPU).rounds, features_cpu, CPU), (triton_rounds, triton_features, DEVICE))
RUNS = ((kernels(CPU).runs, CPU), (triton_runs, DEVICE))
VOCAB, BLOCK_SIZE, MAX_LEN, SLOTS, NODES, DEPTH, WIDTH = 6, 4, 60, 5, 9, 4, 3
NOT_DECIDED = 1 << 30


class World:
    """Sequences with random trees, of which some have nodes that are none; a batch that has some of them."""

    def __init__(self, seed: int) -> None:
        self.dice = dice = random.Random(seed)
        self.lengths = [dice.randint(2, MAX_LEN - 20) for _ in range(SLOTS)]
        self.drafts = [[dice.randrange(VOCAB) for _ in range(NODES)] for _ in range(SLOTS)]
        self.parents = [[dice.choice([-1, i - 1, dice.randint(-1, i - 1)]) for i in range(NODES)] for _ in range(SLOTS)]
        for parents in self.parents[:2]:
            parents[dice.randrange(NODES)] = dice.choice([-2, NODES, 7, 1 << 20])
        self.blocks = [length // BLOCK_SIZE + 1 + dice.randint(0, 3) for length in self.lengths]
        kinds = [dice.choice(["node", "node", "prompt", "chunk"]) for _ in range(SLOTS)]
        self.slots = dice.sample(range(SLOTS), SLOTS)
        starts, queries, logits = [], [], []
        for slot, kind in zip(self.slots, kinds, strict=True):
            drafted, left = dice.randint(0, NODES), dice.randint(2, self.lengths[slot])
            starts.append(-1 if kind == "node" else self.lengths[slot] - left)
            queries.append({"node": 1 + drafted, "prompt": left, "chunk": left - 1}[kind])
            logits.append({"node": 1 + drafted, "prompt": 1, "chunk": 0}[kind])
        self.batch = Batch(self.slots, starts, queries, logits)
        self.works = list(zip(self.slots, starts, queries, logits, strict=True))

    def state(self, device: torch.device) -> SequenceState:
        sizes = {"max_len": MAX_LEN, "lookahead": NODES, "vocab_size": VOCAB, "tree_depth": DEPTH}
        state = SequenceState(SLOTS, **sizes, device=device)
        assert state.tree is not None
        state.length[:SLOTS] = torch.tensor(self.lengths)
        state.drafts[:SLOTS] = torch.tensor(self.drafts)
        state.tree.parents[:SLOTS] = torch.tensor(self.parents)
        return state

    def tables(self, device: torch.device) -> torch.Tensor:
        columns = -(-(MAX_LEN + 5 * NODES) // BLOCK_SIZE)
        tables = torch.randperm((SLOTS + 1) * columns, generator=torch.Generator().manual_seed(0)).int()
        tables = torch.cat((torch.zeros(SLOTS + 1, 1).int(), tables.view(SLOTS + 1, columns)), dim=1)
        tables[:SLOTS, 0] = torch.tensor(self.blocks)
        return tables.to(device)

    def inputs(self, rounds: Any, device: torch.device, monkeypatch: pytest.MonkeyPatch, padding: int) -> BatchInputs:
        monkeypatch.setattr(batches, "kernels", lambda _: type("Kernels", (), {"rounds": rounds}))
        batch = self.batch
        inputs = BatchInputs(
            batch.num_rows + padding,
            batch.num_logit_rows + padding,
            works=SLOTS + padding,
            tiles=TileSizes(3, 3),
            gather=True,
            device=device,
            tree_depth=DEPTH,
        )
        inputs.write(batch)
        inputs.prepare(self.state(device), [self.tables(device)], BLOCK_SIZE)
        return inputs

    def path(self, slot: int, node: int) -> list[int] | None:
        """The nodes down to this one; None: it is none."""
        path: list[int] = []
        while node >= 0:
            path.append(node)
            parent = self.parents[slot][node]
            if parent < -1 or parent >= node:
                return None
            node = parent
        return path[::-1] if len(path) <= DEPTH else None


@pytest.mark.parametrize("seed", mostly_slow(range(12), fast=range(4)))
def test_nodes(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Positions, paths and what is decided; nodes that are too deep, before their parents or without a slot are not
    there; prompts stay as they are."""
    world = World(seed)
    padding = seed % 3 * 60
    for rounds, _, device in ALL:
        inputs = world.inputs(rounds, device, monkeypatch, padding)
        assert inputs.tree is not None
        rows = inputs.decided(world.state(device))
        assert rows.num_drafted is not None
        assert rows.paths is not None
        paths, shared, before, _ = (each.tolist() for each in inputs.tree)
        positions, mapping = inputs.positions.tolist(), inputs.slot_mappings[0].tolist()
        found = [each.tolist() for each in (rows.slots, rows.positions, rows.num_drafted, rows.paths)]
        row = logit = 0
        for slot, start, queries, logits in world.works:
            length, first = world.lengths[slot], row
            for i in range(queries):
                if start >= 0:
                    assert (positions[row], shared[row]) == (start + i, NOT_DECIDED)
                    assert before[row] == max(0, row - 1)
                    path: list[int] | None = []
                else:
                    path = world.path(slot, i - 1)
                    above = path or []
                    assert (positions[row], shared[row]) == (length - 1 + len(above), length)
                    assert paths[row][: len(above)] == [first + 1 + node for node in above]
                    assert before[row] == (first + 1 + above[-2] if len(above) > 1 else first)
                if i >= queries - logits:
                    place = start + i if start >= 0 else length - 1 + len(path or [])
                    missing = path is None or mapping[row] < 0
                    assert found[0][logit] == (-1 if missing and i and start < 0 else slot)
                    if not missing:
                        drafted = [world.drafts[slot][node] for node in path or []]
                        assert [each[logit] for each in found[1:3]] == [place + 1, len(drafted)]
                        assert found[3][logit][: len(drafted)] == drafted
                    logit += 1
                row += 1
        assert all(each == NOT_DECIDED for each in shared[row:])


@pytest.mark.parametrize("seed", mostly_slow(range(12), fast=range(4)))
def test_acceptance(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The walk from the root, and KV that is moved to where it belongs."""
    world = World(seed)
    chosen = [world.dice.randint(-1, VOCAB - 1) for _ in range(world.batch.num_logit_rows)]
    for rounds, _, device in ALL:
        inputs, state, tables = world.inputs(rounds, device, monkeypatch, 3), world.state(device), world.tables(device)
        slots, mapping = inputs.decided(state).slots.tolist(), inputs.slot_mappings[0].tolist()
        out = torch.zeros((SLOTS + 3, 3 + 3 * NODES), dtype=torch.int32, device=device)
        padded = torch.tensor([*chosen, 0, 0, 0], dtype=torch.int32, device=device)
        cells = int(tables.max() + 1) * BLOCK_SIZE
        kv = [torch.arange(cells * size, dtype=torch.int32, device=device).view(cells, size) for size in (1, 3, 1500)]
        before = [each.clone() for each in kv]
        inputs.accept(padded, state, out)
        caches = torch.tensor([[each.data_ptr(), each[0].numel() * 4] for each in kv], device=device)
        inputs.move_accepted(state, tables, caches, BLOCK_SIZE)
        row = logit = 0
        moved = [each.clone() for each in before]
        for work, (slot, start, queries, logits) in enumerate(world.works):
            if logits:
                own, node, path = chosen[logit : logit + logits], -1, list[int]()
                while True:
                    children = (
                        i
                        for i in range(logits - 1)
                        if start < 0
                        and slots[logit + 1 + i] >= 0
                        and (world.parents[slot][i], world.drafts[slot][i]) == (node, own[node + 1])
                    )
                    node = next(children, -1)
                    if node < 0:
                        break
                    path.append(node)
                tokens = [own[node + 1] for node in (-1, *path)]
                expected = [
                    len(tokens),
                    0,
                    *tokens,
                    *[0] * (NODES + 1 - len(tokens)),
                    *world.drafts[slot][: logits - 1],
                ]
                expected += [0] * (3 + 2 * NODES - len(expected)) + path
                assert out[work].tolist() == expected + [0] * (NODES - len(path))
                length = world.lengths[slot]
                assert state.length[slot] == length + len(tokens)
                assert state.num_accepted[slot] == len(path)
                assert state.token_ids[slot, length : length + len(tokens)].tolist() == [max(0, t) for t in tokens]
                for j, node in enumerate(path):
                    for cache, old in zip(moved, before, strict=True):
                        cache[mapping[row + 1 + j]] = old[mapping[row + 1 + node]]
            row, logit = row + queries, logit + logits
        for cache, wanted in zip(kv, moved, strict=True):
            assert torch.equal(cache, wanted)


@pytest.mark.parametrize("beams", [1, 5, 8])
def test_rows_follow_rows(beams: int) -> None:
    """Of their sequence, several of them perhaps the same one, or each other."""
    dice, sequences, depth, first, slots = random.Random(beams), 3, 2, 5, 4
    above = [i // beams * beams + dice.randrange(beams) for i in range(sequences * beams)]
    cells = first + len(above) * slots + 1
    for runs, device in RUNS:
        kv = [torch.arange(cells * size, dtype=torch.int32, device=device).view(cells, size) for size in (1, 3, 700)]
        before = [each.clone() for each in kv]
        old_states = torch.randn(len(above), 900, device=device).bfloat16()
        states = old_states.clone() if beams > 1 else None
        runs.follow_rows(
            above=torch.tensor(above, device=device),
            caches=torch.tensor([[each.data_ptr(), each[0].numel() * 4] for each in kv], device=device),
            beams=beams,
            depth=depth,
            first_slot=first,
            slots_per_branch=slots,
            states=states,
        )
        assert states is None or torch.equal(states, old_states[above])
        for cache, old in zip(kv, before, strict=True):
            wanted = old.clone()
            for row, source in enumerate(above):
                to, begin = first + row * slots, first + source * slots
                wanted[to : to + depth] = old[begin : begin + depth]
            assert torch.equal(cache, wanted)


TREES = [[-1, -1, 0, 0, 2], [-1, 0, 1, 2, 0], [-1, -1, -1, 1, 1], [-1, 0, 0, 0, 1]]


@pytest.mark.parametrize("parents", mostly_slow(TREES, fast=TREES[:1]), ids=str)
def test_every_choice(parents: list[int]) -> None:
    """All choices at all nodes of a tree over three tokens: it accepts the longest path that the sampled text has, and
    so at least as much as any chain in it."""
    nodes, tokens = len(parents), [parents[:i].count(parent) for i, parent in enumerate(parents)]
    paths = [[]]  # type: list[list[int]]
    for i, parent in enumerate(parents):
        paths.append([*paths[parent + 1], i])
    every = list(itertools.product(range(3), repeat=1 + nodes))
    for rounds, _, device in ALL:
        some = every if rounds is not triton_rounds or device.type == "cuda" else every[::9]
        state = SequenceState(len(some), max_len=20, lookahead=nodes, vocab_size=3, device=device, tree_depth=nodes)
        assert state.tree is not None
        state.drafts[:], state.tree.parents[:] = (torch.tensor(each, device=device) for each in (tokens, parents))
        integers = torch.arange(len(some) * (nodes + 1), dtype=torch.int32, device=device)
        out = torch.zeros((len(some), 3 + 3 * nodes), dtype=torch.int32, device=device)
        rounds.accept_node(
            state.view,
            parents=state.tree.parents,
            path=state.tree.path,
            chosen=torch.tensor(some, dtype=torch.int32, device=device).flatten(),
            slots=integers[: len(some)],
            first_row=integers[: len(some)] * (nodes + 1),
            num_logits=torch.full_like(integers[: len(some)], nodes + 1),
            decided_slot=torch.zeros_like(integers),
            out=out,
            vocab_size=3,
        )
        for chosen, result in zip(some, out.tolist(), strict=True):
            longest = 0
            for path in paths:  # of the text that is sampled along it
                above = [-1, *path][: len(path)]
                if all(tokens[node] == chosen[before + 1] for node, before in zip(path, above, strict=True)):
                    longest = max(longest, len(path))
            assert result[0] - 1 == longest


@pytest.mark.parametrize("seed", mostly_slow(range(8), fast=range(3)))
def test_features_of_parents(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """A node reads the feature of its parent, and the next round that of the last accepted node."""
    world = World(seed)
    kept = torch.randn(SLOTS + 1, NODES + 1, WIDTH)
    accepted = torch.randint(0, DEPTH + 1, (SLOTS + 1,)).int()
    nodes = torch.randint(0, NODES, (SLOTS + 1, DEPTH)).int()
    last = [int(nodes[slot, count - 1]) + 1 if count else 0 for slot, count in enumerate(accepted.tolist())]
    fused = torch.randn(world.batch.num_rows, WIDTH)
    start = torch.full((SLOTS + 1,), -1).int()
    for rounds, features, device in ALL:
        inputs = world.inputs(rounds, device, monkeypatch, 0)
        assert inputs.tree is not None
        own = kept.clone().to(device)
        hidden, _ = features.shift_and_keep(
            fused.to(device),
            row_work=inputs["row_work"],
            slots=inputs["slots"],
            query_start=inputs["query_start"],
            positions=inputs.positions,
            slot_mapping=inputs.slot_mappings[0],
            start=start.to(device),
            kept=own,
            tree=TreeRows(inputs["starts"], inputs.tree.before, LastRows(accepted.to(device), nodes.to(device))),
        )
        expected, row = kept.clone(), 0
        for slot, first, queries, _ in world.works:
            assert torch.equal(hidden[row].cpu(), kept[slot, last[slot]])
            for i in range(1, queries):
                path = world.path(slot, i - 1) if first < 0 else None
                above = (path[-2] + 1 if len(path) > 1 else 0) if path else 0
                assert torch.equal(hidden[row + i].cpu(), fused[row + (above if first < 0 else i - 1)])
            if first < 0:
                expected[slot, :queries] = fused[row : row + queries]
            else:
                expected[slot, 0] = fused[row + queries - 1]
            row += queries
        assert torch.equal(own.cpu(), expected)


@pytest.mark.parametrize("trees", [False, True])
def test_the_last_features(trees: bool) -> None:
    """Of chains that of the position before; of trees that of the last accepted node, or of the last decided token."""
    torch.manual_seed(0)
    kept, slots, positions = torch.randn(SLOTS + 1, NODES + 1, WIDTH), [3, 0, 5, 2], [7, 1, 40, 20]
    path = torch.randint(0, NODES, (SLOTS + 1, DEPTH)).int()
    accepted = torch.tensor([2, 1, 0, DEPTH, 3, 1]).int()
    places = [(p - 1) % (NODES + 1) for p in positions]
    if trees:
        places = [int(path[s, count - 1]) + 1 if (count := int(accepted[s])) else 0 for s in slots]
    for _, features, device in ALL:
        out = torch.zeros(len(slots), 2, WIDTH, device=device)
        last = LastRows(accepted.to(device), path.to(device)) if trees else None
        own = (torch.tensor(each, device=device).int() for each in (slots, positions))
        features.before(kept.to(device), *own, last, out[:, 0])
        assert torch.equal(out[:, 0].cpu(), kept[slots, places])
        assert not out[:, 1].any()
