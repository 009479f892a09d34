"""Weights in 8 or 4 bits, with a scale (and perhaps an offset) for each output channel, or each group of its weights.

A quantised checkpoint's tensors become `Codes` (`ssd.layers.formats`), and so does a float weight that is rounded here:

* `fp8`: floats of 8 bits (e4m3), one scale per output channel.
* `int8`: integers from -127 to 127, one scale per output channel.
* `int4`: integers from -8 to 7, one scale for each group of up to 128 weights of an output channel.

The kernels of a device lay codes out as they need (`Ops.prepare_codes`).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import torch

from ssd.kernels.weights import RoundedRows, RowRounding, RowType

Format = Literal["fp8", "int8", "int4"]  # what a weight can be rounded to
TargetFormat = Literal["fp8", "fp8_dynamic", "int8", "int4"]  # likewise a target's; dynamic: rows are rounded, too
CodeType = Literal["fp8", "fp4", "int8", "int4", "uint4"]  # what codes are: e4m3, e2m1, or integers
ROW_LIMITS: Final[dict[RowType, tuple[float, float]]] = {"fp8": (-448.0, 448.0), "int8": (-128.0, 127.0)}
_FP8_MAX: Final = 448.0
_FRACTION: Final = (1 << 23) - 1  # bits of a float32 below its exponent
LEAST_SCALE: Final = 2.0**-120  # a row of zeros has it, too
_CHUNK: Final = 1 << 24  # weights quantised at a time: bounds the memory of float32 copies


class Factors(NamedTuple):
    """Scales and offsets as integers times a number of a larger block, as GGUF's K types store them. Products are the
    scales and offsets themselves, rounded to float32."""

    integers: torch.Tensor  # int8 [1 or 2, rows, groups]: scales, then offsets; if both, not negative
    units: torch.Tensor  # float16 [1 or 2, rows, blocks]


@dataclass(frozen=True)
class Codes:
    """A weight [rows, depth]: scale * code (+ offset). Devices pack it as their kernels need."""

    values: torch.Tensor  # uint8 [rows, groups * group]: the bits of fp8, fp4 or int8, int4 plus 8, or uint4
    scales: torch.Tensor  # float32 [rows, groups]
    type: CodeType
    depth: int  # beyond it, the last group is padded with zeros
    offsets: torch.Tensor | None = None  # float32 [rows, groups]
    factors: Factors | None = None  # of the same scales and offsets

    @property
    def group(self) -> int:
        """Weights of one scale."""
        return self.values.shape[1] // self.scales.shape[1]

    def rows(self, index: torch.Tensor | slice) -> Codes:
        offsets = None if self.offsets is None else self.offsets[index]
        factors = None if self.factors is None else Factors(*(each[:, index] for each in self.factors))
        return replace(self, values=self.values[index], scales=self.scales[index], offsets=offsets, factors=factors)


def bits_of(kind: CodeType) -> int:
    return 4 if kind in ("fp4", "int4", "uint4") else 8


def group_size(depth: int, form: Format) -> int:
    """Weights of one scale: a whole output channel; int4: 128, or fewer where that divides the depth."""
    if form != "int4":
        return depth
    return next((size for size in (128, 64) if depth % size == 0), 32)


def quantized_bytes(rows: int, depth: int, form: Format) -> int:
    """Bytes of a weight, as good as exactly: devices may pad it."""
    group = group_size(depth, form)
    groups = -(-depth // group)
    return rows * groups * (group // (2 if form == "int4" else 1) + 4)


def quantize(weight: torch.Tensor, form: Format) -> Codes:
    """Rounds a weight of any float type to the nearest codes."""
    rows, depth = weight.shape
    group, step = group_size(depth, form), max(1, _CHUNK // depth)
    encode = {"fp8": _encode_fp8, "int8": _encode_int8, "int4": _encode_int4}[form]
    values, scales = [], []
    for start in range(0, rows, step):
        padded = torch.nn.functional.pad(weight[start : start + step].float(), (0, -depth % group))
        codes, scale = encode(padded.view(len(padded), -1, group))
        values.append(codes.flatten(1))
        scales.append(scale[:, :, 0])
    return Codes(torch.cat(values), torch.cat(scales), form, depth)


def dequantize(codes: Codes, dtype: torch.dtype) -> torch.Tensor:
    """The weight [rows, depth] that the codes stand for."""
    wide = decoded(codes.values, codes.type).view(len(codes.values), -1, codes.group) * codes.scales[:, :, None]
    if codes.offsets is not None:
        wide += codes.offsets[:, :, None]
    return wide.flatten(1)[:, : codes.depth].to(dtype)


def decoded(values: torch.Tensor, kind: CodeType) -> torch.Tensor:
    """The numbers that codes stand for, in float32."""
    if kind == "fp8":
        return values.view(torch.float8_e4m3fn).float()
    if kind == "fp4":
        return doubled_fp4(values).float() / 2
    return values.view(torch.int8).float() if kind == "int8" else values.float() - (8 if kind == "int4" else 0)


def doubled_fp4(values: torch.Tensor) -> torch.Tensor:
    """The numbers of e2m1 (0, 0.5, 1, 1.5, 2, 3, 4, 6, and the same with a sign) times two: int8."""
    sizes = [0, 1, 2, 3, 4, 6, 8, 12]
    return torch.tensor([*sizes, *(-each for each in sizes)], dtype=torch.int8, device=values.device)[values.int()]


def fused_codes(parts: Seq[Codes]) -> Codes:
    """The rows of all parts, which differ in nothing else, one after the other."""
    if len(parts) == 1:
        return parts[0]
    offsets = [part.offsets for part in parts if part.offsets is not None]
    factors = [part.factors for part in parts if part.factors is not None]
    return replace(
        parts[0],
        values=torch.cat([part.values for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        offsets=torch.cat(offsets) if offsets else None,
        factors=Factors(*(torch.cat(each, 1) for each in zip(*factors, strict=True))) if factors else None,
    )


def rounded_rows(x: torch.Tensor, how: RowRounding) -> RoundedRows:
    """Rows of x in 8 bits, as numbers of x's type. Largest numbers, divisions and roundings of single numbers: a row's
    bits are its own."""
    lowest, highest = ROW_LIMITS[how.kind]
    groups = x.float().view(len(x), -1, how.group or x.shape[1])
    if how.scale is None:
        scales = (groups.abs().amax(2, keepdim=True) / highest).clamp_min(LEAST_SCALE)
        scales = next_power(scales) if how.powers else scales
    else:
        scales = how.scale[:, None]
    scaled = (groups / scales).clamp(lowest, highest)
    rounded = scaled.to(torch.float8_e4m3fn).float() if how.kind == "fp8" else scaled.round()
    return RoundedRows(rounded.flatten(1).to(x.dtype), scales[:, :, 0].expand(len(x), -1))


def next_power(scales: torch.Tensor) -> torch.Tensor:
    """The powers of two that are not below these float32 numbers, which are normal and positive."""
    return ((scales.view(torch.int32) + _FRACTION) & ~_FRACTION).view(torch.float32)


def _encode_fp8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _nonzero(groups.abs().amax(2, keepdim=True) / _FP8_MAX)
    return (groups / scale).to(torch.float8_e4m3fn).view(torch.uint8), scale


def _encode_int8(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    scale = _nonzero(groups.abs().amax(2, keepdim=True) / 127)
    return (groups / scale).round().to(torch.int8).view(torch.uint8), scale


def _encode_int4(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The weight that is farthest from zero becomes -8, whatever its sign, so that all 16 codes are used."""
    farthest = groups.gather(2, groups.abs().argmax(2, keepdim=True))
    scale = _nonzero(farthest / -8)
    return ((groups / scale).round() + 8).clamp(0, 15).to(torch.uint8), scale


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    """One where it is zero, or too small to divide by."""
    return torch.where(scale.abs() < torch.finfo(torch.float32).tiny, 1.0, scale)
