"""RMS norms."""

from __future__ import annotations

from typing import ClassVar

import torch

from ssd.kernels.ops import ExpertOutputs
from ssd.kernels.weights import Rows
from ssd.layers.linear import Linear
from ssd.layers.parameter import Build, LazyTensor


class RMSNorm:
    """A norm with one weight per column; every rank has all of it.

    `float32`: its product is rounded once, after it; else the normalised numbers are rounded before it, too. `feeds`:
    the only layer that reads what is normed, whose weight may round it in the same kernel.
    """

    loaded: ClassVar[tuple[str, ...]] = ("weight",)

    def __init__(
        self,
        build: Build,
        name: str,
        width: int,
        eps: float,
        *,
        float32: bool = False,
        feeds: Linear | None = None,
    ) -> None:
        self.name, self.width, self.eps, self._feeds = name, width, eps, feeds
        dtype = torch.float32 if float32 else build.dtype
        self.weight = torch.empty(0, dtype=dtype, device=build.device)  # until it is loaded
        self._ops = build.ops

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"{self.name}.weight": (self.width,)}

    def load(self, name: str, tensor: torch.Tensor | LazyTensor) -> None:
        self.weight = tensor[(slice(None),)].to(self.weight)

    def num_bytes(self) -> int:
        return self.width * self.weight.itemsize

    def __call__(self, x: torch.Tensor | ExpertOutputs, residual: torch.Tensor | None = None) -> torch.Tensor:
        """The norm of x, or of residual + x, which is written to `residual`."""
        if isinstance(x, ExpertOutputs):
            return self._ops.combine_and_norm(x, self.weight, self.eps, residual)
        return self._ops.rms_norm(x, self.weight, self.eps, residual)

    def rows(self, x: torch.Tensor | ExpertOutputs, residual: torch.Tensor | None) -> Rows:
        """Likewise, as the layer that it feeds takes them."""
        norm_and_round = None if self._feeds is None else self._feeds.weight.norm_and_round
        if norm_and_round is None:
            return self(x, residual)
        x = self._ops.combine(*x) if isinstance(x, ExpertOutputs) else x
        return norm_and_round(x, self.weight, self.eps, residual)
