"""MTP heads: the same numbers as a layer of transformers, in all layouts; heads that do not fit are refused."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TestModel, mostly_slow
from first_drafts import steps_of_heads, write_draft
from mtp_heads import Layout, make_mtp
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ssd import LLM, SamplingParams
from ssd.cli.main import app
from ssd.errors import ConfigError, SSDError, UnsupportedModel

K = 5
TOKENS = [3, 141, 59, 265, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 288, 41, 97, 169, 39, 93]
PARAMS = SamplingParams(max_new_tokens=8, temperature=0.0, ignore_eos=True)


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        *((kind, "deepseek") for kind in ("llama-tied", "llama-biased", "qwen3", "qwen2-windows")),
        *((kind, "deepseek") for kind in ("qwen3-moe", "mixtral", "gpt-oss", "glm4-moe-lite", "deepseek-v3")),
        *(("qwen3", layout) for layout in ("qwen", "nextn", "speculators")),
    ],
)
def test_hidden_states_and_logits_are_those_of_a_layer_of_transformers(
    make_model: Callable[[str], TestModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, layout: Layout
) -> None:
    """Of each family's own kind of layer: the first step from the target's states, and the next from the head's own.

    Catches states before the target's norm in place of those after it, or after the head's (its weights are not 1), the
    halves of `eh_proj` in the other order, a position or KV that is another one's, and a layer of another kind.
    """
    head = make_mtp(make_model(kind), tmp_path / "head", layout)
    tokens, logits, states = head.draft(TOKENS, K)
    speculation = {"mode": "sd", "draft": head.path, "k": K}
    with steps_of_heads(monkeypatch) as seen, LLM(head.model, device="cpu", speculation=speculation) as llm:
        assert write_draft(llm, TOKENS, K) == tokens
    assert len(seen) == K
    for (ours, own_state), theirs, state in zip(seen, logits, states, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(own_state, state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("layout", ["deepseek", "qwen"])
def test_a_target_is_that_without_its_head_and_the_log_says_that_there_is_one(
    make_model: Callable[[str], TestModel], tmp_path: Path, caplog: pytest.LogCaptureFixture, layout: Layout
) -> None:
    target = make_model("qwen3")
    head = make_mtp(target, tmp_path / "head", layout)
    texts = []
    for model in (target.path, head.model):
        with caplog.at_level(logging.INFO, "ssd"), LLM(model, device="cpu") as llm:
            texts.append(llm.generate([TOKENS], PARAMS)[0].token_ids)
        assert ("has an MTP head" in caplog.text) == (model == head.model)
    assert texts[0] == texts[1]


def test_of_several_heads_the_first_one_is_used(
    make_model: Callable[[str], TestModel], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    head = make_mtp(make_model("qwen3"), tmp_path / "head", changes={"num_nextn_predict_layers": 2})
    weights = load_file(head.file)
    second = {name.replace("layers.3.", "layers.4."): torch.zeros_like(tensor) for name, tensor in weights.items()}
    save_file(weights | second, head.file)
    with (
        caplog.at_level(logging.INFO, "ssd"),
        LLM(head.model, device="cpu", speculation={"mode": "sd", "draft": "mtp", "k": 3}) as llm,
    ):
        drafter: Any = llm.engine.round.drafter
        assert drafter.model.runner.head.norm.name == "model.layers.3.shared_head.norm"
        assert llm.generate([TOKENS], PARAMS)[0].metrics.drafted > 0
    assert "has 2 MTP heads: the first one writes all tokens" in caplog.text


@pytest.mark.parametrize(
    ("layout", "name", "words"),
    [
        ("deepseek", "model.layers.3.hnorm.weight", r"lacks 1 tensors, among them .'model.layers.3.hnorm.weight'"),
        ("qwen", "mtp.norm.weight", r"lacks 1 tensors, among them .'mtp.norm.weight'"),
        ("speculators", "mtp_layers.0.self_attn.q_proj.weight", r"lacks 1 .* .'mtp_layers.0.self_attn.q_proj.weight'"),
        ("nextn", "model.layers.0.eh_proj.weight", "has no MTP head, which would have one of model.layers.N.eh_proj"),
    ],
)
@pytest.mark.parametrize("wrong", ["missing", "of another shape"])
def test_tensors_that_are_missing_or_of_another_shape_are_named(
    make_model: Callable[[str], TestModel], tmp_path: Path, layout: Layout, name: str, words: str, wrong: str
) -> None:
    head = make_mtp(make_model("qwen3"), tmp_path / "head", layout)
    weights = load_file(head.file)
    tensor = weights.pop(name)
    if wrong == "of another shape":  # as q_proj of Qwen3-Next has, whose attention is gated
        weights[name] = torch.cat((tensor, tensor))
        words = rf"{name} has shape \({2 * len(tensor)},.*, the config says \({len(tensor)},"
    save_file(weights, head.file)
    with pytest.raises(UnsupportedModel, match=words):
        LLM(head.model, device="cpu", speculation={"mode": "sd", "draft": head.path, "k": K})


def test_unknown_tensors_of_a_head_are_refused(make_model: Callable[[str], TestModel], tmp_path: Path) -> None:
    head = make_mtp(make_model("qwen3"), tmp_path / "head")
    save_file(load_file(head.file) | {"model.layers.3.gate.weight": torch.ones(3)}, head.file)
    with pytest.raises(UnsupportedModel, match=r"holds model.layers.3.gate.weight, which its mtp config"):
        LLM(head.model, device="cpu", speculation={"mode": "sd", "draft": "mtp"})


@pytest.mark.parametrize(
    ("layout", "changes", "words"),
    [
        ("nextn", {"vocab_size": 4000}, "MTP head has vocab_size=4000, the target 320: use the one that was trained"),
        ("nextn", {"hidden_size": 96}, "MTP head has target_hidden_size=96, the target 64"),
        ("speculators", {"transformer_layer_config": 7}, "transformer_layer_config=7 in config.json: expected an obj"),
        ("deepseek", {"num_nextn_predict_layers": "one"}, "num_nextn_predict_layers='one' in config.json"),
        ("deepseek", {"num_nextn_predict_layers": 0}, "model.layers.3.*which its qwen3 config does not mention"),
    ],
)
def test_configs_that_do_not_fit_are_refused_with_the_reason(
    make_model: Callable[[str], TestModel], tmp_path: Path, layout: Layout, changes: dict[str, Any], words: str
) -> None:
    head = make_mtp(make_model("qwen3"), tmp_path / "head", layout, changes=changes)
    with pytest.raises(SSDError, match=words):
        LLM(head.model, device="cpu", speculation={"mode": "sd", "draft": head.path, "k": K})


def test_other_uses_are_refused_with_the_reason(make_model: Callable[[str], TestModel], tmp_path: Path) -> None:
    target = make_model("qwen3")
    head = make_mtp(target, tmp_path / "head", "nextn")
    with pytest.raises(UnsupportedModel, match="an MTP head is no model, it drafts for one"):
        LLM(head.path, device="cpu")
    with pytest.raises(UnsupportedModel, match="has no MTP head"):
        LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": "mtp"})
    with pytest.raises(ConfigError, match="this is a graft: use another draft"):
        LLM("graft:tiny-llama@llama-3.2-1b", device="cpu", speculation={"mode": "sd", "draft": "mtp"})
    with pytest.raises(ConfigError, match="is an MTP head, of which there are no grafts"):
        LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": f"graft:{head.path}@llama-3.2-1b"})
    exported = CliRunner().invoke(app, ["export-draft", head.path, "--out", str(tmp_path / "out")])
    assert exported.exit_code != 0
    assert "is no EAGLE head or block draft" in " ".join(exported.output.split())
    with pytest.raises(ConfigError, match='placement="process": a head reads the hidden states of the target'):
        LLM(target.path, device="cpu", speculation={"mode": "ssd", "draft": head.path, "placement": "process"})
    windows = make_mtp(make_model("mistral-windows"), tmp_path / "windows")
    with pytest.raises(ConfigError, match="all layers of the target have sliding windows, but an MTP head needs"):
        LLM(windows.model, device="cpu", speculation={"mode": "sd", "draft": "mtp"})


@pytest.mark.parametrize("quantized", mostly_slow(["target", "head"], fast={"target"}))
def test_a_quantised_checkpoint_may_have_a_head(
    make_model: Callable[[str], TestModel], tmp_path: Path, quantized: str
) -> None:
    """FP8: the codes are the head's, or those of the target alone, whose head is stored in floats."""
    head = make_mtp(make_model("qwen3"), tmp_path / "head")
    folder = Path(head.model)
    index = json.loads((folder / "model.safetensors.index.json").read_text(encoding="utf-8"))
    for file in folder.glob("*.safetensors"):
        weights = load_file(file)
        for name in [name for name in weights if "_proj.weight" in name and "eh_proj" not in name]:
            if (".layers.3." in name) == (quantized == "head"):
                scale = weights[name].abs().max() / 448
                weights[name] = (weights[name] / scale).to(torch.float8_e4m3fn)
                weights[f"{name}_scale"] = scale
                index["weight_map"][f"{name}_scale"] = file.name
        save_file(weights, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    scheme = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": scheme}), encoding="utf-8")
    with LLM(head.model, device="cpu", speculation={"mode": "sd", "draft": "mtp", "k": 3}) as llm:
        features: Any = llm.engine.round.target.runner.features  # type: ignore[attr-defined]
        assert ("fp8" in features.draft.quantized) == (quantized == "head")
        assert llm.generate([TOKENS], PARAMS)[0].metrics.drafted > 0
