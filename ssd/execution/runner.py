"""ModelRunner: runs a `Batch` through a model and returns logits. Owns the model's KV cache and block tables."""

from __future__ import annotations

import copy
import functools
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any, Protocol

import torch

from ssd.config import MOST_TREE_ROWS
from ssd.execution.batch import FEW_QUERIES, Batch, BatchInputs, TileSizes
from ssd.execution.clock import Clock
from ssd.execution.features import Features
from ssd.execution.graphs import PREFILL_BUCKETS, BatchGraph, BatchGraphs, row_buckets
from ssd.execution.state import DeviceBlockTables, SequenceState
from ssd.models.decoder import Decoder, KVCache

# Rows of eager batches: one of each number that has kernels of its own (`kernels.linear`, `kernels.cublaslt`).
_EAGER_SIZES = (1, *range(8, 128, 8), *range(129, 512, 64), *(n * 2**i // 2 + 1 for i in range(9, 16) for n in (2, 3)))
_SIZES = 7  # of eager inputs
_MOST_INPUTS = 64  # that are kept on a CPU
_HEAD_ROWS = 128  # whose logits are computed at a time, where those of all rows are wanted


class Keep(IntEnum):
    """What is wanted of a forward pass beside the logits of its logit rows."""

    NOTHING = 0
    STATES = 1  # the hidden states that the head reads, of all rows
    LOGITS = 2  # and their logits, some rows at a time


class Followers(Protocol):
    """The other ranks of a model that is split, to which rank 0 says what to launch."""

    @property
    def failure(self) -> str | None:
        """Why they compute no longer; None while they do."""

    def launching(self, key: Seq[int], *, draft: bool = False) -> AbstractContextManager[None]:
        """Makes them launch a forward pass (`Staged.key`), or a piece of a draft run; EngineFailed if it fails."""

    def awaited(self) -> AbstractContextManager[None]:
        """Around a wait for the device; EngineFailed if one of them was lost, or takes too long."""

    def write_tables(self, places: Seq[int], values: Seq[int]) -> None:
        """`DeviceBlockTables.write` on all of them."""

    def close(self) -> None: ...


@dataclass(frozen=True)
class Staged:
    """A batch that was uploaded to the device."""

    inputs: BatchInputs
    key: tuple[int, ...]  # tells another rank which inputs: kind and rows of a graph, or sizes of eager inputs
    graph: BatchGraph | None = None
    keep: Keep = Keep.NOTHING


@dataclass(frozen=True)
class Forward:
    """A forward pass that was launched."""

    inputs: BatchInputs
    logits: torch.Tensor  # float32, one row for each logit row of the inputs
    graph: BatchGraph | None = None  # that was replayed, if any
    states: torch.Tensor | None = None  # [rows, hidden], if they were to be kept


ReadLogits = Callable[[Forward, int, torch.Tensor], None]  # gets the logits of some rows, and the first one's number


class ModelRunner:
    """Runs one decoder over its paged KV."""

    def __init__(
        self,
        decoder: Decoder,
        state: SequenceState,
        *,
        num_blocks: int,
        block_size: int,
        max_decode_rows: int,
        scratch_slots: int = 0,
        tables: DeviceBlockTables | None = None,
    ) -> None:
        """`tables`: those of another model, whose KV blocks have the same numbers."""
        self.decoder = decoder
        self.state = state
        # Of drafts that it verifies; what has scratch slots is a draft model itself.
        self.tree_depth = state.tree.depth if state.tree is not None and not scratch_slots else 0
        self.block_size = block_size
        self.vocab_size = decoder.config.vocab_size
        self.num_blocks = num_blocks
        self.max_decode_rows = max_decode_rows
        self.scratch_slot = num_blocks * block_size  # first of the KV slots outside of the pool's blocks
        self.kv = decoder.make_kv_cache(num_blocks - (-scratch_slots // block_size), block_size)
        columns = -(-state.max_positions // block_size)
        groups = len(decoder.kv_groups)
        self.tables = tables or DeviceBlockTables(state.num_slots, columns, decoder.device, groups)
        self.features: Features | None = None  # that a draft reads
        self.followers: Followers | None = None  # on rank 0 of a split model
        self.graphs: BatchGraphs | None = None  # of decode-size batches
        self.prefill_graphs: BatchGraphs | None = None
        self.tree_graphs: dict[bool, BatchGraphs] = {}  # of batches whose drafts are trees, by whether they are prefill
        self._last_inputs: OrderedDict[tuple[int, ...], BatchInputs] = OrderedDict()  # on a CPU, by their sizes

    def for_state(self, state: SequenceState, tables: DeviceBlockTables, scratch_slot: int) -> ModelRunner:
        """The same model and KV for the sequences of another state, with scratch slots of their own."""
        made = copy.copy(self)
        made.state, made.tables, made.scratch_slot = state, tables, scratch_slot
        made._last_inputs = OrderedDict()
        return made

    def plan_graphs(self, *, prefill_only: bool = False) -> None:
        """Graphs of decode-size batches and short prefills, to be captured; `prefill_only`: of single prefills only."""
        make = functools.partial(
            BatchGraphs,
            tiles=self.tile_sizes(),
            device=self.decoder.device,
            groups=len(self.decoder.kv_groups),
        )
        most = most_of_chains = self.max_decode_rows
        if self.tree_depth:
            most_of_chains = min(most, self.state.num_slots * (1 + self.tree_depth))
            for prefill, sizes in ((False, row_buckets(min(most, MOST_TREE_ROWS))), (True, PREFILL_BUCKETS)):
                self.tree_graphs[prefill] = make(sizes, most=most, prefill=prefill, tree_depth=self.tree_depth)
        if not prefill_only:
            self.graphs = make(row_buckets(most_of_chains), most=most_of_chains, prefill=False)
        self.prefill_graphs = make(PREFILL_BUCKETS, most=1 if prefill_only else most_of_chains, prefill=True)

    def all_graphs(self) -> list[BatchGraphs]:
        """Those that were planned, the largest first: the others reuse their memory."""
        graphs = *self.tree_graphs.values(), self.graphs, self.prefill_graphs
        return [each for each in graphs if each is not None]

    def rehearse(self, max_tokens: int) -> None:
        """Forward passes of padding, of all sizes that have kernels of their own, up to `max_tokens` rows."""
        with self.decoder.distinct_layers():
            for graphs in self.all_graphs():
                for inputs in graphs.inputs.values():
                    self._compute(inputs)
            most = self.max_decode_rows if self.graphs is None or self.tree_graphs else 0
            for rows in (n for n in _EAGER_SIZES if n <= most):
                batch = Batch([self.state.padding] * rows, [0] * rows, [1] * rows, [1] * rows)
                self._rehearse_eagerly(batch, prefill=False)
            longest = self.state.token_ids.shape[1]
            for rows in sorted({min(n, max_tokens) for n in _EAGER_SIZES}):
                lengths = [min(longest, rows - first) for first in range(0, rows, longest)]
                each = [0] * len(lengths)
                batch = Batch([self.state.padding] * len(lengths), each, lengths, [1, *each[1:]])
                self._rehearse_eagerly(batch, prefill=True)

    def _rehearse_eagerly(self, batch: Batch, *, prefill: bool) -> None:
        for trees in (False, True) if self.tree_depth else (False,):
            own = replace(batch, trees=trees)
            inputs = self._eager_inputs(self._sizes(own, prefill=prefill))
            inputs.write(own)  # the padding slot has no KV blocks
            self._compute(inputs)

    def capture(self) -> None:
        """Captures the graphs that were planned. Their kernels must have run, or have been compiled."""
        pool = None
        for graphs in self.all_graphs():
            pool = graphs.capture(self._compute, pool)

    @torch.inference_mode()
    def capture_in_part(self, stream: torch.cuda.Stream, most_rows: int) -> None:
        """Captures decode-size batches of up to `most_rows` rows once more, for `run(…, in_part=True)`."""
        if self.graphs is not None:
            self.graphs.capture_in_part(self._compute, stream, most_rows)

    def close(self) -> None:
        """Ends the other ranks."""
        if self.followers is not None:
            self.graphs = self.prefill_graphs = None  # before the group of the ranks, which NCCL's kernels in them use
            self.followers.close()

    def forward(self, batch: Batch) -> Forward:
        """Launches a forward pass; on a GPU without waiting for it."""
        return self.run(self.stage(batch))

    def logits_of(self, token_ids: Seq[int], count: int) -> torch.Tensor:
        """Logits after each of the last `count` tokens of a text: for scoring, while no sequence is running."""
        slot, blocks = 0, list(range(-(-len(token_ids) // self.block_size) * len(self.decoder.kv_groups)))
        self.state.append(slot, 0, token_ids, 0)
        self.tables.reset(slot)
        self.tables.update([(slot, blocks)])
        return self.forward(Batch([slot], [0], [len(token_ids)], [count])).logits[:count]

    def stage(self, batch: Batch, keep: Keep = Keep.NOTHING) -> Staged:
        """Uploads a batch, into the buffers of a graph where there is one for it. Graphs keep nothing."""
        if keep:
            sizes = self._sizes(batch, prefill=True)
            inputs = self._eager_inputs(sizes)
            inputs.write(batch)
            return Staged(inputs, (*sizes, int(keep)), keep=keep)
        last = next(reversed(self._last_inputs.items()), None)
        if last is not None and last[1].holds(batch):  # the same sequences decode
            return Staged(last[1], last[0])
        decode_size = batch.max_queries <= self._few_queries(batch) and batch.num_rows <= self.max_decode_rows
        graphs = self.graphs if decode_size and self.graphs is not None else self.prefill_graphs
        if batch.trees:
            graphs = self.tree_graphs.get(not decode_size)
        if graphs is not None and graphs.takes(batch):
            found = graphs.of(batch.num_rows)
            found.inputs.write(batch)
            return Staged(found.inputs, (int(graphs is self.prefill_graphs), found.inputs.rows), found)
        sizes = self._sizes(batch, prefill=not decode_size)
        inputs = self._eager_inputs(sizes)
        inputs.write(batch)
        return Staged(inputs, sizes)

    def staged(self, key: tuple[int, ...]) -> Staged:
        """What rank 0 has staged under this key, on another rank."""
        if len(key) > 2:
            return Staged(self._eager_inputs(key[:_SIZES]), key, keep=Keep(sum(key[_SIZES:])))
        graphs = self.prefill_graphs if key[0] else self.graphs
        if graphs is None:
            raise AssertionError("rank 0 has graphs that this rank has not")
        found = graphs.of(key[1])
        return Staged(found.inputs, key, found)

    def _sizes(self, batch: Batch, *, prefill: bool) -> tuple[int, ...]:
        """Sizes of eager inputs: rows, logit rows, works, decode-size tiles, `gather`, `prefill`, `trees`."""
        tile, rows, logits = self.tile_sizes().decode, batch.num_rows, batch.num_logit_rows
        most = self._few_queries(batch)
        few = sum(-(-count // tile) for count in batch.num_queries if not prefill or count <= most)
        return rows, logits, len(batch.slots), few, int(logits < rows), int(prefill), int(batch.trees)

    def _eager_inputs(self, sizes: tuple[int, ...]) -> BatchInputs:
        """Tensors of the size of a batch. On a CPU those of the last sizes are used again: recordings know where they
        are."""
        if sizes in self._last_inputs:
            self._last_inputs.move_to_end(sizes)
            return self._last_inputs[sizes]
        rows, logits, works, few, gather, prefill, trees = sizes
        made = BatchInputs(
            rows,
            logits,
            works=works,
            tiles=self.tile_sizes(),
            gather=bool(gather),
            prefill=bool(prefill),
            decode_tiles=few,
            device=self.decoder.device,
            groups=len(self.decoder.kv_groups),
            tree_depth=self.tree_depth if trees else 0,
        )
        if self.decoder.device.type == "cpu":
            self._last_inputs[sizes] = made
            if len(self._last_inputs) > _MOST_INPUTS:
                self._last_inputs.popitem(last=False)
        return made

    def run(self, staged: Staged, *, in_part: bool = False, read: ReadLogits | None = None) -> Forward:
        """Launches the forward pass of an uploaded batch, on all ranks.

        `in_part`: in the target's part of the GPU, if there is a graph for that. `read` gets the logits that were to be
        kept, on the first rank.
        """
        with self.followers.launching(staged.key) if self.followers is not None else nullcontext():
            if staged.keep:
                return self._run_keeping(staged, read)
            if staged.graph is None:
                return Forward(staged.inputs, self._compute(staged.inputs))
            own = staged.graph.in_part if in_part else None
            (own or staged.graph.graph).replay()
            return Forward(staged.inputs, staged.graph.logits, staged.graph)

    @torch.inference_mode()
    def _run_keeping(self, staged: Staged, read: ReadLogits | None) -> Forward:
        decoder, rows = self.decoder, staged.inputs.rows
        states = torch.empty((rows, decoder.config.hidden_size), dtype=decoder.dtype, device=decoder.device)
        forward = Forward(staged.inputs, self._compute(staged.inputs, states), states=states)
        for first in range(0, rows, _HEAD_ROWS) if staged.keep is Keep.LOGITS else ():
            logits = decoder.head.logits(states[first : first + _HEAD_ROWS])
            if read is not None:
                read(forward, first, logits)
        return forward

    def _few_queries(self, batch: Batch) -> int:
        return max(FEW_QUERIES, 1 + self.state.lookahead if batch.trees else 0)

    def move_accepted(self, inputs: BatchInputs) -> None:
        """Moves the KV of accepted nodes of trees, and that of the draft in the same blocks, to their positions."""
        for tables, caches in zip(self.tables.groups, self._caches, strict=True):
            inputs.move_accepted(self.state, tables, caches, self.block_size)

    @functools.cached_property
    def _caches(self) -> list[torch.Tensor]:
        """By group of layers, those of a draft in the same blocks among the first one's: see `_cache_table`."""
        found = []
        for number, group in enumerate(self.decoder.kv_groups):
            layers = [self.kv[i] for i in group.layers]
            layers += self.features.kv if self.features is not None and number == 0 else []
            found.append(_cache_table(layers, self.decoder.device))
        return found

    @functools.cached_property
    def own_caches(self) -> torch.Tensor:
        """Of a draft model, all layers of which have the same KV slots: see `_cache_table`."""
        return _cache_table(self.kv, self.decoder.device)

    def wait(self, clock: Clock) -> None:
        """Waits for the device."""
        with self.followers.awaited() if self.followers is not None else nullcontext():
            clock.wait()

    def _compute(self, inputs: BatchInputs, states: torch.Tensor | None = None) -> torch.Tensor:
        tables, tp = self.tables.groups, self.decoder.tp
        if tp.rank == 0:
            inputs.prepare(self.state, tables, self.block_size)
        tp.broadcast(inputs.all)
        batch = inputs.device_batch(tables)
        with torch.inference_mode():
            kept: dict[str, Any] = {} if states is None else {"states": states}
            if self.features is None:
                return self.decoder(batch, self.kv, **kept)
            buffer = self.features.buffer(inputs.rows)
            logits = self.decoder(batch, self.kv, self.features.by_layer(buffer), **kept)
            self.features.store(inputs, batch, buffer)
            return logits

    def tile_sizes(self) -> TileSizes:
        ops, heads = self.decoder.ops, self.decoder.heads
        return TileSizes(decode=ops.tile_tokens(heads, prefill=False), prefill=ops.tile_tokens(heads, prefill=True))


def _cache_table(kv: KVCache, device: torch.device) -> torch.Tensor:
    """Address of each tensor, and bytes of a token in it: int64 [tensors, 2]."""
    sizes = [(each.data_ptr(), each[0, 0].numel() * each.element_size()) for layer in kv for each in layer]
    return torch.tensor(sizes, dtype=torch.int64, device=device).view(-1, 2)
