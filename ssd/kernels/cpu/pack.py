"""Weights in the layout of the C kernels: panels of columns (`csrc/pack.h`, `csrc/codes.h`)."""

from __future__ import annotations

import ctypes
import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from ssd.kernels.codes import Codes, CodeType, bits_of, doubled_fp4
from ssd.kernels.cpu.calls import LAYOUTS
from ssd.kernels.cpu.threads import num_threads

_CPU = torch.device("cpu")  # every tensor states its dtype and device: torch's defaults are the user's
_PACKED = 1 << 21  # weights packed at a time
_OFFSETS, _HALF, _FACTORED, _COARSE = 1, 2, 4, 8  # flags of a quantised weight, as in `codes.h`
_CODES: tuple[CodeType, ...] = ("fp8", "int8", "int4", "uint4")  # as `codes.h` numbers them, from 1


@dataclass(frozen=True)
class PackedWeight:
    """A weight in the kernels' panel layout. `n` and `k` are the original shape; a gated one has gate and up rows."""

    data: Tensor
    n: int
    k: int
    dtype: torch.dtype  # of inputs and outputs, and of the weight itself unless it is quantised
    gated: bool = False
    form: int = 0  # a quantised weight's, as `codes.h` numbers them
    scales: Tensor | None = None  # a quantised weight's (and offsets), as `codes.h` has them
    group: int = 0  # weights of one scale
    flags: int = 0  # a quantised weight's, see above

    @property
    def columns(self) -> int:
        """Of a product with it."""
        return self.n // 2 if self.gated else self.n

    @functools.cached_property
    def fields(self) -> bytes:
        """As calls have it."""
        return LAYOUTS["weight"].pack(
            w=self.data.data_ptr(),
            scales=0 if self.scales is None else self.scales.data_ptr(),
            n=self.columns,
            k=self.k,
            scaled=self.group,
            bf16=self.dtype is torch.bfloat16,
            gated=self.gated,
            form=self.form,
            flags=self.flags,
        )


@dataclass(frozen=True)
class PackedExperts:
    """Weights of experts, which differ in nothing but numbers."""

    each: tuple[PackedWeight, ...]

    @functools.cached_property
    def addresses(self) -> tuple[Tensor, Tensor | None]:
        """Those of the weights and of their scales."""
        weights = [each.data.data_ptr() for each in self.each]
        scales = [each.scales.data_ptr() for each in self.each if each.scales is not None]
        made = [torch.tensor(found, dtype=torch.int64, device=_CPU) for found in (weights, scales)]
        return made[0], made[1] if scales else None


class Packer:
    """Packs weights for the kernels of a library, whose panels are as wide as its vectors."""

    def __init__(self, library: ctypes.CDLL) -> None:
        number, size = ctypes.c_int, ctypes.c_long
        for name, arguments in {"packed_bytes": [size, size, number, number], "flipped_bits": [number]}.items():
            function = getattr(library, f"ssd_{name}")
            function.argtypes, function.restype = arguments, size
        library.ssd_use_huge_pages.argtypes = [ctypes.c_void_p, size]
        self._library = library
        self._panel_columns = int(library.ssd_panel_columns())

    def pack_linear(self, weight: Tensor, gated: bool = False) -> PackedWeight:
        """Repack `weight` [N, K] into panels. `gated`: rows are [gate; up], for a gated `linear`."""
        known = weight.dtype in (torch.float32, torch.bfloat16) and weight.device.type == "cpu"
        if not known or weight.dim() != 2 or not weight.numel():
            raise ValueError(f"cannot pack {tuple(weight.shape)} {weight.dtype} on {weight.device}")
        n, k = weight.shape
        if gated and n % 2:
            raise ValueError(f"a gated weight needs an even number of rows, not {n}")
        if weight.stride(1) != 1:
            weight = weight.contiguous()
        bf16 = weight.dtype is torch.bfloat16
        size = self._library.ssd_packed_bytes(n, k, bf16, gated)
        data = weight.new_empty(size // weight.element_size())
        sizes = {"ldw": weight.stride(0), "n": n, "k": k, "bf16": bf16, "gated": gated}
        self._library.ssd_pack(LAYOUTS["pack"].pack(w=weight.data_ptr(), out=data.data_ptr(), **sizes), num_threads())
        return PackedWeight(data, n, k, weight.dtype, gated)

    def pack_codes(
        self,
        codes: Codes,
        dtype: torch.dtype,
        gated: bool = False,
        *,
        coarse: bool = False,
        half: bool | None = None,
    ) -> PackedWeight:
        """Repack a quantised weight into panels, for a `linear` of inputs of type `dtype`.

        `coarse`: see `Ops.prepare_codes`. `half`: its scales become float16; None: if that is exact.
        """
        half = has_half_scales(codes) if half is None else half
        if codes.type == "fp8" and codes.offsets is not None:
            raise ValueError("fp8 codes have no offsets")
        if codes.type == "fp4":  # halves of integers
            values = doubled_fp4(codes.values).view(torch.uint8)
            codes = Codes(values, codes.scales / 2, "int8", codes.depth, codes.offsets)
        n, form = len(codes.values), _CODES.index(codes.type) + 1
        flags = (0 if codes.offsets is None else _OFFSETS) | (_COARSE if coarse and codes.type != "fp8" else 0)
        if coarse and codes.factors is not None:
            integers, units = (self._numbers(list(each), gated) for each in codes.factors)
            integers = integers.reshape(*units.shape[:2], -1)  # those of a block behind its units
            scales, flags = torch.cat((units.flatten(2).view(torch.int8), integers), 2), flags | _FACTORED
        else:
            numbers = [codes.scales] if codes.offsets is None else [codes.scales, codes.offsets]
            scales, flags = self._numbers(numbers, gated), flags | (_HALF if half else 0)
            scales = scales.half() if half else scales
        data = self._packed_values(codes, gated)
        return PackedWeight(data, n, codes.depth, dtype, gated, form, scales, codes.group, flags)

    def _packed_values(self, codes: Codes, gated: bool) -> Tensor:
        """[panels, depth / together, columns of a byte, together]. A few panels at a time, which takes less memory."""
        width, together, four = self._panel_columns, _together(codes.type), bits_of(codes.type) == 4
        flipped = self._library.ssd_flipped_bits(_CODES.index(codes.type) + 1)
        depth, halves = codes.depth + -codes.depth % (4 * together), codes.values.chunk(2 if gated else 1)
        panels, step = -(-len(halves[0]) // width), max(1, _PACKED // (depth * width))
        data = torch.empty(
            (panels * len(halves), depth // together, width // 2 if four else width, together),
            dtype=torch.uint8,
            device=_CPU,
        )
        self._library.ssd_use_huge_pages(data.data_ptr(), data.nbytes)
        for first, (i, half) in itertools.product(range(0, panels, step), enumerate(halves)):
            rows = half[first * width : (first + step) * width, :depth]  # without what completes a group
            missing = 0, depth - rows.shape[1], 0, -len(rows) % width
            columns = (torch.nn.functional.pad(rows, missing) if any(missing) else rows).reshape(-1, width, depth)
            if four:
                low, high = columns.chunk(2, 1)
                columns = low | high << 4
            pieces = (columns ^ flipped).view(torch.int32 if together == 4 else torch.uint8)  # of one column each
            own = data.view(pieces.dtype)[first * len(halves) + i :: len(halves)][: len(pieces), ..., 0]
            own.copy_(pieces.transpose(1, 2))
        return data

    def _numbers(self, numbers: list[Tensor], gated: bool) -> Tensor:
        """[N, groups] of each kind -> [panels, groups, kinds, columns]"""
        return torch.stack([self._panels(each, gated) for each in numbers], dim=2).contiguous()

    def _panels(self, rows: Tensor, gated: bool) -> Tensor:
        """[N, K] -> [panels, K, columns of a panel], padded with zeros; gate and up panels alternate."""
        width, parts = self._panel_columns, []
        for part in rows.chunk(2 if gated else 1):
            padded = torch.nn.functional.pad(part, (0, 0, 0, -len(part) % width))
            parts.append(padded.view(-1, width, rows.shape[1]))
        return torch.stack(parts, dim=1).flatten(0, 1).transpose(1, 2)


def has_half_scales(codes: Codes) -> bool:
    """Whether scales and offsets are float16 numbers, as many files store them. Products of fp8 take float32."""
    numbers = [codes.scales] if codes.offsets is None else [codes.scales, codes.offsets]
    return codes.type not in ("fp8", "fp4") and all(torch.equal(each.half().float(), each) for each in numbers)


def _together(kind: CodeType) -> int:
    """Weights of a row that lie side by side in a panel."""
    return 1 if kind == "fp8" else 4
