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

import functools
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import torch

from ssd.core import Origin, SamplingParams
from ssd.drafting.buffers import Tables
from ssd.drafting.fan_out import FanOut
from ssd.drafting.model import DraftSource
from ssd.drafting.runner import DraftRun, DraftRunner
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.drafting.tree import DraftTrees
from ssd.execution.clock import now
from ssd.execution.features import HeadFeatures
from ssd.execution.runner import ModelRunner
from ssd.kernels.triton.compile import compiling
from ssd.sampling.sampler import ALL_NEEDS, Needs, Rows

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
        self.trees = DraftTrees(self.state) if self.state.tree is not None else None
        if self.trees is not None:
            n, beams = shapes.max_sequences, self.trees.beams
            self._not_accepted = torch.zeros((n, beams), dtype=torch.int32, device=self.device)
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

    @torch.inference_mode()
    def write(
        self, slots: Seq[int], params: Seq[SamplingParams], count: int, reads: int, origin: Origin = Origin.DRAFT
    ) -> DraftRun:
        if self.trees is None:
            return super().write(slots, params, count, reads, origin)
        shape, began = self.shapes.of(len(slots), 1, params), now(self.device)
        self._upload(slots, [0] * len(slots), shape)
        self._stage(shape)
        self._index(shape)
        self.graphs.launch(("tree", shape), functools.partial(self._write_tree, shape))
        return self._launched(slots, shape, 0, began)

    @torch.inference_mode()
    def rehearse(self, sequences: Seq[int], fan_out: FanOut) -> None:
        if self.trees is None:
            super().rehearse(sequences, fan_out)
            return
        with self.decoder.distinct_layers(), self.state.sampling.tables():
            for shape in self.shapes.usual(sequences, fan_out):
                self._upload([self.state.padding] * shape.sequences, [0] * shape.sequences, shape)
                self._copy_inputs(shape.sequences, False)
                for needs in ALL_NEEDS if compiling() else [Needs()]:
                    self._write_tree(shape._replace(needs=needs))

    @torch.inference_mode()
    def capture(self, sequences: Seq[int], fan_out: FanOut) -> None:
        if self.trees is None:
            super().capture(sequences, fan_out)
            return
        for shape in self.shapes.usual(sequences, fan_out):
            self.graphs.capture(
                ("stage", shape.sequences, False), functools.partial(self._copy_inputs, shape.sequences, False)
            )
            self._index(shape)
            self.graphs.capture(("tree", shape), functools.partial(self._write_tree, shape))

    def _index(self, shape: RunShape) -> None:
        """Makes index tensors before a capture, which would record how they are made and not make them."""
        self.buffers.indices(shape)
        self.buffers.indices(self._grown(shape))

    def _grown(self, shape: RunShape) -> RunShape:
        assert self.trees is not None
        return shape._replace(width=self.trees.beams)

    def _write_tree(self, shape: RunShape) -> None:
        """The last decided token is read, then the beams of each level, whose KV is in branch slots."""
        with torch.inference_mode():
            trees, buffers, n = self.trees, self.buffers, shape.sequences
            assert trees is not None
            inputs, hidden = buffers.inputs(branches=False), self.head.hidden
            trees.begin(n)
            logits = self.read(shape, buffers.indices(shape).before + 1)
            tokens, above = trees.add(logits, Rows(inputs.slots(n), inputs.first[:n] + 1), shape.needs)
            for level in range(1, trees.depth):
                rows = len(above)
                hidden[:rows].copy_(hidden[above])
                if level > 1:
                    buffers.follow(self.kv, above, level - 1)
                buffers.chain[:rows, level - 1].copy_(tokens.flatten())
                batch = buffers.row_batch(self._grown(shape), level - 1, self._tables(shape), self._not_accepted[:n])
                logits = self._forward(shape, batch)
                tokens, above = trees.add(logits, buffers.decided(self._grown(shape)), shape.needs)
            trees.store(inputs.slots(n), Origin.DRAFT)

    def _copy_inputs(self, n: int, branches: bool) -> None:
        """For branches also what the verification overwrites: the feature before the last token, and its block."""
        super()._copy_inputs(n, branches)
        if not branches:
            return
        tables, size = self.model_runner.tables.tensor, self.model_runner.block_size
        inputs = self.buffers.inputs(branches=True)
        slots, first = inputs.slots(n), inputs.first[:n]
        self._before[:n].copy_(self.features.before(slots, first))
        private, own = self._private_tables[:n], self._private[:n]
        private[:, 1 : tables.shape[1]].copy_(tables[slots, 1:])
        columns = 1 + first[:, None] // size + torch.arange(own.shape[1], device=self.device)
        private.scatter_(1, columns.long(), own)
        source = tables[slots, 1 + first // size]
        for cache in self.kv[0]:
            cache[own[:, 0]] = cache[source]

    def read(self, shape: RunShape, logit_rows: torch.Tensor | None) -> torch.Tensor:
        n, inputs = shape.sequences, self.buffers.inputs(branches=shape.branches)
        hidden = self._read_states(shape)
        if shape.branches:
            before, stored = self._before[:n, None], self.buffers.draft_states[inputs.slots(n), : shape.reads]
            hidden.copy_(stored + self._carry[: shape.reads] * (before - stored[:, :1]))
        else:
            before = self.features.before(inputs.slots(n), inputs.first[:n])[:, None]
        hidden[:, :1].copy_(before)
        if not shape.branches:
            self._keep_states(shape, 0)
        logits = super().read(shape, logit_rows)
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
