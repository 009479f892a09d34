"""The pieces of a draft run, captured once by key and then replayed: CUDA graphs, or recordings on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch

from ssd.execution.graphs import capture
from ssd.kernels.cpu.recording import Recordings

Compute = Callable[[], None]


class PieceGraphs:
    """Graphs by key, which share one memory pool. A key stands for the same kernels over the same tensors each time.

    `enabled`: False where everything is launched eagerly. `on_use`: a key without a graph gets one when it is launched;
    False for the ranks of a split model, which have to capture together. `recordings`: those of the model, on a CPU.
    """

    def __init__(self, *, enabled: bool, on_use: bool, recordings: Recordings | None = None) -> None:
        self.enabled = enabled
        self._on_use = on_use
        self._recordings = recordings
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def launch(self, key: Hashable, compute: Compute, stream: torch.cuda.Stream | None = None) -> None:
        """Replays the key's graph; without one it runs `compute`, and captures it for the next time (`capture`)."""
        if key in self._graphs:
            self._graphs[key].replay()
            return
        if self._recordings is not None:
            self._recordings.run((id(self), key), compute, (self, compute))
            return
        compute()
        if self._on_use:
            self.capture(key, compute, stream)

    def clear(self) -> None:
        """Drops them all, with the memory that they keep."""
        self._graphs.clear()
        if self._recordings is not None:
            self._recordings.clear()

    def capture(self, key: Hashable, compute: Compute, stream: torch.cuda.Stream | None = None) -> None:
        """Captures a graph, unless there is one. The kernels must have been compiled.

        `stream`: of a part of the GPU, in which the graph is to run; None: on the whole GPU.
        """
        if not self.enabled or key in self._graphs:
            return
        current = torch.cuda.current_stream()
        own = stream or (current if current != torch.cuda.default_stream() else None)
        self._graphs[key], _ = capture(compute, self._pool, stream=own)
        self._pool = self._graphs[key].pool()
