"""Weights of packed integers: orders of columns, zero points and mixtures that few checkpoints have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from bits import same_bits
from reference_ops import ReferenceOps
from stored_codes import some_codes

from ssd.kernels.codes import Codes, dequantize
from ssd.kernels.weights import RoundedRows, Weight
from ssd.layers.formats import Use
from ssd.layers.formats.coded import Activations, Coded, Mixed, MixedWeight, OrderedWeight
from ssd.layers.formats.compressed_tensors import PackedRows
from ssd.layers.formats.gptq import GPTQ
from ssd.layers.linear import ColumnLinear
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build

DEPTH, ROWS, GROUP = 64, 16, 32
CPU = torch.device("cpu")


def some_words(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), (1 << 31) - 1, shape, dtype=torch.int32)


class RoundsInTheNorm(Weight):
    """Stands for a GPU's weight that one kernel norms and rounds rows for."""

    def norm_and_round(self, x: torch.Tensor, *rest: object) -> RoundedRows:  # type: ignore[override]
        return RoundedRows(x, torch.ones(len(x), 1))


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_that_a_norm_rounds_are_in_the_order_that_the_weight_takes(ordered: bool) -> None:
    """Catches a norm that rounds the input of a weight with act-order: rounded rows are multiplied as they are, so each
    column would meet the weights of another one. Without an order the norm does round them."""
    torch.manual_seed(0)
    groups = torch.arange(DEPTH) // GROUP
    stored = {
        "weight_packed": some_words(ROWS, DEPTH // 8),
        "weight_scale": torch.rand(ROWS, DEPTH // GROUP),
        "weight_g_idx": groups.flip(0) if ordered else groups,
    }
    form, ops = PackedRows("int4", GROUP, frozenset(stored), Activations("int8")), ReferenceOps()
    build = Build(ops, torch.device("cpu"), torch.float32, format_of=lambda name: form)
    linear = ColumnLinear(build, {"up_proj": ROWS}, DEPTH)
    for name, tensor in stored.items():
        linear.load(f"up_proj.{name}", tensor)
    norm, x = RMSNorm(build, "norm", DEPTH, 1e-5, feeds=linear), torch.randn(3, DEPTH)
    norm.load("norm.weight", torch.rand(DEPTH))
    assert same_bits(linear(norm.rows(x, None)), linear(norm(x)))
    prepared = RoundsInTheNorm()
    linear.weight = replace(linear.weight, weight=prepared) if isinstance(linear.weight, OrderedWeight) else prepared
    assert isinstance(norm.rows(x, None), torch.Tensor) == ordered


@pytest.mark.parametrize(("kind", "highest"), [("int4", 15), ("int8", 255)])
def test_the_highest_zero_point_of_gptq_is_not_zero(kind: str, highest: int) -> None:
    """Catches a sum of bytes: stored minus one, the highest integer stands for one more than a byte can hold, as in
    vLLM's kernels. All weights of such a group would be off by 256 steps."""
    form = GPTQ(kind, None, frozenset())  # type: ignore[arg-type]
    stored = {
        "qweight": torch.zeros(DEPTH // form.per_word, ROWS, dtype=torch.int32),
        "qzeros": torch.full((1, ROWS // form.per_word), -1, dtype=torch.int32),  # all bits set
        "scales": torch.ones(1, ROWS),
    }
    assert torch.equal(form.widened(stored)["weight"], torch.full((ROWS, DEPTH), -(highest + 1.0)))


class Given(Coded):
    """A format whose parts have any codes."""

    name = "given"

    def codes(self, stored: Mapping[str, Any]) -> Codes:
        return stored["codes"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("gated", [False, True])
def test_parts_of_different_formats_are_one_weight(gated: bool) -> None:
    """Neighbours of one format, of which two have groups of other sizes; the last one is alone. With a bias."""
    rows, groups = (4, 6, 2, 12), (32, 16, 16, 64)
    codes = [some_codes("int8", n, 64, g, offsets=False, device=CPU) for n, g in zip(rows, groups, strict=True)]
    one, other, ops = Given(), Given(), ReferenceOps()
    mixed = Mixed((one, one, one, other))
    weight = mixed.prepare([{"codes": each} for each in codes], ops, torch.float32, Use(gated=gated, rows=rows))  # type: ignore[dict-item]
    assert isinstance(weight, MixedWeight)
    assert weight.rows == (12, 12)
    x, bias = torch.randn(3, 64), torch.randn(24)
    wide = torch.cat([dequantize(each, torch.float32) for each in codes])
    expected = ops.prepare(wide, gated=gated).linear(x, bias)
    assert torch.allclose(weight.linear(x, bias), expected, rtol=1e-5, atol=1e-5)
