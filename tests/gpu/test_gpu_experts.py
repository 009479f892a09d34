"""Experts on a GPU: products at real sizes in bfloat16, in CUDA graphs, and the same text in all modes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from bits import same_bits

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

from conftest import TestModel, ragged_prompts
from fakes import wait_until_idle
from reference_ops import ReferenceOps

from ssd import LLM, SamplingParams
from ssd.kernels.codes import Codes, CodeType, bits_of, dequantize
from ssd.kernels.ops import ExpertOutputs
from ssd.kernels.triton.ops import TritonOps
from ssd.kernels.weights import GLU, SOFTMAX_OF_CHOSEN, SWIGLU, Routing, RoutingRule, Weight
from ssd.prompts import load_prompts

pytestmark = [pytest.mark.gpu, pytest.mark.gpu_memory(10)]
CUDA = torch.device("cuda")
CLAMPED = GLU(1.702, 7.0, 1.0)
ROWS = (1, 2, 5, 8, 16, 17, 40, 64, 65, 128, 200, 256, 513, 2000)
SIZES = {
    "qwen3-30b-a3b": (128, 8, 2048, 768, SWIGLU),
    "gpt-oss-20b": (32, 4, 2880, 2880, CLAMPED),
    "glm-4.7-flash": (65, 5, 2048, 1536, SWIGLU),
}
RULES = {"glm-4.7-flash": RoutingRule(True, True, 1, 1, 1.8, shared=1)}
LAYERS: list[tuple[str, CodeType | None, int]] = [  # type of codes, and weights of one scale (0: a whole row)
    ("qwen3-30b-a3b", None, 0),
    ("qwen3-30b-a3b", "fp8", 0),
    ("qwen3-30b-a3b", "int8", 0),
    ("gpt-oss-20b", "fp4", 32),
    ("gpt-oss-20b", "int4", 32),
    ("qwen3-30b-a3b", "int4", 128),
    ("qwen3-30b-a3b", "fp8", 128),
    ("glm-4.7-flash", None, 0),
    ("glm-4.7-flash", "fp8", 0),
    ("glm-4.7-flash", "fp8", 128),
]


class Layer:
    """Random experts of a published size, in bfloat16, the last of which may be shared."""

    def __init__(self, name: str, code: CodeType | None, group: int) -> None:
        self.experts, self.per_row, self.hidden, self.inner, self.glu = SIZES[name]
        self.ops, self.rule = TritonOps(), RULES.get(name, SOFTMAX_OF_CHOSEN)
        torch.manual_seed(0)
        self.gate_up = self._weight(2 * self.inner, self.hidden, True, code, group)
        self.down = self._weight(self.hidden, self.inner, False, code, group)
        choices = self.experts - self.rule.shared
        self.router = self.ops.prepare(torch.randn(choices, self.hidden, device=CUDA).bfloat16() / 32)
        self.correction = torch.rand(choices, device=CUDA) / 4 if self.rule.sigmoid else None
        self.bias = torch.randn(self.experts * 2 * self.inner, device=CUDA).bfloat16() / 4

    def _weight(self, rows: int, depth: int, gated: bool, code: CodeType | None, group: int) -> Weight:
        total = self.experts * rows
        if code is None:
            self.wide = (torch.randn(total, depth, device=CUDA) * depth**-0.5).bfloat16()
            return self.ops.prepare(self.wide, gated=gated, experts=self.experts)
        values = torch.randint(0, 1 << bits_of(code), (total, depth), dtype=torch.uint8, device=CUDA)
        values = torch.where(values & 0x7F == 0x7F, 0, values)  # not a number in fp8
        scales = (torch.rand(total, depth // (group or depth), device=CUDA) + 0.5) * depth**-0.5 / 100
        if code == "fp4":
            scales = scales.log2().round().exp2()  # powers of two
        if group == 32:
            scales = scales.bfloat16().float()  # as published INT4 has them
        codes = Codes(values, scales, code, depth)
        self.wide = dequantize(codes, torch.bfloat16)
        return self.ops.prepare_codes(codes, torch.bfloat16, gated=gated, experts=self.experts)

    def route(self, x: torch.Tensor) -> Routing:
        return self.ops.route(self.router.router(x), self.per_row - self.rule.shared, self.rule, self.correction)

    def __call__(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routing = self.route(x)
        inner = self.gate_up.expert_linear(x, routing, self.bias, glu=self.glu)
        outputs = self.down.expert_linear(inner, routing)
        return routing.weights, inner.view(len(x), -1), self.ops.combine(outputs, routing)


@pytest.mark.parametrize(("name", "code", "group"), LAYERS)
def test_a_row_has_the_same_bits_in_any_company(name: str, code: CodeType | None, group: int) -> None:
    """Alone, in batches of every tile shape, and among rows that all share its experts."""
    layer = Layer(name, code, group)
    x = torch.randn(2000, layer.hidden, device=CUDA).bfloat16()
    wanted = torch.tensor([7, 0, 900, 1999], device=CUDA)
    alone = [layer(x[i : i + 1]) for i in wanted]
    for rows in ROWS:
        index = torch.randperm(2000, device=CUDA)[:rows]
        index[: len(wanted)] = wanted[:rows]
        found, shared = layer(x[index]), layer(x[wanted[:1]].expand(rows, -1).contiguous())
        for place in range(min(rows, len(wanted))):
            assert all(same_bits(a[place], b[0]) for a, b in zip(found, alone[place], strict=True)), (rows, place)
            assert all(same_bits(a[place], b[0]) for a, b in zip(shared, alone[0], strict=True)), (rows, place)


@pytest.mark.parametrize(("name", "code", "group"), LAYERS)
def test_products_equal_plain_torch(name: str, code: CodeType | None, group: int) -> None:
    layer, reference = Layer(name, code, group), ReferenceOps()
    for rows in (1, 33, 700):
        inner = torch.randn(rows * layer.per_row, layer.inner, device=CUDA).bfloat16()
        routing = layer.route(torch.randn(rows, layer.hidden, device=CUDA).bfloat16())
        found = layer.down.expert_linear(inner, routing, float32=True)
        expected = reference.prepare(layer.wide.float()).expert_linear(inner.float(), routing)
        assert (found - expected).norm() < 5e-3 * expected.norm(), rows


@pytest.mark.parametrize("name", ["qwen3-30b-a3b", "glm-4.7-flash"])
def test_a_graph_routes_other_rows_than_those_it_was_captured_with(name: str) -> None:
    """Catches anything that the host decides from the rows."""
    layer = Layer(name, None, 0)
    x = torch.randn(16, layer.hidden, device=CUDA).bfloat16()
    layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer(x)
    for seed in range(3):
        torch.manual_seed(seed)
        x.normal_()
        graph.replay()
        assert all(same_bits(a, b) for a, b in zip(found, layer(x.clone()), strict=True))


def test_sums_of_experts_that_a_norm_adds_up_have_the_bits_of_others() -> None:
    """A forward pass that writes features has both."""
    layer = Layer("gpt-oss-20b", "fp4", 32)
    x = torch.randn(70, layer.hidden, device=CUDA).bfloat16()
    routing, weight = layer.route(x), torch.rand(layer.hidden, device=CUDA)
    outputs = ExpertOutputs(torch.randn(70 * layer.per_row, layer.hidden, device=CUDA).bfloat16(), routing)
    expected = layer.ops.rms_norm(layer.ops.combine(*outputs), weight, 1e-5, other := x.clone())
    assert same_bits(layer.ops.combine_and_norm(outputs, weight, 1e-5, x), expected)
    assert same_bits(x, other)


PROMPTS = ragged_prompts(16, longest=150)
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=32, ignore_eos=True) for i in range(16)]


@pytest.mark.parametrize(
    ("kind", "quantization"),
    [
        *(("qwen3-moe", None), ("qwen3-moe", "fp8"), ("qwen3-moe", "int4"), ("gpt-oss", None)),
        *(("glm4-moe-lite", None), ("deepseek-v3", None), ("deepseek-v3", "fp8")),
    ],
)
def test_the_same_text_by_ar_sd_and_ssd(
    make_model: Callable[[str], TestModel], kind: str, quantization: str | None
) -> None:
    """bfloat16, T = 0 and 1, batches of 1, 6 and 16; drafts with and without experts."""
    target, dense, experts = (make_model(each).path for each in (kind, "qwen3", "mixtral"))

    def answers(batch: int, **speculation: Any) -> list[list[int]]:
        options: dict[str, Any] = {"speculation": speculation or None, "quantization": quantization}
        with LLM(target, device="cuda", dtype="bfloat16", num_kv_blocks=512, max_num_seqs=batch, **options) as llm:
            outputs = llm.generate(PROMPTS, PARAMS)
            wait_until_idle(llm.driver)
            assert llm.engine.metrics.drafter_failures == 0
        return [output.token_ids for output in outputs]

    alone = answers(1)
    assert answers(16) == alone
    assert answers(6, mode="sd", draft=dense, k=3) == alone
    assert answers(16, mode="sd", draft=experts, k=3) == alone
    assert answers(16, mode="ssd", draft=experts, k=4) == alone


@pytest.mark.gpu_memory(28)
def test_a_graft_writes_the_same_text_in_all_modes() -> None:
    """At a published size, batches of 1 and 16."""
    prompts = load_prompts("gsm8k").asked()[:16]
    params = [SamplingParams(temperature=float(i % 2), max_new_tokens=48, ignore_eos=True, seed=i) for i in range(16)]

    def answers(batch: int, **speculation: Any) -> list[list[int]]:
        options: dict[str, Any] = {"speculation": speculation or None, "max_model_len": 1024}
        with LLM("graft:tiny-llama@gpt-oss-20b", device="cuda", max_num_seqs=batch, **options) as llm:
            outputs = llm.generate(prompts, params)
            wait_until_idle(llm.driver)
        return [output.token_ids for output in outputs]

    alone = answers(1)
    draft = "graft:tiny-llama-draft@smollm2-135m"
    assert answers(16, mode="sd", draft=draft, k=4) == alone
    assert answers(16, mode="ssd", draft=draft, k=4) == alone
