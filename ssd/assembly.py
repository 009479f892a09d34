"""Puts an engine together from its config: checkpoint, device, kernels, KV pool, scheduler, round."""

from __future__ import annotations

import logging
import os

import torch

from ssd.config import EngineConfig, SpeculationConfig
from ssd.decoding.drafter import Drafter, NoDrafter
from ssd.decoding.round import Round
from ssd.engine.blocks import BlockPool
from ssd.engine.engine import Engine
from ssd.engine.scheduler import Scheduler
from ssd.errors import ConfigError
from ssd.execution.graphs import row_buckets
from ssd.execution.runner import ModelRunner
from ssd.kernels.ops import Ops
from ssd.models.checkpoint import Checkpoint, open_checkpoint
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder

log = logging.getLogger("ssd")

_CPU_KV_BYTES = 4 << 30


def build_engine(config: EngineConfig, checkpoint: Checkpoint | None = None) -> Engine:
    """Loads the model (from `config.model` unless it is handed in) and everything around it; ready for requests."""
    checkpoint = checkpoint or open_checkpoint(config.model)
    tokenizer = checkpoint.tokenizer()
    device = resolve_device(config.device)
    drafter = make_drafter(config.speculation)
    try:
        runner, max_model_len = build_target(config, checkpoint, device, lookahead=drafter.lookahead)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the GPU's memory does not hold the model and its buffers: lower max_num_seqs, max_model_len or "
            f"gpu_memory_utilization, or free memory on the device ({error})"
        ) from error
    pool = BlockPool(runner.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched_tokens(config, device),
        lookahead=drafter.lookahead,
    )
    return Engine(
        Round(runner, drafter),
        scheduler,
        max_model_len=max_model_len,
        stop_token_ids=frozenset(checkpoint.stop_token_ids),
        tokenizer=tokenizer if tokenizer.available else None,
    )


def make_drafter(speculation: SpeculationConfig) -> Drafter:
    return {"ar": NoDrafter}[speculation.mode]()


def build_target(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, *, lookahead: int
) -> tuple[ModelRunner, int]:
    """The model on its device with its KV, and the longest sequence it takes."""
    model = checkpoint.config
    limit = config.max_model_len or model.max_position
    if limit > model.max_position:
        raise ConfigError(f"max_model_len={limit} is beyond the model's {model.max_position} positions: lower it")
    ops = make_ops(device)
    decoder = Decoder(model, ops, device=device, dtype=resolve_dtype(config, model, device), max_positions=limit)
    decoder.load(checkpoint.weights(decoder.device, decoder.dtype))
    max_rows = config.max_num_seqs * (1 + lookahead)
    ops.reserve(max_rows, limit, decoder.layers[0].heads, device)
    num_blocks = kv_blocks(config, decoder, limit, max_rows)
    limit = fitting_length(config, limit, num_blocks * config.block_size)
    runner = ModelRunner(decoder, num_blocks=num_blocks, block_size=config.block_size, max_decode_rows=max_rows)
    if device.type == "cuda":
        runner.warm_up(min(batched_tokens(config, device), limit))
        if not config.eager:
            runner.capture_graphs(limit)
    return runner, limit


def fitting_length(config: EngineConfig, limit: int, capacity: int) -> int:
    """The longest sequence that the KV pool holds; an error where the user asked for more than that."""
    if capacity >= limit:
        return limit
    if config.max_model_len is not None or capacity == 0:
        raise ConfigError(
            f"the KV pool holds {capacity} tokens, max_model_len={limit} does not fit: lower max_model_len, or raise "
            "num_kv_blocks or gpu_memory_utilization"
        )
    log.warning("max_model_len is %d: the KV pool holds no more (the model could take %d)", capacity, limit)
    return capacity


def resolve_device(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    if name == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device={name!r}, but torch sees no CUDA device: use device='cpu', or install a CUDA build")
    return torch.device(name)


def resolve_dtype(config: EngineConfig, model: DecoderConfig, device: torch.device) -> torch.dtype:
    """`auto`: float32 on the CPU; on a GPU the checkpoint's own 16-bit type, bfloat16 where it has none."""
    name = config.dtype
    if name == "auto":
        name = "float32" if device.type == "cpu" else "float16" if model.dtype == "float16" else "bfloat16"
    if name == "float16" and device.type == "cpu":
        raise ConfigError("dtype='float16' is for GPUs: on the CPU use float32 (exact) or bfloat16 (half the memory)")
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def make_ops(device: torch.device) -> Ops:
    """The kernels of a device: Triton on CUDA; C on the CPU, or plain torch where there is no C compiler."""
    if device.type == "cuda":
        from ssd.kernels.triton_ops import TritonOps

        return TritonOps()
    from ssd.kernels.cpu_ops import CpuOps
    from ssd.kernels.reference import ReferenceOps

    return CpuOps.load() or ReferenceOps()


def batched_tokens(config: EngineConfig, device: torch.device) -> int:
    default = 2048 if device.type == "cuda" else 512
    return config.max_num_batched_tokens or max(default, config.max_num_seqs)


def kv_blocks(config: EngineConfig, decoder: Decoder, limit: int, max_rows: int) -> int:
    """How many KV blocks to allocate: as asked, else what memory allows (on the CPU, what could ever be used)."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    bytes_per_block = decoder.kv_bytes_per_token * config.block_size
    if decoder.device.type == "cuda":
        free, total = torch.cuda.mem_get_info(decoder.device)
        used = total - free
        spare = int(total * config.gpu_memory_utilization) - used - _activation_bytes(config, decoder, max_rows)
        return max(0, spare // bytes_per_block)
    useful = config.max_num_seqs * -(-limit // config.block_size)
    memory = min(_CPU_KV_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    return min(useful, memory // bytes_per_block)


def _activation_bytes(config: EngineConfig, decoder: Decoder, max_rows: int) -> int:
    """What the largest batch needs beside weights and KV, generously."""
    model, tokens = decoder.config, batched_tokens(config, decoder.device)
    width = 8 * model.hidden_size + 3 * model.intermediate_size + 4 * model.num_heads * model.head_dim
    graphs = sum(row_buckets(max_rows)) * model.vocab_size * 4  # every graph keeps its logits
    sampling = max_rows * model.vocab_size * 48  # sorted, summed and perturbed copies
    return tokens * width * decoder.dtype.itemsize + graphs + sampling + (1 << 30)
