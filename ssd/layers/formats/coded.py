"""Quantised weights as checkpoints store them: each format turns its tensors into `Codes` and states its arithmetic.

Products are those of the codes, widened in registers, with float32 sums. A scale is applied to the sum of its group
before the groups are added up, one after the other, so that a row's bits are the same in any company.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import torch

from ssd.errors import ConfigError
from ssd.kernels.ops import Ops
from ssd.kernels.quantized import Codes, dequantize, fused_codes, quantized_rows, scaled_rows
from ssd.layers.formats import Use, WeightFormat


@dataclass(frozen=True)
class Activations:
    """How rows are rounded to e4m3 before a product.

    `group`: columns of one scale, which is computed for each row; None: all columns. `static`: the scale is stored
    instead (`input_scale`).
    """

    group: int | None = None
    static: bool = False


@dataclass(frozen=True)
class CodedWeight:
    """A prepared weight, and the stored scale of its input."""

    codes: Any
    input_scale: torch.Tensor | None = None


class Coded(WeightFormat):
    """A format whose tensors are codes and scales. `activations`: None if products take rows as they are."""

    activations: Activations | None = None

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        """The codes of one part of a weight."""
        raise NotImplementedError

    def widened(self, stored: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        others = {name: tensor for name, tensor in stored.items() if name == "bias"}
        return {"weight": dequantize(self.codes(stored), torch.float32), **others}

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> CodedWeight:
        codes = ops.prepare_codes(fused_codes([self.codes(part) for part in parts]), dtype, gated=use.gated)
        scales = [part["input_scale"].float().reshape(1, 1) for part in parts if "input_scale" in part]
        return CodedWeight(codes, torch.cat(scales).amax(0, keepdim=True) if scales else None)

    def linear(
        self, ops: Ops, x: torch.Tensor, weight: CodedWeight, bias: torch.Tensor | None, *, gated: bool, float32: bool
    ) -> torch.Tensor:
        scales = None
        if weight.input_scale is not None:
            scales = weight.input_scale.expand(len(x), 1)
            x = scaled_rows(x.float(), weight.input_scale).to(x.dtype)
        elif self.activations is not None:
            x, scales = quantized_rows(x, self.activations.group)
        return ops.codes_linear(x, weight.codes, bias, gated=gated, float32=float32, row_scales=scales)

    def embedding(self, ops: Ops, weight: CodedWeight, token_ids: torch.Tensor) -> torch.Tensor:
        return ops.codes_embedding(weight.codes, token_ids)

    def dense(self, weight: CodedWeight) -> Any:
        return None


class Mixed(WeightFormat):
    """A weight whose parts have different formats: one product for each part."""

    name = "mixed"

    def __init__(self, formats: Seq[WeightFormat]) -> None:
        self.formats = tuple(formats)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mixed) and self.formats == other.formats

    def __hash__(self) -> int:
        return hash(self.formats)

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> list[Any]:
        alone = Use(embedding=use.embedding, product=use.product)
        return [each.prepare([part], ops, dtype, alone) for each, part in zip(self.formats, parts, strict=True)]

    def linear(
        self, ops: Ops, x: torch.Tensor, weight: list[Any], bias: torch.Tensor | None, *, gated: bool, float32: bool
    ) -> torch.Tensor:
        each = [
            own.linear(ops, x, part, None, gated=False, float32=True)
            for own, part in zip(self.formats, weight, strict=True)
        ]
        y = torch.cat(each, 1) if bias is None else torch.cat(each, 1) + bias.float()
        if not gated:
            return y if float32 else y.to(x.dtype)
        gate, up = y.to(x.dtype).chunk(2, 1)
        return torch.nn.functional.silu(gate) * up

    def dense(self, weight: list[Any]) -> Any:
        return None


def cut(part: slice, unit: int, what: str) -> slice:
    """A slice of weights as a slice of units (groups of a scale, packed words); refuses one that cuts through them."""
    if part == slice(None):
        return part
    if part.start % unit or part.stop % unit:
        raise ConfigError(
            f"tensor_parallel_size: {what} of {unit} weights would be cut by a rank's share "
            f"({part.stop - part.start} weights): use fewer ranks"
        )
    return slice(part.start // unit, part.stop // unit)
