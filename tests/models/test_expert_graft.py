"""Grafts with experts: the base's function up to rounding, and a router that spreads tokens as trained ones do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from conftest import TestModel
from test_parity import engine_logits
from test_tensor_parallel import logits_of

from ssd import LLM, ConfigError, SamplingParams
from ssd.assembly.memory import weight_bytes
from ssd.kernels.ops import Routing
from ssd.kernels.reference import ReferenceOps
from ssd.layers.parameter import Build
from ssd.layers.spec import ExpertsSpec
from ssd.models.config import DecoderConfig, equal_layers
from ssd.models.decoder import Decoder
from ssd.models.export import write_graft
from ssd.models.graft import GraftCheckpoint
from ssd.models.open import open_checkpoint
from ssd.models.shapes import SHAPES

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


@pytest.mark.parametrize("name", ["whole", "in-parts"])
def test_the_same_function(model: str, name: str) -> None:
    """Catches experts that hold another part than the router's rows say, and a code that others read."""
    params = SamplingParams(max_new_tokens=24, ignore_eos=True)
    with LLM(model, device="cpu", dtype="float32") as llm:
        expected, text = engine_logits(llm, TOKENS), llm.generate(TOKENS, params)[0].token_ids
    with LLM(f"graft:{model}@{name}", device="cpu", dtype="float32") as llm:
        found = engine_logits(llm, TOKENS)[:, :320]
        assert llm.generate(TOKENS, params)[0].token_ids == text
    assert (found - expected).norm() < 1e-4 * expected.norm()


class Recording(ReferenceOps):
    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def route(self, logits: torch.Tensor, count: int, *, chosen: bool) -> Routing:
        routing = super().route(logits, count, chosen=chosen)
        self.found.append(routing.experts)
        return routing


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


def test_an_exported_graft_is_the_same_model_for_transformers(model: str, tmp_path: Path) -> None:
    graft = GraftCheckpoint.of(open_checkpoint(model), "in-parts")
    write_graft(graft, tmp_path / "graft", torch.float32, CPU)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "graft", dtype=torch.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor([TOKENS])).logits[0]
    with LLM(f"graft:{model}@in-parts", device="cpu", dtype="float32") as llm:
        assert (engine_logits(llm, TOKENS) - expected).norm() < 1e-4 * expected.norm()


def test_an_exported_rounded_graft_is_read_back(model: str, tmp_path: Path) -> None:
    """Its router is not rounded, and config.json says so."""
    graft = GraftCheckpoint.of(open_checkpoint(model), "in-parts:fp8")
    write_graft(graft, tmp_path / "graft", torch.float32, CPU)
    with LLM(str(tmp_path / "graft"), device="cpu", dtype="float32") as llm:
        found = engine_logits(llm, TOKENS)
    with LLM(f"graft:{model}@in-parts:fp8", device="cpu", dtype="float32") as llm:
        assert torch.equal(engine_logits(llm, TOKENS), found)


def test_what_does_not_fit_is_refused(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "three", shape(ExpertsSpec(12, 3, 60)))
    with pytest.raises(ConfigError, match=r"intermediate_size=112 needs 2 experts of 60.*experts_per_token=3"):
        open_checkpoint(f"graft:{model}@three")


def test_the_published_shape() -> None:
    """Catches a size of Qwen3-30B-A3B that is not the published one: 30.5 billion parameters, 3.3 of them active."""
    graft = GraftCheckpoint.of(open_checkpoint("tiny-qwen3"), "qwen3-30b-a3b")
    config = graft.config
    experts = config.layer.mlp
    assert isinstance(experts, ExpertsSpec)
    each = 3 * experts.intermediate_size * config.hidden_size
    total = weight_bytes(config, torch.bfloat16) / 2
    assert total == pytest.approx(30.5e9, rel=0.01)
    assert total - 48 * (128 - 8) * each == pytest.approx(3.3e9, rel=0.02)
