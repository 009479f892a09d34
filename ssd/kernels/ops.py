"""The interface between the decoder and the kernels of a device.

Two implementations: C on the CPU (`cpu`), Triton on CUDA (`triton`). Both are *row-invariant*: a row's bits never
depend on how many rows are computed together, nor on which.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:  # `ssd --help` lists shapes, and does not need torch
    import torch

    from ssd.kernels.codes import Codes
    from ssd.kernels.cpu.recording import Recordings
    from ssd.kernels.weights import Routing, RoutingRule, RowRounding, Weight


@dataclass(frozen=True)
class Branches:
    """Every query token is the newest token of a branch: an alternative continuation with KV slots of its own."""

    depth: int  # tokens of the branch before the query token
    slots_per_branch: int  # consecutive KV slots reserved for each branch
    depths: torch.Tensor | None = None  # int32 [T]: of each row, in place of `depth`; on a CPU

    @property
    def memory(self) -> tuple[int, ...]:
        """What the calls of a forward pass on a CPU depend on."""
        return self.depth, self.slots_per_branch, 0 if self.depths is None else self.depths.data_ptr()


class TreePaths(NamedTuple):
    """Where queries that are nodes of token trees have their ancestors, whose rows are in this batch or in others.

    Position p of row r, from decided[r] on, is that of the row paths[r, p - decided[r]]: of an ancestor, or its own.
    """

    paths: torch.Tensor  # int32 [T, depth]
    decided: torch.Tensor  # int32 [T]: positions that are read through the block table; of other rows beyond them all
    slots: torch.Tensor  # int32: the KV slot of each row that paths name


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
    # Positions are those of `positions` then, and context_len is not used (rows in prefill_tiles are no nodes).
    tree: TreePaths | None = None
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
        tree = () if self.tree is None else tuple(each.data_ptr() for each in self.tree)
        branches = () if self.branches is None else self.branches.memory
        return (
            *(ids.data_ptr(), len(ids), ids.dtype, len(self.table_rows), branches, tree),
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
    latent_dim: int = 0  # of latent attention, see `value_dim`; 0: keys and values are tensors of their own
    softmax_scale: float = 0.0  # 0: that of `head_dim`

    @functools.cached_property
    def scale(self) -> float:
        return self.softmax_scale or float(self.head_dim**-0.5)

    @property
    def value_dim(self) -> int:
        """Columns of a value. In latent attention a value is the first `latent_dim` columns of its key: the caches of
        keys and values are one tensor, of one KV head."""
        return self.latent_dim or self.head_dim

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


class ExpertOutputs(NamedTuple):
    """What the experts of each row give, before it is added up (`Ops.combine`)."""

    pairs: torch.Tensor  # [pairs, width]
    routing: Routing
    shared: torch.Tensor | None = None  # float32 [rows, width], from the experts of all rows


class Ops(Protocol):
    """Weights are passed to `prepare` once, which makes objects of them that multiply; x is always [rows, width]."""

    wide_bytes: int  # of memory that copies of quantised weights in the type of their products may take, on a GPU

    def recordings(self) -> Recordings | None:
        """A place for recordings of its calls; None: there are none, calls are captured in CUDA graphs."""

    def reserve(self, heads: Seq[HeadShape], device: torch.device, *, ahead: bool = False) -> None:
        """Allocates the scratch of `attention` in layers with these heads, whatever their windows.

        `ahead`: passes may be launched on a stream that has priority over others which compute at the same time.
        """

    def tile_tokens(self, heads: Seq[HeadShape], prefill: bool) -> int:
        """Query tokens of one attention tile, the same in layers with any of these heads."""

    def prepare(self, weight: torch.Tensor, *, gated: bool = False, experts: int = 0) -> Weight:
        """Lays out a weight [out, in]. `gated`: its first half are gate rows, its second half up rows.

        `experts`: those of so many experts, one after the other (of a gated weight all gate rows, then all up rows).
        """

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
        """Lays out a quantised weight for products with rows of type `dtype`, else as `prepare`.

        `rows`: what rows are rounded to before every product. `coarse`: rows may be rounded to integers of 8 bits, with
        a scale for each group of the weight (of 128 at most): a CPU multiplies such integers several times as fast.
        """

    def route(
        self, logits: torch.Tensor, count: int, rule: RoutingRule, correction: torch.Tensor | None = None
    ) -> Routing:
        """The `count` experts of each row and their weights, and those that all rows have (`RoutingRule.shared`).

        `correction`: float32 [experts], see `RoutingRule`.
        """

    def combine(
        self, x: torch.Tensor, routing: Routing, shared: torch.Tensor | None = None, *, float32: bool = False
    ) -> torch.Tensor:
        """The sum of each row's pairs (x: [pairs, width]) times their weights, in the order of its experts, plus
        `shared` (float32 [rows, width]): float32, rounded at the end if not `float32`."""

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

    def latent_rope_and_store(
        self, q: torch.Tensor, kv: torch.Tensor, batch: DeviceBatch, rope: Rope, heads: HeadShape, cache: torch.Tensor
    ) -> torch.Tensor:
        """For latent attention: writes keys to their slots of [blocks, block_size, 1, dim], and returns queries
        [T, heads, dim] of which only the columns from `latent_dim` on are set.

        These are the last ones of q's heads [T, heads, any], rotated; a key is the norm (`rope.k_norm`) of the first
        `latent_dim` columns of kv [T, dim], and the others, rotated. Pairs of neighbours are rotated.
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
        """Causal attention of q [T, heads, dim] over paged KV; [T, heads * value_dim]. Position p sees those after
        p - heads.window, if there is a window. Latent attention (`HeadShape.value_dim`) has no windows and no scales.

        `sinks`: float32 [heads], logits beside those of the keys (not multiplied by the softmax scale) that have no
        value: exp(sink) is added to the softmax's denominator.

        With `branches`, row r of depth s sees its sequence's positions before positions[r] - s through the block table,
        then its own slots slot_mapping[r] - s .. slot_mapping[r]. The result of a padding row (slot -1) is undefined.
        With a `tree`, the bits of a row are those of the same keys and values in a chain.
        """


class SharedOps:
    """What implementations of `Ops` have in common, unless they have a kernel for it."""

    wide_bytes = 0

    def recordings(self) -> Recordings | None:
        return None

    def plan(self, batch: DeviceBatch, heads: HeadShape, k_cache: torch.Tensor) -> None:
        return

    def combine_and_norm(
        self: Ops, x: ExpertOutputs, weight: torch.Tensor, eps: float, residual: torch.Tensor | None
    ) -> torch.Tensor:
        return self.rms_norm(self.combine(*x), weight, eps, residual)
