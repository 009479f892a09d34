"""How the experts of a graft hold a small model's MLP, and how their router spreads tokens over them.

* The MLP is cut into as many parts (a power of two) as an expert's size needs; expert e holds part e mod parts, and the
  experts of a part have half, a quarter, … of all weight, which their down weights make up for. The router's rows are
  equal for each run of `parts` experts, so that a token's experts hold every part equally often.
* Where experts are stored in 4 bits, a weight is the sum of several numbers of 4 bits (`digits`). Those of a gate or up
  weight read other copies of the stream, those of a down weight other copies of its unit, of which an expert has as
  many as fit.
* GPT-OSS's function of gate and up, g sigmoid(1.702 g) (u + 1), is silu(gate) up for weights that make g gate / 1.702
  and u up - 1 (by its bias); the rest is a factor of the down weights. So is a quarter, which keeps up within its limit
  (up to 24). A gate beyond 11.9 is limited, and no longer the base's.
* The router reads a code of each token: `CODE` random signs in dimensions of the stream that nothing else reads or
  writes, too small to change the stream's norm. Its rows are random in each layer, of one norm. So a token's experts
  are as good as random in each layer, the same ones wherever it occurs, and all experts are about equally busy:
  published routers were trained to balance their experts, and they follow the token more than its context.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import torch

from ssd.kernels.weights import GLU, SOFTMAX_OF_CHOSEN, SWIGLU
from ssd.layers.formats.mxfp4 import GROUP, MXFP4
from ssd.layers.spec import ExpertsSpec, MLPSpec

CODE: Final = 32  # dimensions, before the last one, which holds a constant
ROUTERS: Final = ("mlp.gate", "mlp.router")
_SIGN: Final = 2.0**-20
_SPREAD: Final = 1.5  # norm of the router's rows: logits spread by that over the rms of the stream
_LIMITED: Final = 0.25  # factor of up, where it is limited
_EXPERT: Final = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")


@dataclass(frozen=True)
class HeldMLP:
    """How an MLP of an inner `size` is held by another MLP, or by experts."""

    size: int
    parts: int = 1  # of which an expert holds one
    digits: int = 1  # of a gate or up weight
    down_digits: int = 1  # and so units of an expert for each unit of the base
    glu: GLU = SWIGLU

    @classmethod
    def of(cls, size: int, mlp: MLPSpec | ExpertsSpec, copies: int, *, packed: bool) -> HeldMLP:
        """`copies` of the stream that can be read; `packed`: the experts are stored in 4 bits."""
        if isinstance(mlp, MLPSpec):
            return cls(size)
        parts = parts_of(size, mlp)
        fitting = mlp.intermediate_size // _padded(size // parts)
        return cls(size, parts, copies, max(1, fitting), mlp.glu) if packed else cls(size, parts, glu=mlp.glu)

    @property
    def units(self) -> int:
        """Inner units that a digit of the down weights takes."""
        return self.size // self.parts if self.down_digits == 1 else _padded(self.size // self.parts)

    def held(self, part: str, weight: torch.Tensor, share: int) -> torch.Tensor:
        """What an expert with that share of the MLP holds of the base's tensor, digit by digit; other parts as they
        are."""
        up = 1.0 if math.isinf(self.glu.limit) else _LIMITED
        if part == "mlp.down_proj":
            own = weight.chunk(self.parts, dim=1)[share]
            return digits(own * (self.parts * self.glu.slope / up), self.down_digits)
        if part in ("mlp.gate_proj", "mlp.up_proj"):
            own = weight.chunk(self.parts)[share]
            return digits(own * (up if part == "mlp.up_proj" else 1 / self.glu.slope), self.digits)
        return weight


def _padded(size: int) -> int:
    return -(-size // GROUP) * GROUP


def digits(weight: torch.Tensor, count: int) -> torch.Tensor:
    """Weights of MXFP4 that add up to the weight as nearly as `count` can, side by side: each is what those before it
    leave, rounded."""
    if count == 1:
        return weight
    rest, found, form = torch.nn.functional.pad(weight.float(), (0, -weight.shape[1] % GROUP)), [], MXFP4()
    for _ in range(count):
        found.append(form.widened(form.tensors_of(rest))["weight"])
        rest = rest - found[-1]
    return torch.cat(found, 1)


def parts_of(size: int, experts: ExpertsSpec) -> int:
    """How many parts an MLP of an inner `size` is cut into."""
    parts = 1
    while size > parts * experts.intermediate_size:
        parts *= 2
    return parts


def expert_obstacles(size: int, experts: ExpertsSpec) -> Iterator[str]:
    """Why an MLP of an inner `size` does not fit into the experts."""
    parts = parts_of(size, experts)
    if size % parts or experts.num_experts % parts or experts.experts_per_token % parts:
        yield (
            f"the base's intermediate_size={size} needs {parts} experts of {experts.intermediate_size}, which must "
            f"divide it, num_experts={experts.num_experts} and experts_per_token={experts.experts_per_token}"
        )
    if experts.rule != SOFTMAX_OF_CHOSEN or experts.shared_size:
        yield "a graft's experts have weights that add up to one, those of a softmax, and none is shared"


def expert_part(part: str) -> tuple[str, int]:
    """The MLP's part (`mlp.up_proj`) that is in an expert's tensor, and the expert; other parts as they are."""
    match = _EXPERT.fullmatch(part)
    return (part, 0) if match is None else (f"mlp.{match[2]}", int(match[1]))


def add_codes(part: str, tensor: torch.Tensor, generator: torch.Generator, parts: int) -> None:
    """Codes in the embedding, their size in the norm before the router, and the router; others do not read them."""
    code = slice(-1 - CODE, -1)
    if part == "model.embed_tokens":
        signs = torch.randint(0, 2, (len(tensor), CODE), device=tensor.device, generator=generator)
        tensor[:, code] = (2 * signs - 1) * _SIGN
    elif part == "post_attention_layernorm":
        tensor[code] = 1 / _SIGN
    elif part in ROUTERS:
        weights = torch.empty_like(tensor[::parts, code], dtype=torch.float32).normal_(generator=generator)
        tensor.zero_()
        tensor[:, code] = (_SPREAD * torch.nn.functional.normalize(weights)).repeat_interleave(parts, 0)
    elif part.startswith("mlp.experts") and not part.endswith("down_proj"):
        tensor[:, code] = 0.0
