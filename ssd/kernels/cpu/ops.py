"""The C kernels behind the `Ops` interface. All of them row-invariant."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ssd.kernels.codes import Codes, rounded_rows
from ssd.kernels.cpu.kernels import Kernels
from ssd.kernels.cpu.pack import PackedExperts, PackedWeight, has_half_scales
from ssd.kernels.cpu.recording import Recordings
from ssd.kernels.ops import UNSCALED, DeviceBatch, HeadShape, KVScales, Rope, SharedOps
from ssd.kernels.weights import GLU, Routing, RowRounding, Rows, Weight, rows_and_scales


@dataclass(frozen=True)
class CpuWeight(Weight):
    kernels: Kernels
    packed: PackedWeight
    rounding: RowRounding | None = None

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        rows, scales = rows_and_scales(x, self.rounding, rounded_rows)
        return self.kernels.linear(rows, self.packed, bias, float32=float32, row_scales=scales)

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.kernels.embedding(self.packed, token_ids)


@dataclass(frozen=True)
class CpuExperts(Weight):
    kernels: Kernels
    packed: PackedExperts
    rounding: RowRounding | None = None

    def expert_linear(
        self,
        x: Rows,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
    ) -> torch.Tensor:
        rows, scales = rows_and_scales(x, self.rounding, rounded_rows)
        return self.kernels.expert_linear(rows, self.packed, routing, bias, glu=glu, float32=float32, row_scales=scales)

    def head_linear(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return self.kernels.head_linear(x, self.packed, y)


class CpuOps(SharedOps):
    """float32 and bfloat16 on the CPU."""

    def __init__(self, kernels: Kernels) -> None:
        self.kernels = kernels
        self.route, self.combine, self.rms_norm = kernels.route, kernels.combine, kernels.rms_norm

    def recordings(self) -> Recordings:
        return Recordings(self.kernels.repeat)

    def prepare(self, weight: torch.Tensor, *, gated: bool = False, experts: int = 0) -> Weight:
        if not experts:
            return CpuWeight(self.kernels, self.kernels.pack_linear(weight, gated))
        each = (self.kernels.pack_linear(weight[own], gated) for own in _rows_of(experts, len(weight), gated))
        return CpuExperts(self.kernels, PackedExperts(tuple(each)))

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
        if not experts:
            return CpuWeight(self.kernels, self.kernels.pack_codes(codes, dtype, gated, coarse=coarse), rows)
        each, half = _rows_of(experts, len(codes.values), gated), has_half_scales(codes)
        packed = (self.kernels.pack_codes(codes.rows(own), dtype, gated, coarse=coarse, half=half) for own in each)
        return CpuExperts(self.kernels, PackedExperts(tuple(packed)), rows)

    def reserve(self, heads: Seq[HeadShape], device: torch.device, *, ahead: bool = False) -> None:
        return

    def tile_tokens(self, heads: Seq[HeadShape], prefill: bool) -> int:
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

    def latent_rope_and_store(
        self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, rope: Rope, heads: HeadShape, cache: torch.Tensor
    ) -> torch.Tensor:
        assert rope.k_norm is not None
        tables = batch.positions, rope.cos, rope.sin, batch.slot_mapping
        return self.kernels.latent_rope_and_store(q, kv, *tables, cache, rope.k_norm, rope.eps)

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
        own = batch.branches
        depth = 0 if own is None else own.depth if own.depths is None else own.depths
        branches = None if own is None else (batch.positions, batch.slot_mapping, depth)
        tree = None if batch.tree is None else (batch.positions, batch.tree)
        out = self.kernels.paged_attention(
            *(q, k_cache, v_cache, batch.query_start, batch.context_len, batch.block_tables, batch.table_rows),
            heads.scale,
            branches,
            heads.first_position,
            heads.window,
            scales,
            sinks,
            heads.value_dim,
            tree,
        )
        return out.view(len(out), -1)


def _rows_of(experts: int, rows: int, gated: bool) -> list[torch.Tensor]:
    """The rows of each expert, of a gated weight its gate rows and its up rows."""
    index = torch.arange(rows, dtype=torch.int64, device="cpu").view(2 if gated else 1, experts, -1)
    return [each.flatten() for each in index.unbind(1)]
