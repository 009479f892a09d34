"""Builds the drafter that the speculation options describe."""

from __future__ import annotations

from collections.abc import Callable

from ssd.assembly.cores import least_seconds
from ssd.assembly.draft_runners import make_draft_model, make_fan_out, make_feature_model, ssd_drafter
from ssd.assembly.draft_workers import await_workers, connect_draft_server, start_workers
from ssd.assembly.placement import prepares_here
from ssd.config import EngineConfig, SpeculationConfig
from ssd.decoding.drafter import Drafter
from ssd.drafting.arms import Arm, depths_up_to, make_arms
from ssd.drafting.controller import DepthController
from ssd.drafting.custom import CustomDrafter
from ssd.drafting.late import LateBindingDrafter
from ssd.drafting.model import DraftSource, ModelDrafter
from ssd.drafting.suffix import SuffixDrafter
from ssd.drafting.table import DraftAnswers
from ssd.errors import ConfigError
from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.kernels.device import kernels
from ssd.text.tokenizer import Tokenizer


def make_drafter(
    config: EngineConfig, runner: ModelRunner | None, target: ModelRunner, tokenizer: Tokenizer, *, on_demand: bool
) -> Drafter:
    """`config`: the user's, with the target's `max_model_len`. `runner`: that of a draft in this process. `tokenizer`:
    of the target.

    `on_demand`: processes of a mode that may not pay are started when it is first tried.
    """
    speculation = config.speculation
    model: DraftSource | None = None
    if runner is not None and target.features is not None:
        model = make_feature_model(config, runner, target.features)
    elif runner is not None:
        model = make_draft_model(config, runner, make_fan_out(speculation), target)
    workers = start_workers(config, target.state) if speculation.placement == "process" else None
    if speculation.draft_url is not None:
        workers = connect_draft_server(config, target.state, tokenizer)
    least = least_seconds(config, target, runner)
    drafter = drafter_of(model, speculation, target.state, workers, least)
    first = drafter.arm.mode if isinstance(drafter, DepthController) else speculation.mode
    if least is not None and workers is not None and (first == "ssd" or not on_demand):
        await_workers(workers)
    return drafter


def drafter_of(
    model: DraftSource | None,
    speculation: SpeculationConfig,
    state: SequenceState,
    workers: Drafter | None = None,
    least: Callable[[Arm], float] | None = None,
) -> Drafter:
    """The drafter of these options; `workers`: the one in processes of its own, `least`: see `least_seconds`.

    A DepthController chooses where `mode`, `k`, `tree` or `budget` is "auto".
    """
    if speculation.mode == "ar":
        return Drafter()
    drafters: dict[str, Drafter] = {}
    if workers is None and model is not None and prepares_here(speculation):
        drafters["sd"] = drafters["ssd"] = ssd_drafter(model, speculation, make_fan_out(speculation))
    else:
        if speculation.mode != "ssd":
            drafters["sd"] = _sd_drafter(model, speculation, state)
        if speculation.suffix and speculation.mode == "auto":
            drafters["suffix"] = drafters["sd"]
        if workers is not None:
            drafters["ssd"] = workers
    if speculation.tree == "auto":
        drafters["tree"] = drafters["sd"]
    if "auto" not in (speculation.mode, speculation.k, speculation.tree, speculation.budget):
        return drafters[speculation.mode]
    depths = depths_up_to(speculation.lookahead) if speculation.k == "auto" else (speculation.lookahead,)
    with_plain = "auto" in (speculation.mode, speculation.k, speculation.tree)
    modes = ("ar", *drafters) if with_plain else (speculation.mode,)
    widths = (workers.budget,) if isinstance(workers, LateBindingDrafter) else speculation.budgets
    arms = make_arms(modes, depths, widths, speculation.nodes)
    return DepthController(drafters, arms, {arm: least(arm) for arm in arms} if least is not None else None)


def _sd_drafter(model: DraftSource | None, speculation: SpeculationConfig, state: SequenceState) -> Drafter:
    draft, k = speculation.draft, speculation.lookahead
    if draft is not None and not isinstance(draft, str):
        if isinstance(draft, Drafter):
            return draft
        if speculation.tree is not None:
            raise ConfigError(
                f"speculation tree={speculation.tree}: a drafter of your own proposes chains; leave it out"
            )
        return CustomDrafter(draft, k)
    levels = k if speculation.nodes else 0
    learned = ModelDrafter(model, speculation.nodes or k, levels) if model is not None else None
    if learned is not None and not speculation.suffix:
        return learned
    in_flight = kernels(state.device).draft_table is not None and speculation.acceptance == "coupled"
    answers, cached = DraftAnswers(state) if in_flight else None, speculation.suffix_cache_tokens
    return SuffixDrafter(speculation.draft_tokens, learned=learned, cached_tokens=cached, answers=answers)
