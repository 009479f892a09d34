"""What a decoder looks like: the one description that every family's checkpoint is translated into.

Knows nothing of files, devices or the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


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
    attention_factor: float | None = None  # yarn; None: computed from `factor`


@dataclass(frozen=True)
class DecoderConfig:
    """Shape and switches of one decoder-only transformer (RMS norms, gated MLP, grouped-query attention)."""

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    rms_eps: float = 1e-5
    rope: RopeConfig = field(default_factory=RopeConfig)
    tie_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False  # bias on the attention's output projection
    mlp_bias: bool = False
    qk_norm: bool = False  # RMS norm over each head of q and k before the rotary embedding
    dtype: str = "bfloat16"  # what the checkpoint was saved in
