"""How a step of a draft run is computed: the seam between runs (`ssd.drafting.runner`) and kinds of drafts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from ssd.drafting.buffers import DraftBuffers
from ssd.drafting.shapes import RunShape, RunShapes
from ssd.execution.runner import ModelRunner
from ssd.kernels.ops import DeviceBatch


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
    """A step of an autoregressive draft model: one forward pass."""

    def __init__(self, runner: ModelRunner, shapes: RunShapes) -> None:
        self.runner = runner
        self.buffers = DraftBuffers(runner, shapes)

    def snapshot(self, n: int) -> None:
        return

    def read(self, shape: RunShape, logit_rows: torch.Tensor | None) -> torch.Tensor:
        batch = self.buffers.read_batch(shape, self.buffers.tables(shape), logit_rows)
        return forward(self.runner, batch, beside_target=shape.branches)

    def begin_branches(self, shape: RunShape) -> None:
        return

    def extend(self, shape: RunShape, depth: int) -> torch.Tensor:
        batch = self.buffers.row_batch(shape, depth, self.buffers.tables(shape))
        return forward(self.runner, batch, beside_target=shape.branches)


def forward(runner: ModelRunner, batch: DeviceBatch, *, beside_target: bool = False) -> torch.Tensor:
    """Logits of a forward pass, padded or cut to the target's vocabulary.

    `beside_target`: the target computes at the same time, so that it takes no kernel that needs the whole GPU.
    """
    batch, vocab_size = _of_first_rank(runner, batch), runner.state.vocab_size
    logits = (runner.decoder.by_layers if beside_target else runner.decoder)(batch, runner.kv)
    missing = vocab_size - logits.shape[-1]
    if missing > 0:
        logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
    return logits[:, :vocab_size]


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
