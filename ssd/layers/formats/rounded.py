"""Float weights that are rounded to 8 or 4 bits when they are loaded: for draft models, whose bits reach no text."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, cast

import torch

from ssd.kernels.ops import Ops
from ssd.kernels.quantized import Format, quantize, quantized_bytes
from ssd.layers.formats import DENSE, FormatOf, Use, WeightFormat, fused

_FEW_ROWS = 64  # products of more rows are bound by arithmetic, not by reading the weight


@dataclass(frozen=True)
class RoundedWeight:
    """A prepared weight. The rows of an embedding are looked up unrounded: that reads no more than one row a token."""

    codes: Any  # for products; None for an embedding that no product needs
    dense: Any  # for look-ups, and for products of many rows if the format keeps it; None for others


class Rounded(WeightFormat):
    """Stored as float tensors, multiplied as codes of the type `name` with scales (`ssd.kernels.quantized`).

    `keeps_dense`: products of more than _FEW_ROWS rows are those of the unrounded weight, which is kept beside them.
    """

    def __init__(self, name: Format, *, keeps_dense: bool = False) -> None:
        self.name: Format = name
        self.keeps_dense = keeps_dense

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> RoundedWeight:
        weight = fused(parts, dtype)
        codes = ops.prepare_codes(quantize(weight, self.name), dtype, gated=use.gated) if use.product else None
        dense = ops.prepare(weight, gated=use.gated) if use.embedding or self.keeps_dense else None
        return RoundedWeight(codes, dense)

    def linear(
        self, ops: Ops, x: torch.Tensor, weight: RoundedWeight, bias: torch.Tensor | None, *, gated: bool, float32: bool
    ) -> torch.Tensor:
        if self.keeps_dense and len(x) > _FEW_ROWS:
            return DENSE.linear(ops, x, weight.dense, bias, gated=gated, float32=float32)
        return ops.codes_linear(x, weight.codes, bias, gated=gated, float32=float32)

    def embedding(self, ops: Ops, weight: RoundedWeight, token_ids: torch.Tensor) -> torch.Tensor:
        return ops.embedding(weight.dense, token_ids)

    def dense(self, weight: RoundedWeight) -> Any:
        return weight.dense if self.keeps_dense else None

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        dense = DENSE.num_bytes(rows, depth, dtype, use) if use.embedding or self.keeps_dense else 0
        return dense + (quantized_bytes(rows, depth, self.name) if use.product else 0)


def rounded(form: str | None) -> FormatOf:
    """The formats of a float checkpoint that is rounded to `form` when it is loaded: see `draft_quantization`."""
    if form is None or form == "none":
        return lambda name: DENSE
    codes, _, kept = form.partition("+")
    chosen = Rounded(cast(Format, codes), keeps_dense=bool(kept))
    return lambda name: chosen
