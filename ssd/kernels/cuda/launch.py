"""What a launch may ask of a GPU: its shared memory, its multiprocessors, and an early launch.

Early launches: a kernel that begins while the one before it still runs, which hides what a launch costs.

(CUDA: programmatic dependent launch.) Every program of it calls `gdc_wait`: then all kernels before it have ended, as
each of them has waited, too. Before that it writes nothing, and reads only:

- weights and tables
- a routing that is `settled`
- what was written before the last kernel that was not launched early, which began when all before it had ended: the
  batch and its plan (`Ops.plan`), as the embedding comes after them

What was written just before the kernel before is not enough: that may have let this one begin before it waited itself.

Measured on an H200 for an 8B, one row and 16: 2 % of a round for the norms, another 1 % for the gate/up products, and
1 % where a norm lets the product after it begin at once (`gdc_launch_dependents`); nothing for rotary embedding and
attention (1 % of a step of GPT-OSS-20B); a loss where weights were loaded before the wait, or where attention lets the
product after it begin at once, unless that one copies its weight ahead (`few_rows`).
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def early_launch(device: torch.device, wanted: bool = True) -> dict[str, Any]:
    """The option of a kernel that can be launched early, and that of its launch."""
    can = wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; the interpreter gets an H200's."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else (9, 0)
    return {(8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) << 10


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter gets 4."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
