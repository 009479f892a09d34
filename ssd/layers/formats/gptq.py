"""GPTQ, in 4 and 8 bits, with act-order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ssd.kernels.codes import Codes
from ssd.layers.formats.packed import Packed, act_order, in_order, rounded_to_four_bits


@dataclass(frozen=True)
class GPTQ(Packed):
    """Words along the inputs, of transposed weights. Zero points are stored minus `zero_bias`."""

    zero_bias: int = 1

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        groups = self.groups(depth)
        shapes: dict[str, tuple[int, ...]] = {
            "qweight": (self.words(depth), rows),
            "qzeros": (groups, self.words(rows)),
            "scales": (groups, rows),
        }
        return shapes | ({"g_idx": (depth,)} if "g_idx" in self.names else {})

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        if tensor == "qweight":
            return self.cut_words(columns), rows
        if tensor == "g_idx":
            return ()
        return self.cut_groups(columns), rows if tensor == "scales" else self.cut_words(rows)

    def order(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return act_order(stored.get("g_idx"), len(stored["qweight"]) * self.per_word, self.group, "g_idx")

    def tensors_of(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded to the nearest of 4 bits, with all zero points in the middle, and without act-order."""
        group = self.group or weight.shape[1]
        values, scales, zeros = rounded_to_four_bits(weight, group, symmetric=True)
        return {
            "qweight": self.words_of(values).t().contiguous(),
            "qzeros": self.words_of(zeros.t() - self.zero_bias),
            "scales": scales.t().contiguous(),
            "g_idx": torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device) // group,
        }

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        values = self.unpacked(stored["qweight"].t())
        zeros = self.unpacked(stored["qzeros"]).t().short() + self.zero_bias
        return self.codes_from(in_order(values, self.order(stored)), stored["scales"].t(), zeros)
