"""A mixture of experts: a router, and gated MLPs of which it chooses some for each token.

The experts' weights are one gate/up weight and one down weight, whose parts are the tensors of single experts. Ranks
split the experts' inner dimension; all of them compute the same routing. What the experts of a token give is added in
the router's order, the largest weight first, whatever other tokens there are.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ssd.kernels.ops import ExpertOutputs
from ssd.layers.formats import Use
from ssd.layers.linear import ColumnLinear, Linear, RowLinear
from ssd.layers.parameter import Build, Parameter
from ssd.layers.spec import ExpertsSpec


class Router(Linear):
    """Logits of all experts, on every rank, as `Ops.route` takes them."""

    def cut(self, rows: int) -> tuple[slice, slice]:
        return slice(None), slice(None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight.router(x, self.bias)


class Experts:
    """The sum of w_e * down_e(glu(gate_e(x), up_e(x))) over the experts e of each token."""

    def __init__(self, build: Build, name: str, spec: ExpertsSpec, hidden_size: int) -> None:
        """`name`: the layer's."""
        names, inner, count = spec.names, spec.intermediate_size, spec.num_experts
        block = f"{name}.{names.block}"
        each = [f"{block}.experts.{i}" for i in range(count)]
        self.spec, self.ops, self.tp = spec, build.ops, build.tp
        self.router = Router(build, {f"{block}.{names.router}": count}, hidden_size, bias=spec.bias)
        gates_ups = {f"{expert}.{part}": inner for part in (names.gate, names.up) for expert in each}
        downs = {f"{expert}.{names.down}": hidden_size for expert in each}
        self.gate_up = ColumnLinear(build, gates_ups, hidden_size, bias=spec.bias, use=Use(gated=True, experts=count))
        self.down = RowLinear(build, downs, inner, bias=spec.bias, use=Use(experts=count))

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.router, self.gate_up, self.down)

    def __call__(self, x: torch.Tensor) -> torch.Tensor | ExpertOutputs:
        """Ranks add up what they have; without them, the norm that follows does."""
        spec, ops, wide = self.spec, self.ops, self.tp.group is not None
        routing = ops.route(self.router(x), spec.experts_per_token, chosen=spec.softmax_of_chosen)
        inner = self.gate_up.weight.expert_linear(x, routing, self.gate_up.bias, glu=spec.glu)
        bias = self.down.bias if self.tp.rank == 0 else None
        outputs = self.down.weight.expert_linear(inner, routing, bias, float32=wide)
        if not wide:
            return ExpertOutputs(outputs, routing)
        return self.tp.sum(ops.combine(outputs, routing, float32=True), x.dtype)
