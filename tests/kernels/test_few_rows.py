"""The CUDA kernel for few rows on a CPU, in an emulator (`emulated_ptx.h`), and what its host side promises."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from stored_codes import some_codes

from ssd.kernels.codes import Codes, CodeType, dequantize
from ssd.kernels.cuda import few_rows as kernel
from ssd.kernels.triton.packing import PackedCodes, in_strips, pack, paired
from tests.kernels.emulation import COMPILER, TensorMap, addresses, emulated_kernel, params_of_source

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def as_on_a_gpu(codes: Codes) -> PackedCodes:
    """Packed as for a GPU."""
    weight = pack(codes, torch.bfloat16)
    if codes.type == "int8":
        return weight
    in_rows = weight.words.permute(1, 3, 0, 2, 4).reshape(-1, weight.width)
    return replace(weight, words=in_strips(paired(in_rows, codes.type), weight.block), paired=True)


def emulated(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    row_scales: torch.Tensor | None = None,
    blocks: int = 2,
    share: int = 3,
    ahead: int = 0,
    stages: int = 3,
    seed: int = 0,
) -> torch.Tensor:
    """`few_rows.linear` with float32 outputs."""
    rows = len(x)
    tiles = next(each for each in kernel.TILES if 8 * each >= rows)
    launch = kernel.Launch.of(weight, share, tiles, ahead, most=stages)
    macros = kernel.macros_of(weight.type, weight.block, tiles, ahead)
    library = emulated_kernel(kernel.SOURCE, "product", macros)
    y = torch.full((rows, weight.columns // (2 if gated else 1)), torch.nan)
    params = kernel.params_of(weight, bias, row_scales, y, gated, launch)
    x_map = TensorMap(x.data_ptr(), rows, x.stride(0), weight.depth // 64, weight.block * weight.parts // 64, 8 * tiles)
    assert library.launch(addresses(x_map, params), blocks, launch.threads, launch.shared, seed), "a wait is endless"
    return y


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "rows", "depth"),
    mostly_slow([("fp8", 3, 1280), ("int8", 9, 256), ("fp8", 16, 384)], fast=[("int8", 9, 256)]),  # the next: fp8
)
def test_products(kind: CodeType, rows: int, depth: int) -> None:
    """Blocks of 64 and of 32 words, fewer and more of them than stages, several tiles of outputs for a block of threads
    and outputs that are no whole strip."""
    codes = some_codes(kind, 138, depth, depth, offsets=False, device=CPU)
    x = torch.randn(rows, depth).bfloat16()
    expected = x.float() @ dequantize(codes, torch.float32).t()
    found = emulated(x, as_on_a_gpu(codes), None, seed=rows)
    assert (found - expected).norm() < 1e-5 * expected.norm()


@needs_compiler
@pytest.mark.parametrize(
    ("kind", "rows", "depth", "share", "ahead", "stages"),  # twice as many stages: codes are loaded earlier
    mostly_slow(
        [("fp8", 3, 1280, 1, 2, 4), ("int8", 16, 2048, 3, 2, 3), ("fp8", 8, 384, 2, 3, 3)],
        fast={("fp8", 8, 384, 2, 3, 3)},
    ),
)
def test_blocks_that_are_widened_ahead(
    kind: CodeType, rows: int, depth: int, share: int, ahead: int, stages: int
) -> None:
    """Fewer and more blocks than slots, several tiles of outputs, a tile of fewer strips: the bits are those of
    consumers that widen, whatever the other rows and the blocks of threads."""
    weight = as_on_a_gpu(some_codes(kind, 138, depth, depth, offsets=False, device=CPU))
    x = torch.randn(rows, depth).bfloat16()
    expected = emulated(x, weight, None, seed=1)
    launch = {"share": share, "ahead": ahead, "stages": stages}
    assert same_bits(emulated(x, weight, None, **launch, seed=2), expected)
    alone = emulated(x[-1:], weight, None, **launch, blocks=1, seed=3)
    assert same_bits(alone, expected[-1:])


@pytest.mark.parametrize(
    ("columns", "depth", "ahead"),
    [
        *((16, 1024, 4), (2048, 1152, 4), (2112, 2048, 4), (2128, 2048, 0), (5120, 2048, 0)),
        *((4096, 4096, 4), (6336, 4096, 4), (6352, 4096, 0), (19008, 1024, 0)),
    ],
)
def test_narrow_weights_are_widened_ahead(columns: int, depth: int, ahead: int) -> None:
    """By their shape. A stage for each slot, at least: `widen` of the source needs that."""
    weight = pack(
        Codes(torch.zeros(columns, depth, dtype=torch.uint8), torch.ones(columns, 1), "fp8", depth), torch.bfloat16
    )
    share = kernel.share_of(weight.words.shape[1], 132, 8)
    for tiles in (1, 2):
        assert kernel.ahead_of(weight, tiles, 132) == ahead
        assert kernel.Launch.of(weight, share, tiles, ahead).stages >= ahead
    assert kernel.ahead_of(weight, 4, 132) == 0


@needs_compiler
def test_bias_activation_and_scales_of_rows() -> None:
    codes = some_codes("fp8", 80, 512, 512, offsets=False, device=CPU)
    x, bias = torch.randn(8, 512).bfloat16() / 16, torch.randn(80).bfloat16()
    row_scales = torch.rand(8, 1) / 32
    sums = (x.float() * row_scales) @ dequantize(codes, torch.float32).t() + bias.float()
    expected = torch.nn.functional.silu(sums[:, ::2]) * sums[:, 1::2]
    found = emulated(x, as_on_a_gpu(codes), bias, gated=True, row_scales=row_scales)
    assert (found - expected).norm() < 1e-5 * expected.norm()


def test_parameters_have_the_source_s_fields_in_its_order() -> None:
    assert params_of_source(kernel.SOURCE) == [name for name, _ in kernel.Params._fields_]


@pytest.mark.parametrize(
    ("strips", "processors", "share"),
    [(512, 132, 4), (640, 132, 5), (3584, 132, 7), (384, 132, 3), (1, 132, 1), (8016, 132, 8), (3584, 84, 8)],
)
def test_multiprocessors_have_equally_many_strips(strips: int, processors: int, share: int) -> None:
    """But not one at a time, where that were a few strips less: the rows are copied for each of them."""
    assert kernel.share_of(strips, processors, 8) == share
