"""Products of few rows with a quantised weight as a CUDA kernel (`few_rows.cu`), near the speed of reading the weight.

It is for weights in strips (`packing`), and has the bits of `codes_linear`, which does all the rest.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ssd.kernels.cuda.nvrtc import Kernel, kernels, tensor_map
from ssd.kernels.cuda.partition import current_processors
from ssd.kernels.triton.compile import compiling
from ssd.kernels.triton.packing import PackedCodes

SOURCE: Final = Path(__file__).parent / "csrc" / "few_rows.cu"
_LAUNCHES: Final = 2  # of a product at most; each reads the whole weight, and two are still faster than Triton's kernel
_MAX_SHARE: Final = 8  # strips of a block of threads
_MAX_STAGES: Final = 12
_AHEAD: Final = 4  # blocks of the depth that are widened ahead, by warps of their own
_AHEAD_TILES: Final = (1, 2)  # of rows, for which there is such a kernel
_AHEAD_SHARE: Final = 3  # strips of a multiprocessor up to which it is the faster one
_AHEAD_DEPTH: Final = 4096  # of shorter rows: one strip
SHARED: Final = 227 << 10  # bytes of shared memory that a block of threads can have
RING_AT: Final = 1024  # bytes
_FORMATS: Final = {"fp8": 0, "int8": 1}
TILES: Final = (1, 2, 4, 8)  # of 8 rows, each number a kernel of its own
_MOST_ROWS: Final = 8 * TILES[-1]  # of one launch
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("words", "scales", "row_scales", "bias", "y")),
        ("y_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "columns", "strips", "blocks", "share", "stages")),
        *((name, ctypes.c_int) for name in ("gated", "float32")),
    ]


def takes(x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None, row_scales: torch.Tensor | None) -> bool:
    """Whether `linear` is for this product."""
    if (
        weight.type not in _FORMATS
        or weight.numbers is not None
        or weight.parts_of_group
        or not x.is_cuda
        or x.dtype is not torch.bfloat16
        or not 0 < len(x) <= _LAUNCHES * _MOST_ROWS
    ):
        return False
    fits = weight.strips and weight.depth == weight.width * weight.parts
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    same = bias is None or bias.dtype is x.dtype
    return fits and aligned and same and _kernels(x.device, weight.type, weight.block) != {}


def macros_of(kind: str, block: int, tiles: int, ahead: int) -> dict[str, int]:
    return {"FORMAT": _FORMATS[kind], "WORDS": block, "TILES": tiles, "AHEAD": ahead}


@functools.cache
def _kernels(device: torch.device, kind: str, block: int) -> dict[tuple[int, int], Kernel]:
    """Kernels by tiles and blocks that are widened ahead; none where they cannot be built."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return {}
    each = [(tiles, 0) for tiles in TILES] + [(tiles, _AHEAD) for tiles in _AHEAD_TILES]
    macros = [macros_of(kind, block, *one) for one in each]
    slower = "quantised weights are multiplied by slower kernels"
    return dict(zip(each, kernels(SOURCE, macros, "product", device, SHARED, slower), strict=False))


def share_of(units: int, processors: int, most: int) -> int:
    """Units of outputs that a block of threads takes at a time, at most `most`: the number with which the busiest
    multiprocessor copies the least. Each time it also copies the rows, about as many bytes as a unit has."""

    def busiest(share: int) -> int:
        return -(-units // (share * processors)) * (share + 1)

    return min(range(most, 0, -1), key=busiest)


def stage_bytes(weight: PackedCodes, share: int, tiles: int) -> int:
    """`stage_bytes` of the source."""
    return tiles * 16 * weight.block * weight.parts + share * 64 * weight.block


def ahead_of(weight: PackedCodes, tiles: int, processors: int) -> int:
    """Blocks of the depth that are widened ahead. A narrow weight has one or the other kernel by the number of rows:
    their bits are equal."""
    most = _AHEAD_SHARE if weight.depth >= _AHEAD_DEPTH else 1
    narrow = weight.words.shape[1] <= most * processors
    return _AHEAD if narrow and tiles in _AHEAD_TILES else 0


@dataclass(frozen=True)
class Launch:
    """How a block of threads multiplies `share` strips of outputs with 8 `tiles` rows."""

    share: int
    tiles: int
    ahead: int  # blocks of the depth that are widened ahead, by warps of their own; 0: consumers widen
    stages: int
    threads: int
    shared: int  # bytes

    @classmethod
    def of(cls, weight: PackedCodes, share: int, tiles: int, ahead: int, most: int = _MAX_STAGES) -> Launch:
        """With up to `most` stages."""
        size, wide = stage_bytes(weight, share, tiles), 0
        if ahead:  # widened strips, and what the tensor cores read behind the last one
            wide = ahead * share * 32 * weight.block * weight.parts + (4 - share) * 2048
        stages = min(most, (SHARED - RING_AT - wide) // size)
        warps = -(-share // 4) * 4 + ahead * share + 1
        return cls(share, tiles, ahead, stages, 32 * warps, RING_AT + stages * size + wide)


def linear(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    out_dtype: torch.dtype,
    row_scales: torch.Tensor | None,
) -> torch.Tensor:
    """See `codes_linear`; `takes` is true."""
    columns = weight.columns // 2 if gated else weight.columns
    y = x.new_empty((len(x), columns), dtype=out_dtype)
    if compiling():
        return y
    for start in range(0, len(x), _MOST_ROWS):
        some = slice(start, start + _MOST_ROWS)
        _launch(x[some], weight, bias, None if row_scales is None else row_scales[some], y[some], gated)
    return y


def _launch(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    y: torch.Tensor,
    gated: bool,
) -> None:
    (rows, depth), strips = x.shape, weight.words.shape[1]
    tiles = next(each for each in TILES if 8 * each >= rows)
    count = current_processors(x.device)
    share = share_of(strips, count, _MAX_SHARE)
    launch = Launch.of(weight, share, tiles, ahead_of(weight, tiles, count))
    box = (weight.block * weight.parts // 64, 8 * tiles)
    rows_of_x = tensor_map(x.data_ptr(), rows, depth, 2 * x.stride(0), box)
    kernel = _kernels(x.device, weight.type, weight.block)[tiles, launch.ahead]
    params = params_of(weight, bias, row_scales, y, gated, launch)
    kernel.launch(min(count, -(-strips // share)), launch.threads, launch.shared, "early", rows_of_x, params)


def params_of(
    weight: PackedCodes,
    bias: torch.Tensor | None,
    row_scales: torch.Tensor | None,
    y: torch.Tensor,
    gated: bool,
    launch: Launch,
) -> Params:
    pointers = {"words": weight.words, "scales": weight.scales, "row_scales": row_scales, "bias": bias, "y": y}
    return Params(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()},
        **{"y_stride": y.stride(0), "rows": len(y), "columns": weight.columns, "strips": weight.words.shape[1]},
        **{"blocks": len(weight.words), "share": launch.share, "stages": launch.stages},
        **{"gated": gated, "float32": y.dtype is torch.float32},
    )
