"""Builds an engine from its config: checkpoints, device, memory, models, scheduler, drafter, round."""

from __future__ import annotations

import logging
from collections.abc import Sequence as Seq
from contextlib import nullcontext
from dataclasses import replace

import torch

from ssd.assembly.cores import split_cores
from ssd.assembly.device import batched_tokens, resolve_device
from ssd.assembly.draft_models import load_draft, open_draft
from ssd.assembly.draft_workers import follow_draft
from ssd.assembly.drafters import make_drafter
from ssd.assembly.fit import check_draft_fits, check_fits
from ssd.assembly.memory import MAX_IN_FLIGHT, blocks_for, fitting_length, kv_blocks, num_slots, possible_length
from ssd.assembly.models import load_decoder, make_runner, make_state
from ssd.assembly.open import open_checkpoint
from ssd.assembly.placement import deepened, placed, sized
from ssd.assembly.ranks import Follower, Place, Ranks
from ssd.assembly.warm_up import warm_up
from ssd.config import SUFFIX, EngineConfig
from ssd.decoding.rejection import RejectionTarget
from ssd.decoding.round import Round
from ssd.engine.engine import Engine
from ssd.engine.scheduler import Scheduler
from ssd.errors import ConfigError, EngineFailed, NotEnoughMemory
from ssd.execution.features import features_of
from ssd.execution.runner import ModelRunner
from ssd.execution.target import Target
from ssd.kernels.triton import compile as compiling
from ssd.kv.blocks import BlockPool
from ssd.models.block import BlockCheckpoint
from ssd.models.checkpoint import Checkpoint
from ssd.models.decoder import check_split
from ssd.models.feature_draft import FeatureCheckpoint, FeatureDraft
from ssd.models.repository import gib
from ssd.parallel.launch import local_size
from ssd.text.tokenizer import Tokenizer

log = logging.getLogger("ssd")


def build_engine(config: EngineConfig, checkpoint: Checkpoint | None = None) -> tuple[Engine, EngineConfig]:
    """Loads the model (`config.model`, unless a checkpoint is passed) and builds an engine that is ready for requests.

    In the returned config, options that were None or "auto" have the values that were chosen.
    """
    checkpoint = checkpoint or open_checkpoint(config.model)
    tokenizer = checkpoint.tokenizer()
    device = resolve_device(config.device)
    check_split(checkpoint.config, config.tensor_parallel_size)
    if device.type == "cuda":
        compiling.prepare()  # while weights are read
    draft = open_draft(config.speculation, checkpoint, tokenizer)
    if draft is not None:
        degree = config.speculation.draft_tensor_parallel_size
        check_split(draft.config, degree, "speculation draft_tensor_parallel_size")
    on_demand = config.speculation.placement == "auto"  # who names a process has it from the start
    speculation = placed(
        deepened(config.speculation, draft),
        device,
        head=isinstance(draft, FeatureCheckpoint),
        prepares=not isinstance(draft, BlockCheckpoint),
        ranks=local_size(config.tensor_parallel_size),
    )
    speculation = sized(speculation, draft, device)
    config = replace(config, device=str(device), speculation=speculation)
    apart, own_device = speculation.placement == "process", speculation.draft_device not in (None, str(device))
    here = draft if not apart or speculation.mode == "auto" else None
    copies = speculation.draft_replicas if apart and not own_device else 0
    drafts = [draft] * (copies + (here is not None)) if draft is not None else []
    check_fits(config, [checkpoint, *drafts], device)
    if own_device and draft is not None:
        check_draft_fits(config, draft)
    ranks = Ranks(_for_ranks(config), device) if config.tensor_parallel_size > 1 else None
    try:
        with torch.cuda.device(device) if device.index is not None else nullcontext():
            return _assemble(config, checkpoint, here, tokenizer, device, ranks, on_demand=on_demand)
    except BaseException:
        if ranks is not None:
            ranks.close()
        raise


def _for_ranks(config: EngineConfig) -> EngineConfig:
    """What the other ranks are told, as JSON: a drafter of the user's own is on the first one only."""
    if config.speculation.draft is None or isinstance(config.speculation.draft, str):
        return config
    return replace(config, speculation=replace(config.speculation, draft=SUFFIX))


def _assemble(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | FeatureCheckpoint | None,
    tokenizer: Tokenizer,
    device: torch.device,
    ranks: Ranks | None,
    *,
    on_demand: bool,
) -> tuple[Engine, EngineConfig]:
    """`draft`: that of this process. `on_demand`: see `make_drafter`."""
    try:
        place = ranks.place if ranks is not None else Place()
        runner, draft_runner, max_model_len = build_runners(config, checkpoint, draft, device, place)
        if ranks is not None:
            ranks.attach(runner)
        target = (RejectionTarget if config.speculation.acceptance == "rejection" else Target)(runner, runner.state)
        if device.type == "cuda":
            _warm_up(config, runner, max_model_len, target)
        if ranks is not None and ranks.failure is not None:
            raise EngineFailed(ranks.failure)
    except torch.OutOfMemoryError as error:
        kv = "gpu_memory_utilization" if config.num_kv_blocks is None else "num_kv_blocks"
        raise NotEnoughMemory(
            "the GPU's memory does not hold the models and their buffers: lower max_num_seqs, max_model_len or "
            f"{kv}, or free memory on the device ({error})"
        ) from error
    max_tokens = batched_tokens(config, device)
    pool = BlockPool(
        runner.num_blocks,
        runner.block_size,
        windows=[group.window for group in runner.decoder.kv_groups],
        most_new=MAX_IN_FLIGHT * max_tokens,
        prefix_caching=config.prefix_caching,
        recomputed=0 if runner.features is None else runner.features.recomputed,
    )
    scheduler = Scheduler(
        pool,
        max_num_seqs=config.max_num_seqs,
        max_num_batched_tokens=max_tokens,
        num_slots=num_slots(config),
    )
    longest = possible_length(config, checkpoint.config.max_position, max_model_len, device)
    config = replace(config, speculation=split_cores(config, runner, draft_runner))
    # A draft on another device chooses its own dtype and memory; sequences are as long as the target's.
    limited = replace(config, max_model_len=max_model_len)
    drafter = make_drafter(limited, draft_runner, runner, tokenizer, on_demand=on_demand)
    dtype = str(runner.decoder.dtype).removeprefix("torch.")
    config = replace(config, dtype=dtype, max_model_len=max_model_len, num_kv_blocks=runner.num_blocks)  # type: ignore[arg-type]
    config = replace(config, max_num_batched_tokens=scheduler.max_num_batched_tokens, block_size=runner.block_size)
    engine = Engine(
        Round(target, drafter),
        scheduler,
        max_model_len=max_model_len,
        longest=longest,
        stop_token_ids=frozenset(checkpoint.stop_token_ids),
        tokenizer=tokenizer if tokenizer.available else None,
    )
    _log_choices(config, [each for each in (runner, draft_runner) if each is not None])
    return engine, config


def _log_choices(config: EngineConfig, runners: Seq[ModelRunner]) -> None:
    """What was chosen for the options, in the words of the options."""
    tokens, speculation = runners[0].num_blocks * runners[0].block_size, config.speculation
    log.info(
        "KV: num_kv_blocks=%d of %d tokens in %s, %s; max_model_len=%d, max_num_seqs=%d, max_num_batched_tokens=%d",
        *(runners[0].num_blocks, runners[0].block_size, config.kv_dtype),
        gib(tokens * sum(runner.decoder.kv_bytes_per_token for runner in runners)),
        *(config.max_model_len, config.max_num_seqs, config.max_num_batched_tokens),
    )
    if any(group.window for group in runners[0].decoder.kv_groups):
        _log_groups(config, runners[0])
    if speculation.mode == "ar":
        log.info("drafter: none")
    else:
        form = f", draft_quantization={speculation.draft_quantization}" if speculation.draft_quantization else ""
        placement = f", placement={speculation.placement}" if speculation.placement != "auto" else ""
        for name in ("draft_device", "draft_replicas", "draft_tensor_parallel_size", "draft_threads"):
            placement += f", {name}={value}" if (value := getattr(speculation, name)) not in (None, 1) else ""
        log.info(
            "drafter: mode=%s, draft=%s, k=%s%s%s",
            *(speculation.mode, speculation.draft or speculation.draft_url, speculation.k, form, placement),
        )


def _log_groups(config: EngineConfig, runner: ModelRunner) -> None:
    """What the layers keep of a sequence, and the memory of a long one."""
    decoder, length = runner.decoder, config.max_model_len or 1
    kept = [f"{len(g.layers)} keep {f'the last {g.window}' if g.window else 'all'} tokens" for g in decoder.kv_groups]
    most = blocks_for(config, decoder.kv_groups, decoder.device)(length) * runner.block_size
    log.info(
        "KV groups of layers: %s; a sequence of %d tokens has %d bytes a token at most, with full attention %d",
        *(", ".join(kept), length, most * decoder.kv_bytes_per_token // length),
        decoder.config.kv_bytes_per_token(decoder.kv_dtype, decoder.tp.size),
    )


def build_runners(
    config: EngineConfig,
    checkpoint: Checkpoint,
    draft: Checkpoint | FeatureCheckpoint | None,
    device: torch.device,
    place: Place,
) -> tuple[ModelRunner, ModelRunner | None, int]:
    """Runners of target and draft with equal numbers of KV blocks, and the maximum length of a sequence."""
    model = checkpoint.config
    limit = config.max_model_len or model.max_position
    if limit > model.max_position:
        raise ConfigError(f"max_model_len={limit} is beyond the model's positions: use at most {model.max_position}")
    state = make_state(config, limit, model.vocab_size, device)
    rows = config.speculation.most_rows(config.max_num_seqs)
    models = [load_decoder(config, checkpoint, state, limit, rows, tp=place.tp, is_target=True)]
    models += [load_draft(config, draft, state, limit, models[0].decoder)] if draft is not None else []
    num_blocks = place.agree(kv_blocks(config, models, limit))
    limit = fitting_length(config, limit, num_blocks, models[0].blocks_for(config))
    runner = make_runner(config, models[0], state, num_blocks)
    if draft is None:
        return runner, None, limit
    head = models[1].decoder
    own = make_runner(config, models[1], state, num_blocks, runner.tables if isinstance(head, FeatureDraft) else None)
    if isinstance(head, FeatureDraft):
        runner.features = features_of(head, own.kv, state)
    return runner, own, limit


def run_follower(fd: int) -> None:
    """A rank of a model besides the first; returns when the socket `fd` to rank 0 is closed."""
    rank = Follower.at(fd)
    if rank.draft is not None:
        follow_draft(rank, rank.draft)
        return
    runner, _, limit = build_runners(rank.config, open_checkpoint(rank.config.model), None, rank.device, rank.place)
    if rank.device.type == "cuda":
        _warm_up(rank.config, runner, limit)
    rank.serve(runner)


def _warm_up(config: EngineConfig, runner: ModelRunner, max_model_len: int, target: Target | None = None) -> None:
    """All ranks run the same forward passes; rank 0 has the `target`, which decides."""
    max_tokens = min(batched_tokens(config, runner.decoder.device), max_model_len)
    rehearsals, captures = [lambda: runner.rehearse(max_tokens)], [runner.capture]
    if target is not None:
        rehearsals.append(target.rehearse)
        captures.append(target.capture)
    if not config.eager:
        runner.plan_graphs()
    warm_up("target", rehearsals, [] if config.eager else captures)
