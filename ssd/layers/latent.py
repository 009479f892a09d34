"""Multi-head latent attention over paged KV: projections, norms and rotary embedding of one layer.

Prompts, single tokens, drafts and branches are all computed in the absorbed form, so that a row's bits are the same in
any batch. Each rank has some of the heads, and all of the KV.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import ClassVar, Final

import torch

from ssd.kernels.ops import DeviceBatch, Rope
from ssd.kernels.weights import Rows, Weight
from ssd.layers.attention import LayerKV
from ssd.layers.formats import Use
from ssd.layers.kv_scales import LayerScales
from ssd.layers.linear import ColumnLinear, Linear, ReplicatedLinear, RowLinear
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build, Parameter
from ssd.layers.rotary import RopeTables
from ssd.layers.spec import LatentSpec

# Of both norms inside of the attention, whatever `rms_norm_eps` is: the code that the models are published with, and
# transformers. vLLM takes `rms_norm_eps`, which is 1e-5 in GLM-4.7-Flash and Kimi K2.
_EPS: Final = 1e-6


class HeadProducts(Linear):
    """`kv_b_proj`: of each head the rows that make keys of a latent, then those that make values.

    `keys` multiplies queries (its heads are transposed), `values` the weighted sums of latents. Both are floats: a
    quantised weight is widened, since the columns of its scales are not those of the transposed product.
    """

    loaded: ClassVar[tuple[str, ...]] = ("keys", "values")

    def __init__(self, build: Build, name: str, spec: LatentSpec) -> None:
        self.spec, rows = spec, spec.key_dim + spec.value_dim
        super().__init__(build, {name: spec.num_heads * rows}, spec.latent_dim, unit=rows)
        self.keys = self.values = Weight()  # until they are loaded

    def cut(self, rows: int) -> tuple[slice, slice]:
        return self.tp.share(rows, self.unit), slice(None)

    def _prepare(self, stored: Seq[Mapping[str, torch.Tensor]], use: Use) -> None:
        wide = self.format.widened(stored[0])["weight"].to(self._dtype).view(-1, self.unit, self.in_features)
        keys, values = wide[:, : self.spec.key_dim].transpose(1, 2), wide[:, self.spec.key_dim :]
        self.keys, self.values = (
            self.ops.prepare(each.flatten(0, 1).contiguous(), experts=len(wide)) for each in (keys, values)
        )

    def num_bytes(self) -> int:
        return sum(self.parts.values()) * self.in_features * self._dtype.itemsize


class LatentAttention:
    """`LatentSpec` with its weights."""

    def __init__(self, build: Build, name: str, spec: LatentSpec, hidden_size: int, tables: RopeTables) -> None:
        self.spec = spec
        self.heads = spec.heads(build.tp.size)
        self.ops = build.ops
        rank = spec.query_rank or 0
        down = {f"{name}.q_a_proj": rank} if rank else {}
        self.qkv = ReplicatedLinear(build, {**down, f"{name}.kv_a_proj_with_mqa": spec.head_dim}, hidden_size)
        query = {f"{name}.{'q_b_proj' if rank else 'q_proj'}": spec.num_heads * spec.query_dim}
        self.query = ColumnLinear(build, query, rank or hidden_size, unit=spec.query_dim)
        self.query_norm = RMSNorm(build, f"{name}.q_a_layernorm", rank, _EPS, feeds=self.query) if rank else None
        self.latent_norm = RMSNorm(build, f"{name}.kv_a_layernorm", spec.latent_dim, _EPS)
        self.products = HeadProducts(build, f"{name}.kv_b_proj", spec)
        self.output = RowLinear(build, {f"{name}.o_proj": hidden_size}, spec.num_heads * spec.value_dim)
        self.tables = tables[spec.rope, spec.rope_dim]
        self.kv_scales = LayerScales(build, name)

    @property
    def reads(self) -> Linear | None:
        """What alone reads its input."""
        return None if self.query_norm is None else self.qkv

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.qkv, self.query, self.latent_norm, self.products, self.output)
        if self.query_norm is not None:
            yield self.query_norm

    @functools.cached_property
    def rope(self) -> Rope:
        """Once the weights are loaded."""
        return Rope(*self.tables, k_norm=self.latent_norm.weight, eps=_EPS)

    def plan(self, batch: DeviceBatch, kv: LayerKV) -> None:
        """Before a forward pass; once for all layers of a group with such heads."""
        self.ops.plan(batch, self.heads, kv[0])

    def store(self, x: Rows, batch: DeviceBatch, kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes the keys of a batch to their slots; returns the heads' queries, and those for latents, of which only
        the rotated columns are set."""
        spec, [cache], down = self.spec, kv, self.qkv(x)
        rank = spec.query_rank or 0
        query = self.query(x if self.query_norm is None else self.query_norm.rows(down[:, :rank], None))
        query = query.view(len(query), self.heads.num_heads, spec.query_dim)
        return query, self.ops.latent_rope_and_store(query, down[:, rank:], batch, self.rope, self.heads, cache)

    def __call__(self, x: Rows, batch: DeviceBatch, kv: LayerKV) -> torch.Tensor:
        (query, queries), [cache], heads = self.store(x, batch, kv), kv, self.heads
        self.products.keys.head_linear(query[:, :, : self.spec.key_dim], queries[:, :, : heads.latent_dim])
        latents = self.ops.attention(queries, batch, heads, cache, cache)
        latents = latents.view(len(latents), heads.num_heads, heads.value_dim)
        values = self.products.values.head_linear(latents)
        return self.output(values.view(len(values), heads.num_heads * self.spec.value_dim))
