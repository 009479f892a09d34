"""The Triton kernels behind the `Ops` interface. All of them row-invariant."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from contextlib import suppress

import torch

from ssd.kernels.codes import Codes
from ssd.kernels.cuda import expert_rows, fp8_linear, grouped_rows
from ssd.kernels.ops import UNSCALED, DeviceBatch, ExpertOutputs, HeadShape, KVScales, Rope, SharedOps
from ssd.kernels.triton import attention, elementwise, experts, latent, packing
from ssd.kernels.triton.weights import CodesWeight, DenseWeight, Fp8Weight, alternating, widened
from ssd.kernels.weights import RowRounding, Weight


class TritonOps(SharedOps):
    """For CUDA; also runs in Triton's interpreter on the CPU, for tests."""

    def __init__(self) -> None:
        self._workspace: attention.Workspace | None = None
        self._prefill: attention.Prefill | None = None
        self._copies_ahead = False  # there are products that copy weights while attention runs (`few_rows`)
        self.route, self.combine = experts.route, experts.combine

    def reserve(self, heads: Seq[HeadShape], device: torch.device, *, ahead: bool = False) -> None:
        self._workspace = attention.Workspace(heads, device, ahead=ahead)
        if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
            with suppress(ImportError):  # a version of Triton without Gluon
                from ssd.kernels.triton.prefill import OverlappedPrefill

                self._prefill = OverlappedPrefill(self._workspace)

    def tile_tokens(self, heads: Seq[HeadShape], prefill: bool) -> int:
        return attention.tile_tokens(heads, prefill)

    def prepare(self, weight: torch.Tensor, *, gated: bool = False, experts: int = 0) -> Weight:
        return DenseWeight(alternating(weight) if gated else weight, gated)

    def prepare_codes(
        self,
        codes: Codes,
        dtype: torch.dtype,
        *,
        gated: bool = False,
        experts: int = 0,
        rows: RowRounding | None = None,
        coarse: bool = False,
    ) -> Weight:
        if gated:
            codes = codes.rows(alternating(torch.arange(len(codes.values), device=codes.values.device)))
        if rows is not None and not experts and fp8_linear.takes(codes, dtype, rows):
            values = codes.values.view(torch.float8_e4m3fn).contiguous()
            return Fp8Weight(values, codes.scales[:, 0].contiguous(), gated, rows)
        weights = packing.is_widened(codes, experts)
        strips = not experts or expert_rows.fits(codes, experts)
        if not experts and (weights or codes.type == "int4"):
            strips = grouped_rows.supports(codes, dtype)
            weights = weights or strips
        packed = packing.pack(codes, dtype, strips=strips, weights=weights)
        self._copies_ahead |= packed.strips and not experts
        return CodesWeight(packed, gated, rows, self._wide(packed))

    def _wide(self, packed: packing.PackedCodes) -> torch.Tensor | None:
        """The weights of a weight in groups for products of many rows, which are as fast as those of a dense weight
        then, while `wide_bytes` last."""
        size = 2 * packed.columns * packed.depth
        if packed.numbers is None or not packed.strips or size > self.wide_bytes:
            return None
        self.wide_bytes -= size
        return widened(packed, packed.dtype, slice(0, packed.columns))

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        return elementwise.rms_norm(x, weight, eps, residual)

    def combine_and_norm(
        self, x: ExpertOutputs, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return elementwise.combine_and_norm(x, weight, eps, residual)

    def plan(self, batch: DeviceBatch, heads: HeadShape, k_cache: torch.Tensor) -> None:
        if self._workspace is None:
            raise AssertionError("reserve() comes before plan()")
        if batch.tiles.shape[1] and k_cache.dtype is not torch.float8_e4m3fn:  # which has another kernel
            self._workspace.items(batch, heads, before_pass=True)

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

    def latent_rope_and_store(
        self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, rope: Rope, heads: HeadShape, cache: torch.Tensor
    ) -> torch.Tensor:
        return elementwise.latent_rope_and_store(q, kv, batch, rope, heads, cache)

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
        if heads.latent_dim:
            return latent.latent_attention(q, batch, heads, k_cache, self._workspace, lets_next=self._copies_ahead)
        kv = k_cache, v_cache, self._workspace, self._prefill, scales
        return attention.paged_attention(q, batch, heads, *kv, sinks, lets_next=self._copies_ahead)
