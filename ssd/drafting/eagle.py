"""An EAGLE head in place of a draft model: with `EagleModel`, `ModelDrafter` is SD and `SSDDrafter` SSD.

The target's forward passes leave the head's KV of all tokens that they compute (`ssd.execution.features`). So a draft
begins with the last decided token and the feature before it; from then on the head reads its own hidden states.

In SSD the features of the draft under verification are still to come. The head reads that draft with its own hidden
states, token by token, and each branch goes on from the state where it leaves the draft. Since the verification writes
the true KV of these positions meanwhile, theirs is in *private blocks*: the block tables of a preparation are copies
whose last blocks, from that of the last decided token on, belong to it alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import torch

from ssd.core import Work
from ssd.drafting.buffers import DraftBuffers, Tables
from ssd.drafting.model import DraftSequence, DraftSource
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.drafting.step import forward
from ssd.execution.features import Features
from ssd.execution.runner import ModelRunner
from ssd.kernels.ops import DeviceBatch


class EagleStep:
    """A step of a head. `write` reads one token of each sequence: the others have KV."""

    def __init__(self, runner: ModelRunner, features: Features, shapes: RunShapes) -> None:
        self.runner, self.features = runner, features
        self.buffers = DraftBuffers(runner, replace(shapes, most_written_reads=1))
        self.head = head = features.head
        self.device, width = self.buffers.device, head.config.hidden_size
        rows = max(shapes.max_rows, shapes.max_sequences)
        head.hidden = torch.zeros((rows, width), dtype=head.dtype, device=self.device)
        if not shapes.max_width:
            return
        n, private = shapes.max_sequences, private_blocks(shapes.lookahead, runner.block_size)
        blocks = torch.arange(n * private, dtype=torch.int32, device=self.device).view(n, private)
        # Behind the branch slots, which are behind the pool's blocks.
        self._private = blocks + runner.num_blocks - (-shapes.scratch_slots // runner.block_size)
        columns = runner.tables.tensor.shape[1] + private
        self._private_tables = torch.zeros((n, columns), dtype=torch.int32, device=self.device)
        self._sequences = torch.arange(n, dtype=torch.int32, device=self.device)
        # The feature before the last decided token, and the head's states from there on.
        self._before = torch.zeros((n, width), dtype=head.dtype, device=self.device)
        self._path = torch.zeros((n, shapes.reads, width), dtype=head.dtype, device=self.device)

    def snapshot(self, n: int) -> None:
        """Copies what the verification overwrites: the feature before the last token, and the block it is in."""
        inputs, tables, size = self.buffers.inputs(branches=True), self.runner.tables.tensor, self.runner.block_size
        slots, first = inputs.slots(n), inputs.first[:n]
        self._before[:n].copy_(self.features.before(slots, first))
        private, own = self._private_tables[:n], self._private[:n]
        private[:, : tables.shape[1]].copy_(tables[slots])
        columns = 1 + first[:, None] // size + torch.arange(own.shape[1], device=self.device)
        private.scatter_(1, columns.long(), own)
        source = tables[slots, 1 + first // size]
        for cache in self.runner.kv[0]:
            cache[own[:, 0]] = cache[source]

    def read(self, shape: RunShape, logit_rows: torch.Tensor | None) -> torch.Tensor:
        if shape.branches:
            return self._read_draft(shape)
        n, inputs = shape.sequences, self.buffers.inputs(branches=False)
        self.head.hidden[:n].copy_(self.features.before(inputs.slots(n), inputs.first[:n]))
        return forward(self.runner, self.buffers.read_batch(shape, self._tables(shape), logit_rows))

    def _read_draft(self, shape: RunShape) -> torch.Tensor:
        """Reads the last decided token with its feature, and the draft after it with the head's own states."""
        n, inputs, size = shape.sequences, self.buffers.inputs(branches=True), self.runner.block_size
        tables, rows = self._tables(shape)
        single = self.buffers.indices(shape._replace(reads=1, width=0, fan_out=None))
        hidden, normed = self.head.hidden[:n], []
        hidden.copy_(self._before[:n])
        for place in range(shape.reads):
            positions = inputs.first[:n] + place
            mapping = tables[rows, 1 + positions // size] * size + positions % size
            batch = DeviceBatch(
                token_ids=inputs.tokens[:n, place].contiguous(),
                positions=positions,
                slot_mapping=torch.where(place < inputs.count[:n], mapping, self.buffers.padding_slot),
                query_start=single.start,
                context_len=positions + 1,
                logit_rows=None,
                tiles=single.tiles,
                prefill_tiles=None,
                block_tables=tables[:, 1:],
                table_rows=rows,
            )
            normed.append(self.head.states(batch, self.runner.kv))
            self._path[:n, place].copy_(hidden)
        return self.head.logits(torch.stack(normed, dim=1).flatten(0, 1))

    def begin_branches(self, shape: RunShape) -> None:
        """Each branch begins with the head's state where it leaves the draft."""
        n = shape.sequences
        left = self._path[self._sequences[:n, None], self.buffers.after[:n, : shape.width]]
        self.head.hidden[: shape.rows].copy_(left.flatten(0, 1))

    def extend(self, shape: RunShape, depth: int) -> torch.Tensor:
        return forward(self.runner, self.buffers.row_batch(shape, depth, self._tables(shape)))

    def _tables(self, shape: RunShape) -> Tables:
        if not shape.branches:
            return self.buffers.tables(shape)
        return Tables(self._private_tables, self._sequences[: shape.sequences])


def private_blocks(lookahead: int, block_size: int) -> int:
    """Private blocks of a sequence: for the last decided token, wherever it is in its block, and a draft."""
    return -(-(block_size + lookahead) // block_size)


class EagleModel(DraftSource):
    """A head in place of a draft model. It has no KV bookkeeping: its KV is in the target's blocks."""

    def state_of(self, work: Work, works: Seq[Work]) -> DraftSequence | None:
        """None before the feature that a draft begins with is there: for prompts, and for the first token of a text."""
        if not work.is_decode or work.sequence.least_len < 2:
            return None
        self.runner.runner.tables.update([(work.slot, work.sequence.kv.blocks)])
        return DraftSequence(work.slot)
