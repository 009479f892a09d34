"""Weights in 8 or 4 bits, for draft models: a draft's numbers never reach the text, so any rounding is allowed.

* `fp8`: floats of 8 bits (e4m3), one scale per output channel.
* `int8`: integers from -127 to 127, one scale per output channel.
* `int4`: integers from -8 to 7, one scale for each group of up to 128 weights of an output channel.

A weight is rounded to `Codes`, which the kernels of a device lay out as they need (`Ops.prepare_codes`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

import torch

Format = Literal["fp8", "int8", "int4"]
_FP8_MAX: Final = 448.0
_CHUNK: Final = 1 << 24  # weights quantised at a time: bounds the memory of float32 copies


@dataclass(frozen=True)
class Codes:
    """A weight [rows, depth], rounded. Devices pack it as their kernels need."""

    values: torch.Tensor  # uint8 [rows, groups * group]: the bits of fp8 or int8, or int4 plus 8
    scales: torch.Tensor  # float32 [rows, groups]
    format: Format
    depth: int  # beyond it, whole groups are padded with zeros

    @property
    def group(self) -> int:
        """Weights of one scale."""
        return self.values.shape[1] // self.scales.shape[1]


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
    values, group = codes.values, codes.group
    if codes.format == "fp8":
        wide = values.view(torch.float8_e4m3fn).float()
    else:
        wide = values.view(torch.int8).float() if codes.format == "int8" else values.float() - 8
    wide = wide.view(len(wide), -1, group) * codes.scales[:, :, None]
    return wide.flatten(1)[:, : codes.depth].to(dtype)


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
