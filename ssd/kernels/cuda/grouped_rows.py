"""Products of up to 64 rows with weights in groups that are rounded to bfloat16 in registers (`grouped_rows.cu`).

It is for weights in strips (`packing`), and has the bits of the widened weight's products (`linear`), whose segments
(`PackedCodes.segment`) are added in their order.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

from ssd.kernels.codes import Codes, CodeType
from ssd.kernels.cuda.few_rows import RING_AT, SHARED, share_of
from ssd.kernels.cuda.nvrtc import Kernel, kernels, tensor_map
from ssd.kernels.cuda.partition import current_processors
from ssd.kernels.triton.compile import compiling
from ssd.kernels.triton.packing import NumberKind, PackedCodes

SOURCE: Final = Path(__file__).parent / "csrc" / "grouped_rows.cu"
TILES: Final = (1, 2, 4, 8)  # of 8 rows, each number a kernel of its own
_MOST_ROWS: Final = 8 * TILES[-1]
_MAX_STAGES: Final = 12
_LEAST_STAGES: Final = 3  # with which segments are computed at the same time
_FORMATS: Final = {"fp8": 0, "int8": 1, "int4": 2, "uint4": 3}
_NUMBERS: Final = {"float32": 0, "float16": 1, "factors": 2, "zeros": 3}
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("words", "numbers", "bias", "y")),
        ("y_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "columns", "strips", "blocks", "share", "parallel", "stages")),
        *((name, ctypes.c_int) for name in ("segment", "gated", "float32")),
    ]


class Variant(NamedTuple):
    """What the kernel is compiled for, beside the number of rows."""

    kind: CodeType
    depth: int  # of a block
    group: int
    numbers: NumberKind
    offsets: bool

    @classmethod
    def of(cls, weight: PackedCodes) -> Variant:
        assert weight.numbers is not None
        depth = weight.block * weight.parts
        return cls(weight.type, depth, weight.group, weight.numbers.kind, weight.numbers.offsets)

    def macros(self, tiles: int) -> dict[str, int]:
        weight = {"FORMAT": _FORMATS[self.kind], "DEPTH": self.depth, "GROUP": self.group}
        numbers = {"NUMBERS": _NUMBERS[self.numbers], "OFFSETS": int(self.offsets)}
        return {**weight, **numbers, "TILES": tiles, "MAX_WARPS": most_warps(tiles)}


def most_warps(tiles: int) -> int:
    """That multiply: as many as registers allow."""
    return 16 if tiles < 8 else 12


def supports(codes: Codes, dtype: torch.dtype) -> bool:
    """Whether weights are packed for this kernel: a Hopper GPU, bfloat16."""
    device = codes.values.device
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    return hopper and dtype is torch.bfloat16 and codes.depth % 64 == 0


def takes(x: torch.Tensor, weight: PackedCodes, bias: torch.Tensor | None) -> bool:
    """Whether `linear` is for this product."""
    if weight.numbers is None or not weight.strips or not 0 < len(x) <= _MOST_ROWS:
        return False
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    same = x.is_cuda and x.dtype is torch.bfloat16 and (bias is None or bias.dtype is x.dtype)
    return aligned and same and _kernels(x.device, Variant.of(weight)) != {}


@functools.cache
def _kernels(device: torch.device, variant: Variant) -> dict[int, Kernel]:
    """Kernels by tiles; none where they cannot be built."""
    macros = [variant.macros(tiles) for tiles in TILES]
    slower = "quantised weights are multiplied by slower kernels"
    return dict(zip(TILES, kernels(SOURCE, macros, "product", device, SHARED, slower), strict=False))


@dataclass(frozen=True)
class Launch:
    """How a block of threads multiplies `share` strips of outputs and `parallel` segments with 8 `tiles` rows."""

    share: int
    parallel: int
    stages: int
    threads: int
    shared: int  # bytes

    @classmethod
    def of(cls, weight: PackedCodes, tiles: int, processors: int, most: int = _MAX_STAGES) -> Launch:
        """With up to `most` stages. As many segments at the same time as there are, unless warps or memory are too few:
        a warp for each strip and segment."""
        segments, warps = -(-weight.depth // weight.segment), most_warps(tiles)
        for count in (warps, warps // 2, warps // 4):
            for parallel in range(min(segments, count), 0, -1):
                share = share_of(weight.words.shape[1], processors, count // parallel)
                launch = cls.made(weight, tiles, share, parallel, most)
                if launch.stages >= min(_LEAST_STAGES, most):
                    return launch
        return launch

    @classmethod
    def made(cls, weight: PackedCodes, tiles: int, share: int, parallel: int, most: int) -> Launch:
        assert weight.numbers is not None
        depth, warps, offsets = weight.block * weight.parts, share * parallel, weight.numbers.offsets
        size = tiles * 16 * depth + share * 64 * weight.block
        size = parallel * (size + -(-share * weight.numbers.data.shape[2] // 1024) * 1024)
        behind = warps * (depth // weight.group * 64 * (2 if offsets else 1) + 512 * tiles)  # tables and sums
        stages = min(most, (SHARED - RING_AT - behind) // size)
        return cls(share, parallel, stages, 32 * (warps + 1), RING_AT + stages * size + behind)


def linear(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None,
    *,
    gated: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """x times the weight transposed; `takes` is true. A gated weight has alternating gate and up rows."""
    columns = weight.columns // 2 if gated else weight.columns
    y = x.new_empty((len(x), columns), dtype=out_dtype)
    if compiling():
        return y
    (rows, depth), strips = x.shape, weight.words.shape[1]
    tiles = next(each for each in TILES if 8 * each >= rows)
    count = current_processors(x.device)
    launch = Launch.of(weight, tiles, count)
    rows_of_x = tensor_map(x.data_ptr(), rows, depth, 2 * x.stride(0), (weight.block * weight.parts // 64, 8 * tiles))
    params = params_of(weight, bias, y, gated, launch)
    kernel = _kernels(x.device, Variant.of(weight))[tiles]
    kernel.launch(min(count, -(-strips // launch.share)), launch.threads, launch.shared, "early", rows_of_x, params)
    return y


def params_of(weight: PackedCodes, bias: torch.Tensor | None, y: torch.Tensor, gated: bool, launch: Launch) -> Params:
    assert weight.numbers is not None
    pointers = {"words": weight.words, "numbers": weight.numbers.data, "bias": bias, "y": y}
    return Params(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()},
        **{"y_stride": y.stride(0), "rows": len(y), "columns": weight.columns, "strips": weight.words.shape[1]},
        **{"blocks": len(weight.words), "share": launch.share, "parallel": launch.parallel, "stages": launch.stages},
        **{"segment": min(len(weight.words), weight.segment // (weight.block * weight.parts))},
        **{"gated": gated, "float32": y.dtype is torch.float32},
    )
