"""The CUDA kernel for few rows and weights in groups on a CPU, in an emulator (`emulated_ptx.h`)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from stored_codes import NUMBERS, multiplied_weights, numbered_codes, some_codes

from ssd.kernels.codes import Codes, CodeType
from ssd.kernels.cuda import grouped_rows as kernel
from ssd.kernels.triton.packing import NumberKind, PackedCodes, pack
from tests.kernels.emulation import COMPILER, TensorMap, addresses, emulated_kernel, params_of_source

CPU = torch.device("cpu")
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")


def emulated(
    x: torch.Tensor,
    weight: PackedCodes,
    bias: torch.Tensor | None,
    *,
    gated: bool = False,
    blocks: int = 2,
    share: int = 3,
    stages: int = 3,
    seed: int = 0,
) -> torch.Tensor:
    """`grouped_rows.linear` with float32 outputs. `blocks`: of threads, for each segment."""
    rows, variant = len(x), kernel.Variant.of(weight)
    tiles = next(each for each in kernel.TILES if 8 * each >= rows)
    launch = kernel.Launch.made(weight, tiles, share, stages)
    library = emulated_kernel(kernel.SOURCE, "product", variant.macros(tiles))
    y = torch.full((rows, weight.columns // (2 if gated else 1)), torch.nan)
    sums = torch.full((launch.splits * weight.words.shape[1] * 128 * tiles,), torch.nan)
    params = kernel.params_of(weight, bias, y, sums, gated, launch)
    x_map = TensorMap(x.data_ptr(), rows, x.stride(0), weight.depth // 64, weight.block * weight.parts // 64, 8 * tiles)
    blocks *= launch.splits
    assert library.launch(addresses(x_map, params), blocks, launch.threads, launch.shared, seed), "a wait is endless"
    assert weight.count is not None
    assert not weight.count.any()
    return y


def added_up(x: torch.Tensor, weight: torch.Tensor, segment: int) -> torch.Tensor:
    """As the emulator does: sixteen products at a time, segments one after the other."""
    total = torch.zeros(len(x), len(weight))
    for start in range(0, x.shape[1], segment):
        whole = torch.zeros_like(total)
        for k in range(start, min(start + segment, x.shape[1]), 16):
            part = torch.zeros_like(total)
            for i in range(k, k + 16):
                part += x[:, i : i + 1].float() * weight[:, i].float()
            whole += part
        total = whole if start == 0 else total + whole
    return total


@needs_compiler
@pytest.mark.parametrize(("kind", "group", "offsets", "numbers", "depth"), mostly_slow(NUMBERS, fast=NUMBERS[:1]))
def test_the_weights_themselves_are_multiplied(
    kind: CodeType, group: int, offsets: bool, numbers: NumberKind, depth: int
) -> None:
    """Of every type of codes and scales; one row and several tiles of them, several tiles of outputs for a block of
    threads, outputs that are no whole strip: the bits are those of the widened weight."""
    codes = numbered_codes(kind, 138, depth, group, offsets, numbers, CPU)
    weight, dense = pack(codes, torch.bfloat16), multiplied_weights(codes)
    assert weight.numbers is not None
    assert weight.numbers.kind == numbers
    for rows, share, blocks, stages in ((1, 3, 2, 3), (19, 5, 1, 2)):
        x = torch.randn(rows, depth).bfloat16()
        found = emulated(x, weight, None, share=share, blocks=blocks, stages=stages, seed=rows)
        assert same_bits(found, added_up(x, dense, weight.segment))


@needs_compiler
@pytest.mark.parametrize(("kind", "group", "offsets", "numbers", "depth"), mostly_slow(NUMBERS, fast=NUMBERS[1:2]))
def test_weights_are_widened(kind: CodeType, group: int, offsets: bool, numbers: NumberKind, depth: int) -> None:
    """All of them, and those from the second strip on."""
    codes = numbered_codes(kind, 138, depth, group, offsets, numbers, CPU)
    weight, dense = pack(codes, torch.bfloat16), multiplied_weights(codes)
    library = emulated_kernel(kernel.SOURCE, "widen", kernel.Variant.of(weight).macros(1))
    for first in (0, 16):
        y = torch.full((138 - first, depth), torch.nan, dtype=torch.bfloat16)
        params = kernel.widen_params(weight, y, first)
        assert library.launch(addresses(params), -(-9 * params.blocks // 2), 64, 2 * kernel.widen_bytes(weight), 0)
        assert torch.equal(y, dense[first:])


@needs_compiler
@pytest.mark.parametrize(
    ("share", "blocks"),
    mostly_slow([(2, 2), (3, 1), (1, 3)], fast=[(3, 1)]),
)
def test_segments_are_added_in_order(share: int, blocks: int) -> None:
    """By as many blocks of threads at the same time; the last segment is shorter."""
    codes = numbered_codes("uint4", 40, 4352, 32, True, "factors", CPU)
    weight, dense = pack(codes, torch.bfloat16), multiplied_weights(codes)
    assert weight.segment == 1280
    for rows in (1, 9):
        x = torch.randn(rows, 4352).bfloat16()
        found = emulated(x, weight, None, share=share, blocks=blocks, stages=2, seed=rows)
        assert same_bits(found, added_up(x, dense, 1280))


@needs_compiler
def test_bias_and_activation() -> None:
    """Rounded as those of a dense weight: the product, what silu makes of it, and the result."""
    weight = pack(some_codes("int4", 80, 512, 128, offsets=True, device=CPU), torch.bfloat16)
    x, bias = torch.randn(9, 512).bfloat16() / 16, torch.randn(80).bfloat16()
    sums = emulated(x, weight, bias).bfloat16()
    expected = torch.nn.functional.silu(sums[:, ::2]) * sums[:, 1::2]
    found = emulated(x, weight, bias, gated=True)
    assert (found.bfloat16() == expected).float().mean() > 0.99  # exp is another one


@pytest.mark.parametrize(("columns", "depth"), [(1024, 4096), (4096, 14336), (28672, 4096), (1536, 8960), (896, 896)])
@pytest.mark.parametrize(("kind", "group"), [("int8", 16), ("uint4", 32)])
def test_shared_memory_is_enough(kind: CodeType, group: int, columns: int, depth: int) -> None:
    """For two stages at least, and there are no more warps than registers allow."""
    numbers = torch.full((16, depth // group), 0.1)
    strip = pack(Codes(torch.zeros(16, depth, dtype=torch.uint8), numbers, kind, depth, numbers), torch.bfloat16)
    assert strip.numbers is not None

    def repeated(of: torch.Tensor) -> torch.Tensor:
        return of.expand(-1, columns // 16, *of.shape[2:])

    stored = strip.numbers._replace(data=repeated(strip.numbers.data))
    weight = replace(strip, words=repeated(strip.words), numbers=stored, columns=columns)
    for tiles in kernel.TILES:
        launch = kernel.Launch.of(weight, tiles, 132)
        assert launch.stages >= 2
        assert launch.threads <= 32 * (kernel.most_warps(tiles) + 1)
        assert launch.shared <= kernel.SHARED
        assert launch.splits == -(-depth // weight.segment)


def test_parameters_have_the_source_s_fields_in_its_order() -> None:
    assert params_of_source(kernel.SOURCE) == [name for name, _ in kernel.Params._fields_]
