"""The gated MLP of one layer."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ssd.kernels.weights import Rows
from ssd.layers.formats import Use
from ssd.layers.linear import ColumnLinear, RowLinear
from ssd.layers.parameter import Build, Parameter
from ssd.layers.spec import MLPSpec


class MLP:
    """down(silu(gate(x)) * up(x)); gate and up are one product."""

    def __init__(self, build: Build, name: str, spec: MLPSpec, hidden_size: int) -> None:
        inner = spec.intermediate_size
        parts = {f"{name}.gate_proj": inner, f"{name}.up_proj": inner}
        self.gate_up = ColumnLinear(build, parts, hidden_size, bias=spec.bias, use=Use(gated=True))
        self.down = RowLinear(build, {f"{name}.down_proj": hidden_size}, inner, bias=spec.bias)

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.gate_up, self.down)

    def __call__(self, x: Rows) -> torch.Tensor:
        return self.down(self.gate_up(x))

    def partial_sums(self, x: Rows) -> torch.Tensor:
        """This rank's part of the result, in float32."""
        return self.down.partial_sums(self.gate_up(x))
