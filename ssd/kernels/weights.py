"""A prepared weight, which knows how to multiply. `Ops.prepare` and `Ops.prepare_codes` make them for a device."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, TypeAlias

if TYPE_CHECKING:  # `ssd --help` lists shapes, and does not need torch
    import torch

RowType = Literal["fp8", "int8"]  # what rows can be rounded to


class RoundedRows(NamedTuple):
    """Rows in 8-bit floats or integers. x is values * scales, with a scale for each row or each group of a row."""

    values: torch.Tensor  # in the type of the products, or as 8-bit floats where kernels take those
    scales: torch.Tensor  # float32 [rows, 1 or groups of the weight]


Rows: TypeAlias = "torch.Tensor | RoundedRows"
Norm: TypeAlias = "Callable[[torch.Tensor, torch.Tensor, float, torch.Tensor | None], RoundedRows]"


@dataclass(frozen=True)
class RowRounding:
    """What rows are rounded to before a product: e4m3 or integers of 8 bits.

    `group`: columns of one scale, that of their largest number; None: all columns. `scale`: this one [1, 1] instead.
    `powers`: scales are rounded up to powers of two (ue8m0).
    """

    kind: RowType = "fp8"
    group: int | None = None
    scale: torch.Tensor | None = None
    powers: bool = False


def rows_and_scales(
    x: Rows, rounding: RowRounding | None, round_rows: Callable[[torch.Tensor, RowRounding], RoundedRows]
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Rows as they are multiplied, rounded if that is wanted and was not done before, and their scales."""
    if not isinstance(x, RoundedRows):
        if rounding is None:
            return x, None
        x = round_rows(x, rounding)
    return x.values, x.scales.contiguous()


class GLU(NamedTuple):
    """What gate and up rows of a gated weight become: silu(gate) * (up + shift), with silu(x) = x sigmoid(slope x),
    after the gate was limited from above and up on both sides."""

    slope: float = 1.0
    limit: float = math.inf
    shift: float = 0.0


SWIGLU = GLU()


class RoutingRule(NamedTuple):
    """How a row's experts are chosen from its logits and weighed, the lower expert first where they are equal.

    By the largest logits; their weights are a softmax, over the chosen ones (`normalized`) or over all experts. With
    `sigmoid`: by the largest sums of the logit's sigmoid and the expert's correction, from the `kept_groups` groups (of
    consecutive experts) whose two largest sums add up to most; their weights are the sigmoids, divided by the sum of
    the chosen ones' (`normalized`). All weights are multiplied by `scale`. Every row has `shared` more experts, with
    the numbers behind those of the logits and the weight 1.
    """

    normalized: bool = True
    sigmoid: bool = False
    groups: int = 1
    kept_groups: int = 1
    scale: float = 1.0
    shared: int = 0


SOFTMAX_OF_CHOSEN = RoutingRule()


@dataclass
class Routing:
    """The experts of each row. Pair p is the row p // k with the expert that comes p % k-th among its k experts."""

    experts: torch.Tensor  # int32 [rows, k], the largest weight first, and last those of all rows
    weights: torch.Tensor  # float32 [rows, k]
    order: torch.Tensor  # int32 [rows * k]: the pairs, by expert
    starts: torch.Tensor  # int32 [experts + 1]: where those of each expert begin in `order`
    tiles: torch.Tensor | None = None  # int32 [tiles, 3], on a GPU: expert or -1, and its part of `order`
    settled: bool = False  # a product was launched that waits for it before it lets later kernels begin (`launch`)

    @property
    def num_experts(self) -> int:
        return len(self.starts) - 1


class Weight:
    """A weight [out, in], or those of experts, as the kernels of a device read it. x is always [rows, in].

    A gated one, whose first half were gate rows and its second half up rows, gives silu(gate) * up.
    """

    dense: torch.Tensor | None = None  # the weight itself, gate and up rows in turns, where a GPU has it unquantised
    norm_and_round: Norm | None = None  # `Ops.rms_norm`, then rows as `linear` rounds them, where one kernel does both

    def linear(self, x: Rows, bias: torch.Tensor | None = None, *, float32: bool = False) -> torch.Tensor:
        """x W^T (+ bias); `float32`: the accumulators as they are, not rounded to x's type."""
        raise NotImplementedError

    def router(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        """x W^T (+ bias) in float32 [rows, experts], or what `Ops.route` makes it from."""
        return self.linear(x, bias, float32=True)

    def expert_linear(
        self,
        x: Rows,
        routing: Routing,
        bias: torch.Tensor | None = None,
        *,
        glu: GLU | None = None,
        float32: bool = False,
    ) -> torch.Tensor:
        """Each pair's row times its expert's part of a weight that was prepared for experts: [pairs, columns].

        x has a row for each pair, or one for all pairs of a row. `glu`: of a gated weight. `bias` is in the order of
        the rows that were prepared.
        """
        raise NotImplementedError

    def head_linear(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        """y[:, h] = x[:, h] W_h^T of each head h: x [rows, heads, in], y [rows, heads, out] (None: a new one), with any
        strides of rows and heads. W_h is the h-th expert's part of a weight of floats that was prepared for experts."""
        raise NotImplementedError

    def embedding(self, token_ids: torch.Tensor) -> torch.Tensor:
        """Rows of the weight, in the type of its products."""
        raise NotImplementedError
