"""Grafts with experts: the base's function up to rounding, and a router that spreads tokens as trained ones do.

GPT-OSS's have sinks, windows, biases, a limited function of gate and up, and experts in MXFP4.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bits import same_bits
from conftest import TestModel, mostly_slow, ragged_prompts
from experts import graft_routing
from reference_ops import ReferenceOps
from split_models import logits_of

from ssd import LLM, ConfigError, SamplingParams
from ssd.assembly.memory import weight_bytes
from ssd.assembly.open import open_checkpoint
from ssd.grafts.expert_graft import digits
from ssd.grafts.export import write_graft
from ssd.grafts.graft import GraftCheckpoint
from ssd.grafts.shapes import SHAPES
from ssd.kernels.weights import Routing, RoutingRule
from ssd.layers.formats.mxfp4 import MXFP4
from ssd.layers.parameter import Build
from ssd.layers.spec import ExpertsSpec
from ssd.models.config import DecoderConfig, equal_layers
from ssd.models.decoder import Decoder
from ssd.models.families import gpt_oss
from tests.models.test_parity import engine_logits

CPU = torch.device("cpu")
TOKENS = list(range(0, 320, 7))


def shape(experts: ExpertsSpec, layers: int = 5) -> DecoderConfig:
    dense = equal_layers("qwen3_moe", 640, 512, 1, layers, 6, 2, 64, 64, qk_norm=True)
    return replace(dense, layers=(replace(dense.layer, mlp=experts),) * layers)


@pytest.fixture
def model(make_model: Callable[[str], TestModel], monkeypatch: pytest.MonkeyPatch) -> str:
    """A dense base of 64 dimensions and an MLP of 112."""
    monkeypatch.setitem(SHAPES, "whole", shape(ExpertsSpec(8, 2, 120)))
    monkeypatch.setitem(SHAPES, "in-parts", shape(ExpertsSpec(16, 4, 60)))
    return make_model("qwen3").path


@pytest.fixture
def llama(make_model: Callable[[str], TestModel], monkeypatch: pytest.MonkeyPatch) -> str:
    """Likewise, for a GPT-OSS whose stream holds 7 1/2 of the base's, in six copies, and whose windows are short."""
    sizes = {"vocab_size": 640, "hidden_size": 480, "intermediate_size": 512, "num_attention_heads": 8}
    kinds = {"num_key_value_heads": 4, "head_dim": 32, "num_local_experts": 4, "sliding_window": 16}
    shape = gpt_oss({**sizes, **kinds, "num_hidden_layers": 6, "num_experts_per_tok": 2})
    monkeypatch.setitem(SHAPES, "gpt-oss", shape)
    return make_model("llama-tied").path


@pytest.mark.parametrize(
    ("base", "name"),
    mostly_slow(
        [("model", "whole"), ("model", "in-parts"), ("llama", "gpt-oss")],
        fast={("llama", "gpt-oss")},
    ),
)
def test_the_same_function(base: str, name: str, request: pytest.FixtureRequest) -> None:
    """Catches experts that hold another part than the router's rows say, a code that others read, and of GPT-OSS a
    layer of the base that is in a window, a sink that weighs, a wrong function of gate and up, a lost digit."""
    model = request.getfixturevalue(base)
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with LLM(model, device="cpu", dtype="float32") as llm:
        expected, text = engine_logits(llm, TOKENS), llm.generate(TOKENS, params)[0].token_ids
    with LLM(f"graft:{model}@{name}", device="cpu", dtype="float32") as llm:
        found = engine_logits(llm, TOKENS)[:, :320]
        assert llm.generate(TOKENS, params)[0].token_ids == text
    assert (found - expected).norm() < (1e-3 if name == "gpt-oss" else 1e-4) * expected.norm()


@pytest.mark.parametrize(("count", "error"), [(3, 3e-3), (6, 1e-5)])
def test_numbers_of_4_bits_add_up_to_a_weight(count: int, error: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(64, 80)
    parts = digits(weight, count).view(64, count, 96)
    assert (parts.sum(1)[:, :80] - weight).norm() < error * weight.norm()
    stored = MXFP4().tensors_of(parts.flatten(1))
    assert same_bits(MXFP4().widened(stored)["weight"], parts.flatten(1))


class Recording(ReferenceOps):
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def route(
        self, logits: torch.Tensor, count: int, rule: RoutingRule, correction: torch.Tensor | None = None
    ) -> Routing:
        routing = super().route(logits, count, rule, correction)
        self.found.append(routing.experts)
        return routing


@pytest.mark.slow
def test_tokens_are_spread_over_the_experts(make_model: Callable[[str], TestModel]) -> None:
    """Eight of 128 experts, in layers with and without a layer of the base: all are used, none three times as often as
    the others; few rows hit as many as if they chose at random. Catches a router that reads what all tokens share."""
    config = shape(ExpertsSpec(128, 8, 120), layers=4)
    graft = GraftCheckpoint(open_checkpoint(make_model("qwen3").path), "base", config, "shape")
    ops = Recording()
    decoder = Decoder(graft.config, Build(ops, CPU, torch.float32), max_positions=64)
    decoder.load(graft.weights(CPU, torch.float32))
    torch.manual_seed(0)
    for _ in range(8):
        logits_of(decoder, torch.randperm(320)[:40].tolist())
    for layer in range(4):
        experts = torch.cat(ops.found[layer::4])
        load = experts.long().flatten().bincount(minlength=128) / (len(experts) * 8 / 128)  # 1: as often as the others
        assert load.min() > 0.1, load
        assert load.max() < 3.0, load
        hit = [len(set(each.flatten().tolist())) for each in experts.split(5)]
        at_random = 128 * (1 - (1 - 8 / 128) ** 5)
        assert sum(hit) / len(hit) == pytest.approx(at_random, rel=0.1)
    ops.found.clear()
    tokens = torch.arange(0, 320, 9)
    logits_of(decoder, tokens.tolist())  # `bench/experts.py --model` shows what the router does
    for found, told in zip(ops.found, graft_routing(graft, CPU, torch.float32), strict=True):
        assert torch.equal(found.long().sort().values, told[tokens].sort().values)


@pytest.mark.parametrize(
    ("base", "name"), mostly_slow([("model", "in-parts"), ("llama", "gpt-oss")], fast={("model", "in-parts")})
)
def test_an_exported_graft_is_the_same_model_for_transformers(
    base: str, name: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    model, packed = request.getfixturevalue(base), name == "gpt-oss"
    graft = GraftCheckpoint.of(open_checkpoint(model), name)
    write_graft(graft, tmp_path / "graft", torch.float32, CPU)
    assert open_checkpoint(tmp_path / "graft").config == graft.config
    widened = {"quantization_config": transformers.Mxfp4Config(dequantize=True)} if packed else {}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "graft", dtype=torch.float32, **widened)
    theirs = theirs.float()  # MXFP4 is widened to bfloat16
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    with LLM(f"graft:{model}@{name}", device="cpu", dtype="float32") as llm:
        found = engine_logits(llm, TOKENS)
    assert (found - expected).norm() < 1e-4 * expected.norm()
    with LLM(str(tmp_path / "graft"), device="cpu", dtype="float32") as llm:
        assert same_bits(engine_logits(llm, TOKENS), found)


@pytest.mark.slow  # tests/models/test_expert_models.py does so with a small GPT-OSS
def test_a_graft_of_gpt_oss_writes_the_same_text_in_all_modes(llama: str) -> None:
    """T = 0 and 1, windows crossed."""
    prompts = ragged_prompts(4, longest=40)
    params = [SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=24, ignore_eos=True) for i in range(4)]

    def answers(batch: int, **speculation: Any) -> list[list[int]]:
        options = {"speculation": {"draft": llama, "k": 3, **speculation}} if speculation else {}
        with LLM(f"graft:{llama}@gpt-oss", device="cpu", dtype="bfloat16", max_num_seqs=batch, **options) as llm:
            return [output.token_ids for output in llm.generate(prompts, params)]

    alone = answers(1)
    assert answers(4, mode="sd") == alone
    assert answers(4, mode="ssd") == alone


def test_an_exported_rounded_graft_is_read_back(model: str, tmp_path: Path) -> None:
    """Its router is not rounded, and config.json says so."""
    graft = GraftCheckpoint.of(open_checkpoint(model), "in-parts:fp8")
    write_graft(graft, tmp_path / "graft", torch.float32, CPU)
    with LLM(str(tmp_path / "graft"), device="cpu", dtype="float32") as llm:
        found = engine_logits(llm, TOKENS)
    with LLM(f"graft:{model}@in-parts:fp8", device="cpu", dtype="float32") as llm:
        assert same_bits(engine_logits(llm, TOKENS), found)


def test_what_does_not_fit_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "three", shape(ExpertsSpec(12, 3, 60)))
    with pytest.raises(ConfigError, match=r"intermediate_size=112 needs 2 experts of 60.*experts_per_token=3"):
        open_checkpoint(f"graft:{model}@three")


@pytest.mark.parametrize(
    ("base", "name", "billions", "active"),
    [
        ("tiny-qwen3", "qwen3-30b-a3b", 30.5, 3.3),
        ("tiny-llama", "gpt-oss-20b", 20.9, 4.2),  # its authors leave the embedding out of the active 3.6
        ("tiny-llama", "gpt-oss-120b", 116.8, 5.7),  # likewise 5.1
    ],
)
def test_the_published_shapes(base: str, name: str, billions: float, active: float) -> None:
    """Catches a size that is not the published one: parameters, and how many of them a token reads."""
    config = GraftCheckpoint.of(open_checkpoint(base), name).config
    experts = config.layers[0].mlp
    assert isinstance(experts, ExpertsSpec)
    each = 3 * experts.intermediate_size * config.hidden_size
    idle = config.num_layers * (experts.num_experts - experts.experts_per_token) * each
    total = weight_bytes(config, torch.bfloat16) / 2
    assert total == pytest.approx(billions * 1e9, rel=0.01)
    assert total - idle == pytest.approx(active * 1e9, rel=0.02)


def test_gpt_oss_is_rounded_already(llama: str) -> None:
    with pytest.raises(ConfigError, match=r"quantised already \(.*experts.* is mxfp4\): leave it out"):
        LLM(f"graft:{llama}@gpt-oss:fp8", device="cpu")
