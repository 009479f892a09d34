"""Choice of device, dtype and sizes that depend on the device."""

from __future__ import annotations

import torch

from ssd.config import EngineConfig
from ssd.errors import ConfigError
from ssd.kernels.cuda.launch import shared_memory
from ssd.layers.spec import LatentSpec
from ssd.models.config import DecoderConfig

_LARGE_GPU = 40 << 30  # bytes
_WIDE_ATTENTION = 160 << 10  # bytes of shared memory that prefill attention in float32 needs


def resolve_device(name: str, field: str = "device") -> torch.device:
    """`field`: the option's name, for errors."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        remedy = "check the driver and CUDA_VISIBLE_DEVICES" if torch.version.cuda else "install a CUDA build of torch"
        raise ConfigError(f"{field}={name!r}, but torch sees no CUDA device: use {field}='cpu', or {remedy}")
    device = torch.device(name)
    if device.index is not None and device.index >= torch.cuda.device_count():
        raise ConfigError(f"{field}={name!r}, but torch sees {torch.cuda.device_count()} GPUs: use a lower index")
    return device


def rank_device(device: torch.device, rank: int) -> torch.device:
    """GPUs of consecutive indices; the CPU is the same for all."""
    return torch.device("cuda", (device.index or 0) + rank) if device.type == "cuda" and rank else device


def make_current(device: torch.device) -> None:
    """Makes a GPU with an index that of this thread: kernels are launched on the current one."""
    if device.index is not None:
        torch.cuda.set_device(device)


def resolve_dtype(config: EngineConfig, model: DecoderConfig, device: torch.device) -> torch.dtype:
    """`auto`: float32 on the CPU; on a GPU the checkpoint's own 16-bit type, bfloat16 where it has none."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "float16" if model.dtype == "float16" else "bfloat16"
    if name == "float16" and device.type == "cpu":
        raise ConfigError("dtype='float16' is for GPUs: on the CPU use float32 (exact) or bfloat16 (half the memory)")
    dim = max(layer.attention.head_dim for layer in model.layers)
    if name == "float32" and device.type == "cuda" and dim > 64 and shared_memory(device) < _WIDE_ATTENTION:
        raise ConfigError(
            f"dtype='float32': attention with heads of {dim} dimensions does not fit this GPU's shared "
            "memory; use bfloat16"
        )
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def kv_dtype(config: EngineConfig, model: DecoderConfig, dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Type of the KV cache of `model`, the target, whose own type is `dtype`."""
    if config.kv_cache_dtype == "auto":
        return dtype
    if any(isinstance(layer.attention, LatentSpec) for layer in model.layers):
        raise ConfigError("kv_cache_dtype='fp8' is not for models with latent attention (MLA): use auto")
    if device.type == "cuda" and dtype == torch.float32:  # its products would sum in different orders
        raise ConfigError("kv_cache_dtype='fp8' on a GPU is for models in 16 bits: use dtype='bfloat16', or auto")
    return torch.float8_e4m3fn


def device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu, {torch.get_num_threads()} threads"


def kv_block_size(config: EngineConfig, device: torch.device) -> int:
    """Tokens of one KV block. On a GPU what attention copies at a time; elsewhere fewer: finer prefix caching."""
    return config.block_size or (64 if device.type == "cuda" else 16)


def batched_tokens(config: EngineConfig, device: torch.device) -> int:
    """Tokens of the largest batch, in which all sequences have a draft tree. On a large GPU 4096: its products gain
    nothing from more."""
    default = 512
    if device.type == "cuda":
        default = 4096 if torch.cuda.get_device_properties(device).total_memory > _LARGE_GPU else 2048
    trees = config.speculation.most_rows(config.max_num_seqs) if config.speculation.nodes else 0
    return config.max_num_batched_tokens or max(default, config.max_num_seqs, trees)
