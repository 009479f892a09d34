"""MXFP4: floats of 4 bits (e2m1) in groups of 32 that share a power of two: compressed-tensors `mxfp4-pack-quantized`,
and the experts of GPT-OSS (`ssd.models.fused_experts`). On a CPU a weight takes a byte in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch

from ssd.errors import UnsupportedModel
from ssd.kernels.codes import Codes
from ssd.layers.formats import Use
from ssd.layers.formats.coded import Coded, codes_of, cut

GROUP: Final = 32
_HALFWAY: Final = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0], device="cpu")  # between the numbers of e2m1


@dataclass(frozen=True)
class MXFP4(Coded):
    """`weight_packed`: two numbers of a byte, the first in its low bits; `weight_scale`: exponents plus 127."""

    name: str = "mxfp4"

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        if depth % GROUP:
            raise UnsupportedModel(f"quantization_config: groups of {GROUP} weights do not divide {depth} inputs")
        return {"weight_packed": (rows, depth // 2), "weight_scale": (rows, depth // GROUP)}

    def types(self, tensor: str) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def fault(self, tensor: str, share: torch.Tensor) -> str:
        if tensor == "weight_scale" and bool((share == 255).any()):
            return "has numbers that are not finite: download the checkpoint again"
        return super().fault(tensor, share)

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        return rows, cut(columns, GROUP if tensor == "weight_scale" else 2, "groups")

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        packed, exponents = stored["weight_packed"], stored["weight_scale"]
        halves = torch.stack((packed & 15, packed >> 4), 2).flatten(1)
        scales = (exponents.int() << 23).view(torch.float32)  # an exponent of 0, 2^-127, is as good as zero
        return codes_of(halves, scales, None, "fp4", GROUP)

    def tensors_of(self, weight: torch.Tensor) -> dict[str, torch.Tensor]:
        """A float weight, rounded: of each group the least power of two with which no number is above 6."""
        groups = weight.float().view(len(weight), -1, GROUP)
        fraction, exponent = (groups.abs().amax(2) / 6).clamp_min(2.0**-100).frexp()
        exponent -= (fraction == 0.5).int()
        inverse = ((127 - exponent) << 23).view(torch.float32)
        sizes = torch.bucketize(groups.abs() * inverse[:, :, None], _HALFWAY.to(weight.device), out_int32=True)
        codes = (sizes.to(torch.uint8) | (groups < 0).to(torch.uint8) << 3).flatten(1)
        packed = codes[:, ::2] | codes[:, 1::2] << 4
        return {"weight_packed": packed, "weight_scale": (exponent + 127).to(torch.uint8)}

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        return rows * (depth // 2 + depth // GROUP)
