"""Attention of few queries over a KV cache in fp8 as a CUDA kernel (`fp8_attention.cu`), near the speed of reading KV.

It has the bits of `attention._decode_kernel`, which does what this one does not: heads of other sizes, windows, sinks,
branches.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final

import torch

from ssd.kernels.cuda.launch import processors
from ssd.kernels.cuda.nvrtc import Kernel, kernels, tensor_map
from ssd.kernels.cuda.partition import current_processors
from ssd.kernels.ops import DeviceBatch, HeadShape
from ssd.kernels.triton.compile import compiling

SOURCE: Final = Path(__file__).parent / "csrc" / "fp8_attention.cu"
HEAD_DIM: Final = 128
STEP: Final = 64  # positions
WARPS: Final = 8  # of a block of threads
UNITS: Final = 2  # of 8 KiB in the ring of a warp
_SHARED: Final = 1024 + WARPS * UNITS * STEP * HEAD_DIM  # bytes
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("q", "out", "partial", "stats", "count", "items", "tables")),
        ("table_stride", ctypes.c_longlong),
        *((name, ctypes.c_float) for name in ("scale", "v_scale")),
        *((name, ctypes.c_int) for name in ("num_items", "kv_heads", "block_size")),
    ]


def takes(heads: HeadShape, dtype: torch.dtype, k_cache: torch.Tensor, plain: bool) -> bool:
    """Whether `attend` is for these heads. plain: there are neither sinks nor branches."""
    if not k_cache.is_cuda or torch.cuda.get_device_capability(k_cache.device) != (9, 0):
        return False
    fits = heads.head_dim == HEAD_DIM and heads.group_size <= 16 and k_cache.shape[1] % STEP == 0
    whole = plain and not heads.window and not heads.first_position
    return fits and whole and dtype is torch.bfloat16 and _kernel(k_cache.device, heads.group_size) is not None


def programs(heads: HeadShape, device: torch.device) -> int:
    """Warps for each KV head, for which pieces are shared out."""
    return max(1, WARPS * processors(device) // heads.num_kv_heads)


def macros_of(group: int) -> dict[str, int]:
    return {"GROUP": group, "WARPS": WARPS, "UNITS": UNITS, "AT_ONCE": 11}


@functools.cache
def _kernel(device: torch.device, group: int) -> Kernel | None:
    """None where it cannot be built."""
    made = kernels(SOURCE, [macros_of(group)], "attend", device, _SHARED, "KV in fp8 is read by a slower kernel")
    return made[0] if made else None


def attend(
    q: torch.Tensor,
    out: torch.Tensor,
    batch: DeviceBatch,
    heads: HeadShape,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    items: torch.Tensor,
    workspace: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    scale: float,
    v_scale: float,
) -> None:
    """Writes `out` for the decode-size tiles of a batch. items: see `attention._plan_kernel`; workspace: partial
    results, their statistics, counters; scale: of products, to the base 2."""
    kernel = _kernel(q.device, heads.group_size)
    if compiling() or kernel is None:
        return
    pointers = (q, out, *workspace, items, batch.block_tables)
    block_size, kv_heads = k_cache.shape[1], heads.num_kv_heads
    params = Params(
        *(tensor.data_ptr() for tensor in pointers),
        *(batch.block_tables.stride(0), scale, v_scale, len(items), kv_heads, block_size),
    )
    width = kv_heads * HEAD_DIM
    maps = [  # pairs of numbers as one of 16 bits
        tensor_map(cache.data_ptr(), cache.shape[0] * block_size, width // 2, width, (1, STEP))
        for cache in (k_cache, v_cache)
    ]
    blocks = min(current_processors(q.device), -(-len(items) * kv_heads // WARPS))
    kernel.launch(blocks, 32 * WARPS, _SHARED, "early", *maps, params)
