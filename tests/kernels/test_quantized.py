"""Quantised weights: what rounding costs, and every kernel against the weight that the codes stand for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from reference_ops import ReferenceOps
from stored_codes import CODES, multiplied_weights, numbered_codes, some_codes

from ssd.kernels.codes import Codes, CodeType, Format, dequantize, quantize, quantized_bytes, rounded_rows
from ssd.kernels.cpu import library
from ssd.kernels.cpu.ops import CpuOps
from ssd.kernels.ops import Ops
from ssd.kernels.weights import RoundedRows, RowRounding, RowType, Weight
from ssd.layers.formats import Use
from ssd.layers.formats.rounded import Rounded

FORMATS: tuple[Format, ...] = ("fp8", "int8", "int4")
CUDA = torch.cuda.is_available()
KINDS = ("plain", "c", "triton")
ODD_SHAPES = [
    (1, 70, 96),
    (5, 64, 128),
    (20, 130, 200),
    (70, 96, 64),
    (3, 48, 512),
    (2, 34, 37),
]  # rows, outputs, depth


def make_ops(kind: str) -> tuple[Ops, torch.device, list[torch.dtype]]:
    """Kernels of a kind, where they run, and the types that they run with there."""
    if kind == "plain":
        return ReferenceOps(), torch.device("cpu"), [torch.float32, torch.bfloat16]
    if kind == "c":
        return CpuOps(library.load()), torch.device("cpu"), [torch.float32, torch.bfloat16]
    triton_ops = pytest.importorskip("ssd.kernels.triton.ops", reason="triton is not installed")
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
    torch.manual_seed(0)
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
@pytest.mark.parametrize(
    ("kind", "rows", "columns", "depth"),
    mostly_slow(
        [(kind, *shape) for kind in KINDS for shape in (ODD_SHAPES[2::2] if CUDA and kind == "triton" else ODD_SHAPES)],
        fast=[(k, *ODD_SHAPES[i]) for k in KINDS for i in (0, 3, 4, 5) if CUDA or k != "triton" or i == 5],
    ),
)
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
        expected, both = (reference.prepare(rounded, gated=each) for each in (False, True))
        close(prepared.linear(x), expected.linear(wide), dtype)
        close(prepared.linear(x, bias), expected.linear(wide, bias32), dtype)
        sums = prepared.linear(x, float32=True)
        assert sums.dtype is torch.float32
        close(sums, expected.linear(wide), dtype)
        close(gated.linear(x), both.linear(wide), dtype)
        close(gated.linear(x, bias), both.linear(wide, bias32), dtype)


# One of each way that kernels read codes; Triton's interpreter takes seconds for each, and so does its compiler.
FEW = [("int4", 128, False)]
FEW += [("fp8", 0, False), ("uint4", 64, True), ("fp4", 32, False), ("int8", 16, False)] if CUDA else []


def stored_codes(*kinds: str) -> pytest.MarkDecorator:
    """On a GPU, `tests/gpu/test_gpu_quantized.py` has all of them for Triton, at real sizes."""
    cases = [(kind, *case) for kind in kinds for case in (FEW if CUDA and kind == "triton" else CODES)]
    fast = [case for case in cases if case[0] != "triton" or case[1:] in FEW]
    return pytest.mark.parametrize(("kind", "code", "group", "offsets"), mostly_slow(cases, fast))


@pytest.mark.parametrize(
    "row_scales", mostly_slow(["none", "row", "group"], fast={"none", "group", *(["row"] if CUDA else [])})
)
@stored_codes("plain", "c", "triton")
def test_products_of_stored_codes(kind: str, code: CodeType, group: int, offsets: bool, row_scales: str) -> None:
    """Every type of codes with scales of rows or groups, offsets, and rows that were scaled; gate and bias."""
    ops, device, types = make_ops(kind)
    depth, columns = 512, 38
    codes = some_codes(code, columns, depth, group or depth, offsets=offsets, device=device)
    if kind == "triton" and row_scales != "none" and (group or row_scales == "group"):
        pytest.skip("rows of weights in groups are widened again: see the next test")
    rounded, reference = dequantize(codes, torch.float32), ReferenceOps()
    for dtype in types:
        x, bias = torch.randn(5, depth).to(device, dtype), torch.randn(columns).to(device, dtype)
        wide, rows = x.float(), x
        if row_scales != "none":
            scales = torch.rand(5, depth // codes.group if row_scales == "group" else 1, device=device) + 0.5
            wide, rows = (wide.view(5, scales.shape[1], -1) * scales[:, :, None]).flatten(1), RoundedRows(x, scales)
        plain, gated = (ops.prepare_codes(codes, dtype, gated=each) for each in (False, True))
        close(plain.linear(rows, bias), reference.prepare(rounded).linear(wide, bias.float()), dtype)
        close(gated.linear(rows, bias), reference.prepare(rounded, gated=True).linear(wide, bias.float()), dtype)
        tokens = torch.tensor([3, columns - 1, 0, 3], device=device)
        found, expected = plain.embedding(tokens), rounded[tokens].to(dtype)
        if kind == "triton" and dtype is torch.bfloat16 and plain.packed.numbers is not None:
            expected = multiplied_weights(codes)[tokens]
        assert same_bits(found, expected) or (code == "fp4" and torch.equal(found, expected))  # which may have -0.0


@pytest.mark.parametrize("number", ["fp8", "int8"])
def test_rounded_rows_of_weights_in_groups_are_widened(number: RowType) -> None:
    """Before the product, as the weights are. By the kernels of a GPU."""
    ops, device, types = make_ops("triton")
    codes = some_codes("fp8", 40, 256, 128, offsets=False, device=device)
    for dtype in (each for each in types if each is not torch.float16):
        x, how = torch.randn(3, 256).to(device, dtype), RowRounding(number, group=128)
        rounded = rounded_rows(x, how)
        wide = (rounded.values.float().view(3, 2, 128) * rounded.scales[:, :, None]).flatten(1).to(dtype)
        found = ops.prepare_codes(codes, dtype, rows=how).linear(x, float32=True)
        close(found, ops.prepare_codes(codes, dtype).linear(wide, float32=True), torch.bfloat16)


@stored_codes("c", "triton")
def test_a_row_has_the_same_bits_in_any_company(kind: str, code: CodeType, group: int, offsets: bool) -> None:
    """Alone, among others, and at any place among them; with scales of rows, too. In bfloat16 on a GPU:
    `tests/gpu/test_gpu_quantized.py`."""
    ops, device, types = make_ops(kind)
    types = types[:1] if kind == "triton" else types
    depth, columns = 512, 70
    codes = some_codes(code, columns, depth, group or depth, offsets=offsets, device=device)
    for dtype in types:
        rounding = RowRounding(group=codes.group if group else None)
        weight, rounds = ops.prepare_codes(codes, dtype), ops.prepare_codes(codes, dtype, rows=rounding)
        x = torch.randn(70, depth).to(device, dtype)
        sums, scaled = weight.linear(x, float32=True), rounds.linear(x, float32=True)
        chosen = [[69], [*range(9)], [*range(1, 34)]]
        more = [[0], [5, 3], [*range(60, 70)], [*range(2, 67)]]
        for rows in chosen + more if kind == "c" or CUDA else chosen:  # the interpreter is slow
            index = torch.tensor(rows, device=device)
            assert same_bits(weight.linear(x[index], float32=True), sums[index])
            assert same_bits(rounds.linear(x[index], float32=True), scaled[index])


@pytest.mark.parametrize("kind", mostly_slow(FORMATS, fast=FORMATS if CUDA else {"int8"}))
def test_many_rows_are_multiplied_by_widened_codes(kind: CodeType, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some outputs, or segments of the depth, at a time, gated and not, with the bits of fewer rows on a GPU."""
    ops, device, types = make_ops("triton")
    module, weights = (pytest.importorskip(f"ssd.kernels.triton.{name}") for name in ("codes_linear", "weights"))
    depth, columns = 256, 36
    codes = some_codes(kind, columns, depth, depth, offsets=False, device=device)
    for dtype in types:
        x, bias = torch.randn(20, depth).to(device, dtype), torch.randn(columns).to(device, dtype)
        prepared = [ops.prepare_codes(codes, dtype, gated=each) for each in (False, True)]

        def products(
            x: torch.Tensor = x, bias: torch.Tensor = bias, prepared: list[Weight] = prepared
        ) -> list[torch.Tensor]:
            return [prepared[0].linear(x, float32=True), *(each.linear(x, bias) for each in prepared)]

        few = products()
        with monkeypatch.context() as patch:
            patch.setattr(module, "_WIDE_ROWS", 0)
            for each in (module, weights):
                patch.setattr(each, "_WIDE_COLUMNS", 16)
            patch.setattr("ssd.kernels.cuda.grouped_rows.takes", lambda *_: False)
            for wide, narrow in zip(products(), few, strict=True):
                close(wide, narrow, dtype)
                assert same_bits(wide, narrow) or not CUDA  # the interpreter adds up a whole tile at a time


@pytest.mark.parametrize("kept", mostly_slow([False, True], fast={False}))
def test_segments_of_many_rows_are_added_in_order(kept: bool) -> None:
    """Three of 1,280 inputs and one of 512; of weights that are widened for the product, and of a copy: with a bias,
    and gated."""
    _, device, _ = make_ops("triton")
    packing, weights, linear = (
        pytest.importorskip(f"ssd.kernels.triton.{name}") for name in ("packing", "weights", "linear")
    )
    columns = 48 if CUDA else 16
    codes = numbered_codes("uint4", columns, 4352, 32, True, "factors", device)
    dtype = torch.bfloat16 if CUDA else torch.float32  # as in make_ops
    packed = packing.pack(codes, dtype)
    wide = multiplied_weights(codes) if CUDA else dequantize(codes, dtype)
    assert packed.segment == 1280
    torch.manual_seed(0)
    rows = 70 if CUDA else 5  # few rows have a kernel of their own there
    x, bias = torch.randn(rows, 4352).to(device, dtype), torch.randn(columns).to(device, dtype)
    total = torch.zeros(rows, columns, device=device)
    for start in range(0, 4352, 1280):
        part = slice(start, start + 1280)
        total = total + linear.linear(x[:, part], wide[:, part].contiguous(), out_dtype=torch.float32)
    copy = wide if kept else None
    weight = weights.CodesWeight(packed, wide=copy)
    assert same_bits(weight.linear(x, float32=True), total)
    assert same_bits(weight.linear(x, bias), (total + bias.float()).to(dtype))
    gate, up = total.to(dtype)[:, ::2], total.to(dtype)[:, 1::2]
    close(weights.CodesWeight(packed, True, wide=copy).linear(x), torch.nn.functional.silu(gate) * up, dtype)


def test_scales_in_bfloat16_cost_little() -> None:
    """Beside rounding weights to 4 bits; docs/quantization.md says how little."""
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0)).view(64, -1, 32)
    least, most = weight.amin(2, keepdim=True), weight.amax(2, keepdim=True)
    scales = (most - least) / 15
    values = ((weight - least) / scales).round().clamp(0, 15).to(torch.uint8).flatten(1)
    codes = Codes(values, scales[..., 0], "uint4", 4096, least[..., 0].contiguous())
    exact = dequantize(codes, torch.float32)
    moved = (multiplied_weights(codes).float() - exact).norm() / (exact - weight.flatten(1)).norm()
    assert 0.05 < moved < 0.08


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("code", ["int8", "int4", "uint4"])
def test_rows_of_any_size(code: CodeType, dtype: torch.dtype) -> None:
    """Kernels that round rows to integers: rows of zeros, tiny, huge and not finite; large and small numbers of one
    group. What is not finite is not hidden, and stays in its row."""
    ops, device, _ = make_ops("c")
    codes = some_codes(code, 24, 96, 32, offsets=code == "uint4", device=device)
    torch.manual_seed(0)
    x = torch.randn(7, 96) * torch.tensor([1.0, 0.0, 1e-37, 1e30, 1.0, 1.0, 1.0])[:, None]
    x[4, 40], x[5, 70], x[6, 5] = float("nan"), float("-inf"), 1e4
    x = x.to(dtype)
    found = ops.prepare_codes(codes, dtype).linear(x, float32=True)
    expected = x.double() @ dequantize(codes, torch.float32).double().T
    limit = 1e-6 if dtype is torch.float32 else 2e-4  # below the rounding of x to bfloat16
    for row in (0, 1, 3, 6):
        assert (found[row] - expected[row]).norm() <= limit * expected[row].norm()
    assert (found[2] - expected[2]).abs().max() < 1e-32  # steps of 2^-121
    assert not found[4:6].isfinite().any()


@pytest.mark.parametrize("number", ["fp8", "int8"])
@pytest.mark.parametrize("kind", ["plain", "triton"])
def test_rows_are_rounded_by_themselves(kind: str, number: RowType) -> None:
    """To numbers of 8 bits, by scales of their own or a stored one; zeros, tiny and huge rows stay finite."""
    _, device, types = make_ops(kind)
    round_rows = rounded_rows
    if kind == "triton":
        from ssd.kernels.triton import row_codes

        round_rows = row_codes.rounded_rows
    torch.manual_seed(0)
    for dtype in (each for each in types if each is not torch.float16):  # which has no such numbers
        x = (torch.randn(6, 264) * torch.tensor([1.0, 0.0, 1e-30, 1e30, 1e-3, 7.0])[:, None]).to(device, dtype)[:, :256]
        for group, stored, powers in (
            *((None, None, False), (128, None, False), (None, torch.full((1, 1), 0.02, device=device), False)),
            *((128, None, True), (None, None, True)),
        ):
            how = RowRounding(number, group, stored, powers)
            rounded, scales = round_rows(x, how)
            assert rounded.dtype is dtype
            narrow = rounded.to(torch.float8_e4m3fn) if number == "fp8" else rounded.to(torch.int8)
            assert torch.equal(rounded.float(), narrow.float())  # values: an int8 has no -0.0
            on_cpu = replace(how, scale=None if stored is None else stored.cpu())
            expected, wanted = rounded_rows(x.cpu(), on_cpu)
            assert same_bits(scales.cpu(), wanted)  # torch's own division on a GPU is not rounded to the nearest
            same = same_bits if number == "fp8" else torch.equal  # an integer has no -0.0: Triton's kernel makes none
            assert same(rounded.cpu(), expected)
            wide = (rounded.float().view(6, scales.shape[1], -1) * scales[:, :, None]).flatten(1)
            if stored is None:
                assert (wide - x.float()).abs().max(1).values.le(x.float().abs().amax(1) / 16 + 1e-37).all()
            if powers:
                plain = rounded_rows(x.cpu(), replace(how, powers=False)).scales.double()
                ratio = scales.cpu().double() / plain
                assert (scales.frexp().mantissa == 0.5).all()
                assert ((ratio >= 1) & (ratio < 2)).all()
            for i in range(6):
                alone, scale = round_rows(x[i : i + 1], how)
                assert same_bits(alone[0], rounded[i])
                assert same_bits(scale[0], scales[i])


@pytest.mark.parametrize("kind", KINDS)
def test_an_embedding_is_looked_up_unrounded(kind: str) -> None:
    """And is not quantised at all where no head shares it."""
    ops, device, _ = make_ops(kind)
    rounded = Rounded("int4")
    weight, tokens = torch.randn(50, 64, device=device), torch.tensor([3, 49, 0], device=device)
    for head in (True, False):
        use = Use(embedding=True, product=head)
        prepared = rounded.prepare([{"weight": weight}], ops, torch.float32, use)
        assert same_bits(prepared.embedding(tokens), weight[tokens])
        assert (prepared.codes is not None) == head
