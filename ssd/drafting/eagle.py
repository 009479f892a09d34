"""Runs of an EAGLE head. With `EagleModel` in place of a draft model, `ModelDrafter` is SD and `AheadDrafter` SSD.

The target's forward passes leave the head's KV of all tokens that they compute (`ssd.execution.features`). So a draft
begins with the last decided token and the feature before it; from then on the head reads its own hidden states.

In SSD the features of the draft under verification are still to come. The head reads that draft with its own hidden
states, token by token, and each branch goes on from the state where it leaves the draft. Since the verification writes
the true KV of these positions meanwhile, theirs is in *private blocks*: the block tables of a preparation are copies
whose last blocks, from that of the last decided token on, belong to it alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from ssd.core import Outcome, Sequence, Work
from ssd.drafting.model import DraftSequence
from ssd.drafting.runner import DraftRunner, RunShape
from ssd.execution.features import Features
from ssd.execution.runner import ModelRunner
from ssd.kernels.ops import DeviceBatch


class EagleRunner(DraftRunner):
    """Runs of a head. `write` reads one token of each sequence: the others have KV."""

    def __init__(self, runner: ModelRunner, features: Features, **options: Any) -> None:
        super().__init__(runner, **options)
        self.features = features
        self.head = head = features.head
        rows, width = max(self.max_rows, self.max_sequences), head.config.hidden_size
        head.hidden = torch.zeros((rows, width), dtype=head.dtype, device=self.device)
        if not self.max_width:
            return
        n, private = self.max_sequences, private_blocks(self.lookahead, runner.block_size)
        self._branch_slots += n * private * runner.block_size  # behind the private blocks
        self._padding_slot += n * private * runner.block_size
        blocks = torch.arange(n * private, dtype=torch.int32, device=self.device).view(n, private)
        self._private = blocks + runner.num_blocks
        self._private_tables = self._zeros(n, runner.tables.tensor.shape[1] + private)
        self._sequences = torch.arange(n, dtype=torch.int32, device=self.device)
        # The feature before the last decided token, and the head's states from there on.
        self._before = torch.zeros((n, width), dtype=head.dtype, device=self.device)
        self._path = torch.zeros((n, self.reads, width), dtype=head.dtype, device=self.device)

    def _most_reads(self, branches: bool) -> int:
        return self.reads if branches else 1

    def _compute_stage(self, n: int, branches: bool) -> None:
        super()._compute_stage(n, branches)
        if branches:
            self._copy_blocks(n)

    def _copy_blocks(self, n: int) -> None:
        """Copies what the verification overwrites: the feature before the last token, and the block it is in."""
        inputs, tables, size = self._inputs[True], self.runner.tables.tensor, self.runner.block_size
        slots, first = inputs.slots(n), inputs.first[:n]
        self._before[:n].copy_(self.features.before(slots, first))
        private, own = self._private_tables[:n], self._private[:n]
        private[:, : tables.shape[1]].copy_(tables[slots])
        columns = 1 + first[:, None] // size + torch.arange(own.shape[1], device=self.device)
        private.scatter_(1, columns.long(), own)
        source = tables[slots, 1 + first // size]
        for cache in self.runner.kv[0]:
            cache[own[:, 0]] = cache[source]

    def _tables(self, shape: RunShape) -> tuple[torch.Tensor, torch.Tensor]:
        if not shape.width:
            return super()._tables(shape)
        return self._private_tables, self._sequences[: shape.sequences]

    def _read(self, shape: RunShape, logit_rows: torch.Tensor | None) -> torch.Tensor:
        n, inputs = shape.sequences, self._inputs[shape.width > 0]
        if shape.width:
            return self._read_draft(shape)
        self.head.hidden[:n].copy_(self.features.before(inputs.slots(n), inputs.first[:n]))
        return super()._read(shape, logit_rows)

    def _read_draft(self, shape: RunShape) -> torch.Tensor:
        """Reads the last decided token with its feature, and the draft after it with the head's own states."""
        n, inputs, size = shape.sequences, self._inputs[True], self.runner.block_size
        tables, rows = self._tables(shape)
        single = self._constants(shape._replace(reads=1, width=0, fan_out=None))
        hidden, normed = self.head.hidden[:n], []
        hidden.copy_(self._before[:n])
        for place in range(shape.reads):
            positions = inputs.first[:n] + place
            mapping = tables[rows, 1 + positions // size] * size + positions % size
            batch = DeviceBatch(
                token_ids=inputs.tokens[:n, place].contiguous(),
                positions=positions,
                slot_mapping=torch.where(place < inputs.count[:n], mapping, self._padding_slot),
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

    def _read_and_plan(self, shape: RunShape) -> None:
        super()._read_and_plan(shape)
        n = shape.sequences
        after = self._after[:n, : shape.width]
        left = self._path[self._sequences[:n, None], after]  # the states where branches leave the draft
        self.head.hidden[: shape.rows].copy_(left.flatten(0, 1))


def private_blocks(lookahead: int, block_size: int) -> int:
    """Private blocks of a sequence: for the last decided token, wherever it is in its block, and a draft."""
    return -(-(block_size + lookahead) // block_size)


class EagleModel:
    """A head in place of a draft model. It has no KV bookkeeping: its KV is in the target's blocks."""

    def __init__(self, runner: EagleRunner) -> None:
        self.runner = runner

    def state_of(self, work: Work, works: Seq[Work]) -> DraftSequence | None:
        """None before the feature that a draft begins with is there: for prompts, and for the first token of a text."""
        if not work.decodes or work.sequence.least_len < 2:
            return None
        self.runner.runner.tables.update([(work.slot, work.sequence.kv.blocks)])
        return DraftSequence(work.slot)

    def num_unread(self, work: Work, own: DraftSequence) -> int:
        return 1

    def can_branch(self, work: Work, own: DraftSequence) -> bool:
        return True

    def mark_read(self, work: Work, *, branched: bool) -> None:
        return

    def read_prompt(self, work: Work, own: DraftSequence) -> None:
        return

    def observe(self, work: Work, outcome: Outcome | None, branched: bool) -> None:
        return

    def forget(self, sequence: Sequence) -> None:
        return
