"""compressed-tensors `pack-quantized`: INT4 and INT8. Its FP8 and INT8 of a byte each are in `fp8.py`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ssd.errors import UnsupportedModel
from ssd.kernels.codes import Codes
from ssd.layers.formats.packed import Packed, act_order, in_order


@dataclass(frozen=True)
class PackedRows(Packed):
    """compressed-tensors `pack-quantized`: words along the inputs."""

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        groups = self.groups(depth)
        shapes: dict[str, tuple[int, ...]] = {
            "weight_packed": (rows, self.words(depth)),
            "weight_scale": (rows, groups),
        }
        if "weight_zero_point" in self.names:
            shapes["weight_zero_point"] = (self.words(rows), groups)
        if "weight_shape" in self.names:
            shapes["weight_shape"] = (2,)
        if "weight_g_idx" in self.names:
            shapes["weight_g_idx"] = (depth,)
        if self.activations is not None and self.activations.static:
            shapes["input_scale"] = (1,)
        return shapes

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        if tensor == "weight_packed":
            return rows, self.cut_words(columns)
        if tensor == "weight_scale":
            return rows, self.cut_groups(columns)
        if tensor == "weight_zero_point":
            return self.cut_words(rows), self.cut_groups(columns)
        return ()

    def order(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        depth = stored["weight_packed"].shape[1] * self.per_word
        return act_order(stored.get("weight_g_idx"), depth, self.group, "weight_g_idx")

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        values, zeros = self.unpacked(stored["weight_packed"]), stored.get("weight_zero_point")
        _check_shape(stored.get("weight_shape"), values)
        zeros = None if zeros is None else self.unpacked(zeros.t()).t()
        return self.codes_from(in_order(values, self.order(stored)), stored["weight_scale"], zeros)


def _check_shape(stated: torch.Tensor | None, values: torch.Tensor) -> None:
    """Of the whole layer, of which a rank has a part."""
    if stated is None:
        return
    if any(size < part or size % part for size, part in zip(stated.tolist(), values.shape, strict=True)):
        raise UnsupportedModel(f"weight_shape is {stated.tolist()}, but {list(values.shape)} weights are stored")
