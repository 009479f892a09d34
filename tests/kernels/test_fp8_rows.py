"""The CUDA kernel for few e4m3 rows on a CPU, in an emulator (`emulated_ptx.h`)."""

from __future__ import annotations

import pytest
import torch
from conftest import mostly_slow

from tests.kernels.emulation import COMPILER, TensorMap, addresses, emulated_kernel

kernel = pytest.importorskip("ssd.kernels.cuda.fp8_linear", reason="triton is not installed")


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape).to(torch.float8_e4m3fn)


@pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")
@pytest.mark.parametrize(
    ("rows", "columns", "depth", "share", "gated"),
    mostly_slow(
        [(3, 48, 1280, 3, False), (9, 210, 256, 9, False), (17, 136, 512, 16, True)], fast=[(17, 136, 512, 16, True)]
    ),
)
def test_products(rows: int, columns: int, depth: int, share: int, gated: bool) -> None:
    """One and two groups of warps, whole and cut ones, several tiles of outputs for a block of threads, the last of
    them cut, fewer and more blocks of the depth than stages."""
    x, weight, stages = numbers(rows, depth), numbers(columns, depth), 3
    row_scales, scales, bias = torch.rand(rows), torch.rand(columns) / 64, torch.randn(columns).bfloat16()
    products = (x.float() @ weight.float().t() * scales * row_scales[:, None]).bfloat16()
    expected = (products.float() + bias.float()).bfloat16().float()
    if gated:
        expected = torch.nn.functional.silu(expected[:, ::2]) * expected[:, 1::2]
    tiles = next(each for each in kernel.TILES if 8 * each >= rows)
    library = emulated_kernel(kernel.SOURCE, "product", {"TILES": tiles})
    y = torch.full_like(expected, torch.nan)
    params = kernel.Params(
        *(each.data_ptr() for each in (scales, row_scales, bias, y)),
        *(y.stride(0), rows, columns, depth // (128 * kernel.PARTS), share, stages, gated, True),
    )
    maps = [
        TensorMap(matrix.data_ptr(), len(matrix), depth // 2, depth // 128, kernel.PARTS, box)
        for matrix, box in ((x, 8 * tiles), (weight, 8 * share))
    ]
    shared = kernel.RING_AT + stages * kernel.stage_bytes(share, tiles) + kernel.BEHIND
    threads = 32 * (-(-share // 8) * 4 + 1)
    assert library.launch(addresses(*maps, params), 2, threads, shared, rows), "a wait is endless"
    assert (y - expected).norm() < 2e-3 * expected.norm()  # some sums are rounded to another bfloat16
