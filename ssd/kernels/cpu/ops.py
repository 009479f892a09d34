"""The C kernels behind the `Ops` interface. All of them row-invariant."""

from __future__ import annotations

import torch

from ssd.kernels.codes import Codes, RowType, rounded_rows
from ssd.kernels.cpu import library
from ssd.kernels.cpu.kernels import Kernels, PackedExperts, PackedWeight, has_half_scales
from ssd.kernels.ops import UNSCALED, DeviceBatch, HeadShape, KVScales, Rope, RoundedRows, SharedOps

Packed = PackedWeight | PackedExperts


class CpuOps(SharedOps):
    """float32 and bfloat16 on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.embedding = kernels.embedding
        self.codes_embedding = kernels.codes_embedding
        self.linear = self.gated_linear = kernels.linear  # a gated weight knows that it is
        self.route, self.expert_linear, self.combine = kernels.route, kernels.expert_linear, kernels.combine
        self.rms_norm = kernels.rms_norm

    @classmethod
    def load(cls) -> CpuOps | None:
        """None (after a warning) where the kernels cannot be compiled."""
        kernels = library.load()
        return None if kernels is None else cls(kernels)

    def prepare(self, weight: torch.Tensor, *, gated: bool = False, experts: int = 0) -> Packed:
        if not experts:
            return self.kernels.pack_linear(weight, gated)
        each = _rows_of(experts, len(weight), gated)
        return PackedExperts(tuple(self.kernels.pack_linear(weight[rows], gated) for rows in each))

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
    ) -> Packed:
        coarse |= not exact and rows is None
        if not experts:
            return self.kernels.pack_codes(codes, dtype, gated, coarse=coarse)
        each, half = _rows_of(experts, len(codes.values), gated), has_half_scales(codes)
        packed = (self.kernels.pack_codes(codes.rows(own), dtype, gated, coarse=coarse, half=half) for own in each)
        return PackedExperts(tuple(packed))

    def round_rows(
        self, x: torch.Tensor, group: int | None, kind: RowType, stored: torch.Tensor | None, weight: object = None
    ) -> RoundedRows:
        return RoundedRows(*rounded_rows(x, group, kind, stored))

    def codes_linear(
        self,
        x: torch.Tensor,
        weight: PackedWeight,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        float32: bool = False,
        row_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Widened in registers."""
        scales = None if row_scales is None else row_scales.contiguous()
        return self.kernels.linear(x, weight, bias, float32=float32, row_scales=scales)

    def reserve(self, heads: HeadShape, device: torch.device) -> None:
        return

    def tile_tokens(self, heads: HeadShape, prefill: bool) -> int:
        return 1 << 30  # one tile per sequence: tiles are not used here

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
        return self.kernels.rope_and_store(
            *(qkv, batch.positions, rope.cos, rope.sin, batch.slot_mapping, k_cache, v_cache, heads.num_heads),
            q_norm=rope.q_norm,
            k_norm=rope.k_norm,
            eps=rope.eps,
            scales=scales,
        )

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
        branches = None if batch.branches is None else (batch.positions, batch.slot_mapping, batch.branches.depth)
        out = self.kernels.paged_attention(
            *(q, k_cache, v_cache, batch.query_start, batch.context_len, batch.block_tables, batch.table_rows),
            heads.scale,
            branches,
            heads.first_position,
            heads.window,
            scales,
            sinks,
        )
        return out.view(len(out), -1)


def _rows_of(experts: int, rows: int, gated: bool) -> list[torch.Tensor]:
    """The rows of each expert, of a gated weight its gate rows and its up rows."""
    index = torch.arange(rows, dtype=torch.int64, device="cpu").view(2 if gated else 1, experts, -1)
    return [each.flatten() for each in index.unbind(1)]
