"""Products of up to 64 rows with weights in groups that are rounded to bfloat16 in registers (`grouped_rows.cu`).

It is for weights in strips (`packing`), and has the bits of the widened weight's products (`linear`), whose segments
(`PackedCodes.segment`) are added in their order. `widened` makes that weight for more rows.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

import torch

from ssd.kernels.codes import Codes, CodeType, bits_of
from ssd.kernels.cuda.few_rows import RING_AT, SHARED, share_of
from ssd.kernels.cuda.nvrtc import Kernel, kernels, tensor_map
from ssd.kernels.cuda.partition import current_processors
from ssd.kernels.triton.compile import compiling
from ssd.kernels.triton.packing import STRIP, NumberKind, PackedCodes

SOURCE: Final = Path(__file__).parent / "csrc" / "grouped_rows.cu"
TILES: Final = (1, 2, 4, 8)  # of 8 rows, each number a kernel of its own
_MOST_ROWS: Final = 8 * TILES[-1]
_MAX_STAGES: Final = 12
_FORMATS: Final = {"fp8": 0, "int8": 1, "uint4": 2}
_NUMBERS: Final = {"float32": 0, "float16": 1, "factors": 2, "zeros": 3}
_MOST_SCALE: Final = 7.9  # of 4 bits: it is multiplied by 2^125
_WIDEN_WARPS: Final = 4  # of a block of threads
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("words", "numbers", "bias", "y", "sums", "count")),
        ("y_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("rows", "columns", "strips", "blocks", "share", "x_stages", "stages")),
        *((name, ctypes.c_int) for name in ("segment", "splits", "gated", "float32")),
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

    @property
    def table(self) -> int:
        """Bytes of a strip's scales of a block, as they are multiplied."""
        return self.depth // self.group * (128 if self.kind != "uint4" and self.offsets else 64)


def most_warps(tiles: int) -> int:
    """That multiply: with the one that copies, four for each scheduler, or three, which have more registers."""
    return 15 if tiles < 8 else 11


def supports(codes: Codes, dtype: torch.dtype) -> bool:
    """Whether weights are packed for this kernel: a Hopper GPU, bfloat16."""
    device = codes.values.device
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)
    if not hopper or dtype is not torch.bfloat16 or codes.depth % 64:
        return False
    return bits_of(codes.type) == 8 or bool(codes.scales.abs().max() < _MOST_SCALE)


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


@functools.cache
def _widen_kernel(device: torch.device, variant: Variant) -> Kernel | None:
    """None where it cannot be built."""
    slower = "quantised weights are widened by slower kernels"
    return next(iter(kernels(SOURCE, [variant.macros(TILES[0])], "widen", device, SHARED, slower)), None)


@dataclass(frozen=True)
class Launch:
    """How blocks of threads multiply `share` strips of outputs with 8 `tiles` rows."""

    share: int
    splits: int  # segments: blocks of threads that share these strips
    x_stages: int  # of the ring of x
    stages: int  # of that of weights
    threads: int
    shared: int  # bytes

    @classmethod
    def of(cls, weight: PackedCodes, tiles: int, processors: int) -> Launch:
        """Segments at the same time, and no more blocks of threads than multiprocessors, if warps are enough."""
        strips, splits = weight.words.shape[1], -(-weight.depth // weight.segment)
        share = share_of(strips, max(1, processors // splits), most_warps(tiles))
        while (launch := cls.made(weight, tiles, share)).stages < 2:
            share //= 2
        return launch

    @classmethod
    def made(cls, weight: PackedCodes, tiles: int, share: int, most: int = _MAX_STAGES) -> Launch:
        """With up to `most` stages."""
        assert weight.numbers is not None
        splits = -(-weight.depth // weight.segment)
        depth, blocks = weight.block * weight.parts, -(-weight.segment // (weight.block * weight.parts))
        most = min(most, blocks) if splits > 1 else most
        rows, size = tiles * 16 * depth, share * (64 * weight.block + weight.numbers.data.shape[2])  # bytes of a slot
        other = RING_AT + share * Variant.of(weight).table
        stages = min(most, (SHARED - other) // (rows + size))
        x_stages = min(most, (SHARED - other - stages * size) // rows)
        return cls(share, splits, x_stages, stages, 32 * (share + 1), other + x_stages * rows + stages * size)


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
    count, kernel = current_processors(x.device), _kernels(x.device, Variant.of(weight))[tiles]
    launch = Launch.of(weight, tiles, count)
    rows_of_x = tensor_map(x.data_ptr(), rows, depth, 2 * x.stride(0), (weight.block * weight.parts // 64, 8 * tiles))
    sums = x.new_empty(launch.splits * strips * 128 * tiles, dtype=torch.float32) if launch.splits > 1 else None
    params, shares = params_of(weight, bias, y, sums, gated, launch), -(-strips // launch.share)
    blocks = shares * launch.splits if launch.splits > 1 else min(count, shares)
    kernel.launch(blocks, launch.threads, launch.shared, "early", rows_of_x, params)
    return y


def params_of(
    weight: PackedCodes,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    sums: torch.Tensor | None,
    gated: bool,
    launch: Launch,
) -> Params:
    """`sums`: memory for those of segments, if there are splits."""
    assert weight.numbers is not None
    pointers = {"words": weight.words, "numbers": weight.numbers.data, "bias": bias, "y": y}
    pointers |= {"sums": sums, "count": weight.count}
    return Params(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()},
        **{"y_stride": y.stride(0), "rows": len(y), "columns": weight.columns, "strips": weight.words.shape[1]},
        **{
            "blocks": len(weight.words),
            "share": launch.share,
            "x_stages": launch.x_stages,
            "stages": launch.stages,
            "splits": launch.splits,
        },
        **{"segment": -(-weight.segment // (weight.block * weight.parts))},
        **{"gated": gated, "float32": y.dtype is torch.float32},
    )


def widened(weight: PackedCodes, outputs: slice) -> torch.Tensor | None:
    """Some outputs, from the beginning of a strip on. None where the kernel cannot be built."""
    size = outputs.stop - outputs.start, weight.depth
    y = torch.empty(size, dtype=torch.bfloat16, device=weight.words.device)
    if compiling():
        return y
    kernel = _widen_kernel(y.device, Variant.of(weight))
    if kernel is None:
        return None
    tasks = -(-len(y) // STRIP) * len(weight.words)
    blocks, threads, shared = -(-tasks // _WIDEN_WARPS), 32 * _WIDEN_WARPS, _WIDEN_WARPS * widen_bytes(weight)
    kernel.launch(blocks, threads, shared, "early", widen_params(weight, y, outputs.start))
    return y


def widen_params(weight: PackedCodes, y: torch.Tensor, first: int) -> Params:
    """`first`: output."""
    assert weight.numbers is not None
    words, numbers = (each[:, first // STRIP :].data_ptr() for each in (weight.words, weight.numbers.data))
    sizes = {"columns": len(y), "strips": weight.words.shape[1], "blocks": len(weight.words)}
    return Params(words=words, numbers=numbers, y=y.data_ptr(), y_stride=y.stride(0), **sizes)


def widen_bytes(weight: PackedCodes) -> int:
    """Of shared memory, of a warp."""
    assert weight.numbers is not None
    variant = Variant.of(weight)
    return weight.numbers.data.shape[2] + variant.table + STRIP * (4 * weight.block + 2 * variant.depth + 16)
