"""Kernels of a round against numpy: those in C, and those in Triton, in its interpreter on a CPU, for real on a GPU."""

from __future__ import annotations

import itertools
import random
from types import SimpleNamespace
from typing import Any

import pytest
import reference_rounds
import torch
from bits import same_bits
from conftest import mostly_slow

from ssd.core import Origin
from ssd.execution import batch as batches
from ssd.execution.batch import Batch, BatchInputs, TileSizes
from ssd.execution.state import SequenceState
from ssd.kernels.cpu import features as features_cpu
from ssd.kernels.device import kernels

triton_rounds = pytest.importorskip("ssd.kernels.triton.rounds", exc_type=ImportError)
triton_runs = pytest.importorskip("ssd.kernels.triton.runs", exc_type=ImportError)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = torch.device("cpu")
C = kernels(CPU).rounds
ALL = ((reference_rounds, CPU), (C, CPU), (triton_rounds, DEVICE))
RUNS = ((reference_rounds, CPU), (kernels(CPU).runs, CPU), (triton_runs, DEVICE))
VOCAB, BLOCK_SIZE, MAX_LEN = 50, 4, 40
SEEDS = mostly_slow(range(12), fast=range(12 if torch.cuda.is_available() else 4))
Tensors = dict[str, torch.Tensor]


class World:
    """The state of some sequences, of random lengths, drafts and block tables; the same on every device."""

    def __init__(self, seed: int, slots: int = 7) -> None:
        self.rng = random.Random(seed)
        torch.manual_seed(seed)
        self.lookahead = self.rng.choice([0, 1, 2, 3, 5, 7])
        made = SequenceState(slots, max_len=MAX_LEN, lookahead=self.lookahead, vocab_size=VOCAB, device=CPU)
        self.columns, self.width = made.token_ids.shape[1], made.drafts.shape[1]
        self.tensors: Tensors = {
            "length": self.lengths(slots + 1),
            "token_ids": torch.randint(0, VOCAB, (slots + 1, self.columns)).int(),
            "drafts": torch.randint(0, VOCAB, (slots + 1, self.width)).int(),
            "num_accepted": torch.randint(0, self.width + 1, (slots + 1,)).int(),
            "origin": torch.randint(0, len(Origin), (slots + 1,)).int(),
            "confidence": torch.rand(slots + 1, self.width),
        }
        blocks = -(-made.max_positions // BLOCK_SIZE)
        self.tables = torch.randint(0, 1000, (slots + 1, 1 + blocks)).int()
        self.tables[:, 0] = torch.randint(0, blocks + 1, (slots + 1,))

    def lengths(self, count: int) -> torch.Tensor:
        """Of any text, of the shortest ones, and of those that are (nearly) full; that of padding is one."""
        kinds = (range(1, self.columns + 1), range(1, 3), range(self.columns - 2, self.columns + 1))
        return torch.tensor([*(self.rng.choice(self.rng.choice(kinds)) for _ in range(count - 1)), 1]).int()

    def state(self, device: torch.device) -> SequenceState:
        made = SequenceState(
            len(self.tables) - 1, max_len=MAX_LEN, lookahead=self.lookahead, vocab_size=VOCAB, device=device
        )
        for name, values in self.tensors.items():
            getattr(made, name).copy_(values)
        return made

    def same(self, expected: SequenceState, *others: SequenceState) -> None:
        """But for the slot of padding: several sequences of padding write to it at the same time."""
        for name in self.tensors:
            for other in others:
                assert same_bits(getattr(expected, name)[:-1], getattr(other, name)[:-1].cpu()), name

    def batch(self) -> Batch:
        """Prefill chunks, last chunks with and without a draft, decoding with and without a draft."""
        slots = self.rng.sample(range(len(self.tables) - 1), self.rng.randint(1, 5))
        starts, queries, logits = [], [], []
        for slot in slots:
            length, kind = int(self.tensors["length"][slot]), self.rng.choice(["chunk", "last", "decode"])
            drafted = self.rng.randint(0, self.lookahead)
            if kind == "decode":
                starts.append(-1)
                queries.append(1 + drafted)
                logits.append(1 + drafted)
                continue
            starts.append(self.rng.randrange(length))
            left = length - starts[-1]
            queries.append(self.rng.randint(1, left) if kind == "chunk" else left + drafted)
            logits.append(0 if kind == "chunk" else 1 + drafted)
        return Batch(slots, starts, queries, logits)


def use(monkeypatch: pytest.MonkeyPatch, rounds: Any) -> None:
    """What a batch calls."""
    monkeypatch.setattr(batches, "kernels", lambda device: SimpleNamespace(rounds=rounds))


def inputs_of(batch: Batch, *, gather: bool, device: torch.device, padding: int = 0) -> BatchInputs:
    logits = batch.num_logit_rows if gather else batch.num_rows
    inputs = BatchInputs(
        batch.num_rows + padding,
        logits + padding,
        works=len(batch.slots) + padding,
        tiles=TileSizes(decode=3, prefill=3),
        gather=gather,
        device=device,
    )
    inputs.write(batch)
    return inputs


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows(monkeypatch: pytest.MonkeyPatch, seed: int, gather: bool) -> None:
    """Tokens, positions, KV slots and what is decided; rows, logit rows and works of padding name nothing."""
    world = World(seed)
    batch = world.batch()
    padding = seed % 4 * 50  # also more rows than one program has
    found = []
    for rounds, device in ALL:
        use(monkeypatch, rounds)
        found.append(inputs_of(batch, gather=gather, device=device, padding=padding))
        found[-1].prepare(world.state(device), [world.tables.to(device)], BLOCK_SIZE)
    expected = found[0]
    for ours in found[1:]:
        for name in ("token_ids", "positions", "context_len", "_gather"):
            assert torch.equal(getattr(ours, name).cpu(), getattr(expected, name)), name
        assert torch.equal(ours.slot_mappings[0].cpu(), expected.slot_mappings[0])
        assert (ours.slot_mappings[0][batch.num_rows :] == -1).all()
        assert (ours.token_ids[batch.num_rows :] == 0).all()
        assert (ours.positions[batch.num_rows :] == 0).all()
        rows, expected_rows = ours.decided(world.state(DEVICE)), expected.decided(world.state(CPU))
        for one, other in zip(rows[:3], expected_rows[:3], strict=True):
            assert torch.equal(one.cpu(), other)
        assert (rows.slots[batch.num_logit_rows if gather else batch.num_rows :] == -1).all()
        if gather:
            assert (ours._gather[batch.num_logit_rows :] == 0).all()


@pytest.mark.parametrize(
    ("name", "value"), [("slots", 8), ("slots", 1 << 30), ("row_work", 2), ("logit_rows", 99), ("length", 0)]
)
def test_rows_that_are_not_there(name: str, value: int) -> None:
    """Numbers that no batch has are refused, not read as addresses; an empty text has no last token."""
    world = World(3)
    state, inputs = world.state(CPU), inputs_of(Batch([2], [-1], [1], [1]), gather=True, device=CPU)
    if name == "length":
        state.length[2] = value
    else:
        inputs[name][0] = value
    with pytest.raises(IndexError):
        inputs.prepare(state, [world.tables], BLOCK_SIZE)


def test_nothing_is_written_beyond_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Column 0 of a table limits it, whatever stands behind; a position past the table is not looked up."""
    world = World(0)
    state, tables = world.state(DEVICE), world.tables.to(DEVICE)
    use(monkeypatch, triton_rounds)
    for blocks in (0, 1, 3, tables.shape[1] - 1):
        tables[2, 0] = blocks
        inputs = inputs_of(Batch([2], [0], [world.columns], [0]), gather=True, device=DEVICE)
        inputs.prepare(state, [tables], BLOCK_SIZE)
        written = min(blocks * BLOCK_SIZE, world.columns)
        assert (inputs.slot_mappings[0][:written] >= 0).all()
        assert (inputs.slot_mappings[0][written:] == -1).all()


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_acceptance(monkeypatch: pytest.MonkeyPatch, seed: int, gather: bool) -> None:
    """Any part of a draft is accepted, then a token or no choice; full texts, works that decide nothing, padding."""
    world = World(seed)
    batch = world.batch()
    padding = seed % 3 * 5
    chosen = torch.randint(0, VOCAB, ((batch.num_logit_rows if gather else batch.num_rows) + padding,)).int()
    first = inputs_of(batch, gather=gather, device=CPU)["first_row"].tolist()
    for slot, row, count in zip(batch.slots, first, batch.num_logits, strict=True):
        accepted = world.rng.randint(0, max(0, count - 1))
        chosen[row : row + accepted] = world.tensors["drafts"][slot, :accepted]
        if count and slot % 3 == 0:
            chosen[row + accepted] = -1
    states, outs, width = list[SequenceState](), list[torch.Tensor](), 3 + 2 * world.width
    for rounds, device in ALL:
        use(monkeypatch, rounds)
        states.append(world.state(device))
        out = torch.zeros((len(batch.slots) + padding, width), dtype=torch.int32, device=device)
        inputs_of(batch, gather=gather, device=device, padding=padding).accept(chosen.to(device), states[-1], out)
        outs.append(out.cpu())
    assert all(torch.equal(out, outs[0]) for out in outs)
    assert (outs[0][len(batch.slots) :] == 0).all()
    world.same(*states)
    rows = zip(batch.slots, first, batch.num_logits, outs[0].tolist(), strict=False)  # padding is left out
    for slot, row, count, (num_new, _, *new) in rows:
        if count and -1 in chosen[row : row + count]:
            assert new[:num_new] == [*world.tensors["drafts"][slot, : num_new - 1].tolist(), -1]


def accept_two(rounds: Any, state: SequenceState, slots: list[int], chosen: list[int], counts: list[int]) -> list[int]:
    """The first choice of both works, as they are passed on to the host."""
    device = state.device
    out = torch.zeros((2, 3 + 2 * state.drafts.shape[1]), dtype=torch.int32, device=device)
    integers = torch.tensor([slots, [0, 1], counts], dtype=torch.int32, device=device)
    rounds.accept(
        state.view,
        chosen=torch.tensor(chosen, dtype=torch.int32, device=device),
        slots=integers[0],
        first_row=integers[1],
        num_logits=integers[2],
        out=out,
        vocab_size=VOCAB,
    )
    return out[:, 2].tolist()


def test_choices_of_garbage_stay_in_the_vocabulary() -> None:
    """Beyond a text's end logits may be NaN, and a choice anything: it must not be an index of the next round."""
    for rounds, device in ALL:
        state = World(1).state(device)
        state.length.fill_(5)
        assert accept_two(rounds, state, [0, 1], [VOCAB + 7, -3], [1, 1]) == [VOCAB - 1, -3]
        assert state.token_ids[:2, 5].tolist() == [VOCAB - 1, 0]


@pytest.mark.parametrize(
    ("slots", "counts"), [([0, 8], [1, 1]), ([-1, 0], [1, 1]), ([0, 1], [1, 2]), ([0, 1], [1, 0]), ([0, 1], [99, 1])]
)
def test_decisions_that_are_not_there(slots: list[int], counts: list[int]) -> None:
    """Slots and numbers of logit rows that no batch has are refused by the compiled kernel, which reads addresses."""
    with pytest.raises(IndexError):
        accept_two(C, World(1).state(CPU), slots, [3, 4], counts)


@pytest.mark.parametrize("fork", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_staging(seed: int, fork: bool) -> None:
    """What a draft model reads: the decided tokens that are new to it, or the last one and the draft after it."""
    world = World(seed)
    slots = world.rng.sample(range(len(world.tables) - 1), world.rng.randint(1, 5))
    slots += [len(world.tables) - 1] * (seed % 3)  # padding
    reads = world.lookahead + 1
    drafted = [world.rng.randint(0, world.lookahead) if fork else 0 for _ in slots]
    computed = torch.tensor([max(0, int(n) - world.rng.randint(0, reads + 2)) for n in world.tensors["length"]])
    results = []
    for runs, device in RUNS:
        state = world.state(device)
        own: Tensors = {
            "slots": torch.tensor(slots, dtype=torch.int32, device=device),
            "num_drafted": torch.tensor(drafted, dtype=torch.int32, device=device),
            "computed": computed.int().to(device),
            "first": torch.zeros(len(slots), dtype=torch.int32, device=device),
            "count": torch.zeros(len(slots), dtype=torch.int32, device=device),
            "tokens": torch.zeros((len(slots), reads + 1), dtype=torch.int32, device=device),
            "verified_confidence": torch.zeros((len(slots), world.width), device=device),
            "hit": torch.zeros(len(slots), dtype=torch.int32, device=device),
        }
        runs.stage(state.view, **own, hit_origin=Origin.HIT, vocab_size=VOCAB - 5, fork=fork)
        results.append({name: values.cpu() for name, values in own.items()})
        results[-1]["computed"][-1] = 0  # several rows of padding write it at the same time
    expected = results[0]
    for ours in results[1:]:
        for name in ("first", "count", "computed", "verified_confidence", "hit"):
            assert same_bits(ours[name], expected[name]), name
        for row, wanted, count in zip(ours["tokens"], expected["tokens"], expected["count"].tolist(), strict=True):
            assert torch.equal(row[:count], wanted[:count])
            assert (row >= 0).all()
            assert (row < VOCAB - 5).all()


@pytest.mark.parametrize("seed", SEEDS)
def test_looking_up(seed: int) -> None:
    """Hits, drafts for another last token, and nothing; several branches alike: the first one counts."""
    world = World(seed)
    if world.lookahead == 0:
        pytest.skip("nothing is prepared")
    slots = world.rng.sample(range(len(world.tables) - 1), world.rng.randint(1, 5))
    slots += [len(world.tables) - 1] * (seed % 3)
    width, depth = world.rng.choice([1, 3, 5, 12]), world.rng.randint(1, world.lookahead)
    chain = torch.randint(0, VOCAB, (len(slots) * width + 4, world.lookahead + 1)).int()
    confidence = torch.rand(chain.shape)
    after = torch.randint(0, world.lookahead + 1, (len(slots), width + 2)).int()
    lasts = world.tensors["token_ids"].gather(1, world.tensors["length"].long()[:, None] - 1)
    for i, slot in enumerate(slots):
        for branch in world.rng.sample(range(width), world.rng.randint(0, min(2, width))):
            after[i, branch] = world.tensors["num_accepted"][slot]
            chain[i * width + branch, 0] = lasts[slot]
    states, rows = [], list[torch.Tensor]()
    origins: dict[str, Any] = {"hit": Origin.HIT, "miss": Origin.SIBLING}
    for runs, device in RUNS:
        states.append(world.state(device))
        rows.append(torch.full((len(slots),), -1, dtype=torch.int32, device=device))
        runs.look_up(
            states[-1].view,
            slots=torch.tensor(slots, dtype=torch.int32, device=device),
            after=after.to(device)[:, :width],
            chain=chain.to(device),
            chain_confidence=confidence.to(device),
            depth=depth,
            rows=rows[-1],
            **origins,
        )
    world.same(*states)
    assert all(torch.equal(each.cpu(), rows[0]) for each in rows)
    for row, slot in zip(rows[0].tolist(), slots, strict=True):
        if states[1].origin[slot] == Origin.HIT and slots.count(slot) == 1:
            assert states[1].drafts[slot, :depth].tolist() == chain[row, 1 : depth + 1].tolist()
    found = states[1].origin[slots].tolist()
    assert set(found) <= {Origin.HIT, Origin.SIBLING}


@pytest.mark.parametrize("seed", SEEDS)
def test_storing_drafts(seed: int) -> None:
    """What was written becomes the draft of its sequence."""
    world = World(seed)
    if world.lookahead == 0:
        pytest.skip("nothing is drafted")
    slots, count = world.rng.sample(range(len(world.tables) - 1), 3), world.rng.randint(1, world.lookahead)
    chain, confidence = torch.randint(0, VOCAB, (5, world.lookahead + 1)).int(), torch.rand(5, world.lookahead + 1)
    states = []
    for runs, device in RUNS:
        states.append(world.state(device))
        runs.store(
            states[-1].view,
            slots=torch.tensor(slots, dtype=torch.int32, device=device),
            chain=chain.to(device),
            chain_confidence=confidence.to(device),
            count=count,
            value=Origin.JIT,
        )
    world.same(*states)
    assert states[1].drafts[slots, :count].tolist() == chain[:3, :count].tolist()
    assert states[1].origin[slots].tolist() == [Origin.JIT] * 3


@pytest.mark.parametrize("width", [0, 1, 3, 12])
@pytest.mark.parametrize("depth", [0, 2])
def test_extending_rows(width: int, depth: int) -> None:
    """Every row goes on after the tokens that were read, or after those that its branch keeps."""
    torch.manual_seed(width + depth)
    sequences, num_rows = 5, 5 * max(1, width)
    integers = torch.randint(0, 30, (3, sequences)).int()
    after, chain = torch.randint(0, 5, (sequences, 14)).int(), torch.randint(0, VOCAB, (70, 4)).int()
    found = []
    for runs, device in RUNS:
        names = ("tokens", "positions", "slot_mapping", "decided", "row_slots")
        out = {name: torch.full((num_rows,), -1, dtype=torch.int32, device=device) for name in names}
        slots, first, count = integers.to(device)
        runs.extend_rows(
            slots=slots,
            first=first,
            count=count,
            after=after.to(device)[:, :width] if width else None,
            chain=chain.to(device),
            depth=depth,
            reads=7,
            first_slot=1000,
            slots_per_branch=6,
            vocab_size=VOCAB - 10,
            **out,
        )
        found.append([column.tolist() for column in out.values()])
    assert found[0] == found[1] == found[2]
    row, sequence = num_rows - 1, sequences - 1
    read = int(after[sequence, width - 1]) + 1 if width else min(int(integers[2, sequence]), 7)
    position = int(integers[1, sequence]) + read + depth
    assert found[0][0] == chain[:num_rows, depth].clamp(max=VOCAB - 11).tolist()  # the draft's vocabulary is smaller
    last = [found[0][0][-1], position, 1000 + 6 * row + depth, position + 1, int(integers[0, sequence])]
    assert [column[-1] for column in found[0]] == last


@pytest.mark.parametrize("width", [0, 1, 3])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_that_are_read(seed: int, width: int) -> None:
    """More tokens than rows and fewer, blocks that are not there; rows of beams behind them, or none."""
    world = World(seed)
    slots = torch.tensor(world.rng.sample(range(len(world.tables) - 1), 3)).int()
    reads, depths = world.rng.randint(1, 5), world.rng.randint(1, 4)
    first, count = torch.randint(0, MAX_LEN, (3,)).int(), torch.randint(1, 8, (3,)).int()
    given, found = torch.randint(0, VOCAB, (3, 9)).int(), []
    for runs, device in RUNS:
        names = ("tokens", "positions", "slot_mapping", "context_len", "decided")
        sizes = (3 * reads, 3 * reads, 3 * reads, 3, 3)
        out = {name: torch.full((size,), -7, device=device).int() for name, size in zip(names, sizes, strict=True)}
        last = torch.zeros(3, dtype=torch.int64, device=device)
        beams = torch.zeros(depths, 4, 3 * width, dtype=torch.int32, device=device) if width else None
        runs.read_rows(
            slots=slots.to(device),
            first=first.to(device),
            count=count.to(device),
            given=given.to(device),
            tables=world.tables.to(device),
            table_rows=slots.to(device),
            **out,
            last=last,
            beams=beams,
            padding_slot=999,
            block_size=BLOCK_SIZE,
            first_slot=1000,
            slots_per_branch=5,
        )
        found.append([each.tolist() for each in (*out.values(), last, *([] if beams is None else [beams]))])
    assert found[0] == found[1] == found[2]
    assert found[0][0] == given[:, :reads].flatten().tolist()
    assert found[0][5] == [i * reads + min(int(count[i]), reads) - 1 for i in range(3)]


@pytest.mark.parametrize("each", [1, 2])
def test_keeping_the_best_of_two(each: int) -> None:
    """Also where there is no second token, and none at all; one row or several of a row of the chain."""
    best = torch.tensor([[3, 4], [5, 6], [7, 0], [0, 0]]).int()
    scores = torch.tensor([[2.5, 1.0], [1.0, 1.0], [1.0, -torch.inf], [-torch.inf, -torch.inf]])
    for runs, device in RUNS:
        chain, confidence = torch.zeros((6, 4), dtype=torch.int32, device=device), torch.zeros((6, 4), device=device)
        tensors = {"best": best.to(device), "scores": scores.to(device), "chain": chain, "confidence": confidence}
        runs.keep_best(**tensors, column=1, each=each, max_confidence=100.0)
        assert chain[: 4 // each, 1 : 1 + each].flatten().tolist() == [3, 5, 7, 0]
        assert confidence[: 4 // each, 1 : 1 + each].flatten().tolist() == [1.5, 0.0, 100.0, 0.0]
        assert int(chain.count_nonzero()) == 3
        assert int(confidence.count_nonzero()) == 2


@pytest.mark.parametrize("anchored", [False, True])
@pytest.mark.parametrize("seed", SEEDS)
def test_rows_of_blocks(seed: int, anchored: bool) -> None:
    """The last token and masks behind it; what is written is in the order of sequences, or of places; no slot beyond
    the blocks; padding."""
    world = World(seed)
    count, by_place = world.lookahead + 1, seed % 2 == 1
    slots = world.rng.sample(range(len(world.tables) - 1), world.rng.randint(1, 5))
    slots += [len(world.tables) - 1] * (seed % 3 * 30)  # padding, also more rows than one program has
    n, queries, found = len(slots), count + (not anchored), []
    for runs, device in RUNS:
        names = ("tokens", "positions", "slot_mapping", "context_len", "row_slots")
        out = {name: torch.full((n * queries,), -2, dtype=torch.int32, device=device) for name in names}
        for name in ("decided", "decided_slot"):
            made = torch.full((n * count,), -2, dtype=torch.int32, device=device)
            out[name] = made.view(count, n).T if by_place else made.view(n, count)
        runs.block_rows(
            world.state(device).view,
            slots=torch.tensor(slots, dtype=torch.int32, device=device),
            tables=world.tables.to(device),
            mask_token=VOCAB + 3,
            block_size=BLOCK_SIZE,
            **out,
        )
        found.append({name: values.tolist() for name, values in out.items()})
    assert found[0] == found[1] == found[2]
    last = int(world.tensors["length"][slots[0]]) - 1
    token = int(world.tensors["token_ids"][slots[0], last])
    assert found[0]["tokens"][:queries] == [token, *[VOCAB + 3] * (queries - 1)]
    assert found[0]["decided"][0] == list(range(last + 1, last + 1 + count))
    assert (min(found[0]["slot_mapping"]) == -1) == any(
        world.tables[slot, 0] * BLOCK_SIZE < world.tensors["length"][slot] - 1 + queries for slot in slots
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_features(monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The rows before, or what was kept of them; the last positions are kept; padding takes and leaves nothing."""
    features = pytest.importorskip("ssd.kernels.triton.features", exc_type=ImportError)
    world = World(seed)
    batch, width = world.batch(), 5
    kept = torch.randn(len(world.tables), world.lookahead + 1, width)
    start = torch.randint(-1, 20, (len(world.tables),)).int()
    found = []
    for ours, device, padding in ((features, DEVICE, seed % 3 * 4), (features_cpu, CPU, 0), (features_cpu, CPU, 3)):
        inputs = inputs_of(batch, gather=True, device=device, padding=padding)
        use(monkeypatch, triton_rounds if ours is features else C)
        inputs.prepare(world.state(device), [world.tables.to(device)], BLOCK_SIZE)
        torch.manual_seed(seed)
        fused = torch.cat((torch.randn(batch.num_rows, width), torch.full((padding, width), torch.nan))).to(device)
        own = kept.clone().to(device)
        rows = {name: inputs[name] for name in ("row_work", "slots", "query_start")}
        rows |= {"positions": inputs.positions, "kept": own}
        rows |= {"slot_mapping": inputs.slot_mappings[0], "start": start.to(device)}
        hidden, mapping = ours.shift_and_keep(fused, **rows)
        assert not hidden[batch.num_rows :].any()
        assert (mapping[batch.num_rows :] == -1).all()
        found.append([t.cpu() for t in (hidden[: batch.num_rows], mapping[: batch.num_rows], own)])
    for other in found[1:]:
        for one, two in zip(found[0], other, strict=True):
            assert same_bits(one, two)


CASES = [(1, 2, torch.float32), (2, 3, torch.bfloat16), (6, 2, torch.float32)]


@pytest.mark.parametrize(("queries", "taps", "dtype"), CASES)
def test_convolving(queries: int, taps: int, dtype: torch.dtype) -> None:
    """Along each block, from its first row on; also more channels than one program has."""
    features = pytest.importorskip("ssd.kernels.triton.features", exc_type=ImportError)
    torch.manual_seed(queries)
    rows, width, groups = 3 * queries, 1200, 75
    x, change, base = (torch.randn(s).to(dtype) for s in ((rows, width), (rows, 2 * taps * groups), (2, taps, width)))
    for place in (0, 1):
        expected = torch.zeros(rows, width)
        for row, t in itertools.product(range(rows), range(taps)):
            if row % queries >= t:
                own = change[row].view(2, taps, groups)[place, t].float().repeat_interleave(width // groups)
                expected[row] += (base[place, t].float() + own) * x[row - t].float()
        for ours, device in ((features_cpu, CPU), (features, DEVICE)):
            tensors = (each.to(device) for each in (x, change, base[place]))
            found = ours.convolve(*tensors, place=place, queries=queries)
            error = 1e-5 if dtype is torch.float32 else 2.0**-7  # the interpreter truncates
            torch.testing.assert_close(found.cpu().float(), expected.to(dtype).float(), rtol=error, atol=error)


def test_slots_that_are_not_there_are_refused() -> None:
    """The compiled kernels read addresses."""
    state = World(1).state(CPU)
    chain, confidence = torch.zeros((3, 9), dtype=torch.int32), torch.zeros(3, 9)
    for slot in (-1, len(state.length)):
        slots = torch.tensor([slot], dtype=torch.int32)
        with pytest.raises(IndexError):
            kernels(CPU).runs.store(
                state.view,
                slots=slots,
                chain=chain,
                chain_confidence=confidence,
                count=0,
                value=Origin.JIT,
            )
        with pytest.raises(IndexError):
            kernels(CPU).runs.look_up(
                state.view,
                slots=slots,
                after=chain[:1, :1],
                chain=chain,
                chain_confidence=confidence,
                depth=0,
                rows=torch.zeros(1, dtype=torch.int32),
                hit=Origin.HIT,
                miss=Origin.SIBLING,
            )
