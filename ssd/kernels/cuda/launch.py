"""Early launches (CUDA's programmatic dependent launch), and what a GPU has of shared memory and multiprocessors.

A kernel that is launched early may start while the kernel before it still runs, which hides the latency of the launch.
It calls `gdc_wait` before it uses results: the wait ends when the kernel before has finished. As that one has waited
for its own predecessor, everything before it has finished, too.

Before `gdc_wait` a kernel writes nothing, and reads only:

- weights and constant tables
- a routing that is `settled`
- what was written before the last kernel that was *not* launched early, since that one started after all earlier
  kernels had finished. The embedding is such a kernel, so the batch and its plan (`Ops.plan`) may be read.

It is not enough that another kernel was launched between: that one may have let this one start
(`gdc_launch_dependents`) before its own wait.

Which kernels are launched early, and what that gained or cost, is in docs/performance.md.
"""

from __future__ import annotations

import functools
from typing import Any

import torch


@functools.cache
def early_launch(device: torch.device, wanted: bool = True) -> dict[str, Any]:
    """Options of a Triton launch: EARLY is the kernel's own, `launch_pdl` Triton's. Early from sm_90 on."""
    can = wanted and device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)
    return {"EARLY": True, "launch_pdl": True} if can else {"EARLY": False}


@functools.cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program can have; the interpreter gets an H200's."""
    return shared_memory_of(torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0))


def shared_memory_of(capability: tuple[int, int]) -> int:
    """Likewise, by compute capability; (0, 0): the interpreter."""
    return {(0, 0): 227, (8, 0): 163, (9, 0): 227, (10, 0): 227}.get(capability, 99) << 10


@functools.cache
def processors(device: torch.device) -> int:
    """Multiprocessors of a GPU; the interpreter gets 4."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4
