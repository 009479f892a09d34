"""Puts an engine together from its config: checkpoints, device, kernels, KV pools, scheduler, drafter, round."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from ssd.config import NGRAM, EngineConfig, SpeculationConfig, build
from ssd.core import is_int
from ssd.decoding.acceptance import Coupled, Rejection
from ssd.decoding.drafter import Drafter
from ssd.decoding.round import Round
from ssd.drafting.ahead import AheadDrafter
from ssd.drafting.choice import Chooser
from ssd.drafting.fan_out import Adaptive, FanOut, Geometric, Listed
from ssd.drafting.model import DraftModel, ModelDrafter
from ssd.drafting.ngram import NgramDrafter
from ssd.drafting.pace import Paced, make_arms
from ssd.drafting.process import ProcessDrafter, Worker
from ssd.drafting.program import Program
from ssd.engine.blocks import BlockPool
from ssd.engine.engine import Engine
from ssd.engine.scheduler import Scheduler
from ssd.errors import ConfigError
from ssd.execution.graphs import PREFILL_BUCKETS, row_buckets
from ssd.execution.runner import ModelRunner
from ssd.kernels.ops import Ops
from ssd.models.checkpoint import Checkpoint
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder
from ssd.models.open import open_checkpoint
from ssd.text.tokenizer import Tokenizer

log = logging.getLogger("ssd")

_CPU_KV_BYTES = 4 << 30
_MAX_BRANCHES = 256  # of all sequences together
_WORKER_START_SECONDS = 120.0


def build_engine(config: EngineConfig, checkpoint: Checkpoint | None = None) -> Engine:
    """Loads the model (from `config.model` unless it is handed in) and everything around it; ready for requests."""
    checkpoint = checkpoint or open_checkpoint(config.model)
    tokenizer = checkpoint.tokenizer()
    device = resolve_device(config.device)
    config = replace(config, speculation=placed(config.speculation, device))
    draft = open_draft(config.speculation, tokenizer)
    try:
        here = draft if config.speculation.placement != "process" else None
        runner, draft_runner, max_model_len = build_runners(config, checkpoint, here, device)
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
    )
    acceptance = Rejection() if config.speculation.acceptance == "rejection" else Coupled()
    config = replace(config, max_model_len=max_model_len, num_kv_blocks=runner.num_blocks)
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


def placed(speculation: SpeculationConfig, device: torch.device) -> SpeculationConfig:
    """With a placement that the machine has: `auto` is a stream of the GPU, or a process on a CPU's second core."""
    if speculation.mode != "ssd":
        return speculation
    placement = speculation.placement
    if placement == "auto":
        placement = "stream" if device.type == "cuda" else "process" if num_cores() > 1 else "inline"
    if placement == "stream" and device.type != "cuda":
        raise ConfigError('speculation placement="stream" is for GPUs: use "process", or "inline"')
    if placement == "process" and device.type == "cuda" and torch.cuda.device_count() < 2:
        raise ConfigError('speculation placement="process" needs a second GPU for the draft: use "stream"')
    if placement == "process" and speculation.budget == "auto":
        raise ConfigError(
            'speculation budget="auto" is for a draft beside the target on its GPU (placement="stream"): give a number'
        )
    return replace(speculation, placement=placement)


def make_drafter(config: EngineConfig, runner: ModelRunner | None, vocab_size: int) -> Drafter:
    if config.speculation.placement == "process":
        return paced(start_worker(config, vocab_size), config.speculation)
    model = make_draft_model(config, runner, vocab_size) if runner is not None else None
    return paced(drafter_with(model, config.speculation), config.speculation)


def paced(drafter: Drafter, speculation: SpeculationConfig) -> Drafter:
    """The drafter, if need be under a controller that finds out how much pays."""
    if "auto" not in (speculation.k, speculation.budget):
        return drafter
    ahead = speculation.budgets if isinstance(drafter, AheadDrafter) else (0,)
    return Paced(drafter, make_arms(None if speculation.k == "auto" else speculation.lookahead, ahead))


def make_draft_model(config: EngineConfig, runner: ModelRunner, vocab_size: int) -> DraftModel:
    return DraftModel(
        make_program(config, runner, vocab_size),
        max_len=runner.decoder.config.max_position,
        max_num_batched_tokens=batched_tokens(config, runner.decoder.device),
        prefix_caching=config.prefix_caching,
    )


def drafter_with(model: DraftModel | None, speculation: SpeculationConfig) -> Drafter:
    """Drafts in this process, with a model or without one."""
    if speculation.mode == "ar":
        return Drafter()
    if model is None:
        return NgramDrafter(speculation.lookahead)
    if speculation.mode == "sd":
        return ModelDrafter(model, speculation.lookahead)
    return AheadDrafter(
        model,
        make_fan_out(speculation),
        lookahead=speculation.lookahead,
        budget=max(speculation.budgets),
        backup=speculation.backup,
        overlap=speculation.placement == "stream",
    )


def start_worker(config: EngineConfig, vocab_size: int) -> Drafter:
    """The drafter in a process of its own, on a core or a GPU of its own."""
    setup, environment = {"config": asdict(config), "vocab_size": vocab_size}, dict(os.environ)
    threads = torch.get_num_threads()
    if resolve_device(config.device).type == "cuda":
        visible = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(torch.cuda.device_count())))
        environment["CUDA_VISIBLE_DEVICES"] = visible.split(",")[1]
    else:
        torch.set_num_threads(max(1, min(threads, num_cores() - 1)))
    drafter = ProcessDrafter(
        lambda: Worker(setup, environment=environment),
        config.speculation.lookahead,
        vocab_size,
        ended=lambda: torch.set_num_threads(threads),
    )
    if not drafter.wait_ready(_WORKER_START_SECONDS):
        log.warning("the drafter's process is not ready yet: decoding begins without it")
    return drafter


def build_worker_drafter(setup: Mapping[str, Any]) -> Drafter:
    """What a worker runs: the same drafter, which prepares as soon as it has answered."""
    config = build(EngineConfig, dict(setup["config"]))
    config = replace(config, speculation=replace(config.speculation, placement="inline"))
    device = resolve_device(config.device)
    if device.type == "cpu":
        torch.set_num_threads(1)
    draft = open_checkpoint(str(config.speculation.draft))
    loaded = load_draft(config, draft, device, config.max_model_len or draft.config.max_position)
    num_blocks = kv_blocks(config, [loaded], loaded.max_len)
    runner = make_runner(config, loaded, num_blocks, loaded.max_len)
    return drafter_with(make_draft_model(config, runner, int(setup["vocab_size"])), config.speculation)


def make_fan_out(speculation: SpeculationConfig) -> FanOut:
    if speculation.fan_out_hit is not None and speculation.fan_out_miss is not None:
        return Listed(tuple(speculation.fan_out_hit), tuple(speculation.fan_out_miss))
    if is_int(speculation.fan_out):
        each = (int(speculation.fan_out),) * (speculation.lookahead + 1)
        return Listed(each, each)
    return Geometric() if speculation.fan_out == "geometric" else Adaptive()


def make_program(config: EngineConfig, runner: ModelRunner, vocab_size: int) -> Program:
    speculation, rows = config.speculation, draft_rows(config)
    max_len = config.max_model_len or runner.decoder.config.max_position
    program = Program(
        runner,
        Chooser(drawn=speculation.acceptance == "rejection", saguaro_c=speculation.saguaro_c),
        lookahead=speculation.lookahead,
        max_lanes=config.max_num_seqs,
        max_rows=rows,
        widths=speculation.budgets if speculation.mode == "ssd" else (),
        max_len=max_len,
        vocab_size=vocab_size,
        graphs=not config.eager,
    )
    program.capture(row_buckets(config.max_num_seqs))
    if program.on_cuda and not config.eager:
        runner.capture_graphs(max_len, prefill_only=True)
    return program


def draft_rows(config: EngineConfig) -> int:
    """Rows that a draft extends side by side: one a sequence, or its forks, as far as they are worth their time."""
    if config.speculation.mode == "sd":
        return config.max_num_seqs
    return max(config.max_num_seqs, min(_MAX_BRANCHES, config.max_num_seqs * max(config.speculation.budgets)))


@dataclass(frozen=True)
class Loaded:
    """A model with its weights, and what it is to be used for."""

    decoder: Decoder
    max_len: int  # tokens of a sequence
    max_rows: int  # query tokens of a decode-size batch that it has attention scratch for
    scratch_slots: int = 0  # KV slots beside the pool's


def build_runners(
    config: EngineConfig, checkpoint: Checkpoint, draft: Checkpoint | None, device: torch.device
) -> tuple[ModelRunner, ModelRunner | None, int]:
    """Target and draft on their device, each with its KV (as many blocks for both), and the longest sequence."""
    model = checkpoint.config
    limit = config.max_model_len or model.max_position
    if limit > model.max_position:
        raise ConfigError(f"max_model_len={limit} is beyond the model's {model.max_position} positions: lower it")
    models = [load_decoder(config, checkpoint, device, limit, config.max_num_seqs * (1 + config.speculation.lookahead))]
    models += [load_draft(config, draft, device, limit)] if draft is not None else []
    num_blocks = kv_blocks(config, models, limit)
    limit = fitting_length(config, limit, num_blocks * config.block_size)
    runners = [make_runner(config, loaded, num_blocks, limit) for loaded in models]
    if device.type == "cuda" and not config.eager:
        runners[0].capture_graphs(limit)
    return runners[0], runners[1] if draft is not None else None, limit


def load_decoder(
    config: EngineConfig,
    checkpoint: Checkpoint,
    device: torch.device,
    max_len: int,
    max_rows: int,
    *,
    beyond: int = 0,
    scratch_slots: int = 0,
) -> Loaded:
    """Weights, and attention scratch for sequences of `max_len` tokens and as many as `beyond` after those."""
    ops, dtype = make_ops(device), resolve_dtype(config, checkpoint.config, device)
    positions = max_len + beyond
    decoder = Decoder(checkpoint.config, ops, device=device, dtype=dtype, max_positions=positions)
    decoder.load(checkpoint.weights(device, dtype))
    ops.reserve(max_rows, positions, decoder.layers[0].heads, device)
    return Loaded(decoder, max_len, max_rows, scratch_slots)


def load_draft(config: EngineConfig, draft: Checkpoint, device: torch.device, limit: int) -> Loaded:
    """A draft reads a whole draft of every sequence at once, and writes as far again ahead of it."""
    reads, rows = 1 + config.speculation.lookahead, draft_rows(config)
    return load_decoder(
        config,
        draft,
        device,
        min(limit, draft.config.max_position),
        max(rows, config.max_num_seqs * reads),
        beyond=2 * reads,
        scratch_slots=Program.scratch_slots(rows, config.speculation.lookahead),
    )


def make_runner(config: EngineConfig, loaded: Loaded, num_blocks: int, limit: int) -> ModelRunner:
    runner = ModelRunner(
        loaded.decoder,
        num_blocks=num_blocks,
        block_size=config.block_size,
        max_decode_rows=loaded.max_rows,
        scratch_slots=loaded.scratch_slots,
    )
    if loaded.decoder.device.type == "cuda":
        runner.warm_up(min(batched_tokens(config, loaded.decoder.device), limit, loaded.max_len))
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


def num_cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


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


def kv_blocks(config: EngineConfig, models: Seq[Loaded], limit: int) -> int:
    """How many KV blocks each model gets: as asked, else what memory allows (on the CPU, what could ever be used)."""
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
    """What a model's largest batch needs beside weights and KV, generously."""
    decoder, model, tokens = loaded.decoder, loaded.decoder.config, batched_tokens(config, loaded.decoder.device)
    width = 8 * model.hidden_size + 3 * model.intermediate_size + 4 * model.num_heads * model.head_dim
    rows = sum(row_buckets(loaded.max_rows)) + sum(min(rows, loaded.max_rows) for rows in PREFILL_BUCKETS)
    graphs = rows * model.vocab_size * 4  # every graph keeps its logits
    sampling = loaded.max_rows * model.vocab_size * 48  # sorted, summed and perturbed copies
    scratch = loaded.scratch_slots * decoder.kv_bytes_per_token
    return tokens * width * decoder.dtype.itemsize + graphs + sampling + scratch + (1 << 30)
