"""The Triton kernels behind the `Ops` interface. All of them row-invariant."""

from __future__ import annotations

from contextlib import suppress

import torch

from ssd.kernels.codes import Codes, RowType
from ssd.kernels.cuda import cublaslt, expert_rows, few_rows, fp8_linear
from ssd.kernels.ops import (
    GLU,
    UNSCALED,
    DeviceBatch,
    ExpertOutputs,
    HeadShape,
    KVScales,
    Rope,
    RoundedRows,
    Routing,
    SharedOps,
)
from ssd.kernels.triton import attention, codes_linear, elementwise, experts, linear, packing, row_codes

Weight = packing.PackedCodes | fp8_linear.Fp8Weight  # of `prepare_codes`


class TritonOps(SharedOps):
    """For CUDA; also runs in Triton's interpreter on the CPU, for tests."""

    def __init__(self) -> None:
        self._workspace: attention.Workspace | None = None
        self._prefill: attention.Prefill | None = None
        self._copies_ahead = False  # there are products that copy weights while attention runs (`few_rows`)
        self.route, self.combine = experts.route, experts.combine

    def reserve(self, heads: HeadShape, device: torch.device) -> None:
        self._workspace = attention.Workspace(heads, device)
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
            with suppress(ImportError):  # a version of Triton without Gluon
                from ssd.kernels.triton.prefill import OverlappedPrefill

                self._prefill = OverlappedPrefill(self._workspace)

    def tile_tokens(self, heads: HeadShape, prefill: bool) -> int:
        return attention.tile_rows(heads.group_size, prefill) // heads.group_size

    def prepare(self, weight: torch.Tensor, *, gated: bool = False, experts: int = 0) -> torch.Tensor:
        return _alternating(weight) if gated else weight

    def embedding(self, weight: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.embedding(token_ids, weight)

    def linear(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, float32: bool = False
    ) -> torch.Tensor:
        product = _library(x, weight, bias, torch.float32 if float32 else x.dtype)
        if product is not None:
            return product
        return linear.linear(x, weight, bias, out_dtype=torch.float32 if float32 else None)

    def gated_linear(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        product = _library(x, weight, bias, x.dtype, gated=True)
        if product is not None:
            return product
        return linear.linear(x, weight, None if bias is None else _alternating(bias), gated=True)

    def prepare_codes(
        self,
        codes: Codes,
        dtype: torch.dtype,
        *,
        gated: bool = False,
        experts: int = 0,
        exact: bool = True,
        rows: RowType | None = None,
        coarse: bool = False,
    ) -> Weight:
        if gated:
            codes = codes.rows(_alternating(torch.arange(len(codes.values), device=codes.values.device)))
        if not experts and fp8_linear.takes(codes, dtype, rows):
            return fp8_linear.prepare(codes)
        strips = expert_rows.fits(codes, experts) if codes.type == "fp4" else not experts
        weight = packing.pack(codes, dtype, exact=exact, strips=strips)
        self._copies_ahead |= weight.strips and not experts
        return weight

    def round_rows(
        self, x: torch.Tensor, group: int | None, kind: RowType, stored: torch.Tensor | None, weight: object = None
    ) -> RoundedRows:
        narrow = isinstance(weight, fp8_linear.Fp8Weight)
        return RoundedRows(*row_codes.rounded_rows(x, group, kind, stored, narrow=narrow))

    def codes_linear(
        self,
        x: torch.Tensor,
        weight: Weight,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        float32: bool = False,
        row_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        bias = _alternating(bias) if gated and bias is not None else bias
        scales = None if row_scales is None else row_scales.contiguous()
        if isinstance(weight, fp8_linear.Fp8Weight):
            if scales is None:
                raise AssertionError("round_rows() comes before codes_linear()")
            out_dtype = torch.float32 if float32 else torch.bfloat16
            return fp8_linear.linear(x, weight, bias, gated=gated, out_dtype=out_dtype, row_scales=scales)
        out_dtype = torch.float32 if float32 else x.dtype
        if few_rows.takes(x, weight, bias, scales):
            return few_rows.linear(x, weight, bias, gated=gated, out_dtype=out_dtype, row_scales=scales)
        if codes_linear.is_wide(x, weight):
            return codes_linear.wide_linear(
                x, weight, bias, self._sums, gated=gated, out_dtype=out_dtype, row_scales=scales
            )
        return codes_linear.codes_linear(x, weight, bias, gated=gated, out_dtype=out_dtype, row_scales=scales)

    def expert_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor | packing.PackedCodes,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
        row_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        scales = None if row_scales is None else row_scales.contiguous()
        out_dtype = torch.float32 if float32 else x.dtype
        return experts.expert_linear(x, weight, routing, bias, glu=glu, out_dtype=out_dtype, row_scales=scales)

    def _sums(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return self.linear(x, weight, float32=True)

    def codes_embedding(self, weight: Weight, token_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(weight, fp8_linear.Fp8Weight):
            return (weight.values[token_ids].float() * weight.scales[token_ids, None]).to(torch.bfloat16)
        return packing.packed_rows(weight, token_ids)

    def router(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return experts.router(x, weight, bias)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps, residual)

    def combine_and_norm(
        self, x: ExpertOutputs, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return elementwise.combine_and_norm(x, weight, eps, residual)

    def rms_norm_and_round(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        kind: RowType,
        target: object,
    ) -> RoundedRows:
        if isinstance(target, fp8_linear.Fp8Weight):
            return RoundedRows(*elementwise.rms_norm_and_round(x, weight, eps, residual))
        return super().rms_norm_and_round(x, weight, eps, residual, kind, target)

    def plan(self, batch: DeviceBatch, heads: HeadShape, k_cache: torch.Tensor) -> None:
        if self._workspace is None:
            raise AssertionError("reserve() comes before plan()")
        if batch.tiles.shape[1] and k_cache.dtype is not torch.float8_e4m3fn:  # which has another kernel
            self._workspace.items(batch, heads.window, self._workspace.programs, before_pass=True)

    def rope_and_store(
        self,
        qkv: torch.Tensor,
        batch: DeviceBatch,
        rope: Rope,
        heads: HeadShape,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: KVScales = UNSCALED,
    ) -> torch.Tensor:
        return elementwise.rope_and_store(qkv, batch, rope, heads, k_cache, v_cache, scales)

    def attention(
        self,
        q: torch.Tensor,
        batch: DeviceBatch,
        heads: HeadShape,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
        scales: KVScales = UNSCALED,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self._workspace is None:
            raise AssertionError("reserve() comes before attention()")
        kv = k_cache, v_cache, self._workspace, self._prefill, scales
        return attention.paged_attention(q, batch, heads, *kv, sinks, lets_next=self._copies_ahead)


def _alternating(rows: torch.Tensor) -> torch.Tensor:
    """Gate and up rows in turns, so that one tile holds both."""
    return torch.stack(rows.chunk(2), dim=1).flatten(0, 1)


def _library(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, *, gated: bool = False
) -> torch.Tensor | None:
    """The product by cuBLASLt, where it is faster and has the same bits, else None."""
    library = cublaslt.load() if x.is_cuda else None
    return None if library is None else library.linear(x, weight, bias, out_dtype, gated=gated)
