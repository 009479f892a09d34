"""A KV cache in fp8 in the whole engine: AR, SD and SSD write the same text, with the scales of the checkpoint."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TestModel, mostly_slow, ragged_prompts
from eagle_heads import make_head
from fakes import wait_until_idle
from safetensors.torch import save_file

from ssd import LLM, ConfigError, SamplingParams
from ssd.assembly.device import kv_dtype
from ssd.assembly.open import open_checkpoint
from ssd.config import EngineConfig
from ssd.errors import UnsupportedModel
from ssd.execution.runner import ModelRunner
from ssd.grafts.shapes import SHAPES
from ssd.models import persistent

FP8 = torch.float8_e4m3fn
PROMPTS = ragged_prompts(6, longest=120)
PARAMS = [SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=24, ignore_eos=True) for i in range(6)]
SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 200, "kv_cache_dtype": "fp8"}
WAYS: list[dict[str, Any]] = [{}, {"mode": "sd", "k": 3}, {"mode": "ssd", "k": 3, "placement": "inline"}]
K_SCALES, V_SCALES = (0.021, 0.5, 0.013), (0.03, 0.007, 2.0)


def with_tensors(model: TestModel, path: Path, tensors: dict[str, torch.Tensor]) -> str:
    """A copy of a checkpoint with more tensors."""
    shutil.copytree(model.path, path)
    index = path / "model.safetensors.index.json"
    index.unlink()  # then all files are read
    save_file(tensors, path / "scales.safetensors")
    return str(path)


def scales(name: str = "model.layers.{}.self_attn.{}_scale") -> dict[str, torch.Tensor]:
    """One of each layer and kind; some of them are vectors of one number, as files have them."""
    found = {name.format(i, "k"): torch.tensor(scale) for i, scale in enumerate(K_SCALES)}
    return found | {name.format(i, "v"): torch.tensor([scale]) for i, scale in enumerate(V_SCALES)}


@pytest.fixture(scope="module")
def model(make_model: Callable[[str], TestModel]) -> TestModel:
    return make_model("llama3-scaled")


@pytest.fixture(scope="module")
def scaled(model: TestModel, tmp_path_factory: pytest.TempPathFactory) -> str:
    return with_tensors(model, tmp_path_factory.mktemp("scaled") / "m", scales())


def runner_of(llm: LLM) -> ModelRunner:
    return llm.engine.round.target.runner


def answers(path: str, batch: int, dtype: str, *, turns: int = 1, **options: Any) -> list[list[int]]:
    """All prompts, so many times: after the first their prefixes are cached."""
    out = []
    with LLM(path, dtype=dtype, **SIZES | options) as llm:
        assert {cache.dtype for layer in runner_of(llm).kv for cache in layer} == {FP8}
        for i in (*range(0, len(PROMPTS), batch),) * turns:
            out += llm.generate(PROMPTS[i : i + batch], PARAMS[i : i + batch])
        wait_until_idle(llm.driver)
        metrics = llm.engine.metrics
        assert turns == 1 or metrics.cached_prompt_tokens > 0
        assert llm.config.speculation.mode == "ar" or metrics.spec_decode_num_accepted_tokens > 0
    return [output.token_ids for output in out]


@pytest.mark.parametrize("dtype", mostly_slow(["float32", "bfloat16"], fast={"bfloat16"}))
def test_all_modes_write_the_same_text(scaled: str, dtype: str) -> None:
    """T = 0 and 1, alone and together, prompts whole and in chunks, with prefix hits and few blocks.

    Catches KV that is rounded differently by the number of rows, and a draft that reads the target's.
    """
    alone = answers(scaled, 1, dtype, prefix_caching=False, max_num_seqs=1)
    for way in WAYS:
        options = {"speculation": {"draft": scaled, **way}} if way else {}
        chunks: dict[str, Any] = {"max_num_batched_tokens": 13, "block_size": 8, "num_kv_blocks": 40}
        assert answers(scaled, 6, dtype, turns=2, max_num_seqs=6, **chunks, **options) == alone * 2, way
    with LLM(scaled, dtype=dtype, **SIZES | {"kv_cache_dtype": "auto"}) as llm:
        plain = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    assert plain != alone, "the cache is not in fp8"


def test_windows_and_heads_write_the_same_text(make_model: Callable[[str], TestModel], tmp_path: Path) -> None:
    """Catches an EAGLE head whose KV is taken for the target's, and windows in another type."""
    model = make_model("qwen3-windows")
    head = make_head(model, tmp_path)
    alone = answers(model.path, 1, "float32", prefix_caching=False, max_num_seqs=1)
    for mode in ("ar", "sd"):
        options = {"speculation": {"mode": mode, "draft": head.path, "k": 3}} if mode != "ar" else {}
        with LLM(model.path, dtype="float32", **SIZES, max_num_batched_tokens=16, max_num_seqs=6, **options) as llm:
            found = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
            features = runner_of(llm).features
            assert features is None or {cache.dtype for cache in features.kv[0]} == {torch.float32}
        assert found == alone, mode


class RoundedCache(transformers.DynamicCache):
    """Keys and values as transformers' attention would read them from a cache in fp8."""

    def update(self, key_states: Any, value_states: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        def rounded(x: torch.Tensor, scale: float) -> torch.Tensor:
            return (x / scale).clamp(-448, 448).to(FP8).float() * scale

        key_states, value_states = rounded(key_states, K_SCALES[layer_idx]), rounded(value_states, V_SCALES[layer_idx])
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


def test_logits_are_those_of_rounded_keys_and_values(model: TestModel, scaled: str) -> None:
    """Against transformers with such a cache. Catches scales that are ignored, swapped or of another layer."""
    tokens = PROMPTS[3]
    with LLM(scaled, dtype="float32", **SIZES) as llm, torch.inference_mode():
        ours = runner_of(llm).logits_of(tokens, len(tokens))
        theirs = model.reference(torch.tensor([tokens]), past_key_values=RoundedCache()).logits[0]
        plain = model.reference(torch.tensor([tokens])).logits[0]
    assert (ours - theirs).norm() < 2e-3 * theirs.norm()
    assert (ours - plain).norm() > 2e-2 * plain.norm()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.{}.self_attn.attn.{}_scale",
        "model.layers.{}.self_attn.{}_proj.output_scale",
        "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    ],
)
def test_every_spelling_of_a_scale(model: TestModel, tmp_path: Path, name: str) -> None:
    """A cache of the model's own type does not need it."""
    path = with_tensors(model, tmp_path / "m", scales(name))
    for kind, expected in (("fp8", list(zip(K_SCALES, V_SCALES, strict=True))), ("auto", [(1.0, 1.0)] * 3)):
        with LLM(path, **SIZES | {"kv_cache_dtype": kind}) as llm:
            found = [layer.attention.kv_scales.value for layer in runner_of(llm).decoder.layers]
        assert [(each.k, each.v) for each in found] == [(pytest.approx(k), pytest.approx(v)) for k, v in expected]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model.layers.1.self_attn.k_scale": torch.tensor(0.0)}, r"layers\.1\.self_attn\.k_scale is 0\.0, expected"),
        ({"model.layers.1.self_attn.v_scale": torch.tensor(-1.0)}, r"v_scale is -1\.0"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(torch.nan)}, r"k_scale is nan"),
        ({"model.layers.0.self_attn.k_scale": torch.tensor(torch.inf)}, r"k_scale is inf"),
        ({"model.layers.2.self_attn.k_scale": torch.ones(2)}, r"layers\.2\.self_attn\.k_scale has shape \(2,\)"),
        (
            {"model.layers.0.self_attn.attn.k_scale": torch.tensor(1.0)},
            r"k_scale and model\.layers\.0\.self_attn\.\S*k_scale are the same KV scale",
        ),
        ({"model.layers.3.self_attn.k_scale": torch.tensor(1.0)}, r"holds model\.layers\.3\.self_attn\.k_scale, which"),
        ({"model.layers.0.self_attn.q_scale": torch.tensor(1.0)}, r"holds model\.layers\.0\.self_attn\.q_scale, which"),
    ],
)
def test_scales_that_cannot_be(
    model: TestModel, tmp_path: Path, changes: dict[str, torch.Tensor], message: str
) -> None:
    path = with_tensors(model, tmp_path / "m", scales() | changes)
    with pytest.raises(UnsupportedModel, match=message):
        LLM(path, **SIZES)


def test_half_the_memory(model: TestModel, caplog: pytest.LogCaptureFixture) -> None:
    """Of the caches, and of what the pool is counted with."""
    found = {}
    caplog.set_level("INFO", "ssd")
    for kind in ("auto", "fp8"):
        with LLM(model.path, dtype="bfloat16", num_kv_blocks=16, **SIZES | {"kv_cache_dtype": kind}) as llm:
            runner = runner_of(llm)
            held = sum(cache.nbytes for layer in runner.kv for cache in layer)
            found[kind] = runner.decoder.kv_bytes_per_token, held
            assert f"tokens in {'bfloat16' if kind == 'auto' else 'fp8'}, " in caplog.text
    assert found["auto"] == tuple(2 * size for size in found["fp8"])


def test_a_gpu_needs_16_bits() -> None:
    config, cuda = EngineConfig("m", kv_cache_dtype="fp8"), torch.device("cuda")
    assert kv_dtype(config, SHAPES["qwen3-8b"], torch.float16, cuda) == FP8
    with pytest.raises(ConfigError, match="use dtype='bfloat16'"):
        kv_dtype(config, SHAPES["qwen3-8b"], torch.float32, cuda)
    with pytest.raises(ConfigError, match="latent attention"):
        kv_dtype(config, SHAPES["glm-4.7-flash"], torch.bfloat16, cuda)


def test_the_kernel_of_a_draft_step_refuses_it(scaled: str) -> None:
    """It would read bytes as bfloat16."""
    with LLM(scaled, dtype="bfloat16", **SIZES) as llm:
        runner = runner_of(llm)
        with pytest.raises(persistent.BuildError, match="KV cache"):
            persistent._accept(runner.decoder)
        assert persistent.persistent_step(runner.decoder, runner.kv) is None


def test_a_config_that_quantises_the_cache_alone(tmp_path: Path, model: TestModel) -> None:
    """As llm-compressor writes it. Catches weights in 8 bits that are taken for those of the model."""
    path = Path(with_tensors(model, tmp_path / "m", scales()))
    config = json.loads((path / "config.json").read_text())
    scheme = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
    own: dict[str, Any] = {"quant_method": "compressed-tensors", "kv_cache_scheme": scheme, "config_groups": {}}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": own}))
    assert open_checkpoint(path).config == open_checkpoint(model.path).config
    weights = {"group_0": {"weights": {"num_bits": 8, "type": "float"}, "targets": ["Linear"]}}
    for other in ({"config_groups": weights}, {"kv_cache_scheme": scheme | {"type": "int"}}, {"kv_cache_scheme": None}):
        (path / "config.json").write_text(json.dumps(config | {"quantization_config": own | other}))
        with pytest.raises(UnsupportedModel, match=r"quantization_config\.config_groups"):
            open_checkpoint(path)
