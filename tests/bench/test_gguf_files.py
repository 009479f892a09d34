"""`bench/gguf_files.py`: its K quantisers against gguf's own decoding, and small files of whole models."""

from __future__ import annotations

import runpy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import mostly_slow

from ssd import LLM, SamplingParams
from ssd.assembly.open import open_checkpoint
from ssd.grafts.shapes import SHAPES
from ssd.layers.spec import RopeConfig
from ssd.models.config import equal_layers
from ssd.models.decoder import parameter_shapes

gguf = pytest.importorskip("gguf")
SCRIPT: dict[str, Any] = runpy.run_path(str(Path(__file__).parents[2] / "bench" / "gguf_files.py"))
CPU = torch.device("cpu")
PROMPTS = ["Once upon a time", "The old man walked to the sea and", "def fibonacci(n):\n", "My favourite animal is"]
SMALL = equal_layers("llama", 8448, 512, 768, 4, 4, 2, 64, 99, 0.1, RopeConfig(7.0), True)


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SHAPES, "llama", SMALL)
    monkeypatch.setitem(SHAPES, "llama-untied", replace(SMALL, tie_embeddings=False))
    monkeypatch.setitem(SHAPES, "qwen2", replace(SMALL.with_layers(qkv_bias=True), family="qwen2"))
    monkeypatch.setitem(SHAPES, "qwen3", replace(SMALL.with_layers(qk_norm=True), family="qwen3"))


@pytest.mark.parametrize(("kind", "most"), [("Q4_K", 0.085), ("Q6_K", 0.02)])
def test_k_quantisers(kind: str, most: float) -> None:
    """Catches misplaced bits, and zeros that a graft needs and that become something else."""
    weight = torch.randn(64, 1024, generator=torch.Generator().manual_seed(0)) * 0.02
    weight *= torch.arange(1, 65)[:, None]  # units of all sizes
    weight[3], weight[5, :288], weight[7, -256:] = 0, 0, 0
    weight[7, -1] = 2.0**-10  # a scale far below float16's normal numbers
    form = gguf.GGMLQuantizationType[kind]
    found = torch.from_numpy(gguf.quants.dequantize(SCRIPT["quantised"](weight, form), form))
    assert (found - weight).norm() / weight.norm() < most
    assert not found[3].any()
    assert not found[5, :288].any()
    assert found[7, -1] == pytest.approx(2.0**-10, rel=0.15)
    assert not found[7, -256:-1].any()


def test_types_are_those_of_llama_cpp() -> None:
    config = SHAPES["qwen2.5-1.5b"]

    def types(part: str, depth: int) -> list[str]:
        names = [f"blk.{layer}.{part}.weight" for layer in range(config.num_layers)]
        return [SCRIPT["type_of"](name, "Q4_K_M", config, depth).name for name in names]

    better = {0, 1, 2, 5, 8, 11, 14, 17, 20, 23, 24, 25, 26, 27}
    assert types("ffn_down", 8960) == ["Q6_K" if layer in better else "Q4_K" for layer in range(28)]
    assert types("attn_v", 896) == ["Q8_0" if layer in better else "Q5_0" for layer in range(28)]
    assert types("attn_k", 1536) == ["Q4_K"] * 28
    assert SCRIPT["type_of"]("token_embd.weight", "Q4_K_M", config, 1536).name == "Q6_K"
    untied = replace(config, tie_embeddings=False)
    assert SCRIPT["type_of"]("token_embd.weight", "Q4_K_M", untied, 1536).name == "Q4_K"
    assert SCRIPT["type_of"]("output.weight", "Q4_K_M", untied, 896).name == "Q8_0"


@pytest.mark.parametrize("shape", mostly_slow(["llama", "llama-untied", "qwen2", "qwen3"], fast={"qwen3"}))
def test_a_file_has_the_function_of_its_base(shape: str, tmp_path: Path) -> None:
    """Catches rows in another order, lost biases, tokens and stops, and additional tokens that are chosen."""
    base = "tiny-qwen3-draft" if shape == "qwen3" else "tiny-llama-draft"
    file, draft = tmp_path / "target.gguf", tmp_path / "draft.gguf"
    graft = open_checkpoint(f"graft:{base}@{shape}")
    SCRIPT["write"](graft, file, "Q4_K_M", CPU)
    SCRIPT["write"](open_checkpoint(base), draft, "Q8_0", CPU)
    assert parameter_shapes(open_checkpoint(file).config) == parameter_shapes(graft.config)
    with LLM(base, device="cpu") as original:
        tokens = [original.tokenizer.encode(prompt) for prompt in PROMPTS]
        written = original.generate(PROMPTS, SamplingParams(max_new_tokens=32))
        ids = [token for output in written for token in (*output.prompt_token_ids, *output.token_ids)]
        expected = original.engine.round.target.runner.logits_of(ids, len(ids)).clone()
        stops = original.engine.stop_token_ids
    speculation = {"mode": "sd", "draft": str(draft), "k": 3}
    with LLM(str(file), device="cpu", speculation=speculation) as llm:
        assert [llm.tokenizer.encode(prompt) for prompt in PROMPTS] == tokens
        assert llm.engine.stop_token_ids == stops
        found = llm.engine.round.target.runner.logits_of(ids, len(ids)).clone()
        assert (found[:, 8192:].amax(1) < found[:, :8192].amin(1)).all()
        assert (found.argmax(1) == expected.argmax(1)).float().mean() > 0.75
        llm.generate(PROMPTS, SamplingParams(max_new_tokens=32))
        metrics = llm.engine.metrics
        assert metrics.output_tokens / metrics.num_sequence_rounds > 2.5
