"""Weights of 8 bits, a byte each: FP8 (e4m3) and INT8 of compressed-tensors, and `quant_method: fp8`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from ssd.errors import UnsupportedModel
from ssd.kernels.codes import Codes
from ssd.layers.formats import FLOATS, Use
from ssd.layers.formats.coded import Activations, Coded, codes_of, cut

_TYPES: Final = {"fp8": (torch.float8_e4m3fn,), "int8": (torch.int8,)}


@dataclass(frozen=True)
class Unpacked(Coded):
    """`weight` and a scale for each block of `block_rows` x `block_columns` weights; None: all rows or columns.

    Per tensor (None, None), per channel (1, None), per group (1, columns), blocks as in DeepSeek's files (128, 128).
    """

    name: Literal["fp8", "int8"] = field()
    block_rows: int | None = 1
    block_columns: int | None = None
    scale: str = "weight_scale"  # name of the scales
    zero_point: bool = False  # integers that stand for zero are stored, one for each scale
    powers: bool = False  # scales are powers of two: float32, or 8 bits of exponent
    activations: Activations | None = None

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        columns = self.block_columns
        scales: tuple[int, ...] = (1,)
        if columns is not None and depth % columns:
            raise UnsupportedModel(f"quantization_config: blocks of {columns} weights do not divide {depth} inputs")
        if self.block_rows is not None:
            scales = (-(-rows // self.block_rows), 1 if columns is None else depth // columns)
        shapes = {"weight": (rows, depth), self.scale: scales}
        if self.zero_point:
            shapes["weight_zero_point"] = scales
        if self.activations is not None and self.activations.static:
            shapes["input_scale"] = (1,)
        return shapes

    def types(self, tensor: str) -> tuple[torch.dtype, ...]:
        scales = (*FLOATS, torch.float8_e8m0fnu) if self.powers else FLOATS
        return {"weight": _TYPES[self.name], "weight_zero_point": (torch.int8,)}.get(tensor, scales)

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        if tensor == "weight":
            return rows, columns
        if tensor == "input_scale" or self.block_rows is None:
            return ()
        groups = slice(None) if self.block_columns is None else cut(columns, self.block_columns, "blocks")
        return cut(rows, self.block_rows, "blocks"), groups

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        values = stored["weight"].view(torch.uint8)
        scales = self._by_row(stored[self.scale].float(), len(values))
        zeros = self._by_row(stored["weight_zero_point"], len(values)) if self.zero_point else None
        return codes_of(values, scales, zeros, self.name, self.block_columns)

    def _by_row(self, numbers: torch.Tensor, rows: int) -> torch.Tensor:
        """[rows, groups]"""
        if self.block_rows is None:
            return numbers.reshape(1, 1).expand(rows, 1)
        return numbers.repeat_interleave(self.block_rows, 0)[:rows]

    def fault(self, tensor: str, share: torch.Tensor) -> str:
        if fault := super().fault(tensor, share):
            return fault
        if tensor != self.scale:
            return ""
        scales = share.float()
        if bool((scales < 0).any() | scales.isnan().any()):
            return "has negative numbers or NaN, which are no scales: download the checkpoint again"
        if self.powers and bool((scales.frexp().mantissa % 0.5 != 0).any()):
            return (
                "has numbers that are no powers of two, unlike quantization_config.scale_fmt='ue8m0': remove scale_fmt "
                "from config.json if scales are any numbers"
            )
        return ""

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        return rows * (depth + 4 * (depth // self.block_columns if self.block_columns else 1))
