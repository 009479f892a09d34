"""Models with experts: every router and layout against transformers, several ranks, and speculation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import KINDS, SHAPE, WITH_EXPERTS, TestModel, mostly_slow, ragged_prompts
from safetensors.torch import load_file, save_file
from split_models import logits, on_ranks
from test_parity import engine_logits
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from ssd import LLM, SamplingParams
from ssd.errors import UnsupportedModel
from ssd.kernels.weights import RoutingRule
from ssd.layers.spec import ExpertsSpec, MLPSpec
from ssd.models.checkpoint import HFCheckpoint
from ssd.models.families import decoder_config
from ssd.parallel.tensor import TensorParallel

QWEN3_30B_A3B: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "attention_bias": False,
    "decoder_sparse_step": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "max_position_embeddings": 40960,
    "max_window_layers": 48,
    "mlp_only_layers": [],
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def test_a_published_config() -> None:
    config = decoder_config(QWEN3_30B_A3B)
    assert config.layer.mlp == ExpertsSpec(128, 8, 768)
    assert (config.attention.qk_norm, config.attention.num_kv_heads, config.attention.head_dim) == (True, 4, 128)
    assert decoder_config({**QWEN3_30B_A3B, "architectures": None, "model_type": "qwen3_moe"}) == config


@pytest.mark.parametrize("name", ["Qwen3Moe", "Mixtral"])
def test_defaults_are_those_of_transformers(name: str) -> None:
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    theirs = getattr(transformers, f"{name}Config")()
    raw = {key: getattr(theirs, key) for key in sizes}
    ours = decoder_config({"architectures": [f"{name}ForCausalLM"], **raw})
    mlp, attention = ours.layer.mlp, ours.attention
    assert isinstance(mlp, ExpertsSpec)
    assert (mlp.num_experts, mlp.experts_per_token) == (theirs.num_experts, theirs.num_experts_per_tok)
    assert mlp.intermediate_size == getattr(theirs, "moe_intermediate_size", theirs.intermediate_size)
    assert mlp.rule.normalized == getattr(theirs, "norm_topk_prob", True)
    assert (attention.num_kv_heads, attention.window) == (theirs.num_key_value_heads, None)
    assert (ours.max_position, ours.rms_eps) == (theirs.max_position_embeddings, theirs.rms_norm_eps)
    assert attention.rope.theta == theirs.rope_parameters["rope_theta"]


def test_which_layers_have_experts() -> None:
    """By `decoder_sparse_step` and `mlp_only_layers`; weights of all experts without `norm_topk_prob`."""
    raw = {**QWEN3_30B_A3B, "num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    layers = decoder_config({**raw, "norm_topk_prob": False}).layers
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in layers] == [False, True, False, False, False, True]
    assert layers[0].mlp == MLPSpec(6144)
    assert layers[1].mlp == ExpertsSpec(128, 8, 768, rule=RoutingRule(normalized=False))


def test_more_experts_for_a_token_than_there_are() -> None:
    with pytest.raises(UnsupportedModel, match=r"num_experts_per_tok=129: expected up to the number of experts, 128"):
        decoder_config({**QWEN3_30B_A3B, "num_experts_per_tok": 129})


@pytest.mark.parametrize("kind", WITH_EXPERTS)
@pytest.mark.parametrize(
    "changes", [{"norm_topk_prob": True, "decoder_sparse_step": 2}, {"num_experts_per_tok": 1}, {"sliding_window": 9}]
)
def test_logits_equal_transformers(kind: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Every router, and windows, from files with tensors of all experts (`save_original_format=False`)."""
    family, own = KINDS[kind]
    config = {**SHAPE, **own, "num_hidden_layers": 2, "use_sliding_window": "sliding_window" in changes, **changes}
    torch.manual_seed(0)
    config_class, model_class = (getattr(transformers, f"{family}{what}") for what in ("Config", "ForCausalLM"))
    model = model_class(config_class(**config)).float().eval()
    model.generation_config.eos_token_id = 0
    model.save_pretrained(tmp_path, save_original_format=False)
    checkpoint = HFCheckpoint.open(tmp_path)
    tokens = torch.randint(0, 320, (40,)).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    assert (logits(checkpoint, TensorParallel(), tokens) - theirs).abs().max() < 1e-4


def test_gpt_oss_as_it_is_published(tmp_path: Path) -> None:
    """Experts in MXFP4, everything else in floats: the logits are those of transformers with the widened weights."""
    config = transformers.GptOssConfig(**{**SHAPE, **KINDS["gpt-oss"][1], "intermediate_size": 96})
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(config).float().eval()
    model.save_pretrained(tmp_path)
    stored, dice = load_file(tmp_path / "model.safetensors"), torch.Generator().manual_seed(0)
    for i, layer in enumerate(model.model.layers):
        for name, outputs, inputs in (("gate_up_proj", 192, 64), ("down_proj", 64, 96)):
            blocks = torch.randint(0, 256, (6, outputs, inputs // 32, 16), dtype=torch.uint8, generator=dice)
            scales = torch.randint(120, 126, (6, outputs, inputs // 32), dtype=torch.uint8, generator=dice)
            key = f"model.layers.{i}.mlp.experts.{name}"
            del stored[key]
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            wide = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
            getattr(layer.mlp.experts, name).data = wide
    save_file(stored, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    tokens = torch.randint(0, 320, (40,), generator=dice).tolist()
    with torch.no_grad():
        theirs = model(torch.tensor([tokens])).logits[0]
    checkpoint = HFCheckpoint.open(tmp_path)
    assert (logits(checkpoint, TensorParallel(), tokens) - theirs).abs().max() < 1e-4


@pytest.mark.parametrize(("kind", "fused"), [("qwen3-moe", False), ("mixtral", True), ("gpt-oss", False)])
def test_ranks_equal_one(make_model: Callable[[str], TestModel], kind: str, fused: bool, tmp_path: Path) -> None:
    """Experts split along their inner dimension; also from tensors of all experts. Catches a wrong slice, and a router
    that gives a rank another expert."""
    model = make_model(kind)
    if fused:
        model.reference.save_pretrained(tmp_path, save_original_format=False)
        (tmp_path / "tokenizer.json").write_bytes(Path(model.path, "tokenizer.json").read_bytes())
    checkpoint = HFCheckpoint.open(tmp_path if fused else Path(model.path))
    split = on_ranks(2, lambda tp: logits(checkpoint, tp))[0]
    assert (split - logits(checkpoint, TensorParallel())).abs().max() < 1e-4


PROMPTS = ragged_prompts(6, longest=40)
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=16, ignore_eos=True) for i in range(6)]


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], fast={"float32"}))
@pytest.mark.parametrize("kind", mostly_slow(["qwen3-moe", "gpt-oss"], fast={"gpt-oss"}))
@pytest.mark.parametrize("placement", mostly_slow(["inline", "process"], fast={"inline"}))
def test_the_same_text_by_ar_sd_and_ssd(
    make_model: Callable[[str], TestModel], kind: str, dtype: str, placement: str
) -> None:
    """T = 0 and 1, alone and together, with a dense draft and with one that has experts."""
    target, dense, experts = (make_model(kind).path for kind in (kind, "qwen3", "mixtral"))

    def answers(batch: int, **speculation: Any) -> list[list[int]]:
        options = {"speculation": speculation} if speculation else {}
        with LLM(target, device="cpu", dtype=dtype, max_num_seqs=batch, **options) as llm:
            outputs = [llm.generate(PROMPTS[i : i + batch], PARAMS[i : i + batch]) for i in range(0, 6, batch)]
            metrics = llm.engine.metrics
        if speculation.get("draft") == target:  # catches a draft that computes something else in branches
            assert metrics.spec_decode_num_accepted_tokens > 0.8 * metrics.spec_decode_num_draft_tokens > 0
        return [output.token_ids for group in outputs for output in group]

    alone = answers(1)
    assert answers(6) == alone
    assert answers(6, mode="sd", draft=dense, k=3) == alone
    assert answers(3, mode="sd", draft=experts, k=3) == alone
    assert answers(6, mode="ssd", draft=target, k=3, placement=placement) == alone


def test_experts_in_fp8(make_model: Callable[[str], TestModel]) -> None:
    """`quantization=`: the report names the format, logits are close, and SD writes AR's text."""
    path, params = make_model("qwen3-moe").path, SamplingParams(max_new_tokens=16, ignore_eos=True)
    with LLM(path, device="cpu", quantization="fp8") as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, params)]
        rounded = engine_logits(llm, PROMPTS[0])
    with LLM(path, device="cpu") as llm:
        plain = engine_logits(llm, PROMPTS[0])
    assert 1e-3 < (rounded - plain).norm() / plain.norm() < 0.3
    with LLM(path, device="cpu", quantization="fp8", speculation={"mode": "sd", "draft": path, "k": 3}) as llm:
        assert [output.token_ids for output in llm.generate(PROMPTS, params)] == expected
