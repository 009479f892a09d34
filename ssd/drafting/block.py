"""A block draft in place of a draft model: with `BlockModel`, `ModelDrafter` is SD.

The target's forward passes leave the draft's KV of all tokens that they compute (`ssd.execution.features`), so a draft
is one forward pass: the last decided token and masks behind it. Their KV is in the slots of the positions that the
target is about to verify, which overwrites it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch

from ssd.core import Origin, Outcome, Proposal, SamplingParams, Sequence, Work
from ssd.drafting.estimate import Average
from ssd.drafting.fan_out import FanOut
from ssd.drafting.lengths import shared_lengths
from ssd.drafting.model import Able, DraftSource
from ssd.drafting.runner import DraftRun, DraftRunner
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.drafting.tree import DraftTrees
from ssd.execution.clock import now
from ssd.execution.runner import ModelRunner
from ssd.kernels.device import kernels
from ssd.kernels.ops import DeviceBatch
from ssd.kernels.triton.compile import compiling
from ssd.models.block import BlockDraft, ConfidenceHead, Walk
from ssd.sampling.sampler import ALL_NEEDS, Needs, Rows


class BlockRows:
    """The inputs of blocks, at fixed addresses: int32."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._all = torch.zeros((7, most), dtype=torch.int32, device=device)
        self._indices: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def queries(self, rows: int) -> tuple[torch.Tensor, ...]:
        """Tokens, positions, KV slots, ends of blocks and slots of the queries of all blocks."""
        return tuple(self._all[i, :rows] for i in range(5))

    def decided(self, *shape: int) -> Rows:
        """Of the tokens that are written."""
        count = shape[0] * shape[1]
        return Rows(self._all[5, :count].view(shape), self._all[6, :count].view(shape))

    def index(self, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts and attention tiles of so many queries, of which each is a sequence of its own."""
        if rows not in self._indices:
            starts = torch.arange(rows + 1, dtype=torch.int32, device=self._all.device)
            self._indices[rows] = starts, torch.stack((starts[:-1], torch.zeros_like(starts[:-1])))
        return self._indices[rows]


class BlockRunner(DraftRunner):
    """Runs of a block draft. A run of `count` tokens is one piece."""

    sharpness = 1.0  # a place's logits do not know the tokens before it: with 1.2, 1 % fewer tokens a round

    def __init__(self, model_runner: ModelRunner, shapes: RunShapes, *, graphs: bool) -> None:
        super().__init__(model_runner, replace(shapes, most_written_reads=1), graphs=graphs)
        draft = model_runner.decoder
        assert isinstance(draft, BlockDraft)
        self.draft = draft
        self._rows = BlockRows(self.shapes.max_sequences * draft.block.queries(self.shapes.lookahead), self.device)
        beams = 0 if self.trees is None else self.trees.beams
        self._following = torch.zeros(shapes.max_sequences * beams, dtype=torch.int32, device=self.device)
        self._confidence = None if self.on_cuda else draft.confidence  # its results would come too late for the host

    @torch.inference_mode()
    def write(
        self, slots: Seq[int], params: Seq[SamplingParams], count: int, reads: int, origin: Origin = Origin.DRAFT
    ) -> DraftRun:
        shape, began = self.shapes.of(len(slots), 1, params), now(self.device)
        self._upload(slots, [0] * len(slots), shape)
        self.graphs.launch(*self._block(shape, count, origin))
        return self._launched(slots, shape, count - 1, began)

    @torch.inference_mode()
    def rehearse(self, sequences: Seq[int], fan_out: FanOut) -> None:
        """Runs on padding, of all shapes that have kernels of their own."""
        count = self._most
        with self.decoder.distinct_layers(), self.state.sampling.tables():
            for shape in self.shapes.usual(sequences, fan_out):
                self._upload([self.state.padding] * shape.sequences, [0] * shape.sequences, shape)
                for needs in ALL_NEEDS if compiling() else [Needs()]:
                    for _, compute in self._kinds(shape._replace(needs=needs), count):
                        compute()

    @torch.inference_mode()
    def capture(self, sequences: Seq[int], fan_out: FanOut) -> None:
        """Captures the graphs of the usual shapes, so that no request waits for them."""
        for shape in self.shapes.usual(sequences, fan_out):
            for kind in self._kinds(shape, self._most):
                self.graphs.capture(*kind)

    @property
    def _most(self) -> int:
        return min(self.shapes.lookahead, self.draft.block.most_drafted)

    def _stage(self, shape: RunShape) -> None:
        """The inputs of a block are made where it is written."""

    def _kinds(self, shape: RunShape, count: int) -> list[tuple[Hashable, Callable[[], None]]]:
        trees = [self._tree(shape, count)] if self.writes_trees(shape.sequences) else []
        return [self._block(shape, count, Origin.DRAFT), *trees]

    def _tree(self, shape: RunShape, levels: int) -> tuple[Hashable, Callable[[], None]]:
        assert self.trees is not None
        self._rows.index(shape.sequences * self.draft.block.queries(levels))  # see `_block`
        key = "trees", shape.sequences, levels, shape.needs
        return key, functools.partial(self._write_trees, self.trees, shape, levels)

    def _block(self, shape: RunShape, count: int, origin: Origin) -> tuple[Hashable, Callable[[], None]]:
        """The run's key, and what it launches."""
        self._rows.index(shape.sequences * self.draft.block.queries(count))  # a capture would record how it is made
        key = shape.sequences, count, shape.needs, origin
        return key, functools.partial(self._write, shape, count, origin)

    def _write(self, shape: RunShape, count: int, origin: Origin) -> None:
        """A token of each place, in their order where one depends on that before it."""
        with torch.inference_mode():
            n, draft = shape.sequences, self.draft
            batch, rows = self._inputs(n, count, by_place=self.draft.walk is not None)
            states, logits = self._states(batch, n, count)
            last = batch.token_ids.view(n, -1)[:, 0]
            if draft.walk is None:
                rows = Rows(rows.slots.view(-1), rows.positions.view(-1))
                self.choice.choose_all(shape, logits.flatten(0, 1), rows)
            else:
                self._walk(draft.walk, shape, rows, last, states, logits)
            if self._confidence is not None:
                self._estimate(self._confidence, last, states)
            self.buffers.store(n, count, origin)

    def _states(self, batch: DeviceBatch, n: int, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One forward pass: states and logits of each place, [n, count, …]."""
        queries = self.draft.block.queries(count)
        states = self.draft.states(batch, self.kv, queries).view(n, queries, -1)[:, queries - count :]
        return states, self.draft.logits(states.flatten(0, 1)).view(n, count, -1)

    def chances(self, n: int, count: int) -> np.ndarray | None:
        """How likely each token of the drafts written last and all before it are accepted: [n, count]. None: it is not
        known, or not on the host before the verification is launched."""
        if self._confidence is None:
            return None
        found: np.ndarray = self.buffers.confidence[:n, :count].cumprod(1).numpy()
        return found

    def _estimate(self, confidence: ConfidenceHead, last: torch.Tensor, states: torch.Tensor) -> None:
        """In place of the tokens' confidence: the chance that each is accepted if those before it are."""
        n, count, _ = states.shape
        before = torch.cat((last[:, None], self.buffers.chain[:n, : count - 1]), dim=1)
        chances = confidence(states.flatten(0, 1), before.flatten())
        self.buffers.confidence[:n, :count].copy_(chances.view(n, count))

    def _walk(
        self, walk: Walk, shape: RunShape, rows: Rows, last: torch.Tensor, states: torch.Tensor, logits: torch.Tensor
    ) -> None:
        """`last`: the token before each draft."""
        walk.begin()
        for j in range(logits.shape[1]):
            own = walk.logits(logits[:, j], last.contiguous(), states[:, j])
            self.choice.choose(shape, j, own, Rows(rows.slots[j], rows.positions[j]))
            last = self.buffers.chain[: shape.sequences, j]

    def _write_trees(self, trees: DraftTrees, shape: RunShape, levels: int) -> None:
        """The beams of a level have the logits of its place, with what follows from their tokens."""
        with torch.inference_mode():
            n, walk = shape.sequences, self.draft.walk
            batch, places = self._inputs(n, levels, by_place=True)
            states, logits = self._states(batch, n, levels)
            tokens, following = batch.token_ids.view(n, -1)[:, 0].contiguous(), self._following[: n * trees.beams]
            rows = beams = list(map(Rows, places.slots, places.positions))  # of each level
            trees.begin(self.buffers.inputs(branches=False).slots(n), levels)
            if walk is not None:
                walk.begin()
                beams = list(map(Rows, *(each.repeat_interleave(trees.beams, dim=1) for each in places[:2])))
            for level in range(levels):
                own = logits[:, level]
                if walk is not None:
                    own = walk.logits(own, tokens, states[:, level])
                above = trees.add(own, beams[level] if level else rows[0], shape.needs, following)
                tokens = following
                if walk is not None:
                    walk.follow(above)
            trees.store(Origin.DRAFT)

    def _inputs(self, n: int, count: int, *, by_place: bool) -> tuple[DeviceBatch, Rows]:
        """The blocks of n sequences, and the tokens that they write: [n, count], or [count, n].

        Each query is a sequence of its own for the attention, so that it sees the whole block: they have one context,
        which ends behind it.
        """
        block = self.draft.block
        number, tables = n * block.queries(count), self.model_runner.tables.tensor
        tokens, positions, mapping, ends, slots = self._rows.queries(number)
        rows = self._rows.decided(count, n) if by_place else self._rows.decided(n, count)
        kernels(self.device).runs.block_rows(
            self.state.view,
            slots=self.buffers.inputs(branches=False).slots(n),
            tables=tables,
            tokens=tokens,
            positions=positions,
            slot_mapping=mapping,
            context_len=ends,
            row_slots=slots,
            decided=rows.positions.T if by_place else rows.positions,
            decided_slot=rows.slots.T if by_place else rows.slots,
            mask_token=block.mask_token,
            block_size=self.model_runner.block_size,
        )
        starts, tiles = self._rows.index(number)
        batch = DeviceBatch(
            token_ids=tokens,
            positions=positions,
            slot_mapping=mapping,
            query_start=starts,
            context_len=ends,
            logit_rows=None,
            tiles=tiles,
            prefill_tiles=None,
            block_tables=tables[:, 1:],
            table_rows=slots,
        )
        if block.causal_layers:
            batch = replace(batch, others=(replace(batch, context_len=positions + 1),))
        return batch, rows


class BlockModel(DraftSource):
    """A block draft in place of a draft model. It has no KV bookkeeping: its KV is in the target's blocks.

    Its drafts of k tokens on average have lengths by how likely their tokens are accepted: as a confidence head says,
    or as often as those of the sequence were. They are twice as long at most, as longer ones take longer to write.
    """

    most_drafted: int

    def __init__(self, runner: BlockRunner) -> None:
        super().__init__(runner)
        self.most_drafted = runner.draft.block.most_drafted
        self._chances_of = runner.chances
        self._rates: dict[int, Average] = {}  # by sequence id: of the tokens before which all are accepted
        self._rate = Average(0.99, 12.0, 16.0)  # of all sequences

    def slots(self, k: int) -> int:
        return min(2 * k, self.most_drafted, self.runner.shapes.lookahead)

    def write(
        self, able: Seq[Able], origin: Origin = Origin.DRAFT, k: int | None = None, levels: int = 0
    ) -> tuple[list[Proposal], DraftRun]:
        if k is None or levels or len(able) == 1:
            return super().write(able, origin, k, levels)
        proposals, run = super().write(able, origin, self.slots(k))
        limits = [proposal.num_on_device for proposal in proposals]
        chances = self._chances_of(len(able), max(limits))
        if chances is None:
            rates = [float(self._rate_of(work.sequence).value) for work, _ in able]
            chances = np.array(rates)[:, None] ** np.arange(1, 1 + max(limits))
        lengths = shared_lengths(chances, limits, k)
        return [replace(p, num_on_device=n) for p, n in zip(proposals, lengths, strict=True)], run

    def observe(self, work: Work, outcome: Outcome | None, branched: bool) -> None:
        if outcome is not None and outcome.draft and outcome.origin is Origin.DRAFT:
            for rate in filter(None, (self._rates.get(work.sequence.id), self._rate)):
                rate.add(outcome.num_accepted, min(outcome.num_accepted + 1, len(outcome.draft)))

    def forget(self, sequence: Sequence) -> None:
        self._rates.pop(sequence.id, None)

    def _rate_of(self, sequence: Sequence) -> Average:
        return self._rates.setdefault(sequence.id, Average(7 / 8, 4 * self._rate.value, 4.0))
