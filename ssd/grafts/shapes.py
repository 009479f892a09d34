"""Model shapes: what a published model of that name costs, and one for a CPU. Knows nothing of weights."""

from __future__ import annotations

from dataclasses import replace
from difflib import get_close_matches
from typing import Any

from ssd.errors import ConfigError
from ssd.layers.spec import ExpertsSpec, RopeConfig
from ssd.models.config import DecoderConfig, equal_layers
from ssd.models.families import deepseek_v3, glm4_moe_lite, gpt_oss

_LLAMA3 = RopeConfig(theta=500000.0, scaling="llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0)
_LLAMA32 = RopeConfig(theta=500000.0, scaling="llama3", factor=32.0, low_freq_factor=1.0, high_freq_factor=4.0)


def _llama(hidden: int, mlp: int, layers: int, heads: int, dim: int, rope: RopeConfig, tied: bool) -> DecoderConfig:
    return equal_layers("llama", 128256, hidden, mlp, layers, heads, 8, dim, 131072, 1e-5, rope, tied)


def _qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool) -> DecoderConfig:
    rope = RopeConfig(theta=1000000.0)
    return equal_layers("qwen3", 151936, hidden, mlp, layers, heads, 8, 128, 40960, 1e-6, rope, tied, qk_norm=True)


def _qwen25(hidden: int, mlp: int, layers: int, heads: int, dim: int) -> DecoderConfig:
    rope = RopeConfig(theta=1000000.0)
    return equal_layers("qwen2", 151936, hidden, mlp, layers, heads, 2, dim, 32768, 1e-6, rope, True, qkv_bias=True)


def _qwen3_moe(hidden: int, layers: int, heads: int, experts: ExpertsSpec) -> DecoderConfig:
    rope = RopeConfig(theta=1000000.0)
    dense = equal_layers("qwen3_moe", 151936, hidden, 1, layers, heads, 4, 128, 40960, 1e-6, rope, qk_norm=True)
    return replace(dense, layers=(replace(dense.layer, mlp=experts),) * layers)


def _gpt_oss(layers: int, experts: int) -> DecoderConfig:
    sizes = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880, "num_attention_heads": 64}
    return gpt_oss({**sizes, "num_hidden_layers": layers, "num_local_experts": experts})


_LATENT: dict[str, Any] = {
    **{"hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048, "num_hidden_layers": 61},
    **{"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128},
    **{"num_experts_per_tok": 8, "n_shared_experts": 1, "max_position_embeddings": 163840},
}
_DEEPSEEK_V3 = _LATENT | {
    **{"vocab_size": 129280, "num_attention_heads": 128, "first_k_dense_replace": 3, "n_routed_experts": 256},
    **{"n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5},
}
_KIMI_K25 = _LATENT | {
    **{"vocab_size": 163840, "num_attention_heads": 64, "first_k_dense_replace": 1, "n_routed_experts": 384},
    **{"routed_scaling_factor": 2.827, "rope_theta": 50000.0, "rms_norm_eps": 1e-5},
}
_GLM_47_FLASH = _LATENT | {
    **{"vocab_size": 154880, "hidden_size": 2048, "intermediate_size": 10240, "moe_intermediate_size": 1536},
    **{"num_hidden_layers": 47, "num_attention_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192},
    **{"v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8},
    **{"rope_theta": 1e6, "rms_norm_eps": 1e-5, "max_position_embeddings": 202752},
}


SHAPES = {
    "cpu-7m": equal_layers("llama", 8192, 256, 896, 6, 8, 4, 32, 4096, 1e-5, RopeConfig(10000.0), True),
    "cpu-75m": equal_layers("llama", 8192, 768, 1792, 12, 12, 4, 64, 4096, 1e-5, RopeConfig(10000.0), True),
    "smollm2-135m": equal_layers("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192, 1e-5, RopeConfig(100000.0), True),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 64, _LLAMA32, True),
    "llama-3.2-3b": _llama(3072, 8192, 28, 24, 128, _LLAMA32, True),
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 128, _LLAMA3, False),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 128, _LLAMA3, False),
    "qwen2.5-0.5b": _qwen25(896, 4864, 24, 14, 64),
    "qwen2.5-1.5b": _qwen25(1536, 8960, 28, 12, 128),
    "qwen3-0.6b": _qwen3(1024, 3072, 28, 16, True),
    "qwen3-1.7b": _qwen3(2048, 6144, 28, 16, True),
    "qwen3-4b": _qwen3(2560, 9728, 36, 32, True),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 48, 32, ExpertsSpec(128, 8, 768)),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
    "glm-4.7-flash": glm4_moe_lite(_GLM_47_FLASH),
    "deepseek-v3": deepseek_v3(_DEEPSEEK_V3),
    "kimi-k2.5": deepseek_v3(_KIMI_K25),  # its text model
}


def shape_of(name: str) -> DecoderConfig:
    """The shape of a published model; NAME:layers=N is that of its first N layers."""
    known, cut, count = name.partition(":layers=")
    if known not in SHAPES:
        close = get_close_matches(known, SHAPES, n=1)
        meant = f"did you mean {close[0]}? Else " if close else ""
        raise ConfigError(f"shape={known!r} is not known: {meant}use one of {', '.join(SHAPES)}")
    shape = SHAPES[known]
    if not cut:
        return shape
    if not count.isdecimal() or not 0 < int(count) <= shape.num_layers:
        raise ConfigError(f"shape={name!r}: expected a number of layers from 1 to {shape.num_layers}")
    return replace(shape, layers=shape.layers[: int(count)])
