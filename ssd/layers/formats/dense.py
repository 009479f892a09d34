"""Weights as float tensors, in the type that the model computes in."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import Any, Final

import torch

from ssd.kernels.ops import Ops
from ssd.layers.formats import Use, WeightFormat


class Dense:
    """One tensor `weight`, of any float type."""

    name = "dense"

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        return {"weight": (rows, depth)}

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        return rows, columns

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> Any:
        return ops.prepare(fused(parts, dtype), gated=use.gated)

    def linear(
        self, ops: Ops, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, *, gated: bool, float32: bool
    ) -> torch.Tensor:
        return ops.gated_linear(x, weight, bias) if gated else ops.linear(x, weight, bias, float32=float32)

    def embedding(self, ops: Ops, weight: Any, token_ids: torch.Tensor) -> torch.Tensor:
        return ops.embedding(weight, token_ids)

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        return rows * depth * dtype.itemsize


def fused(parts: Seq[Mapping[str, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """The rows of all parts, one after the other."""
    tensors = [part["weight"].to(dtype) for part in parts]
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)


DENSE: Final[WeightFormat] = Dense()


def dense(name: str) -> WeightFormat:
    """The format of every layer of an unquantised checkpoint."""
    return DENSE
