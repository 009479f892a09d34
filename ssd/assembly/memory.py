"""Memory of a device: number of KV blocks, and the longest sequence that fits."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ssd.assembly.device import batched_tokens
from ssd.config import EngineConfig
from ssd.errors import ConfigError
from ssd.execution.graphs import PREFILL_BUCKETS, row_buckets
from ssd.models.decoder import Decoder

log = logging.getLogger("ssd")
_CPU_KV_BYTES = 4 << 30


@dataclass(frozen=True)
class Loaded:
    """A loaded model, and the limits that it is used with."""

    decoder: Decoder
    max_len: int  # tokens of a sequence
    max_rows: int  # query tokens of a decode-size batch
    scratch_slots: int = 0  # KV slots outside of the pool's blocks


def fitting_length(config: EngineConfig, limit: int, capacity: int) -> int:
    """`limit`, or the capacity of the KV pool if that is less; ConfigError if max_model_len was given."""
    if capacity >= limit:
        return limit
    if config.max_model_len is not None or capacity == 0:
        raise ConfigError(
            f"the KV pool holds {capacity} tokens, max_model_len={limit} does not fit: lower max_model_len, or raise "
            "num_kv_blocks or gpu_memory_utilization"
        )
    log.warning("max_model_len is %d: the KV pool holds no more (the model could take %d)", capacity, limit)
    return capacity


def kv_blocks(config: EngineConfig, models: Seq[Loaded], limit: int) -> int:
    """KV blocks of each model: as configured, else what fits the memory (on a CPU at most what can be used)."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    device = models[0].decoder.device
    bytes_per_block = sum(loaded.decoder.kv_bytes_per_token for loaded in models) * config.block_size
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used = total - free + sum(_activation_bytes(config, loaded) for loaded in models)
        return max(0, (int(total * config.gpu_memory_utilization) - used) // bytes_per_block)
    useful = config.max_num_seqs * -(-limit // config.block_size)
    memory = min(_CPU_KV_BYTES, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 4)
    return min(useful, memory // bytes_per_block)


def _activation_bytes(config: EngineConfig, loaded: Loaded) -> int:
    """Upper estimate of the memory of a model's largest batch, besides weights and KV."""
    decoder, model, tokens = loaded.decoder, loaded.decoder.config, batched_tokens(config, loaded.decoder.device)
    width = 8 * model.hidden_size + 3 * model.intermediate_size + 4 * model.num_heads * model.head_dim
    rows = sum(row_buckets(loaded.max_rows)) + sum(min(rows, loaded.max_rows) for rows in PREFILL_BUCKETS)
    graphs = rows * model.vocab_size * 4  # every graph keeps its logits
    sampling = loaded.max_rows * model.vocab_size * 48  # sorted, summed and perturbed copies
    scratch = loaded.scratch_slots * decoder.kv_bytes_per_token
    return tokens * width * decoder.dtype.itemsize + graphs + sampling + scratch + (1 << 30)
