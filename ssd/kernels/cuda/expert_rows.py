"""Products of few rows with experts of codes in groups (MXFP4, INT4, FP8) as a CUDA kernel (`expert_rows.cu`), near the
speed of reading the experts that are hit.

It is for weights in strips (`packing`), and has the bits of `experts.expert_linear`, which does all the rest.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Final, NamedTuple

import torch

from ssd.kernels.codes import Codes, CodeType, bits_of
from ssd.kernels.cuda.few_rows import SHARED
from ssd.kernels.cuda.nvrtc import Kernel, kernels
from ssd.kernels.cuda.partition import current_processors
from ssd.kernels.triton.compile import compiling
from ssd.kernels.triton.packing import STRIP, PackedCodes
from ssd.kernels.weights import GLU, SWIGLU, Routing

SOURCE: Final = Path(__file__).parent / "csrc" / "expert_rows.cu"
_TILES: Final = (1, 2, 4)  # of 8 rows, each number a kernel of its own
_MOST_ROWS: Final = 8 * _TILES[-1]  # of a tile; one with up to twice as many is cut in two
_MAX_TILES: Final = 672  # of pairs
_FORMATS: Final = {"fp4": 0, "int4": 1, "fp8": 2}
_WORDS: Final = 32  # of a block of an output
_P = ctypes.c_void_p


class Params(ctypes.Structure):
    """`Params` of the source."""

    _fields_ = [
        *((name, _P) for name in ("words", "group_scales", "scales", "bias", "x", "y", "order", "tiles")),
        ("x_stride", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("num_tiles", "halves", "repeats", "experts", "strips")),
        *((name, ctypes.c_int) for name in ("gated", "float32", "settled")),
        *((name, ctypes.c_float) for name in ("slope", "limit", "shift")),
    ]


class Variant(NamedTuple):
    """What the kernel is compiled for, beside the number of rows."""

    kind: CodeType
    group: int
    scale_bytes: int
    depth: int

    @classmethod
    def of(cls, weight: PackedCodes) -> Variant:
        size = 1 if weight.exponents is not None else _group_scales(weight).element_size()
        return cls(weight.type, weight.group, size, weight.depth)

    def macros(self, tiles: int) -> dict[str, int]:
        scales = {"GROUP": self.group, "SCALE_BYTES": self.scale_bytes}
        return {"FORMAT": _FORMATS[self.kind], **scales, "DEPTH": self.depth, "TILES": tiles}


def fits(codes: Codes, experts: int) -> bool:
    """Whether `linear` is for a weight of so many experts."""
    block = _WORDS * 32 // bits_of(codes.type)
    whole = len(codes.values) % (experts * STRIP) == 0 and codes.depth % 64 == 0 and codes.depth >= block
    grouped = codes.type in _FORMATS and codes.offsets is None and codes.scales.shape[1] > 1
    return whole and grouped and codes.group % _WORDS == 0 and block % codes.group == 0


def _group_scales(weight: PackedCodes) -> torch.Tensor:
    scales = weight.scales if weight.exponents is None else weight.exponents
    assert scales is not None
    return scales


def takes(
    x: torch.Tensor,
    weight: PackedCodes,
    routing: Routing,
    bias: torch.Tensor | None,
    rows: int,
    row_scales: torch.Tensor | None,
) -> bool:
    """Whether `linear` is for this product with tiles of so many rows. (It is slower than Triton's kernel where experts
    have more than _MOST_ROWS on average.)"""
    if not x.is_cuda or x.dtype is not torch.bfloat16 or row_scales is not None or rows > 2 * _MOST_ROWS:
        return False
    if routing.tiles is None or len(routing.tiles) * halves(rows) >= _MAX_TILES:  # the one behind the last is read
        return False
    if len(routing.order) > _MOST_ROWS * routing.num_experts:
        return False
    aligned = x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    same = bias is None or bias.dtype is x.dtype
    return weight.strips and aligned and same and _kernels(x.device, Variant.of(weight)) != {}


@functools.cache
def _kernels(device: torch.device, variant: Variant) -> dict[int, tuple[Kernel, int, int]]:
    """Kernels by tiles, each with its threads and bytes of shared memory; none where they cannot be built."""
    if torch.cuda.get_device_capability(device) != (9, 0):
        return {}
    macros = [variant.macros(tiles) for tiles in _TILES]
    made = kernels(SOURCE, macros, "product", device, SHARED, "experts are multiplied by slower kernels")
    sizes = ((kernel, kernel.constant("threads"), kernel.constant("shared_bytes")) for kernel in made)
    return dict(zip(_TILES, sizes, strict=False))


def halves(rows: int) -> int:
    """Tiles that one of so many rows is cut into."""
    return 2 if rows > _MOST_ROWS else 1


def params_of(
    x: torch.Tensor,
    weight: PackedCodes,
    routing: Routing,
    bias: torch.Tensor | None,
    rows: int,
    glu: GLU | None,
    y: torch.Tensor,
) -> Params:
    assert routing.tiles is not None
    pointers = {
        **{"words": weight.words, "group_scales": _group_scales(weight), "bias": bias},
        **{"scales": None if weight.exponents is None else weight.scales},
        **{"x": x, "y": y, "order": routing.order, "tiles": routing.tiles},
    }
    gate, experts = glu or SWIGLU, routing.num_experts
    return Params(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()},
        **{"x_stride": x.stride(0), "num_tiles": len(routing.tiles), "halves": halves(rows)},
        **{"repeats": len(routing.order) // len(x)},
        **{"experts": experts, "strips": weight.columns // (experts * STRIP)},
        **{"gated": glu is not None, "float32": y.dtype is torch.float32, "settled": routing.settled},
        **{"slope": gate.slope, "limit": gate.limit, "shift": gate.shift},
    )


def linear(
    x: torch.Tensor,
    weight: PackedCodes,
    routing: Routing,
    bias: torch.Tensor | None,
    rows: int,
    *,
    glu: GLU | None,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """See `experts.expert_linear`; `takes` is true."""
    columns = weight.columns // routing.num_experts
    y = x.new_empty((len(routing.order), columns if glu is None else columns // 2), dtype=out_dtype)
    if not compiling():
        tiles = next(each for each in _TILES if 8 * each * halves(rows) >= rows)
        kernel, threads, shared = _kernels(x.device, Variant.of(weight))[tiles]
        blocks = current_processors(x.device)
        kernel.launch(blocks, threads, shared, "early", params_of(x, weight, routing, bias, rows, glu, y))
    return y
