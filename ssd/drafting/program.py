"""What a draft model does in one go: reads the newest tokens of some sequences, then writes ahead of them.

Every depth is one forward over all rows; tokens, positions and slots of the next depth are computed on the device, so
no host stands between two of them. On CUDA every piece (the reading, each depth) is a graph.

`write` continues each sequence once. `branch` prepares for what a verification may decide: a lane's tokens are then the
draft that is being verified, and each of its forks is a place in it together with a token that may come instead of the
next one; every fork is continued in a strip of KV slots of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from ssd.core import Sequence
from ssd.drafting.choice import Chooser, Chosen, Needs, Rows, adjustments
from ssd.execution.pack import block_table_array
from ssd.execution.runner import ModelRunner
from ssd.kernels.ops import Branches, DeviceBatch

Clock = float | torch.cuda.Event
RANKS = 16  # of a place's tokens, how many can be forks
_FEW_READS = 5  # tokens of a lane after a draft of four, at most
_FIXED = 8  # columns of a lane's integers before its tokens


@dataclass(frozen=True)
class Lane:
    """A sequence as the program sees it: tokens to be read, at consecutive positions, before anything is written."""

    first: int  # position of the first token
    tokens: list[int]
    text: Sequence  # what is decided, over the draft's KV blocks
    seed: int  # as `noise.seed_key` gives it, signed
    forks: list[tuple[int, int]] = field(default_factory=list)  # (after which token, which rank of what may follow)


class Form(NamedTuple):
    """Of one run: how many lanes, how many tokens and rows each, and what the laws need."""

    lanes: int
    reads: int  # tokens of a lane that are read; lanes with fewer are padded
    width: int  # 0: `write`, one row a lane; else forks a lane
    needs: Needs

    @property
    def rows(self) -> int:
        return self.lanes * max(1, self.width)


class Fixed(NamedTuple):
    """Integers that are the same in every run of a form."""

    place: torch.Tensor  # [reads]
    last_of: torch.Tensor  # [lanes]: a row before the first of each lane's tokens
    read_start: torch.Tensor  # [lanes + 1]
    read_tiles: torch.Tensor
    start: torch.Tensor  # [lanes + 1], of the rows
    tiles: torch.Tensor
    strips: torch.Tensor  # [rows]: where each row's own KV begins


class Run:
    """A run under way. What it wrote can be read at any time later, its laws until the next run begins."""

    def __init__(self, program: Program, form: Form, depth: int, began: Clock) -> None:
        self.form = form
        self.depth = depth  # forwards after the reading
        self._program = program
        self._chain = program.fetch(program.chain[: form.rows, : depth + 1])
        self._confidence = program.fetch(program.confidence[: form.rows, : depth + 1])
        self._likeliest = program.fetch(program.likeliest[: form.lanes * form.reads if form.width else 0])
        self._began, self._ended = began, program.clock()

    def wait(self) -> None:
        if not isinstance(self._ended, float):
            self._ended.synchronize()

    @functools.cached_property
    def tokens(self) -> list[list[int]]:
        """Of every row: the token that it begins with (a fork, or the first written one), then the written ones."""
        self.wait()
        found: list[list[int]] = self._chain.tolist()
        return found

    @functools.cached_property
    def confidence(self) -> list[list[float]]:
        """How sure the draft was of each; of a fork it says nothing."""
        self.wait()
        found: list[list[float]] = self._confidence.tolist()
        return found

    @functools.cached_property
    def likeliest(self) -> list[list[list[int]]]:
        """Of every lane, for every token that was read: what may follow it, likeliest first (`branch` only)."""
        self.wait()
        ranked: list[list[list[int]]] = self._likeliest.view(self.form.lanes, -1, RANKS).tolist()
        return ranked

    @property
    def seconds(self) -> float:
        """How long it took."""
        self.wait()
        if isinstance(self._began, float) or isinstance(self._ended, float):
            return float(self._ended) - float(self._began)  # type: ignore[arg-type]
        return float(self._began.elapsed_time(self._ended)) / 1e3

    def laws(self, row: int, first: int, last: int) -> torch.Tensor:
        """What a row's tokens first..last-1 were drawn from: float64 [tokens, V]."""
        return self._program.laws_of(row, first, last)


class Program:
    """Fixed buffers, and the pieces that run over them. `lookahead` is the most tokens that are written ahead."""

    def __init__(
        self,
        runner: ModelRunner,
        chooser: Chooser,
        *,
        lookahead: int,
        max_lanes: int,
        max_rows: int,
        widths: Seq[int],
        max_len: int,
        vocab_size: int,
        graphs: bool,
    ) -> None:
        self.runner = runner
        self.chooser = chooser
        self.lookahead = lookahead
        self.reads = lookahead + 1  # the most tokens of a lane
        self.max_lanes = max_lanes
        self.widths = sorted(widths)  # forks of a lane that there are forms for
        self.max_width = max(widths, default=0)
        self.max_rows = max_rows
        self.vocab_size = vocab_size  # the target's
        self.interrupted: Callable[[], bool] = lambda: False  # asked between two depths, where there are no graphs
        device = runner.decoder.device
        self.on_cuda = device.type == "cuda"
        self.stream = torch.cuda.Stream(priority=-1) if self.on_cuda else None  # type: ignore[no-untyped-call]
        self._decoder = runner.decoder
        width = _FIXED + self.reads + 2 * self.max_width
        self._meta = torch.zeros((max_lanes, width + width % 2), dtype=torch.int32, device=device)
        max_blocks = -(-(max_len + self.reads) // runner.block_size)
        self._tables = torch.zeros((max_lanes, max_blocks), dtype=torch.int32, device=device)
        self._staging = torch.empty(
            self._meta.numel() + self._tables.numel(), dtype=torch.int32, pin_memory=self.on_cuda
        )
        self._staged = torch.cuda.Event() if self.on_cuda else None  # type: ignore[no-untyped-call]
        self._written_tables: list[list[int]] = []
        self.chain = torch.zeros((max_rows, lookahead + 1), dtype=torch.int32, device=device)
        self.confidence = torch.zeros((max_rows, lookahead + 1), dtype=torch.float32, device=device)
        self.likeliest = torch.zeros((max_lanes * self.reads, RANKS), dtype=torch.int32, device=device)
        laws = (lookahead + 1, max_rows, vocab_size) if chooser.drawn else (0,)
        self._laws = torch.zeros(laws, dtype=torch.float64, device=device)  # of each column of the chain
        self._fixed_of: dict[Form, Fixed] = {}
        self._factors = self._added = torch.empty(0)  # [lanes, V], when first needed
        self._strips = runner.scratch_slot  # every row's strip, then one slot for what nobody reads
        self._nowhere = self._strips + max_rows * lookahead
        self._graphs: dict[tuple[Form, int], torch.cuda.CUDAGraph] | None = {} if graphs and self.on_cuda else None

    @staticmethod
    def scratch_slots(max_rows: int, lookahead: int) -> int:
        return max_rows * lookahead + 1

    # --- running ------------------------------------------------------------------------------------------------------

    def width_of(self, lanes: int) -> int:
        """How many forks each of some lanes may have."""
        return min(self.max_width, self.max_rows // self._bucket(lanes))

    def write(self, lanes: list[Lane], count: int) -> Run:
        """`count` tokens after the last one of each lane: the tokens of each row."""
        return self._run(lanes, 0, count - 1)

    def branch(self, lanes: list[Lane], count: int) -> Run:
        """`count` tokens after each fork; row `lane * width + i` is fork i, and `width` the run's `form.width`."""
        widest = max(len(lane.forks) for lane in lanes)
        if self.on_cuda:
            widest = min(self.width_of(len(lanes)), next(width for width in self.widths if width >= widest))
        return self._run(lanes, widest, count)

    def capture(self, lanes: list[int]) -> None:
        """Records the graphs of plain laws now, so that no request waits for them."""
        if self._graphs is None:
            return
        with self.on_stream():
            for count in sorted({self._bucket(n) for n in lanes}, reverse=True):
                for width in {0, *(min(width, self.max_rows // count) for width in self.widths)}:
                    for reads in {self._reads(1), self.reads}:
                        self._graph(Form(count, reads, width, Needs(True)), -1)
                    for piece in range(self.lookahead if width else self.lookahead - 1):
                        self._graph(Form(count, self.reads, width, Needs(True)), piece)

    def _run(self, lanes: list[Lane], width: int, depth: int) -> Run:
        needs = Needs.of([lane.text.params for lane in lanes])
        if self.on_cuda:
            needs = needs._replace(sampled=True)  # its kernel makes no noise for greedy rows
        form = Form(self._bucket(len(lanes)), self._reads(max(len(lane.tokens) for lane in lanes)), width, needs)
        with self.on_stream():
            began = self.clock()
            self._stage(lanes, form)
            self._piece(form, -1)
            done = 0
            while done < depth and not (self._graphs is None and self.interrupted()):
                self._piece(form, done)
                done += 1
            return Run(self, form, done, began)

    def clock(self) -> Clock:
        """Now; on a GPU, when the stream gets here."""
        if not self.on_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def fetch(self, values: torch.Tensor) -> torch.Tensor:
        """A copy on the host, there when the stream has come so far."""
        if not self.on_cuda:
            return values.clone()
        return torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)

    def laws_of(self, row: int, first: int, last: int) -> torch.Tensor:
        with self.on_stream():
            return self._laws[first:last, row].clone()

    def join(self) -> None:
        """Lets the current stream wait for this one."""
        if self.stream is not None:
            torch.cuda.current_stream().wait_stream(self.stream)

    def _bucket(self, lanes: int) -> int:
        if not self.on_cuda:
            return lanes
        return min(self.max_lanes, 1 << (lanes - 1).bit_length())

    def _reads(self, count: int) -> int:
        """Tokens of a lane that there are graphs for: few, or all."""
        if not self.on_cuda:
            return count
        return min(_FEW_READS, self.reads) if count <= _FEW_READS else self.reads

    def on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _piece(self, form: Form, piece: int) -> None:
        if self._graphs is None:
            self._compute(form, piece)
        else:
            self._graph(form, piece).replay()

    def _graph(self, form: Form, piece: int) -> torch.cuda.CUDAGraph:
        graphs = self._graphs
        if graphs is None:
            raise AssertionError("graphs are off")
        if piece >= 0:  # how much was read is the same to it
            form = form._replace(reads=self.reads)
        if (form, piece) not in graphs:
            self._compute(form, piece)  # compiles kernels, which a capture must not; doing a piece twice does no harm
            pool = next(iter(graphs.values())).pool() if graphs else None
            torch.cuda.current_stream().synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=pool, stream=self.stream):
                self._compute(form, piece)
            graphs[form, piece] = graph
        return graphs[form, piece]

    # --- staging ------------------------------------------------------------------------------------------------------

    def _stage(self, lanes: list[Lane], form: Form) -> None:
        """One copy for all integers of the lanes; one for the used corner of their block tables, if it has changed."""
        if self._staged is not None:
            self._staged.synchronize()
        used = form.lanes * self._meta.shape[1]
        meta = self._staging[:used].view(form.lanes, -1)
        self._write(meta.numpy(), lanes)
        self._meta[: form.lanes].copy_(meta, non_blocking=True)
        if form.needs.adjusted:
            self._stage_adjustments(lanes)
        tables = [lane.text.blocks for lane in lanes]
        if tables != self._written_tables:
            table = block_table_array(tables)
            corner = self._staging[used:][: table.size].view(table.shape)
            np.copyto(corner.numpy(), table)
            self._tables[: table.shape[0], : table.shape[1]].copy_(corner, non_blocking=True)
            self._written_tables = [list(table) for table in tables]
        if self._staged is not None:
            self._staged.record()

    def _stage_adjustments(self, lanes: list[Lane]) -> None:
        """For rare requests: one row of the vocabulary for each lane."""
        if not len(self._factors):
            shape, device = (self.max_lanes, self.vocab_size), self._meta.device
            self._factors, self._added = torch.ones(shape, device=device), torch.zeros(shape, device=device)
        self._factors[: len(lanes)], self._added[: len(lanes)] = 1.0, 0.0
        for i, lane in enumerate(lanes):
            tokens, factors, added = adjustments(lane.text)
            index = torch.tensor(tokens, dtype=torch.int64, device=self._meta.device)
            self._factors[i, index] = torch.tensor(factors, device=index.device)
            self._added[i, index] = torch.tensor(added, device=index.device)

    def _write(self, values: np.ndarray, lanes: list[Lane]) -> None:
        values[:] = 0
        used, forks = values[: len(lanes)], _FIXED + self.reads
        params = [lane.text.params for lane in lanes]
        used[:, :3] = [(lane.first, len(lane.tokens), lane.text.params.top_k) for lane in lanes]
        used[:, 3:6].view(np.float32)[:] = [(p.temperature, p.min_p, p.top_p) for p in params]
        used[:, 6:8].view(np.int64)[:, 0] = [lane.seed for lane in lanes]
        for row, lane in zip(used, lanes, strict=True):
            row[_FIXED : _FIXED + len(lane.tokens)] = lane.tokens
            if lane.forks:
                after, rank = zip(*lane.forks, strict=True)
                row[forks : forks + len(after)] = after
                row[forks + self.max_width : forks + self.max_width + len(rank)] = rank

    # --- the pieces ---------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def _compute(self, form: Form, piece: int) -> None:
        """Piece -1 reads and finds each row's first token; piece s extends every row by one token."""
        if piece >= 0:
            self._extend(form, piece)
        elif form.width == 0:
            self._read_and_choose(form)
        else:
            self._read_and_fork(form)

    def _read_and_choose(self, form: Form) -> None:
        meta = self._meta[: form.lanes]
        count = meta[:, 1].clamp(min=1)
        logits = self._read(form, self._fixed(form).last_of + count)
        self._keep(form, 0, self.chooser.choose(logits, self._rows(form, meta[:, 0] + count), form.needs))

    def _read_and_fork(self, form: Form) -> None:
        meta = self._meta[: form.lanes]
        place = self._fixed(form).place
        following = meta[:, _FIXED + 1 : _FIXED + form.reads + 1]  # a column further: what each token is followed by
        excluded = torch.where(place + 1 < meta[:, 1:2], following, -1).flatten()
        rows = self._rows(form, meta[:, 0]).repeated(form.reads, meta[:, :1] + place + 1)
        ranked = self.chooser.likeliest(self._read(form, None), rows, form.needs, excluded, RANKS)
        self.likeliest[: len(ranked)].copy_(ranked)
        after, rank = self._forks(form)
        roots = ranked.view(form.lanes, -1).gather(1, (after * RANKS + rank).long())
        self.chain[: form.rows, 0].copy_(roots.flatten())

    def _forks(self, form: Form) -> tuple[torch.Tensor, torch.Tensor]:
        start = _FIXED + self.reads
        meta = self._meta[: form.lanes, start:]
        return meta[:, : form.width], meta[:, self.max_width : self.max_width + form.width]

    def _rows(self, form: Form, positions: torch.Tensor) -> Rows:
        """The parameters of each lane, for one position of it."""
        meta = self._meta[: form.lanes]
        floats = meta.view(torch.float32)
        seeds = meta.view(torch.int64)[:, 3].contiguous()
        columns = (floats[:, 3], floats[:, 4], floats[:, 5], meta[:, 2])
        return Rows(seeds, positions, *(column.contiguous() for column in columns))

    def _read(self, form: Form, logit_rows: torch.Tensor | None) -> torch.Tensor:
        """A forward over every lane's tokens, whose KV is kept; tokens that a lane does not have go nowhere."""
        meta, reads, fixed = self._meta[: form.lanes], form.reads, self._fixed(form)
        place = fixed.place
        positions = meta[:, :1] + place
        size, tables = self.runner.block_size, self._tables[: form.lanes]
        real = tables.gather(1, (positions // size).long()) * size + positions % size
        slots = torch.where(place < meta[:, 1:2], real, self._nowhere)
        batch = DeviceBatch(
            token_ids=meta[:, _FIXED : _FIXED + reads].flatten().contiguous(),  # one token each: a view otherwise
            positions=positions.flatten(),
            slots=slots.flatten(),
            query_start=fixed.read_start,
            context_len=meta[:, 0] + reads,
            block_tables=tables,
            tiles=fixed.read_tiles,
            logit_rows=logit_rows,
            split_kv=True,
        )
        return self._logits(form, batch)

    def _extend(self, form: Form, depth: int) -> None:
        """A forward over every row's newest token, at the position after the one before it."""
        width, fixed = max(1, form.width), self._fixed(form)
        meta = self._meta[: form.lanes]
        read = self._forks(form)[0] + 1 if form.width else meta[:, 1:2].clamp(min=1)  # tokens before the first own one
        positions = (meta[:, :1] + read + depth).flatten()
        batch = DeviceBatch(
            token_ids=self.chain[: form.rows, depth].contiguous(),
            positions=positions,
            slots=fixed.strips + depth,
            query_start=fixed.start,
            context_len=positions[::width].contiguous(),
            block_tables=self._tables[: form.lanes],
            tiles=fixed.tiles,
            logit_rows=None,
            split_kv=True,
            branches=Branches(depth, self.lookahead),
        )
        logits = self._logits(form, batch)
        rows = self._rows(form, meta[:, 0]).repeated(width, positions + 1)
        self._keep(form, depth + 1, self.chooser.choose(logits, rows, form.needs))

    def _keep(self, form: Form, column: int, chosen: Chosen) -> None:
        self.chain[: form.rows, column].copy_(chosen.tokens)
        self.confidence[: form.rows, column].copy_(chosen.confidence)
        if chosen.laws is not None:
            self._laws[column, : form.rows].copy_(chosen.laws)

    def _fixed(self, form: Form) -> Fixed:
        """Made once: a graph is captured after its form has run."""
        if form not in self._fixed_of:
            width = max(1, form.width)
            lanes, rows, place = (
                torch.arange(n, dtype=torch.int32, device=self._meta.device)
                for n in (form.lanes + 1, form.rows, form.reads)
            )
            self._fixed_of[form] = Fixed(
                place=place,
                last_of=lanes[:-1].long() * form.reads - 1,
                read_start=lanes * form.reads,
                read_tiles=self._tiles(form.lanes, form.reads),
                start=lanes * width,
                tiles=self._tiles(form.lanes, width),
                strips=self._strips + rows * self.lookahead,
            )
        return self._fixed_of[form]

    def _tiles(self, lanes: int, queries: int) -> torch.Tensor:
        """Every lane's queries, cut into attention tiles."""
        tile = self._decoder.ops.tile_tokens(self._decoder.layers[0].heads, True)
        device, each = self._meta.device, -(-queries // tile)
        lane = torch.arange(lanes, dtype=torch.int32, device=device).repeat_interleave(each)
        first = (torch.arange(each, dtype=torch.int32, device=device) * min(tile, queries)).repeat(lanes)
        return torch.stack((lane, first))

    def _logits(self, form: Form, batch: DeviceBatch) -> torch.Tensor:
        """Over the target's vocabulary; every lane has as many rows as the others."""
        logits = self._decoder(batch, self.runner.kv)
        missing = self.vocab_size - logits.shape[-1]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        logits = logits[:, : self.vocab_size]
        if not form.needs.adjusted:
            return logits
        rows = logits.view(form.lanes, -1, self.vocab_size)
        factors, added = self._factors[: form.lanes, None], self._added[: form.lanes, None]
        return (torch.where(rows > 0, rows / factors, rows * factors) + added).flatten(0, 1)
