"""How a step of a draft run is computed: the seam between runs (`ssd.drafting.runner`) and kinds of drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from ssd.drafting.buffers import DraftBuffers
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.execution.runner import ModelRunner
from ssd.kernels.cuda.persistent import PersistentStep
from ssd.kernels.ops import DeviceBatch
from ssd.models.persistent import persistent_step


class DraftStep(Protocol):
    """Computes the logits that the tokens of a run are chosen from: in the steps of a run, in this order."""

    runner: ModelRunner
    buffers: DraftBuffers

    def snapshot(self, n: int) -> None:
        """Copies what `branch` needs besides its inputs, and the verification of these n sequences changes."""

    def read(self, shape: RunShape, logit_rows: torch.Tensor | None) -> torch.Tensor:
        """Reads each sequence's newest tokens; logits of these rows, or (None) after every token."""

    def begin_branches(self, shape: RunShape) -> None:
        """The branches are planned (`DraftBuffers.after`)."""

    def extend(self, shape: RunShape, depth: int) -> torch.Tensor:
        """Logits after the newest token of every row, which is its `depth`-th."""


class ModelStep:
    """A step of an autoregressive draft model: one forward pass.

    `shared`: branches are prepared while the target computes on the same GPU, so they are several kernels a step.
    """

    def __init__(self, runner: ModelRunner, shapes: RunShapes, *, shared: bool = False) -> None:
        self.runner, self._shared = runner, shared
        self.buffers = DraftBuffers(runner, shapes)
        self.one_kernel: PersistentStep | None = None  # for small batches, takes the whole GPU

    def use_one_kernel(self) -> None:
        """Makes small steps one kernel each, where there is such a kernel. The KV must be unused."""
        self.one_kernel = persistent_step(self.runner.decoder, self.runner.kv)

    def snapshot(self, n: int) -> None:
        return

    def read(self, shape: RunShape, logit_rows: torch.Tensor | None) -> torch.Tensor:
        return self._logits(shape, self.buffers.read_batch(shape, self.buffers.tables(shape), logit_rows))

    def begin_branches(self, shape: RunShape) -> None:
        return

    def extend(self, shape: RunShape, depth: int) -> torch.Tensor:
        return self._logits(shape, self.buffers.row_batch(shape, depth, self.buffers.tables(shape)))

    def _logits(self, shape: RunShape, batch: DeviceBatch) -> torch.Tensor:
        step = None if self._shared and shape.branches else self.one_kernel
        if step is None or not step.takes(batch):
            return forward(self.runner, batch)
        return step(batch)[:, : self.runner.state.vocab_size]


def forward(runner: ModelRunner, batch: DeviceBatch) -> torch.Tensor:
    """Logits of a forward pass, without tokens that the target does not have."""
    return runner.decoder(_of_first_rank(runner, batch), runner.kv)[:, : runner.state.vocab_size]


def _of_first_rank(runner: ModelRunner, batch: DeviceBatch) -> DeviceBatch:
    """Rank 0's batch, on all ranks of a split model."""
    tp = runner.decoder.tp
    if tp.size == 1:
        return batch
    names = ("token_ids", "positions", "slot_mapping", "context_len", "table_rows", "logit_rows")
    own = {name: found for name in names if (found := getattr(batch, name)) is not None}
    packed = torch.cat([tensor.int() for tensor in own.values()])
    tp.broadcast(packed)
    parts = torch.split(packed, [len(tensor) for tensor in own.values()])
    shared: dict[str, Any] = {name: part.to(own[name].dtype) for name, part in zip(own, parts, strict=True)}
    return replace(batch, **shared)
