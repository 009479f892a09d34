"""A block draft in place of a draft model: with `BlockModel`, `ModelDrafter` is SD.

The target's forward passes leave the draft's KV of all tokens that they compute (`ssd.execution.features`), so a draft
is one forward pass: the last decided token and masks behind it. Their KV is in the slots of the positions that the
target is about to verify, which overwrites it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from ssd.core import Origin, SamplingParams
from ssd.drafting.fan_out import FanOut
from ssd.drafting.model import DraftSource
from ssd.drafting.runner import DraftRun, DraftRunner
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.drafting.tree import DraftTrees
from ssd.execution.clock import now
from ssd.execution.runner import ModelRunner
from ssd.kernels.ops import DeviceBatch
from ssd.kernels.triton.compile import compiling
from ssd.models.block import BlockDraft
from ssd.sampling.sampler import ALL_NEEDS, Needs, Rows


class BlockRunner(DraftRunner):
    """Runs of a block draft. A run of `count` tokens is one piece."""

    def __init__(self, model_runner: ModelRunner, shapes: RunShapes, *, graphs: bool) -> None:
        super().__init__(model_runner, replace(shapes, most_written_reads=1), graphs=graphs)
        draft = model_runner.decoder
        assert isinstance(draft, BlockDraft)
        self.draft = draft
        self._places = torch.arange(shapes.lookahead, dtype=torch.int32, device=self.device)
        self._sequences = torch.arange(shapes.max_sequences, device=self.device)
        self._indices: dict[tuple[int, int], tuple[torch.Tensor, ...]] = {}

    @torch.inference_mode()
    def write(
        self, slots: Seq[int], params: Seq[SamplingParams], count: int, reads: int, origin: Origin = Origin.DRAFT
    ) -> DraftRun:
        shape, began = self.shapes.of(len(slots), 1, params), now(self.device)
        n = shape.sequences
        self._upload(slots, [0] * len(slots), shape)
        self._stage(shape)
        self.graphs.launch(*self._chain(shape, count))
        self.graphs.launch(("store", n, count, origin), lambda: self.buffers.store(n, count, origin))
        return self._launched(slots, shape, count - 1, began)

    @torch.inference_mode()
    def rehearse(self, sequences: Seq[int], fan_out: FanOut) -> None:
        """Runs on padding, of all shapes that have kernels of their own."""
        count = self._most
        with self.decoder.distinct_layers(), self.state.sampling.tables():
            for shape in self.shapes.usual(sequences, fan_out):
                self._upload([self.state.padding] * shape.sequences, [0] * shape.sequences, shape)
                self._copy_inputs(shape.sequences, False)
                for needs in ALL_NEEDS if compiling() else [Needs()]:
                    for _, compute in self._kinds(shape._replace(needs=needs), count):
                        compute()
                self.buffers.store(shape.sequences, count, Origin.DRAFT)

    @torch.inference_mode()
    def capture(self, sequences: Seq[int], fan_out: FanOut) -> None:
        """Captures the graphs of the usual shapes, so that no request waits for them."""
        count = self._most
        for shape in self.shapes.usual(sequences, fan_out):
            n = shape.sequences
            self.graphs.capture(("stage", n, False), functools.partial(self._copy_inputs, n, False))
            for key, compute in self._kinds(shape, count):
                self.graphs.capture(key, compute)

    @property
    def _most(self) -> int:
        return min(self.shapes.lookahead, self.draft.block.most_drafted)

    def _kinds(self, shape: RunShape, count: int) -> list[tuple[tuple[Any, ...], Callable[[], None]]]:
        trees = self.writes_trees(shape.sequences)
        return [self._chain(shape, count), *([self._tree(shape, count)] if trees else [])]

    def _chain(self, shape: RunShape, count: int) -> tuple[tuple[Any, ...], Callable[[], None]]:
        """The key of a run, and what it launches."""
        self._index(shape.sequences, count)  # before a capture, which would record how it is made
        return ("block", shape.sequences, count, shape.needs), functools.partial(self._write, shape, count)

    def _tree(self, shape: RunShape, levels: int) -> tuple[tuple[Any, ...], Callable[[], None]]:
        assert self.trees is not None
        self._index(shape.sequences, levels)
        key = "trees", shape.sequences, levels, shape.needs
        return key, functools.partial(self._write_tree, self.trees, shape, levels)

    def _states(self, shape: RunShape, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward pass: states and logits of each place, [sequences, count, …]."""
        n, draft, queries = shape.sequences, self.draft, self.draft.block.queries(count)
        states = draft.states(self._batch(n, count), self.kv, queries).view(n, queries, -1)[:, queries - count :]
        return states, draft.logits(states.flatten(0, 1)).view(n, count, -1)

    def _write(self, shape: RunShape, count: int) -> None:
        """A token of each place, in their order where one depends on that before it."""
        with torch.inference_mode():
            n, inputs, walk = shape.sequences, self.buffers.inputs(branches=False), self.draft.walk
            first, slots, tokens = inputs.first[:n], inputs.slots(n), inputs.tokens[:n, 0]
            states, logits = self._states(shape, count)
            if walk is None:
                positions = first[:, None] + 1 + self._places[:count]
                rows = Rows(slots.repeat_interleave(count), positions.flatten())
                self.choice.choose_all(shape, self._in_target(logits.flatten(0, 1)), rows)
                return
            walk.begin()
            for j in range(count):
                own = walk.logits(logits[:, j], tokens.contiguous(), states[:, j].contiguous())
                self.choice.choose(shape, j, self._in_target(own), Rows(slots, first + (j + 1)))
                tokens = self.buffers.chain[:n, j]

    def _write_tree(self, trees: DraftTrees, shape: RunShape, levels: int) -> None:
        """The beams of a level have the logits of its place, with what follows from their tokens."""
        with torch.inference_mode():
            n, walk, inputs = shape.sequences, self.draft.walk, self.buffers.inputs(branches=False)
            first, slots, tokens = inputs.first[:n], inputs.slots(n), inputs.tokens[:n, :1]
            states, logits = self._states(shape, levels)
            trees.begin(n)
            if walk is not None:
                walk.begin()
            sequence = self._sequences[:n]
            for level in range(levels):
                own = logits[sequence, level]
                if walk is not None:
                    own = walk.logits(own, tokens.flatten().contiguous(), states[sequence, level])
                rows = Rows(slots[sequence], first[sequence] + (level + 1))
                tokens, above = trees.add(self._in_target(own), rows, shape.needs)
                sequence = sequence[above]
                if walk is not None:
                    walk.follow(above)
            trees.store(slots, Origin.DRAFT)

    def _in_target(self, logits: torch.Tensor) -> torch.Tensor:
        return self.draft.in_target_vocabulary(logits)[:, : self.state.vocab_size]

    def _batch(self, n: int, count: int) -> DeviceBatch:
        """The blocks of n sequences. Each query is a sequence of its own for the attention, so that it sees the whole
        block: all of them have the same context, which ends behind it."""
        inputs, size = self.buffers.inputs(branches=False), self.model_runner.block_size
        tables, queries = self.model_runner.tables.tensor, self.draft.block.queries(count)
        place, sequence, start, tiles = self._index(n, count)
        slots = inputs.slots(n)
        rows = slots[sequence]
        positions = inputs.first[:n][sequence] + place
        index = positions // size
        blocks = tables[rows, 1 + index.clamp(max=tables.shape[1] - 2)]
        mapping = torch.where(index < tables[rows, 0], blocks * size + positions % size, self.buffers.padding_slot)
        mask = torch.full_like(place, self.draft.block.mask_token)
        return DeviceBatch(
            token_ids=torch.where(place == 0, inputs.tokens[:n, 0][sequence], mask),
            positions=positions,
            slot_mapping=mapping,
            query_start=start,
            context_len=inputs.first[:n][sequence] + queries,
            logit_rows=None,
            tiles=tiles,
            prefill_tiles=None,
            block_tables=tables[:, 1:],
            table_rows=rows,
        )

    def _index(self, n: int, count: int) -> tuple[torch.Tensor, ...]:
        """Of the rows: the place in the block and the sequence; then their starts and attention tiles."""
        if (n, count) not in self._indices:
            queries = self.draft.block.queries(count)
            rows = torch.arange(n * queries + 1, dtype=torch.int32, device=self.device)
            tiles = torch.stack((rows[:-1], torch.zeros_like(rows[:-1])))
            self._indices[n, count] = (rows[:-1] % queries, (rows[:-1] // queries).long(), rows, tiles)
        return self._indices[n, count]


class BlockModel(DraftSource):
    """A block draft in place of a draft model. It has no KV bookkeeping: its KV is in the target's blocks."""

    def __init__(self, runner: BlockRunner) -> None:
        super().__init__(runner)
        self.most_drafted = runner.draft.block.most_drafted
