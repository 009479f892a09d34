"""Builds the drafter that the speculation options describe, in this process or in a worker."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from ssd.assembly.device import batched_tokens, kv_block_size, make_current, num_cores, rank_device, resolve_device
from ssd.assembly.memory import Loaded, kv_blocks
from ssd.assembly.models import load_decoder, make_runner, make_state
from ssd.assembly.ranks import Follower, Place, Ranks
from ssd.assembly.warm_up import warm_up
from ssd.config import NGRAM, EngineConfig, SpeculationConfig
from ssd.decoding.drafter import Drafter
from ssd.drafting.arms import DEPTHS, make_arms
from ssd.drafting.controller import DepthController
from ssd.drafting.eagle import EagleModel, EagleStep, private_blocks
from ssd.drafting.fan_out import Adaptive, FanOut, Geometric, Listed, Share
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
from ssd.layers.formats.rounded import rounded
from ssd.models.checkpoint import Checkpoint
from ssd.models.decoder import Decoder
from ssd.models.eagle import EagleCheckpoint
from ssd.models.open import absolute_path, open_checkpoint, open_eagle
from ssd.models.persistent import use_persistent_step
from ssd.options import build, is_int
from ssd.parallel.launch import local_size
from ssd.parallel.process import Worker
from ssd.parallel.tensor import TensorParallel
from ssd.text.tokenizer import Tokenizer

log = logging.getLogger("ssd")
_MAX_BRANCHES = 256  # of a whole batch
_WORKER_START_SECONDS = 120.0


def open_draft(
    speculation: SpeculationConfig, target: Checkpoint, tokenizer: Tokenizer
) -> Checkpoint | EagleCheckpoint | None:
    """The checkpoint of the draft model or head, or None; ConfigError if it does not fit the target."""
    if speculation.draft is None or speculation.draft == NGRAM:
        return None
    head = open_eagle(speculation.draft)
    if head is not None:
        return head.for_target(target)
    checkpoint = open_checkpoint(speculation.draft, "speculation draft")
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
    """Resolves `placement`: "auto" is a stream on a GPU, a process on a CPU with several cores, else inline.

    `head`: the draft is an EAGLE head, which is where the target is. `ranks`: of the target. With mode="auto" it stays
    "auto" where nothing can run at the same time, and SSD is not among the modes.
    """
    if speculation.mode not in ("ssd", "auto") or speculation.draft == NGRAM:
        return speculation
    placement = speculation.placement
    if placement == "auto":
        apart = num_cores() > 1 and not head
        placement = "stream" if device.type == "cuda" else "process" if apart else "inline"
        if placement == "inline" and speculation.mode == "auto":
            return speculation
    if placement == "process" and head:
        raise ConfigError(
            'speculation placement="process": an EAGLE head reads the hidden states of the target, in its process; use '
            '"stream" on a GPU, else "inline"'
        )
    if placement == "stream" and device.type != "cuda":
        raise ConfigError('speculation placement="stream" is for GPUs: use "process", or "inline"')
    speculation = replace(speculation, placement=placement)
    _check_draft_threads(speculation, device)
    last = rank_device(device, ranks + speculation.draft_ranks - 1)
    if placement == "process" and device.type == "cuda" and last.index >= torch.cuda.device_count():
        if speculation.draft_ranks > 1:
            raise ConfigError(
                f"speculation draft_replicas={speculation.draft_replicas} and draft_tensor_parallel_size="
                f"{speculation.draft_tensor_parallel_size} need {speculation.draft_ranks} more GPUs: lower one of them"
            )
        raise ConfigError('speculation placement="process" needs another GPU for the draft: use "stream"')
    if placement == "process" and speculation.budget == "auto":
        raise ConfigError(
            'speculation budget="auto" is for a draft beside the target on its GPU (placement="stream"): give a number'
        )
    return speculation


def _check_draft_threads(speculation: SpeculationConfig, device: torch.device) -> None:
    threads = speculation.draft_threads
    if threads is None:
        return
    if speculation.placement != "process" or device.type != "cpu":
        raise ConfigError(
            f"speculation draft_threads={threads} is for a draft in a process of its own on a CPU "
            f'(placement="process"), not for placement="{speculation.placement}" on {device.type}: leave it out'
        )
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
        model = make_draft_model(config, runner, make_fan_out(speculation))
    workers = start_workers(config, target.vocab_size) if speculation.placement == "process" else None
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
            drafters["sd"] = (
                ModelDrafter(model, speculation.lookahead) if model else NgramDrafter(speculation.lookahead)
            )
        if workers is not None:
            drafters["ssd"] = workers
    if "auto" not in (speculation.mode, speculation.k, speculation.budget):
        return drafters[speculation.mode]
    depths = DEPTHS if speculation.k == "auto" else (speculation.lookahead,)
    modes = ("ar", *drafters) if "auto" in (speculation.mode, speculation.k) else (speculation.mode,)
    return DepthController(drafters, make_arms(modes, depths, speculation.budgets))


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


def make_draft_model(config: EngineConfig, runner: ModelRunner, fan_out: FanOut) -> DraftModel:
    draft = _make_runner(config, ModelStep(runner, run_shapes(config, runner.decoder.device)))
    if draft.on_cuda:
        _warm_up(config, draft, fan_out)
    return DraftModel(
        draft,
        max_len=runner.decoder.config.max_position,
        max_num_batched_tokens=batched_tokens(config, runner.decoder.device),
        prefix_caching=config.prefix_caching,
    )


def _make_runner(config: EngineConfig, step: DraftStep) -> DraftRunner:
    rejection, c = config.speculation.acceptance == "rejection", config.speculation.saguaro_c
    return DraftRunner(step, rejection=rejection, saguaro_c=c, graphs=not config.eager)


def _warm_up(config: EngineConfig, draft: DraftRunner, fan_out: FanOut) -> None:
    runner, usual = draft.runner, (row_buckets(config.max_num_seqs), fan_out)
    max_tokens = min(batched_tokens(config, draft.device), runner.decoder.config.max_position)
    if not config.eager:
        runner.plan_graphs(prefill_only=True)
    rehearsals = [lambda: runner.rehearse(max_tokens), lambda: draft.rehearse(*usual)]
    captures = [] if config.eager else [runner.capture, lambda: draft.capture(*usual)]
    captures.insert(0, lambda: use_persistent_step(runner.decoder, runner.kv))
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
        format_of=rounded(config.speculation.draft_quantization),
        target=target if head else None,
        tp=tp,
    )


def start_workers(config: EngineConfig, vocab_size: int) -> Drafter:
    """A drafter in workers, one for each replica, with the GPUs after the target's on this host, or a core each.

    What `config` leaves open (dtype, KV blocks, batch size) a worker chooses for its own device.
    """
    draft = absolute_path(str(config.speculation.draft))  # for a worker that is started again from another directory
    speculation = replace(config.speculation, mode="ssd", draft=draft)
    config, device = replace(config, speculation=speculation), resolve_device(config.device)
    before = local_size(config.tensor_parallel_size)

    def start(replica: int) -> Worker:
        first = before + replica * speculation.draft_tensor_parallel_size
        own = replace(config, device=str(rank_device(device, first)))
        return Worker({"config": asdict(own), "vocab_size": vocab_size, "replica": replica})

    drafter = ProcessDrafter(
        [functools.partial(start, replica) for replica in range(speculation.draft_replicas)],
        speculation.lookahead,
        vocab_size,
        cores=speculation.draft_cores if device.type == "cpu" else 0,
    )
    if not drafter.wait_ready(_WORKER_START_SECONDS):
        log.warning("the drafter's process is not ready yet: decoding begins without it")
    return drafter


def build_worker_drafter(setup: Mapping[str, Any]) -> WorkerDrafter:
    """Builds the same drafter inside a worker, with a SequenceState of its own. It is rank 0 of a split draft model."""
    config = build(EngineConfig, dict(setup["config"]))
    device, size = resolve_device(config.device), config.speculation.draft_tensor_parallel_size
    make_current(device)
    if device.type == "cpu":
        torch.set_num_threads(config.speculation.draft_threads or 1)
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
