"""The CUDA kernel for few rows of experts in MXFP4 on a CPU, in an emulator (`emulated_ptx.h`)."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import mostly_slow
from stored_codes import some_codes

from ssd.kernels import expert_rows as kernel
from ssd.kernels.ops import GLU, Routing
from ssd.kernels.packing import PackedCodes, in_strips, pack, packed_rows, paired
from ssd.kernels.quantized import Codes, dequantize
from ssd.kernels.reference import ReferenceOps
from tests.kernels.emulation import COMPILER, addresses, constant, emulated_kernel

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
    folder: Path,
    *,
    tiles: int,
    glu: GLU | None = None,
    blocks: int = 3,
) -> torch.Tensor:
    """`expert_rows.linear` with float32 outputs."""
    library = emulated_kernel(kernel.SOURCE, "product", {"DEPTH": weight.depth, "TILES": tiles}, folder / "kernel.so")
    columns = weight.columns // routing.num_experts // (1 if glu is None else 2)
    y = torch.full((routing.experts.numel(), columns), torch.nan)
    params = kernel.params_of(x, weight, routing, bias, glu, y)
    threads, shared = constant(library, "threads"), constant(library, "shared_bytes")
    assert library.launch(addresses(params), blocks, threads, shared, 0), "a wait is endless"
    return y


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("rows", "depth", "tiles", "glu"),
    mostly_slow(
        [
            (9, 320, 1, GLU(1.702, 7.0, 1.0)),
            (20, 256, 2, None),
            (40, 320, 4, None),
            (80, 320, 4, GLU(1.702, 7.0, 1.0)),
        ],
        fast=[(9, 320, 1, GLU(1.702, 7.0, 1.0))],
    ),
)
def test_products(rows: int, depth: int, tiles: int, glu: GLU | None, tmp_path: Path) -> None:
    """A block of threads with several tiles and parts of one, more strips than warps, experts without a row and with
    several tiles, a depth that is no whole block."""
    torch.manual_seed(0)
    experts, columns = 5, 16 * 26
    codes = some_codes("fp4", experts * columns, depth, 32, offsets=False, device=CPU)
    logits = torch.randn(rows, experts)
    logits[:, 3], logits[:, 1] = -9.0, 9.0
    routing = ReferenceOps().route(logits, 2, chosen=True)
    pairs = glu is None  # x has a row for each of them
    x, bias = torch.randn(rows * (2 if pairs else 1), depth).bfloat16() / 16, torch.randn(experts * columns).bfloat16()
    weight = dequantize(codes, torch.float32)
    if glu is not None:  # gate and up rows in turns
        codes = codes.rows(torch.stack(torch.arange(len(weight)).chunk(2), dim=1).flatten())
    expected = ReferenceOps().expert_linear(x.float(), weight, routing, bias.float(), glu=glu)
    found = emulated(x, as_on_a_gpu(codes), routing, bias, tmp_path, tiles=tiles, glu=glu)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("tiles", mostly_slow([1, 2, 4], fast=[2]))
def test_a_row_has_the_same_bits_in_any_company(tiles: int, tmp_path: Path) -> None:
    """With other rows of its experts, by another kernel, and on other numbers of multiprocessors."""
    torch.manual_seed(0)
    codes = some_codes("fp4", 5 * 96, 320, 32, offsets=False, device=CPU)
    weight, logits, x = as_on_a_gpu(codes), torch.randn(40, 5), torch.randn(40, 320).bfloat16()
    index = torch.randperm(40)[:9]
    found = []
    for own, size, blocks in ((torch.arange(40), tiles, 7), (index, 1, 2)):
        routing, folder = ReferenceOps().route(logits[own], 2, chosen=True), tmp_path / str(blocks)
        folder.mkdir()
        y = emulated(x[own], weight, routing, None, folder, tiles=size, glu=GLU(), blocks=blocks)
        found.append(y.view(len(own), -1))
    assert torch.equal(found[0][index], found[1])


def test_parameters_have_the_source_s_fields_in_its_order() -> None:
    body = re.search(r"struct Params {(.*?)\n};", kernel.SOURCE.read_text(encoding="utf-8"), re.DOTALL)
    assert body is not None
    code = re.sub(r"//[^\n]*", "", body[1])
    names = [name for line in code.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
    assert names == [name for name, _ in kernel.Params._fields_]


def test_rows_of_a_weight_in_strips_are_its_own() -> None:
    codes = some_codes("fp4", 48, 320, 32, offsets=False, device=CPU)
    index = torch.tensor([0, 47, 17, 16])
    assert torch.equal(packed_rows(as_on_a_gpu(codes), index), dequantize(codes, torch.bfloat16)[index])
