"""Prepared weights on a GPU: which kernel multiplies how many rows of which format. All of them row-invariant."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ssd.kernels.cuda import cublaslt, few_rows, fp8_linear, grouped_rows
from ssd.kernels.triton import codes_linear, elementwise, experts, linear, packing, row_codes
from ssd.kernels.weights import GLU, Norm, RoundedRows, Routing, RowRounding, Rows, Weight, rows_and_scales

_WIDE_COLUMNS = 32768  # outputs of a weight in groups that are widened at a time, for many rows
_WIDE_ROWS = 512  # rows at a time, whose sums of segments stay in the L2


def widened(packed: packing.PackedCodes, dtype: torch.dtype, outputs: slice) -> torch.Tensor:
    """Weights of some outputs of a weight in groups."""
    made = grouped_rows.widened(packed, outputs) if packed.strips and packed.words.is_cuda else None
    return codes_linear.widened(packed, dtype, outputs=outputs) if made is None else made


@dataclass(frozen=True)
class DenseWeight(Weight):
    """Floats: cuBLASLt's product where it is faster and has the same bits, else Triton's."""

    dense: torch.Tensor
    gated: bool = False

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return _dense_linear(x, self.dense, bias, gated=self.gated, float32=float32)

    def router(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        return experts.router(x, self.dense, bias)

    def expert_linear(
        self,
        x: Rows,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
    ) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        out_dtype = torch.float32 if float32 else x.dtype
        return experts.expert_linear(x, self.dense, routing, bias, glu=glu, out_dtype=out_dtype)

    def head_linear(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return linear.head_linear(x, self.dense, y)

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(token_ids, self.dense)


@dataclass(frozen=True)
class CodesWeight(Weight):
    """Codes of 4 or 8 bits, widened in registers: for few rows by a CUDA kernel, for many they are widened before a
    dense product, else by Triton's.

    Rows that are rounded by group, or before a product of weights (`packing.is_widened`), are widened again.
    """

    packed: packing.PackedCodes
    gated: bool = False
    rounding: RowRounding | None = None
    wide: torch.Tensor | None = None  # `widened`, where there is memory for it

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        rows, scales = self._rows(x)
        own, out_dtype = _bias(bias, self.gated), torch.float32 if float32 else rows.dtype
        if len(rows) == 0:  # no kernel is compiled for that
            return rows.new_empty((0, self.packed.columns // (2 if self.gated else 1)), dtype=out_dtype)
        if grouped_rows.takes(rows, self.packed, own):
            return grouped_rows.linear(rows, self.packed, own, gated=self.gated, out_dtype=out_dtype)
        options: dict[str, Any] = {"gated": self.gated, "out_dtype": out_dtype, "row_scales": scales}
        if few_rows.takes(rows, self.packed, own, scales):
            return few_rows.linear(rows, self.packed, own, **options)
        wide, weights = codes_linear.is_wide(rows, self.packed), self.packed.numbers is not None
        if weights and (wide or self.packed.strips):
            return self._widened_linear(rows, bias, float32)
        if wide:
            return codes_linear.wide_linear(rows, self.packed, own, _float32_sums, **options)
        return codes_linear.codes_linear(rows, self.packed, own, **options)

    def _widened_linear(self, x: torch.Tensor, bias: torch.Tensor | None, float32: bool) -> torch.Tensor:
        """Some outputs at a time; sums of segments for some rows at a time."""
        packed, columns, of = self.packed, self.packed.columns, 2 if self.gated else 1
        step = _WIDE_COLUMNS if self.wide is None else columns
        if packed.segment == packed.depth and step >= columns:
            wide = widened(packed, x.dtype, slice(0, columns)) if self.wide is None else self.wide
            return _dense_linear(x, wide, bias, gated=self.gated, float32=float32)
        y = x.new_empty((len(x), columns // of), dtype=torch.float32 if float32 else x.dtype)
        bias = _bias(bias, self.gated)
        for first in range(0, columns, step):
            some = slice(first, min(columns, first + step))
            wide = widened(packed, x.dtype, some) if self.wide is None else self.wide
            own, part = None if bias is None else bias[some], y[:, first // of : some.stop // of]
            for row in range(0, len(x), _WIDE_ROWS):
                rows = slice(row, row + _WIDE_ROWS)
                codes_linear.finished(
                    _sums_of_segments(x[rows], wide, packed.segment), own, part[rows], gated=self.gated
                )
        return y

    def expert_linear(
        self,
        x: Rows,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
    ) -> torch.Tensor:
        rows, scales = self._rows(x)
        out_dtype = torch.float32 if float32 else rows.dtype
        return experts.expert_linear(rows, self.packed, routing, bias, glu=glu, out_dtype=out_dtype, row_scales=scales)

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return codes_linear.widened(self.packed, self.packed.dtype, index=token_ids)

    def _rows(self, x: Rows) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Rows as they are multiplied, and their scales."""
        if self.rounding is not None and (self.packed.numbers is not None or self.rounding.group is not None):
            assert isinstance(x, torch.Tensor)
            return row_codes.rounded_rows(x, self.rounding, restored=True).values, None
        return rows_and_scales(x, self.rounding, row_codes.rounded_rows)


@dataclass(frozen=True)
class Fp8Weight(Weight):
    """e4m3 with one scale an output, multiplied with rows in e4m3 by the 8-bit tensor cores (`fp8_linear`)."""

    values: torch.Tensor  # float8_e4m3fn [columns, depth]
    scales: torch.Tensor  # float32 [columns]
    gated: bool
    rounding: RowRounding

    @property
    def norm_and_round(self) -> Norm | None:  # type: ignore[override]
        return elementwise.rms_norm_and_round if self.rounding.scale is None else None

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        rows = x if isinstance(x, RoundedRows) else row_codes.rounded_rows(x, self.rounding, narrow=True)
        return fp8_linear.linear(
            *(rows.values, self.values, self.scales, _bias(bias, self.gated)),
            gated=self.gated,
            out_dtype=torch.float32 if float32 else torch.bfloat16,
            row_scales=rows.scales.contiguous(),
        )

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return (self.values[token_ids].float() * self.scales[token_ids, None]).to(torch.bfloat16)


def alternating(rows: torch.Tensor) -> torch.Tensor:
    """Gate and up rows in turns, so that one tile holds both."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def _bias(bias: torch.Tensor | None, gated: bool) -> torch.Tensor | None:
    """In the order of the rows of the prepared weight."""
    return alternating(bias) if gated and bias is not None else bias


def _dense_linear(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, *, gated: bool, float32: bool
) -> torch.Tensor:
    out_dtype, library = torch.float32 if float32 else x.dtype, cublaslt.load() if x.is_cuda else None
    product = None if library is None else library.linear(x, weight, bias, out_dtype, gated=gated)
    if product is not None:
        return product
    return linear.linear(x, weight, _bias(bias, gated), gated=gated, out_dtype=out_dtype)


def _float32_sums(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
    return _dense_linear(x, wide, None, gated=False, float32=True)


def _sums_of_segments(x: torch.Tensor, wide: torch.Tensor, segment: int) -> torch.Tensor:
    """Products of the segments of the depth, of which the last one may be shorter: [segments, rows, columns]."""
    depth, library = wide.shape[1], cublaslt.load() if x.is_cuda else None
    sums = x.new_empty((-(-depth // segment), len(x), len(wide)), dtype=torch.float32)
    even = depth // segment * segment
    for part, y in ((slice(0, even), sums[: depth // segment]), (slice(even, depth), sums[depth // segment :])):
        if not len(y) or (library is not None and library.sums_of_segments(x[:, part], wide[:, part], y)):
            continue
        for i, each in enumerate(y):
            here = slice(part.start + i * segment, min(part.start + (i + 1) * segment, depth))
            each.copy_(linear.linear(x[:, here], wide[:, here].contiguous(), out_dtype=torch.float32))
    return sums
