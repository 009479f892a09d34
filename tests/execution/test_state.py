"""The device's state of sequences, their block tables, and batches that are made from them, on a CPU."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fakes import VOCAB, make_sequence

from ssd.core import Proposal, SamplingParams, Sequence, Work
from ssd.execution.batch import FEW_QUERIES, Batch, BatchInputs, TileSizes
from ssd.execution.state import DeviceBlockTables, SequenceState
from ssd.execution.target import first_logit_rows, upload_drafts
from ssd.sampling.noise import seed_key, signed

CPU = torch.device("cpu")
LOOKAHEAD, BLOCK_SIZE, MAX_LEN = 3, 4, 40


def make_state(num_slots: int = 4, lookahead: int = LOOKAHEAD) -> SequenceState:
    return SequenceState(num_slots, max_len=MAX_LEN, lookahead=lookahead, vocab_size=VOCAB, device=CPU)


def tokens_of(state: SequenceState, slot: int) -> list[int]:
    tokens: list[int] = state.token_ids[slot, : int(state.length[slot])].tolist()
    return tokens


# --- the state --------------------------------------------------------------------------------------------------------


def test_a_sequence_gets_a_slot_with_all_that_it_is() -> None:
    """Catches what an earlier sequence leaves behind: tokens, a draft's origin, counts, parameters."""
    state = make_state()
    old = SamplingParams(temperature=0.5, presence_penalty=1.0, logit_bias={3: 1.0}, top_k=4)
    state.admit(2, make_sequence([1, 2, 3], [4, 5, 6, 7, 8], params=old, seed=1))
    state.num_accepted[2], state.origin[2] = 2, 3
    state.admit(2, make_sequence([9, 9], [7], params=SamplingParams(temperature=2.0, min_tokens=5), seed=(1 << 64) - 1))
    assert tokens_of(state, 2) == [9, 9, 7]
    assert (int(state.num_accepted[2]), int(state.origin[2])) == (0, 0)
    columns = state.sampling
    assert int(columns.seed_key[2]) == signed(seed_key((1 << 64) - 1))
    assert (float(columns.temperature[2]), int(columns.top_k[2]), float(columns.presence[2])) == (2.0, 0, 0.0)
    assert int(columns.min_length[2]) == 7
    assert columns.counts is not None
    assert (columns.counts[2] >> 2).nonzero().flatten().tolist() == [7]
    assert [tokens_of(state, slot) for slot in (0, 1, 3, state.padding)] == [[0]] * 4  # nobody else's


def test_decided_tokens_are_appended() -> None:
    state = make_state()
    state.admit(0, make_sequence([1, 2, 3]))
    state.append(0, 3, [4, 5], num_accepted=1)
    state.append(0, 5, [], num_accepted=0)
    assert (tokens_of(state, 0), int(state.num_accepted[0])) == ([1, 2, 3, 4, 5], 0)
    state.admit(1, make_sequence([1, 2], params=SamplingParams(frequency_penalty=0.5)))
    state.append(1, 2, [6, 6, 7], num_accepted=2)
    state.append(0, 5, [6], num_accepted=0)  # has no penalty: is not counted
    counts = state.sampling.counts
    assert counts is not None
    assert {t: n for t, n in enumerate((counts[1] >> 2).tolist()) if n} == {6: 2, 7: 1}
    assert (counts[0] >> 2).sum() == 0


def test_drafts_of_the_host() -> None:
    state = make_state()
    state.drafts.fill_(9)
    state.set_drafts([3, 0], [(1, 2), (3, 4, 5)])
    assert state.drafts.tolist() == [[3, 4, 5], [9] * 3, [9] * 3, [1, 2, 0], [9] * 3]
    works = [decoding(make_sequence([1]), 1, (7,)), decoding(make_sequence([1]), 2), decoding(make_sequence([1]), 0)]
    on_device = works[2].with_proposal(Proposal(num_on_device=2))
    upload_drafts(state, [*works[:2], on_device])  # two of them have none, or have it there
    assert state.drafts.tolist() == [[3, 4, 5], [7, 0, 0], [9] * 3, [1, 2, 0], [9] * 3]


@pytest.mark.parametrize("lookahead", [0, 1, 7])
def test_there_is_room_beyond_the_longest_sequence(lookahead: int) -> None:
    """Two rounds in flight: the first may end one token short of the end, and both decide a whole draft and a token."""
    state = make_state(lookahead=lookahead)
    assert state.token_ids.shape[1] >= MAX_LEN - 1 + 2 * (lookahead + 1)
    assert state.drafts.shape[1] == max(1, lookahead)
    assert state.max_positions > state.token_ids.shape[1] - 1 + lookahead


# --- block tables -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [1, 2, 3])
def test_block_tables_follow_their_sequences(groups: int) -> None:
    """Random lives of slots: the device has what the host has, and nothing of a slot's earlier sequence counts.

    Another rank that is sent the writes has the same.
    """
    rng = random.Random(0)
    tables, follower = (DeviceBlockTables(5, 8, CPU, groups) for _ in range(2))
    tables.on_write, host = follower.write, dict[int, list[int]]()
    for _ in range(300):
        slot = rng.randrange(5)
        if slot not in host or rng.random() < 0.1:
            tables.reset(slot)
            host[slot] = []
        host[slot] += [rng.randrange(100) for _ in range(groups * rng.randint(0 if host[slot] else 1, 2))]
        host[slot] = host[slot][: 8 * groups]
        chosen = rng.sample(sorted(host), rng.randint(1, len(host)))
        tables.update([(each, host[each]) for each in {slot, *chosen}])
        for each, blocks in host.items():
            for group, both in enumerate(zip(tables.groups, follower.groups, strict=True)):
                own = blocks[group::groups]
                assert all(table[each, : 1 + len(own)].tolist() == [len(own), *own] for table in both)
    assert all(table[5].tolist() == [0] * 9 for table in tables.groups)  # padding has no blocks


def test_blocks_are_uploaded_once() -> None:
    tables = DeviceBlockTables(2, 4, CPU)
    tables.update([(0, [5, 6])])
    tables.tensor[0, 1:3] = -1
    tables.update([(0, [5, 6])])
    tables.update([(0, [5, 6, 7]), (1, [8])])
    assert tables.tensor[0].tolist() == [3, -1, -1, 7, 0]
    tables.reset(0)
    tables.update([(0, [9])])
    assert tables.tensor.tolist() == [[1, 9, -1, 7, 0], [1, 8, 0, 0, 0], [0] * 5]


# --- batches ----------------------------------------------------------------------------------------------------------


def decoding(sequence: Sequence, slot: int, draft: tuple[int, ...] = (), *, start: int | None = None) -> Work:
    return Work(sequence, 1, start, lookahead=LOOKAHEAD, slot=slot, proposal=Proposal(draft))


def test_a_batch_says_what_the_host_knows() -> None:
    """Catches a decoding work that is given a position, which a round in flight may have moved."""
    sequence = make_sequence(list(range(1, 11)))
    works = [
        Work(sequence, 4, 2, decides=False, slot=3),
        Work(sequence, 4, 6, slot=1, proposal=Proposal((1, 2))),
        decoding(sequence, 0, (1, 2, 3), start=9),
        Work(sequence, 1, None, slot=2, proposal=Proposal(num_on_device=2)),
        Work(sequence, 1, 5, decides=False, slot=4),  # a chunk of one token
    ]
    batch = Batch.of(works)
    assert batch.slots == [3, 1, 0, 2, 4]
    assert batch.starts == [2, 6, -1, -1, 5]
    assert batch.num_queries == [4, 6, 4, 3, 1]
    assert batch.num_logits == [0, 3, 4, 3, 0]
    assert (batch.num_rows, batch.num_logit_rows, batch.max_queries) == (18, 10, 6)
    assert first_logit_rows(works, gather=True) == [0, 0, 3, 7, 10]
    assert first_logit_rows(works, gather=False)[1:4] == [7, 10, 14]


@dataclass(frozen=True)
class Query:
    """A query token, as plain Python finds it."""

    work: int
    token: int
    position: int
    slot: int  # of the KV; -1: nowhere


class Scene:
    """Sequences in a state with blocks, drafts and works of all kinds."""

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.state = make_state(6)
        self.tables = DeviceBlockTables(6, 20, CPU)
        self.works: list[Work] = []
        self.queries: list[Query] = []
        blocks = rng.sample(range(200), 200)
        for slot in rng.sample(range(6), rng.randint(1, 5)):
            length = rng.randint(2, MAX_LEN)
            sequence = make_sequence([rng.randrange(VOCAB) for _ in range(length)], id=slot)
            self.state.admit(slot, sequence)
            draft = tuple(rng.randrange(VOCAB) for _ in range(rng.randint(0, LOOKAHEAD)))
            end = length + len(draft) - rng.choice([0, 0, 0, 1])
            sequence.kv.blocks = [blocks.pop() for _ in range(-(-end // BLOCK_SIZE))]
            self._add(rng, sequence, slot, draft)
        upload_drafts(self.state, self.works)
        self.tables.update([(work.slot, work.sequence.kv.blocks) for work in self.works])

    def _add(self, rng: random.Random, sequence: Sequence, slot: int, draft: tuple[int, ...]) -> None:
        kind, length = rng.choice(["chunk", "last", "decode", "in flight"]), len(sequence.tokens)
        start = rng.randrange(length - 1) if kind in ("chunk", "last") else length - 1
        count = rng.randint(1, length - 1 - start) if kind == "chunk" else length - start
        draft = () if kind == "chunk" else draft
        at = None if kind == "in flight" else start
        work = Work(sequence, count, at, decides=kind != "chunk", slot=slot, proposal=Proposal(draft))
        for position in range(start, start + count + len(draft)):
            token, block = [*sequence.tokens, *draft][position], position // BLOCK_SIZE
            own = sequence.kv.blocks
            kv = own[block] * BLOCK_SIZE + position % BLOCK_SIZE if block < len(own) else -1
            self.queries.append(Query(len(self.works), token, position, kv))
        self.works.append(work)

    def inputs(self, *, gather: bool, prefill: bool) -> BatchInputs:
        batch = Batch.of(self.works)
        logits = batch.num_logit_rows if gather else batch.num_rows
        sizes, works = TileSizes(decode=3, prefill=5), len(self.works)
        inputs = BatchInputs(
            *(batch.num_rows, logits),
            works=works,
            tiles=sizes,
            gather=gather,
            prefill=prefill,
            decode_tiles=4 if prefill else None,
            device=CPU,
        )
        inputs.write(batch)
        inputs.prepare(self.state, self.tables.groups, BLOCK_SIZE)
        return inputs


def tiles_of(tiles: torch.Tensor) -> list[tuple[int, int]]:
    return [tile for tile in zip(*tiles.tolist(), strict=True) if tile[0] >= 0]


@pytest.mark.parametrize(("gather", "prefill"), [(True, True), (True, False), (False, False)])
@pytest.mark.parametrize("seed", range(25))
def test_a_batch_on_the_device(seed: int, gather: bool, prefill: bool) -> None:
    """Against plain Python: tokens and drafts, positions, KV slots, tiles, tables, and which rows decide what."""
    scene = Scene(seed)
    inputs = scene.inputs(gather=gather, prefill=prefill)
    batch = inputs.device_batch(scene.tables.groups)
    assert batch.token_ids.tolist() == [query.token for query in scene.queries]
    assert batch.positions.tolist() == [query.position for query in scene.queries]
    assert batch.slot_mapping.tolist() == [query.slot for query in scene.queries]
    starts, context, needed = [0], [], 0
    tiles: list[tuple[int, int]] = []
    large: list[tuple[int, int]] = []
    for i, work in enumerate(scene.works):
        own = [query for query in scene.queries if query.work == i]
        cut = [(i, first) for first in range(0, len(own), 3)]
        needed += len(cut) if len(own) <= FEW_QUERIES else 0
        if not prefill or (len(own) <= FEW_QUERIES and needed <= 4):
            tiles += cut
        else:
            large += [(i, first) for first in range(0, len(own), 5)]
        starts.append(starts[-1] + len(own))
        context.append(own[-1].position + 1)
        blocks = work.sequence.kv.blocks[: -(-context[-1] // BLOCK_SIZE)]
        assert batch.block_tables[batch.table_rows[i], : len(blocks)].tolist() == blocks
    assert batch.query_start.tolist() == starts
    assert batch.context_len.tolist() == context
    assert tiles_of(batch.tiles) == tiles
    assert large == (tiles_of(batch.prefill_tiles) if batch.prefill_tiles is not None else [])

    rows = [r for i, work in enumerate(scene.works) for r in range(starts[i + 1] - work.num_logits, starts[i + 1])]
    assert batch.logit_rows is None or batch.logit_rows.tolist() == rows
    slots, positions, drafted, drafts, _ = inputs.decided(scene.state)
    assert drafts is scene.state.drafts
    assert drafted is not None
    for place, row in enumerate(rows) if gather else [(row, row) for row in rows]:
        query = scene.queries[row]
        work = scene.works[query.work]
        assert int(slots[place]) == work.slot
        assert int(positions[place]) == query.position + 1
        assert int(drafted[place]) == query.position + 1 - len(work.sequence.tokens)


@pytest.mark.parametrize("gather", [True, False])
@pytest.mark.parametrize("seed", range(25))
def test_acceptance_in_the_state(seed: int, gather: bool) -> None:
    """Against plain Python: what stands and the target's own token are appended, and the host is told."""
    scene, rng = Scene(seed), random.Random(seed)
    inputs = scene.inputs(gather=gather, prefill=False)
    starts = first_logit_rows(scene.works, gather=gather)
    chosen = torch.full((inputs.logits,), -1, dtype=torch.int32)
    expected: list[Any] = []
    for work, start in zip(scene.works, starts, strict=True):
        if not work.decides:
            expected.append(None)
            continue
        draft = work.proposal.token_ids
        picks = [token if rng.random() < 0.7 else (token + 1) % VOCAB for token in draft] + [rng.randrange(VOCAB)]
        chosen[start : start + len(picks)] = torch.tensor(picks, dtype=torch.int32)
        accepted = next((i for i, (a, b) in enumerate(zip(picks, draft, strict=False)) if a != b), len(draft))
        expected.append(picks[: accepted + 1])
    before = {slot: tokens_of(scene.state, slot) for slot in range(7)}
    scene.state.origin.copy_(torch.arange(7))
    out = torch.zeros((len(scene.works), 3 + 2 * LOOKAHEAD), dtype=torch.int32)
    inputs.accept(chosen, scene.state, out)
    for work, tokens, row in zip(scene.works, expected, out.tolist(), strict=True):
        if tokens is None:
            assert row == [0] * len(row)
            continue
        draft = work.proposal.token_ids
        assert (row[0], row[1], row[2 : 2 + len(tokens)]) == (len(tokens), work.slot, tokens)
        assert tuple(row[3 + LOOKAHEAD :][: len(draft)]) == draft
        assert int(scene.state.num_accepted[work.slot]) == len(tokens) - 1
        before[work.slot] += tokens
    assert {slot: tokens_of(scene.state, slot) for slot in range(7)} == before


def test_inputs_are_used_again() -> None:
    """Catches what a larger batch leaves behind in a graph's buffers, and a batch that is not written again."""
    inputs = BatchInputs(12, 12, works=4, tiles=TileSizes(2, 4), gather=True, device=CPU)
    large = Batch([3, 1, 0, 2], [-1, 0, 2, -1], [3, 4, 1, 4], [3, 1, 0, 4])
    small = Batch([2], [-1], [2], [2])
    names = ("row_work", "slots", "starts", "query_start", "tiles", "first_row", "num_logits", "logit_rows")

    def written(batch: Batch) -> dict[str, list[int]]:
        inputs.write(batch)
        return {name: inputs[name].tolist() for name in names}

    first = written(large)
    assert first["first_row"] == [0, 3, -1, 4]
    assert first["logit_rows"] == [0, 1, 2, 6, 8, 9, 10, 11, -1, -1, -1, -1]
    again = written(small)
    assert again == {
        "row_work": [0, 0, *[-1] * 10],
        "slots": [2, -1, -1, -1],
        "starts": [-1] * 4,
        "query_start": [0, 2, 2, 2, 2],
        "tiles": [0, *[-1] * 9, 0, *[-1] * 9],
        "first_row": [0, -1, -1, -1],
        "num_logits": [2, -1, -1, -1],
        "logit_rows": [0, 1, *[-1] * 10],
    }
    assert written(large) == first
    inputs.clear()
    assert set(itertools.chain(*(inputs[name].tolist() for name in names if name != "query_start"))) == {-1}
    assert inputs["query_start"].tolist() == [0] * 5
    assert written(large) == first
