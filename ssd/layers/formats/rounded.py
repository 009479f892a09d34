"""Float weights that are rounded to 8 or 4 bits when they are loaded: for draft models, whose bits reach no text."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ssd.kernels.ops import Ops
from ssd.kernels.quantized import Format, quantize, quantized_bytes
from ssd.layers.formats import DENSE, FormatOf, Use, WeightFormat, fused


@dataclass(frozen=True)
class RoundedWeight:
    """A prepared weight. The rows of an embedding are looked up unrounded: that reads no more than one row a token."""

    product: Any  # for products; None for an embedding that no product needs
    rows: Any  # for look-ups; None for others


class Rounded(WeightFormat):
    """Stored as float tensors, multiplied as codes of the type `name` with scales (`ssd.kernels.quantized`)."""

    def __init__(self, name: Format) -> None:
        self.name: Format = name

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> RoundedWeight:
        weight = fused(parts, dtype)
        product = ops.prepare_codes(quantize(weight, self.name), dtype, gated=use.gated) if use.product else None
        return RoundedWeight(product, ops.prepare(weight) if use.embedding else None)

    def linear(
        self, ops: Ops, x: torch.Tensor, weight: RoundedWeight, bias: torch.Tensor | None, *, gated: bool, float32: bool
    ) -> torch.Tensor:
        return ops.codes_linear(x, weight.product, bias, gated=gated, float32=float32)

    def embedding(self, ops: Ops, weight: RoundedWeight, token_ids: torch.Tensor) -> torch.Tensor:
        return ops.embedding(weight.rows, token_ids)

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        looked_up = DENSE.num_bytes(rows, depth, dtype, use) if use.embedding else 0
        return looked_up + (quantized_bytes(rows, depth, self.name) if use.product else 0)


def rounded(form: Format | Literal["none"] | None) -> FormatOf:
    """The formats of a float checkpoint that is rounded to `form` when it is loaded; None: that is not rounded."""
    chosen = DENSE if form is None or form == "none" else Rounded(form)
    return lambda name: chosen
