"""Runs of a draft model or head: the newest tokens of some sequences are read, then every row gets a token per step.

Tokens, positions and KV slots of the next depth are computed on the device, without a synchronisation. On CUDA every
piece (the reading, each depth) is a graph.

`write` continues each sequence once (SD). `branch` prepares for the outcomes of a verification (SSD): it reads the
draft under verification, plans which outcomes to prepare for, and continues each of them as a branch. The KV of a
branch's own tokens is in branch slots, which belong to no block of the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from ssd.core import Origin, SamplingParams
from ssd.decoding.drafter import never
from ssd.drafting.buffers import DraftBuffers, Tables
from ssd.drafting.choice import TokenChoice
from ssd.drafting.fan_out import RANKS, FanOut, OutcomeStatistics
from ssd.drafting.graphs import PieceGraphs
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.drafting.tree import SHARPNESS, DraftTrees
from ssd.drafting.turns import Turns
from ssd.execution.clock import Clock, StreamClock, now
from ssd.execution.host_copy import HostCopy
from ssd.execution.runner import ModelRunner
from ssd.kernels.cuda.partition import Part
from ssd.kernels.cuda.persistent import PersistentStep
from ssd.kernels.ops import DeviceBatch
from ssd.kernels.transfers import upload
from ssd.kernels.triton.compile import compiling
from ssd.models.persistent import persistent_step
from ssd.parallel.tensor import TensorParallel
from ssd.sampling.sampler import ALL_NEEDS, Needs, Rows

MAX_ROWS_IN_PART = 16  # of a preparation; more need more of the GPU than the target can spare
_UNTIL_RECORDED = 4  # runs: the forward pass inside of a reading that is not recorded itself
_READING = -1  # the piece that reads and chooses each row's first token; piece s >= 0 extends every row by one token


@dataclass
class StagedBranches:
    """Inputs of `branch`."""

    slots: list[int]
    shape: RunShape
    at: Clock  # when they were copied from the SequenceState


@dataclass
class DraftRun:
    """A run that was launched. Its results are copied to the host; properties wait for them."""

    slots: list[int]
    width: int
    depth: int  # tokens written after the first of each row
    began: Clock
    _results: HostCopy  # tokens, `after`, likeliest tokens, confidence

    @property
    def ended(self) -> Clock:
        return self._results.arrived

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """Tokens of every row; row `i * width + b` is branch b of sequence i."""
        return self._fetched(0)

    @functools.cached_property
    def after(self) -> list[list[int]]:
        """Per sequence and branch: accepted draft tokens before it (`branch` only)."""
        return self._fetched(1)

    @functools.cached_property
    def likeliest(self) -> list[list[list[int]]]:
        """Per sequence and token read: the RANKS likeliest next tokens, best first (`branch` only)."""
        return self._fetched(2)

    @functools.cached_property
    def confidence(self) -> list[list[float]]:
        """Per sequence: confidence of the draft under verification (`branch` only)."""
        return self._fetched(3)

    @property
    def seconds(self) -> float:
        """Device time, once the run has ended."""
        return self.ended.since(self.began)

    def _fetched(self, result: int) -> list[Any]:
        found: list[Any] = self._results.wait()[result].tolist()
        return found


class DraftRunner:
    """Launches the pieces of runs of an autoregressive draft model, whose steps are a forward pass each.

    `shared`: branches are prepared while the target computes on the same GPU, so they are several kernels a step.
    `rejection`, `saguaro_c`: see `TokenChoice`. `states_width`: see `DraftBuffers`. `turns`: those of several engines
    that share the model.
    """

    sharpness: ClassVar[float] = SHARPNESS  # see `DraftTrees`

    def __init__(
        self,
        model_runner: ModelRunner,
        shapes: RunShapes,
        *,
        rejection: bool = False,
        saguaro_c: float = 1.0,
        graphs: bool = False,
        shared: bool = False,
        states_width: int = 0,
        turns: Turns | None = None,
    ) -> None:
        self.turns, self._joined = turns, False  # joined: the piece that is launched has others' steps beside it
        self.model_runner, self.decoder, self.kv = model_runner, model_runner.decoder, model_runner.kv
        self.state, self.device, self.shapes = model_runner.state, model_runner.state.device, shapes
        self.rejection, self.shared = rejection, shared
        self.buffers = DraftBuffers(model_runner, shapes, states_width=states_width)
        self.choice = TokenChoice(self.buffers, rejection=rejection, saguaro_c=saguaro_c)
        self.on_cuda = self.device.type == "cuda"
        self.stream = torch.cuda.Stream(priority=-1) if self.on_cuda else None  # type: ignore[no-untyped-call]
        on_use = self.decoder.tp.size == 1
        recordings = self.decoder.recordings if turns is None else self.decoder.ops.recordings()  # that go with this
        self.graphs = PieceGraphs(enabled=graphs and self.on_cuda, on_use=on_use, recordings=recordings)
        self.one_kernel: PersistentStep | None = None  # for steps of small batches, takes the whole GPU
        self.part: Part | None = None  # of the GPU, where small preparations compute beside the target
        self.trees = DraftTrees(self.state, self.choice, self.sharpness) if self.state.tree is not None else None
        self._origins = HostCopy(self.state.origin)  # of the drafts looked up last

    # --- running ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def write(
        self, slots: Seq[int], params: Seq[SamplingParams], count: int, reads: int, origin: Origin = Origin.DRAFT
    ) -> DraftRun:
        """Writes `count` tokens after the last of each sequence as its draft; `reads`: most tokens to be read."""
        shape = self.shapes.of(len(slots), reads, params)
        began = now(self.device)
        self._upload(slots, [0] * len(slots), shape)
        self._stage(shape)
        for piece in range(_READING, count - 1):
            self._launch(shape, piece)
        n = shape.sequences
        self.graphs.launch(("store", n, count, origin), lambda: self.buffers.store(n, count, origin))
        return self._launched(slots, shape, count - 1, began)

    def writes_trees(self, sequences: int) -> bool:
        """Whether a run can write trees for so many sequences."""
        beams = self.trees.beams if self.trees is not None else 0
        return 0 < self.shapes.bucket(sequences) * beams <= self.shapes.max_rows

    @torch.inference_mode()
    def write_trees(
        self, slots: Seq[int], params: Seq[SamplingParams], levels: int, reads: int, origin: Origin = Origin.DRAFT
    ) -> DraftRun:
        """Writes trees of so many levels as the drafts of the sequences; `reads`: as in `write`."""
        shape, began = self.shapes.of(len(slots), reads, params), now(self.device)
        self._upload(slots, [0] * len(slots), shape)
        self.graphs.launch(*self._tree(shape, levels))
        if origin is not Origin.DRAFT:
            self.state.origin.index_fill_(0, self.buffers.inputs(branches=False).slots(len(slots)).long(), origin)
        return self._launched(slots, shape, 0, began)

    @torch.inference_mode()
    def stage_branches(
        self,
        slots: Seq[int],
        drafted: Seq[int],
        params: Seq[SamplingParams],
        *,
        budget: int,
        fan_out: FanOut,
        statistics: OutcomeStatistics,
    ) -> StagedBranches:
        """Inputs of `branch`, uploaded and copied out of the SequenceState, right before the verification.

        `drafted`: draft length of each sequence in the verification.
        """
        shape = self.shapes.of(len(slots), max(drafted) + 1, params, fan_out, budget)
        self._upload(slots, drafted, shape)
        constants = fan_out.constants(statistics, self.state.drafts.shape[1], shape.width)
        upload(constants, self.buffers.plan_constants[: len(constants)])
        self._stage(shape)
        return StagedBranches(list(slots), shape, now(self.device))

    @torch.inference_mode()
    def restage(self, staged: StagedBranches) -> None:
        """Copies them once more: drafts in the SequenceState have changed."""
        self._stage(staged.shape)
        staged.at = now(self.device)

    @torch.inference_mode()
    def branch(
        self,
        staged: StagedBranches,
        count: int,
        *,
        overlap: bool = False,
        interrupted: Callable[[], bool] = never,
    ) -> DraftRun:
        """Writes `count` tokens after each likely outcome of the verification.

        `overlap`: on the draft's own stream, concurrently with what was launched after `stage_branches`. `interrupted`
        is polled between two depths, where there are no graphs.
        """
        shape = staged.shape
        with self.beside(staged.at) if overlap else nullcontext():
            began = now(self.device)
            self._launch(shape, _READING)
            done = 0
            while done < count and (self.graphs.enabled or not interrupted()):
                self._launch(shape, done)
                done += 1
            return self._launched(staged.slots, shape, done, began)

    @torch.inference_mode()
    def look_up(self, run: DraftRun) -> None:
        """Looks up the last verification's outcomes in the branches of a run; the result becomes the sequences' drafts.

        After a miss it is the sibling's draft, if there is one; `SequenceState.origin` tells which.
        """
        self.join()
        n, width, depth = self.shapes.bucket(len(run.slots)), run.width, run.depth
        pinned = self.buffers.hit_rate is not None
        self.graphs.launch(("look up", n, width, depth, pinned), lambda: self.buffers.look_up(n, width, depth))
        self._origins = HostCopy(self.state.origin)

    def pin_hits(self, rate: float) -> None:
        """Draws from now on whether a look-up finds the outcome, see `DraftBuffers.hit_rate`."""
        self.buffers.hit_rate = torch.tensor(rate, dtype=torch.float32, device=self.device)

    def origins(self, slots: Seq[int]) -> list[Origin]:
        """Origins of the drafts looked up last. Waits for the device."""
        values = self._origins.wait()[0].tolist()
        return [Origin(values[slot]) for slot in slots]

    def confidence(self, run: DraftRun, first: int, last: int) -> list[list[float]]:
        """How sure the draft model was of each token of the rows first..last-1 of the last run."""
        run.ended.wait()
        found: list[list[float]] = self.buffers.confidence[first:last, 1 : run.depth + 1].tolist()
        return found

    def distributions(self, row: int, first: int, last: int) -> torch.Tensor:
        """Distributions that a row's tokens first..last-1 of the last run were sampled from: float64 [tokens, V]."""
        return self.choice.distributions[first:last, row].clone()

    def let_others(self) -> None:
        """Between two forward passes that are no steps: other engines have theirs."""
        if self.turns is not None:
            self.turns.yield_()

    # --- streams, ranks and warm-up -----------------------------------------------------------------------------------

    def beside(self, since: Clock | None = None) -> AbstractContextManager[object]:
        """The draft's own stream, which waits for the current one (or for that earlier point of it)."""
        if self.stream is None:
            return nullcontext()
        if isinstance(since, StreamClock):
            self.stream.wait_event(since.event)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def join(self) -> None:
        """Makes the current stream wait for the draft's own."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    @torch.inference_mode()
    def rehearse(self, sequences: Seq[int], fan_out: FanOut) -> None:
        """Runs on padding, of all shapes that have kernels of their own."""
        with self.decoder.distinct_layers(), self.state.sampling.tables():
            for shape in self.shapes.usual(sequences, fan_out):
                self._upload([self.state.padding] * shape.sequences, [0] * shape.sequences, shape)
                self._copy_inputs(shape.sequences, shape.branches)
                for needs in ALL_NEEDS if compiling() else [Needs()]:
                    self._compute(shape._replace(needs=needs), _READING)
                    self._compute(shape._replace(needs=needs, reads=self.shapes.reads), 0)
                if shape.branches:
                    self.buffers.look_up(shape.sequences, shape.width, self.shapes.lookahead)
                    continue
                self.buffers.store(shape.sequences, self.shapes.lookahead, Origin.DRAFT)
                for needs in (ALL_NEEDS if compiling() else [Needs()]) if self.writes_trees(shape.sequences) else ():
                    self._tree(shape._replace(needs=needs), self.shapes.lookahead)[1]()

    @torch.inference_mode()
    def capture(self, sequences: Seq[int], fan_out: FanOut) -> None:
        """Captures the graphs of the usual shapes, so that no request waits for them."""
        for shape in self.shapes.usual(sequences, fan_out):
            n, branches = shape.sequences, shape.branches
            self.graphs.capture(("stage", n, branches), functools.partial(self._copy_inputs, n, branches))
            for piece in range(_READING, self.shapes.lookahead if branches else self.shapes.lookahead - 1):
                self.graphs.capture(*self._piece(shape, piece))
            if not branches and self.writes_trees(n):
                self.graphs.capture(*self._tree(shape, self.shapes.lookahead))

    @torch.inference_mode()
    def record(self, fan_out: FanOut) -> None:
        """On a CPU: runs of one sequence until their pieces are recorded, while there are no sequences."""
        if self.decoder.recordings is None:
            return
        slot, block = 0, 0
        self.state.append(slot, 0, [0], 0)
        self.model_runner.tables.reset(slot)
        self.model_runner.tables.update([(slot, [block])])
        for shape in self.shapes.usual([1], fan_out):
            last = self.shapes.lookahead - (not shape.branches)
            for repeat in range(_UNTIL_RECORDED):
                self._upload([slot], [0], shape)
                self._stage(shape)
                for piece in range(_READING, last if repeat < 2 else 0):
                    self._launch(shape, piece)

    def use_one_kernel(self) -> None:
        """Makes small steps one kernel each, where there is such a kernel. The KV must be unused."""
        self.one_kernel = persistent_step(self.decoder, self.kv)

    def part_of(self, shape: RunShape) -> Part | None:
        """The part of the GPU where a run of this shape computes beside the target; None: the whole GPU."""
        small = shape.sequences == 1 and 0 < shape.width <= MAX_ROWS_IN_PART
        return self.part if small else None

    def follow(self, key: tuple[int, ...], fan_out: FanOut) -> None:
        """On another rank: launches a piece. It knows no sequences: the forward pass has rank 0's inputs, and what is
        chosen from its logits is of no use."""
        sequences, reads, width, piece = key
        self._launch(RunShape(sequences, reads, width, Needs(), fan_out if width else None), piece)

    # --- the pieces ---------------------------------------------------------------------------------------------------

    def _launch(self, shape: RunShape, piece: int) -> None:
        """Launches a piece, on all ranks of a split draft model (`follow`)."""
        captured = self._piece(shape, piece)
        self._joined = self.turns is not None and self.turns.shared
        if self._joined:
            captured[1]()
            return
        shape, piece, _ = captured[0]
        followers = self.model_runner.followers
        key = shape.sequences, shape.reads, shape.width, piece
        with followers.launching(key, draft=True) if followers is not None else nullcontext():
            self.graphs.launch(*captured)

    def _piece(
        self, shape: RunShape, piece: int
    ) -> tuple[tuple[RunShape, int, Part | None], Callable[[], None], torch.cuda.Stream | None]:
        """A piece's key, what it launches, and the stream that it is captured on."""
        if piece != _READING:
            shape = self.shapes.after_reading(shape)
        self.buffers.indices(shape)  # before a capture, which would record how they are made and not make them
        part = self.part_of(shape)
        return (shape, piece, part), functools.partial(self._compute, shape, piece), part.stream if part else None

    def _upload(self, slots: Seq[int], drafted: Seq[int], shape: RunShape) -> None:
        """Uploads the inputs of the next run, after the draft's own stream is done with the last ones."""
        self.join()
        self.buffers.upload(slots, drafted, shape)

    def _stage(self, shape: RunShape) -> None:
        n, branches = shape.sequences, shape.branches
        self.graphs.launch(("stage", n, branches), functools.partial(self._copy_inputs, n, branches))

    def _copy_inputs(self, n: int, branches: bool) -> None:
        """Copies the inputs of a run for n sequences out of the SequenceState."""
        self.buffers.stage(n, branches=branches)

    def _compute(self, shape: RunShape, piece: int) -> None:
        with torch.inference_mode():
            if piece != _READING:
                logits = self.extend(shape, piece)
                self.choice.choose(shape, piece + 1, logits, self.buffers.decided(shape))
            elif shape.fan_out is not None:
                self._read_and_plan(shape, shape.fan_out)
            else:
                self._read_and_choose(shape)

    def _read_and_choose(self, shape: RunShape) -> None:
        self.choice.choose(shape, 0, self.read(shape, last=True), self.buffers.read_decides(shape))

    def _tree(self, shape: RunShape, levels: int) -> tuple[Hashable, Callable[[], None]]:
        """The key of a run that writes trees, and what it launches."""
        assert self.trees is not None
        grown = self.shapes.after_reading(shape)._replace(width=self.trees.beams)
        for each in (shape, grown):
            self.buffers.indices(each)  # before a capture, see `_piece`
        return ("trees", shape, levels), functools.partial(self._grow, self.trees, shape, grown, levels)

    def _grow(self, trees: DraftTrees, shape: RunShape, grown: RunShape, levels: int) -> None:
        """Reads the newest tokens, then the beams of each level but the last, whose KV is in branch slots."""
        with torch.inference_mode():
            n, buffers = shape.sequences, self.buffers
            self._copy_inputs(n, False)
            trees.begin(buffers.inputs(branches=False).slots(n), levels)
            beams, tokens = buffers.beam_rows(grown, levels - 1), buffers.beam_tokens(grown)
            logits = self.read(shape, last=True, beams=beams)
            above = trees.add(logits, buffers.read_decides(shape), shape.needs, tokens)
            for depth, rows in enumerate(() if beams is None else beams):
                self.follow_rows(above, trees.beams, depth)
                logits = self._forward(shape, buffers.beam_batch(grown, depth, self._tables(shape), rows))
                above = trees.add(logits, Rows(rows[3], rows[2]), shape.needs, tokens)
            trees.store(Origin.DRAFT)

    def follow_rows(self, above: torch.Tensor, beams: int, depth: int) -> None:
        """Gives each row what the row above it has: the KV of `depth` tokens in branch slots."""
        if depth:
            self.buffers.follow(above, beams, depth, None)

    def _read_and_plan(self, shape: RunShape, fan_out: FanOut) -> None:
        n, width, buffers = shape.sequences, shape.width, self.buffers
        inputs, place = buffers.inputs(branches=True), buffers.indices(shape).place
        first, count = inputs.first[:n, None], inputs.count[:n, None]
        following = inputs.tokens[:n, 1 : shape.reads + 1]  # the token after each token that is read
        excluded = torch.where(place + 1 < count, following, -1).flatten()
        rows = Rows(inputs.slots(n)[buffers.indices(shape).read_sequence], (first + place + 1).flatten())
        ranked = self.choice.rank(self.read(shape, last=False), rows, shape.needs, excluded)
        buffers.likeliest[: len(ranked)].copy_(ranked)
        after, rank = fan_out.plan(
            buffers.plan_constants, buffers.verified_confidence[:n], buffers.hit[:n], inputs.drafted(n), width
        )
        buffers.after[:n, :width].copy_(after)
        roots = ranked.view(n, -1).gather(1, (after * RANKS + rank).long())
        buffers.chain[: shape.rows, 0].copy_(roots.flatten())

    def _launched(self, slots: Seq[int], shape: RunShape, depth: int, began: Clock) -> DraftRun:
        buffers, wanted = self.buffers, shape.sequences if shape.branches else 0
        rows = shape.rows if shape.branches or self.rejection else 0  # a plain draft stays on the device
        results = HostCopy(
            buffers.chain[:rows, : depth + 1],
            buffers.after[:wanted, : shape.width],
            buffers.likeliest[: wanted * shape.reads].view(wanted, shape.reads, RANKS),
            buffers.verified_confidence[:wanted],
        )
        return DraftRun(list(slots), shape.width, depth, began, results)

    # --- a step -------------------------------------------------------------------------------------------------------

    def read(self, shape: RunShape, *, last: bool, beams: torch.Tensor | None = None) -> torch.Tensor:
        """Reads each sequence's newest tokens; logits after the last of each, or after all. `beams`: rows that are
        written meanwhile, see `DraftBuffers.beam_rows`."""
        return self._forward(shape, self.buffers.read_batch(shape, self._tables(shape), last=last, beams=beams))

    def extend(self, shape: RunShape, depth: int) -> torch.Tensor:
        """Logits after the newest token of every row, which is its `depth`-th."""
        return self._forward(shape, self.buffers.row_batch(shape, depth, self._tables(shape)))

    def _tables(self, shape: RunShape) -> Tables:
        slots = self.buffers.inputs(branches=shape.branches).slots(shape.sequences)
        return Tables(self.model_runner.tables.tensor, slots)

    def _forward(self, shape: RunShape, batch: DeviceBatch) -> torch.Tensor:
        step = None if self.shared and shape.branches else self.one_kernel
        if self._joined and self.turns is not None:
            return self.turns.forward(batch)
        if step is not None and step.takes(batch):
            return step(batch)
        return self.decoder(_of_first_rank(self.decoder.tp, batch), self.kv)


def _of_first_rank(tp: TensorParallel, batch: DeviceBatch) -> DeviceBatch:
    """Rank 0's batch, on all ranks of a split model."""
    if tp.size == 1:
        return batch
    names = ("token_ids", "positions", "slot_mapping", "context_len", "table_rows", "logit_rows")
    own = {name: found for name in names if (found := getattr(batch, name)) is not None}
    packed = torch.cat([tensor.int() for tensor in own.values()])
    tp.broadcast(packed)
    parts = torch.split(packed, [len(tensor) for tensor in own.values()])
    shared: dict[str, Any] = {name: part.to(own[name].dtype) for name, part in zip(own, parts, strict=True)}
    return replace(batch, **shared)
