"""Builds what runs a draft model or head, compiles its kernels and captures its graphs."""

from __future__ import annotations

from typing import Any

from ssd.assembly.device import batched_tokens
from ssd.assembly.draft_models import run_shapes
from ssd.assembly.sharing import share_gpu
from ssd.assembly.warm_up import warm_up
from ssd.config import EngineConfig, SpeculationConfig
from ssd.drafting.block import BlockModel, BlockRunner
from ssd.drafting.fan_out import Adaptive, FanOut, Geometric, Listed, Share
from ssd.drafting.forest import ForestRunner
from ssd.drafting.head import HeadModel, HeadRunner
from ssd.drafting.model import DraftModel, DraftSource
from ssd.drafting.runner import DraftRunner
from ssd.drafting.ssd import SSDDrafter
from ssd.execution.features import Features, HeadFeatures
from ssd.execution.graphs import row_buckets
from ssd.execution.runner import ModelRunner
from ssd.options import is_int


def make_draft_model(
    config: EngineConfig,
    runner: ModelRunner,
    fan_out: FanOut,
    target: ModelRunner | None = None,
    *,
    recorded: bool = False,
) -> DraftModel:
    """`target`: that of the same process. `recorded`: on a CPU, no round may wait for a recording."""
    shared = config.speculation.placement == "stream"
    shapes = run_shapes(config, runner.decoder.device)
    draft = (ForestRunner if shapes.nodes else DraftRunner)(runner, shapes, shared=shared, **_options(config))
    if draft.on_cuda:
        _warm_up(config, draft, fan_out, target)
    elif recorded:
        draft.record(fan_out)
    return DraftModel(
        draft,
        max_len=runner.decoder.config.max_position,
        max_num_batched_tokens=batched_tokens(config, runner.decoder.device),
        prefix_caching=config.prefix_caching,
    )


def make_feature_model(config: EngineConfig, runner: ModelRunner, features: Features) -> DraftSource:
    """Of a draft on the target's features."""
    shapes = run_shapes(config, runner.decoder.device)
    made: HeadModel | BlockModel
    if isinstance(features, HeadFeatures):
        made = HeadModel(HeadRunner(runner, features, shapes, **_options(config)))
    else:
        made = BlockModel(BlockRunner(runner, shapes, graphs=not config.eager))
    draft = made.runner
    if draft.on_cuda:
        usual = row_buckets(config.max_num_seqs), make_fan_out(config.speculation)
        warm_up("head", [lambda: draft.rehearse(*usual)], [] if config.eager else [lambda: draft.capture(*usual)])
    return made


def _options(config: EngineConfig) -> dict[str, Any]:
    """Those of a DraftRunner."""
    rejection, c = config.speculation.acceptance == "rejection", config.speculation.saguaro_c
    return {"rejection": rejection, "saguaro_c": c, "graphs": not config.eager}


def _warm_up(config: EngineConfig, draft: DraftRunner, fan_out: FanOut, target: ModelRunner | None) -> None:
    runner, usual = draft.model_runner, (row_buckets(config.max_num_seqs), fan_out)
    max_tokens = min(batched_tokens(config, draft.device), runner.decoder.config.max_position)
    if not config.eager:
        runner.plan_graphs(prefill_only=True)
    rehearsals = [lambda: runner.rehearse(max_tokens), lambda: draft.rehearse(*usual)]
    captures = [draft.use_one_kernel]
    if not config.eager:
        captures.append(runner.capture)
        if target is not None and config.speculation.placement == "stream":
            captures.append(lambda: share_gpu(target, draft, fan_out))
        captures.append(lambda: draft.capture(*usual))
    warm_up("draft", rehearsals, captures)


def ssd_drafter(model: DraftSource, speculation: SpeculationConfig, fan_out: FanOut) -> SSDDrafter:
    return SSDDrafter(
        model,
        fan_out,
        lookahead=speculation.nodes or speculation.lookahead,
        budget=max(speculation.budgets),
        backup=speculation.backup,
        overlap=speculation.placement == "stream",
        levels=speculation.lookahead if speculation.nodes else 0,
    )


def make_fan_out(speculation: SpeculationConfig, replica: int = 0) -> FanOut:
    share = Share(replica, speculation.draft_replicas)
    if speculation.fan_out_hit is not None and speculation.fan_out_miss is not None:
        return Listed(tuple(speculation.fan_out_hit), tuple(speculation.fan_out_miss), share)
    if is_int(speculation.fan_out):
        each = (int(speculation.fan_out),) * (speculation.lookahead + 1)
        return Listed(each, each, share)
    return Geometric(share) if speculation.fan_out == "geometric" else Adaptive(share)
