"""Descriptions of the layers of a decoder, as plain data: sizes of the whole model, of which each rank has a share.

A model family translates its `config.json` into a list of `LayerSpec`. Knows nothing of weights, files or kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Final, Literal, TypeAlias

from ssd.errors import UnsupportedModel
from ssd.kernels.ops import HeadShape
from ssd.kernels.weights import GLU, SOFTMAX_OF_CHOSEN, SWIGLU, RoutingRule

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

    def check(self) -> None:
        """UnsupportedModel for a range of frequencies that ends before it begins."""
        if self.scaling == "llama3" and self.high_freq_factor <= self.low_freq_factor:
            raise UnsupportedModel(
                f"high_freq_factor={self.high_freq_factor}: expected more than low_freq_factor={self.low_freq_factor}"
            )
        if self.scaling == "yarn" and self.beta_fast < self.beta_slow:
            raise UnsupportedModel(f"beta_fast={self.beta_fast}: expected at least beta_slow={self.beta_slow}")


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
        """UnsupportedModel for heads that the kernels cannot compute."""
        if self.num_heads % self.num_kv_heads:
            raise UnsupportedModel(
                f"num_key_value_heads={self.num_kv_heads} does not divide num_attention_heads={self.num_heads}"
            )
        if self.head_dim % 2 or not 0 < self.head_dim <= MAX_HEAD_DIM:
            raise UnsupportedModel(
                f"head_dim={self.head_dim}: the rotary embedding needs an even number from 2 to {MAX_HEAD_DIM}"
            )
        self.rope.check()


@dataclass(frozen=True)
class LatentSpec:
    """Multi-head latent attention (MLA) of DeepSeek-V3: what is kept of a token is a latent, of which each head makes
    its key and value, and one rotated key that all heads share.

    It is computed in the absorbed form for all batches: queries are multiplied by a head's key weights, so that the
    latents are the keys and values of all heads, and results by its value weights.
    """

    num_heads: int
    latent_dim: int  # numbers of a token's latent (kv_lora_rank)
    key_dim: int  # of a head's key, without the rotated part
    rope_dim: int  # of the rotated part
    value_dim: int  # of a head's value
    rope: RopeConfig
    softmax_scale: float  # of the scores
    query_rank: int | None = None  # queries are made of so many numbers of a token; None: of its state
    first_position: int = 0  # positions before it have no KV and are not seen
    window: ClassVar[int | None] = None

    @property
    def query_dim(self) -> int:
        return self.key_dim + self.rope_dim

    @property
    def head_dim(self) -> int:
        """Of a query and a key of the attention over latents."""
        return self.latent_dim + self.rope_dim

    def heads(self, ranks: int = 1) -> HeadShape:
        """The heads of one rank."""
        return HeadShape(
            self.num_heads // ranks,
            1,
            self.head_dim,
            self.first_position,
            latent_dim=self.latent_dim,
            softmax_scale=self.softmax_scale,
        )

    def kv_layout(self, dtype: torch.dtype, ranks: int = 1) -> KVLayout:
        """The latent and the rotated key, which every rank has."""
        return KVLayout(((1, self.head_dim),), dtype)

    def splits(self, ranks: int) -> bool:
        return self.num_heads % ranks == 0

    @property
    def split_sizes(self) -> dict[str, int]:
        """What `splits` depends on, for errors."""
        return {"num_heads": self.num_heads}

    @property
    def activation_width(self) -> int:
        return self.num_heads * (self.query_dim + self.head_dim + self.latent_dim + self.value_dim) + self.head_dim

    def check(self) -> None:
        """UnsupportedModel for heads that the kernels cannot compute."""
        if self.rope_dim % 2:
            raise UnsupportedModel(f"qk_rope_head_dim={self.rope_dim}: the rotary embedding needs an even number")
        if self.head_dim > MAX_HEAD_DIM:
            raise UnsupportedModel(
                f"kv_lora_rank={self.latent_dim} and qk_rope_head_dim={self.rope_dim}: expected up to {MAX_HEAD_DIM} "
                "together"
            )
        self.rope.check()


# The kinds of attention, a union: a further one is added here, and its layer to `DecoderLayer`.
AttentionSpec: TypeAlias = GQASpec | LatentSpec


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

    Shared experts, which all tokens have, are stored as one gated MLP.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int  # of each expert
    rule: RoutingRule = SOFTMAX_OF_CHOSEN  # with `sigmoid` the router has a correction of each expert
    shared_size: int = 0  # inner size of the shared experts together
    bias: bool = False  # of the router and the experts
    glu: GLU = SWIGLU
    names: ExpertNames = ExpertNames()
    interleaved: bool = False  # tensors of all experts have gate and up in turns, and are [inputs, outputs] if dense

    def splits(self, ranks: int) -> bool:
        return self.intermediate_size % ranks == 0 and self.shared_size % ranks == 0

    def activation_width(self, hidden_size: int) -> int:
        each = 3 * self.intermediate_size + 2 * hidden_size
        shared = 3 * self.shared_size + 2 * hidden_size if self.shared_size else 0
        return 3 * self.num_experts + self.experts_per_token * each + shared


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
