"""The one batch layout: per sequence some query tokens at consecutive positions, over paged KV, causal.

A prefill chunk, a decode step and a verification differ in the number of query tokens only. The host uploads slots and
lengths; tokens, positions and KV slots are read from the SequenceState on the device.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from ssd.core import Work
from ssd.execution.state import SequenceState
from ssd.kernels.device import kernels
from ssd.kernels.ops import DeviceBatch, TreePaths
from ssd.kernels.transfers import upload
from ssd.sampling.sampler import Rows

_Ints = npt.NDArray[np.int32]


@dataclass(frozen=True)
class Batch:
    """A forward pass as the host describes it: one entry per sequence in every list."""

    slots: list[int]
    starts: list[int]  # position of the first query token; -1: that of the last decided token
    num_queries: list[int]
    num_logits: list[int]  # logit rows: those of the last query tokens
    trees: bool = False  # drafts are trees

    @classmethod
    def of(cls, works: Seq[Work]) -> Batch:
        return cls(
            [work.slot for work in works],
            [-1 if work.is_decode or work.start is None else work.start for work in works],
            [work.num_queries for work in works],
            [work.num_logits for work in works],
            any(work.proposal.parents is not None for work in works),
        )

    @functools.cached_property
    def num_rows(self) -> int:
        return sum(self.num_queries)

    @functools.cached_property
    def num_logit_rows(self) -> int:
        return sum(self.num_logits)

    @property
    def max_queries(self) -> int:
        return max(self.num_queries)


@dataclass(frozen=True)
class TileSizes:
    """Query tokens of an attention tile."""

    decode: int
    prefill: int


FEW_QUERIES = 16  # per sequence, maximum of query tokens that are cut into decode-size tiles


class BatchInputs:
    """The device tensors of a batch of up to `rows` query tokens and `logits` logit rows, at fixed addresses.

    `gather`: logits of selected rows only; otherwise every row has logits, in order. `prefill`: sequences may have many
    query tokens; at most `decode_tiles` tiles are then of decode size, and the other queries are in larger ones.
    `groups`: of layers, each with KV slots of its own. `tree_depth`: of drafts that are trees, whose rows are in tiles
    of decode size; 0: drafts are chains.
    """

    @torch.inference_mode(False)  # so that they can be written to inside and outside of inference mode
    def __init__(
        self,
        rows: int,
        logits: int,
        *,
        works: int,
        tiles: TileSizes,
        gather: bool,
        device: torch.device,
        prefill: bool = False,
        decode_tiles: int | None = None,
        groups: int = 1,
        tree_depth: int = 0,
    ) -> None:
        self.rows, self.logits, self.works = rows, logits, works
        self.gather, self.prefill, self._tile_sizes = gather, prefill, tiles
        self._decode_tiles = min(rows, rows // tiles.decode + works)
        if decode_tiles is not None:
            self._decode_tiles = min(self._decode_tiles, decode_tiles)
        large = min(rows, rows // tiles.prefill + works) if prefill else 0
        sizes = {"row_work": rows, "slots": works, "starts": works, "query_start": works + 1}
        sizes |= {"first_row": works, "num_logits": works, "logit_rows": logits}
        sizes |= {"tiles": 2 * self._decode_tiles, "prefill_tiles": 2 * large}
        places, total = _aligned(list(sizes.values()))
        computed, end = _aligned([rows, rows, works, logits, logits, logits, *[rows] * groups])
        self.all = torch.zeros(total + end + 2 * logits, dtype=torch.int32, device=device)  # for the other ranks
        self._host = np.empty(total, dtype=np.int32)
        self._meta = self.all[:total]
        self._places = {name: self._host[place] for name, place in zip(sizes, places, strict=True)}
        self._tensors = {name: self._meta[place] for name, place in zip(sizes, places, strict=True)}
        self.tree = _TreeRows.of(rows, logits, tree_depth, device) if tree_depth else None
        self._written: Batch | None = None  # what is there; None: nothing
        self._made: tuple[Seq[torch.Tensor], DeviceBatch] | None = None  # tables, and the batch over them
        self.clear()
        self.token_ids, self.positions, self.context_len, *rest = (
            self.all[total : total + end][place] for place in computed
        )
        self._decided, self.slot_mappings = rest[:3], rest[3:]  # per logit row: slot, position, draft tokens before it
        self._gather = self.all[total + end :].view(torch.int64)

    def __getitem__(self, name: str) -> torch.Tensor:
        return self._tensors[name]

    def clear(self) -> None:
        """Fills the batch with padding: nothing is computed, written or decided."""
        self._host.fill(-1)
        self._places["query_start"][:] = 0
        self._written = None
        upload(self._host.copy(), self._meta)

    def holds(self, batch: Batch) -> bool:
        return batch == self._written

    def write(self, batch: Batch) -> None:
        """Uploads a batch, in one copy; nothing if it is there already, as it is while the same sequences decode."""
        if self.holds(batch):
            return
        place, count = self._places, len(batch.slots)
        self._host.fill(-1)
        queries = np.array(batch.num_queries, dtype=np.int32)
        ends = np.cumsum(queries, dtype=np.int32)
        work = np.arange(count, dtype=np.int32)
        starts = place["query_start"]
        starts[0] = 0
        starts[1 : count + 1], starts[count + 1 :] = ends, ends[-1]
        place["row_work"][: ends[-1]] = np.repeat(work, queries)
        place["slots"][:count], place["starts"][:count] = batch.slots, batch.starts
        self._write_tiles(queries)
        self._write_logit_rows(np.array(batch.num_logits, dtype=np.int32), ends)
        upload(self._host.copy(), self._meta)
        self._written = batch

    def _write_tiles(self, queries: _Ints) -> None:
        """Cuts the queries of each sequence into attention tiles: sequence and first query of each tile."""
        few = np.ones(len(queries), dtype=bool)
        if self.prefill:
            each = -(-queries // self._tile_sizes.decode)
            few = (queries <= FEW_QUERIES) | (self.tree is not None and self._places["starts"][: len(queries)] < 0)
            few &= np.cumsum(np.where(few, each, 0)) <= self._decode_tiles
            _cut(self._places["prefill_tiles"], queries, ~few, self._tile_sizes.prefill)
        _cut(self._places["tiles"], queries, few, self._tile_sizes.decode)

    def _write_logit_rows(self, logits: _Ints, ends: _Ints) -> None:
        place, count = self._places, len(logits)
        place["num_logits"][:count] = logits
        before = np.cumsum(logits) - logits
        first = ends - logits
        if self.gather:
            rows = np.repeat(first - before, logits) + np.arange(int(logits.sum()))
            place["logit_rows"][: len(rows)] = rows
            first = before
        else:
            place["logit_rows"][:] = np.arange(self.logits)
        place["first_row"][:count] = np.where(logits > 0, first, -1)

    def prepare(self, state: SequenceState, tables: Seq[torch.Tensor], block_size: int) -> None:
        """Computes tokens, positions and KV slots from the SequenceState; `tables`: of each group of layers.

        All but the KV slots is the same for each group.
        """
        slots, decided, drafted = self._decided
        for slot_mapping, blocks in zip(self.slot_mappings, tables, strict=True):
            kernels(state.device).rounds.prepare_rows(
                state.view,
                row_work=self["row_work"],
                slots=self["slots"],
                starts=self["starts"],
                query_start=self["query_start"],
                logit_rows=self["logit_rows"],
                tables=blocks,
                tokens=self.token_ids,
                positions=self.positions,
                slot_mapping=slot_mapping,
                context_len=self.context_len,
                gather=self._gather,
                decided_slot=slots,
                decided=decided,
                num_drafted=drafted,
                block_size=block_size,
            )
        if self.tree is not None and state.tree is not None:
            kernels(state.device).rounds.place_nodes(
                state.view,
                parents=state.tree.parents,
                row_work=self["row_work"],
                slots=self["slots"],
                starts=self["starts"],
                query_start=self["query_start"],
                slot_mapping=self.slot_mappings[0],
                logit_rows=self["logit_rows"],
                positions=self.positions,
                paths=self.tree.paths,
                shared=self.tree.shared,
                before=self.tree.before,
                decided_slot=slots,
                decided=decided,
                num_drafted=drafted,
                path_tokens=self.tree.path_tokens,
            )

    def device_batch(self, tables: Seq[torch.Tensor]) -> DeviceBatch:
        """The batch as the decoder takes it, for one pass."""
        if self._made is None or self._made[0] is not tables:
            self._made = tables, self._device_batch(tables)
        return self._made[1].again()

    def _device_batch(self, tables: Seq[torch.Tensor]) -> DeviceBatch:
        batch = DeviceBatch(
            token_ids=self.token_ids,
            positions=self.positions,
            slot_mapping=self.slot_mappings[0],
            query_start=self["query_start"],
            context_len=self.context_len,
            block_tables=tables[0][:, 1:],
            table_rows=self["slots"],
            tiles=self["tiles"].view(2, -1),
            prefill_tiles=self["prefill_tiles"].view(2, -1) if self.prefill else None,
            logit_rows=self._gather if self.gather else None,
            tree=self._paths(self.slot_mappings[0]),
        )
        own = tuple(
            replace(batch, slot_mapping=slots, block_tables=blocks[:, 1:], tree=self._paths(slots))
            for slots, blocks in zip(self.slot_mappings[1:], tables[1:], strict=True)
        )
        return replace(batch, others=own) if own else batch

    def _paths(self, slot_mapping: torch.Tensor) -> TreePaths | None:
        return None if self.tree is None else TreePaths(self.tree.paths, self.tree.shared, slot_mapping)

    def decided(self, state: SequenceState) -> Rows:
        """The positions that the logit rows decide."""
        slots, positions, drafted = self._decided
        return Rows(slots, positions, drafted, state.drafts, None if self.tree is None else self.tree.path_tokens)

    def accept(self, chosen: torch.Tensor, state: SequenceState, out: torch.Tensor) -> None:
        """Accepts the longest correct prefix of every draft and appends it to the state; `out` is for the host."""
        rounds, of_tree = kernels(state.device).rounds, {}
        if state.tree is not None:
            parents = state.tree.parents if self.tree is not None else state.tree.of_chain
            of_tree = {"parents": parents, "path": state.tree.path, "decided_slot": self._decided[0]}
        (rounds.accept_node if of_tree else rounds.accept)(
            state.view,
            chosen=chosen,
            slots=self["slots"],
            first_row=self["first_row"],
            num_logits=self["num_logits"],
            out=out,
            vocab_size=state.vocab_size,
            **of_tree,
        )

    def move_accepted(self, state: SequenceState, tables: torch.Tensor, caches: torch.Tensor, block_size: int) -> None:
        """Moves the KV of accepted nodes of trees to the slots of their positions; `caches`: int64 [tensors, 2], the
        address of each tensor with these block tables and the bytes of a token in it."""
        assert state.tree is not None
        kernels(state.device).rounds.move_accepted(
            state.view,
            path=state.tree.path,
            slots=self["slots"],
            first_row=self["first_row"],
            tables=tables,
            caches=caches,
            block_size=block_size,
        )


class _TreeRows(NamedTuple):
    """What a batch with trees has beside: int32, of rows [rows, …], then of logit rows."""

    paths: torch.Tensor  # see `TreePaths`
    shared: torch.Tensor  # its `decided`
    before: torch.Tensor  # the row of the token before
    path_tokens: torch.Tensor  # [logits, depth]: the draft tokens before the position that it decides

    @classmethod
    def of(cls, rows: int, logits: int, depth: int, device: torch.device) -> _TreeRows:
        shapes = (rows, depth), (rows,), (rows,), (logits, depth)
        return cls(*(torch.zeros(shape, dtype=torch.int32, device=device) for shape in shapes))


def _cut(tiles: _Ints, queries: _Ints, chosen: npt.NDArray[np.bool_], size: int) -> None:
    """Writes the tiles of some sequences: their sequences, then their first queries."""
    each = np.where(chosen, -(-queries // size), 0)
    total = int(each.sum())
    sequences, first = tiles.reshape(2, -1)
    sequences[:total] = np.repeat(np.arange(len(queries), dtype=np.int32), each)
    first[:total] = (np.arange(total) - np.repeat(np.cumsum(each) - each, each)) * size


def _aligned(sizes: Seq[int]) -> tuple[list[slice], int]:
    """Places of int32 tensors in one, and its size. At multiples of 16 bytes, since Triton compiles other kernels for
    other addresses."""
    places, total = [], 0
    for size in sizes:
        places.append(slice(total, total + size))
        total += -(-size // 4) * 4
    return places, total
