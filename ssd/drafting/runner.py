"""Runs of a draft model: one forward over the newest tokens of some sequences (reading), then one forward per depth.

Tokens, positions and KV slots of the next depth are computed on the device, without a synchronisation. On CUDA every
piece (the reading, each depth) is a graph.

`write` continues each sequence once (SD). `branch` prepares for the outcomes of a verification (SSD): it reads the
draft under verification, plans which outcomes to prepare for, and continues each of them as a branch. The KV of a
branch's own tokens is in branch slots, which belong to no block of the pool.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ssd.core import Origin, SamplingParams
from ssd.decoding.drafter import never
from ssd.drafting.fan_out import RANKS, FanOut, OutcomeStatistics
from ssd.execution.clock import Clock, StreamClock, now
from ssd.execution.graphs import capture
from ssd.execution.runner import ModelRunner
from ssd.kernels.compiling import compiling
from ssd.kernels.device import kernels
from ssd.kernels.ops import Branches, DeviceBatch
from ssd.kernels.transfers import to_host, upload
from ssd.sampling.noise import Stream
from ssd.sampling.sampler import ALL_NEEDS, Needs, Rows, Sampler, reweighted

_FEW_READS = 5  # tokens: enough after a draft of 4
_MAX_CONFIDENCE = 1e4  # where only one token is possible
_Launch = Callable[[Hashable, Callable[[], None]], None]


class RunShape(NamedTuple):
    """The shape of a run; every shape has its own graphs."""

    sequences: int
    reads: int  # tokens read per sequence, padded
    width: int  # branches per sequence; 0: `write`, one row per sequence
    needs: Needs
    fan_out: FanOut | None = None  # the policy that plans the branches

    @property
    def rows(self) -> int:
        return self.sequences * max(1, self.width)


class _Constants(NamedTuple):
    """Index tensors of a shape."""

    place: torch.Tensor  # [reads]
    before: torch.Tensor  # [sequences]: the row before each sequence's first token
    read_sequence: torch.Tensor  # [sequences * reads]: of each token that is read
    read_start: torch.Tensor  # [sequences + 1]
    read_tiles: torch.Tensor
    start: torch.Tensor  # [sequences + 1], of the rows
    tiles: torch.Tensor


class _Inputs:
    """Inputs of a run, at fixed addresses: what the host uploads, and what is read from the SequenceState."""

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


@dataclass
class StagedBranches:
    """Inputs of `branch`."""

    slots: list[int]
    shape: RunShape
    at: Clock | None = None  # when they were copied from the SequenceState


@dataclass
class DraftRun:
    """A run that was launched. On a GPU its results are copied asynchronously; properties wait for them."""

    slots: list[int]
    width: int
    depth: int  # tokens written after the first of each row
    began: Clock
    ended: Clock
    _chain: torch.Tensor  # tokens of every row; column 0: the outcome's own token (`branch`)
    _after: torch.Tensor
    _likeliest: torch.Tensor
    _confidence: torch.Tensor

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """Tokens of every row; row `i * width + b` is branch b of sequence i."""
        self.ended.wait()
        found: list[list[int]] = self._chain.tolist()
        return found

    @functools.cached_property
    def after(self) -> list[list[int]]:
        """Per sequence and branch: accepted draft tokens before it (`branch` only)."""
        self.ended.wait()
        found: list[list[int]] = self._after.tolist()
        return found

    @functools.cached_property
    def likeliest(self) -> list[list[list[int]]]:
        """Per sequence and token read: the RANKS likeliest next tokens, best first (`branch` only)."""
        self.ended.wait()
        found: list[list[list[int]]] = self._likeliest.view(len(self.after), -1, RANKS).tolist()
        return found

    @functools.cached_property
    def confidence(self) -> list[list[float]]:
        """Per sequence: confidence of the draft under verification (`branch` only)."""
        self.ended.wait()
        found: list[list[float]] = self._confidence.tolist()
        return found

    @property
    def seconds(self) -> float:
        """Device time, once the run has ended."""
        return self.ended.since(self.began)


class DraftRunner:
    """Runs a draft model over fixed buffers. `lookahead`: maximum draft length.

    `rejection`: tokens are sampled from the draft's own distributions, which are kept, instead of being chosen with the
    target's noise; `saguaro_c` below 1 then lowers the probability of its likeliest tokens.
    """

    def __init__(
        self,
        runner: ModelRunner,
        *,
        lookahead: int,
        max_sequences: int,
        max_rows: int,
        widths: Seq[int] = (),
        rejection: bool = False,
        saguaro_c: float = 1.0,
        graphs: bool = False,
    ) -> None:
        self.runner = runner
        self.state = runner.state
        self.lookahead = lookahead
        self.reads = lookahead + 1  # maximum number of tokens that a run reads of a sequence
        self.max_sequences = max_sequences
        self.max_rows = max_rows
        self.widths = sorted({min(width, RANKS * (lookahead + 1)) for width in widths})  # that have graphs
        self.max_width = max(self.widths, default=0)
        self.rejection = rejection
        self.saguaro_c = saguaro_c
        self.sampler = Sampler(self.state.sampling)
        self.vocab_size = self.state.vocab_size  # the target's
        device = self.device = self.state.device
        self.on_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(priority=-1) if self.on_cuda else None  # type: ignore[no-untyped-call]
        self.computed = self._zeros(self.state.num_slots + 1)  # by slot: tokens with KV in the blocks, drafts included
        self._inputs = {
            branches: _Inputs(max_sequences, self._most_reads(branches), device) for branches in (False, True)
        }
        self._after, self._rank = (self._zeros(max_sequences, max(1, self.max_width)) for _ in range(2))
        self._plan_constants = self._float_zeros(4 * (lookahead + 1) * max(1, self.max_width) + 64)
        self._verified_confidence = self._float_zeros(max_sequences, self.state.drafts.shape[1])
        self._hit = self._zeros(max_sequences)
        self._chain = self._zeros(max_rows, lookahead + 1)
        self._rows = tuple(self._zeros(max_rows) for _ in range(5))  # see `rounds.extend_rows`
        self._confidence = self._float_zeros(max_rows, lookahead + 1)
        self._likeliest = self._zeros(max_sequences * self.reads, RANKS)
        kept = (lookahead + 1, max_rows, self.vocab_size) if rejection else (0,)
        self._distributions = torch.zeros(kept, dtype=torch.float64, device=device)  # of each column of the chain
        self._constants_of: dict[RunShape, _Constants] = {}
        self._branch_slots = runner.scratch_slot  # the first; after those of all rows comes one for padding
        self._padding_slot = self._branch_slots + max_rows * lookahead
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] | None = {} if graphs and self.on_cuda else None
        self._graph_pool: Any = None
        self._origins = self._zeros(0)  # of the drafts looked up last, being copied to the host
        self._origins_fetched = now(device)

    @staticmethod
    def scratch_slots(max_rows: int, lookahead: int) -> int:
        """KV slots needed besides the blocks."""
        return max_rows * lookahead + 1

    # --- running ------------------------------------------------------------------------------------------------------

    def width_of(self, sequences: int) -> int:
        """Maximum number of branches per sequence in a batch of this size."""
        return min(self.max_width, self.max_rows // self._bucket(sequences))

    @torch.inference_mode()
    def write(
        self, slots: Seq[int], params: Seq[SamplingParams], count: int, reads: int, origin: Origin = Origin.DRAFT
    ) -> DraftRun:
        """Writes `count` tokens after the last of each sequence as its draft; `reads`: most tokens to be read."""
        shape = self._shape(len(slots), reads, 0, params)
        began = now(self.device)
        self._upload(slots, [0] * len(slots), shape)
        self._stage(shape)
        self._piece(shape, -1)
        for depth in range(count - 1):
            self._piece(shape, depth)
        self._launch(("store", shape.sequences, count, origin), lambda: self._store(shape.sequences, count, origin))
        return self._launched(slots, shape, count - 1, began)

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
        """Uploads the inputs of `branch`; `drafted`: draft length of each sequence in the verification."""
        width = min(fan_out.width(budget), self.width_of(len(slots)))
        if self.on_cuda:
            width = min(self.width_of(len(slots)), next(each for each in self.widths if each >= width))
        shape = self._shape(len(slots), max(drafted) + 1, width, params)._replace(fan_out=fan_out)
        self._upload(slots, drafted, shape)
        constants = fan_out.constants(statistics, self.state.drafts.shape[1], width)
        upload(constants, self._plan_constants[: len(constants)])
        return StagedBranches(list(slots), shape)

    @torch.inference_mode()
    def snapshot(self, staged: StagedBranches) -> None:
        """Copies the inputs of `branch` out of the SequenceState, right before the verification."""
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

        `overlap`: on the draft's own stream, concurrently with what was launched after `snapshot`. `interrupted` is
        polled between two depths, where there are no graphs.
        """
        shape = staged.shape
        with self.beside(staged.at) if overlap else nullcontext():
            began = now(self.device)
            self._piece(shape, -1)
            done = 0
            while done < count and not (self._graphs is None and interrupted()):
                self._piece(shape, done)
                done += 1
            return self._launched(staged.slots, shape, done, began)

    @torch.inference_mode()
    def look_up(self, run: DraftRun) -> None:
        """Looks up the last verification's outcomes in the branches of a run; the result becomes the sequences' drafts.

        After a miss it is the sibling's draft, if there is one; `SequenceState.origin` tells which.
        """
        self.join()
        n, width, depth = self._bucket(len(run.slots)), run.width, run.depth
        self._launch(("look up", n, width, depth), lambda: self._look_up(n, width, depth))
        self._origins = to_host(self.state.origin)
        self._origins_fetched = now(self.device)

    def _look_up(self, n: int, width: int, depth: int) -> None:
        kernels(self.device).rounds.look_up(
            slots=self._inputs[True].slots(n),
            after=self._after[:n, :width],
            chain=self._chain,
            chain_confidence=self._confidence,
            depth=depth,
            length=self.state.length,
            token_ids=self.state.token_ids,
            num_accepted=self.state.num_accepted,
            drafts=self.state.drafts,
            confidence=self.state.confidence,
            origin=self.state.origin,
            hit=Origin.HIT,
            miss=Origin.SIBLING,
        )

    def _store(self, n: int, count: int, origin: Origin) -> None:
        """Copies what was written to the sequences' drafts."""
        kernels(self.device).rounds.store(
            slots=self._inputs[False].slots(n),
            chain=self._chain,
            chain_confidence=self._confidence,
            count=count,
            drafts=self.state.drafts,
            confidence=self.state.confidence,
            origin=self.state.origin,
            value=origin,
        )

    def confidence(self, run: DraftRun, first: int, last: int) -> list[list[float]]:
        """How sure the draft model was of each token of the rows first..last-1 of the last run."""
        run.ended.wait()
        found: list[list[float]] = self._confidence[first:last, 1 : run.depth + 1].tolist()
        return found

    def distributions(self, row: int, first: int, last: int) -> torch.Tensor:
        """Distributions that a row's tokens first..last-1 of the last run were sampled from: float64 [tokens, V]."""
        return self._distributions[first:last, row].clone()

    @torch.inference_mode()
    def rehearse(self, sequences: Seq[int], fan_out: FanOut) -> None:
        """Runs on padding, of all shapes that have kernels of their own."""
        with self.runner.decoder.distinct_layers(), self.state.sampling.tables():
            for shape in self._usual_shapes(sequences, fan_out):
                self._upload([self.state.padding] * shape.sequences, [0] * shape.sequences, shape)
                self._compute_stage(shape.sequences, shape.width > 0)
                for needs in ALL_NEEDS if compiling() else [Needs()]:
                    self._compute(shape._replace(needs=needs), -1)
                    self._compute(shape._replace(needs=needs, reads=self.reads), 0)
                if shape.width:
                    self._look_up(shape.sequences, shape.width, self.lookahead)
                else:
                    self._store(shape.sequences, self.lookahead, Origin.DRAFT)

    @torch.inference_mode()
    def capture(self, sequences: Seq[int], fan_out: FanOut) -> None:
        """Captures the graphs of the usual shapes, so that no request waits for them."""
        for shape in self._usual_shapes(sequences, fan_out):
            n, branches = shape.sequences, shape.width > 0
            self._capture(("stage", n, branches), functools.partial(self._compute_stage, n, branches))
            for piece in range(-1, self.lookahead if branches else self.lookahead - 1):
                self._piece(shape, piece, self._capture)

    def _usual_shapes(self, sequences: Seq[int], fan_out: FanOut) -> Iterator[RunShape]:
        """The largest first: the graphs of the others reuse its memory."""
        for count in sorted({self._bucket(n) for n in sequences}, reverse=True):
            for width in sorted({0, *(min(width, self.max_rows // count) for width in self.widths)}, reverse=True):
                for reads in sorted({self._reads(1, width > 0), self._most_reads(width > 0)}, reverse=True):
                    yield RunShape(count, reads, width, Needs(), fan_out if width else None)

    def beside(self, since: Clock | None = None) -> AbstractContextManager[object]:
        """The draft's own stream, which waits for the current one (or for that earlier point of it)."""
        if self.stream is None:
            return nullcontext()
        if isinstance(since, StreamClock):
            self.stream.wait_event(since.event)
        else:
            self.stream.wait_stream(torch.cuda.current_stream())
        return torch.cuda.stream(self.stream)

    def origins(self, slots: Seq[int]) -> list[Origin]:
        """Origins of the drafts looked up last. Waits for the device."""
        self._origins_fetched.wait()
        values = self._origins.tolist()
        return [Origin(values[slot]) for slot in slots]

    def join(self) -> None:
        """Makes the current stream wait for the draft's own."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _launched(self, slots: Seq[int], shape: RunShape, depth: int, began: Clock) -> DraftRun:
        wanted = shape.sequences if shape.width else 0
        rows = shape.rows if shape.width or self.rejection else 0  # a plain draft stays on the device
        copies = (
            self._chain[:rows, : depth + 1],
            self._after[:wanted, : shape.width],
            self._likeliest[: wanted * shape.reads],
            self._verified_confidence[:wanted],
        )
        chain, after, likeliest, confidence = map(to_host, copies)
        return DraftRun(list(slots), shape.width, depth, began, now(self.device), chain, after, likeliest, confidence)

    def _shape(self, sequences: int, reads: int, width: int, params: Seq[SamplingParams]) -> RunShape:
        return RunShape(self._bucket(sequences), self._reads(reads, width > 0), width, Needs.of(params))

    def _bucket(self, sequences: int) -> int:
        if not self.on_cuda:
            return sequences
        return min(self.max_sequences, 1 << (sequences - 1).bit_length())

    def _most_reads(self, branches: bool) -> int:
        """Maximum number of tokens that `write`, or `branch`, reads of a sequence."""
        return self.reads

    def _reads(self, count: int, branches: bool) -> int:
        """Rounds up to a number of tokens that has graphs."""
        if not self.on_cuda:
            return count
        most = self._most_reads(branches)
        return min(_FEW_READS, most) if count <= _FEW_READS else most

    def _piece(self, shape: RunShape, piece: int, launch: _Launch | None = None) -> None:
        """Piece -1 reads and chooses each row's first token; piece s extends every row by one token."""
        if piece >= 0:  # does not depend on the number of tokens read, nor on the policy
            shape = shape._replace(reads=self.reads if self.on_cuda else shape.reads, fan_out=None)
        with self._announced(shape, piece) if launch is None else nullcontext():
            (launch or self._launch)((shape, piece), lambda: self._compute(shape, piece))

    def _announced(self, shape: RunShape, piece: int) -> AbstractContextManager[object]:
        """Makes the other ranks of a split draft model launch the same piece (`follow`)."""
        followers = self.runner.followers
        if followers is None:
            return nullcontext()
        return followers.launching((shape.sequences, shape.reads, shape.width, piece), draft=True)

    def follow(self, key: tuple[int, ...], fan_out: FanOut) -> None:
        """On another rank: launches a piece. It knows no sequences: the forward pass has rank 0's inputs, and what is
        chosen from its logits is of no use."""
        sequences, reads, width, piece = key
        self._piece(RunShape(sequences, reads, width, Needs(), fan_out if width else None), piece)

    def _launch(self, key: Hashable, compute: Callable[[], None]) -> None:
        """Runs `compute`, which launches the same kernels for the same key: from the second time on as a graph."""
        if self._graphs is None:
            compute()
        elif key in self._graphs:
            self._graphs[key].replay()
        else:
            compute()  # eagerly the first time; the graph is for later
            if self.runner.decoder.tp.size == 1:  # ranks must capture together
                self._capture(key, compute)

    def _capture(self, key: Hashable, compute: Callable[[], None]) -> None:
        if self._graphs is None or key in self._graphs:
            return
        stream = torch.cuda.current_stream()
        own = stream if stream != torch.cuda.default_stream() else None
        self._graphs[key], _ = capture(compute, self._graph_pool, stream=own)
        self._graph_pool = self._graphs[key].pool()

    def _upload(self, slots: Seq[int], drafted: Seq[int], shape: RunShape) -> None:
        """Uploads slots and draft lengths of the next run, after the draft's own stream is done with the last ones."""
        self.join()
        padding = shape.sequences - len(slots)
        both = [*slots, *[self.state.padding] * padding, *drafted, *[0] * padding]
        upload(np.array(both, dtype=np.int32), self._inputs[shape.width > 0].meta[: len(both)])

    def _stage(self, shape: RunShape) -> None:
        """Copies the run's inputs out of the SequenceState."""
        n, branches = shape.sequences, shape.width > 0
        self._launch(("stage", n, branches), lambda: self._compute_stage(n, branches))

    def _compute_stage(self, n: int, branches: bool) -> None:
        inputs = self._inputs[branches]
        kernels(self.device).rounds.stage(
            slots=inputs.slots(n),
            num_drafted=inputs.drafted(n),
            length=self.state.length,
            token_ids=self.state.token_ids,
            drafts=self.state.drafts,
            confidence=self.state.confidence,
            origin=self.state.origin,
            computed=self.computed,
            first=inputs.first[:n],
            count=inputs.count[:n],
            tokens=inputs.tokens[:n],
            verified_confidence=self._verified_confidence[:n],
            hit=self._hit[:n],
            hit_origin=Origin.HIT,
            vocab_size=self.runner.vocab_size,
            fork=branches,
        )

    # --- the pieces ---------------------------------------------------------------------------------------------------

    def _compute(self, shape: RunShape, piece: int) -> None:
        with torch.inference_mode():
            if piece >= 0:
                self._extend(shape, piece)
            elif shape.width == 0:
                self._read_and_choose(shape)
            else:
                self._read_and_plan(shape)

    def _read_and_choose(self, shape: RunShape) -> None:
        n, inputs = shape.sequences, self._inputs[False]
        count = inputs.count[:n].clamp(max=shape.reads)
        logits = self._read(shape, self._constants(shape).before + count)
        self._choose(shape, 0, logits, Rows(inputs.slots(n), inputs.first[:n] + count))

    def _read_and_plan(self, shape: RunShape) -> None:
        n, place, inputs = shape.sequences, self._constants(shape).place, self._inputs[True]
        first, count = inputs.first[:n, None], inputs.count[:n, None]
        following = inputs.tokens[:n, 1 : shape.reads + 1]  # the token after each token that is read
        excluded = torch.where(place + 1 < count, following, -1).flatten()
        rows = Rows(inputs.slots(n)[self._constants(shape).read_sequence], (first + place + 1).flatten())
        ranked = self._rank_tokens(self._read(shape, None), rows, shape.needs, excluded)
        self._likeliest[: len(ranked)].copy_(ranked)
        if shape.fan_out is None:
            raise AssertionError("a run with branches needs a fan-out policy")
        after, rank = shape.fan_out.plan(
            self._plan_constants, self._verified_confidence[:n], self._hit[:n], inputs.drafted(n), shape.width
        )
        self._after[:n, : shape.width].copy_(after)
        self._rank[:n, : shape.width].copy_(rank)
        roots = ranked.view(n, -1).gather(1, (after * RANKS + rank).long())
        self._chain[: shape.rows, 0].copy_(roots.flatten())

    def _read(self, shape: RunShape, logit_rows: torch.Tensor | None) -> torch.Tensor:
        """A forward over every sequence's new tokens, which writes their KV to the blocks."""
        n, reads, constants = shape.sequences, shape.reads, self._constants(shape)
        inputs = self._inputs[shape.width > 0]
        place, (tables, slots) = constants.place, self._tables(shape)
        positions = inputs.first[:n, None] + place
        size = self.runner.block_size
        index = positions // size
        blocks = tables[slots[:, None], 1 + index]
        real = (place < inputs.count[:n, None]) & (index < tables[slots, :1])
        mapping = torch.where(real, blocks * size + positions % size, self._padding_slot)
        context = inputs.first[:n] + reads
        batch = DeviceBatch(
            token_ids=inputs.tokens[:n, :reads].flatten().contiguous(),
            positions=positions.flatten(),
            slot_mapping=mapping.flatten(),
            query_start=constants.read_start,
            context_len=context,
            logit_rows=logit_rows,
            tiles=constants.read_tiles,
            prefill_tiles=None,
            block_tables=tables[:, 1:],
            table_rows=slots,
        )
        return self._logits(batch)

    def _tables(self, shape: RunShape) -> tuple[torch.Tensor, torch.Tensor]:
        """The block tables (column 0: number of blocks), and every sequence's row of them."""
        return self.runner.tables.tensor, self._inputs[shape.width > 0].slots(shape.sequences)

    def _extend(self, shape: RunShape, depth: int) -> None:
        """A forward over the newest token of every row."""
        n, constants, inputs = shape.sequences, self._constants(shape), self._inputs[shape.width > 0]
        tables, table_rows = self._tables(shape)
        tokens, positions, mapping, decided, slots = out = tuple(column[: shape.rows] for column in self._rows)
        kernels(self.device).rounds.extend_rows(
            slots=inputs.slots(n),
            first=inputs.first[:n],
            count=inputs.count[:n],
            after=self._after[:n, : shape.width] if shape.width else None,
            chain=self._chain,
            depth=depth,
            reads=self.reads,
            first_slot=self._branch_slots,
            slots_per_branch=self.lookahead,
            vocab_size=self.runner.vocab_size,
            out=out,
        )
        batch = DeviceBatch(
            token_ids=tokens,
            positions=positions,
            slot_mapping=mapping,
            query_start=constants.start,
            context_len=positions,  # not used for branches
            logit_rows=None,
            tiles=constants.tiles,
            prefill_tiles=None,
            branches=Branches(depth, self.lookahead),
            block_tables=tables[:, 1:],
            table_rows=table_rows,
        )
        logits = self._logits(batch)
        self._choose(shape, depth + 1, logits, Rows(slots, decided))

    def _choose(self, shape: RunShape, column: int, logits: torch.Tensor, rows: Rows) -> None:
        """One token per row, and its confidence (at least 0): the margin of its score, or -log(1 - q)."""
        if not self.rejection:
            best, scores = self.sampler.best(logits, rows, shape.needs, 2)
            keep = kernels(self.device).rounds.keep_best
            keep(best, scores, self._chain, self._confidence, column, _MAX_CONFIDENCE)
            return
        q = self.sampler.distribution(logits, rows, shape.needs)
        q = reweighted(q, self.saguaro_c, _SAGUARO_FAN_OUT)
        drawn = self.sampler.draw(q, rows, Stream.DRAFT)
        confidence = -torch.log1p(-q.gather(-1, drawn[:, None])[:, 0].clamp(max=1 - 1e-6)).float()
        self._distributions[column, : shape.rows].copy_(q)
        self._chain[: shape.rows, column].copy_(drawn)
        self._confidence[: shape.rows, column].copy_(confidence)

    def _rank_tokens(self, logits: torch.Tensor, rows: Rows, needs: Needs, excluded: torch.Tensor) -> torch.Tensor:
        """The RANKS likeliest tokens of each row, best first, without the excluded one: int32 [R, RANKS]."""
        if not self.rejection:
            return self.sampler.best(logits, rows, needs, RANKS, excluded)[0].clamp_(min=0)
        q = self.sampler.distribution(logits, rows, needs)
        index = excluded.long()[:, None]
        q = torch.where(index >= 0, q.scatter(-1, index.clamp(min=0), 0.0), q)
        values, tokens = q.topk(min(RANKS, q.shape[-1]), dim=-1)
        tokens = torch.where(values > 0, tokens, 0).int()  # without probability: may be beyond the draft's vocabulary
        return torch.nn.functional.pad(tokens, (0, RANKS - tokens.shape[-1]))

    def _logits(self, batch: DeviceBatch) -> torch.Tensor:
        """Logits of a forward, padded or cut to the target's vocabulary."""
        logits = self.runner.decoder(self._of_first_rank(batch), self.runner.kv)
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self.vocab_size]

    def _of_first_rank(self, batch: DeviceBatch) -> DeviceBatch:
        """Rank 0's batch, on all ranks of a split model."""
        tp = self.runner.decoder.tp
        if tp.size == 1:
            return batch
        names = ("token_ids", "positions", "slot_mapping", "context_len", "table_rows", "logit_rows")
        own = {name: found for name in names if (found := getattr(batch, name)) is not None}
        packed = torch.cat([tensor.int() for tensor in own.values()])
        tp.broadcast(packed)
        parts = torch.split(packed, [len(tensor) for tensor in own.values()])
        shared: dict[str, Any] = {name: part.to(own[name].dtype) for name, part in zip(own, parts, strict=True)}
        return replace(batch, **shared)

    def _constants(self, shape: RunShape) -> _Constants:
        """Cached, so that graphs find them at the same address."""
        if shape not in self._constants_of:
            width = max(1, shape.width)
            sequences, place = (
                torch.arange(n, dtype=torch.int32, device=self.device) for n in (shape.sequences + 1, shape.reads)
            )
            self._constants_of[shape] = _Constants(
                place=place,
                before=sequences[:-1].long() * shape.reads - 1,
                read_sequence=sequences[:-1].long().repeat_interleave(shape.reads),
                read_start=sequences * shape.reads,
                read_tiles=self._tiles(shape.sequences, shape.reads),
                start=sequences * width,
                tiles=self._tiles(shape.sequences, width),
            )
        return self._constants_of[shape]

    def _tiles(self, sequences: int, queries: int) -> torch.Tensor:
        """Attention tiles of sequences with `queries` rows each."""
        decoder = self.runner.decoder
        tile = decoder.ops.tile_tokens(decoder.heads, prefill=False)
        each = -(-queries // tile)
        sequence = torch.arange(sequences, dtype=torch.int32, device=self.device).repeat_interleave(each)
        first = (torch.arange(each, dtype=torch.int32, device=self.device) * min(tile, queries)).repeat(sequences)
        return torch.stack((sequence, first))

    def _zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=self.device)

    def _float_zeros(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.float32, device=self.device)


_SAGUARO_FAN_OUT = 3  # number of tokens whose probability saguaro_c lowers
