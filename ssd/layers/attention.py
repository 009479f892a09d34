"""Grouped-query attention over paged KV: projections, norms and rotary embedding of one layer."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import ClassVar

import torch

from ssd.kernels.ops import DeviceBatch, Rope
from ssd.kernels.weights import Rows
from ssd.layers.kv_scales import LayerScales
from ssd.layers.linear import ColumnLinear, Linear, RowLinear
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build, LazyTensor, Parameter, share_of
from ssd.layers.rotary import RopeTables
from ssd.layers.spec import GQASpec

LayerKV = tuple[torch.Tensor, ...]  # one layer's KV cache: tensors [blocks, block_size, *shape] of its `KVLayout`


class Sinks:
    """A logit of each query head, which the softmax has beside those of the keys; each rank has its heads'."""

    loaded: ClassVar[tuple[str, ...]] = ("logits",)

    def __init__(self, build: Build, name: str, num_heads: int) -> None:
        self.name, self.num_heads = name, num_heads
        self.logits: torch.Tensor | None = None  # until they are loaded
        self._device, self._heads = build.device, build.tp.share(num_heads)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.name: (self.num_heads,)}

    def load(self, name: str, tensor: torch.Tensor | LazyTensor) -> None:
        self.logits = share_of(tensor, (self._heads,), self._device).float()

    def num_bytes(self) -> int:
        return self.num_heads * torch.float32.itemsize


class GQA:
    """`width`: of what q, k and v are computed from, where that is not the residual stream."""

    def __init__(
        self,
        build: Build,
        name: str,
        spec: GQASpec,
        hidden_size: int,
        eps: float,
        tables: RopeTables,
        width: int | None = None,
    ) -> None:
        self.spec = spec
        self.heads = spec.heads(build.tp.size)
        self.ops = build.ops
        q, kv, dim = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.head_dim
        parts = {f"{name}.q_proj": q, f"{name}.k_proj": kv, f"{name}.v_proj": kv}
        self.qkv = ColumnLinear(build, parts, width or hidden_size, bias=spec.qkv_bias, unit=dim)
        self.output = RowLinear(build, {f"{name}.o_proj": hidden_size}, q, bias=spec.output_bias)
        self.q_norm = RMSNorm(build, f"{name}.q_norm", dim, eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(build, f"{name}.k_norm", dim, eps) if spec.qk_norm else None
        self.sinks = Sinks(build, f"{name}.sinks", spec.num_heads) if spec.sinks else None
        self.tables = tables[spec.rope, dim]
        self.kv_scales = LayerScales(build, name)

    @property
    def reads(self) -> Linear:
        """What alone reads its input."""
        return self.qkv

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.qkv, self.output)
        yield from (each for each in (self.q_norm, self.k_norm, self.sinks) if each is not None)

    @functools.cached_property
    def rope(self) -> Rope:
        """Once the weights are loaded."""
        if self.q_norm is None or self.k_norm is None:
            return Rope(*self.tables)
        return Rope(*self.tables, self.q_norm.weight, self.k_norm.weight, self.q_norm.eps)

    def plan(self, batch: DeviceBatch, kv: LayerKV) -> None:
        """Before a forward pass; once for all layers of a group with such heads."""
        self.ops.plan(batch, self.heads, kv[0])

    def store(self, x: Rows, batch: DeviceBatch, kv: LayerKV) -> torch.Tensor:
        """Writes keys and values of a batch to their slots; returns the queries."""
        k, v = kv
        return self.ops.rope_and_store(self.qkv(x), batch, self.rope, self.heads, k, v, self.kv_scales.value)

    def __call__(self, x: Rows, batch: DeviceBatch, kv: LayerKV) -> torch.Tensor:
        (k, v), q = kv, self.store(x, batch, kv)
        sinks = None if self.sinks is None else self.sinks.logits
        return self.output(self.ops.attention(q, batch, self.heads, k, v, self.kv_scales.value, sinks))
