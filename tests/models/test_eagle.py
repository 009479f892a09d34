"""EAGLE-3 heads: the same numbers as a plain implementation, in both layouts; heads that do not fit are refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from conftest import TestModel, mostly_slow
from eagle_heads import Layout, make_head
from first_drafts import steps_of_heads, write_draft
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from ssd import LLM, SamplingParams
from ssd.cli.main import app
from ssd.errors import ConfigError, SSDError, UnsupportedModel
from ssd.grafts.shapes import SHAPES
from ssd.layers.spec import RopeConfig
from ssd.models.config import equal_layers
from ssd.models.eagle import EagleCheckpoint

K = 5
TOKENS = [3, 141, 59, 265, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 288, 41, 97, 169, 39, 93]


@pytest.mark.parametrize(
    ("kind", "layout", "options"),
    [
        ("llama-tied", "eagle", {}),
        ("qwen3", "eagle", {"fc_bias": True}),
        ("qwen3", "speculators", {"norm_before_residual": True, "own_embedding": True, "hidden_size": 48}),
        ("llama3-scaled", "speculators", {"own_embedding": True}),
        ("llama-tied", "speculators", {"norms": "norm_before_fc"}),
        ("qwen3", "speculators", {"norms": "fc_norm", "norm_output": True}),
    ],
)
def test_hidden_states_and_logits_are_those_of_a_plain_implementation(
    make_model: Callable[[str], TestModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    layout: Layout,
    options: dict[str, Any],
) -> None:
    """Features of three layers, fused; the first step from them and the next from the head's own states."""
    target = make_model(kind)
    head = make_head(target, tmp_path / "head", layout, **options)
    tokens, logits, states = head.draft(TOKENS, K)
    speculation = {"mode": "sd", "draft": head.path, "k": K}
    with steps_of_heads(monkeypatch) as seen, LLM(target.path, device="cpu", speculation=speculation) as llm:
        assert write_draft(llm, TOKENS, K) == tokens
    for (ours, own_state), theirs, state in zip(seen, logits, states, strict=True):
        torch.testing.assert_close(ours, theirs[theirs > -torch.inf], rtol=1e-4, atol=1e-4)  # of the head's own tokens
        torch.testing.assert_close(own_state, state, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 4000}, "vocab_size=4000, the target 320: use the one that was trained for this model"),
        ({"target_hidden_size": 96}, "target_hidden_size=96, the target 64"),
        (
            {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]},
            r"layers \(1, 2, 4\), which must be different numbers from 1 to 3",
        ),
        ({"eagle_aux_hidden_state_layer_ids": [1, 1, 2]}, "different numbers"),
        ({"eagle_aux_hidden_state_layer_ids": ["x"]}, "expected a list of layer numbers"),
        ({"eagle_config": None}, r"layers \(2, 1, 0\)"),
        ({"num_hidden_layers": 2}, "num_hidden_layers=2: ssd runs heads of one layer"),
        ({"norm_before_fc": True}, "lacks 1 tensors, among them .'input_norm.weight'"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"layer_types": ["sliding_attention"]}, "layer_types=.'sliding_attention'.: ssd runs drafts"),
        ({"speculators_model_type": "peagle"}, "speculators_model_type='peagle': ssd runs heads of the type eagle3"),
        ({"speculators_model_type": "eagle3", "num_medusa_heads": 4}, "ssd does not know what this changes of a head"),
        ({"draft_vocab_size": 199}, "d2t has to map 199 draft tokens to different ones of 320"),
        ({"draft_vocab_size": -1}, "draft_vocab_size=-1"),
        ({"architectures": 5}, "architectures=5 in config.json: expected a list"),
        ({"eagle_config": 7}, "eagle_config=7 in config.json: expected an object"),
        ({"transformer_layer_config": {"vocab_size": 320}}, "num_attention_heads is missing"),
        ({"hidden_size": 96}, "embed_tokens"),
        ({"intermediate_size": 81}, "proj.weight has shape"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_a_head_that_does_not_fit_is_refused_with_the_reason(
    make_model: Callable[[str], TestModel], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    target = make_model("llama-tied")
    head = make_head(target, tmp_path / "head", changes=changes)
    with pytest.raises((ConfigError, UnsupportedModel), match=words):
        LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": head.path})


def test_a_map_of_tokens_that_is_no_integers_is_refused(make_model: Callable[[str], TestModel], tmp_path: Path) -> None:
    """Catches offsets such as 0.9, 1e30 or NaN that are cut to some integer."""
    target = make_model("llama-tied")
    head = make_head(target, tmp_path / "head")
    file = Path(head.path) / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "d2t": weights["d2t"].float()}, file)
    with pytest.raises(UnsupportedModel, match=r"d2t has to map .*, by integers: download it again"):
        LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": head.path})


def test_other_uses_of_a_head_are_refused_with_the_reason(
    make_model: Callable[[str], TestModel], tmp_path: Path
) -> None:
    """As a model, in another process, without features (as heads of EAGLE 1 are), and with a tensor that is unknown."""
    target = make_model("llama-tied")
    head = make_head(target, tmp_path / "head")
    with pytest.raises(UnsupportedModel, match="an EAGLE head is no model"):
        LLM(head.path, device="cpu")
    with pytest.raises(ConfigError, match='placement="process": a head reads the hidden states of the target'):
        LLM(target.path, device="cpu", speculation={"mode": "ssd", "draft": head.path, "placement": "process"})
    file = Path(head.path) / "model.safetensors"
    weights = load_file(file)
    save_file({**weights, "midlayer.extra.weight": weights["norm.weight"].clone()}, file)
    with pytest.raises(UnsupportedModel, match=r"layers.0.extra.weight"):
        LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": head.path})
    save_file({name: tensor for name, tensor in weights.items() if "hidden_norm" not in name}, file)
    with pytest.raises(UnsupportedModel, match="not those of EAGLE 1 and 2"):
        LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": head.path})
    (Path(head.path) / "config.json").write_text(json.dumps({"draft_vocab_size": 3}), encoding="utf-8")
    with pytest.raises(SSDError):
        LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": head.path})


@pytest.mark.parametrize("vocab", mostly_slow([33000, 1000, 320], fast={33000}))
def test_a_grafted_head_drafts_what_the_small_one_drafts(
    make_model: Callable[[str], TestModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, vocab: int
) -> None:
    """For a grafted target, with the draft vocabulary of published heads where the shape's vocabulary has room."""
    big = equal_layers("llama", vocab, 256, 150, 7, 8, 4, 32, 99, 0.1, RopeConfig(7.0))
    monkeypatch.setitem(SHAPES, "big", big)
    target = make_model("llama-tied")
    head = make_head(target, tmp_path / "head", head_dim=16)
    few = dict.fromkeys((3, 17, 60, 101, 222), 100.0)
    params = [SamplingParams(max_new_tokens=30, ignore_eos=True, logit_bias=bias) for bias in (few, {})]
    found = []
    for form in ("{}", "graft:{}@big"):
        speculation = {"mode": "sd", "draft": form.format(head.path), "k": 3}
        with LLM(form.format(target.path), device="cpu", max_model_len=100, speculation=speculation) as llm:
            outputs = llm.generate([TOKENS, TOKENS[:7]], params)
            drafter: Any = llm.engine.round.drafter
            sizes = drafter.model.runner.head.eagle
        found.append([(each.token_ids, each.metrics.accepted_per_position) for each in outputs])
    assert found[0] == found[1]
    assert sum(found[0][0][1]) > 0
    assert sizes.feature_layers == (2, 4, 7)
    assert sizes.draft_vocab_size == (32000 if vocab == 33000 else 200)


def test_a_grafted_head_needs_the_graft_of_its_target(
    make_model: Callable[[str], TestModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    big = equal_layers("llama", 1000, 256, 150, 7, 8, 4, 32, 99, 0.1, RopeConfig(7.0))
    monkeypatch.setitem(SHAPES, "big", big)
    target = make_model("llama-tied")
    plain, biased = (make_head(target, tmp_path / str(bias), head_dim=16, fc_bias=bias) for bias in (False, True))
    for model, draft, words in (
        (target.path, f"graft:{plain.path}@big", "use model='graft:…@big'"),
        (f"graft:{target.path}@big", plain.path, "vocab_size=320, the target 1000"),
        (f"graft:{target.path}@big", f"graft:{biased.path}@big", "the head's fc_bias is true"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(model, device="cpu", speculation={"mode": "sd", "draft": draft})


@pytest.mark.parametrize("layout", ["eagle", "speculators"])
def test_an_exported_head_is_the_same_head_in_the_authors_layout(
    make_model: Callable[[str], TestModel], tmp_path: Path, layout: Layout
) -> None:
    """Catches a field or a tensor that is lost, renamed or rounded, and layers that are counted otherwise."""
    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    scaled = {"rope_scaling": llama3 | {"original_max_position_embeddings": 64}} if layout == "eagle" else {}
    made = make_head(
        make_model("qwen3"), tmp_path / "head", layout, own_embedding=True, norm_before_residual=True, changes=scaled
    )
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export-draft", made.path, "--out", str(out), "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    ours, theirs = EagleCheckpoint.open(out), EagleCheckpoint.open(Path(made.path))
    assert replace(ours.config, dtype="float32") == replace(theirs.config, dtype="float32")
    stored = load_file(out / "model.safetensors")
    assert stored.keys() == made.weights.keys()
    for name, tensor in made.weights.items():
        assert same_bits(stored[name], tensor), name


def test_a_graft_of_a_head_is_exported_as_a_head_for_the_graft(
    make_model: Callable[[str], TestModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "big", equal_layers("llama", 1000, 256, 150, 7, 8, 4, 32, 99, 0.1, RopeConfig(7.0)))
    target = make_model("llama-tied")
    head = make_head(target, tmp_path / "head", head_dim=16)
    command = ["export-draft", f"graft:{head.path}@big", "--out", str(tmp_path / "out"), "--dtype", "float32"]
    refused = CliRunner().invoke(app, command)
    assert "name the graft that it drafts for with --target" in refused.output
    result = CliRunner().invoke(app, [*command, "--target", f"graft:{target.path}@big"])
    assert result.exit_code == 0, result.output
    found = []
    for draft in (f"graft:{head.path}@big", str(tmp_path / "out")):
        speculation = {"mode": "sd", "draft": draft, "k": 3}
        with LLM(f"graft:{target.path}@big", device="cpu", max_model_len=64, speculation=speculation) as llm:
            few = dict.fromkeys((3, 17, 60, 101, 222), 100.0)
            output = llm.generate(TOKENS[:9], SamplingParams(max_new_tokens=20, ignore_eos=True, logit_bias=few))[0]
        found.append((output.token_ids, output.metrics.accepted_per_position))
    assert found[0] == found[1]


@pytest.mark.parametrize("copied", [True, False])
def test_an_embedding_that_is_a_copy_of_the_targets_is_not_kept(
    make_model: Callable[[str], TestModel], tmp_path: Path, copied: bool
) -> None:
    """As in the files of speculators, where it would be a gigabyte of an 8B's memory."""
    target = make_model("llama-tied")
    head = make_head(target, tmp_path / "head", "speculators", own_embedding=True)
    if copied:
        head.weights["embed_tokens.weight"].copy_(target.reference.get_input_embeddings().weight.detach())
        file = Path(head.path) / "model.safetensors"
        save_file(load_file(file) | {"embed_tokens.weight": head.weights["embed_tokens.weight"]}, file)
    with LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": head.path, "k": K}) as llm:
        drafter: Any = llm.engine.round.drafter
        runner: Any = llm.engine.round.target
        assert (drafter.model.runner.head.embedding is runner.runner.decoder.embedding) == copied
        outputs = llm.generate(TOKENS, SamplingParams(max_new_tokens=4))
        assert outputs[0].metrics.drafted > 0
