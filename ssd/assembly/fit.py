"""Refuses what does not fit the memory, before anything is loaded: weights, state of the sequences, KV."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from typing import NamedTuple

import torch

from ssd.assembly.device import kv_block_size, kv_dtype, resolve_dtype
from ssd.assembly.memory import (
    BlocksFor,
    available_bytes,
    blocks_for,
    format_names,
    longest_sequence,
    num_slots,
    weight_bytes,
)
from ssd.assembly.models import formats_of
from ssd.config import EngineConfig
from ssd.errors import ConfigError, NotEnoughMemory
from ssd.grafts.graft import GraftCheckpoint
from ssd.grafts.shapes import SHAPES
from ssd.layers.formats import FormatOf
from ssd.layers.formats.rounded import rounded
from ssd.models.checkpoint import Checkpoint
from ssd.models.config import DecoderConfig
from ssd.models.feature_draft import FeatureCheckpoint
from ssd.models.repository import gib


class Model(NamedTuple):
    """A model whose memory is estimated."""

    config: DecoderConfig
    dtype: torch.dtype
    format_of: FormatOf


def check_fits(config: EngineConfig, checkpoints: Seq[Checkpoint | FeatureCheckpoint], device: torch.device) -> None:
    """NotEnoughMemory, with what would fit, if the models (the target first) are too large for what is free.

    Counts what is certain to be needed; activations and scratch come on top.
    """
    available = available_bytes(config, device)
    free = f"{gib(max(0, available))} of {'GPU ' if device.type == 'cuda' else ''}memory are free"
    models = [
        Model(c.config, resolve_dtype(config, c.config, device), formats_of(config, c, draft=i > 0))
        for i, c in enumerate(checkpoints)
    ]
    # A GPU has one rank's share of the target; the ranks of a CPU share its memory.
    shares = [config.tensor_parallel_size if device.type == "cuda" else 1, *[1] * (len(models) - 1)]
    each = list(zip(models, shares, strict=True))
    weights = sum(weight_bytes(*model) // ranks for model, ranks in each)
    stored = kv_dtype(config, models[0].config, models[0].dtype, device)
    per_token = models[0].config.kv_bytes_per_token(stored, shares[0], windowed=True)
    per_token += sum(model.config.kv_bytes_per_token(model.dtype, ranks) for model, ranks in each[1:])
    per_block = per_token * kv_block_size(config, device)
    if weights + per_block > available:
        remedies = " or ".join(_remedies(config, checkpoints, models, available, device))
        forms = (format_names(m.config, m.format_of) or str(m.dtype).removeprefix("torch.") for m in models)
        raise NotEnoughMemory(
            f"model={config.model!r}{' and its draft need' if len(models) > 1 else ' needs'} {gib(weights)} for the "
            f"weights in {' and '.join(dict.fromkeys(forms))}, but {free}: use {remedies}"
        )
    positions = models[0].config.max_position
    limit = min(config.max_model_len or positions, positions)
    state = num_slots(config) * limit * 4  # token ids of every slot
    if weights + per_block + state > available:
        raise NotEnoughMemory(
            f"max_num_seqs={config.max_num_seqs} sequences of {limit} tokens need {gib(state)} beside weights of "
            f"{gib(weights)}, but {free}: lower max_num_seqs or max_model_len"
        )
    needed = blocks_for(config, models[0].config.kv_groups(windowed=True), device)
    _check_kv(config, limit, available - weights - state, per_block, needed)


def check_draft_fits(config: EngineConfig, draft: Checkpoint | FeatureCheckpoint) -> None:
    """NotEnoughMemory if the replicas of a draft model on a device of their own are too large for it.

    On a CPU they share its memory; each has a GPU of its own.
    """
    speculation, device = config.speculation, torch.device(str(config.speculation.draft_device))
    dtype, format_of = resolve_dtype(config, draft.config, device), formats_of(config, draft, draft=True)
    shared = speculation.draft_replicas if device.type == "cpu" else 1
    block = draft.config.kv_bytes_per_token(dtype) * kv_block_size(config, device)
    needed, available = shared * (weight_bytes(draft.config, dtype, format_of) + block), available_bytes(config, device)
    if needed > available:
        raise NotEnoughMemory(
            f"speculation draft={speculation.draft!r} needs {gib(needed)} on draft_device={str(device)!r}, where "
            f"{gib(max(0, available))} are free: use another device, draft_quantization or a smaller draft"
        )


def _check_kv(config: EngineConfig, limit: int, left: int, per_block: int, needed: BlocksFor) -> None:
    """`left`: bytes that KV can have; `per_block`: bytes of one block of all models; `needed`: blocks of a sequence."""
    most = left // per_block
    beside = f"but {gib(left)} are left beside the weights"
    if config.num_kv_blocks is not None and config.num_kv_blocks > most:
        raise NotEnoughMemory(
            f"num_kv_blocks={config.num_kv_blocks} needs {gib(config.num_kv_blocks * per_block)}, {beside}: use at "
            f"most {most}, or leave it out for what fits"
        )
    if config.max_model_len is not None and needed(limit) > most:
        raise NotEnoughMemory(
            f"max_model_len={config.max_model_len} needs {gib(needed(limit) * per_block)} of KV, {beside}: use at "
            f"most {longest_sequence(most, needed, limit)}, or leave it out for what fits"
        )


def _remedies(
    config: EngineConfig,
    checkpoints: Seq[Checkpoint | FeatureCheckpoint],
    models: Seq[Model],
    available: int,
    device: torch.device,
) -> Iterator[str]:
    """What would fit in place of weights that do not. Rounded ones write another text: only if nothing else helps."""
    size, target_bytes = config.tensor_parallel_size, weight_bytes(*models[0])
    beside = sum(weight_bytes(*model) for model in models[1:])
    if device.type == "cuda":
        if target_bytes // size + beside < torch.cuda.mem_get_info(device)[0]:
            yield "a higher gpu_memory_utilization"
        more = range(size + 1, torch.cuda.device_count() - (device.index or 0) + 1)
        for n in (n for n in more if target_bytes // n + beside <= available and models[0].config.splits(n)):
            yield f"tensor_parallel_size={n}"
            return
    halved = sum(weight_bytes(model, torch.bfloat16, format_of) for model, _, format_of in models)
    target, model = checkpoints[0], models[0]
    if halved <= available and any(dtype == torch.float32 for _, dtype, _ in models):
        yield f"dtype='bfloat16' ({gib(halved)})"
    elif not format_names(model.config, model.format_of):
        ranks = size if device.type == "cuda" else 1
        smaller = weight_bytes(model.config, model.dtype, rounded("fp8", exact=True)) // ranks + beside
        if smaller <= available:
            yield f"quantization='fp8' ({gib(smaller)})"
    fitting = _fitting_shapes(target, model, available - beside) if isinstance(target, GraftCheckpoint) else []
    yield f"the shape {fitting[-1]}" if fitting else "a smaller model"


def _fitting_shapes(graft: GraftCheckpoint, model: Model, available: int) -> list[str]:
    """The shapes that the graft's base and the memory allow, the largest last."""
    sizes: dict[str, int] = {}
    for name in SHAPES:
        try:
            shape = GraftCheckpoint.of(graft.base, name).config
            sizes[name] = weight_bytes(shape, model.dtype, model.format_of)
        except ConfigError:
            continue
    return sorted((name for name, size in sizes.items() if size <= available), key=sizes.__getitem__)
