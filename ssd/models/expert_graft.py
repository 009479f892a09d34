"""How the experts of a graft hold a small model's MLP, and how their router spreads tokens over them.

* The MLP is cut into as many parts (a power of two) as an expert's size needs; expert e holds part e mod parts, and the
  experts of a part have half, a quarter, … of all weight, which their down weights make up for. The router's rows are
  equal for each run of `parts` experts, so that a token's experts hold every part equally often.
* The router reads a code of each token: `CODE` random signs in dimensions of the stream that nothing else reads or
  writes, too small to change the stream's norm. Its rows are random in each layer, of one norm. So a token's experts
  are as good as random in each layer, the same ones wherever it occurs, and all experts are about equally busy:
  published routers were trained to balance their experts, and they follow the token more than its context.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

import torch

from ssd.layers.spec import ExpertsSpec

CODE: Final = 32  # dimensions, before the last one, which holds a constant
_SIGN: Final = 2.0**-20
_SPREAD: Final = 1.5  # norm of the router's rows: logits spread by that over the rms of the stream
_EXPERT: Final = re.compile(r"mlp\.experts\.(\d+)\.(\w+)")


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
    if not experts.softmax_of_chosen or experts.bias:
        yield "a graft's experts have weights that add up to one, and no biases"


def expert_part(part: str) -> tuple[str, int]:
    """The MLP's part (`mlp.up_proj`) that is in an expert's tensor, and the expert; other parts as they are."""
    match = _EXPERT.fullmatch(part)
    return (part, 0) if match is None else (f"mlp.{match[2]}", int(match[1]))


def held_part(part: str, weight: torch.Tensor, expert: int, parts: int) -> torch.Tensor:
    """What an expert holds of the base's tensor; other parts as they are."""
    if part == "mlp.down_proj":
        return weight.chunk(parts, dim=1)[expert % parts] * parts
    return weight.chunk(parts)[expert % parts] if part in ("mlp.gate_proj", "mlp.up_proj") else weight


def add_codes(part: str, tensor: torch.Tensor, generator: torch.Generator, parts: int) -> None:
    """Codes in the embedding, their size in the norm before the router, and the router; others do not read them."""
    code = slice(-1 - CODE, -1)
    if part == "model.embed_tokens":
        signs = torch.randint(0, 2, (len(tensor), CODE), device=tensor.device, generator=generator)
        tensor[:, code] = (2 * signs - 1) * _SIGN
    elif part == "post_attention_layernorm":
        tensor[code] = 1 / _SIGN
    elif part == "mlp.gate":
        weights = torch.empty_like(tensor[::parts, code], dtype=torch.float32).normal_(generator=generator)
        tensor.zero_()
        tensor[:, code] = (_SPREAD * torch.nn.functional.normalize(weights)).repeat_interleave(parts, 0)
    elif part.startswith("mlp.experts") and not part.endswith("down_proj"):
        tensor[:, code] = 0.0
