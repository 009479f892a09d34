"""The layer of experts: GPT-OSS's router, biases, interleaved tensors and limits against transformers; shared ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers
from bits import same_bits
from reference_ops import ReferenceOps
from transformers.integrations.mxfp4 import convert_moe_packed_tensors
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

from ssd.kernels.cpu import library
from ssd.kernels.cpu.ops import CpuOps
from ssd.kernels.ops import ExpertOutputs, Ops
from ssd.kernels.weights import GLU, RoutingRule
from ssd.layers.experts import Experts
from ssd.layers.formats import DENSE, FormatOf, WeightFormat, dense
from ssd.layers.formats.coded import Dequantized
from ssd.layers.formats.rounded import rounded
from ssd.layers.mlp import MLP
from ssd.layers.parameter import Build
from ssd.layers.spec import ExpertNames, ExpertsSpec, GQASpec, LayerSpec, RopeConfig
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder, outline
from ssd.models.fused_experts import single_experts
from ssd.models.quantization import formats_of

CPU = torch.device("cpu")
LAYER = "model.layers.0"
SPEC = ExpertsSpec(6, 3, 96, bias=True, glu=GLU(1.702, 2.0, 1.0), names=ExpertNames(router="router"), interleaved=True)
CONFIG = DecoderConfig("any", 64, 64, (LayerSpec(GQASpec(4, 2, 16, RopeConfig()), SPEC),), 128)


def gpt_oss() -> GptOssMLP:
    """With a limit that many numbers reach."""
    config = transformers.GptOssConfig(
        hidden_size=64, intermediate_size=96, num_local_experts=6, num_experts_per_tok=3, swiglu_limit=2.0
    )
    torch.manual_seed(0)
    module = GptOssMLP(config)
    for parameter in module.parameters():
        parameter.data.normal_(0.0, 0.4)
    return module


def layer(tensors: Mapping[str, torch.Tensor], ops: Ops, format_of: FormatOf = dense) -> Experts:
    experts = Experts(Build(ops, CPU, torch.float32, format_of=format_of), LAYER, SPEC, 64)
    wanted = {name: parameter for parameter in experts.parameters() for name in parameter.shapes()}
    stored = ((f"{LAYER}.mlp.{name}", tensor) for name, tensor in tensors.items())
    for name, tensor in single_experts(stored, CONFIG):
        wanted.pop(name).load(name, tensor)
    assert not wanted
    return experts


def output(experts: Experts, x: torch.Tensor) -> torch.Tensor:
    found = experts(x)
    assert isinstance(found, ExpertOutputs)
    return experts.ops.combine(*found)


@pytest.fixture(params=["plain", "c"])
def ops(request: pytest.FixtureRequest) -> Ops:
    return ReferenceOps() if request.param == "plain" else CpuOps(library.load())


@torch.inference_mode()
def test_gpt_oss_experts_equal_transformers(ops: Ops) -> None:
    """Catches gate and up in another order, a limit on the wrong side, a bias after the weight, a softmax of all."""
    theirs = gpt_oss()
    ours, x = layer(theirs.state_dict(), ops), torch.randn(33, 64)
    expected, _ = theirs(x[None])
    torch.testing.assert_close(output(ours, x), expected[0], rtol=1e-4, atol=1e-4)
    if isinstance(ops, CpuOps):
        assert same_bits(torch.cat([output(ours, row[None]) for row in x]), output(ours, x))


@torch.inference_mode()
def test_gpt_oss_experts_in_mxfp4(ops: Ops) -> None:
    """As published: blocks of 16 bytes and exponents for all experts. Catches halves of a byte in another order."""
    theirs, stored = gpt_oss(), {}
    for name, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
        blocks = torch.randint(0, 256, (6, outputs, inputs // 32, 16), dtype=torch.uint8)
        scales = torch.randint(120, 127, (6, outputs, inputs // 32), dtype=torch.uint8)
        stored |= {f"experts.{name}_blocks": blocks, f"experts.{name}_scales": scales}
        wide = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
        getattr(theirs.experts, name).data = wide
    dense_ones = {name: each for name, each in theirs.state_dict().items() if not name.endswith("_proj")}
    formats = formats_of({"quant_method": "mxfp4"}, (f"{LAYER}.mlp.{name}" for name in stored))
    ours, x = layer({**stored, **dense_ones}, ops, formats), torch.randn(5, 64)
    assert (ours.down.format.name, ours.router.format.name) == ("mxfp4", "dense")
    expected, _ = theirs(x[None])
    torch.testing.assert_close(output(ours, x), expected[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
@torch.inference_mode()
def test_experts_are_rounded_and_their_router_is_not(ops: Ops, form: str) -> None:
    """Catches another choice of experts than the unrounded model's, which no rounding of experts may change."""
    tensors, x = gpt_oss().state_dict(), torch.randn(9, 64)
    plain, ours = layer(tensors, ops), layer(tensors, ops, rounded(form, exact=True))
    assert same_bits(plain.router(x), ours.router(x))
    difference = (output(ours, x) - output(plain, x)).norm() / output(plain, x).norm()
    assert 1e-4 < difference < {"fp8": 0.06, "int8": 0.03, "int4": 0.3}[form]


def test_memory_counts_all_experts() -> None:
    """And the rows of activations those of all experts of a token. Catches a model that does not fit."""
    wide = Decoder(CONFIG, outline(torch.bfloat16), max_positions=1).num_bytes()
    fewer = replace(CONFIG, layers=(replace(CONFIG.layers[0], mlp=replace(SPEC, num_experts=5)),))
    each = 3 * 96 * 64 + 2 * 96 + 64 + 64 + 1  # gate, up and down, their biases, a row of the router and its bias
    assert wide - Decoder(fewer, outline(torch.bfloat16), max_positions=1).num_bytes() == 2 * each
    narrow = replace(CONFIG.layers[0], mlp=replace(SPEC, experts_per_token=1))
    assert CONFIG.layers[0].activation_width(64) - narrow.activation_width(64) == 2 * (3 * 96 + 2 * 64)


WITH_SHARED = ExpertsSpec(6, 3, 96, rule=RoutingRule(True, True, 2, 1, 1.8), shared_size=96)


def shared_layer(ops: Ops, spec: ExpertsSpec, dtype: torch.dtype, format_of: FormatOf) -> Experts:
    """With the same random weights each time."""
    experts = Experts(Build(ops, CPU, dtype, format_of=format_of), LAYER, spec, 64)
    owners = {name: parameter for parameter in experts.parameters() for name in parameter.shapes()}
    torch.manual_seed(0)
    for name in sorted(owners):
        owners[name].load(name, torch.randn(owners[name].shapes()[name]) / 8)
    return experts


@pytest.mark.parametrize("form", [None, "fp8", "int8", "int4", "fp8_dynamic"])
@torch.inference_mode()
def test_a_shared_expert_is_one_of_them_if_it_is_stored_as_they_are(ops: Ops, form: str | None) -> None:
    """In float32 with the bits of an MLP beside them, rounded weights and rows included; in any company."""
    one, other = (rounded(form, exact=True) for _ in range(2))

    def apart(name: str) -> WeightFormat:
        if "shared_experts" not in name:
            return one(name)
        return Dequantized(DENSE) if form is None else other(name)

    joined, beside = (shared_layer(ops, WITH_SHARED, torch.float32, formats) for formats in (one, apart))
    assert joined.shared is None
    assert beside.shared is not None
    x = torch.randn(33, 64)
    routing = joined(x).routing
    assert routing.experts[:, 3:].tolist() == [[6]] * 33
    found, expected = output(joined, x), output(beside, x)
    torch.testing.assert_close(found, expected)
    if isinstance(ops, CpuOps):
        assert same_bits(found, expected)
        for dtype in (torch.float32, torch.bfloat16):
            alike = shared_layer(ops, WITH_SHARED, dtype, one)
            rows = torch.cat([output(alike, row[None]) for row in x.to(dtype)])
            assert same_bits(rows, output(alike, x.to(dtype)))


@pytest.mark.parametrize("changes", [{"shared_size": 192}, {"shared_size": 48}, {"glu": GLU(1.702, 2.0, 1.0)}])
def test_shared_experts_of_another_size_or_function_are_beside_the_others(changes: dict[str, Any]) -> None:
    beside = shared_layer(ReferenceOps(), replace(WITH_SHARED, **changes), torch.float32, dense)
    assert isinstance(beside.shared, MLP)
    assert len(output(beside, torch.randn(5, 64))) == 5


def test_memory_counts_shared_experts() -> None:
    """Where they are one of the others and where they are not."""
    inner = [Experts(outline(torch.bfloat16), LAYER, replace(WITH_SHARED, shared_size=n), 64) for n in (0, 96, 192)]
    none, one, two = (sum(each.num_bytes() for each in experts.parameters()) for experts in inner)
    assert one - none == two - one == 2 * 3 * 96 * 64
