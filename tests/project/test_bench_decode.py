"""`bench/decode.py`: every published shape has a peer in transformers, and the comparison runs for every family."""

from __future__ import annotations

import importlib
import itertools
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from random_weights import PUBLISHED, RandomCheckpoint, experts_in

from ssd.assembly.build import build_engine
from ssd.config import EngineConfig
from ssd.engine.driver import Driver
from ssd.execution.target import Target
from ssd.grafts.shapes import SHAPES, shape_of
from ssd.kernels.weights import RoutingRule
from ssd.layers.spec import ExpertsSpec, LatentSpec, MLPSpec
from ssd.models.decoder import parameter_shapes
from ssd.models.fused_experts import single_experts

FAMILIES = {shape.family: shape for shape in SHAPES.values()}


@pytest.fixture
def decode() -> Any:
    return importlib.import_module("decode")


@pytest.mark.parametrize("name", SHAPES)
def test_the_peer_of_a_shape_has_the_same_parameters(decode: Any, name: str) -> None:
    """Names and shapes, biases and tied embeddings among them: catches a family without a peer, and another model."""
    shape = replace(SHAPES[name], layers=SHAPES[name].layers[:2])
    peer = decode.hf_model(shape, torch.bfloat16, torch.device("meta"))
    corrections = ((name, own) for name, own in peer.named_buffers() if name.endswith("e_score_correction_bias"))
    parameters = dict(single_experts(itertools.chain(peer.named_parameters(), corrections), shape))
    assert {name: tuple(parameter.shape) for name, parameter in parameters.items()} == parameter_shapes(shape)
    assert {parameter.dtype for parameter in peer.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("form", PUBLISHED)
def test_experts_in_published_formats(decode: Any, form: str) -> None:
    """Catches random tensors that the loader refuses, and experts that stay floats."""
    base = shape_of("qwen3-30b-a3b:layers=1")
    assert isinstance(base.layer.mlp, ExpertsSpec)
    mlp = replace(base.layer.mlp, num_experts=4, experts_per_token=2, intermediate_size=128)
    layers = (replace(base.layer, mlp=mlp),)
    shape = replace(base, layers=layers, vocab_size=96, hidden_size=128, max_position=256)
    checkpoint = RandomCheckpoint(shape, formats=experts_in(form))
    engine, _ = build_engine(EngineConfig("random", device="cpu", max_num_seqs=2), checkpoint)
    assert isinstance(engine.round.target, Target)
    assert engine.round.target.runner.decoder.formats == {"dense", PUBLISHED[form].name}
    driver = Driver(engine)
    assert decode.engine_decode(driver, [[1, 2, 3], [4, 5]], 4) > 0
    driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_small_shape_of_every_family(
    decode: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], family: str
) -> None:
    heads: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16}
    if isinstance(FAMILIES[family].layers[0].attention, LatentSpec):
        heads = {"num_heads": 4, "latent_dim": 32, "key_dim": 16, "rope_dim": 16, "value_dim": 16, "query_rank": 32}
    layers = FAMILIES[family].with_layers(**heads).layers[-2:]
    sizes = {"vocab_size": 96, "hidden_size": 64, "max_position": 256}
    experts: dict[str, Any] = {"num_experts": 4, "experts_per_token": 2, "intermediate_size": 32}
    if isinstance(layers[0].mlp, ExpertsSpec) and layers[0].mlp.shared_size:
        experts |= {"shared_size": 32, "rule": RoutingRule(sigmoid=True)}
    mlp = layers[0].mlp
    mlp = replace(mlp, **experts) if isinstance(mlp, ExpertsSpec) else MLPSpec(96)
    small = replace(FAMILIES[family], layers=tuple(replace(layer, mlp=mlp) for layer in layers), **sizes)
    monkeypatch.setitem(SHAPES, "small", small)
    flags = ["--shape", "small", "--prompt-len", "4", "--new-tokens", "4", "--repeats", "1"]
    monkeypatch.setattr(sys, "argv", ["decode.py", *flags])
    decode.main()
    said = capsys.readouterr().out
    assert "batch 8, transformers" in said
    assert "24 ragged requests" in said
