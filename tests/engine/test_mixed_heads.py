"""A model whose layers have different heads, in the whole engine: against plain torch, and in all modes."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import VOCAB, byte_tokenizer, ragged_prompts
from safetensors.torch import save_file
from torch.nn.functional import rms_norm, scaled_dot_product_attention, silu

from ssd import LLM, SamplingParams
from ssd.models import families
from ssd.models.config import DecoderConfig
from ssd.models.decoder import parameter_shapes

# Query heads, KV heads, dimensions of a head, window: 3, 1, 8 and 4 query heads for each KV head. One of the two layers
# with a window has KV of the same layout as one without.
LAYERS = [(6, 2, 16, None), (4, 4, 32, 24), (8, 1, 48, None), (6, 2, 16, 24), (8, 2, 64, None)]
PROMPTS = ragged_prompts(6, longest=150)
PARAMS = [SamplingParams(temperature=0.8 * (i % 2), seed=i, max_new_tokens=16, ignore_eos=True) for i in range(6)]
WAYS: list[dict[str, Any]] = [{"mode": "sd"}, {"mode": "ssd", "placement": "inline"}]
Tensors = Mapping[str, torch.Tensor]


def mixed(raw: Mapping[str, Any]) -> DecoderConfig:
    """A family with heads and a window for each layer."""
    config, layers = families.llama(raw), []
    for num_heads, num_kv_heads, head_dim, window in raw["heads"]:
        sizes = {"num_heads": num_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim, "window": window}
        layers.append(replace(config.layer, attention=replace(config.attention, **sizes)))
    return replace(config, layers=tuple(layers))


@pytest.fixture(autouse=True)
def _family(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(families.FAMILIES, "MixedForCausalLM", mixed)


def save(path: Path, heads: list[tuple[int, int, int, int | None]], seed: int) -> Tensors:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "max_position_embeddings": 512}
    raw = {"architectures": ["MixedForCausalLM"], "vocab_size": VOCAB, **sizes, "num_hidden_layers": len(heads)}
    raw |= {"heads": heads, "torch_dtype": "float32", "rms_norm_eps": 1e-6, "rope_theta": 10000.0}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: torch.randn(shape, generator=generator) * 0.2 + (len(shape) == 1)
        for name, shape in parameter_shapes(mixed(raw)).items()
    }
    path.mkdir()
    (path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    byte_tokenizer().save(str(path / "tokenizer.json"))
    save_file(tensors, path / "model.safetensors")
    return tensors


def plain_logits(tensors: Tensors, tokens: list[int]) -> torch.Tensor:
    """The whole text in one pass of plain torch."""
    x, place = tensors["model.embed_tokens.weight"][tokens], torch.arange(len(tokens))
    distance = place[:, None] - place
    for i, (_, num_kv_heads, dim, window) in enumerate(LAYERS):
        prefix = f"model.layers.{i}."
        own = {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
        normed = rms_norm(x, (64,), own["input_layernorm.weight"], 1e-6)
        angle = place[:, None] * 10000.0 ** (-torch.arange(0, dim, 2) / dim)
        turned = []
        for name in "qk":
            heads = (normed @ own[f"self_attn.{name}_proj.weight"].T).view(len(tokens), -1, dim).transpose(0, 1)
            a, b = heads.chunk(2, -1)
            turned.append(torch.cat((a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()), -1))
        v = (normed @ own["self_attn.v_proj.weight"].T).view(len(tokens), num_kv_heads, dim).transpose(0, 1)
        seen = (distance >= 0) & (distance < (window or len(tokens)))
        out = scaled_dot_product_attention(*turned, v, attn_mask=seen, enable_gqa=True)
        x = x + out.transpose(0, 1).flatten(1) @ own["self_attn.o_proj.weight"].T
        normed = rms_norm(x, (64,), own["post_attention_layernorm.weight"], 1e-6)
        gate, up = (normed @ own[f"mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        x = x + (silu(gate) * up) @ own["mlp.down_proj.weight"].T
    return rms_norm(x, (64,), tensors["model.norm.weight"], 1e-6) @ tensors["lm_head.weight"].T


def test_a_model_of_different_heads_is_plain_torch_and_the_same_in_all_modes(tmp_path: Path) -> None:
    """Catches KV, rotary tables, attention scratch or blocks of a group that are made for one layer's heads."""
    tensors = save(tmp_path / "target", LAYERS, 0)
    save(tmp_path / "draft", LAYERS[2:4], 1)
    sizes: dict[str, Any] = {"device": "cpu", "dtype": "float32", "max_num_batched_tokens": 32, "block_size": 8}
    with LLM(str(tmp_path / "target"), max_num_seqs=1, prefix_caching=False, **sizes) as llm:
        expected = [llm.generate(prompt, params)[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
        runner = llm.engine.round.target.runner
        theirs = plain_logits(tensors, PROMPTS[0])
        assert (runner.logits_of(PROMPTS[0], len(PROMPTS[0])) - theirs).abs().max() < 1e-4 * theirs.abs().max()
        # Of the five layers' tensors, those of the first and the fourth are the same: their blocks never are.
        stored = runner.num_blocks * 8 * runner.decoder.kv_bytes_per_token
        assert stored == sum(t.nbytes for t in {t.data_ptr(): t for kv in runner.kv for t in kv}.values())
        assert runner.decoder.kv_bytes_per_token == 4 * 2 * (2 * 16 + 4 * 32 + 48 + 2 * 64)
    for prompt, tokens in zip(PROMPTS[::2], expected[::2], strict=True):  # the greedy ones
        logits = plain_logits(tensors, [*prompt, *tokens])
        assert tokens == logits[len(prompt) - 1 : -1].argmax(-1).tolist()
    ways = (
        {"draft": str(tmp_path / draft), "k": 3, **way} for way, draft in zip(WAYS, ("draft", "target"), strict=True)
    )
    for way in ({}, *ways):
        options = {"speculation": way} if way else {}
        with LLM(str(tmp_path / "target"), max_num_seqs=4, **sizes, **options) as llm:
            assert [output.token_ids for output in llm.generate(PROMPTS, PARAMS)] == expected, way
            counts = llm.engine.metrics
        assert not way or counts.spec_decode_num_accepted_tokens > 0
