"""Checkpoints with a `quantization_config`: every published format is read as it is meant, and runs exactly."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import FORMATS, write_checkpoint
from test_parity import engine_logits, prompt

from ssd import LLM, SamplingParams
from ssd.kernels.quantized import dequantize
from ssd.layers.formats.coded import Coded
from ssd.models.checkpoint import HFCheckpoint

Made = Callable[[str], tuple[str, Any]]
LAYERS = ("self_attn.q_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """The checkpoint of a format, and transformers' model of it."""
    done: dict[str, tuple[str, Any]] = {}

    def make(name: str) -> tuple[str, Any]:
        if name not in done:
            path = tmp_path_factory.mktemp(name)
            done[name] = str(path), write_checkpoint(path, FORMATS[name])
        return done[name]

    return make


@pytest.mark.parametrize("name", FORMATS)
def test_the_weights_are_those_of_the_format_to_the_bit(made: Made, name: str) -> None:
    """Catches a wrong order of bits, columns or groups, a zero point off by one, and a scale of another row."""
    path, model = made(name)
    checkpoint = HFCheckpoint.open(Path(path))
    tensors = dict(checkpoint.weights(torch.device("cpu"), torch.float32))
    for layer in LAYERS:
        full = f"model.layers.1.{layer}"
        form = checkpoint.formats(full)
        assert isinstance(form, Coded)
        stored = {own.removeprefix(f"{full}."): each for own, each in tensors.items() if own.startswith(f"{full}.")}
        shape = model.get_submodule(full).weight.shape
        assert form.shapes(*shape).keys() == stored.keys()
        found, order = dequantize(form.codes(stored), torch.float32), form.order(stored)
        if order is not None:
            found = found[:, torch.argsort(order)]
        assert torch.equal(found, model.get_submodule(full).weight)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_equal_those_of_the_widened_model(made: Made, name: str) -> None:
    """By transformers, with inputs rounded as the format says; a rounding may fall to the other side of a half."""
    path, model = made(name)
    with LLM(path, device="cpu", dtype="float32", max_num_seqs=2) as llm:
        ours = engine_logits(llm, prompt(70))
    with torch.no_grad():
        theirs = model(torch.tensor([prompt(70)])).logits[0]
    limit = 1e-5 if FORMATS[name].inputs is None else 2e-2
    assert (ours - theirs).norm() / theirs.norm() < limit
