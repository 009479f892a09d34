"""Memory of a device: what is free, number of KV blocks, and the longest sequence that fits."""

from __future__ import annotations

import functools
import logging
import os
from bisect import bisect_right
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd.assembly.device import batched_tokens, kv_block_size
from ssd.config import MOST_TREE_ROWS, EngineConfig
from ssd.errors import NotEnoughMemory
from ssd.execution.graphs import PREFILL_BUCKETS, row_buckets
from ssd.kv.blocks import most_blocks
from ssd.layers.formats import FormatOf, dense
from ssd.layers.spec import KVGroup
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder, outline
from ssd.models.feature_draft import FeatureConfig

log = logging.getLogger("ssd")
_CPU_KV_BYTES = 4 << 30
_NCCL_BYTES = 1 << 30  # upper estimate of its buffers
MAX_IN_FLIGHT = 2  # rounds: one is scheduled while the one before it is not committed
BlocksFor = Callable[[int], int]  # upper bound of the blocks of a sequence, by its tokens


@dataclass(frozen=True)
class Loaded:
    """A loaded model, and the limits that it is used with."""

    decoder: Decoder
    max_len: int  # tokens of a sequence
    max_rows: int  # query tokens of a decode-size batch
    scratch_slots: int = 0  # KV slots outside of the pool's blocks

    def blocks_for(self, config: EngineConfig) -> BlocksFor:
        return blocks_for(config, self.decoder.kv_groups, self.decoder.device)


def num_slots(config: EngineConfig) -> int:
    """More than max_num_seqs: a finished sequence keeps its slot while a round in flight uses it."""
    return config.max_num_seqs + max(4, config.max_num_seqs // 4)


def blocks_for(config: EngineConfig, groups: Seq[KVGroup], device: torch.device) -> BlocksFor:
    """Blocks that a sequence of a model with these groups of layers has at once."""
    windows, size = [group.window for group in groups], kv_block_size(config, device)
    most_new = MAX_IN_FLIGHT * batched_tokens(config, device) if any(windows) else 0
    return functools.partial(most_blocks, block_size=size, windows=windows, most_new=most_new)


def longest_sequence(num_blocks: int, needed: BlocksFor, limit: int) -> int:
    """Tokens of the longest sequence that so many blocks hold, at most `limit`."""
    return bisect_right(range(1, limit + 1), num_blocks, key=needed)


def available_bytes(config: EngineConfig, device: torch.device) -> int:
    """Memory that is free for an engine on this device."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return int(total * config.gpu_memory_utilization) - (total - free)
    return min([_machine_memory(), *_cgroup_memory()])


def wide_bytes(config: EngineConfig, weights: int, device: torch.device) -> int:
    """Memory for `Ops.wide_bytes` of a model with so many bytes of weights: an eighth of what is free, and none that is
    missed for KV."""
    if device.type != "cuda":
        return 0
    free = available_bytes(config, device)
    return max(0, min(free // 8, free // 2 - weights))


def _machine_memory() -> int:
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):  # not Linux
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _cgroup_memory(groups: Path = Path("/proc/self/cgroup"), mount: Path = Path("/sys/fs/cgroup")) -> Iterator[int]:
    """What is left below each memory limit of this process's control groups (v1 and v2), such as a container's."""
    lines = groups.read_text(encoding="utf-8").splitlines() if groups.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers and "memory" not in controllers.split(","):
            continue
        root, names = mount, ("memory.max", "memory.current", "inactive_file")
        if controllers:
            root, names = mount / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
        own = root / path.lstrip("/")
        for folder in (own, *own.parents):
            if folder.is_relative_to(root) and (left := _left_in(folder, *names)) is not None:
                yield left


def _left_in(folder: Path, limit: str, usage: str, cache: str) -> int | None:
    """Limit less usage, where `cache` (of files, which can be dropped) is not counted as used; None: no limit."""
    try:
        most = (folder / limit).read_text(encoding="ascii").strip()
        stat = dict(line.split() for line in (folder / "memory.stat").read_text(encoding="ascii").splitlines())
        used = int((folder / usage).read_text(encoding="ascii")) - int(stat.get(cache, 0))
    except OSError:
        return None
    return None if most == "max" else max(0, int(most) - used)


def weight_bytes(model: DecoderConfig, dtype: torch.dtype, format_of: FormatOf = dense) -> int:
    """Bytes of a model's weights, on all ranks together."""
    return _outlined(model, dtype, format_of).num_bytes()


def format_names(model: DecoderConfig, format_of: FormatOf) -> str:
    """The formats of a model's quantised weights; "" if it has none."""
    return _outlined(model, torch.float32, format_of).quantized


def _outlined(model: DecoderConfig, dtype: torch.dtype, format_of: FormatOf) -> Decoder:
    if isinstance(model, FeatureConfig):
        return model.make(outline(dtype, format_of), 1)
    return Decoder(model, outline(dtype, format_of), max_positions=1)


def fitting_length(config: EngineConfig, limit: int, num_blocks: int, needed: BlocksFor) -> int:
    """`limit`, or what the KV pool holds if that is less; ConfigError if max_model_len was given."""
    capacity = longest_sequence(num_blocks, needed, limit)
    if capacity >= limit:
        return limit
    if config.num_kv_blocks is not None:
        remedy = f"raise num_kv_blocks to at least {needed(limit)}"
    else:
        remedy = "raise gpu_memory_utilization, free memory on the GPU, or lower max_num_seqs"
    if capacity == 0:
        raise NotEnoughMemory(f"no memory is left for KV beside the weights and their buffers: {remedy}")
    if config.max_model_len is not None:
        raise NotEnoughMemory(
            f"max_model_len={limit} does not fit, the KV pool holds {capacity} tokens: lower it to that, or {remedy}"
        )
    log.warning("max_model_len is %d: the KV pool holds no more (the model could take %d)", capacity, limit)
    return capacity


def possible_length(config: EngineConfig, positions: int, max_model_len: int, device: torch.device) -> int:
    """The largest max_model_len that this model and KV pool allow, where `max_model_len` was chosen."""
    chosen_by_pool = config.max_model_len is None and max_model_len < positions
    grows = device.type == "cpu" and config.num_kv_blocks is None  # a CPU's pool, with the length that is asked for
    return max_model_len if chosen_by_pool and not grows else positions


def kv_blocks(config: EngineConfig, models: Seq[Loaded], limit: int) -> int:
    """KV blocks of each model: as configured, else what fits the memory (on a CPU at most what can be used)."""
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    device = models[0].decoder.device
    bytes_per_block = sum(loaded.decoder.kv_bytes_per_token for loaded in models) * kv_block_size(config, device)
    if device.type == "cuda":
        activations = sum(_activation_bytes(config, loaded) for loaded in models)
        return max(0, (available_bytes(config, device) - activations) // bytes_per_block)
    longest = max(loaded.blocks_for(config)(limit) for loaded in models)
    memory = min(_CPU_KV_BYTES, available_bytes(config, device) // 2)
    least = longest if config.max_model_len is not None else 1
    return min(config.max_num_seqs * longest, max(least, memory // bytes_per_block))


def _graph_rows(most: int) -> int:
    """Rows of logits of all graphs."""
    return sum(row_buckets(most)) + sum(min(rows, most) for rows in PREFILL_BUCKETS)


def _activation_bytes(config: EngineConfig, loaded: Loaded) -> int:
    """Upper estimate of the memory of a model's largest batch, besides weights and KV."""
    decoder, model, tokens = loaded.decoder, loaded.decoder.config, batched_tokens(config, loaded.decoder.device)
    width = max(layer.activation_width(model.hidden_size) for layer in set(model.layers))
    rows = _graph_rows(loaded.max_rows)
    if config.speculation.nodes:  # of rounds with trees, and of those with chains
        chains = num_slots(config) * (1 + config.speculation.lookahead)
        rows = sum(_graph_rows(min(loaded.max_rows, most)) for most in (MOST_TREE_ROWS, chains))
    graphs = rows * model.vocab_size * 4  # every graph keeps its logits
    sampling = loaded.max_rows * model.vocab_size * 48  # sorted, summed and perturbed copies
    scratch = loaded.scratch_slots * decoder.kv_bytes_per_token
    size = decoder.tp.size
    sums = tokens * model.hidden_size * 4 * (size + 1) + _NCCL_BYTES if size > 1 else 0  # float32, of all ranks
    return tokens * width * decoder.dtype.itemsize + graphs + sampling + scratch + sums + (1 << 30)
