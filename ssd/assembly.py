"""Puts an engine together from its config: checkpoints, device, kernels, KV pools, scheduler, drafter, round."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence as Seq

import torch

from ssd.config import NGRAM, EngineConfig, SpeculationConfig
from ssd.decoding.acceptance import Coupled, Rejection
from ssd.decoding.drafter import Drafter, NoDrafter
from ssd.decoding.round import Round
from ssd.drafting.model import ModelDrafter
from ssd.drafting.ngram import NgramDrafter
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
from ssd.text.tokenizer import Tokenizer

log = logging.getLogger("ssd")

_CPU_KV_BYTES = 4 << 30


def build_engine(config: EngineConfig, checkpoint: Checkpoint | None = None) -> Engine:
    """Loads the model (from `config.model` unless it is handed in) and everything around it; ready for requests."""
    checkpoint = checkpoint or open_checkpoint(config.model)
    tokenizer = checkpoint.tokenizer()
    device = resolve_device(config.device)
    draft = open_draft(config.speculation, tokenizer)
    try:
        runner, draft_runner, max_model_len = build_runners(config, checkpoint, draft, device)
    except torch.OutOfMemoryError as error:
        raise ConfigError(
            "the GPU's memory does not hold the models and their buffers: lower max_num_seqs, max_model_len or "
            f"gpu_memory_utilization, or free memory on the device ({error})"
        ) from error
    pool = BlockPool(runner.num_blocks, config.block_size, prefix_caching=config.prefix_caching)
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=batched_tokens(config, device),
        lookahead=config.speculation.lookahead,
    )
    acceptance = Rejection() if config.speculation.acceptance == "rejection" else Coupled()
    return Engine(
        Round(runner, make_drafter(config, draft_runner, runner.vocab_size), acceptance),
        scheduler,
        max_model_len=max_model_len,
        stop_token_ids=frozenset(checkpoint.stop_token_ids),
        tokenizer=tokenizer if tokenizer.available else None,
    )


def open_draft(speculation: SpeculationConfig, tokenizer: Tokenizer) -> Checkpoint | None:
    """The draft model's checkpoint, if there is to be one. Its token ids must mean what the target's mean."""
    if speculation.draft is None or speculation.draft == NGRAM:
        return None
    checkpoint = open_checkpoint(speculation.draft)
    difference = tokenizer.difference(checkpoint.tokenizer())
    if difference is not None:
        raise ConfigError(
            f"speculation draft={speculation.draft!r} has another tokenizer than the target ({difference}): use a "
            f"draft of the same family, or draft={NGRAM!r}, which needs no model"
        )
    return checkpoint


def make_drafter(config: EngineConfig, runner: ModelRunner | None, vocab_size: int) -> Drafter:
    speculation = config.speculation
    if speculation.mode == "ar":
        return NoDrafter()
    if runner is None:
        return NgramDrafter(speculation.k)
    return ModelDrafter(
        runner,
        lookahead=speculation.k,
        max_len=runner.decoder.config.max_position,
        vocab_size=vocab_size,
        max_num_batched_tokens=batched_tokens(config, runner.decoder.device),
        prefix_caching=config.prefix_caching,
        laws=speculation.acceptance == "rejection",
    )


def build_runners(
    config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None, device: torch.device
) -> tuple[ModelRunner, ModelRunner | None, int]:
    """Target and draft on their device, each with its KV (as many blocks for both), and the longest sequence."""
    model = checkpoint.config
    limit = config.max_model_len or model.max_position
    if limit > model.max_position:
        raise ConfigError(f"max_model_len={limit} is beyond the model's {model.max_position} positions: lower it")
    rows = config.max_num_seqs * (1 + config.speculation.lookahead)
    models = [load_decoder(config, checkpoint, device, limit, rows)]
    if draft is not None:
        positions = min(limit, draft.config.max_position)
        models.append(load_decoder(config, draft, device, positions, 2 * config.max_num_seqs))
    num_blocks = kv_blocks(config, models, limit)
    limit = fitting_length(config, limit, num_blocks * config.block_size)
    runners = [make_runner(config, *model, num_blocks, limit) for model in models]
    return runners[0], runners[1] if draft is not None else None, limit


def load_decoder(
    config: EngineConfig, checkpoint: Checkpoint, device: torch.device, max_positions: int, max_rows: int
) -> tuple[Decoder, int]:
    """A model with its weights, and the query tokens of a decode-size batch that it has attention scratch for."""
    ops, dtype = make_ops(device), resolve_dtype(config, checkpoint.config, device)
    decoder = Decoder(checkpoint.config, ops, device=device, dtype=dtype, max_positions=max_positions)
    decoder.load(checkpoint.weights(device, dtype))
    ops.reserve(max_rows, max_positions, decoder.layers[0].heads, device)
    return decoder, max_rows


def make_runner(config: EngineConfig, decoder: Decoder, max_rows: int, num_blocks: int, limit: int) -> ModelRunner:
    runner = ModelRunner(decoder, num_blocks=num_blocks, block_size=config.block_size, max_decode_rows=max_rows)
    if decoder.device.type == "cuda":
        runner.warm_up(min(batched_tokens(config, decoder.device), limit, decoder.config.max_position))
        if not config.eager:
            runner.capture_graphs(min(limit, decoder.config.max_position))
    return runner


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


def kv_blocks(config: EngineConfig, models: Seq[tuple[Decoder, int]], limit: int) -> int:
    """How many KV blocks each model gets: as asked, else what memory allows (on the CPU, what could ever be used)."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    device = models[0][0].device
    bytes_per_block = sum(decoder.kv_bytes_per_token for decoder, _ in models) * config.block_size
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free + sum(_activation_bytes(config, *model) for model in models)
        return max(0, (int(total * config.gpu_memory_utilization) - used) // bytes_per_block)
    useful = config.max_num_seqs * -(-limit // config.block_size)
    memory = min(_CPU_KV_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    return min(useful, memory // bytes_per_block)


def _activation_bytes(config: EngineConfig, decoder: Decoder, max_rows: int) -> int:
    """What a model's largest batch needs beside weights and KV, generously."""
    model, tokens = decoder.config, batched_tokens(config, decoder.device)
    width = 8 * model.hidden_size + 3 * model.intermediate_size + 4 * model.num_heads * model.head_dim
    graphs = sum(row_buckets(max_rows)) * model.vocab_size * 4  # every graph keeps its logits
    sampling = max_rows * model.vocab_size * 48  # sorted, summed and perturbed copies
    return tokens * width * decoder.dtype.itemsize + graphs + sampling + (1 << 30)
