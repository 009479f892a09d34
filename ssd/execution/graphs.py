"""CUDA graphs of batches: one launch instead of hundreds.

One graph per bucket of rows (query tokens). A batch of any shape that fits a bucket is written into the graph's fixed
buffers and padded there; kernels skip padding, and row-invariance sees to it that it changes no bits.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ssd.core import Batch
from ssd.execution.pack import block_table_array, make_tiles
from ssd.kernels.ops import DeviceBatch
from ssd.models.decoder import Decoder, KVCache


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, then every 16 to 64, every 32 to 128, every 64 beyond; the last one is `max_rows`."""
    steps = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 128, 32), *range(128, max_rows + 1, 64)]
    return [s for s in steps if s < max_rows] + [max_rows]


# Prompts of up to so many tokens, with all that is decoded beside them; the device is busy with more for longer than
# the host needs to launch it.
PREFILL_BUCKETS = (64, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    meta: (
        torch.Tensor
    )  # int32, `rows` each: token_ids, positions, slots, tiles (2), context_len, logit_rows; query_start
    logits: torch.Tensor


class BatchGraphs:
    """Graphs for every bucket, over one shared block table, for batches with at most `most` sequences.

    Decode-size batches (`split_kv`) get the logits of all their rows, the others of at most `most`.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: KVCache,
        buckets: Seq[int],
        *,
        most: int,
        max_blocks: int,
        split_kv: bool,
        share: BatchGraphs | None = None,
    ) -> None:
        """`share`: graphs that never run at the same time, to use the memory of."""
        self.decoder = decoder
        self.kv = kv
        self.buckets = sorted(buckets)
        self.most = most
        self.split_kv = split_kv
        self.tile_tokens = decoder.ops.tile_tokens(decoder.layers[0].heads, split_kv)
        device, max_rows = decoder.device, self.buckets[-1]
        self._tables = torch.zeros((most, max_blocks), dtype=torch.int32, device=device)
        self._staging = torch.empty(8 * max_rows + 1 + most * max_blocks, dtype=torch.int32, pin_memory=True)
        self._staged = torch.cuda.Event()  # type: ignore[no-untyped-call] # the device has read the staging buffer
        self._written_tables: list[list[int]] = []
        self._graphs: dict[int, _Graph] = {}
        self._pool: Any = share._pool if share is not None else None
        for rows in reversed(self.buckets):  # the largest first: the others then reuse its scratch memory
            self._graphs[rows] = self._capture(rows)
            self._pool = self._graphs[rows].graph.pool()

    def replay(self, batch: Batch) -> torch.Tensor:
        rows = self.bucket(batch.num_tokens)
        graph = self._graphs[rows]
        self._write(batch, rows, graph.meta)
        graph.graph.replay()
        if not self.split_kv or len(batch.logit_rows) == batch.num_tokens:
            return graph.logits[: len(batch.logit_rows)]
        return graph.logits[batch.logit_rows]

    def takes(self, batch: Batch) -> bool:
        return batch.num_tokens <= self.buckets[-1] and max(len(batch.block_tables), len(batch.logit_rows)) <= self.most

    def bucket(self, num_tokens: int) -> int:
        return next(rows for rows in self.buckets if rows >= num_tokens)

    def graph(self, rows: int) -> torch.cuda.CUDAGraph:
        """The graph of one bucket, as it was last written: for timing it alone."""
        return self._graphs[rows].graph

    def _write(self, batch: Batch, rows: int, meta: torch.Tensor) -> None:
        """One copy for the bucket's integers; one for the used corner of the block tables, when they have changed."""
        self._staged.synchronize()
        values = self._integers(batch, rows)
        self._staging.numpy()[: len(values)] = values
        meta.copy_(self._staging[: len(values)], non_blocking=True)
        if batch.block_tables != self._written_tables:
            table = block_table_array(batch.block_tables)
            corner = self._staging[len(values) :][: table.size].view(table.shape)
            np.copyto(corner.numpy(), table)
            self._tables[: table.shape[0], : table.shape[1]].copy_(corner, non_blocking=True)
            self._written_tables = [list(table) for table in batch.block_tables]
        self._staged.record()

    def _integers(self, batch: Batch, rows: int) -> list[int]:
        """token_ids, positions, slots, tiles, context_len, logit_rows, each padded to `rows`; then query_start."""
        sequences, firsts = make_tiles(batch.query_start, self.tile_tokens)
        flat: list[int] = []
        columns = ((batch.token_ids, 0), (batch.positions, 0), (batch.slots, -1), (sequences, -1), (firsts, 0))
        for values, padding in (*columns, (batch.context_len, 0), (batch.logit_rows, 0)):
            flat += values
            flat += [padding] * (rows - len(values))
        return flat + batch.query_start + [batch.num_tokens] * (rows + 1 - len(batch.query_start))

    def _capture(self, rows: int) -> _Graph:
        meta = torch.zeros(8 * rows + 1, dtype=torch.int32, device=self.decoder.device)
        meta[2 * rows : 4 * rows] = -1  # all padding: nothing is written while warming up
        parts = [meta[i * rows : (i + 1) * rows] for i in range(7)]
        batch = DeviceBatch(
            token_ids=parts[0],
            positions=parts[1],
            slots=parts[2],
            tiles=meta[3 * rows : 5 * rows].view(2, rows),
            context_len=parts[5],
            query_start=meta[7 * rows :],
            block_tables=self._tables,
            logit_rows=None if self.split_kv else parts[6][: self.most],
            split_kv=self.split_kv,
        )
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self.decoder(batch, self.kv)  # compiles kernels, which a capture must not
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            logits = self.decoder(batch, self.kv)
        return _Graph(graph, meta, logits)
