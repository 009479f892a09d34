"""A target without a model, scripted drafters, and helpers: an engine that is exact, tiny and deeply suspicious.

`FakeTarget` keeps a "KV" of its own and reads it back through the block tables as attention would, so a stale, missing
or wrongly shared block raises instead of passing unseen. Its logits are a function of the visible tokens only.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import numpy as np
import torch

from ssd.core import (
    Batch,
    FinishReason,
    Proposal,
    Request,
    RequestOutput,
    SamplingParams,
    Sequence,
    Work,
    sequence_seed,
)
from ssd.decoding.acceptance import Acceptance
from ssd.decoding.drafter import Drafter
from ssd.decoding.law import Row, choose
from ssd.decoding.round import Round
from ssd.engine.blocks import BlockPool
from ssd.engine.driver import Driver
from ssd.engine.engine import Engine
from ssd.engine.scheduler import Scheduler
from ssd.kernels.ops import DeviceBatch
from ssd.text.tokenizer import Tokenizer

VOCAB = 32
ROOT = b"nothing seen yet"


# --- the function that the fake model computes ------------------------------------------------------------------------


def advance(state: bytes, token: int) -> bytes:
    """The state after one more visible token: it names the whole visible prefix."""
    return hashlib.blake2b(state + token.to_bytes(4, "little"), digest_size=16).digest()


def state_of(tokens: Seq[int]) -> bytes:
    state = ROOT
    for token in tokens:
        state = advance(state, token)
    return state


def logits_after(state: bytes) -> torch.Tensor:
    """Pseudo-random float32 logits in [-4, 4)."""
    raw = hashlib.blake2b(state, digest_size=2 * VOCAB, person=b"logits").digest()
    return torch.from_numpy(np.frombuffer(raw, dtype=np.uint16).astype(np.float32) / 8192 - 4)


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
) -> Expected:
    """One token at a time, no KV, no batch, no engine: what every sample must come out as."""
    stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else stop_token_ids)
    sequence = make_sequence(prompt, params=params, seed=sequence_seed(params.seed, index), stop_token_ids=stops)
    state = state_of(prompt)
    while True:
        allowed = sequence.num_output >= params.min_tokens
        [token] = choose(logits_after(state)[None].clone(), [Row(sequence)])
        sequence.tokens.append(token)
        state = advance(state, token)
        if allowed and token in stops:
            return Expected(sequence.output_token_ids, "stop")
        if sequence.num_output == params.max_new_tokens or len(sequence.tokens) == max_model_len:
            return Expected(sequence.output_token_ids, "length")


# --- the target -------------------------------------------------------------------------------------------------------


class KVError(Exception):
    """The engine showed the target KV that is stale, missing, shared wrongly or somebody else's."""


@dataclass
class Cell:
    """What one KV slot holds: a token at a position, computed behind a certain prefix."""

    position: int
    token: int
    state: bytes | None = None


class FakeTarget:
    """Implements `ssd.decoding.round.Target`. `running` tells it which sequences exist, for checking only."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.vocab_size = VOCAB
        self.kv: dict[int, Cell] = {}
        self.batches: list[Batch] = []
        self.running: Callable[[], list[Sequence]] = list

    def forward(self, batch: Batch) -> torch.Tensor:
        self.batches.append(batch)
        self._write(batch)
        states: dict[int, bytes] = {}
        for i, table in enumerate(batch.block_tables):
            states |= self._read(batch, i, self._owner(table))
        rows = [logits_after(states[row]) for row in batch.logit_rows]
        return torch.stack(rows) if rows else torch.empty(0, VOCAB)

    def _owner(self, table: list[int]) -> Sequence:
        """The last block of a sequence is always its own, so its table identifies it."""
        owners = [s for s in self.running() if s.blocks == table]
        if len(owners) != 1:
            raise KVError(f"block table {table} belongs to {len(owners)} running sequences")
        return owners[0]

    def _write(self, batch: Batch) -> None:
        """All of a layer's KV is written before any of it is read, so two writers of one slot would be a race."""
        if len(set(batch.slots)) != len(batch.slots):
            raise KVError("two tokens of a batch are written to the same slot")
        for slot, position, token in zip(batch.slots, batch.positions, batch.token_ids, strict=True):
            block = slot // self.block_size
            users = sum(block in s.blocks for s in self.running())
            if users != 1:
                raise KVError(f"block {block} is written to while {users} sequences use it")
            self.kv[slot] = Cell(position, token)

    def _read(self, batch: Batch, i: int, owner: Sequence) -> dict[int, bytes]:
        """Attends to every visible position of one sequence; returns the state after each of its query tokens."""
        first, last = batch.query_start[i], batch.query_start[i + 1]
        query, start = batch.token_ids[first:last], owner.num_computed
        if batch.positions[first:last] != list(range(start, start + len(query))) or not query:
            raise KVError(f"sequence {owner.id}: positions {batch.positions[first:last]} do not follow {start}")
        decided = owner.tokens[start : start + len(query)]
        if query[: len(decided)] != decided or batch.context_len[i] != start + len(query):
            raise KVError(f"sequence {owner.id}: query {query} does not continue its tokens {decided}")
        states: dict[int, bytes] = {}
        state = ROOT
        for position, token in enumerate(owner.tokens[:start] + query):
            state = advance(state, token)
            self._attend(batch.block_tables[i], position, token, state, fresh=position >= start)
            if position >= start:
                states[first + position - start] = state
        return states

    def _attend(self, table: list[int], position: int, token: int, state: bytes, *, fresh: bool) -> None:
        cell = self.kv.get(table[position // self.block_size] * self.block_size + position % self.block_size)
        if cell is None:
            raise KVError(f"position {position}: its KV was never written")
        if fresh:
            cell.state = state
        if (cell.position, cell.token, cell.state) != (position, token, state):
            raise KVError(f"position {position} should hold token {token}, but its slot holds {cell}")


class TableModel:
    """Logits that depend on the last token and its position only: a target, and a runner for a drafter's model.

    They are multiples of 1/8, so that float32 loses nothing at a temperature of 1, 2 or 1/2.
    """

    block_size = 64
    num_blocks = 4096
    kv = ()
    scratch_slot = 0
    device = torch.device("cpu")
    ops = SimpleNamespace(tile_tokens=lambda heads, split_kv: 64)
    layers = (SimpleNamespace(heads=None),)

    def __init__(self, vocab_size: int, seed: int, spread: int = 16, positions: int = 64) -> None:
        self.vocab_size = vocab_size
        self.decoder = self
        shape, generator = (positions, vocab_size, vocab_size), torch.Generator().manual_seed(seed)
        self.table = torch.randint(-spread, spread + 1, shape, generator=generator) / 8  # [position, token, next]

    def forward(self, batch: Batch) -> torch.Tensor:
        return self.table[
            [batch.positions[i] for i in batch.logit_rows], [batch.token_ids[i] for i in batch.logit_rows]
        ]

    def __call__(self, batch: DeviceBatch, kv: object) -> torch.Tensor:
        """As a decoder; positions behind the last one are those of lanes' padding."""
        rows = self.table[batch.positions.long().clamp(max=len(self.table) - 1), batch.token_ids.long()]
        return rows if batch.logit_rows is None else rows[batch.logit_rows]


# --- drafters ---------------------------------------------------------------------------------------------------------

Manner = Literal["right", "wrong", "mixed"]


class ScriptedDrafter(Drafter):
    """Proposes what the target will choose, something else, or first the one and then the other.

    `rude` drafters fill the whole lookahead even where the sequence has no room left for it.
    """

    def __init__(self, lookahead: int, manner: Manner = "right", *, rude: bool = False) -> None:
        self.lookahead = lookahead
        self.manner = manner
        self.rude = rude
        self.forgotten: list[int] = []

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return [Proposal(tuple(self._tokens(work.sequence))) for work in works]

    def forget(self, sequence: Sequence) -> None:
        self.forgotten.append(sequence.id)

    def _tokens(self, sequence: Sequence) -> Iterator[int]:
        if sequence.id in self.forgotten:
            raise AssertionError(f"sequence {sequence.id} has finished, yet a proposal is asked for")
        count, right = self._script(sequence)
        drafted: list[int] = []
        state = state_of(sequence.tokens)
        for j in range(count):
            [token] = choose(logits_after(state)[None].clone(), [Row(sequence, tuple(drafted))])
            token = token if j < right else (token + 1) % VOCAB
            drafted.append(token)
            state = advance(state, token)
        return iter(drafted)

    def _script(self, sequence: Sequence) -> tuple[int, int]:
        """How many tokens to propose, and how many of them to get right."""
        limit = self.lookahead if self.rude else max(0, min(self.lookahead, sequence.room - 1))
        if self.manner != "mixed":
            return limit, limit if self.manner == "right" else 0
        dice = state_of(sequence.tokens)
        return dice[0] % (limit + 1), dice[1] % (limit + 1)


# --- building and driving ---------------------------------------------------------------------------------------------


@dataclass
class Harness:
    """An engine over a fake target, and everything it has answered so far."""

    engine: Engine
    target: FakeTarget
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
            if self.engine.round.failures:
                raise AssertionError("the drafter raised")
        raise AssertionError(f"there is still work after {limit} rounds")

    def run(self, prompt: Seq[int], params: SamplingParams | None = None) -> RequestOutput:
        request_id = self.engine.add(list(prompt), params or SamplingParams())
        return self.drain()[request_id]


def make_harness(
    *,
    drafter: Drafter | None = None,
    acceptance: Acceptance | None = None,
    block_size: int = 4,
    num_blocks: int = 64,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 64,
    prefix_caching: bool = True,
    stop_token_ids: frozenset[int] = frozenset(),
    tokenizer: Tokenizer | None = None,
) -> Harness:
    drafter = drafter or Drafter()
    target = FakeTarget(block_size)
    scheduler = Scheduler(
        BlockPool(num_blocks, block_size, prefix_caching=prefix_caching),
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        lookahead=drafter.lookahead,
    )
    target.running = lambda: scheduler.running
    engine = Engine(
        Round(target, drafter, acceptance),
        scheduler,
        max_model_len=max_model_len,
        stop_token_ids=stop_token_ids,
        tokenizer=tokenizer,
    )
    return Harness(engine, target)


def wait_until_idle(driver: Driver, seconds: float = 30.0) -> None:
    """Until the requests that were dropped or aborted are gone; then the engine's books must be in order."""
    end = time.monotonic() + seconds
    while driver.call(lambda engine: engine.has_work):
        assert time.monotonic() < end, "the engine is still at work"
    driver.call(lambda engine: engine.check())
    assert not driver.engine.scheduler.running
    assert not driver.engine.scheduler.waiting
    pool = driver.engine.scheduler.pool
    assert pool.num_free == pool.num_blocks


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
    blocks = {entry: (block, key) for key, (block, entry) in pool._entries.items()}

    def prefix(entry: int) -> tuple[int, ...] | None:
        if entry == 0:
            return ()
        if entry not in blocks:
            return None
        parent, tokens = blocks[entry][1]
        head = prefix(parent)
        return None if head is None else head + tokens

    return {block: found for entry, (block, _) in blocks.items() if (found := prefix(entry)) is not None}


def check_cache(harness: Harness) -> None:
    """Raises when the prefix cache names KV that its blocks do not hold."""
    kv, size = harness.target.kv, harness.target.block_size
    for block, prefix in cached_prefixes(harness.engine.scheduler.pool).items():
        last = kv[block * size + size - 1]
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
