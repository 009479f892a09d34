"""Where a draft is computed, with how many threads and in which format: what the speculation options leave open."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from ssd.assembly.device import rank_device, resolve_device
from ssd.assembly.memory import format_names, weight_bytes
from ssd.config import K_MAX, SpeculationConfig
from ssd.errors import ConfigError
from ssd.execution.threads import num_cores
from ssd.models.block import BlockCheckpoint
from ssd.models.checkpoint import Checkpoint
from ssd.models.feature_draft import FeatureCheckpoint

log = logging.getLogger("ssd")

_LARGE_DRAFT = 256 << 20  # bytes in bfloat16, of which a step of the draft reads all
_SMALL_DRAFT = 2 << 30  # bytes in bfloat16 up to which the kernel for a step of floats beats those of packed weights
_DRAFT_THREADS = 4  # of a small draft on the CPU beside a target on a GPU: small products gain nothing from more


def placed(
    speculation: SpeculationConfig,
    device: torch.device,
    *,
    head: bool = False,
    prepares: bool = True,
    ranks: int = 1,
) -> SpeculationConfig:
    """Resolves `placement` and `draft_device`.

    `placement="auto"` is a process if the draft has a GPU of its own or a core of a CPU, and writes chains, else a
    stream on a GPU, else inline. With mode="auto" it stays "auto" where nothing can run at the same time, and SSD is
    not among the modes. `head`: the draft is a head, which is where the target is. `prepares`: SSD is among the draft's
    modes, as far as it depends on the draft. `ranks`: of the target.
    """
    prepares = prepares and not speculation.suffix
    if speculation.draft_url is not None or speculation.mode not in ("ssd", "auto"):
        return speculation
    if speculation.draft_model is None or not prepares:
        return speculation
    placement, wanted, tree = speculation.placement, speculation.draft_device, speculation.tree
    if tree is not None and head:
        raise ConfigError(
            f'speculation tree={tree}, mode="ssd": a head has hidden states at a few nodes of a tree only, so nothing '
            'can be prepared behind the others; use mode="sd", or leave tree out'
        )
    if placement == "auto" and wanted is not None:
        placement = "process"
    elif placement == "auto":
        own = torch.cuda.device_count() > (device.index or 0) + ranks if device.type == "cuda" else num_cores() > 1
        apart = own and not head and tree is None
        placement = "process" if apart else "stream" if device.type == "cuda" else "inline"
        if placement == "inline" and speculation.mode == "auto":
            return speculation
    if placement == "process" and head:
        raise ConfigError(
            'speculation placement="process": a head reads the hidden states of the target, in its process; use '
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


def deepened(speculation: SpeculationConfig, draft: Checkpoint | FeatureCheckpoint | None) -> SpeculationConfig:
    """Resolves `k` and `k_max`: a block draft writes all its tokens in one pass."""
    whole = draft.config.most_drafted if isinstance(draft, BlockCheckpoint) else None
    if speculation.k == "auto":
        return replace(speculation, k_max=speculation.k_max or whole or K_MAX)
    if speculation.mode == "ar":
        return speculation
    most = whole or speculation.lookahead
    return replace(speculation, k=speculation.k or min(most, speculation.nodes or most))


def sized(
    speculation: SpeculationConfig, draft: Checkpoint | FeatureCheckpoint | None, device: torch.device
) -> SpeculationConfig:
    """Resolves `draft_quantization` and, for a draft on the CPU beside a target on a GPU, `draft_threads`.

    A step of a large draft takes as long as reading it. It is rounded where the target reads the same memory, and to
    fewer bits where memory is slower: on a CPU, of which it has all cores but two. A step of a small one on a GPU takes
    as long as its kernels are many, and there is one for a whole step of floats.
    """
    on_cpu = device.type == "cuda" and speculation.draft_device == "cpu"
    size = 0
    if draft is not None and not isinstance(draft, FeatureCheckpoint):
        size = weight_bytes(draft.config, torch.bfloat16)
    large = size >= _LARGE_DRAFT
    if on_cpu and speculation.draft_threads is None:
        ranks = speculation.draft_ranks
        threads = (num_cores() - 2) // ranks if large else min(_DRAFT_THREADS, num_cores() // (2 * ranks))
        speculation = replace(speculation, draft_threads=max(1, threads))
    if speculation.draft_quantization is not None:
        return speculation
    if draft is None or not size:
        return speculation
    if format_names(draft.config, draft.formats):
        if device.type != "cuda" or on_cpu or size > _SMALL_DRAFT:
            return speculation
        log.info("%s: a small draft on a GPU, whose quantised weights become floats", draft.path.name)
        return replace(speculation, draft_quantization="dequantized")
    if not large or not (on_cpu or speculation.placement == "stream"):
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
