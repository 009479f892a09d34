"""Opening Hugging Face checkpoints: where they are found, what config.json means, that every weight comes out.

Checkpoints are made on the spot with transformers, which is also the oracle for what a config means.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits

from ssd.assembly.open import open_checkpoint
from ssd.errors import ModelNotFound, SSDError, UnsupportedModel
from ssd.kernels.weights import GLU
from ssd.layers.rotary import rope_tables
from ssd.layers.spec import ExpertNames, ExpertsSpec, GQASpec, RopeConfig
from ssd.models.checkpoint import all_weights
from ssd.models.families import decoder_config, gpt_oss

transformers = pytest.importorskip("transformers")

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA = {"architectures": ["LlamaForCausalLM"], **TINY}
QWEN3 = {"architectures": ["Qwen3ForCausalLM"], **TINY}
LLAMA3_SCALING = {
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}
# config.json of meta-llama/Llama-3.2-1B-Instruct, Qwen/Qwen2.5-0.5B-Instruct, Qwen/Qwen3-0.6B, TinyLlama (as published)
LLAMA_32_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": LLAMA3_SCALING,
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
QWEN25_05B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "hidden_act": "silu",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "max_position_embeddings": 32768,
    "max_window_layers": 21,
    "model_type": "qwen2",
    "num_attention_heads": 14,
    "num_hidden_layers": 24,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0,
    "sliding_window": 32768,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_06B: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "max_position_embeddings": 40960,
    "max_window_layers": 28,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "use_sliding_window": False,
    "vocab_size": 151936,
}


def save(family: str, path: Path, **changes: Any) -> Any:
    """A small random checkpoint of a family, in several shards; answers with the model."""
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**{**TINY, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    model.save_pretrained(path, max_shard_size="20KB")
    return model


@pytest.fixture
def llama_dir(tmp_path: Path) -> Path:
    save("Llama", tmp_path / "m")
    return tmp_path / "m"


def edit(file: Path, **changes: Any) -> None:
    content = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**content, **changes}))


# --- weights ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("Llama", {"attention_bias": True, "mlp_bias": True}),
        ("Llama", {"tie_word_embeddings": True}),
        ("Qwen2", {}),
        ("Qwen3", {"head_dim": 16}),
        ("Mistral", {"sliding_window": None}),
    ],
)
def test_every_weight_of_every_shard_comes_out(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    """Catches lost or renamed tensors, and a config whose switches contradict the tensors that exist."""
    model = save(family, tmp_path, **changes)
    assert (tmp_path / "model.safetensors.index.json").exists()
    checkpoint = open_checkpoint(tmp_path)
    loaded = all_weights(checkpoint, CPU, torch.float32)
    expected = model.state_dict()
    tied = {"lm_head.weight"} if checkpoint.config.tie_embeddings else set()
    assert set(loaded) == set(expected) - tied
    assert all(same_bits(loaded[name], expected[name]) for name in loaded)
    layer = "model.layers.0."
    assert checkpoint.config.attention.qkv_bias == (layer + "self_attn.q_proj.bias" in loaded)
    assert checkpoint.config.attention.output_bias == (layer + "self_attn.o_proj.bias" in loaded)
    assert checkpoint.config.mlp.bias == (layer + "mlp.up_proj.bias" in loaded)
    assert checkpoint.config.attention.qk_norm == (layer + "self_attn.q_norm.weight" in loaded)
    rows = loaded[layer + "self_attn.k_proj.weight"].shape[0]
    assert rows == checkpoint.config.attention.num_kv_heads * checkpoint.config.attention.head_dim


def test_a_single_file_without_an_index(tmp_path: Path) -> None:
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY))
    model.save_pretrained(tmp_path)
    (tmp_path / "consolidated.safetensors").write_bytes(b"another layout of the same weights")
    assert set(dict(open_checkpoint(tmp_path).weights(CPU, torch.float32))) == set(model.state_dict())


def test_a_missing_shard_is_named(llama_dir: Path) -> None:
    shard = sorted(llama_dir.glob("*.safetensors"))[1]
    shard.unlink()
    with pytest.raises(ModelNotFound, match=shard.name):
        open_checkpoint(llama_dir)


def test_a_truncated_file_is_named(llama_dir: Path) -> None:
    shard = min(llama_dir.glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-100])
    with pytest.raises(SSDError, match=shard.name):
        list(open_checkpoint(llama_dir).weights(CPU, torch.float32))


def test_pickled_weights_are_refused(llama_dir: Path) -> None:
    for file in llama_dir.glob("*.safetensors*"):
        file.unlink()
    (llama_dir / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*save_pretrained"):
        open_checkpoint(llama_dir)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        open_checkpoint(tmp_path)
    (tmp_path / "model.gguf").touch()
    with pytest.raises(ModelNotFound, match=r"model\.gguf"):
        open_checkpoint(tmp_path)


def test_the_dtype_is_that_of_the_weights_when_the_config_is_silent(tmp_path: Path) -> None:
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).half().save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    del raw["dtype"]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert open_checkpoint(tmp_path).config.dtype == "float16"


# --- stop tokens ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [([3, 4], 5, (3, 4)), (3, 5, (3,)), (None, 5, (5,)), (None, [5, 6, 5], (5, 6)), (None, None, ())],
)
def test_stop_tokens(generation: Any, config: Any, expected: tuple[int, ...], llama_dir: Path) -> None:
    """Llama 3 chat models stop at the wrong token when the list in generation_config.json is not read."""
    edit(llama_dir / "generation_config.json", eos_token_id=generation)
    edit(llama_dir / "config.json", eos_token_id=config)
    assert open_checkpoint(llama_dir).stop_token_ids == expected


def test_the_tokenizers_eos_is_the_last_resort(llama_dir: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    edit(llama_dir / "config.json", eos_token_id=None)
    (llama_dir / "generation_config.json").unlink()
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 7}, unk_token="a"))
    tokenizer.save(str(llama_dir / "tokenizer.json"))
    edit(llama_dir / "tokenizer_config.json", eos_token="</s>")
    assert open_checkpoint(llama_dir).stop_token_ids == (7,)


# --- what config.json means -------------------------------------------------------------------------------------------


def test_published_configs() -> None:
    llama = decoder_config(LLAMA_32_1B)
    spec = llama.attention
    assert (llama.family, spec.head_dim, spec.num_kv_heads, llama.tie_embeddings) == ("llama", 64, 8, True)
    assert spec.rope == RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192)
    spec = decoder_config(QWEN25_05B).attention
    assert (spec.head_dim, spec.qkv_bias, spec.output_bias, spec.qk_norm) == (64, True, False, False)
    qwen3 = decoder_config(QWEN3_06B)
    spec = qwen3.attention
    assert (spec.head_dim, spec.qkv_bias, spec.qk_norm) == (128, False, True)
    assert (spec.rope, qwen3.max_position, qwen3.dtype) == (RopeConfig(1000000.0), 40960, "bfloat16")


@pytest.mark.parametrize("raw", [LLAMA_32_1B, QWEN25_05B, QWEN3_06B], ids=["llama", "qwen2", "qwen3"])
def test_both_spellings_mean_the_same(raw: dict[str, Any], tmp_path: Path) -> None:
    """transformers 5 rewrites rope_theta and rope_scaling to rope_parameters, torch_dtype to dtype."""
    name = raw["architectures"][0].replace("ForCausalLM", "Config")
    getattr(transformers, name)(**raw).save_pretrained(tmp_path)
    rewritten = json.loads((tmp_path / "config.json").read_text())
    assert "rope_parameters" in rewritten
    assert decoder_config(rewritten) == decoder_config(raw)


@pytest.mark.parametrize("name", ["Llama", "Qwen2", "Qwen3"])
def test_defaults_are_those_of_transformers(name: str) -> None:
    """A key left out must mean what the library that wrote the file takes it to mean."""
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    raw = {key: getattr(transformers, f"{name}Config")().to_dict()[key] for key in sizes}
    ours = decoder_config({"architectures": [f"{name}ForCausalLM"], **raw})
    theirs = getattr(transformers, f"{name}Config")(**raw)
    assert ours.attention.num_kv_heads == theirs.num_key_value_heads
    assert ours.attention.head_dim == getattr(theirs, "head_dim", theirs.hidden_size // theirs.num_attention_heads)
    assert ours.max_position == theirs.max_position_embeddings
    assert ours.rms_eps == theirs.rms_norm_eps
    assert ours.attention.rope == RopeConfig(theirs.rope_parameters["rope_theta"])
    assert ours.tie_embeddings == theirs.tie_word_embeddings
    assert ours.attention.output_bias == getattr(theirs, "attention_bias", False)
    assert ours.mlp.bias == getattr(theirs, "mlp_bias", False)


def test_gpt_oss() -> None:
    """Of the published config.json, in the spelling of transformers 4, and of what transformers 5 writes: the same."""
    shape = {"vocab_size": 201088, "hidden_size": 2880, "intermediate_size": 2880}
    raw: dict[str, Any] = {**shape, "num_hidden_layers": 24, "num_attention_heads": 64, "num_key_value_heads": 8}
    raw |= {"num_local_experts": 32}
    yarn = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    yarn |= {"original_max_position_embeddings": 4096}
    published = {**raw, "head_dim": 64, "rope_scaling": yarn, "rope_theta": 150000, "sliding_window": 128}
    published |= {"attention_bias": True, "rms_norm_eps": 1e-05, "max_position_embeddings": 131072}
    published |= {"experts_per_token": 4, "swiglu_limit": 7.0}
    config = gpt_oss(published)
    assert config == gpt_oss(raw) == gpt_oss({**transformers.GptOssConfig(**raw).to_dict(), "dtype": None})
    rope = RopeConfig(150000.0, "yarn", 32.0, original_max_position=4096, truncate=False)
    full = GQASpec(64, 8, 64, rope, qkv_bias=True, output_bias=True, sinks=True)
    assert [layer.attention for layer in config.layers] == [replace(full, window=128), full] * 12
    names, glu = ExpertNames(router="router"), GLU(1.702, 7.0, 1.0)
    experts = ExpertsSpec(32, 4, 2880, bias=True, glu=glu, names=names, interleaved=True)
    assert {layer.mlp for layer in config.layers} == {experts}
    assert (config.max_position, config.rms_eps, config.float32_norms) == (131072, 1e-5, True)


def test_null_head_dim_and_missing_kv_heads_are_derived() -> None:
    raw = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    config = decoder_config({**raw, "head_dim": None})
    assert (config.attention.head_dim, config.attention.num_kv_heads) == (8, 4)


@pytest.mark.parametrize(
    ("scaling", "expected"),
    [
        ({"type": "linear", "factor": 2.0}, RopeConfig(10000.0, "linear", 2.0)),
        ({"rope_type": "default"}, RopeConfig(10000.0)),
        ({"rope_type": None}, RopeConfig(10000.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            RopeConfig(10000.0, "yarn", 4.0, original_max_position=64),
        ),
        (
            {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5, "beta_fast": 16},
            RopeConfig(10000.0, "yarn", 4.0, original_max_position=64, beta_fast=16.0, attention_factor=1.5),
        ),
    ],
)
def test_rope_scaling(scaling: dict[str, Any], expected: RopeConfig) -> None:
    assert decoder_config({**LLAMA, "rope_scaling": scaling}).attention.rope == expected


@pytest.mark.parametrize("where", ["the scaling", "around it"])
def test_yarn_derives_its_factor_as_transformers_does(where: str) -> None:
    """From the length before stretching; without one either there would be no stretching at all."""
    length = {"original_max_position_embeddings": 16}
    raw = {**LLAMA, "max_position_embeddings": 64, "rope_theta": 10000.0}
    yarn = {"rope_type": "yarn", "factor": None, "rope_theta": 10000.0}
    raw |= {"rope_scaling": yarn | length} if where == "the scaling" else {**length, "rope_scaling": yarn}
    config = decoder_config(raw)
    assert config.attention.rope == RopeConfig(10000.0, "yarn", 4.0, original_max_position=16)
    assert config.max_position == 64
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    theirs = transformers.LlamaConfig(max_position_embeddings=64, head_dim=8, rope_parameters={**yarn, **length})
    frequencies, amplitude = ROPE_INIT_FUNCTIONS["yarn"](theirs, torch.device("cpu"))
    angles = torch.arange(64, dtype=torch.float32)[:, None] * frequencies
    assert same_bits(rope_tables(config.attention.rope, 8, 64)[0], angles.cos() * amplitude)


LATENT = {
    **{"architectures": ["DeepseekV3ForCausalLM"], **TINY, "num_key_value_heads": 4},
    **{"kv_lora_rank": 8, "q_lora_rank": None, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8},
}
LLAMA3_ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
YARN_ROPE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
WRONG = ["4", True, 0, -1.0, float("nan"), float("inf"), []]


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({"rope_type": "linear"}, "factor is missing from the rope scaling of config.json: rope_type linear needs"),
        ({"rope_type": "yarn"}, "factor is missing.*rope_type yarn needs a .*, or original_max_position_embeddings"),
        ({"rope_type": "yarn", "factor": None}, "factor is missing"),
        *(
            ({**LLAMA3_ROPE, key: None}, f"{key} is missing.*rope_type llama3 needs a positive number")
            for key in ("factor", "low_freq_factor", "high_freq_factor")
        ),
        ({"factor": 4.0}, "rope_type is missing.*, which has a factor: name linear, llama3 or yarn"),
        ({"rope_type": 7, "factor": 4.0}, "rope_type=7"),
        ({**LLAMA3_ROPE, "high_freq_factor": 1.0}, r"high_freq_factor=1\.0: expected more than low_freq_factor=1\.0"),
        ({**YARN_ROPE, "beta_fast": 0.5}, r"beta_fast=0\.5: expected at least beta_slow=1\.0"),
        *(
            ({**scaling, key: value}, f"^{key}=.* in the rope scaling of config.json: expected a")
            for scaling, keys in (
                ({"rope_type": "linear"}, ["factor"]),
                (LLAMA3_ROPE, ["factor", "low_freq_factor", "high_freq_factor"]),
                (YARN_ROPE, ["factor", "beta_fast", "beta_slow", "attention_factor"]),
                (YARN_ROPE, ["original_max_position_embeddings"]),
            )
            for key in keys
            for value in WRONG
        ),
        *(({**YARN_ROPE, "mscale": value}, "^mscale=") for value in WRONG if value != 0),
    ],
)
def test_a_rope_scaling_that_says_too_little_or_nonsense_is_refused(scaling: dict[str, Any], message: str) -> None:
    """Each would load, and positions would be rotated in another way than the model was trained for."""
    for raw in (LLAMA, LATENT):
        with pytest.raises(UnsupportedModel, match=message):
            decoder_config({**raw, "rope_scaling": scaling})


def test_yarn_lengthens_the_context() -> None:
    scaling = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    assert decoder_config({**QWEN3, "rope_scaling": scaling}).max_position == 256


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({**LLAMA, "architectures": ["GemmaForCausalLM"]}, "GemmaForCausalLM.*LlamaForCausalLM"),
        ({"model_type": "mamba", **TINY}, "mamba"),
        ({**LLAMA, "hidden_act": "gelu"}, "hidden_act='gelu'.*silu"),
        ({**LLAMA, "rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic.*llama3"),
        ({**LLAMA, "rope_parameters": {"full_attention": {}, "sliding_attention": {}}}, "per layer type"),
        ({**LLAMA, "partial_rotary_factor": 0.5}, r"partial_rotary_factor=0\.5"),
        ({**LLAMA, "torch_dtype": "float8_e4m3fn"}, "float8_e4m3fn"),
        ({**LLAMA, "num_key_value_heads": 3}, "num_key_value_heads=3"),
        ({**LLAMA, "hidden_size": "32"}, "hidden_size='32'"),
        ({"architectures": ["LlamaForCausalLM"]}, "num_attention_heads is missing"),
        ({**QWEN3, "layer_types": ["full_attention", "sliding_attention"]}, "use_sliding_window"),
        ({**QWEN3, "layer_types": ["full_attention", "linear_attention"]}, "linear_attention"),
    ],
)
def test_what_is_not_supported_is_named(raw: dict[str, Any], message: str) -> None:
    """Better no model than a wrong one: each of these would load and produce nonsense."""
    with pytest.raises(UnsupportedModel, match=message):
        decoder_config(raw)


@pytest.mark.parametrize(
    ("raw", "windows"),
    [
        ({**QWEN3, "use_sliding_window": True, "max_window_layers": 2, "sliding_window": 16}, [None, None]),
        ({**QWEN3, "use_sliding_window": True, "max_window_layers": 1, "sliding_window": 16}, [None, 16]),
        ({**QWEN3, "use_sliding_window": True, "max_window_layers": 0, "sliding_window": None}, [None, None]),
        ({**QWEN3, "use_sliding_window": False, "max_window_layers": 0, "sliding_window": 16}, [None, None]),
        (
            {**QWEN3, "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"]},
            [4096, None],
        ),
        ({**LLAMA, "architectures": ["MistralForCausalLM"]}, [4096, 4096]),
        ({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 7}, [7, 7]),
        ({**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": None}, [None, None]),
    ],
)
def test_the_sliding_windows_of_the_layers(raw: dict[str, Any], windows: list[int | None]) -> None:
    """Catches a default that differs from that of transformers, and a window of the wrong layer."""
    assert [layer.attention.window for layer in decoder_config(raw).layers] == windows


def test_the_error_names_the_directory(llama_dir: Path) -> None:
    edit(llama_dir / "config.json", hidden_act="relu")
    with pytest.raises(UnsupportedModel, match=str(llama_dir)):
        open_checkpoint(llama_dir)


# --- the hub's cache --------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache, the only one; a download fails the test unless it says what to do instead."""
    import huggingface_hub

    def no_network(*args: Any, **kwargs: Any) -> str:
        raise ConnectionError("no network in tests")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", no_network)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "default"))
    monkeypatch.delenv("HF_HOME", raising=False)
    monkeypatch.setenv("SSD_HF_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def add_snapshot(hub: Path, source: Path, revision: str, main: bool = False, age: int = 0) -> Path:
    entry = hub / "models--org--tiny"
    snapshot = entry / "snapshots" / revision
    shutil.copytree(source, snapshot)
    os.utime(snapshot, (1e9 - age, 1e9 - age))
    if main:
        (entry / "refs").mkdir()
        (entry / "refs" / "main").write_text(revision)
    return snapshot


def test_the_main_revision_is_preferred_to_the_newest(cache: Path, llama_dir: Path) -> None:
    old = add_snapshot(cache, llama_dir, "aaa", main=True, age=100)
    add_snapshot(cache, llama_dir, "bbb")
    assert open_checkpoint("org/tiny").path == old
    assert open_checkpoint(cache / "models--org--tiny").path == old


def test_without_a_main_revision_the_newest_complete_snapshot_is_taken(cache: Path, llama_dir: Path) -> None:
    add_snapshot(cache, llama_dir, "aaa", age=100)
    newest = add_snapshot(cache, llama_dir, "bbb", age=50)
    (add_snapshot(cache, llama_dir, "ccc") / "config.json").unlink()
    assert open_checkpoint("org/tiny").path == newest


@pytest.mark.parametrize("place", ["own_hub", "home", "default"])
def test_every_cache_is_looked_at(
    place: str, cache: Path, llama_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    hub = {"own_hub": cache / "hub", "home": tmp_path / "home" / "hub", "default": tmp_path / "default"}[place]
    expected = add_snapshot(hub, llama_dir, "aaa")
    assert open_checkpoint("org/tiny").path == expected


def test_a_model_found_nowhere_says_where_and_what_to_do(cache: Path, tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound) as error:
        open_checkpoint("org/tiny")
    text = str(error.value)
    for part in (str(cache), str(tmp_path / "default"), "no network in tests", "ssd pull org/tiny", "SSD_HF_CACHE"):
        assert part in text
    with pytest.raises(ModelNotFound, match=r"^speculation draft='org/tiny'"):
        open_checkpoint("org/tiny", "speculation draft")


@pytest.mark.parametrize("model", ["no_such_directory", "a/b/c", "/no/such/path", "x.gguf"])
def test_what_is_neither_path_nor_hub_id_is_not_looked_up(model: str, cache: Path) -> None:
    with pytest.raises(ModelNotFound, match="no such directory"):
        open_checkpoint(model)


def test_a_file_that_is_no_gguf_is_refused(llama_dir: Path) -> None:
    with pytest.raises(UnsupportedModel, match="pass the directory"):
        open_checkpoint(min(llama_dir.glob("*.safetensors")))
