"""A head (EAGLE, MTP) in place of a draft model: with `HeadModel`, `ModelDrafter` is SD and `SSDDrafter` SSD.

The target's forward passes leave the head's KV of all tokens that they compute (`ssd.execution.features`). So a draft
begins with the last decided token and the feature before it; from then on the head reads its own hidden states.

In SSD the features of the draft under verification are still to come. In their place the head reads the states that it
wrote this draft with (`DraftBuffers.draft_states`), so that the draft is read in one step; each branch goes on from the
state where it leaves the draft. A draft that was prepared began with such a state, too. The feature in its place is
known now; most of the difference between the two is added to the states after it (`CARRIED`), if a step of the head
adds to what it reads.

Since the verification writes the true KV of these positions meanwhile, theirs is in *private blocks*: the block tables
of a preparation are copies whose last blocks, from that of the last decided token on, belong to it alone.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ssd.drafting.buffers import Tables
from ssd.drafting.fan_out import FanOut
from ssd.drafting.model import DraftSource
from ssd.drafting.runner import DraftRunner
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.execution.features import HeadFeatures
from ssd.execution.runner import ModelRunner

CARRIED = 0.8  # of a difference in hidden states, by each step: acceptance of the bundled heads is best from 0.7 to 0.8


class HeadRunner(DraftRunner):
    """Runs of a head. `write` reads one token of each sequence: the others have KV."""

    def __init__(self, model_runner: ModelRunner, features: HeadFeatures, shapes: RunShapes, **options: Any) -> None:
        self.features, self.head = features, features.head
        head, width, branches = self.head, self.head.config.hidden_size, shapes.max_width > 0
        shapes = replace(shapes, most_written_reads=1)
        super().__init__(model_runner, shapes, states_width=width if branches else 0, **options)
        rows = max(shapes.max_rows, shapes.max_sequences * shapes.most_reads(branches))
        head.hidden = torch.zeros((rows, width), dtype=head.dtype, device=self.device)
        if not branches:
            return
        n, private = shapes.max_sequences, private_blocks(shapes.lookahead, model_runner.block_size)
        blocks = torch.arange(n * private, dtype=torch.int32, device=self.device).view(n, private)
        # Behind the branch slots, which are behind the pool's blocks.
        self._private = blocks + model_runner.num_blocks - (-shapes.scratch_slots // model_runner.block_size)
        columns = model_runner.tables.tensor.shape[1] + private
        self._private_tables = torch.zeros((n, columns), dtype=torch.int32, device=self.device)
        self._private_tables[:, 0] = columns - 1
        self._sequences = torch.arange(n, dtype=torch.int32, device=self.device)
        self._before = torch.zeros((n, width), dtype=head.dtype, device=self.device)  # see `_copy_inputs`
        carried = CARRIED if head.adds else 0.0
        powers = [[carried**place] for place in range(shapes.reads)]
        self._carry = torch.tensor(powers, dtype=head.dtype, device=self.device)

    def follow_rows(self, above: torch.Tensor, beams: int, depth: int) -> None:
        states = self.head.hidden[: len(above)]
        if depth:
            self.buffers.follow(above, beams, depth, states)
        else:  # rows of other sequences are above: one of each was read
            states.copy_(self.head.hidden[above])

    def _copy_inputs(self, n: int, branches: bool) -> None:
        """For branches also what the verification overwrites: the feature before the last token, and its block."""
        super()._copy_inputs(n, branches)
        if not branches:
            return
        tables, size = self.model_runner.tables.tensor, self.model_runner.block_size
        inputs = self.buffers.inputs(branches=True)
        slots, first = inputs.slots(n), inputs.first[:n]
        self.features.before(slots, first, self._before[:n])
        private, own = self._private_tables[:n], self._private[:n]
        private[:, 1 : tables.shape[1]].copy_(tables[slots, 1:])
        columns = 1 + first[:, None] // size + torch.arange(own.shape[1], device=self.device)
        private.scatter_(1, columns.long(), own)
        source = tables[slots, 1 + first // size]
        for cache in self.kv[0]:
            cache[own[:, 0]] = cache[source]

    def read(self, shape: RunShape, *, last: bool, beams: torch.Tensor | None = None) -> torch.Tensor:
        n, inputs = shape.sequences, self.buffers.inputs(branches=shape.branches)
        hidden = self._read_states(shape)
        if shape.branches:
            before, stored = self._before[:n, None], self.buffers.draft_states[inputs.slots(n), : shape.reads]
            hidden.copy_(stored + self._carry[: shape.reads] * (before - stored[:, :1]))
            hidden[:, :1].copy_(before)
        else:
            self.features.before(inputs.slots(n), inputs.first[:n], hidden[:, 0])
            self._keep_states(shape, 0)
        logits = super().read(shape, last=last, beams=beams)
        if not shape.branches:
            self._keep_states(shape, 1)
        return logits

    def _read_and_plan(self, shape: RunShape, fan_out: FanOut) -> None:
        """Each branch begins with the head's state where it leaves the draft."""
        super()._read_and_plan(shape, fan_out)
        n, after = shape.sequences, self.buffers.after[: shape.sequences, : shape.width]
        left = self._read_states(shape)[self._sequences[:n, None], after]
        self.head.hidden[: shape.rows].copy_(left.flatten(0, 1))
        self._keep_states(shape, 0)

    def extend(self, shape: RunShape, depth: int) -> torch.Tensor:
        logits = super().extend(shape, depth)
        self._keep_states(shape, depth + (1 if shape.branches else 2))
        return logits

    def _read_states(self, shape: RunShape) -> torch.Tensor:
        """The head's hidden states before, then after, the tokens that are read: [sequences, reads, width]."""
        return self.head.hidden[: shape.sequences * shape.reads].view(shape.sequences, shape.reads, -1)

    def _keep_states(self, shape: RunShape, column: int) -> None:
        if self.buffers.states.numel():
            self.buffers.states[: shape.rows, column].copy_(self.head.hidden[: shape.rows])

    def _tables(self, shape: RunShape) -> Tables:
        if not shape.branches:
            return super()._tables(shape)
        return Tables(self._private_tables, self._sequences[: shape.sequences])


def private_blocks(lookahead: int, block_size: int) -> int:
    """Private blocks of a sequence: for the last decided token, wherever it is in its block, and a draft."""
    return -(-(block_size + lookahead) // block_size)


class HeadModel(DraftSource):
    """A head in place of a draft model. It has no KV bookkeeping: its KV is in the target's blocks."""
