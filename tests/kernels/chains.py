"""A chain of calls as a layer has them, in which products take the rows of the call before them."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ssd.kernels.codes import Codes
from ssd.kernels.cpu.kernels import Kernels

HIDDEN, INNER, HEADS, HEAD_DIM, CONTEXT, BLOCK = 192, 200, 6, 32, 150, 16  # INNER: its last group is smaller
MOST_ROWS = 70


def quantized_layer(
    kernels: Kernels, dtype: torch.dtype, group: int, *, coarse: bool
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Rows [R, HIDDEN], R <= MOST_ROWS, as newest rows of one sequence -> rows of the same shape."""

    def packed(rows: int, depth: int, *, gated: bool = False) -> object:
        groups = -(-depth // group)
        values = torch.randint(0, 16, (rows, groups * group), dtype=torch.uint8)
        values[:, depth:] = 8  # zeros
        return kernels.pack_codes(
            Codes(values, torch.rand(rows, groups) + 0.5, "int4", depth), dtype, gated, coarse=coarse
        )

    torch.manual_seed(0)
    query, out = packed(HEADS * HEAD_DIM, HIDDEN), packed(HIDDEN, HEADS * HEAD_DIM)
    gate_up, down = packed(2 * INNER, HIDDEN, gated=True), packed(HIDDEN, INNER)
    norm = torch.rand(HIDDEN).mul(0.02).to(dtype)
    k, v = torch.randn(2, -(-CONTEXT // BLOCK), BLOCK, HEADS // 3, HEAD_DIM).to(dtype)
    blocks, row, context = (torch.arange(len(k)).int()[None], torch.zeros(1).int(), torch.tensor([CONTEXT]).int())
    starts = {rows: torch.tensor([0, rows]).int() for rows in range(1, MOST_ROWS + 1)}

    def layer(x: torch.Tensor) -> torch.Tensor:
        q = kernels.linear(kernels.rms_norm(x, norm, 1e-5), query).view(len(x), HEADS, HEAD_DIM)
        seen = kernels.paged_attention(q, k, v, starts[len(x)], context, blocks, row, HEAD_DIM**-0.5)
        y = kernels.linear(seen.view(len(x), -1), out)
        return kernels.linear(kernels.linear(kernels.rms_norm(y, norm, 1e-5), gate_up), down)

    return layer
