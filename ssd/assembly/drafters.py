"""Builds the drafter that the speculation options describe, in this process or in a worker."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from ssd.assembly.device import batched_tokens, kv_block_size, make_current, rank_device, resolve_device
from ssd.assembly.memory import Loaded, format_names, kv_blocks, weight_bytes
from ssd.assembly.models import load_decoder, make_runner, make_state
from ssd.assembly.ranks import Follower, Place, Ranks
from ssd.assembly.sharing import share_gpu
from ssd.assembly.warm_up import warm_up
from ssd.config import NGRAM, EngineConfig, SpeculationConfig
from ssd.decoding.drafter import Drafter
from ssd.drafting.arms import DEPTHS, make_arms
from ssd.drafting.controller import DepthController
from ssd.drafting.custom import CustomDrafter
from ssd.drafting.eagle import EagleModel, EagleStep, private_blocks
from ssd.drafting.fan_out import Adaptive, FanOut, Geometric, Listed, Share
from ssd.drafting.late import LateBindingDrafter
from ssd.drafting.model import DraftModel, DraftSource, ModelDrafter
from ssd.drafting.ngram import NgramDrafter
from ssd.drafting.process import ProcessDrafter
from ssd.drafting.runner import DraftRunner
from ssd.drafting.shapes import RunShapes
from ssd.drafting.ssd import SSDDrafter
from ssd.drafting.step import DraftStep, ModelStep
from ssd.drafting.worker import WorkerDrafter
from ssd.errors import ConfigError
from ssd.execution.features import Features
from ssd.execution.graphs import row_buckets
from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.execution.threads import num_cores
from ssd.kernels.cpu.threads import set_threads
from ssd.kernels.device import kernels
from ssd.models.checkpoint import Checkpoint
from ssd.models.decoder import Decoder
from ssd.models.eagle import EagleCheckpoint
from ssd.models.open import absolute_path, open_checkpoint, open_eagle
from ssd.options import build, is_int
from ssd.parallel.process import Worker
from ssd.parallel.tensor import TensorParallel
from ssd.text.tokenizer import Tokenizer

log = logging.getLogger("ssd")
_MAX_BRANCHES = 256  # of a whole batch
_WORKER_START_SECONDS = 120.0
_LARGE_DRAFT = 256 << 20  # bytes in bfloat16, of which a step of the draft reads all
_DRAFT_THREADS = 4  # of a small draft on the CPU beside a target on a GPU: small products gain nothing from more


def open_draft(
    speculation: SpeculationConfig, target: Checkpoint, tokenizer: Tokenizer
) -> Checkpoint | EagleCheckpoint | None:
    """The checkpoint of the draft model or head, or None; ConfigError if it does not fit the target."""
    if speculation.draft_model is None:
        return None
    head = open_eagle(speculation.draft_model)
    if head is not None:
        return head.for_target(target)
    checkpoint = open_checkpoint(speculation.draft_model, "speculation draft")
    difference = tokenizer.difference(checkpoint.tokenizer())
    if difference is not None:
        raise ConfigError(
            f"speculation draft={speculation.draft!r} has another tokenizer than the target ({difference}): use a "
            f"draft of the same family, or draft={NGRAM!r}, which needs no model"
        )
    return checkpoint


def placed(
    speculation: SpeculationConfig, device: torch.device, *, head: bool = False, ranks: int = 1
) -> SpeculationConfig:
    """Resolves `placement` and `draft_device`.

    `placement="auto"` is a process if the draft has a GPU of its own or a core of a CPU, else a stream on a GPU, else
    inline. With mode="auto" it stays "auto" where nothing can run at the same time, and SSD is not among the modes.
    `head`: the draft is an EAGLE head, which is where the target is. `ranks`: of the target.
    """
    if speculation.mode not in ("ssd", "auto") or speculation.draft_model is None:
        return speculation
    placement, wanted = speculation.placement, speculation.draft_device
    if placement == "auto" and wanted is not None:
        placement = "process"
    elif placement == "auto":
        own = torch.cuda.device_count() > (device.index or 0) + ranks if device.type == "cuda" else num_cores() > 1
        placement = "process" if own and not head else "stream" if device.type == "cuda" else "inline"
        if placement == "inline" and speculation.mode == "auto":
            return speculation
    if placement == "process" and head:
        raise ConfigError(
            'speculation placement="process": an EAGLE head reads the hidden states of the target, in its process; use '
            '"stream" on a GPU, else "inline"'
        )
    if placement == "stream" and device.type != "cuda":
        raise ConfigError('speculation placement="stream" is for GPUs: use "process", or "inline"')
    if placement != "process":
        if speculation.draft_threads is not None:
            raise ConfigError(
                f"speculation draft_threads={speculation.draft_threads} is for a draft in a process of its own on a "
                f'CPU (placement="process"), not for placement="{placement}": leave it out'
            )
        return replace(speculation, placement=placement)
    speculation = replace(speculation, placement=placement)
    first = rank_device(device, ranks) if wanted is None else resolve_device(wanted, "speculation draft_device")
    _check_draft_devices(speculation, first, {rank_device(device, rank) for rank in range(ranks)})
    return replace(speculation, draft_device=str(first))


def sized(
    speculation: SpeculationConfig, draft: Checkpoint | EagleCheckpoint | None, device: torch.device
) -> SpeculationConfig:
    """Resolves `draft_quantization` and, for a draft on the CPU beside a target on a GPU, `draft_threads`.

    A step of a large draft takes as long as reading it. It is rounded where the target reads the same memory, and to
    fewer bits where memory is slower: on a CPU, of which it has all cores but two.
    """
    on_cpu = device.type == "cuda" and speculation.draft_device == "cpu"
    large = False
    if draft is not None and not isinstance(draft, EagleCheckpoint):
        large = weight_bytes(draft.config, torch.bfloat16) >= _LARGE_DRAFT
    if on_cpu and speculation.draft_threads is None:
        ranks = speculation.draft_ranks
        threads = (num_cores() - 2) // ranks if large else min(_DRAFT_THREADS, num_cores() // (2 * ranks))
        speculation = replace(speculation, draft_threads=max(1, threads))
    if speculation.draft_quantization is not None or not (on_cpu or speculation.placement == "stream"):
        return speculation
    if draft is None or not large or format_names(draft.config, draft.formats):
        return speculation
    return replace(speculation, draft_quantization="int4" if on_cpu else "int8+bf16")


def _check_draft_devices(speculation: SpeculationConfig, first: torch.device, target: set[torch.device]) -> None:
    """ConfigError if the draft models have no GPUs, or cores, of their own; `first`: the device of the first one."""
    _check_draft_threads(speculation, first)
    if first.type == "cpu":
        return
    last = rank_device(first, speculation.draft_ranks - 1)
    if (last.index or 0) >= torch.cuda.device_count():
        if speculation.draft_ranks > 1:
            raise ConfigError(
                f"speculation draft_replicas={speculation.draft_replicas} and draft_tensor_parallel_size="
                f"{speculation.draft_tensor_parallel_size} need {speculation.draft_ranks} more GPUs: lower one of them"
            )
        raise ConfigError(
            'speculation placement="process" needs another GPU for the draft: use "stream", or draft_device="cpu"'
        )
    used = {each.index or 0 for each in target}
    if used & set(range(first.index or 0, (last.index or 0) + 1)):
        raise ConfigError(
            f'speculation draft_device="{first}" is a GPU of the target: use placement="stream" for a draft there'
        )


def _check_draft_threads(speculation: SpeculationConfig, device: torch.device) -> None:
    threads = speculation.draft_threads
    if threads is None:
        return
    if device.type != "cpu":
        raise ConfigError(f"speculation draft_threads={threads} is for a draft on a CPU, not on {device}: leave it out")
    if speculation.draft_cores >= num_cores():
        raise ConfigError(
            f"speculation draft_threads={threads} leaves none of the {num_cores()} CPU cores to the target: lower it, "
            "or leave it out"
        )


def prepares_here(speculation: SpeculationConfig) -> bool:
    """Whether the draft model of this process prepares branches."""
    here = speculation.placement in ("stream", "inline")
    return speculation.mode == "ssd" or (speculation.mode == "auto" and here)


def make_drafter(config: EngineConfig, runner: ModelRunner | None, target: ModelRunner) -> Drafter:
    """`config`: the user's, with the target's `max_model_len`. `runner`: that of a draft in this process."""
    speculation = config.speculation
    model: DraftSource | None = None
    if runner is not None and target.features is not None:
        model = make_eagle_model(config, runner, target.features)
    elif runner is not None:
        model = make_draft_model(config, runner, make_fan_out(speculation), target)
    workers = start_workers(config, target.state) if speculation.placement == "process" else None
    return drafter_of(model, speculation, workers)


def drafter_of(model: DraftSource | None, speculation: SpeculationConfig, workers: Drafter | None = None) -> Drafter:
    """The drafter of these options; `workers`: the one in processes of its own.

    A DepthController chooses where `mode`, `k` or `budget` is "auto".
    """
    if speculation.mode == "ar":
        return Drafter()
    drafters: dict[str, Drafter] = {}
    if workers is None and model is not None and prepares_here(speculation):
        drafters["sd"] = drafters["ssd"] = ssd_drafter(model, speculation, make_fan_out(speculation))
    else:
        if speculation.mode != "ssd":
            drafters["sd"] = ModelDrafter(model, speculation.lookahead) if model else _modelless(speculation)
        if workers is not None:
            drafters["ssd"] = workers
    if "auto" not in (speculation.mode, speculation.k, speculation.budget):
        return drafters[speculation.mode]
    depths = DEPTHS if speculation.k == "auto" else (speculation.lookahead,)
    modes = ("ar", *drafters) if "auto" in (speculation.mode, speculation.k) else (speculation.mode,)
    return DepthController(drafters, make_arms(modes, depths, speculation.budgets))


def _modelless(speculation: SpeculationConfig) -> Drafter:
    draft = speculation.draft
    if draft is None or isinstance(draft, str):
        return NgramDrafter(speculation.lookahead)
    return draft if isinstance(draft, Drafter) else CustomDrafter(draft, speculation.lookahead)


def ssd_drafter(model: DraftSource, speculation: SpeculationConfig, fan_out: FanOut) -> SSDDrafter:
    return SSDDrafter(
        model,
        fan_out,
        lookahead=speculation.lookahead,
        budget=max(speculation.budgets),
        backup=speculation.backup,
        overlap=speculation.placement == "stream",
    )


def make_fan_out(speculation: SpeculationConfig, replica: int = 0) -> FanOut:
    share = Share(replica, speculation.draft_replicas)
    if speculation.fan_out_hit is not None and speculation.fan_out_miss is not None:
        return Listed(tuple(speculation.fan_out_hit), tuple(speculation.fan_out_miss), share)
    if is_int(speculation.fan_out):
        each = (int(speculation.fan_out),) * (speculation.lookahead + 1)
        return Listed(each, each, share)
    return Geometric(share) if speculation.fan_out == "geometric" else Adaptive(share)


def make_eagle_model(config: EngineConfig, runner: ModelRunner, features: Features) -> EagleModel:
    head = _make_runner(config, EagleStep(runner, features, run_shapes(config, runner.decoder.device)))
    if head.on_cuda:
        usual = row_buckets(config.max_num_seqs), make_fan_out(config.speculation)
        warm_up("head", [lambda: head.rehearse(*usual)], [] if config.eager else [lambda: head.capture(*usual)])
    return EagleModel(head)


def make_draft_model(
    config: EngineConfig, runner: ModelRunner, fan_out: FanOut, target: ModelRunner | None = None
) -> DraftModel:
    """`target`: that of the same process."""
    shared = config.speculation.placement == "stream"
    step = ModelStep(runner, run_shapes(config, runner.decoder.device), shared=shared)
    draft = _make_runner(config, step)
    if draft.on_cuda:
        _warm_up(config, draft, step, fan_out, target)
    return DraftModel(
        draft,
        max_len=runner.decoder.config.max_position,
        max_num_batched_tokens=batched_tokens(config, runner.decoder.device),
        prefix_caching=config.prefix_caching,
    )


def _make_runner(config: EngineConfig, step: DraftStep) -> DraftRunner:
    rejection, c = config.speculation.acceptance == "rejection", config.speculation.saguaro_c
    return DraftRunner(step, rejection=rejection, saguaro_c=c, graphs=not config.eager)


def _warm_up(
    config: EngineConfig, draft: DraftRunner, step: ModelStep, fan_out: FanOut, target: ModelRunner | None
) -> None:
    runner, usual = draft.runner, (row_buckets(config.max_num_seqs), fan_out)
    max_tokens = min(batched_tokens(config, draft.device), runner.decoder.config.max_position)
    if not config.eager:
        runner.plan_graphs(prefill_only=True)
    rehearsals = [lambda: runner.rehearse(max_tokens), lambda: draft.rehearse(*usual)]
    captures = [step.use_one_kernel]
    if not config.eager:
        captures.append(runner.capture)
        if target is not None and config.speculation.placement == "stream":
            captures.append(lambda: share_gpu(target, draft, fan_out))
        captures.append(lambda: draft.capture(*usual))
    warm_up("draft", rehearsals, captures)


def run_shapes(config: EngineConfig, device: torch.device) -> RunShapes:
    """Rows of a draft run: one per sequence, or its branches, up to _MAX_BRANCHES."""
    speculation, rows = config.speculation, config.max_num_seqs
    widths: tuple[int, ...] = ()
    if prepares_here(speculation):
        widths = speculation.budgets
        rows = max(rows, min(_MAX_BRANCHES, rows * max(widths)))
    return RunShapes(speculation.lookahead, config.max_num_seqs, rows, widths, bucketed=device.type == "cuda")


def load_draft(
    config: EngineConfig,
    draft: Checkpoint | EagleCheckpoint,
    state: SequenceState,
    limit: int,
    target: Decoder | None = None,
    tp: TensorParallel = TensorParallel(),  # noqa: B008 (frozen)
) -> Loaded:
    """Loads the draft model or head. Its batches read K + 1 tokens per sequence, and its positions go K + 1 further."""
    shapes, head = run_shapes(config, state.device), isinstance(draft, EagleCheckpoint)
    scratch = shapes.scratch_slots
    if head and shapes.max_width:
        size = kv_block_size(config, state.device)
        scratch += config.max_num_seqs * private_blocks(shapes.lookahead, size) * size
    return load_decoder(
        config,
        draft,
        state,
        limit if head else min(limit, draft.config.max_position),
        max(shapes.max_rows, config.max_num_seqs * shapes.reads),
        beyond=2 * shapes.reads,
        scratch_slots=scratch,
        target=target if head else None,
        tp=tp,
    )


def start_workers(config: EngineConfig, state: SequenceState) -> Drafter:
    """A drafter in workers, one for each replica, on `draft_device` and the GPUs after it. `state`: the target's.

    What `config` leaves open (dtype, KV blocks, batch size) a worker chooses for its own device.
    """
    draft = absolute_path(str(config.speculation.draft))  # for a worker that is started again from another directory
    in_flight = kernels(state.device).draft_table is not None and config.speculation.acceptance == "coupled"
    backup = "jit" if in_flight else config.speculation.backup  # in flight it is chosen here, not by the worker
    speculation = config.speculation
    config = replace(config, speculation=replace(speculation, mode="ssd", draft=draft, backup=backup))
    first = torch.device(str(speculation.draft_device))

    def start(replica: int) -> Worker:
        device = rank_device(first, replica * speculation.draft_tensor_parallel_size)
        setup = {"config": asdict(replace(config, device=str(device))), "vocab_size": state.vocab_size}
        return Worker(setup | {"replica": replica})

    starts = [functools.partial(start, replica) for replica in range(speculation.draft_replicas)]
    drafter: ProcessDrafter
    k, budget = speculation.lookahead, max(speculation.budgets)
    if in_flight:
        drafter = LateBindingDrafter(starts, k, state, budget=budget, backup=speculation.backup)
    else:
        cores = speculation.draft_cores if first.type == state.device.type == "cpu" else 0
        drafter = ProcessDrafter(starts, k, state.vocab_size, budget=budget, cores=cores)
    logging.getLogger("ssd.loading").info("starting the drafter's process")
    if not drafter.wait_ready(_WORKER_START_SECONDS):
        log.warning("the drafter's process is not ready yet: decoding begins without it")
    return drafter


def build_worker_drafter(setup: Mapping[str, Any]) -> WorkerDrafter:
    """Builds the same drafter inside a worker, with a SequenceState of its own. It is rank 0 of a split draft model."""
    config = build(EngineConfig, dict(setup["config"]))
    device, size = resolve_device(config.device), config.speculation.draft_tensor_parallel_size
    make_current(device)
    if device.type == "cpu":
        set_threads(config.speculation.draft_threads or 1)
    vocab_size, replica = int(setup["vocab_size"]), int(setup["replica"])
    fan_out = make_fan_out(config.speculation, replica)
    ranks = None
    if size > 1:
        split = replace(config, tensor_parallel_size=size)
        ranks = Ranks(split, device, draft={"vocab_size": vocab_size, "replica": replica})
    runner = _worker_runner(config, vocab_size, device, ranks.place if ranks is not None else Place())
    if ranks is not None:
        ranks.attach(runner)
    drafter = ssd_drafter(make_draft_model(config, runner, fan_out), config.speculation, fan_out)
    return WorkerDrafter(drafter, runner.state, close=runner.close)


def follow_draft(rank: Follower, setup: Mapping[str, Any]) -> None:
    """Another rank of a split draft model; returns when the socket to rank 0 is closed."""
    runner = _worker_runner(rank.config, int(setup["vocab_size"]), rank.device, rank.place)
    fan_out = make_fan_out(rank.config.speculation, int(setup["replica"]))
    draft = make_draft_model(rank.config, runner, fan_out).runner
    rank.serve(runner, lambda key: draft.follow(key, fan_out))


def _worker_runner(config: EngineConfig, vocab_size: int, device: torch.device, place: Place) -> ModelRunner:
    """The draft model of a worker, or a rank's share of it."""
    draft = open_checkpoint(str(config.speculation.draft))
    limit = config.max_model_len or draft.config.max_position
    state = make_state(config, limit, vocab_size, device)
    loaded = load_draft(config, draft, state, limit, tp=place.tp)
    return make_runner(config, loaded, state, place.agree(kv_blocks(config, [loaded], loaded.max_len)))
