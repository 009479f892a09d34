"""Prepared weights on a GPU: which kernel multiplies how many rows of which format. All of them row-invariant."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssd.kernels.cuda import cublaslt, few_rows, fp8_linear
from ssd.kernels.triton import codes_linear, elementwise, experts, linear, packing, row_codes
from ssd.kernels.weights import GLU, Norm, RoundedRows, Routing, RowRounding, Rows, Weight, rows_and_scales


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

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(token_ids, self.dense)


@dataclass(frozen=True)
class CodesWeight(Weight):
    """Codes of 4 or 8 bits, widened in registers: for few rows by a CUDA kernel, for many and one scale a row by a
    dense product of them, else by Triton's."""

    packed: packing.PackedCodes
    gated: bool = False
    rounding: RowRounding | None = None

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        rows, scales = rows_and_scales(x, self.rounding, row_codes.rounded_rows)
        bias = _bias(bias, self.gated)
        out_dtype = torch.float32 if float32 else rows.dtype
        if few_rows.takes(rows, self.packed, bias, scales):
            product = few_rows.linear
        elif codes_linear.is_wide(rows, self.packed):
            product = _wide_linear
        else:
            product = codes_linear.codes_linear
        return product(rows, self.packed, bias, gated=self.gated, out_dtype=out_dtype, row_scales=scales)

    def expert_linear(
        self,
        x: Rows,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
    ) -> torch.Tensor:
        rows, scales = rows_and_scales(x, self.rounding, row_codes.rounded_rows)
        out_dtype = torch.float32 if float32 else rows.dtype
        return experts.expert_linear(rows, self.packed, routing, bias, glu=glu, out_dtype=out_dtype, row_scales=scales)

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return packing.packed_rows(self.packed, token_ids)


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


def _wide_linear(
    x: torch.Tensor,
    weight: packing.PackedCodes,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    out_dtype: torch.dtype,
    row_scales: torch.Tensor | None,
) -> torch.Tensor:
    def sums(x: torch.Tensor, wide: torch.Tensor) -> torch.Tensor:
        return _dense_linear(x, wide, None, gated=False, float32=True)

    return codes_linear.wide_linear(x, weight, bias, sums, gated=gated, out_dtype=out_dtype, row_scales=row_scales)
