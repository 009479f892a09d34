"""Drafters in processes of their own: how the engine starts them, and what is built inside."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch

from ssd.assembly.cores import times_passes
from ssd.assembly.device import make_current, rank_device, resolve_device
from ssd.assembly.draft_models import load_draft
from ssd.assembly.draft_runners import make_draft_model, make_fan_out, ssd_drafter
from ssd.assembly.memory import kv_blocks
from ssd.assembly.models import make_runner, make_state
from ssd.assembly.open import absolute_path, open_checkpoint
from ssd.assembly.ranks import Follower, Place, Ranks
from ssd.config import MOST_BRANCHES, EngineConfig
from ssd.drafting.late import LateBindingDrafter
from ssd.drafting.process import ProcessDrafter
from ssd.drafting.remote import DraftServers
from ssd.drafting.wire import Hello
from ssd.drafting.worker import WorkerDrafter
from ssd.errors import ConfigError
from ssd.execution.runner import ModelRunner
from ssd.execution.state import SequenceState
from ssd.kernels.cpu.threads import set_threads
from ssd.kernels.device import kernels
from ssd.options import build
from ssd.parallel.address import Address
from ssd.parallel.process import Worker
from ssd.text.tokenizer import Tokenizer

log = logging.getLogger("ssd")
_WORKER_START_SECONDS = 120.0
_SERVER = "the draft server"
_SERVER_SECONDS = 10.0  # for the connection to a draft server


def start_workers(config: EngineConfig, state: SequenceState) -> ProcessDrafter:
    """A drafter in workers, one for each replica, on `draft_device` and the GPUs after it. `state`: the target's.

    What `config` leaves open (dtype, KV blocks, batch size) a worker chooses for its own device. Where it is not known
    yet that a mode which needs them can pay, they are launched when it is first tried.
    """
    draft = absolute_path(str(config.speculation.draft))  # for a worker that is started again from another directory
    in_flight = kernels(state.device).draft_table is not None and config.speculation.acceptance == "coupled"
    backup = "jit" if in_flight else config.speculation.backup  # in flight it is chosen here, not by the worker
    speculation = config.speculation
    on_demand = times_passes(config)
    if in_flight and speculation.budget == "auto":  # as many as are prepared in time
        speculation = replace(speculation, budget=MOST_BRANCHES)
    config = replace(config, speculation=replace(speculation, mode="ssd", draft=draft, backup=backup))
    first = torch.device(str(speculation.draft_device))

    def start(replica: int) -> Worker:
        device = rank_device(first, replica * speculation.draft_tensor_parallel_size)
        setup = {"config": asdict(replace(config, device=str(device))), "vocab_size": state.vocab_size}
        return Worker(setup | {"replica": replica, "in_flight": in_flight})

    starts = [functools.partial(start, replica) for replica in range(speculation.draft_replicas)]
    drafter: ProcessDrafter
    k, budget = speculation.lookahead, max(speculation.budgets)
    if in_flight:
        drafter = LateBindingDrafter(starts, k, state, budget=budget, backup=speculation.backup)
    else:
        cores = speculation.draft_cores if first.type == state.device.type == "cpu" else 0
        drafter = ProcessDrafter(starts, k, state.vocab_size, budget=budget, cores=cores, on_demand=on_demand)
    return drafter if on_demand else await_workers(drafter)


def connect_draft_server(config: EngineConfig, state: SequenceState, tokenizer: Tokenizer) -> ProcessDrafter:
    """A drafter in a draft server. `config`: with the target's `max_model_len`; `state`: the target's.

    Refused by every server that answers: ConfigError. Without an answer decoding begins without drafts.
    """
    speculation = config.speculation
    in_flight = kernels(state.device).draft_table is not None
    k, budget = speculation.lookahead, max(speculation.budgets)
    vocabulary, rules = tokenizer.hashes
    hello = Hello(
        token=speculation.draft_token or "",
        vocabulary=vocabulary,
        tokenizer=rules,
        vocab_size=state.vocab_size,
        k=k,
        budget=budget,
        max_sequences=config.max_num_seqs,
        max_len=config.max_model_len or state.token_ids.shape[1],
        backup="jit" if in_flight else speculation.backup,  # in flight it is chosen here
    )
    servers = DraftServers([Address.of(each) for each in str(speculation.draft_url).split(",")], hello)
    drafter: ProcessDrafter
    if in_flight:
        drafter = LateBindingDrafter([servers], k, state, budget=budget, backup=speculation.backup, name=_SERVER)
    else:
        drafter = ProcessDrafter([servers], k, state.vocab_size, budget=budget, name=_SERVER)
    servers.wait(_SERVER_SECONDS)
    drafter.cores = servers.cores
    if servers.refused:
        drafter.close()
        raise ConfigError(f"speculation draft_url: {'; '.join(servers.refused)}")
    if not drafter.wait_ready(_SERVER_SECONDS):
        log.warning("no draft server is ready: decoding begins without drafts")
    return drafter


def await_workers(drafter: ProcessDrafter) -> ProcessDrafter:
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
    model = make_draft_model(config, runner, fan_out, recorded=bool(setup["in_flight"]))
    drafter = ssd_drafter(model, config.speculation, fan_out)
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
