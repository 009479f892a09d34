"""Splits the multiprocessors of a GPU into two disjoint parts, each with a stream of its own.

Kernels that are launched on a part's stream run on its multiprocessors only (green contexts of the CUDA driver), so
what runs in one part never waits for a multiprocessor of the other. Memory and its bandwidth are shared. A CUDA graph
keeps the part that it was captured in, on whatever stream it is replayed.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Final

import torch

from ssd.kernels.cuda.driver import DriverError, call
from ssd.kernels.cuda.launch import processors

_P = ctypes.c_void_p
# cuda.h
_RESOURCE_SM: Final = 1
_DEFAULT_STREAM: Final = 1
_NON_BLOCKING: Final = 1


class _Resource(ctypes.Structure):
    """CUdevResource, and some bytes more than any version of it has."""

    _fields_ = [
        ("type", ctypes.c_int),
        ("internal", ctypes.c_char * 92),
        ("processors", ctypes.c_uint),
        ("rest", ctypes.c_char * 156),
    ]


@dataclass(frozen=True)
class Part:
    """Some multiprocessors."""

    processors: int
    stream: torch.cuda.Stream


@dataclass(frozen=True)
class Partition:
    """Two disjoint parts of a GPU. They exist until the process ends."""

    small: Part
    large: Part


_PARTS: Final[dict[int, int]] = {}  # multiprocessors by stream


def current_processors(device: torch.device) -> int:
    """Multiprocessors that kernels on the current stream run on."""
    return _PARTS.get(torch.cuda.current_stream(device).cuda_stream) or processors(device)


@functools.cache
def split(device: torch.device, small_part: int) -> Partition:
    """A small part of that many multiprocessors, rounded up to what the GPU can split (8 on Hopper), and the others.

    DriverError where the driver cannot split the GPU. The small part's stream has the higher priority.
    """
    with torch.cuda.device(device):
        torch.cuda.synchronize()  # there is a context
        handle, whole, small, large = ctypes.c_int(), _Resource(), _Resource(), _Resource()
        call("cuDeviceGet", ctypes.byref(handle), torch.cuda.current_device())
        call("cuDeviceGetDevResource", handle, ctypes.byref(whole), _RESOURCE_SM)
        groups = ctypes.c_uint(1)
        call(
            "cuDevSmResourceSplitByCount",
            *(ctypes.byref(small), ctypes.byref(groups), ctypes.byref(whole), ctypes.byref(large), 0, small_part),
        )
        if groups.value != 1 or not large.processors:
            raise DriverError(f"{small_part} of {whole.processors} multiprocessors cannot be split off")
        return Partition(_part(small, handle, -1), _part(large, handle, 0))


def _part(resource: _Resource, device: ctypes.c_int, priority: int) -> Part:
    description, context, stream = _P(), _P(), _P()
    call("cuDevResourceGenerateDesc", ctypes.byref(description), ctypes.byref(resource), 1)
    call("cuGreenCtxCreate", ctypes.byref(context), description, device, _DEFAULT_STREAM)
    call("cuGreenCtxStreamCreate", ctypes.byref(stream), context, _NON_BLOCKING, priority)
    part = Part(resource.processors, torch.cuda.ExternalStream(stream.value))  # type: ignore[no-untyped-call]
    _PARTS[part.stream.cuda_stream] = part.processors
    return part
