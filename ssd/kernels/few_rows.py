"""Products of few rows with a quantised weight as a CUDA kernel (`few_rows.cu`), near the speed of reading the weight.

It is for weights of 8 bits with one scale an output, and has the bits of `quantized_linear`, which does all the rest.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

import torch

from ssd.kernels.compiling import compiling
from ssd.kernels.driver import DriverError
from ssd.kernels.launching import processors
from ssd.kernels.nvrtc import BuildError, Kernel, compiled
from ssd.kernels.packing import PackedCodes

log = logging.getLogger("ssd")
SOURCE: Final = Path(__file__).with_name("few_rows.cu")
MAX_ROWS: Final = 32
_TILES: Final = (1, 2, 4)  # of 8 rows, each a kernel of its own
_MAX_SHARE: Final = 7  # strips of a block of threads, which has a warp more: registers are for multiples of 4 warps
_MAX_STAGES: Final = 12
_SHARED: Final = 226 << 10  # bytes of a multiprocessor's shared memory that blocks of threads can have
_RESERVED: Final = 1024  # bytes that the system takes of a block's
_BARRIERS: Final = 256  # bytes
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("x", "words", "scales", "row_scales", "bias", "y")),
        *((name, ctypes.c_longlong) for name in ("x_stride", "y_stride")),
        *((name, ctypes.c_int) for name in ("rows", "columns", "strips", "blocks", "share", "stages")),
        *((name, ctypes.c_int) for name in ("gated", "float32")),
    ]


def takes(x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None) -> bool:
    """Whether `linear` is for this product."""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or not 0 < len(x) <= MAX_ROWS:
        return False
    fits = weight.strips and weight.depth == weight.width * weight.parts
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    same = bias is None or bias.dtype is x.dtype
    return fits and aligned and same and _kernels(x.device, weight.type, weight.block) is not None


def macros_of(kind: str, block: int, tiles: int) -> dict[str, int]:
    return {"FORMAT": int(kind == "int8"), "WORDS": block, "TILES": tiles, "MAX_SHARE": _MAX_SHARE}


@functools.cache
def _kernels(device: torch.device, kind: str, block: int) -> dict[int, Kernel] | None:
    """Kernels by tiles; None where they cannot be built."""
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None
    try:
        with ThreadPoolExecutor() as pool:  # NVRTC uses one core each
            cubins = list(pool.map(lambda tiles: compiled(SOURCE, macros_of(kind, block, tiles), device), _TILES))
        kernels = {tiles: Kernel(cubin, "product", device) for tiles, cubin in zip(_TILES, cubins, strict=True)}
        for kernel in kernels.values():
            kernel.allow_shared(_SHARED)
    except (BuildError, DriverError, OSError) as error:
        log.warning("quantised weights are multiplied by slower kernels: %s", error)
        return None
    return kernels


def share_of(strips: int, processors: int) -> int:
    """Strips of a block of threads, such that the busiest multiprocessor has as few as possible."""

    def busiest(share: int) -> int:
        blocks = -(-strips // share)
        return -(-blocks // processors) * share

    return min(range(_MAX_SHARE, 0, -1), key=busiest)


def stage_bytes(weight: PackedCodes, share: int, tiles: int) -> int:
    """`stage_bytes` of the source."""
    return share * 64 * weight.block + tiles * 8 * (2 * weight.block * weight.parts + 16)


def linear(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    out_dtype: torch.dtype,
    row_scales: torch.Tensor | None,
) -> torch.Tensor:
    """See `quantized_linear`; `takes` is true."""
    rows, columns = len(x), weight.columns
    y = x.new_empty((rows, columns // 2 if gated else columns), dtype=out_dtype)
    kernels = _kernels(x.device, weight.type, weight.block)
    if kernels is None:
        raise AssertionError("takes() comes before linear()")
    if compiling():
        return y
    tiles = next(each for each in _TILES if 8 * each >= rows)
    strips, count = len(weight.words), processors(x.device)
    share = share_of(strips, count)
    blocks, size = -(-strips // share), stage_bytes(weight, share, tiles)
    memory = _SHARED // (2 if blocks > count else 1) - _RESERVED - _BARRIERS
    stages = max(2, min(_MAX_STAGES, memory // size))
    pointers = {"x": x, "words": weight.words, "scales": weight.scales, "row_scales": row_scales, "bias": bias, "y": y}
    params = Params(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()},
        **{"x_stride": x.stride(0), "y_stride": y.stride(0), "rows": rows, "columns": columns, "strips": strips},
        **{"blocks": weight.width // weight.block, "share": share, "stages": stages},
        **{"gated": gated, "float32": out_dtype is torch.float32},
    )
    kernels[tiles].launch(blocks, 32 * (share + 1), _BARRIERS + stages * size, params, "early")
    return y
