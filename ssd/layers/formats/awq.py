"""AWQ, in 4 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ssd.kernels.codes import Codes
from ssd.layers.formats.packed import Packed, rounded_to_four_bits

_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where the next integer of a word is, from its lowest bits
_PLACES: Final = (0, 2, 4, 6, 1, 3, 5, 7)  # which integer each place has


@dataclass(frozen=True)
class AWQ(Packed):
    """Words along the outputs, of transposed weights, in an order of their own (`version: gemm`)."""

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        groups = self.groups(depth)
        return {"qweight": (depth, self.words(rows)), "qzeros": (groups, self.words(rows)), "scales": (groups, rows)}

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        inputs = columns if tensor == "qweight" else self.cut_groups(columns)
        return inputs, rows if tensor == "scales" else self.cut_words(rows)

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        values, zeros = (self._transposed(stored[name]) for name in ("qweight", "qzeros"))
        return self.codes_from(values, stored["scales"].t(), zeros)

    def tensors_of(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """Rounded to the nearest, with zero points."""
        group = self.group or weight.shape[1]
        values, scales, zeros = rounded_to_four_bits(weight, group, symmetric=False)
        words = {"qweight": self._words(values), "qzeros": self._words(zeros)}
        return {**words, "scales": scales.t().contiguous()}

    def _words(self, integers: torch.Tensor) -> torch.Tensor:
        transposed = integers.t().reshape(integers.shape[1], -1, len(_PLACES))
        return self.words_of(transposed[:, :, _PLACES].flatten(1))

    def _transposed(self, words: torch.Tensor) -> torch.Tensor:
        integers = self.unpacked(words).view(len(words), -1, len(_ORDER))
        return integers[:, :, _ORDER].flatten(1).t()
