"""The device tensors of draft runs, at fixed addresses, and the kernels between them and the SequenceState.

In the order of a run: `upload` and `stage` fill its inputs, then come a batch for reading and one for every depth. The
tokens of its rows are in `chain`; `store` and `look_up` make them the sequences' drafts. Computes no logits.

A head also reads hidden states. `states` has those that a row's draft was written with, one before each of its tokens
and one before the token that it follows; `draft_states` has those of the sequences' drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import NamedTuple

import numpy as np
import torch

from ssd.core import Origin
from ssd.drafting.fan_out import RANKS
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.execution.runner import ModelRunner
from ssd.kernels.device import kernels
from ssd.kernels.ops import Branches, DeviceBatch
from ssd.kernels.transfers import upload
from ssd.sampling import noise
from ssd.sampling.noise import Stream
from ssd.sampling.sampler import Rows


class Tables(NamedTuple):
    """Block tables of a run."""

    blocks: torch.Tensor  # column 0: number of blocks
    rows: torch.Tensor  # [sequences]: the row of each


class Indices(NamedTuple):
    """Index tensors of a shape."""

    place: torch.Tensor  # [reads]
    read_sequence: torch.Tensor  # [sequences * reads]: of each token that is read
    read_start: torch.Tensor  # [sequences + 1]
    read_tiles: torch.Tensor
    start: torch.Tensor  # [sequences + 1], of the rows
    tiles: torch.Tensor


class Reading(NamedTuple):
    """The rows of a reading, see `runs.read_rows`."""

    tokens: torch.Tensor  # of rows
    positions: torch.Tensor
    slot_mapping: torch.Tensor
    context_len: torch.Tensor  # of sequences
    decided: torch.Tensor
    last: torch.Tensor


class Inputs:
    """Inputs of a run: what the host uploads, and what is read from the SequenceState."""

    def __init__(self, max_sequences: int, reads: int, device: torch.device) -> None:
        self.meta, self.first, self.count, self.tokens = (
            torch.zeros(shape, dtype=torch.int32, device=device)
            for shape in (2 * max_sequences, max_sequences, max_sequences, (max_sequences, reads + 1))
        )  # first: position of the first token that is read; count: how many tokens are

    def slots(self, n: int) -> torch.Tensor:
        return self.meta[:n]

    def drafted(self, n: int) -> torch.Tensor:
        """Length of each sequence's draft under verification."""
        return self.meta[n : 2 * n]


class DraftBuffers:
    """The tensors of the runs of one draft model or head."""

    def __init__(self, runner: ModelRunner, shapes: RunShapes, *, states_width: int = 0) -> None:
        """`states_width`: of the hidden states that are kept; 0: none are."""
        self.runner, self.state, self.shapes = runner, runner.state, shapes
        self.device = runner.state.device
        n, rows, width, reads = shapes.max_sequences, shapes.max_rows, max(1, shapes.max_width), shapes.reads
        self.computed = self._ints(self.state.num_slots + 1)  # by slot: tokens with KV in the blocks, drafts included
        self._inputs = {branches: Inputs(n, shapes.most_reads(branches), self.device) for branches in (False, True)}
        self.after = self._ints(n, width)  # per branch: accepted draft tokens before it
        self.plan_constants = self._floats(4 * (1 + self.state.drafts.shape[1]) * width + 64)
        self.verified_confidence = self._floats(n, self.state.drafts.shape[1])
        self.hit, self._none = self._ints(n), self._ints(n)
        self.chain = self._ints(rows, reads)  # tokens of every row; column 0: the outcome's own token (`branch`)
        self.confidence = self._floats(rows, reads)
        self.likeliest = self._ints(n * reads, RANKS)
        self.hit_rate: torch.Tensor | None = None  # that is drawn, for measurements; None: branches decide
        self._looked_up = self._ints(n)  # the rows whose tokens became drafts
        self.states, self.draft_states = (
            torch.zeros((count, reads, states_width), dtype=runner.decoder.dtype, device=self.device)
            for count in (rows, self.state.num_slots + 1)
        )
        self._rows = tuple(self._ints(rows) for _ in range(5))  # see `runs.extend_rows`
        self._beams = self._ints(4 * shapes.lookahead * rows if self.state.tree is not None else 0)
        self._readings = {branches: self._new_reading(n, n * shapes.most_reads(branches)) for branches in (False, True)}
        self.first_slot = runner.scratch_slot  # of the rows; behind theirs are those of nodes, and one for padding
        self.padding_slot = runner.scratch_slot + shapes.scratch_slots - 1
        self._indices: dict[RunShape, Indices] = {}

    def inputs(self, *, branches: bool) -> Inputs:
        """Those of `branch`, or of `write`."""
        return self._inputs[branches]

    def upload(self, slots: Seq[int], drafted: Seq[int], shape: RunShape) -> None:
        """Uploads slots and draft lengths of a run."""
        padding = shape.sequences - len(slots)
        both = [*slots, *[self.state.padding] * padding, *drafted, *[0] * padding]
        upload(np.array(both, dtype=np.int32), self._inputs[shape.branches].meta[: len(both)])

    def stage(self, n: int, *, branches: bool, decided_after: torch.Tensor | None = None) -> None:
        """Copies the inputs of a run for n sequences out of the SequenceState.

        `decided_after`: only decided tokens are read, those after these counts (by slot), in place of `computed`.
        """
        inputs, drafts = self._inputs[branches], decided_after is None
        kernels(self.device).runs.stage(
            self.state.view,
            slots=inputs.slots(n),
            num_drafted=inputs.drafted(n) if drafts else self._none[:n],
            computed=self.computed if decided_after is None else decided_after,
            first=inputs.first[:n],
            count=inputs.count[:n],
            tokens=inputs.tokens[:n],
            verified_confidence=self.verified_confidence[:n],
            hit=self.hit[:n],
            hit_origin=Origin.HIT,
            vocab_size=self.runner.vocab_size,
            fork=branches and drafts,
        )

    def look_up(self, n: int, width: int, depth: int) -> None:
        """Looks up the outcomes of n sequences in the branches; what is found, or a sibling, becomes their drafts."""
        if self.hit_rate is not None:
            self._draw_hits(n, width, self.hit_rate)
        kernels(self.device).runs.look_up(
            self.state.view,
            slots=self._inputs[True].slots(n),
            after=self.after[:n, :width],
            chain=self.chain,
            chain_confidence=self.confidence,
            depth=depth,
            rows=self._looked_up[:n],
            hit=Origin.HIT,
            miss=Origin.SIBLING,
        )
        if self.states.numel():
            self.draft_states[self._inputs[True].slots(n)] = self.states[self._looked_up[:n]]

    def _draw_hits(self, n: int, width: int, rate: torch.Tensor) -> None:
        """Makes the first branch after as many accepted tokens that of the outcome, as often as the rate says, and none
        of them else."""
        state, slots = self.state, self._inputs[True].slots(n).long()
        length = state.length[slots]
        own = state.token_ids[slots, (length - 1).clamp(min=0)]
        same = self.after[:n, :width] == state.num_accepted[slots, None]
        first = same & (same.cumsum(1) == 1)
        hit = noise.uniforms(state.sampling.seed_key[slots], length, Stream.DRAFT) < rate
        tokens = self.chain[: n * width, 0].view(n, width)
        tokens.copy_(torch.where(first & hit[:, None], own[:, None], torch.where(same, -1, tokens)))

    def store(self, n: int, count: int, origin: Origin) -> None:
        """Copies `count` tokens written for each of n sequences to their drafts."""
        kernels(self.device).runs.store(
            self.state.view,
            slots=self._inputs[False].slots(n),
            chain=self.chain,
            chain_confidence=self.confidence,
            count=count,
            value=origin,
        )
        if self.states.numel():
            self.draft_states[self._inputs[False].slots(n)] = self.states[:n]

    def read_batch(
        self, shape: RunShape, tables: Tables, *, last: bool, beams: torch.Tensor | None = None
    ) -> DeviceBatch:
        """Every sequence's new tokens, whose KV goes to the blocks. `last`: logits are wanted after the last ones only.
        `beams`: see `beam_rows`."""
        indices, reading = self.indices(shape), self.read_rows(shape, tables, beams)
        return DeviceBatch(
            token_ids=reading.tokens,
            positions=reading.positions,
            slot_mapping=reading.slot_mapping,
            query_start=indices.read_start,
            context_len=reading.context_len,
            logit_rows=reading.last if last else None,
            tiles=indices.read_tiles,
            prefill_tiles=None,
            block_tables=tables.blocks[:, 1:],
            table_rows=tables.rows,
        )

    def read_rows(self, shape: RunShape, tables: Tables, beams: torch.Tensor | None = None) -> Reading:
        """The rows of each sequence's new tokens, and (`beams`) those of the nodes behind them."""
        n, inputs, reading = shape.sequences, self._inputs[shape.branches], self.reading(shape)
        kernels(self.device).runs.read_rows(
            slots=inputs.slots(n),
            first=inputs.first[:n],
            count=inputs.count[:n],
            given=inputs.tokens[:n],
            tables=tables.blocks,
            table_rows=tables.rows,
            **reading._asdict(),
            beams=beams,
            padding_slot=self.padding_slot,
            block_size=self.runner.block_size,
            first_slot=self.first_slot,
            slots_per_branch=self.shapes.lookahead,
        )
        return reading

    def reading(self, shape: RunShape) -> Reading:
        """What `read_rows` writes of a run of this shape."""
        n, all_ = shape.sequences, self._readings[shape.branches]
        rows, each = (tensor[: n * shape.reads] for tensor in all_[:3]), (tensor[:n] for tensor in all_[3:])
        return Reading(*rows, *each)

    def read_decides(self, shape: RunShape) -> Rows:
        """The positions that the logits after the last tokens of a reading decide."""
        return Rows(self._inputs[shape.branches].slots(shape.sequences), self.reading(shape).decided)

    def follow(self, above: torch.Tensor, beams: int, depth: int, states: torch.Tensor | None) -> None:
        """Gives each row the KV of `depth` tokens in the branch slots of the row that it follows (int64 [rows]), and
        its hidden state, if these are there."""
        kernels(self.device).runs.follow_rows(
            above=above,
            caches=self.runner.own_caches,
            beams=beams,
            depth=depth,
            first_slot=self.first_slot,
            slots_per_branch=self.shapes.lookahead,
            states=states,
        )

    def row_batch(self, shape: RunShape, depth: int, tables: Tables) -> DeviceBatch:
        """The newest token of every row, whose KV goes to the row's branch slots."""
        n, inputs = shape.sequences, self._inputs[shape.branches]
        tokens, positions, mapping, decided, slots = (column[: shape.rows] for column in self._rows)
        kernels(self.device).runs.extend_rows(
            slots=inputs.slots(n),
            first=inputs.first[:n],
            count=inputs.count[:n],
            after=self.after[:n, : shape.width] if shape.branches else None,
            chain=self.chain,
            depth=depth,
            reads=self.shapes.reads,
            first_slot=self.first_slot,
            slots_per_branch=self.shapes.lookahead,
            vocab_size=self.runner.vocab_size,
            tokens=tokens,
            positions=positions,
            slot_mapping=mapping,
            decided=decided,
            row_slots=slots,
        )
        return self._branch_batch(shape, depth, tables, positions, mapping)

    def beam_rows(self, shape: RunShape, depths: int) -> torch.Tensor | None:
        """Positions, KV slots, positions decided and slots of sequences of a tree's beams: [depths, 4, rows]."""
        rows = self._beams[: depths * 4 * shape.rows].view(depths, 4, shape.rows)
        return rows if depths else None

    def beam_batch(self, shape: RunShape, depth: int, tables: Tables, rows: torch.Tensor) -> DeviceBatch:
        """The newest token of every beam, of which `beam_tokens` has been written. `rows`: those of this depth."""
        return self._branch_batch(shape, depth, tables, rows[0], rows[1])

    def beam_tokens(self, shape: RunShape) -> torch.Tensor:
        return self._rows[0][: shape.rows]

    def _branch_batch(
        self, shape: RunShape, depth: int, tables: Tables, positions: torch.Tensor, mapping: torch.Tensor
    ) -> DeviceBatch:
        indices = self.indices(shape)
        return DeviceBatch(
            token_ids=self._rows[0][: shape.rows],
            positions=positions,
            slot_mapping=mapping,
            query_start=indices.start,
            context_len=positions,  # not used for branches
            logit_rows=None,
            tiles=indices.tiles,
            prefill_tiles=None,
            branches=Branches(depth, self.shapes.lookahead),
            block_tables=tables.blocks[:, 1:],
            table_rows=tables.rows,
        )

    def decided(self, shape: RunShape) -> Rows:
        """The positions that the logits of the last `row_batch` decide."""
        *_, decided, slots = (column[: shape.rows] for column in self._rows)
        return Rows(slots, decided)

    def indices(self, shape: RunShape) -> Indices:
        """Cached, so that graphs find them at the same address."""
        if shape not in self._indices:
            width = max(1, shape.width)
            sequences, place = (
                torch.arange(n, dtype=torch.int32, device=self.device) for n in (shape.sequences + 1, shape.reads)
            )
            self._indices[shape] = Indices(
                place=place,
                read_sequence=sequences[:-1].long().repeat_interleave(shape.reads),
                read_start=sequences * shape.reads,
                read_tiles=self.tiles(shape.sequences, shape.reads),
                start=sequences * width,
                tiles=self.tiles(shape.sequences, width),
            )
        return self._indices[shape]

    def tiles(self, sequences: int, queries: int) -> torch.Tensor:
        """Attention tiles of sequences with `queries` rows each."""
        tile = self.runner.tile_sizes().decode
        each = -(-queries // tile)
        sequence = torch.arange(sequences, dtype=torch.int32, device=self.device).repeat_interleave(each)
        first = (torch.arange(each, dtype=torch.int32, device=self.device) * min(tile, queries)).repeat(sequences)
        return torch.stack((sequence, first))

    def _new_reading(self, sequences: int, rows: int) -> Reading:
        tokens, positions, mapping = (self._ints(rows) for _ in range(3))
        last = torch.zeros(sequences, dtype=torch.int64, device=self.device)
        return Reading(tokens, positions, mapping, self._ints(sequences), self._ints(sequences), last)

    def _ints(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _floats(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)
