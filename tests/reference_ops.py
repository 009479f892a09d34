"""The kernels in plain torch, for any device and dtype. The reference for tests of the other kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from ssd.kernels.codes import Codes, dequantize, rounded_rows
from ssd.kernels.ops import UNSCALED, DeviceBatch, HeadShape, KVScales, Rope, SharedOps
from ssd.kernels.weights import GLU, Routing, RoutingRule, RowRounding, Rows, Weight

_E4M3_MAX = 448.0


@dataclass(frozen=True)
class ReferenceWeight(Weight):
    wide: torch.Tensor  # also of a quantised weight
    gated: bool = False
    rounding: RowRounding | None = None
    dense: torch.Tensor | None = None

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        y = F.linear(self._rows(x), self.wide, bias)
        if self.gated:
            gate, up = y.chunk(2, dim=-1)
            y = F.silu(gate) * up
        return y.float() if float32 else y

    def expert_linear(
        self,
        x: Rows,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
    ) -> torch.Tensor:
        x, halves, experts = self._rows(x), 1 if glu is None else 2, routing.num_experts
        weights = self.wide.view(halves, experts, -1, self.wide.shape[1])
        y = x.new_empty(len(routing.order), len(self.wide) // experts)
        repeats = len(y) // len(x)
        for expert, (start, end) in enumerate(itertools.pairwise(routing.starts.tolist())):
            if start < end:
                pairs, own = routing.order[start:end], weights[:, expert].flatten(0, 1)
                biases = None if bias is None else bias.view(halves, experts, -1)[:, expert].flatten()
                y[pairs] = F.linear(x[pairs // repeats], own, biases)
        if glu is not None:
            y = _gated(y, glu)
        return y.float() if float32 else y

    def head_linear(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        weights = self.wide.view(x.shape[1], -1, x.shape[2])
        made = torch.einsum("rhi,hoi->rho", x, weights)
        return made if y is None else y.copy_(made)

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.wide[token_ids]

    def _rows(self, x: Rows) -> torch.Tensor:
        """Rounded, if they are to be, as numbers without scales."""
        if isinstance(x, torch.Tensor):
            if self.rounding is None:
                return x
            x = rounded_rows(x, self.rounding)
        values, scales = x
        return (values.view(len(values), scales.shape[1], -1) * scales[:, :, None]).flatten(1).to(self.wide.dtype)


class ReferenceOps(SharedOps):
    """Plain torch. Not row-invariant: the libraries choose their algorithm by the number of rows."""

    def reserve(self, heads: Seq[HeadShape], device: torch.device, *, ahead: bool = False) -> None:
        return

    def tile_tokens(self, heads: Seq[HeadShape], prefill: bool) -> int:
        return 1 << 30  # one tile per sequence: tiles are not used here

    def prepare(self, weight: torch.Tensor, *, gated: bool = False, experts: int = 0) -> Weight:
        return ReferenceWeight(weight, gated, dense=weight)

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
        return ReferenceWeight(dequantize(codes, dtype), gated, rows)

    def route(
        self, logits: torch.Tensor, count: int, rule: RoutingRule, correction: torch.Tensor | None = None
    ) -> Routing:
        scores = numbers = logits.sigmoid() if rule.sigmoid else logits
        if correction is not None:
            scores = scores + correction
        if rule.groups > 1:
            groups = scores.view(len(scores), rule.groups, -1)
            best = groups.topk(2, dim=2).values.sum(2).argsort(dim=1, descending=True, stable=True)
            dropped = torch.zeros_like(best, dtype=torch.bool).scatter_(1, best[:, rule.kept_groups :], True)
            scores = groups.masked_fill(dropped[:, :, None], -torch.inf).flatten(1)
        ids = scores.argsort(dim=1, descending=True, stable=True)[:, :count]
        if not rule.sigmoid:
            numbers = (logits - logits.amax(1, keepdim=True)).exp()
        weights = numbers.gather(1, ids)
        if rule.normalized or not rule.sigmoid:
            weights = weights / ((weights if rule.normalized else numbers).sum(1, keepdim=True) + 1e-20 * rule.sigmoid)
        weights = weights * rule.scale
        last = torch.arange(rule.shared, device=ids.device) + logits.shape[1]
        ids = torch.cat([ids, last.expand(len(ids), -1)], 1)
        weights = torch.nn.functional.pad(weights, (0, rule.shared), value=1.0)
        by_expert = ids.flatten().sort(stable=True)
        firsts = torch.arange(logits.shape[1] + rule.shared + 1, device=ids.device)
        starts = torch.searchsorted(by_expert.values, firsts, out_int32=True)
        return Routing(ids.int(), weights, by_expert.indices.int(), starts)

    def combine(
        self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None = None, *, float32: bool = False
    ) -> torch.Tensor:
        weighted = x.view(*routing.weights.shape, -1).float() * routing.weights[:, :, None]
        total = functools.reduce(torch.add, weighted.unbind(1))
        total = total if shared is None else total + shared
        return total if float32 else total.to(x.dtype)

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        if residual is not None:
            x = residual.add_(x)
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        return (weight * wide.to(weight.dtype)).to(x.dtype)

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
        kv = heads.num_kv_heads
        q, k, v = torch.split(qkv.view(len(qkv), -1, heads.head_dim), [heads.num_heads, kv, kv], dim=1)
        if rope.q_norm is not None and rope.k_norm is not None:
            q, k = self.rms_norm(q, rope.q_norm, rope.eps), self.rms_norm(k, rope.k_norm, rope.eps)
        cos, sin = rope.cos[batch.positions][:, None], rope.sin[batch.positions][:, None]
        kept = batch.slot_mapping >= 0
        slots = batch.slot_mapping[kept]
        k = _rotate(k, cos, sin)
        for cache, new, scale in ((k_cache, k, scales.k), (v_cache, v, scales.v)):
            stored = encode(new, scale) if cache.dtype is torch.float8_e4m3fn else new
            cache.view(-1, kv, heads.head_dim)[slots] = stored[kept]
        return _rotate(q, cos, sin)

    def latent_rope_and_store(
        self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, rope: Rope, heads: HeadShape, cache: torch.Tensor
    ) -> torch.Tensor:
        latent, cos, sin = heads.latent_dim, rope.cos[batch.positions], rope.sin[batch.positions]
        assert rope.k_norm is not None
        normed = self.rms_norm(kv[:, :latent], rope.k_norm, rope.eps)
        keys = torch.cat((normed, _rotate_pairs(kv[:, latent : heads.head_dim], cos, sin)), dim=1)
        kept = batch.slot_mapping >= 0
        cache.view(-1, heads.head_dim)[batch.slot_mapping[kept]] = keys[kept]
        turned = _rotate_pairs(q[:, :, latent - heads.head_dim :], cos[:, None], sin[:, None])
        return torch.cat((turned.new_full((*q.shape[:2], latent), torch.nan), turned), dim=2)

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
        if k_cache.dtype is torch.float8_e4m3fn:
            wide = self.attention(q.float() * scales.k, batch, heads, k_cache.float(), v_cache.float(), sinks=sinks)
            return (wide * scales.v).to(q.dtype)
        if batch.branches is not None:
            return _attend_branches(q, batch, batch.branches.depth, heads, k_cache, v_cache, sinks)
        starts, lengths, places = (t.tolist() for t in (batch.query_start, batch.context_len, batch.table_rows))
        out = q.new_empty((*q.shape[:2], heads.value_dim))
        for s, length in enumerate(lengths):
            rows = slice(starts[s], starts[s + 1])
            table = batch.block_tables[places[s], : -(-length // k_cache.shape[1])]
            k, v = (_gather(cache, table, length)[:, heads.first_position :] for cache in (k_cache, v_cache))
            out[rows] = _attend(q[rows], k, v, heads, sinks)
        return out.flatten(1)


def _gated(y: torch.Tensor, glu: GLU) -> torch.Tensor:
    gate, up = y.chunk(2, dim=-1)
    gate, up = gate.clamp(max=glu.limit), up.clamp(-glu.limit, glu.limit)
    return gate * torch.sigmoid(glu.slope * gate) * (up + glu.shift)


def encode(x: torch.Tensor, scale: float) -> torch.Tensor:
    """Keys or values as a KV cache in fp8 has them: e4m3(x / scale), the nearest (ties to even) of up to ±448."""
    wide = x.float() / torch.tensor(scale, dtype=torch.float32, device=x.device)
    return wide.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    low, high = x.float().chunk(2, dim=-1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1).to(x.dtype)


def _rotate_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, odd * cos + even * sin), dim=-1).flatten(-2).to(x.dtype)


def _gather(cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    return cache[table].flatten(0, 1)[:length].transpose(0, 1)  # [kv_heads, length, dim]


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, heads: HeadShape, sinks: torch.Tensor | None
) -> torch.Tensor:
    num_rows, length = q.shape[0], k.shape[1]
    position = torch.arange(length - num_rows, length, device=q.device)
    distance = position[:, None] - torch.arange(length, device=q.device)
    visible = (distance >= 0) & (distance < (heads.window or length))
    k, v = (t.repeat_interleave(heads.group_size, dim=0) for t in (k, v[..., : heads.value_dim]))
    if sinks is not None:  # a key and a value of zeros, whose score is the sink
        k, v = (F.pad(t, (0, 0, 0, 1)) for t in (k, v))
        unseen = torch.zeros(visible.shape, dtype=q.dtype, device=q.device).masked_fill(~visible, -torch.inf)
        beside = sinks.to(q.dtype)[:, None, None].expand(-1, num_rows, 1)
        visible = torch.cat((unseen.expand(len(sinks), -1, -1), beside), dim=-1)[None]
    out = F.scaled_dot_product_attention(q.transpose(0, 1)[None], k[None], v[None], visible, scale=heads.scale)
    return out[0].transpose(0, 1)


def _attend_branches(
    q: torch.Tensor,
    batch: DeviceBatch,
    depth: int,
    heads: HeadShape,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    out = q.new_zeros((*q.shape[:2], heads.value_dim))
    positions, slots = batch.positions.tolist(), batch.slot_mapping.tolist()
    in_block = torch.arange(k_cache.shape[1], device=q.device)
    tables = batch.block_tables[batch.table_rows]
    for table, rows in zip(tables, itertools.pairwise(batch.query_start.tolist()), strict=True):
        shared = (table[:, None] * k_cache.shape[1] + in_block).flatten()
        for row in range(*rows):
            if slots[row] < 0:
                continue
            own = torch.arange(slots[row] - depth, slots[row] + 1, device=q.device)
            seen = torch.cat((shared[heads.first_position : positions[row] - depth], own))[-heads.window :]
            k, v = (cache.flatten(0, 1)[seen].transpose(0, 1) for cache in (k_cache, v_cache))
            out[row] = _attend(q[row : row + 1], k, v, heads, sinks)[0]
    return out.flatten(1)
