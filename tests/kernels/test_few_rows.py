"""The CUDA kernel for few rows on a CPU, in an emulator (`emulated_ptx.h`), and what its host side promises."""

from __future__ import annotations

import ctypes
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from stored_codes import some_codes

from ssd.kernels import few_rows as kernel
from ssd.kernels.packing import PackedCodes, pack, packed_rows, pairs_of_fp8
from ssd.kernels.quantized import Codes, CodeType, dequantize
from tests.kernels.emulation import COMPILER, emulated_kernel

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def as_on_a_gpu(codes: Codes) -> PackedCodes:
    """Packed as for a GPU."""
    weight = pack(codes, torch.bfloat16)
    if codes.type != "fp8":
        return weight
    strips, units, outputs, unit = weight.words.shape
    rows = pairs_of_fp8(weight.words.transpose(1, 2).reshape(strips * outputs, -1))
    words = rows.view(strips, outputs, units, unit).transpose(1, 2).contiguous()
    return replace(weight, words=words, paired=True)


def emulated(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None,
    folder: Path,
    *,
    gated: bool = False,
    row_scales: torch.Tensor | None = None,
    seed: int = 0,
) -> torch.Tensor:
    """`few_rows.linear` with float32 outputs."""
    rows, strips = len(x), len(weight.words)
    tiles, share, stages = -(-rows // 8), 3, 3
    macros = kernel.macros_of(weight.type, weight.block, tiles)
    library = emulated_kernel(kernel.SOURCE, "product", macros, folder / f"{seed}.so")
    y = torch.full((rows, weight.columns // (2 if gated else 1)), torch.nan)
    pointers = {"x": x, "words": weight.words, "scales": weight.scales, "row_scales": row_scales, "bias": bias, "y": y}
    params = kernel.Params(
        **{name: None if tensor is None else tensor.data_ptr() for name, tensor in pointers.items()},
        **{"x_stride": x.stride(0), "y_stride": y.stride(0), "rows": rows, "columns": weight.columns},
        **{"strips": strips, "blocks": weight.width // weight.block, "share": share, "stages": stages},
        **{"gated": gated, "float32": 1},
    )
    shared = kernel._BARRIERS + stages * kernel.stage_bytes(weight, share, tiles)
    threads = 32 * (share + 1)
    assert library.launch(ctypes.byref(params), -(-strips // share), threads, shared, seed), "a wait is endless"
    return y


@needs_compiler
@pytest.mark.parametrize(("kind", "rows", "depth"), [("fp8", 3, 1280), ("int8", 9, 256), ("fp8", 16, 384)])
def test_products(kind: CodeType, rows: int, depth: int, tmp_path: Path) -> None:
    """Blocks of 64 and of 32 words, fewer and more blocks than stages, and outputs that are no whole strip."""
    codes = some_codes(kind, 75, depth, depth, offsets=False, device=CPU)
    x = torch.randn(rows, depth).bfloat16()
    expected = x.float() @ dequantize(codes, torch.float32).t()
    found = emulated(x, as_on_a_gpu(codes), None, tmp_path, seed=rows)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@needs_compiler
def test_bias_activation_and_scales_of_rows(tmp_path: Path) -> None:
    codes = some_codes("fp8", 80, 512, 512, offsets=False, device=CPU)
    x, bias = torch.randn(9, 512).bfloat16() / 16, torch.randn(80).bfloat16()
    row_scales = torch.rand(9, 1) / 32
    sums = (x.float() * row_scales) @ dequantize(codes, torch.float32).t() + bias.float()
    expected = torch.nn.functional.silu(sums[:, ::2]) * sums[:, 1::2]
    found = emulated(x, as_on_a_gpu(codes), bias, tmp_path, gated=True, row_scales=row_scales)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_parameters_have_the_source_s_fields_in_its_order() -> None:
    body = re.search(r"struct Params {(.*?)\n};", kernel.SOURCE.read_text(encoding="utf-8"), re.DOTALL)
    assert body is not None
    code = re.sub(r"//[^\n]*", "", body[1])
    names = [name for line in code.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
    assert names == [name for name, _ in kernel.Params._fields_]


def test_rows_of_pairs_of_fp8_are_the_weight_s() -> None:
    """All 254 numbers, in every place of a pair of words."""
    codes = some_codes("fp8", 40, 512, 512, offsets=False, device=CPU)
    index = torch.tensor([0, 39, 17, 16])
    expected = dequantize(codes, torch.bfloat16)[index]
    assert torch.equal(packed_rows(as_on_a_gpu(codes), index), expected)


@pytest.mark.parametrize(("strips", "share"), [(512, 4), (640, 5), (3584, 7), (384, 3), (1, 1)])
def test_multiprocessors_have_equally_many_strips(strips: int, share: int) -> None:
    assert kernel.share_of(strips, 132) == share
