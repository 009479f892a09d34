"""Formats of weights: which tensors a checkpoint stores for a linear layer, and how they become a product.

A format says what is stored, how a rank's share is cut, how the tensors become a prepared weight, which multiplies
(`ssd.kernels.weights`), and what that takes in memory. Layers call nothing else. The base class is the format of float
tensors; each other format is one file of this package.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Final

import torch

from ssd.kernels.ops import Ops
from ssd.kernels.weights import Weight

FLOATS: Final = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass(frozen=True)
class Use:
    """What a weight is for. `gated`: its first half are gate rows, its second half up rows. `experts`: it is that of
    so many experts, see `Ops.prepare`. `rows`: this rank's of each part. `columns`: this rank's, which a format must
    cut itself if its `share` has all columns."""

    gated: bool = False
    experts: int = 0
    embedding: bool = False  # its rows are looked up
    product: bool = True  # it is multiplied with
    rows: tuple[int, ...] = ()
    columns: slice = field(default_factory=lambda: slice(None))


class WeightFormat:
    """How one linear layer's weight [rows, depth] is stored, cut and prepared.

    Here: one tensor `weight` of any float type, in the type that the model computes in.
    """

    name: str = "dense"
    floats = True  # whether prepared weights are floats: those of `widened`

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        """Stored tensors: the last part of their names in a checkpoint, and their full shapes."""
        return {"weight": (rows, depth)}

    def tensors_of(self, weight: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """The tensors that a float weight is stored as, rounded where the format's codes are no floats."""
        return {"weight": weight}

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        """A rank's part of a stored tensor, for these rows and columns of the weight."""
        return rows, columns

    def fault(self, tensor: str, share: torch.Tensor) -> str:
        """What is wrong with the type or the numbers of a stored tensor; "" if nothing."""
        return wrong_type(share, FLOATS)

    def widened(self, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """The tensors of a layer (by the last part of their names) with its weight as one float tensor."""
        return stored

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> Weight:
        """A weight fused from `parts` (stored tensors by name), for products with rows of type `dtype`."""
        return ops.prepare(fused(parts, dtype), gated=use.gated, experts=use.experts)

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        """Memory of the prepared weight, without padding."""
        return rows * depth * dtype.itemsize


def wrong_type(tensor: torch.Tensor, expected: Seq[torch.dtype]) -> str:
    """Says which types are expected, if it has another one."""
    if tensor.dtype in expected:
        return ""
    names = [str(dtype).removeprefix("torch.") for dtype in (tensor.dtype, *expected)]
    return f"is {names[0]}, expected {' or '.join(names[1:])}: quantization_config must describe what is stored"


def fused(parts: Seq[Mapping[str, torch.Tensor]], dtype: torch.dtype) -> torch.Tensor:
    """The rows of all parts, one after the other."""
    tensors = [part["weight"].to(dtype) for part in parts]
    return tensors[0].contiguous() if len(tensors) == 1 else torch.cat(tensors)


FormatOf = Callable[[str], WeightFormat]  # by a linear layer's name in the checkpoint: model.layers.0.mlp.up_proj
DENSE: Final = WeightFormat()


def dense(name: str) -> WeightFormat:
    """The format of every layer of an unquantised checkpoint."""
    return DENSE
