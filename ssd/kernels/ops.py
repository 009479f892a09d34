"""The interface between the decoder and the kernels of a device.

Three implementations: plain torch (`reference`), C on the CPU (`cpu`), Triton on CUDA (`triton`). The latter two
are *row-invariant*: a row's bits never depend on how many rows are computed together, nor on which.
"""

from __future__ import annotations

import copy
import functools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:  # `ssd --help` lists shapes, and does not need torch
    import torch

    from ssd.kernels.codes import Codes, RowType


@dataclass(frozen=True)
class Branches:
    """Every query token is the newest token of a branch: an alternative continuation with KV slots of its own."""

    depth: int  # tokens of the branch before the query token
    slots_per_branch: int  # consecutive KV slots reserved for each branch


@dataclass(frozen=True)
class DeviceBatch:
    """A `Batch` as tensors on the device."""

    token_ids: torch.Tensor  # int32 [T]
    positions: torch.Tensor  # int32 [T]
    slot_mapping: torch.Tensor  # int32 [T], where each token's KV is written; -1: nowhere (padding)
    query_start: torch.Tensor  # int32 [S + 1]
    context_len: torch.Tensor  # int32 [S]
    block_tables: torch.Tensor  # int32 [rows, blocks]
    table_rows: torch.Tensor  # int32 [S]: each sequence's row of the block tables
    tiles: torch.Tensor  # int32 [2, tiles]: sequence (-1: padding) and first query token of each decode-size tile
    prefill_tiles: torch.Tensor | None  # likewise, of larger tiles for sequences with many query tokens
    logit_rows: torch.Tensor | None  # int64 [rows]; None: all rows in order
    branches: Branches | None = None  # every row is a branch (without prefill_tiles; context_len is not used)
    others: tuple[DeviceBatch, ...] = ()  # the same for further groups of layers, with their own KV slots and blocks

    def again(self) -> DeviceBatch:
        """The same tensors for another pass: attention plans its work once for each object."""
        _ = self.memory  # which the copies have, too
        made = copy.copy(self)
        if self.others:
            object.__setattr__(made, "others", tuple(each.again() for each in self.others))
        return made

    @functools.cached_property
    def memory(self) -> tuple[object, ...]:
        """Where it is, and its shape: what the calls of a forward pass on a CPU depend on."""
        tables, ids = self.block_tables, self.token_ids
        others = (self.positions, self.slot_mapping, self.query_start, self.context_len, self.table_rows)
        return (
            *(ids.data_ptr(), len(ids), ids.dtype, len(self.table_rows), self.branches),
            *(tables.data_ptr(), tables.shape, tables.stride(0), *(each.data_ptr() for each in others)),
        )


@dataclass(frozen=True)
class HeadShape:
    """The attention heads of one rank."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    first_position: int = 0  # positions before it are not seen: 0, or 1 (in batches without prefill_tiles)
    window: int = 0  # positions that a query sees, its own included; 0: all

    @functools.cached_property
    def scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def group_size(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True)
class Rope:
    """Rotary tables (float32 [positions, head_dim / 2]) and, for families that have them, the q and k norms."""

    cos: torch.Tensor
    sin: torch.Tensor
    q_norm: torch.Tensor | None = None
    k_norm: torch.Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True)
class KVScales:
    """What the stored keys and values of a layer are multiplied by. Only those in fp8 have scales."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = KVScales()


@dataclass(frozen=True)
class GLU:
    """What gate and up rows of a gated weight become: silu(gate) * (up + shift), with silu(x) = x sigmoid(slope x),
    after the gate was limited from above and up on both sides."""

    slope: float = 1.0
    limit: float = math.inf
    shift: float = 0.0


SWIGLU = GLU()


@dataclass
class Routing:
    """The experts of each row. Pair p is the row p // k with the expert that comes p % k-th among its k experts."""

    experts: torch.Tensor  # int32 [rows, k], the largest weight first
    weights: torch.Tensor  # float32 [rows, k]
    order: torch.Tensor  # int32 [rows * k]: the pairs, by expert
    starts: torch.Tensor  # int32 [experts + 1]: where those of each expert begin in `order`
    tiles: torch.Tensor | None = None  # int32 [tiles, 3], on a GPU: expert or -1, and its part of `order`
    settled: bool = False  # a product was launched that waits for it before it lets later kernels begin (`launch`)

    @property
    def num_experts(self) -> int:
        return len(self.starts) - 1


class ExpertOutputs(NamedTuple):
    """What the experts of each row give, before it is added up (`Ops.combine`)."""

    pairs: torch.Tensor  # [pairs, width]
    routing: Routing


class RoundedRows(NamedTuple):
    """Rows in 8-bit floats or integers, and their scales, float32 [rows, groups]."""

    values: torch.Tensor
    scales: torch.Tensor


Rows: TypeAlias = "torch.Tensor | RoundedRows"


class Ops(Protocol):
    """Weights are passed to `prepare` once, which lays them out as the device needs; x is always [rows, width]."""

    def reserve(self, heads: HeadShape, device: torch.device) -> None:
        """Allocates the scratch of `attention`."""

    def tile_tokens(self, heads: HeadShape, prefill: bool) -> int:
        """Query tokens of one attention tile."""

    def prepare(self, weight: torch.Tensor, *, gated: bool = False, experts: int = 0) -> Any:
        """Lays out a weight [out, in]. `gated`: its first half are gate rows, its second half up rows.

        `experts`: those of so many experts, one after the other (of a gated weight all gate rows, then all up rows);
        for `expert_linear`.
        """

    def embedding(self, weight: Any, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of a prepared weight."""

    def linear(
        self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None, *, float32: bool = False
    ) -> torch.Tensor:
        """x W^T (+ bias); `float32`: the accumulators as they are, not rounded to x's type."""

    def gated_linear(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None = None) -> torch.Tensor:
        """silu(gate) * up of a weight prepared with `gated`."""

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
    ) -> Any:
        """Lays out a quantised weight for products with rows of type `dtype`, else as `prepare`.

        Not `exact`: for drafts, whose products need not be row-invariant. `rows`: what whole rows are rounded to
        before every product (`round_rows`). `coarse`: rows may be rounded to integers of 8 bits, with a scale for each
        group of the weight (of 128 at most): a CPU multiplies such integers several times as fast.
        """

    def codes_linear(
        self,
        x: torch.Tensor,
        weight: Any,
        bias: torch.Tensor | None = None,
        *,
        gated: bool = False,
        float32: bool = False,
        row_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`linear` or `gated_linear` with a weight of `prepare_codes`.

        `row_scales`: x was divided by them, float32 [rows, 1 or groups of the weight]; the sums (of each group) are
        multiplied by them.
        """

    def router(self, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        """x W^T (+ bias) in float32 [rows, experts], or what `route` makes it from."""

    def route(self, logits: torch.Tensor, count: int, *, chosen: bool) -> Routing:
        """The `count` experts of each row with the largest logits, the lower one first where they are equal. Their
        weights are a softmax: over the chosen ones, or over all experts."""

    def expert_linear(
        self,
        x: torch.Tensor,
        weight: Any,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
        row_scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Each pair's row times its expert's part of a weight that was prepared for experts: [pairs, columns].

        x has a row for each pair, or one for all pairs of a row. `glu`: of a gated weight. `bias` is in the order of
        the rows that were prepared; `row_scales` as in `codes_linear`.
        """

    def combine(self, x: torch.Tensor, routing: Routing, *, float32: bool = False) -> torch.Tensor:
        """The sum of each row's pairs (x: [pairs, width]) times their weights, in the order of its experts: float32,
        rounded at the end if not `float32`."""

    def round_rows(
        self, x: torch.Tensor, group: int | None, kind: RowType, stored: torch.Tensor | None, weight: Any = None
    ) -> RoundedRows:
        """Each row of x in 8-bit floats (e4m3) or integers, in x's type or (if it has kernels for that) as the products
        of `weight` take them.

        A scale for each `group` columns, or for all; `stored`: it is this one [1, 1], else that of the largest number.
        """

    def codes_embedding(self, weight: Any, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of a weight of `prepare_codes`, widened to the type of its products."""

    def rms_norm(
        self, x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None = None
    ) -> torch.Tensor:
        """RMS norm of x, or of residual + x (rounded to its type), which is written to the contiguous `residual`.

        What is normalised is rounded to the type of the weight, that of x or float32, before they are multiplied.
        """

    def combine_and_norm(
        self, x: ExpertOutputs, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        """`rms_norm` of what `combine` makes of x. The residual has not been written since the routing was made."""

    def rms_norm_and_round(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        kind: RowType,
        target: Any,
    ) -> RoundedRows:
        """`rms_norm`, then `round_rows` with one scale a row for products of the weight `target`."""

    def plan(self, batch: DeviceBatch, heads: HeadShape, k_cache: torch.Tensor) -> None:
        """Before a forward pass, if at all: prepares attention of layers with such heads and caches."""

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
        """Rotates q and k, writes k and v to their slots of [blocks, block_size, kv_heads, dim]; returns q.

        Caches have the type of `qkv` or are in fp8 (`reference.encode`).
        """

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
        """Causal attention of q [T, heads, dim] over paged KV; [T, heads * dim]. Position p sees those after
        p - heads.window, if there is a window.

        `sinks`: float32 [heads], logits beside those of the keys (not multiplied by the softmax scale) that have no
        value: exp(sink) is added to the softmax's denominator.

        With `branches` of depth s, row r sees its sequence's positions before positions[r] - s through the block table,
        then its own slots slot_mapping[r] - s .. slot_mapping[r]. The result of a padding row (slot -1) is undefined.
        """


class SharedOps:
    """What implementations of `Ops` have in common, unless they have a kernel for it."""

    def plan(self, batch: DeviceBatch, heads: HeadShape, k_cache: torch.Tensor) -> None:
        return

    def router(self: Ops, x: torch.Tensor, weight: Any, bias: torch.Tensor | None) -> torch.Tensor:
        return self.linear(x, weight, bias, float32=True)

    def combine_and_norm(
        self: Ops, x: ExpertOutputs, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return self.rms_norm(self.combine(*x), weight, eps, residual)

    def rms_norm_and_round(
        self: Ops,
        x: torch.Tensor,
        weight: torch.Tensor,
        eps: float,
        residual: torch.Tensor | None,
        kind: RowType,
        target: Any,
    ) -> RoundedRows:
        return self.round_rows(self.rms_norm(x, weight, eps, residual), None, kind, None, target)
