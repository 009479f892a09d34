"""The CUDA kernel for few rows of experts in groups on a CPU, in an emulator (`emulated_ptx.h`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from reference_ops import ReferenceOps
from stored_codes import some_codes

from ssd.kernels.codes import Codes, CodeType, decoded, dequantize
from ssd.kernels.cuda import expert_rows as kernel
from ssd.kernels.triton.experts import route
from ssd.kernels.triton.packing import PackedCodes, in_strips, pack, paired
from ssd.kernels.weights import GLU, Routing, RoutingRule
from tests.kernels.emulation import COMPILER, addresses, constant, emulated_kernel, params_of_source

CPU = torch.device("cpu")
Format = tuple[CodeType, int, torch.dtype | None]  # type, group, type of the scales as they are packed
FORMATS: list[Format] = [
    ("fp4", 32, None),
    ("int4", 32, torch.bfloat16),
    ("int4", 32, torch.float32),
    ("int4", 128, torch.float32),
    ("int4", 128, torch.bfloat16),
    ("fp8", 128, torch.float32),
    ("fp8", 32, torch.float32),
]


def as_on_a_gpu(codes: Codes) -> PackedCodes:
    """Packed as for a GPU."""
    weight = pack(codes, torch.bfloat16, weights=False)
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
    library = emulated_kernel(kernel.SOURCE, "product", kernel.Variant.of(weight).macros(tiles))
    y = torch.full((len(routing.order), weight.columns // routing.num_experts // (1 if glu is None else 2)), torch.nan)
    params = kernel.params_of(x, weight, routing, bias, 8 * tiles * halves, glu, y)
    threads, shared = constant(library, "threads"), constant(library, "shared_bytes")
    assert library.launch(addresses(params), blocks, threads, shared, 0), "a wait is endless"
    return y


def stored(form: Format, rows: int, depth: int) -> Codes:
    code, group, scale = form
    codes = some_codes(code, rows, depth, group, offsets=False, device=CPU)
    return replace(codes, scales=codes.scales.bfloat16().float()) if scale is torch.bfloat16 else codes


def summed(x: torch.Tensor, codes: Codes) -> torch.Tensor:
    """A row times the codes, sixteen at a time; groups one after the other, each with its scale."""
    values, total = decoded(codes.values, codes.type), torch.zeros(len(codes.values))
    for start in range(0, codes.depth, codes.group):
        of_group = torch.zeros_like(total)
        for k in range(start, start + codes.group, 16):
            part = torch.zeros_like(total)
            for i in range(k, k + 16):
                part += x[i].float() * values[:, i]
            of_group += part
        # Products in float64 are exact: one rounding, as of a fused multiply-add.
        total = (of_group.double() * codes.scales[:, start // codes.group].double() + total.double()).float()
    return total


def routed(logits: torch.Tensor, count: int, shared: int = 0) -> Routing:
    """By Triton's kernel, on a GPU if there is one."""
    rule = RoutingRule(shared=shared)
    found = route(logits.to("cuda" if torch.cuda.is_available() else "cpu"), count, rule)
    tensors = {name: each.cpu() for name, each in vars(found).items() if isinstance(each, torch.Tensor)}
    return replace(found, **tensors)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("form", "rows", "depth", "tiles", "halves", "glu"),
    mostly_slow(
        [
            (form, *case)
            for form in FORMATS
            for case in (
                (9, 448, 1, 1, GLU(1.702, 7.0, 1.0)),
                (20, 256, 2, 1, None),
                (40, 448, 4, 1, None),
                (80, 448, 4, 2, GLU(1.702, 7.0, 1.0)),
            )
        ],
        fast=[(FORMATS[0], 9, 448, 1, 1, GLU(1.702, 7.0, 1.0))],
    ),
)
def test_products(form: Format, rows: int, depth: int, tiles: int, halves: int, glu: GLU | None) -> None:
    """A block of threads with several tiles and parts of one, more strips than warps, experts without a row and with
    all of them in several tiles, tiles that are cut in two, a depth that is no whole block."""
    torch.manual_seed(0)
    experts, columns = 5, 16 * 26
    depth -= depth % form[1]
    codes = stored(form, experts * columns, depth)
    assert kernel.fits(codes, experts)
    logits = torch.randn(rows, experts - 1)
    logits[:, 3] = -9.0
    routing = routed(logits, 1, shared=1)
    pairs = glu is None  # x has a row for each of them
    x, bias = torch.randn(rows * (2 if pairs else 1), depth).bfloat16() / 16, torch.randn(experts * columns).bfloat16()
    weight = dequantize(codes, torch.float32)
    if glu is not None:  # gate and up rows in turns
        codes = codes.rows(torch.stack(torch.arange(len(weight)).chunk(2), dim=1).flatten())
    expected = ReferenceOps().prepare(weight).expert_linear(x.float(), routing, bias.float(), glu=glu)
    found = emulated(x, as_on_a_gpu(codes), routing, bias, tiles=tiles, halves=halves, glu=glu)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("form", "rows", "tiles"),
    mostly_slow(
        [(form, rows, tiles) for form in FORMATS[1:] for rows, tiles in ((8, 1), (20, 2), (20, 4))],
        fast=[(FORMATS[1], 8, 1)],
    ),
)
def test_sums_are_in_one_order(form: Format, rows: int, tiles: int) -> None:
    """To the bit, with tiles of any number of rows, and scales that are stored in their type."""
    experts, columns, depth = 3, 32, 384
    codes = stored(form, experts * columns, depth)
    weight = as_on_a_gpu(codes)
    assert weight.scales is not None
    assert weight.scales.dtype is form[2]
    x, routing = torch.randn(rows, depth).bfloat16(), routed(torch.randn(rows, experts), 1)
    own = [codes.rows(slice(e * columns, (e + 1) * columns)) for e in routing.experts.flatten().tolist()]
    expected = torch.stack([summed(*each) for each in zip(x, own, strict=True)])
    assert same_bits(emulated(x, weight, routing, None, tiles=tiles), expected)


def test_parameters_have_the_source_s_fields_in_its_order() -> None:
    assert params_of_source(kernel.SOURCE) == [name for name, _ in kernel.Params._fields_]
