"""Model shapes: what a published model of that name costs, and one for a CPU. Knows nothing of weights."""

from __future__ import annotations

from dataclasses import replace

from ssd.layers.spec import ExpertsSpec, RopeConfig
from ssd.models.config import DecoderConfig, equal_layers
from ssd.models.families import gpt_oss

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
}
