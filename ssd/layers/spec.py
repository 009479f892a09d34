"""Descriptions of the layers of a decoder, as plain data: sizes of the whole model, of which each rank has a share.

A model family translates its `config.json` into a list of `LayerSpec`. Knows nothing of weights, files or kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from ssd.errors import UnsupportedModel
from ssd.kernels.ops import HeadShape
from ssd.kernels.weights import GLU, SWIGLU

if TYPE_CHECKING:
    import torch

MAX_HEAD_DIM: Final = 1 << 14


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base frequency and, for long-context models, how it is stretched."""

    theta: float = 10000.0
    scaling: Literal["default", "linear", "llama3", "yarn"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    original_max_position: int = 8192  # llama3, yarn
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn: the ramp begins and ends at whole dimensions
    attention_factor: float | None = None  # yarn; None: computed from `factor`


@dataclass(frozen=True)
class KVLayout:
    """What one layer keeps of a token on one rank: a tensor of each of these shapes."""

    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        return sum(map(math.prod, self.shapes)) * self.dtype.itemsize


@dataclass(frozen=True)
class KVGroup:
    """Layers that keep the same of a sequence's KV. They have a block table in common."""

    window: int | None  # last tokens that are kept; None: all
    layers: tuple[int, ...]


@dataclass(frozen=True)
class GQASpec:
    """Grouped-query attention with a rotary embedding."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope: RopeConfig
    qkv_bias: bool = False
    output_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k before the rotary embedding
    window: int | None = None  # tokens that a query sees; None: the whole context
    sinks: bool = False  # a logit of each query head in the softmax's denominator
    first_position: int = 0  # positions before it have no KV and are not seen

    def heads(self, ranks: int = 1) -> HeadShape:
        """The heads of one rank, which has a KV head at least."""
        kv_heads = max(1, self.num_kv_heads // ranks)
        return HeadShape(self.num_heads // ranks, kv_heads, self.head_dim, self.first_position, self.window or 0)

    def kv_layout(self, dtype: torch.dtype, ranks: int = 1) -> KVLayout:
        """Keys and values of one rank's KV heads."""
        each = self.heads(ranks).num_kv_heads, self.head_dim
        return KVLayout((each, each), dtype)

    def splits(self, ranks: int) -> bool:
        """Whether the heads can be split over so many ranks.

        KV heads may be fewer than ranks: several ranks then have the same one, and their own of its query heads.
        """
        fewer, more = sorted((ranks, self.num_kv_heads))
        return not (self.num_heads % ranks or more % fewer)

    @property
    def split_sizes(self) -> dict[str, int]:
        """What `splits` depends on, for errors."""
        return {"num_heads": self.num_heads, "num_kv_heads": self.num_kv_heads}

    @property
    def activation_width(self) -> int:
        return 4 * self.num_heads * self.head_dim

    def check(self) -> None:
        """UnsupportedModel for heads that the kernels cannot compute, and impossible scalings of the rope."""
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_key_value_heads={self.num_kv_heads} does not divide num_attention_heads={self.num_heads}"
            )
        if self.head_dim % 2 or not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise UnsupportedModel(
                f"head_dim={self.head_dim}: the rotary embedding needs an even number from 2 to {MAX_HEAD_DIM}"
            )
        rope = self.rope
        if rope.scaling == "llama3" and rope.high_freq_factor <= rope.low_freq_factor:
            raise UnsupportedModel(
                f"high_freq_factor={rope.high_freq_factor}: expected more than low_freq_factor={rope.low_freq_factor}"
            )


# The kinds of attention, a union: a further one is added here, and its layer to `DecoderLayer`.
AttentionSpec: TypeAlias = GQASpec


@dataclass(frozen=True)
class MLPSpec:
    """A gated MLP: down(silu(gate(x)) * up(x))."""

    intermediate_size: int
    bias: bool = False

    def splits(self, ranks: int) -> bool:
        return self.intermediate_size % ranks == 0

    def activation_width(self, hidden_size: int) -> int:
        return 3 * self.intermediate_size


@dataclass(frozen=True)
class ExpertNames:
    """Names of experts in a checkpoint: LAYER.block.router, LAYER.block.experts.N.gate, .up and .down."""

    block: str = "mlp"
    router: str = "gate"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


@dataclass(frozen=True)
class ExpertsSpec:
    """A mixture of experts, gated MLPs of which a router chooses some for each token.

    A softmax of its logits weighs them: over the chosen experts (`softmax_of_chosen`; the same as over all, divided by
    the sum of the chosen ones' weights), or over all.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of each expert
    softmax_of_chosen: bool = True
    bias: bool = False  # of the router and the experts
    glu: GLU = SWIGLU
    names: ExpertNames = ExpertNames()
    interleaved: bool = False  # tensors of all experts have gate and up in turns, and are [inputs, outputs] if dense

    def splits(self, ranks: int) -> bool:
        return self.intermediate_size % ranks == 0

    def activation_width(self, hidden_size: int) -> int:
        return 3 * self.num_experts + self.experts_per_token * (3 * self.intermediate_size + 2 * hidden_size)


@dataclass(frozen=True)
class LayerSpec:
    """Attention and feed-forward of one layer, each behind an RMS norm and added to the residual stream."""

    attention: AttentionSpec
    mlp: MLPSpec | ExpertsSpec

    def splits(self, ranks: int) -> bool:
        return self.attention.splits(ranks) and self.mlp.splits(ranks)

    @property
    def split_sizes(self) -> dict[str, int]:
        """What `splits` depends on, for errors."""
        return {**self.attention.split_sizes, "intermediate_size": self.mlp.intermediate_size}

    def activation_width(self, hidden_size: int) -> int:
        """Upper estimate of a layer's intermediate results: numbers per row."""
        return 8 * hidden_size + self.mlp.activation_width(hidden_size) + self.attention.activation_width
