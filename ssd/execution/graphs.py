"""CUDA graphs of forward passes: one launch instead of hundreds.

One graph per bucket of rows (query tokens). A batch that fits a bucket is written into the graph's fixed buffers and
padded; kernels skip padding, and row-invariant kernels give the same bits with and without it.
"""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from ssd.execution.batch import Batch, BatchInputs, TileSizes


def row_buckets(max_rows: int) -> list[int]:
    """1, 2, 4, 8, 16, then every 16 to 64, every 32 to 128, every 64 beyond; the last one is `max_rows`."""
    steps = [1, 2, 4, 8, *range(16, 64, 16), *range(64, 128, 32), *range(128, max_rows + 1, 64)]
    return [s for s in steps if s < max_rows] + [max_rows]


# Rows of batches with prefill chunks. Larger batches run eagerly: the device is busy for longer than the host takes to
# launch them.
PREFILL_BUCKETS = (64, 128, 192, 256, 384, 512)
_DECODE_TILES = 32  # in graphs of batches with prefill chunks: programs without a tile take time too


@dataclass(eq=False)
class BatchGraph:
    """A captured forward pass with its inputs and its logits."""

    inputs: BatchInputs
    graph: torch.cuda.CUDAGraph
    logits: torch.Tensor
    in_part: torch.cuda.CUDAGraph | None = None  # the same, in a part of the GPU beside a draft model


class BatchGraphs:
    """Graphs for every bucket, for batches of at most `most` sequences; `capture` comes before use.

    Batches with prefill chunks (`prefill`) have logits of at most `most` rows, decode-size batches of all.
    """

    def __init__(
        self,
        buckets: Seq[int],
        *,
        most: int,
        tiles: TileSizes,
        prefill: bool,
        device: torch.device,
        groups: int = 1,
        tree_depth: int = 0,
    ) -> None:
        self.buckets = sorted(buckets)
        self.most = most
        self.inputs = {
            rows: BatchInputs(
                rows,
                most if prefill else rows,
                works=min(rows, most),
                tiles=tiles,
                gather=prefill,
                device=device,
                prefill=prefill,
                decode_tiles=_DECODE_TILES if prefill and not tree_depth else None,
                groups=groups,
                tree_depth=tree_depth,
            )
            for rows in self.buckets
        }
        self._graphs: dict[int, BatchGraph] = {}

    def capture(self, forward: Callable[[BatchInputs], torch.Tensor], pool: Any) -> Any:
        """`forward` computes logits. `pool`: the memory pool of graphs that never run concurrently with these; returns
        that of these."""
        for rows, inputs in reversed(self.inputs.items()):  # the largest first: the others reuse its memory
            graph, logits = capture(lambda inputs=inputs: forward(inputs), pool)  # type: ignore[misc]
            self._graphs[rows] = BatchGraph(inputs, graph, logits)
            pool = graph.pool()
        return pool

    def capture_in_part(
        self, forward: Callable[[BatchInputs], torch.Tensor], stream: torch.cuda.Stream, most_rows: int
    ) -> None:
        """Captures the graphs for up to `most_rows` rows once more, on a stream of a part of the GPU.

        A graph keeps the part that it was captured in, on whatever stream it is replayed. The logits are at the same
        place, so the same decision follows.
        """
        for rows in self.buckets[: bisect.bisect_left(self.buckets, most_rows) + 1]:
            found = self._graphs[rows]
            found.in_part, _ = capture(
                lambda found=found: found.logits.copy_(forward(found.inputs)),  # type: ignore[misc]
                found.graph.pool(),
                stream=stream,
            )

    def takes(self, batch: Batch) -> bool:
        return batch.num_rows <= self.buckets[-1] and max(len(batch.slots), batch.num_logit_rows) <= self.most

    def of(self, num_rows: int) -> BatchGraph:
        """The graph of the smallest bucket for this number of rows."""
        return self._graphs[next(rows for rows in self.buckets if rows >= num_rows)]


def capture(
    compute: Callable[[], Any], pool: Any, *, stream: torch.cuda.Stream | None = None
) -> tuple[torch.cuda.CUDAGraph, Any]:
    """Captures what `compute` launches. It must have run before: kernels cannot be compiled during a capture."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream or _capture_stream()):
        graph.capture_begin(pool)
        try:
            result = compute()
        finally:
            graph.capture_end()
    return graph, result


@functools.cache
def _capture_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream()  # type: ignore[no-untyped-call]
