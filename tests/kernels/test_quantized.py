"""Quantised weights: what rounding costs, and every kernel against the weight that the codes stand for."""

from __future__ import annotations

import pytest
import torch

from ssd.kernels.cpu_ops import CpuOps
from ssd.kernels.ops import Ops
from ssd.kernels.quantized import Format, dequantize, quantize, quantized_bytes
from ssd.kernels.reference import ReferenceOps
from ssd.layers.formats import Use
from ssd.layers.formats.rounded import Rounded

FORMATS: tuple[Format, ...] = ("fp8", "int8", "int4")
CUDA = torch.cuda.is_available()
ODD_SHAPES = [
    (1, 70, 96),
    pytest.param(5, 64, 128, marks=pytest.mark.slow),
    pytest.param(20, 130, 200, marks=pytest.mark.slow),
    (70, 96, 64),
    (3, 48, 512),
    (2, 34, 37),
]  # rows, outputs, depth


def make_ops(kind: str) -> tuple[Ops, torch.device, list[torch.dtype]]:
    """Kernels of a kind, where they run, and the types that they run with there."""
    if kind == "plain":
        return ReferenceOps(), torch.device("cpu"), [torch.float32, torch.bfloat16]
    if kind == "c":
        ops = CpuOps.load()
        if ops is None:
            pytest.skip("no C compiler")
        return ops, torch.device("cpu"), [torch.float32, torch.bfloat16]
    triton_ops = pytest.importorskip("ssd.kernels.triton_ops", reason="triton is not installed")
    types = [torch.float32, torch.bfloat16, torch.float16] if CUDA else [torch.float32]  # as in test_triton_kernels
    device = torch.device("cuda" if CUDA else "cpu")
    return triton_ops.TritonOps(), device, types


def close(ours: torch.Tensor, theirs: torch.Tensor, dtype: torch.dtype) -> None:
    limit = 1e-5 if dtype is torch.float32 else 1e-2
    assert (ours.float() - theirs.float()).norm() <= limit * theirs.float().norm()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("form", "relative", "absolute"), [("fp8", 1 / 16, 2**-9), ("int8", 0, 0.5), ("int4", 0, 1.0)])
def test_rounding_errors(form: Format, relative: float, absolute: float, dtype: torch.dtype) -> None:
    """At most half a step; fp8's steps grow with the weight; int4 has no code for the weight opposite to -8."""
    torch.manual_seed(0)
    weight = torch.randn(40, 200).to(dtype)
    codes = quantize(weight, form)
    error = (dequantize(codes, torch.float32) - weight.float()).abs()
    steps = codes.scales.repeat_interleave(codes.group, 1)[:, :200].abs()
    assert (error <= (relative * weight.float().abs() + absolute * steps) * 1.001).all()
    assert error.norm() < {"fp8": 0.03, "int8": 0.01, "int4": 0.12}[form] * weight.float().norm()


@pytest.mark.parametrize("form", FORMATS)
def test_rows_of_zeros_and_of_any_size(form: Format) -> None:
    """Catches a division by zero and scales of 16 bits that overflow; a row has no part in the scales of others."""
    weight = torch.randn(4, 64) * torch.tensor([0.0, 2.0**-40, 1.0, 2.0**30])[:, None]
    found = dequantize(quantize(weight, form), torch.float32)
    assert torch.equal(found[0], weight[0])
    for row in (1, 2, 3):
        assert (found[row] - weight[row]).norm() < 0.12 * weight[row].norm()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize(("rows", "depth"), [(48, 2048), (70, 896), (33, 128)])
def test_bytes(form: Format, rows: int, depth: int) -> None:
    codes = quantize(torch.randn(rows, depth), form)
    stored = codes.values.nbytes // (2 if form == "int4" else 1) + codes.scales.nbytes
    assert quantized_bytes(rows, depth, form) == stored
    assert stored < rows * depth * (0.6 if form == "int4" else 1.1)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("kind", ["plain", "c", "triton"])
@pytest.mark.parametrize(("rows", "columns", "depth"), ODD_SHAPES)
def test_products(kind: str, form: Format, rows: int, columns: int, depth: int) -> None:
    """Odd sizes in every direction; bias and gate; rows of x that are not contiguous."""
    ops, device, types = make_ops(kind)
    torch.manual_seed(0)
    for dtype in types:
        x = torch.randn(rows, depth + 8).to(device, dtype)[:, :depth]
        weight, bias = torch.randn(columns, depth).to(device, dtype), torch.randn(columns).to(device, dtype)
        codes, reference = quantize(weight, form), ReferenceOps()
        rounded = dequantize(codes, torch.float32)
        wide, bias32 = x.float(), bias.float()
        prepared, gated = (ops.prepare_codes(codes, dtype, gated=each) for each in (False, True))
        close(ops.codes_linear(x, prepared), reference.linear(wide, rounded), dtype)
        close(ops.codes_linear(x, prepared, bias), reference.linear(wide, rounded, bias32), dtype)
        sums = ops.codes_linear(x, prepared, float32=True)
        assert sums.dtype is torch.float32
        close(sums, reference.linear(wide, rounded), dtype)
        close(ops.codes_linear(x, gated, gated=True), reference.gated_linear(wide, rounded), dtype)
        close(ops.codes_linear(x, gated, bias, gated=True), reference.gated_linear(wide, rounded, bias32), dtype)


@pytest.mark.parametrize("kind", ["plain", "c", "triton"])
def test_an_embedding_is_looked_up_unrounded(kind: str) -> None:
    """And is not quantised at all where no head shares it."""
    ops, device, _ = make_ops(kind)
    rounded = Rounded("int4")
    weight, tokens = torch.randn(50, 64, device=device), torch.tensor([3, 49, 0], device=device)
    for head in (True, False):
        use = Use(embedding=True, product=head)
        prepared = rounded.prepare([{"weight": weight}], ops, torch.float32, use)
        assert torch.equal(rounded.embedding(ops, prepared, tokens), weight[tokens])
        assert (prepared.codes is not None) == head


def test_every_kind_is_an_implementation_of_the_interface() -> None:
    ops: list[Ops] = [make_ops(kind)[0] for kind in ("plain", "c")]
    assert all(hasattr(each, name) for each in ops for name in vars(Ops) if not name.startswith("_"))
