"""Linear layers with tensor parallelism, whose weights are fused from the parts of a checkpoint.

`ColumnLinear` splits the outputs over the ranks, `RowLinear` the inputs (and then adds up), `Embedding` the vocabulary.
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
    ) -> None:
        self.ops = ops
        self.tp = tp
        self.parts = dict(parts)  # checkpoint name -> output features, in the order they are fused
        self.in_features = in_features
        for name, length in self.parts.items() if self.split_dim == 0 else (("in_features", in_features),):
            tp.share(length, name)
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

    def load(self, name: str, tensor: torch.Tensor) -> None:
        """Takes one full tensor, keeps this rank's share of it; the last one completes the layer."""
        self._pending[name] = self._share(tensor)
        if len(self._pending) == len(self.shapes()):
            self.weight = self._prepared(self._fused("weight"))
            self.bias = self._fused("bias") if self.has_bias else None
            self._pending.clear()

    def _prepared(self, weight: torch.Tensor) -> Any:
        return self.ops.prepare(weight, gated=self.gated)

    def _share(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() == 1 and self.split_dim == 1:  # every rank's sum is partial: only one may add the bias
            return tensor if self.tp.rank == 0 else torch.zeros_like(tensor)
        return self.tp.slice(tensor, self.split_dim)

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
    """Inputs split over the ranks; the partial sums are added up."""

    split_dim = 1

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_reduce(self.ops.linear(x, self.weight, self.bias))


class Embedding(Linear):
    """Token embedding or output head, split by vocabulary; the same weight may be both."""

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

    def _prepared(self, weight: torch.Tensor) -> Any:
        return self.ops.prepare(weight, embedding=self.is_embedding, product=self.is_head)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.tp.size == 1:
            return self.ops.embedding(self.weight, token_ids)
        local = self.tp.share(next(iter(self.parts.values())), "vocab_size")
        index = token_ids - self.tp.rank * local
        mine = (index >= 0) & (index < local)
        x = self.ops.embedding(self.weight, index.clamp(0, local - 1))
        return self.tp.all_reduce(x * mine[:, None])

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        return self.tp.all_gather(self.ops.linear(x, self.weight, float32=True))
