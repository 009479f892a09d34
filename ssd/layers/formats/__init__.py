"""Formats of weights: which tensors a checkpoint stores for a linear layer, and how they become a product.

A format is one file of this package: it says what is stored, how a rank's share is cut, how the tensors are laid out
for the kernels of a device, how the result is multiplied, and what it takes in memory. Layers call nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ssd.kernels.ops import Ops


@dataclass(frozen=True)
class Use:
    """What a weight is for. `gated`: its first half are gate rows, its second half up rows."""

    gated: bool = False
    embedding: bool = False  # its rows are looked up
    product: bool = True  # it is multiplied with


class WeightFormat(Protocol):
    """How one linear layer's weight [rows, depth] is stored, cut, prepared and applied."""

    @property
    def name(self) -> str: ...

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        """Stored tensors: the last part of their names in a checkpoint, and their full shapes."""

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        """A rank's part of a stored tensor, for these rows and columns of the weight."""

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> Any:
        """Lays out a weight fused from `parts` (stored tensors by name), for products with rows of type `dtype`."""

    def linear(
        self, ops: Ops, x: torch.Tensor, weight: Any, bias: torch.Tensor | None, *, gated: bool, float32: bool
    ) -> torch.Tensor:
        """x W^T (+ bias), see `Ops.linear`; `gated`: silu(gate) * up, see `Ops.gated_linear`."""

    def embedding(self, ops: Ops, weight: Any, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of a weight that was prepared for `Use.embedding`."""

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        """Memory of the prepared weight, without padding."""


FormatOf = Callable[[str], WeightFormat]  # by a linear layer's name in the checkpoint: model.layers.0.mlp.up_proj
