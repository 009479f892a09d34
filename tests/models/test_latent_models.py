"""Models with latent attention: published configs, checkpoints, ranks, formats, and the same text in all modes.

Parity with transformers is in `test_parity.py`.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import KINDS, WITH_LATENTS, TestModel, mostly_slow, ragged_prompts, save_model
from eagle_heads import make_head
from mtp_heads import make_mtp
from quantized_checkpoints import FP8, GROUPS_32, compressed, pack_bytes, pack_ct
from safetensors.torch import load_file, save_file
from split_models import TOKENS, logits, on_ranks
from test_parity import engine_logits

from ssd import LLM, SamplingParams
from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.weights import RoutingRule
from ssd.layers.experts import Experts
from ssd.layers.spec import ExpertsSpec, LatentSpec, MLPSpec
from ssd.models.checkpoint import HFCheckpoint, all_weights
from ssd.models.families import decoder_config
from ssd.parallel.tensor import TensorParallel

YARN = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0, "type": "yarn"}
DEEPSEEK_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {**YARN, "original_max_position_embeddings": 4096},
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
GLM_47_FLASH: dict[str, Any] = {
    **{key: value for key, value in DEEPSEEK_V3.items() if key not in ("first_k_dense_replace", "rope_scaling")},
    **{"architectures": ["Glm4MoeLiteForCausalLM"], "model_type": "glm4_moe_lite", "hidden_size": 2048},
    **{"intermediate_size": 10240, "moe_intermediate_size": 1536, "num_hidden_layers": 47, "vocab_size": 154880},
    **{"num_attention_heads": 20, "num_key_value_heads": 20, "q_lora_rank": 768, "qk_nope_head_dim": 192},
    **{"v_head_dim": 256, "n_routed_experts": 64, "num_experts_per_tok": 4, "n_group": 1, "topk_group": 1},
    **{"routed_scaling_factor": 1.8, "rms_norm_eps": 1e-5, "rope_theta": 1000000, "max_position_embeddings": 202752},
}
KIMI_K2: dict[str, Any] = {
    **DEEPSEEK_V3,
    **{"model_type": "kimi_k2", "num_attention_heads": 64, "num_key_value_heads": 64, "n_routed_experts": 384},
    **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 2.827},
    **{"vocab_size": 163840, "rope_theta": 50000.0, "num_nextn_predict_layers": 0, "rms_norm_eps": 1e-5},
    "rope_scaling": {**YARN, "beta_fast": 1.0, "factor": 64.0, "original_max_position_embeddings": 4096},
}


def test_published_configs() -> None:
    deepseek, glm, kimi = (decoder_config(raw) for raw in (DEEPSEEK_V3, GLM_47_FLASH, KIMI_K2))
    attention, last = deepseek.layers[0].attention, deepseek.layers[-1]
    assert isinstance(attention, LatentSpec)
    assert (attention.head_dim, attention.query_dim, attention.query_rank) == (576, 192, 1536)
    assert attention.softmax_scale == pytest.approx(192**-0.5 * 1.3688879454113936**2)
    assert attention.kv_layout(torch.bfloat16, ranks=4).bytes_per_token == 1152
    assert [isinstance(layer.mlp, MLPSpec) for layer in deepseek.layers[:5]] == [True, True, True, False, False]
    assert last.mlp == ExpertsSpec(256, 8, 2048, rule=RoutingRule(True, True, 8, 4, 2.5), shared_size=2048)
    assert deepseek.max_position == 163840
    own = glm.layers[1].attention
    assert isinstance(own, LatentSpec)
    assert (own.softmax_scale, own.value_dim, glm.num_layers) == (256**-0.5, 256, 47)
    assert glm.layers[1].mlp == ExpertsSpec(64, 4, 1536, rule=RoutingRule(True, True, 1, 1, 1.8), shared_size=1536)
    assert glm.layers[0].mlp == MLPSpec(10240)
    assert kimi.layers[1].mlp == ExpertsSpec(384, 8, 2048, rule=RoutingRule(True, True, 1, 1, 2.827), shared_size=2048)
    assert kimi.max_position == 262144
    assert decoder_config({**KIMI_K2, "architectures": None}) == kimi
    types = ["dense"] * 2 + ["sparse"] * 45
    assert isinstance(decoder_config({**GLM_47_FLASH, "mlp_layer_types": types}).layers[1].mlp, MLPSpec)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv_lora_rank": None}, "kv_lora_rank is missing"),
        ({"qk_rope_head_dim": 63}, "qk_rope_head_dim=63: the rotary embedding needs an even number"),
        ({"num_key_value_heads": 8}, "num_key_value_heads=8: .* as many as num_attention_heads"),
        ({"qk_head_dim": 128}, r"qk_head_dim=128: expected qk_nope_head_dim=128 \+ qk_rope_head_dim=64"),
        ({"rope_scaling": {"type": "longrope", "factor": 4.0}}, "rope_type 'longrope'"),
        ({"rope_interleave": False}, "rope_interleave=False"),
        ({"scoring_func": "softmax"}, "scoring_func='softmax': .* sigmoid"),
        ({"topk_method": "greedy"}, "topk_method='greedy'"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"n_group": 7}, "n_group=7: expected groups of two or more of n_routed_experts=256"),
        ({"topk_group": 9}, "topk_group=9: expected up to n_group=8"),
        ({"num_experts_per_tok": 200, "topk_group": 4}, "topk_group=4: .* num_experts_per_tok=200"),
        ({"kv_lora_rank": 1 << 20}, "kv_lora_rank=1048576 in config.json"),
        ({"moe_layer_freq": 2}, "moe_layer_freq=2"),
        ({"architectures": ["DeepseekV32ForCausalLM"]}, "DeepseekV32ForCausalLM.*no sparse attention"),
        ({"text_config": 3}, "text_config=3"),
    ],
)
def test_configs_that_are_not_supported_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModel, match=message):
        decoder_config({**DEEPSEEK_V3, **changes})
    without = {key: value for key, value in DEEPSEEK_V3.items() if key != "q_lora_rank"}
    with pytest.raises(UnsupportedModel, match="q_lora_rank is missing"):
        decoder_config(without)


def edited(path: Path, rename: Callable[[str], str], **added: torch.Tensor) -> None:
    """The same tensors under other names, and more, in one file."""
    tensors = {rename(name): tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for file in (*path.glob("*.safetensors"), *path.glob("*.index.json")):
        file.unlink()
    save_file({**tensors, **added}, path / "model.safetensors")


def test_kimi_s_text_model_and_further_layers(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A nested config, names with a prefix, tensors of a vision model, and layers that predict further tokens: the
    logits are those of the text model, and what was skipped is reported in one line."""
    model = save_model("deepseek-v3", tmp_path)
    mtp = {f"language_model.model.layers.3.{name}": torch.ones(3) for name in ("enorm.weight", "eh_proj.weight")}
    edited(tmp_path, lambda name: f"language_model.{name}", **mtp, **{"vision_tower.patch.weight": torch.ones(2, 2)})
    raw = json.loads((tmp_path / "config.json").read_text())
    raw = {"text_config": {**raw, "model_type": "kimi_k2", "architectures": None}, "vision_config": {"hidden_size": 3}}
    raw |= {"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25"}
    raw["text_config"]["num_nextn_predict_layers"] = 1
    (tmp_path / "config.json").write_text(json.dumps(raw))
    checkpoint = HFCheckpoint.open(tmp_path)
    assert checkpoint.config.family == "kimi_k25"
    with torch.no_grad():
        theirs = model.reference(torch.tensor([TOKENS])).logits[0]
    with caplog.at_level(logging.INFO, "ssd"):
        assert (logits(checkpoint, TensorParallel()) - theirs).abs().max() < 1e-4
    [line] = [record.message for record in caplog.records if "skipped" in record.message]
    assert line.startswith("skipped 1 tensors whose names do not begin with language_model.")
    edited(tmp_path, str, **{"language_model.model.layers.0.odd.weight": torch.ones(3)})
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.odd\.weight"):
        logits(checkpoint, TensorParallel())


def test_queries_of_one_projection(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`q_lora_rank` null, as Moonlight has it: no norm of queries."""
    family, own = KINDS["deepseek-v3"]
    monkeypatch.setitem(KINDS, "plain-queries", (family, {**own, "q_lora_rank": None}))
    model = save_model("plain-queries", tmp_path)
    with torch.no_grad():
        theirs = model.reference(torch.tensor([TOKENS])).logits[0]
    checkpoint = HFCheckpoint.open(tmp_path)
    assert (logits(checkpoint, TensorParallel()) - theirs).abs().max() < 1e-4
    split = on_ranks(2, lambda tp: logits(checkpoint, tp))[0]
    assert (split - theirs).abs().max() < 1e-4


@pytest.mark.parametrize("kind", WITH_LATENTS)
def test_ranks_equal_one(make_model: Callable[[str], TestModel], kind: str) -> None:
    """Heads, experts and shared experts are split, latents are not. Catches a head's rows of another head, and shared
    experts that are added twice."""
    checkpoint = HFCheckpoint.open(Path(make_model(kind).path))
    split = on_ranks(2, lambda tp: logits(checkpoint, tp))[0]
    assert (split - logits(checkpoint, TensorParallel())).abs().max() < 1e-4
    with pytest.raises(ConfigError, match="tensor_parallel_size=4 cannot split a model with num_heads=6"):
        on_one_of(4, checkpoint)


def on_one_of(size: int, checkpoint: HFCheckpoint) -> torch.Tensor:
    return logits(checkpoint, TensorParallel(0, size))


PROMPTS = ragged_prompts(12, longest=90)
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=16, ignore_eos=True) for i in range(12)]


def answers(target: str, dtype: str, batch: int, options: dict[str, Any], **speculation: Any) -> list[list[int]]:
    """`batch` requests at a time."""
    options = {**options, "dtype": dtype, "max_num_seqs": batch, "speculation": speculation or None}
    with LLM(target, device="cpu", max_model_len=128, **options) as llm:
        groups = [slice(i, i + batch) for i in range(0, len(PROMPTS), batch)]
        outputs = [output for group in groups for output in llm.generate(PROMPTS[group], PARAMS[group])]
        counts = llm.engine.metrics
    if speculation.get("draft") == target:  # catches a draft that computes something else in branches
        assert counts.spec_decode_num_accepted_tokens > 0.8 * counts.spec_decode_num_draft_tokens > 0
    if options.get("num_kv_blocks"):
        assert counts.num_preemptions > 0
    return [output.token_ids for output in outputs]


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], fast={"float32"}))
@pytest.mark.parametrize("kind", WITH_LATENTS)
def test_the_same_text_in_chunks_and_in_company(make_model: Callable[[str], TestModel], kind: str, dtype: str) -> None:
    """T = 0 and 1, one request at a time or several; chunks of prompts of any size; preempted sequences. Catches a form
    of attention that depends on the rows."""
    path = make_model(kind).path
    alone = answers(path, dtype, 1, {"prefix_caching": False})
    assert answers(path, dtype, 12, {"max_num_batched_tokens": 17, "block_size": 4}) == alone
    scarce = {"num_kv_blocks": 34, "block_size": 4, "max_num_batched_tokens": 7}
    assert answers(path, dtype, 6, scarce) == alone


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], fast={"float32"}))
@pytest.mark.parametrize("kind", mostly_slow(WITH_LATENTS, fast={"deepseek-v3"}))
@pytest.mark.parametrize("draft", mostly_slow(["dense", "itself", "eagle", "mtp"], fast={"itself", "mtp"}))
def test_the_same_text_in_all_modes(
    make_model: Callable[[str], TestModel], kind: str, dtype: str, draft: str, tmp_path: Path
) -> None:
    """Drafted by a dense model, by itself, by heads of both kinds."""
    model, dense, batch = make_model(kind), make_model("qwen3").path, 6
    path = drafter = model.path
    if draft == "dense":
        drafter, batch = dense, 12
        assert answers(dense, dtype, 6, {}, mode="sd", draft=path, k=3) == answers(dense, dtype, 1, {})
    elif draft == "eagle":
        drafter = make_head(model, tmp_path / "head").path
    elif draft == "mtp":
        mtp = make_mtp(model, tmp_path / "mtp")
        path, drafter = mtp.model, mtp.path
    alone = answers(model.path, dtype, 1, {"prefix_caching": False})
    assert answers(path, dtype, batch, {"block_size": 4}, mode="sd", draft=drafter, k=3) == alone
    ssd = {"mode": "ssd", "draft": drafter, "k": 3, "placement": "inline"}
    assert answers(path, dtype, batch, {}, **ssd) == alone


def test_prefixes_of_the_cache(make_model: Callable[[str], TestModel]) -> None:
    """Blocks of latents are found again, and give the same text."""
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with LLM(make_model("glm4-moe-lite").path, device="cpu", dtype="float32", block_size=4, max_model_len=128) as llm:
        first = llm.generate(PROMPTS, params)
        again = llm.generate(PROMPTS, params)
        assert llm.engine.metrics.cached_prompt_tokens > 0
    assert [out.token_ids for out in again] == [out.token_ids for out in first]


def test_kv_in_fp8_is_refused(make_model: Callable[[str], TestModel]) -> None:
    with pytest.raises(ConfigError, match="kv_cache_dtype='fp8' is not for models with latent attention"):
        LLM(make_model("glm4-moe-lite").path, device="cpu", kv_cache_dtype="fp8")


BLOCKS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [16, 16]}
EXPERTS_ONLY = ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"]


@pytest.mark.parametrize("form", mostly_slow(["fp8", "fp8-ue8m0", "fp8-weights", "int4"], fast={"fp8-ue8m0"}))
def test_published_formats(monkeypatch: pytest.MonkeyPatch, form: str, tmp_path: Path) -> None:
    """FP8 in blocks everywhere, as DeepSeek publishes it, also with scales that are powers of two, and INT4 experts in
    groups, as Kimi K2.5 has them: the logits are those of the widened weights, where rows are not rounded, too; and SD
    writes AR's text."""
    family, own = KINDS["deepseek-v3"]
    sizes = {"q_lora_rank": 32, "kv_lora_rank": 48, "v_head_dim": 16, "moe_intermediate_size": 64}
    sizes |= {"n_group": 1, "topk_group": 1, "num_experts_per_tok": 12}  # all: none is chosen by what was rounded
    sizes["n_shared_experts"] = 1  # one of them, if it is stored as they are
    monkeypatch.setitem(KINDS, "quantised", (family, {**own, **sizes}))
    model = save_model("quantised", tmp_path)
    edited(tmp_path, str)
    stored, wide = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in stored if name.endswith("_proj.weight") or name.endswith("with_mqa.weight")]:
        layer, weight = name.removesuffix(".weight"), stored[name].numpy()
        if form == "int4" and ".experts." not in name:
            continue
        del stored[name]
        if form == "int4":
            packed, found = pack_ct(weight, name, group=32)
        else:
            scale = "weight_scale" if form == "fp8-weights" else "weight_scale_inv"
            powers = torch.float32 if form == "fp8-ue8m0" else None
            packed, found = pack_bytes(weight, name, block=(16, 16), scale=scale, powers=powers)
        stored |= {f"{layer}.{own}": tensor for own, tensor in packed.items()}
        wide[name] = torch.from_numpy(found)
    save_file(stored, tmp_path / "model.safetensors")
    raw = json.loads((tmp_path / "config.json").read_text())
    config = {
        "fp8": BLOCKS,
        "fp8-ue8m0": {**BLOCKS, "scale_fmt": "ue8m0"},
        "fp8-weights": compressed("naive-quantized", {**FP8, "strategy": "block", "block_structure": [16, 16]}),
        "int4": {**compressed("pack-quantized", GROUPS_32), "ignore": EXPERTS_ONLY},
    }[form]
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    (tmp_path / "wide").mkdir()
    model.reference.save_pretrained(tmp_path / "wide")
    edited(tmp_path / "wide", str, **wide)
    (tmp_path / "wide" / "tokenizer.json").write_bytes((tmp_path / "tokenizer.json").read_bytes())
    with LLM(str(tmp_path / "wide"), device="cpu", dtype="float32") as llm:
        expected = engine_logits(llm, PROMPTS[0])
    params = SamplingParams(max_new_tokens=12, ignore_eos=True)
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_num_seqs=1) as llm:
        ours = engine_logits(llm, PROMPTS[0])
        mlp = llm.engine.round.target.runner.decoder.layers[-1].mlp
        assert isinstance(mlp, Experts)
        assert (mlp.shared is None) == (form != "int4")
        alone = [llm.generate(prompt, params)[0].token_ids for prompt in PROMPTS]
    assert form in ("fp8", "fp8-ue8m0") or (ours - expected).norm() / expected.norm() < 1e-5
    found = all_weights(HFCheckpoint.open(tmp_path), torch.device("cpu"), torch.float32)
    assert all(torch.equal(found[name], weight) for name, weight in wide.items())
    draft = {"mode": "sd", "draft": str(tmp_path), "k": 3}
    with LLM(str(tmp_path), device="cpu", dtype="float32", max_num_seqs=6, speculation=draft) as llm:
        assert [out.token_ids for out in llm.generate(PROMPTS, params)] == alone
