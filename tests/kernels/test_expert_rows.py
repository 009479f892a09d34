"""The CUDA kernel for few rows of experts in MXFP4 on a CPU, in an emulator (`emulated_ptx.h`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from conftest import mostly_slow
from reference_ops import ReferenceOps
from stored_codes import some_codes

from ssd.kernels.codes import Codes, dequantize
from ssd.kernels.cuda import expert_rows as kernel
from ssd.kernels.triton.experts import route
from ssd.kernels.triton.packing import PackedCodes, in_strips, pack, paired
from ssd.kernels.weights import GLU, SOFTMAX_OF_CHOSEN, Routing
from tests.kernels.emulation import COMPILER, addresses, constant, emulated_kernel, params_of_source

CPU = torch.device("cpu")


def as_on_a_gpu(codes: Codes) -> PackedCodes:
    """Packed as for a GPU."""
    weight = pack(codes, torch.bfloat16)
    in_rows = weight.words.permute(1, 3, 0, 2, 4).reshape(-1, weight.width)
    return replace(weight, words=in_strips(paired(in_rows, codes.type), weight.block), paired=True)


def emulated(
    x: torch.Tensor,
    weight: PackedCodes,
    routing: Routing,
    bias: torch.Tensor | None,
    *,
    tiles: int,
    halves: int = 1,
    glu: GLU | None = None,
    blocks: int = 3,
) -> torch.Tensor:
    """`expert_rows.linear` with float32 outputs."""
    library = emulated_kernel(kernel.SOURCE, "product", {"DEPTH": weight.depth, "TILES": tiles})
    y = torch.full((len(routing.order), weight.columns // routing.num_experts // (1 if glu is None else 2)), torch.nan)
    params = kernel.params_of(x, weight, routing, bias, 8 * tiles * halves, glu, y)
    threads, shared = constant(library, "threads"), constant(library, "shared_bytes")
    assert library.launch(addresses(params), blocks, threads, shared, 0), "a wait is endless"
    return y


def routed(logits: torch.Tensor, count: int) -> Routing:
    """By Triton's kernel, on a GPU if there is one."""
    found = route(logits.to("cuda" if torch.cuda.is_available() else "cpu"), count, SOFTMAX_OF_CHOSEN)
    tensors = {name: each.cpu() for name, each in vars(found).items() if isinstance(each, torch.Tensor)}
    return replace(found, **tensors)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("rows", "depth", "tiles", "halves", "glu"),
    mostly_slow(
        [
            (9, 320, 1, 1, GLU(1.702, 7.0, 1.0)),
            (20, 256, 2, 1, None),
            (40, 320, 4, 1, None),
            (80, 320, 4, 2, GLU(1.702, 7.0, 1.0)),
        ],
        fast=[(9, 320, 1, 1, GLU(1.702, 7.0, 1.0))],
    ),
)
def test_products(rows: int, depth: int, tiles: int, halves: int, glu: GLU | None) -> None:
    """A block of threads with several tiles and parts of one, more strips than warps, experts without a row and with
    several tiles, tiles that are cut in two, a depth that is no whole block."""
    torch.manual_seed(0)
    experts, columns = 5, 16 * 26
    codes = some_codes("fp4", experts * columns, depth, 32, offsets=False, device=CPU)
    logits = torch.randn(rows, experts)
    logits[:, 3], logits[:, 1] = -9.0, 9.0
    routing = routed(logits, 2)
    pairs = glu is None  # x has a row for each of them
    x, bias = torch.randn(rows * (2 if pairs else 1), depth).bfloat16() / 16, torch.randn(experts * columns).bfloat16()
    weight = dequantize(codes, torch.float32)
    if glu is not None:  # gate and up rows in turns
        codes = codes.rows(torch.stack(torch.arange(len(weight)).chunk(2), dim=1).flatten())
    expected = ReferenceOps().prepare(weight).expert_linear(x.float(), routing, bias.float(), glu=glu)
    found = emulated(x, as_on_a_gpu(codes), routing, bias, tiles=tiles, halves=halves, glu=glu)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_parameters_have_the_source_s_fields_in_its_order() -> None:
    assert params_of_source(kernel.SOURCE) == [name for name, _ in kernel.Params._fields_]
