"""A model without weights, scripted drafters, and helpers: an engine that is exact, tiny and deeply suspicious.

`FakeDecoder` stands in for a decoder, under the real runner, state and target. It keeps a "KV" of its own and reads it
back through the block tables as attention would, so a stale, missing or wrongly shared block raises instead of passing
unseen. Its logits are a function of the visible tokens only.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch

from ssd.core import (
    FinishReason,
    Proposal,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    Status,
    Work,
    sequence_seed,
)
from ssd.decoding.drafter import Drafter
from ssd.decoding.round import InFlight, Round
from ssd.engine.driver import Driver
from ssd.engine.engine import Engine
from ssd.engine.scheduler import Scheduler
from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.execution.target import Target
from ssd.kernels.ops import DeviceBatch
from ssd.kv.blocks import NULL, BlockPool, Windows
from ssd.layers.spec import KVGroup
from ssd.parallel.tensor import TensorParallel
from ssd.sampling.sampler import Needs, Rows, Sampler, SamplingColumns
from ssd.text.tokenizer import Tokenizer

VOCAB = 32
ROOT = b"nothing seen yet"
BEYOND = b"beyond the last token"
CPU = torch.device("cpu")


# --- the function that the fake model computes ------------------------------------------------------------------------


def advance(state: bytes, token: int) -> bytes:
    """The state after one more visible token: it names the whole visible prefix."""
    return hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=16).digest()


def state_of(tokens: Iterable[int]) -> bytes:
    state = ROOT
    for token in tokens:
        state = advance(state, token)
    return state


def logits_after(state: bytes, dead_ends: int = 0) -> torch.Tensor:
    """Pseudo-random float32 logits in [-4, 4). After so many of 256 prefixes they are -inf: there is no choice."""
    if state[0] < dead_ends:
        return torch.full((VOCAB,), -torch.inf)
    raw = hashlib.blake2b(state, digest_size=2 * VOCAB, person=b"logits").digest()
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint16).astype(np.float32) / 8192 - 4)


def choose(logits: torch.Tensor, sequence: Sequence, tokens: Seq[int] | None = None) -> int:
    """What the sequence's parameters choose after these tokens (its own unless others are given): one row, alone."""
    tokens = sequence.tokens if tokens is None else tokens
    prompt, output = tokens[: sequence.num_prompt], tokens[sequence.num_prompt :]
    columns = SamplingColumns(1, len(logits), CPU)
    columns.set(0, sequence.params, sequence.seed, prompt, output, sequence.stop_token_ids)
    rows = Rows(torch.zeros(1, dtype=torch.int32), torch.tensor([len(tokens)], dtype=torch.int32))
    return int(Sampler(columns).choose(logits[None].clone(), rows, Needs.of([sequence.params])))


@dataclass(frozen=True)
class Expected:
    token_ids: list[int]
    finish_reason: FinishReason


def naive(
    prompt: Seq[int],
    params: SamplingParams,
    index: int = 0,
    *,
    max_model_len: int,
    stop_token_ids: frozenset[int] = frozenset(),
    dead_ends: int = 0,
) -> Expected:
    """One token at a time, no KV, no batch, no engine: what every sample must come out as."""
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else stop_token_ids)
    sequence = make_sequence(prompt, params=params, seed=sequence_seed(params.seed, index), stop_token_ids=stops)
    state = state_of(prompt)
    while True:
        allowed = sequence.num_output >= params.min_tokens
        token = choose(logits_after(state, dead_ends), sequence)
        if token < 0:
            return Expected(sequence.output_token_ids, "error")
        sequence.tokens.append(token)
        state = advance(state, token)
        if allowed and token in stops:
            return Expected(sequence.output_token_ids, "stop")
        if sequence.num_output == params.max_new_tokens or len(sequence.tokens) == max_model_len:
            return Expected(sequence.output_token_ids, "length")


# --- decoders ---------------------------------------------------------------------------------------------------------


class BareDecoder:
    """What a runner wants of a decoder, beside being called."""

    device = CPU
    dtype = torch.float32
    ops = SimpleNamespace(tile_tokens=lambda heads, prefill: 64)
    heads = None
    kv_bytes_per_token = 1
    kv_groups = (KVGroup(None, ()),)
    target_ids = None

    def __init__(self, vocab_size: int, max_position: int = 1 << 20) -> None:
        self.tp = TensorParallel()
        self.recordings = None
        self.config = SimpleNamespace(vocab_size=vocab_size, max_position=max_position)

    def make_kv_cache(self, num_blocks: int, block_size: int) -> list[tuple[torch.Tensor, ...]]:
        return []


class KVError(Exception):
    """The engine showed the model KV that is stale, missing, shared wrongly or somebody else's."""


@dataclass
class Cell:
    """What one KV slot holds: a token at a position, computed behind a certain prefix."""

    position: int
    token: int
    state: bytes | None = None


@dataclass(frozen=True)
class SeenBatch:
    """A batch as the decoder got it, in plain numbers, and whose it was."""

    token_ids: list[int]
    positions: list[int]
    slot_mapping: list[int]
    query_start: list[int]
    context_len: list[int]
    block_tables: list[list[int]]
    logit_rows: list[int]
    sequences: list[Sequence]
    group: int = 0
    paths: list[list[int]] = field(default_factory=list)  # of rows, if there are trees; [] for those of no tree

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


class Cells:
    """What KV slots hold. The numbers of what was ever written are in a tensor, so that kernels can move them."""

    def __init__(self) -> None:
        self._written: list[Cell | None] = [None]
        self.numbers = torch.zeros(0, dtype=torch.int64)

    def __setitem__(self, slot: int, cell: Cell) -> None:
        self.numbers.view(-1)[slot] = len(self._written)
        self._written.append(cell)

    def get(self, slot: int) -> Cell | None:
        return self._written[int(self.numbers.view(-1)[slot])]

    def __getitem__(self, slot: int) -> Cell:
        found = self.get(slot)
        assert found is not None
        return found


class FakeDecoder(BareDecoder):
    """A decoder that trusts nobody.

    `users` tells it which sequences hold blocks, and `running` which of them are in rounds, for checking only. `before`
    is called with every batch. `dead_ends`: see `logits_after`. `windows`: of its groups of layers, each of which has
    to see what it needs.
    """

    def __init__(self, block_size: int, dead_ends: int = 0, windows: Windows = (None,)) -> None:
        super().__init__(VOCAB)
        self.kv_groups = tuple(KVGroup(window, (i,)) for i, window in enumerate(windows))
        self.block_size = block_size
        self.dead_ends = dead_ends
        self.cells = Cells()
        self.batches: list[SeenBatch] = []
        self.running: Callable[[], list[Sequence]] = list
        self.users: Callable[[], list[Sequence]] = list
        self.before: Callable[[SeenBatch], None] = lambda batch: None

    def make_kv_cache(self, num_blocks: int, block_size: int) -> list[tuple[torch.Tensor, ...]]:
        self.cells.numbers = torch.zeros((num_blocks, block_size, 1), dtype=torch.int64)
        return [(self.cells.numbers,)] * len(self.kv_groups)

    def __call__(self, batch: DeviceBatch, kv: object) -> torch.Tensor:
        states: dict[int, bytes] = {}
        for group, own in enumerate((batch, *batch.others)):
            seen = self._seen(own, group)
            if group == 0:
                self.before(seen)
                self.batches.append(seen)
            self._write(seen)
            for i, owner in enumerate(seen.sequences):
                states |= self._read(seen, i, owner)
        rows = [logits_after(states[row], self.dead_ends) for row in seen.logit_rows]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _blocks(self, sequence: Sequence, group: int) -> list[int]:
        return sequence.kv.blocks[group :: len(self.kv_groups)]

    def _seen(self, batch: DeviceBatch, group: int) -> SeenBatch:
        tensors = (batch.token_ids, batch.positions, batch.slot_mapping, batch.query_start, batch.context_len)
        tokens, positions, slots, starts, context = (tensor.tolist() for tensor in tensors)
        if batch.table_rows.tolist() == [len(batch.block_tables) - 1]:  # a probe: the slot of padding
            return SeenBatch([], [], [], [0], [], [], [], [])
        if starts[-1] != len(tokens):
            raise KVError(f"{len(tokens)} query tokens, but the sequences end at {starts[-1]}")
        blocks = [-(-length // self.block_size) for length in context]
        tables = [row[:n] for row, n in zip(batch.block_tables[batch.table_rows].tolist(), blocks, strict=True)]
        rows = list(range(len(tokens))) if batch.logit_rows is None else batch.logit_rows.tolist()
        owners = [self._owner(slot) for slot in batch.table_rows.tolist()]
        paths: list[list[int]] = []
        if batch.tree is not None:
            every = zip(batch.tree.paths.tolist(), batch.tree.decided.tolist(), positions, strict=True)
            paths = [path[: max(0, position + 1 - decided)] for path, decided, position in every]
        return SeenBatch(tokens, positions, slots, starts, context, tables, rows, owners, group, paths)

    def _owner(self, slot: int) -> Sequence:
        owners = [sequence for sequence in self.running() if sequence.slot == slot]
        if len(owners) != 1:
            raise KVError(f"slot {slot} belongs to {len(owners)} running sequences")
        return owners[0]

    def _write(self, batch: SeenBatch) -> None:
        """All of a layer's KV is written before any of it is read, so two writers of one slot would be a race."""
        written = [slot for slot in batch.slot_mapping if slot >= 0]
        if len(set(written)) != len(written):
            raise KVError("two tokens of a batch are written to the same slot")
        for slot, position, token in zip(batch.slot_mapping, batch.positions, batch.token_ids, strict=True):
            if slot >= 0:
                block = slot // self.block_size
                users = sum(block in s.kv.blocks for s in self.users())
                if users != 1:
                    raise KVError(f"block {block} is written to while {users} sequences use it")
                self.cells[slot] = Cell(position, token)

    def _read(self, batch: SeenBatch, i: int, owner: Sequence) -> dict[int, bytes]:
        """Attends to every visible position of one sequence; returns the state after each of its query tokens."""
        rows = range(batch.query_start[i], batch.query_start[i + 1])
        nodes = rows[1:] if batch.paths and any(batch.paths[row] for row in rows) else range(0)
        rows = rows[: len(rows) - len(nodes)]
        start = self._check_query(batch, i, owner, rows, len(nodes))
        states: dict[int, bytes] = {}
        window = self.kv_groups[batch.group].window
        first = 0 if window is None else min(max(0, start - window + 1), len(owner.tokens))
        state = state_of(owner.tokens[:first])
        for position in range(first, start + len(rows)):
            if position >= owner.max_tokens:  # a round that was launched before the sequence's end was known
                state = BEYOND
            else:
                query = rows[position - start] if position >= start else None
                state = self._attend(batch, i, owner, position, state, query)
            if position >= start:
                states[rows[position - start]] = state
        for node, row in enumerate(nodes):
            states[row] = self._visit(batch, owner, start, node, row, states)
        return states

    def _visit(
        self, batch: SeenBatch, owner: Sequence, start: int, node: int, row: int, states: dict[int, bytes]
    ) -> bytes:
        """Attends to the ancestors of a node of a tree, whose states are known, and to itself; returns its state."""
        path, slot, place = batch.paths[row], batch.slot_mapping[row], start + 1 + node
        blocks = self._blocks(owner, batch.group)
        if place // self.block_size >= len(blocks):
            if slot >= 0:
                raise KVError(f"sequence {owner.id}: node {node} has a slot beyond its blocks")
            return BEYOND
        if slot != blocks[place // self.block_size] * self.block_size + place % self.block_size:
            raise KVError(f"sequence {owner.id}: node {node} was written to {slot}")
        if not path or path[-1] != row or batch.positions[row] != start + len(path):
            raise KVError(f"sequence {owner.id}: node {node} at {batch.positions[row]} does not end its path {path}")
        if batch.positions[row] >= owner.max_tokens:
            return BEYOND
        above = row - node - 1
        for position, ancestor in enumerate(path, start + 1):
            cell, token = self.cells.get(batch.slot_mapping[ancestor]), batch.token_ids[ancestor]
            state = advance(states[above], token)
            if cell is not None and ancestor == row:
                cell.state = state
            if cell is None or (cell.position, cell.token, cell.state) != (position, token, state):
                raise KVError(
                    f"position {position} of node {node} should hold token {token}, but its slot holds {cell}"
                )
            above = ancestor
            states[ancestor] = state
        return states[row]

    def _check_query(self, batch: SeenBatch, i: int, owner: Sequence, rows: range, nodes: int) -> int:
        """Whether the query is what the next round of the sequence has to compute; returns its first position."""
        positions = [batch.positions[row] for row in rows]
        computed, work = owner.kv.num_computed, owner.in_flight
        first = last = computed
        if work is not None:
            first = computed + work.num_tokens
            last = first + (work.num_logits - 1 if work.decides else 0)
        if not positions or not first <= positions[0] <= last:
            raise KVError(f"sequence {owner.id}: positions {positions} do not begin at {first} to {last}")
        start = positions[0]
        if positions != list(range(start, start + len(rows))) or batch.context_len[i] != start + len(rows) + nodes:
            raise KVError(f"sequence {owner.id}: positions {positions} in a context of {batch.context_len[i]}")
        return start

    def _attend(
        self, batch: SeenBatch, i: int, owner: Sequence, position: int, state: bytes, query: int | None
    ) -> bytes:
        """Reads one position; `query` is its row if it is being computed. Returns the state after it."""
        block, place = divmod(position, self.block_size)
        blocks = self._blocks(owner, batch.group)
        if block >= len(blocks) or blocks[block] == NULL:
            raise KVError(f"sequence {owner.id}: position {position} has no block")
        slot = blocks[block] * self.block_size + place
        if batch.block_tables[i][block] != blocks[block]:
            raise KVError(f"sequence {owner.id}: block {block} of its table is not its own")
        if query is not None and batch.slot_mapping[query] != slot:
            raise KVError(f"sequence {owner.id}: position {position} was written to {batch.slot_mapping[query]}")
        cell = self.cells.get(slot)
        if cell is None:
            raise KVError(f"sequence {owner.id}: position {position} was never written")
        token = owner.tokens[position] if position < len(owner.tokens) else cell.token
        state = advance(state, token)
        if query is not None:
            cell.state = state
        if (cell.position, cell.token, cell.state) != (position, token, state):
            raise KVError(f"position {position} should hold token {token}, but its slot holds {cell}")
        return state


class TableModel(BareDecoder):
    """A decoder whose logits depend on the last token and its position only: for a target, or a drafter's model.

    They are multiples of 1/8, so that float32 loses nothing at a temperature of 1, 2 or 1/2.
    """

    def __init__(self, vocab_size: int, seed: int, spread: int = 16, positions: int = 64) -> None:
        super().__init__(vocab_size)
        shape, generator = (positions, vocab_size, vocab_size), torch.Generator().manual_seed(seed)
        self.table = torch.randint(-spread, spread + 1, shape, generator=generator) / 8  # [position, token, next]

    def __call__(self, batch: DeviceBatch, kv: object) -> torch.Tensor:
        """Positions behind the last one are those of lanes' padding."""
        rows = self.table[batch.positions.long().clamp(max=len(self.table) - 1), batch.token_ids.long()]
        return rows if batch.logit_rows is None else rows[batch.logit_rows]


def make_runner(
    decoder: BareDecoder,
    state: SequenceState,
    *,
    num_blocks: int = 4096,
    block_size: int = 64,
    scratch_slots: int = 0,
) -> ModelRunner:
    return ModelRunner(
        decoder,  # type: ignore[arg-type]
        state,
        num_blocks=num_blocks,
        block_size=block_size,
        max_decode_rows=64,
        scratch_slots=scratch_slots,
    )


# --- drafters ---------------------------------------------------------------------------------------------------------

Manner = Literal["right", "wrong", "mixed"]


class ScriptedDrafter(Drafter):
    """Proposes what the target will choose, something else, or first the one and then the other.

    `rude` drafters fill the whole lookahead even where the sequence has no room left for it.
    """

    needs_tokens = True

    def __init__(self, lookahead: int, manner: Manner = "right", *, rude: bool = False) -> None:
        super().__init__()
        self.lookahead = lookahead
        self.manner = manner
        self.rude = rude
        self.known: set[int] = set()  # sequences that it has drafted for, and not been told to forget

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return [Proposal(tuple(self.draft(work, work.sequence.tokens))) for work in works]

    def forget(self, sequence: Sequence) -> None:
        self.known.discard(sequence.id)

    def draft(self, work: Work, tokens: Seq[int]) -> list[int]:
        """What follows these tokens of a sequence."""
        sequence = work.sequence
        if sequence.status is not Status.RUNNING:
            raise AssertionError(f"sequence {sequence.id} is not running, yet a proposal is asked for")
        self.known.add(sequence.id)
        count, right = self._script(sequence, tokens)
        drafted: list[int] = []
        state = state_of(tokens)
        for j in range(count):
            if j <= right:  # behind a wrong token, nobody looks
                token = choose(logits_after(state), sequence, [*tokens, *drafted])
            token = token if j < right else (token + 1) % VOCAB
            drafted.append(token)
            state = advance(state, token)
        return drafted

    def _script(self, sequence: Sequence, tokens: Seq[int]) -> tuple[int, int]:
        """How many tokens to propose, and how many of them to get right."""
        room = sequence.max_tokens - len(tokens)
        limit = self.lookahead if self.rude else max(0, min(self.lookahead, room - 1))
        if self.manner != "mixed":
            return limit, limit if self.manner == "right" else 0
        dice = state_of(tokens)
        return dice[0] % (limit + 1), dice[1] % (limit + 1)


def as_tree(chain: Seq[int], most: int, depth: int, dice: bytes) -> tuple[list[int], list[int]]:
    """Tokens and parents of a random tree of at most so many nodes that has the chain, as far as there is room."""
    tokens: list[int] = []
    parents: list[int] = []
    depths: list[int] = []
    last = -1
    for j, token in enumerate(chain[:depth]):
        for each in dice[j : j + dice[j] % 4]:  # other tokens, or the same behind others
            parent = each % (len(tokens) + 1) - 1
            other = (token + each % 3) % VOCAB
            taken = [t for t, p in zip(tokens, parents, strict=True) if p == parent]
            if (parent < 0 or depths[parent] < depth) and other not in taken and (other, parent) != (token, last):
                depths.append(1 if parent < 0 else depths[parent] + 1)
                tokens.append(other)
                parents.append(parent)
        tokens.append(token)
        parents.append(last)
        depths.append(j + 1)
        last = len(tokens) - 1
    return tokens[:most], parents[:most]


class TreeDrafter(ScriptedDrafter):
    """Proposes trees of `lookahead` nodes at most, among them the chain that it is to propose; at times it alone."""

    def __init__(self, lookahead: int, depth: int, manner: Manner = "right", *, rude: bool = False) -> None:
        super().__init__(lookahead, manner, rude=rude)
        self.depth = depth

    def tree(self, work: Work, tokens: Seq[int]) -> tuple[list[int], list[int]]:
        dice, chain = hashlib.blake2b(state_of(tokens), digest_size=64).digest(), self.draft(work, tokens)
        if dice[-1] % 3 == 0:
            return chain[: self.depth], list(range(-1, len(chain[: self.depth]) - 1))
        return as_tree(chain, self.lookahead, self.depth, dice)

    def parents(self, parents: Seq[int]) -> tuple[int, ...] | None:
        return None if list(parents) == list(range(-1, len(parents) - 1)) else tuple(parents)

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        trees = (self.tree(work, work.sequence.tokens) for work in works)
        return [Proposal(tuple(tokens), parents=self.parents(parents)) for tokens, parents in trees]


class StateDrafter(ScriptedDrafter):
    """The same from the device's state into the device's state, so that rounds need not be committed before."""

    needs_tokens = False
    state: SequenceState  # set by `make_harness`

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return [self._propose(work) for work in works]

    def _propose(self, work: Work) -> Proposal:
        length = int(self.state.length[work.slot])
        drafted = self.draft(work, self.state.token_ids[work.slot, :length].tolist())[: work.lookahead]
        self.state.drafts[work.slot, : len(drafted)] = torch.tensor(drafted, dtype=torch.int32)
        return Proposal(num_on_device=len(drafted))


class StateTreeDrafter(TreeDrafter, StateDrafter):
    """The same from the device's state into the device's state."""

    needs_tokens = False

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return [self._propose(work) for work in works]

    def _propose(self, work: Work) -> Proposal:
        length, tree = int(self.state.length[work.slot]), self.state.tree
        assert tree is not None
        both = self.tree(work, self.state.token_ids[work.slot, :length].tolist())
        count = min(work.lookahead, len(both[0]))
        for column, values in zip((self.state.drafts, tree.parents), both, strict=True):
            column[work.slot, :count] = torch.tensor(values[:count], dtype=torch.int32)
        return Proposal(num_on_device=count, parents=None if self.parents(both[1]) is None else ())


# --- building and driving ---------------------------------------------------------------------------------------------


@dataclass
class Harness:
    """An engine over a fake decoder, and everything it has answered so far."""

    engine: Engine
    decoder: FakeDecoder
    outputs: dict[str, RequestOutput] = field(default_factory=dict)

    def step(self) -> None:
        for delta in self.engine.step():
            if delta.request_id in self.outputs:
                raise AssertionError(f"{delta.request_id} was answered twice")
            if delta.output is not None:
                self.outputs[delta.request_id] = delta.output

    def drain(self, limit: int = 2000) -> dict[str, RequestOutput]:
        """Runs until nothing is left; a livelock shows as an AssertionError."""
        for _ in range(limit):
            if not self.engine.has_work:
                return self.outputs
            self.step()
            self.engine.check()
            if self.engine.round.stats.drafter_failures:
                raise AssertionError("the drafter raised")
        raise AssertionError(f"there is still work after {limit} rounds")

    def run(self, prompt: Seq[int], params: SamplingParams | None = None) -> RequestOutput:
        request_id = self.engine.add(list(prompt), params or SamplingParams())
        return self.drain()[request_id]


def make_harness(
    *,
    drafter: Drafter | None = None,
    target: type[Target] = Target,
    block_size: int = 4,
    num_blocks: int = 64,
    max_num_seqs: int = 4,
    spare_slots: int = 2,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    prefix_caching: bool = True,
    stop_token_ids: frozenset[int] = frozenset(),
    tokenizer: Tokenizer | None = None,
    run_ahead: bool = False,
    dead_ends: int = 0,
    windows: Windows = (None,),
) -> Harness:
    drafter = drafter or Drafter()
    decoder = FakeDecoder(block_size, dead_ends, windows)
    num_slots = max_num_seqs + spare_slots
    depth = drafter.depth if isinstance(drafter, TreeDrafter) else 0
    sizes = {"max_len": max_model_len, "lookahead": drafter.lookahead, "vocab_size": VOCAB, "tree_depth": depth}
    state = SequenceState(num_slots, **sizes, device=CPU)
    if isinstance(drafter, StateDrafter):
        drafter.state = state
    runner = make_runner(decoder, state, num_blocks=num_blocks, block_size=block_size)
    scheduler = Scheduler(
        BlockPool(
            num_blocks,
            block_size,
            windows=windows,
            most_new=2 * max_num_batched_tokens,
            prefix_caching=prefix_caching,
        ),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        num_slots=num_slots,
    )
    decoder.running = lambda: scheduler.running
    decoder.users = lambda: [*scheduler.running, *scheduler.leaving]
    round_ = Round(target(runner, state), drafter)
    round_.run_ahead = run_ahead
    engine = Engine(round_, scheduler, max_model_len=max_model_len, stop_token_ids=stop_token_ids, tokenizer=tokenizer)
    return Harness(engine, decoder)


def wait_until_idle(driver: Driver, seconds: float = 30.0) -> None:
    """Until the requests that were dropped or aborted are gone; then the engine's books must be in order."""
    end = time.monotonic() + seconds
    while driver.call(lambda engine: engine.has_work):
        assert time.monotonic() < end, "the engine is still at work"
    driver.call(lambda engine: engine.check())
    scheduler = driver.engine.scheduler
    assert not [*scheduler.running, *scheduler.waiting, *scheduler.leaving]
    pool = scheduler.pool
    assert pool.num_free == pool.num_blocks


@contextmanager
def paused_at(driver: Driver, num_output: int) -> Iterator[None]:
    """Inside, a round whose sequences all have so many output tokens waits until the engine has a command to run: what
    a test does while they are decoded does not depend on how quick it is."""
    over, round_ = threading.Event(), driver.engine.round
    launch = round_.launch

    def patient(works: Seq[Work]) -> InFlight:
        while min(work.sequence.num_output for work in works) >= num_output and not driver._inbox.qsize():
            if over.wait(0.001):
                break
        return launch(works)

    round_.launch = patient  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        over.set()
        round_.launch = launch  # type: ignore[method-assign]


def make_sequence(
    prompt: Seq[int],
    output: Seq[int] = (),
    *,
    params: SamplingParams | None = None,
    id: int = 0,
    seed: int = 0,
    stop_token_ids: frozenset[int] = frozenset(),
    max_tokens: int = 1 << 30,
) -> Sequence:
    request = Request(f"request-{id}", tuple(prompt), params or SamplingParams())
    return Sequence(id, request, 0, seed, stop_token_ids, max_tokens, tokens=[*prompt, *output])


def cached_prefixes(pool: BlockPool) -> dict[int, tuple[int, ...]]:
    """For every block in the prefix cache whose ancestors are all still there: the tokens up to its end."""
    found: dict[int, tuple[int, ...]] = {}
    reached = [((), entry) for root in pool._roots.values() for entry in root.children.values()]
    while reached:
        head, entry = reached.pop(0)
        prefix = (*head, *entry.tokens)
        if entry.blocks:
            found |= dict.fromkeys(entry.blocks.values(), prefix)
            reached += [(prefix, child) for child in entry.children.values()]
    return found


def check_cache(harness: Harness) -> None:
    """Raises when the prefix cache names KV that its blocks do not hold."""
    cells, size = harness.decoder.cells, harness.decoder.block_size
    for block, prefix in cached_prefixes(harness.engine.scheduler.pool).items():
        last = cells[block * size + size - 1]
        if (last.position, last.state) != (len(prefix) - 1, state_of(prefix)):
            raise AssertionError(f"block {block} is cached as the end of {prefix}, but ends with {last}")


# --- statistics -------------------------------------------------------------------------------------------------------


def chi_squared_p(observed: Seq[int], probabilities: Seq[float]) -> float:
    """p-value of Pearson's test; cells expected fewer than 10 times are pooled, and zero cells must be empty."""
    total = sum(observed)
    cells = [(o, p * total) for o, p in zip(observed, probabilities, strict=True) if p > 0]
    if sum(o for o, _ in cells) != total:
        return 0.0
    large, small = [c for c in cells if c[1] >= 10], [c for c in cells if c[1] < 10]
    if small:
        large.append((sum(o for o, _ in small), sum(e for _, e in small)))
    statistic = sum((o - e) ** 2 / e for o, e in large)
    if len(large) < 2:
        return 1.0
    half = torch.tensor([(len(large) - 1) / 2, statistic / 2], dtype=torch.float64)
    return float(torch.special.gammaincc(half[0], half[1]))
