"""Linear layers with tensor parallelism, whose weights are fused from the parts of a checkpoint.

`ColumnLinear` splits the outputs over the ranks, `RowLinear` the inputs (and then adds up), `Embedding` the vocabulary.
Whether a model can be split is checked before (`ssd.models.decoder.check_split`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ssd.kernels.ops import Ops
from ssd.parallel.tensor import TensorParallel


class Linear:
    """A weight (and bias) fused from named parts, and passed to `Ops.prepare` once it is complete."""

    split_dim: int  # which dimension of the weight is split over the ranks: 0 outputs, 1 inputs

    def __init__(
        self,
        ops: Ops,
        tp: TensorParallel,
        parts: Mapping[str, int],
        in_features: int,
        *,
        bias: bool = False,
        gated: bool = False,
        unit: int = 1,
    ) -> None:
        """`unit`: consecutive outputs that belong together, such as those of a head."""
        self.ops = ops
        self.tp = tp
        self.parts = dict(parts)  # checkpoint name -> output features, in the order they are fused
        self.in_features = in_features
        self.unit = unit
        self.has_bias = bias
        self.gated = gated
        self.weight: Any = None
        self.bias: torch.Tensor | None = None
        self._pending: dict[str, torch.Tensor] = {}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Checkpoint names (relative to this layer's parent) and full shapes of everything to load."""
        shapes: dict[str, tuple[int, ...]] = {f"{p}.weight": (n, self.in_features) for p, n in self.parts.items()}
        if self.has_bias:
            shapes |= {f"{p}.bias": (n,) for p, n in self.parts.items()}
        return shapes

    def index(self, name: str) -> tuple[slice, ...]:
        """This rank's share of a tensor of the checkpoint."""
        length = self.parts[name.rpartition(".")[0]]
        if self.split_dim == 0:
            return (self.tp.share(length, self.unit),)
        return (slice(None),) if name.endswith(".bias") else (slice(None), self.tp.share(self.in_features))

    def load(self, name: str, share: torch.Tensor) -> None:
        """Takes this rank's share of one tensor; the last one completes the layer."""
        self._pending[name] = share
        if len(self._pending) == len(self.shapes()):
            self.weight = self._prepared(self._fused("weight"))
            self.bias = self._fused("bias") if self.has_bias else None
            self._pending.clear()

    def _prepared(self, weight: torch.Tensor) -> Any:
        return self.ops.prepare(weight, gated=self.gated)

    def _fused(self, kind: str) -> torch.Tensor:
        tensors = [self._pending[f"{part}.{kind}"] for part in self.parts]
        return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)


class ColumnLinear(Linear):
    """Outputs split over the ranks; each part on its own, so that every rank gets its share of every part."""

    split_dim = 0

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.gated:
            return self.ops.gated_linear(x, self.weight, self.bias)
        return self.ops.linear(x, self.weight, self.bias)


class RowLinear(Linear):
    """Inputs split over the ranks; the partial sums are added up. Only the first rank adds the bias."""

    split_dim = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.tp.group is None:
            return self.ops.linear(x, self.weight, self.bias)
        bias = self.bias if self.tp.rank == 0 else None
        return self.tp.sum(self.ops.linear(x, self.weight, bias, float32=True), x.dtype)


class Embedding(Linear):
    """Token embedding or output head, split by vocabulary; the same weight may be both.

    All ranks have as many rows: those after the last token's are zeros, and their logits are dropped.
    """

    split_dim = 0

    def __init__(
        self,
        ops: Ops,
        tp: TensorParallel,
        parts: Mapping[str, int],
        in_features: int,
        *,
        embedding: bool = False,
        head: bool = False,
    ) -> None:
        super().__init__(ops, tp, parts, in_features)
        self.is_embedding = embedding
        self.is_head = head
        [self.vocab_size] = parts.values()
        self.rows = -(-self.vocab_size // tp.size)  # of one rank

    def index(self, name: str) -> tuple[slice, ...]:
        first = min(self.vocab_size, self.tp.rank * self.rows)
        return (slice(first, min(self.vocab_size, first + self.rows)),)

    def _prepared(self, weight: torch.Tensor) -> Any:
        if len(weight) < self.rows:
            weight = torch.nn.functional.pad(weight, (0, 0, 0, self.rows - len(weight)))
        return self.ops.prepare(weight, embedding=self.is_embedding, product=self.is_head)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.group is None:
            return self.ops.embedding(self.weight, token_ids)
        index = token_ids - self.tp.rank * self.rows
        mine = (index >= 0) & (index < self.rows)
        x = self.ops.embedding(self.weight, index.clamp(0, self.rows - 1))
        return self.tp.sum(torch.where(mine[:, None], x, 0).float(), x.dtype)

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        """Those of the whole vocabulary on the first rank, which samples; of its own rows on the others."""
        return self.tp.gather(self.ops.linear(x, self.weight, float32=True), self.vocab_size)
