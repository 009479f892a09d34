"""A mixture of experts: a router, and gated MLPs of which it chooses some for each token.

The experts' weights are one gate/up weight and one down weight, whose parts are the tensors of single experts. Ranks
split the experts' inner dimension; all of them compute the same routing. What the experts of a token give is added in
the router's order, the largest weight first, whatever other tokens there are. A shared expert comes last, with weight
1: it is one more of these experts if it has their size and formats, else an MLP beside them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar

import torch

from ssd.kernels.ops import ExpertOutputs
from ssd.kernels.weights import SWIGLU, Rows
from ssd.layers.formats import Use
from ssd.layers.linear import ColumnLinear, ReplicatedLinear, RowLinear
from ssd.layers.mlp import MLP
from ssd.layers.parameter import Build, LazyTensor, Parameter
from ssd.layers.spec import ExpertsSpec, MLPSpec


class Router(ReplicatedLinear):
    """Logits of all experts, as `Ops.route` takes them."""

    def __call__(self, x: Rows) -> torch.Tensor:
        assert isinstance(x, torch.Tensor)
        return self.weight.router(x, self.bias)


class Correction:
    """What a router adds to the sigmoid of each expert's logit before it chooses."""

    loaded: ClassVar[tuple[str, ...]] = ("numbers",)

    def __init__(self, build: Build, name: str, num_experts: int) -> None:
        self.name, self.num_experts = name, num_experts
        self.numbers: torch.Tensor | None = None  # float32, until they are loaded
        self._device = build.device

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.name: (self.num_experts,)}

    def load(self, name: str, tensor: torch.Tensor | LazyTensor) -> None:
        self.numbers = tensor[(slice(None),)].to(self._device, torch.float32)

    def num_bytes(self) -> int:
        return self.num_experts * torch.float32.itemsize


class Experts:
    """The sum of w_e * down_e(glu(gate_e(x), up_e(x))) over the experts e of each token, and the shared experts."""

    def __init__(self, build: Build, name: str, spec: ExpertsSpec, hidden_size: int) -> None:
        """`name`: the layer's."""
        names, inner, count = spec.names, spec.intermediate_size, spec.num_experts
        block = f"{name}.{names.block}"
        each, shared = [f"{block}.experts.{i}" for i in range(count)], f"{block}.shared_experts"
        if one_more := _alike(build, shared, each[0], spec):
            each.append(shared)
        self.spec, self.ops, self.tp, self.rule = spec, build.ops, build.tp, spec.rule._replace(shared=int(one_more))
        self.router = Router(build, {f"{block}.{names.router}": count}, hidden_size, bias=spec.bias)
        gates_ups = {f"{expert}.{part}": inner for part in (names.gate, names.up) for expert in each}
        downs = {f"{expert}.{names.down}": hidden_size for expert in each}
        uses = Use(gated=True, experts=len(each)), Use(experts=len(each))
        self.gate_up = ColumnLinear(build, gates_ups, hidden_size, bias=spec.bias, use=uses[0])
        self.down = RowLinear(build, downs, inner, bias=spec.bias, use=uses[1])
        self.correction = self.shared = None
        if spec.rule.sigmoid:
            self.correction = Correction(build, f"{block}.{names.router}.e_score_correction_bias", count)
        if spec.shared_size and not one_more:
            self.shared = MLP(build, shared, MLPSpec(spec.shared_size), hidden_size)

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.router, self.gate_up, self.down)
        if self.correction is not None:
            yield self.correction
        if self.shared is not None:
            yield from self.shared.parameters()

    def __call__(self, x: torch.Tensor) -> torch.Tensor | ExpertOutputs:
        """Ranks add up what they have; without them, the norm that follows does."""
        spec, ops, wide = self.spec, self.ops, self.tp.group is not None
        correction = None if self.correction is None else self.correction.numbers
        routing = ops.route(self.router(x), spec.experts_per_token, self.rule, correction)
        inner = self.gate_up.weight.expert_linear(x, routing, self.gate_up.bias, glu=spec.glu)
        bias = self.down.bias if self.tp.rank == 0 else None
        outputs = self.down.weight.expert_linear(inner, routing, bias, float32=wide)
        shared = None if self.shared is None else self.shared.partial_sums(x)
        if not wide:
            return ExpertOutputs(outputs, routing, shared)
        return self.tp.sum(ops.combine(outputs, routing, shared, float32=True), x.dtype)


def _alike(build: Build, shared: str, routed: str, spec: ExpertsSpec) -> bool:
    """Whether the shared experts have the size, function and formats of one that is chosen."""
    if spec.shared_size != spec.intermediate_size or spec.bias or spec.glu != SWIGLU:
        return False
    parts = spec.names.gate, spec.names.up, spec.names.down
    return all(build.format_of(f"{shared}.{part}") == build.format_of(f"{routed}.{part}") for part in parts)
