"""Float weights that are rounded to 8 or 4 bits when they are loaded.

A weight is rounded before a rank's columns are cut from it, so that the model is the same on any number of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import cast

import torch

from ssd.errors import ConfigError
from ssd.kernels.codes import Codes, Format, TargetFormat, quantize, quantized_bytes
from ssd.kernels.ops import Ops
from ssd.kernels.weights import GLU, Norm, Routing, RowRounding, Rows, Weight
from ssd.layers.formats import DENSE, FormatOf, Use, WeightFormat, dense, fused
from ssd.layers.formats.coded import Dequantized

_AROUND = ("embed_tokens", "lm_head", "gate", "router")  # a router's small weight decides which experts are read
_FEW_ROWS = 32  # products of more rows are bound by arithmetic, not by reading the weight
_LEAST_GROUP = 16  # weights of one scale that kernels take


@dataclass(frozen=True)
class RoundedWeight(Weight):
    """Products of codes; those of more than _FEW_ROWS rows are of the unrounded weight if it is kept for that. The rows
    of an embedding are looked up unrounded: that reads no more than one row a token."""

    codes: Weight | None  # None: of an embedding that no product needs
    unrounded: Weight | None
    keeps_dense: bool  # `unrounded` is for products, too

    @property
    def dense(self) -> torch.Tensor | None:  # type: ignore[override]
        return self.unrounded.dense if self.keeps_dense and self.unrounded is not None else None

    @property
    def norm_and_round(self) -> Norm | None:  # type: ignore[override]
        return None if self.codes is None else self.codes.norm_and_round

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        rows = len(x if isinstance(x, torch.Tensor) else x.values)
        return self._for(rows).linear(x, bias, float32=float32)

    def expert_linear(
        self,
        x: Rows,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
    ) -> torch.Tensor:
        return self._for(len(routing.weights)).expert_linear(x, routing, bias, glu=glu, float32=float32)

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        assert self.unrounded is not None
        return self.unrounded.embedding(token_ids)

    def _for(self, rows: int) -> Weight:
        chosen = self.unrounded if self.keeps_dense and rows > _FEW_ROWS else self.codes
        assert chosen is not None
        return chosen


class Rounded(WeightFormat):
    """Stored as float tensors, multiplied as codes of the type `name` with scales (`ssd.kernels.codes`). Dynamic:
    the rows of a product are rounded to that type, too, each with the scale of its largest number.

    `exact`: for a target; the rows of a draft's products may be rounded, too (`Ops.prepare_codes`). `keeps_dense`:
    products of more than _FEW_ROWS rows are those of the unrounded weight, which is kept beside them.
    """

    floats = False

    def __init__(self, name: TargetFormat, *, exact: bool = False, keeps_dense: bool = False) -> None:
        self.name: TargetFormat = name
        self.form: Format = "fp8" if name == "fp8_dynamic" else name
        self.rows = RowRounding() if name == "fp8_dynamic" else None
        self.exact, self.keeps_dense = exact, keeps_dense

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        return rows, slice(None)

    def prepare(self, parts: Seq[Mapping[str, torch.Tensor]], ops: Ops, dtype: torch.dtype, use: Use) -> Weight:
        weight = fused(parts, dtype)
        codes = unrounded = None
        if use.product:
            own = _columns(quantize(weight, self.form), use.columns)
            coarse = not self.exact and self.rows is None
            codes = ops.prepare_codes(own, dtype, gated=use.gated, experts=use.experts, rows=self.rows, coarse=coarse)
        if use.embedding or self.keeps_dense:
            unrounded = ops.prepare(weight[:, use.columns].contiguous(), gated=use.gated, experts=use.experts)
        return RoundedWeight(codes, unrounded, self.keeps_dense)

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        dense = DENSE.num_bytes(rows, depth, dtype, use) if use.embedding or self.keeps_dense else 0
        return dense + (quantized_bytes(rows, depth, self.form) if use.product else 0)


def _columns(codes: Codes, part: slice) -> Codes:
    """A part of all rows. Groups that it cuts become smaller ones of the same scale."""
    if part.indices(codes.depth)[:2] == (0, codes.depth):
        return codes
    unit, size = math.gcd(codes.group, part.start, part.stop), part.stop - part.start
    if codes.scales.shape[1] == 1:
        return replace(codes, values=codes.values[:, part].contiguous(), depth=size)
    if unit < _LEAST_GROUP:
        raise ConfigError(
            f"tensor_parallel_size: a rank's share of {size} weights cuts through groups of {_LEAST_GROUP} "
            f"({codes.type}): use fewer ranks, or int8"
        )
    scales = codes.scales.repeat_interleave(codes.group // unit, 1)[:, part.start // unit : part.stop // unit]
    return replace(codes, values=codes.values[:, part].contiguous(), scales=scales.contiguous(), depth=size)


def is_around(name: str) -> bool:
    """Whether this layer of a target keeps its type: the embedding, the head and routers do."""
    return name.rpartition(".")[2] in _AROUND


def rounded(form: str | None, stored: FormatOf = dense, *, exact: bool = False) -> FormatOf:
    """The formats of a checkpoint whose float weights are rounded to `form` when they are loaded.

    `exact`: a target's (see `quantization`), whose embedding and head stay as they are, and whose layers must be
    unquantised; else a draft's (see `draft_quantization`), of which float weights are rounded only.
    """
    if form is None or form == "none":
        return stored
    if form == "dequantized":
        return lambda name: found if (found := stored(name)).floats else Dequantized(found)
    codes, _, kept = form.partition("+")
    chosen = Rounded(cast(TargetFormat, codes), exact=exact, keeps_dense=bool(kept))

    def format_of(name: str) -> WeightFormat:
        found, around = stored(name), is_around(name)
        if exact and not around and found is not DENSE:
            raise ConfigError(
                f"quantization={form!r}: the checkpoint is quantised already ({name} is {found.name}): leave it out"
            )
        return found if found is not DENSE or (exact and around) else chosen

    return format_of
