"""Kernels of experts: every implementation against plain torch, and rows in any company."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from reference_ops import ReferenceOps
from stored_codes import some_codes
from test_quantized import CUDA, close, make_ops

from ssd.kernels.codes import Codes, CodeType, dequantize
from ssd.kernels.ops import ExpertOutputs, Ops
from ssd.kernels.triton.packing import FP4_PLACES, pack, paired
from ssd.kernels.weights import GLU, SOFTMAX_OF_CHOSEN, SWIGLU, RoutingRule, Weight

CLAMPED = GLU(1.702, 7.0, 1.0)
KERNELS = ("plain", "c", "triton")


@pytest.mark.parametrize(
    ("kind", "chosen"),
    mostly_slow(
        [(kind, chosen) for kind in KERNELS for chosen in (True, False)],
        fast=[(kind, chosen) for kind in KERNELS for chosen in (True, False) if CUDA or kind != "triton" or chosen],
    ),
)
def test_routing(kind: str, chosen: bool) -> None:
    """The largest logits in order, the lower expert first where they are equal; softmax; pairs sorted by expert."""
    ops, device, _ = make_ops(kind)
    torch.manual_seed(0)
    logits = torch.randn(37, 12, device=device)
    logits[3], logits[3, ::2] = 0.0, -0.0  # all equal: the first ones
    logits[4, [7, 2, 9]] = 5.0
    routing = ops.route(logits, 3, RoutingRule(chosen))
    assert routing.experts[3].tolist() == [0, 1, 2]
    assert routing.experts[4].tolist() == [2, 7, 9]
    values, ids = logits.topk(3)
    others = [i for i in range(37) if i not in (3, 4)]
    assert torch.equal(routing.experts[others].long(), ids[others])
    expected = values.softmax(1) if chosen else logits.softmax(1).gather(1, ids)
    torch.testing.assert_close(routing.weights, expected, rtol=1e-6, atol=1e-7)
    pairs = routing.experts.flatten()[routing.order.long()]
    assert torch.equal(pairs, pairs.sort().values)
    assert torch.equal(routing.order.sort().values, torch.arange(37 * 3, device=device).int())
    assert torch.equal(routing.starts.long(), torch.searchsorted(pairs.long(), torch.arange(13, device=device)))


RULES = [
    RoutingRule(True, True, 1, 1, 1.8),
    RoutingRule(False, True, 4, 2, 2.5),
    RoutingRule(True, True, 4, 3),
    RoutingRule(True, True, 6, 2, 0.5),
    RoutingRule(True, True, 4, 2, 2.5, shared=1),
    RoutingRule(False, True, shared=2),
]


def by_hand(logits: torch.Tensor, correction: torch.Tensor, count: int, rule: RoutingRule) -> list[tuple[int, float]]:
    """One row's experts and weights, as the published code has them, with ties in order."""
    numbers = logits.sigmoid().tolist()
    scores = [number + own for number, own in zip(numbers, correction.tolist(), strict=True)]
    size = len(scores) // rule.groups
    groups = [sorted(scores[g * size : (g + 1) * size])[-2:] for g in range(rule.groups)]
    kept = sorted(range(rule.groups), key=lambda g: (-sum(groups[g]), g))[: rule.kept_groups]
    best = sorted((e for e in range(len(scores)) if e // size in kept), key=lambda e: (-scores[e], e))[:count]
    total = sum(numbers[e] for e in best) if rule.normalized else 1.0
    shared = [(len(scores) + i, 1.0) for i in range(rule.shared)]
    return [*((e, numbers[e] / total * rule.scale) for e in best), *shared]


@pytest.mark.parametrize(
    ("kind", "rule"),
    mostly_slow(
        [(kind, rule) for kind in KERNELS for rule in RULES],
        fast=[(kind, rule) for kind in KERNELS for rule in (RULES if CUDA or kind != "triton" else RULES[1::2])],
    ),
    ids=str,
)
def test_routing_by_sigmoids(kind: str, rule: RoutingRule) -> None:
    """Catches weights that have the correction, a group that is chosen by one expert, and the order of equal scores:
    two groups that are equal, and all experts; shared ones that are weighed, or not every row's last. Rows keep their
    bits."""
    ops, device, _ = make_ops(kind)
    torch.manual_seed(0)
    rows = 9 if kind == "triton" and not CUDA else 37  # on a GPU more than one program routes, and `alone` is one row
    logits, correction = torch.randn(rows, 12, device=device), torch.randn(12, device=device) / 4
    logits[2], correction[3:6] = 0.0, correction[:3]  # groups 0 and 1 of four are equal, with 0 twice the same experts
    found = ops.route(logits, 3, rule, correction)
    for row, ids, weights in zip(logits, found.experts.tolist(), found.weights.tolist(), strict=True):
        expected = by_hand(row, correction, 3, rule)
        assert ids == [expert for expert, _ in expected]
        assert weights == pytest.approx([weight for _, weight in expected], rel=1e-5)
        assert weights[3:] == [1.0] * rule.shared
    shared = list(range(12, 12 + rule.shared))
    equal = ops.route(torch.zeros_like(logits), 3, rule, torch.zeros_like(correction))
    assert equal.experts.tolist() == [[0, 1, 2, *shared]] * rows
    alone = ops.route(logits[3:4], 3, rule, correction)
    assert same_bits(alone.weights, found.weights[3:4])
    pairs = found.experts.flatten()[found.order.long()]
    assert torch.equal(pairs, pairs.sort().values)
    assert torch.equal(found.order.sort().values, torch.arange(len(pairs), device=device).int())
    firsts = torch.arange(12 + rule.shared + 1, device=device)
    assert torch.equal(found.starts.long(), torch.searchsorted(pairs.long(), firsts))
    logits[0], logits[1] = torch.nan, torch.inf  # never an expert that is not there
    again = ops.route(logits, 3, rule, correction)
    assert ((again.experts[:, :3] >= 0) & (again.experts[:, :3] < 12)).all()
    assert again.experts[:, 3:].tolist() == [shared] * rows
    assert same_bits(again.weights[2:], found.weights[2:])


@pytest.mark.parametrize("kind", KERNELS)
def test_a_router_s_logits(kind: str) -> None:
    """A depth of several pieces; experts and rows of several tiles; rows in any company."""
    ops, device, types = make_ops(kind)
    torch.manual_seed(0)
    for dtype in types:
        x, weight = torch.randn(19, 600, device=device).to(dtype), torch.randn(40, 600, device=device).to(dtype) / 25
        bias, prepared = torch.randn(40, device=device).to(dtype), ops.prepare(weight)
        found = ops.route(prepared.router(x, bias), 3, SOFTMAX_OF_CHOSEN)
        expected = ReferenceOps().route(x.float() @ weight.float().t() + bias.float(), 3, SOFTMAX_OF_CHOSEN)
        assert torch.equal(found.experts, expected.experts)
        close(found.weights, expected.weights, dtype)
        alone = ops.route(prepared.router(x[7:8], bias), 3, SOFTMAX_OF_CHOSEN)
        assert kind == "plain" or same_bits(alone.weights, found.weights[7:8])


@pytest.mark.parametrize(
    ("count", "experts"),
    mostly_slow([(3, 12), (4, 32), (8, 128), (1, 5)], fast=[(3, 12), (4, 32), (1, 5)] if CUDA else [(3, 12)]),
)
@pytest.mark.parametrize("rule", [SOFTMAX_OF_CHOSEN, RoutingRule(sigmoid=True, scale=1.8, shared=1)], ids=str)
def test_routing_of_few_rows_on_a_gpu(count: int, experts: int, rule: RoutingRule) -> None:
    """As plain torch has it, and with the tiles of every expert that is hit. Catches rows and places that are not there
    (their numbers are no powers of two), and shared experts behind a power of two of others."""
    ops, device, _ = make_ops("triton")
    torch.manual_seed(0)
    correction = torch.randn(experts, device=device) / 4 if rule.sigmoid else None
    for rows in (1, 3, 8, 9):
        logits = torch.randn(rows, experts, device=device)
        logits[rows // 2] = logits[0]
        found, expected = (each.route(logits, count, rule, correction) for each in (ops, ReferenceOps()))
        assert torch.equal(found.experts, expected.experts)
        torch.testing.assert_close(found.weights, expected.weights)
        assert torch.equal(found.order, expected.order)
        assert torch.equal(found.starts, expected.starts)
        starts = expected.starts.tolist()
        tiles = [[e, starts[e], starts[e + 1]] for e in range(len(starts) - 1) if starts[e] < starts[e + 1]]
        assert found.tiles is not None
        listed = found.tiles.tolist()
        if rows <= 8 or len(tiles) == len([tile for tile in listed if tile[0] >= 0]):
            assert listed[: len(tiles)] == tiles
        assert all(tile[0] == -1 for tile in listed[len(tiles) :] if rows <= 8)


@pytest.mark.parametrize("kind", KERNELS)
def test_routing_of_rows_that_are_not_finite(kind: str) -> None:
    """Catches an expert that is not there: it would be read from memory of others. Other rows are not affected."""
    ops, device, _ = make_ops(kind)
    torch.manual_seed(0)
    logits = torch.randn(5, 12, device=device)
    alone = ops.route(logits[4:], 3, SOFTMAX_OF_CHOSEN)
    logits[0], logits[1], logits[2, 5], logits[3, 11] = torch.nan, -torch.inf, torch.inf, torch.nan
    found = ops.route(logits, 3, SOFTMAX_OF_CHOSEN)
    assert ((found.experts >= 0) & (found.experts < 12)).all()
    assert torch.equal(found.experts[4:], alone.experts)
    assert same_bits(found.weights[4:], alone.weights)


def test_pairs_of_fp4_are_the_weight_s() -> None:
    """What the instructions of a GPU make of packed words: shifted and masked halves as bfloat16, times a power of
    two."""
    codes = some_codes("fp4", 7, 288, 32, offsets=False, device=torch.device("cpu"))
    weight = pack(codes, torch.float32, strips=False)
    assert weight.exponents is not None
    assert weight.scales is not None
    words, found = paired(weight.words, "fp4"), torch.zeros(7, weight.width * 8)
    powers = weight.exponents.view(torch.uint8).short() << 7  # [blocks, rows, parts]
    for j in range(weight.width):
        block, at = divmod(j, 32)
        pair = words[:, j - j % 2], words[:, j - j % 2 + 1]
        for i, (first, turn) in enumerate(FP4_PLACES):
            bits = ((pair[0] & first) | (pair[1] & ~first)).long() & 0xFFFFFFFF
            bits = (bits << turn % 32 | bits >> -turn % 32) >> (16 * (j % 2)) & 0x81C0
            bits = torch.where(bits >= 1 << 15, bits - (1 << 16), bits).short()
            number = bits.view(torch.bfloat16).double() * powers[block, :, i].view(torch.bfloat16).double()
            found[:, block * 256 + i * 32 + at] = (number * weight.scales.flatten()).float()
    expected = dequantize(codes, torch.float32)
    assert torch.equal(found[:, :288], expected)  # values: of the code of -0.0 a GPU makes -0.0, `dequantize` 0.0


@pytest.mark.parametrize(
    ("code", "group"),
    mostly_slow(
        [("fp4", 32), ("int4", 32), ("int4", 128), ("fp8", 128), ("fp8", 64)],
        fast=[("fp4", 32), ("int4", 32), ("fp8", 128)],
    ),
)
def test_groups_in_strips_have_the_bits_of_outputs_one_after_the_other(code: CodeType, group: int) -> None:
    ops, device, types = make_ops("triton")
    torch.manual_seed(0)
    codes = some_codes(code, 5 * 16, 384, group, offsets=False, device=device)
    if group == 32:
        codes = replace(codes, scales=codes.scales.bfloat16().float())  # as int4 stores them
    routing, x = ops.route(torch.randn(9, 5, device=device), 2, SOFTMAX_OF_CHOSEN), torch.randn(9, 384, device=device)
    for dtype in types:
        one = ops.prepare_codes(codes, dtype, experts=5)
        other = replace(one, packed=pack(codes, dtype, strips=False, weights=False))
        assert (one.packed.strips, other.packed.strips) == (True, False)
        found, expected = (weight.expert_linear(x.to(dtype), routing) for weight in (one, other))
        assert same_bits(found, expected)


def expert_weights(ops: Ops, code: CodeType | None, device: torch.device, dtype: torch.dtype) -> tuple[Weight, ...]:
    """Gated and plain weights of 5 experts, as `ops` has them and as plain torch has them."""
    made, reference = [], ReferenceOps()
    for columns, depth, gated in ((2 * 22, 96, True), (38, 32, False)):
        weight: torch.Tensor | Codes
        if code is None:
            weight = torch.randn(5 * columns, depth, device=device).to(dtype)
            made += [ops.prepare(weight, gated=gated, experts=5), reference.prepare(weight.float())]
        else:
            codes = some_codes(code, 5 * columns, depth, 32, offsets=code == "uint4", device=device)
            made += [
                ops.prepare_codes(codes, dtype, gated=gated, experts=5),
                reference.prepare_codes(codes, torch.float32),
            ]
    return tuple(made)


CASES = [(None, CLAMPED), ("fp8", SWIGLU), ("fp4", CLAMPED), ("int8", SWIGLU), ("int4", SWIGLU), ("uint4", CLAMPED)]
FEW = [case for case in CASES if case[0] == "fp4" or (CUDA and case[0] not in ("int8", "int4"))]  # by Triton


@pytest.mark.parametrize(
    ("kind", "code", "glu"),
    mostly_slow(
        [(kind, *case) for kind in ("c", "triton") for case in CASES],
        fast=[*(("c", *case) for case in CASES), *(("triton", *case) for case in FEW)],
    ),
)
def test_products_and_their_weighted_sums(kind: str, code: CodeType | None, glu: GLU) -> None:
    """Rows of tokens and of pairs; biases; odd sizes; more rows than a tile has; experts without any row."""
    ops, device, types = make_ops(kind)
    torch.manual_seed(0)
    reference = ReferenceOps()
    for dtype in types:
        gated, wide_gated, plain, wide_plain = expert_weights(ops, code, device, dtype)
        for rows in (1, 40):
            logits = torch.randn(rows, 5, device=device)
            logits[:, 3] = -9.0
            routing = ops.route(logits, 2, SOFTMAX_OF_CHOSEN)
            x = (3 * torch.randn(rows, 104, device=device)).to(dtype)[:, :96]
            bias, last = (torch.randn(5 * n, device=device).to(dtype) for n in (44, 38))
            inner = gated.expert_linear(x, routing, bias, glu=glu)
            expected = wide_gated.expert_linear(x.float(), routing, bias.float(), glu=glu)
            close(inner, expected, dtype)
            inner = torch.randn(2 * rows, 32, device=device).to(dtype)
            outputs = plain.expert_linear(inner, routing, last)
            expected = wide_plain.expert_linear(inner.float(), routing, last.float())
            close(outputs, expected, dtype)
            assert plain.expert_linear(inner, routing, float32=True).dtype is torch.float32
            total = ops.combine(outputs, routing, float32=True)
            close(total, reference.combine(outputs, routing, float32=True), torch.float32)
            assert same_bits(ops.combine(outputs, routing), total.to(dtype))
            weight, residual = torch.randn(38, device=device).to(dtype), torch.randn(rows, 38, device=device).to(dtype)
            expected = ops.rms_norm(ops.combine(outputs, routing), weight, 1e-5, other := residual.clone())
            normed = ops.combine_and_norm(ExpertOutputs(outputs, routing), weight, 1e-5, residual)
            assert same_bits(normed, expected)
            assert same_bits(residual, other)
            shared = torch.randn(rows, 38, device=device)
            total = ops.combine(outputs, routing, shared, float32=True)
            close(total, reference.combine(outputs, routing, shared, float32=True), torch.float32)
            expected = ops.rms_norm(ops.combine(outputs, routing, shared), weight, 1e-5)
            assert same_bits(
                ops.combine_and_norm(ExpertOutputs(outputs, routing, shared), weight, 1e-5, None), expected
            )


@pytest.mark.parametrize(
    ("kind", "code"),
    mostly_slow(
        [(kind, code) for kind in ("c", "triton") for code in (None, "fp8", "int4")],
        fast=[
            ("c", None),
            ("c", "fp8"),
            ("c", "int4"),
            *([("triton", None), ("triton", "fp8"), ("triton", "int4")] if CUDA else []),
        ],
    ),
)
def test_a_row_has_the_same_bits_in_any_company(kind: str, code: CodeType | None) -> None:
    """Alone, and among others that share its experts or do not, one of them all: routing, products and sums."""
    ops, device, types = make_ops(kind)
    torch.manual_seed(0)
    logits, x, inner = (torch.randn(*size, device=device) for size in ((70, 4), (70, 96), (210, 32)))

    def results(index: torch.Tensor, gated: Weight, plain: Weight, dtype: torch.dtype) -> list[torch.Tensor]:
        routing = ops.route(logits[index], 2, RoutingRule(False, shared=1))
        first = gated.expert_linear(x[index].to(dtype), routing, glu=SWIGLU)
        pairs = (3 * index[:, None] + torch.arange(3, device=device)).flatten()
        second = plain.expert_linear(inner[pairs].to(dtype), routing)
        return [first.view(len(index), -1), ops.combine(second, routing)]

    for dtype in types:
        gated, _, plain, _ = expert_weights(ops, code, device, dtype)
        whole = results(torch.arange(70, device=device), gated, plain, dtype)
        for rows in (1, 2, 9, 33):
            index = torch.randperm(70, device=device)[:rows]
            for found, expected in zip(results(index, gated, plain, dtype), whole, strict=True):
                assert same_bits(found, expected[index]), rows
