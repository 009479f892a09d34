"""Builds models on their device: weights, SequenceState, KV."""

from __future__ import annotations

import logging
import time
from contextlib import nullcontext
from typing import Final

import torch

from ssd.assembly.device import device_name, kv_block_size, kv_dtype, resolve_dtype
from ssd.assembly.memory import Loaded, num_slots, wide_bytes
from ssd.assembly.open import open_checkpoint
from ssd.config import EngineConfig
from ssd.execution.runner import ModelRunner
from ssd.execution.state import DeviceBlockTables, SequenceState
from ssd.kernels.cpu.kernels import trim_heap
from ssd.kernels.cpu.threads import num_threads, use_threads
from ssd.kernels.device import kernels, name_of
from ssd.layers.formats import FormatOf
from ssd.layers.formats.rounded import rounded
from ssd.layers.linear import Embedding
from ssd.layers.parameter import Build
from ssd.models.checkpoint import Checkpoint, HFCheckpoint, Weights
from ssd.models.decoder import Decoder
from ssd.models.feature_draft import FeatureCheckpoint, Shared
from ssd.models.hub import short_name
from ssd.models.repository import gib
from ssd.models.weight_cache import WeightCache
from ssd.parallel.tensor import TensorParallel

log = logging.getLogger("ssd")
loading = logging.getLogger("ssd.loading")  # what takes time before the first request; `ssd serve` shows it
_REPORT_SECONDS: Final = 1.0  # between two reports of progress


def make_state(config: EngineConfig, max_len: int, vocab_size: int, device: torch.device) -> SequenceState:
    return SequenceState(
        num_slots(config),
        max_len=max_len,
        lookahead=config.speculation.draft_tokens,
        vocab_size=vocab_size,
        device=device,
        tree_depth=config.speculation.lookahead if config.speculation.tree is not None else 0,
    )


def formats_of(config: EngineConfig, checkpoint: Checkpoint | FeatureCheckpoint, *, draft: bool) -> FormatOf:
    """The formats that weights are loaded to: those of the checkpoint, or what its float weights are rounded to."""
    form = config.speculation.draft_quantization if draft else config.quantization
    return rounded(form, checkpoint.formats, exact=not draft)


def load_decoder(
    config: EngineConfig,
    checkpoint: Checkpoint | FeatureCheckpoint,
    state: SequenceState,
    max_len: int,
    max_rows: int,
    *,
    beyond: int = 0,
    scratch_slots: int = 0,
    target: Decoder | None = None,
    tp: TensorParallel = TensorParallel(),  # noqa: B008 (frozen)
    is_target: bool = False,
) -> Loaded:
    """Loads weights and allocates attention scratch; rotary tables have `beyond` more positions than the state.

    `target`: the model whose hidden states the draft reads. `tp`: the rank whose share is loaded. `is_target`: not
    a draft; KV behind the windows of its layers is freed, and stored as `kv_cache_dtype` says.
    """
    device = state.device
    ops, dtype = kernels(device).ops(), resolve_dtype(config, (target or checkpoint).config, device)
    format_of = formats_of(config, checkpoint, draft=not is_target)
    stored = kv_dtype(config, checkpoint.config, dtype, device) if is_target else None
    build = Build(ops, device, dtype, tp, format_of, stored)
    positions = state.max_positions + beyond
    began = time.perf_counter()
    decoder: Decoder
    if isinstance(checkpoint, FeatureCheckpoint):
        draft = checkpoint.config.make(build, positions, None if target is None else _shared(config, target))
        draft.map_tokens(checkpoint.target_ids())
        decoder = draft
    else:
        decoder = Decoder(checkpoint.config, build, max_positions=positions, windowed=is_target)
    ops.wide_bytes = wide_bytes(config, decoder.num_bytes() // tp.size, device)
    name = short_name(checkpoint.path)
    form = f" in {decoder.quantized}" if decoder.quantized else ""
    kept = _kept(config, checkpoint, decoder, is_target)
    mapped = kept is not None and kept.restore()
    if not mapped:
        weights = _reported(f"{name}{form}", _weights(checkpoint, decoder), len(decoder.shapes()))
        # Torch's operators, which are small, get one thread: several wait for each other on a core that is not free.
        alone = use_threads(num_threads()) if device.type == "cpu" else nullcontext()
        with alone, nullcontext(lambda _: None) if kept is None else kept.filling() as complete:
            decoder.load(weights, complete)
    if decoder.quantized and device.type == "cuda":
        torch.cuda.empty_cache()  # the weights as they were before: memory for KV
    if device.type == "cpu":
        trim_heap()
    log.info(
        "%s: %s of weights in %s on %s, %s kernels, %s in %.1f s",
        *(name, gib(decoder.num_bytes() // tp.size)),
        *(decoder.quantized or str(dtype).removeprefix("torch."), device_name(device), name_of(ops)),
        *("mapped from the cache" if mapped else "loaded", time.perf_counter() - began),
    )
    ops.reserve(decoder.heads, device, ahead=not is_target)
    return Loaded(decoder, max_len, max_rows, scratch_slots)


def _kept(
    config: EngineConfig, checkpoint: Checkpoint | FeatureCheckpoint, decoder: Decoder, is_target: bool
) -> WeightCache | None:
    """The file of these weights in the user's cache."""
    if isinstance(checkpoint, FeatureCheckpoint):
        return None
    form = config.quantization if is_target else config.speculation.draft_quantization
    return WeightCache.of(checkpoint, decoder, {"quantization": form, "exact": is_target})


def _reported(model: str, weights: Weights, count: int) -> Weights:
    """The `count` tensors of a model; reports how many of them are loaded."""
    loading.info("reading the weights of %s", model)
    reported = time.monotonic()
    for i, each in enumerate(weights):
        yield each
        if time.monotonic() - reported > _REPORT_SECONDS and i * 10 // count < (i + 1) * 10 // count:
            reported = time.monotonic()
            loading.info("reading the weights of %s: %d %%", model, (i + 1) * 100 // count)


def _weights(checkpoint: Checkpoint | FeatureCheckpoint, decoder: Decoder) -> Weights:
    """The checkpoint's tensors; where a rank needs a share of them only, they are not read yet if that is possible."""
    if decoder.tp.size > 1 and isinstance(checkpoint, HFCheckpoint):
        return checkpoint.stored()
    return checkpoint.weights(decoder.device, decoder.dtype)


def _shared(config: EngineConfig, target: Decoder) -> Shared:
    """The target's embedding and head for a draft on its features; all of them, where the target has a share only."""
    if target.tp.size == 1:
        return Shared(target.embedding, target.head, target.norm)
    model, checkpoint = target.config, open_checkpoint(config.model)
    build = Build(target.ops, target.device, target.dtype, format_of=checkpoint.formats)
    size = model.vocab_size, model.hidden_size
    embedding = Embedding(build, "model.embed_tokens", *size, embedding=True, head=model.tie_embeddings)
    head = embedding if model.tie_embeddings else Embedding(build, "lm_head", *size, head=True)
    wanted = {name: each for each in (embedding, head) for name in each.shapes()}
    for name, tensor in _weights(checkpoint, target):
        if name in wanted:
            wanted[name].load(name, tensor)
    return Shared(embedding, head, target.norm)


def make_runner(
    config: EngineConfig,
    loaded: Loaded,
    state: SequenceState,
    num_blocks: int,
    tables: DeviceBlockTables | None = None,
) -> ModelRunner:
    """`tables`: those of another model, whose KV blocks have the same numbers."""
    return ModelRunner(
        loaded.decoder,
        state,
        num_blocks=num_blocks,
        block_size=kv_block_size(config, loaded.decoder.device),
        max_decode_rows=loaded.max_rows,
        scratch_slots=loaded.scratch_slots,
        tables=tables,
    )
