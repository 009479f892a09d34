"""Grafts in the layouts of AWQ and GPTQ: what is stored, read by code of its own and by ssd, and the text of all modes.

The base is a bundled draft, in a small shape.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import same_bits
from safetensors.torch import load_file
from typer.testing import CliRunner

from ssd import LLM, ConfigError, SamplingParams
from ssd.assembly.open import open_checkpoint, open_graft
from ssd.cli.main import app
from ssd.grafts import export
from ssd.grafts.shapes import SHAPES
from ssd.models.checkpoint import all_weights

CPU = torch.device("cpu")
BASE = "tiny-llama-draft"
SHAPE = "cpu-7m"  # depths of 256 and 896
METHODS = {
    "awq": {"quant_method": "awq", "zero_point": True, "version": "gemm"},
    "gptq": {"quant_method": "gptq", "desc_act": False, "sym": True, "lm_head": False, "checkpoint_format": "gptq"},
}
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # of AutoAWQ: nibble i, from the lowest bits, is that of column order[i]

Array = np.ndarray[Any, np.dtype[np.int64]]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("published")
    for form in METHODS:
        export.write_graft(open_graft(BASE, f"{SHAPE}:{form}"), folder / form, torch.bfloat16, CPU)
    return {form: folder / form for form in METHODS}


def nibbles(words: torch.Tensor, order: tuple[int, ...]) -> Array:
    """[n, words] -> [n, 8 * words]"""
    bits = words.numpy().astype(np.int64)
    out = np.zeros((len(bits), 8 * bits.shape[1]), np.int64)
    for place, column in enumerate(order):
        out[:, column::8] = bits >> (4 * place) & 15
    return out


def stored_integers(form: str, stored: dict[str, torch.Tensor], layer: str) -> tuple[Array, Array]:
    """Integers [outputs, inputs] and zero points [outputs, groups], as the authors of the layout read them."""
    words, zeros = stored[f"{layer}.qweight"], stored[f"{layer}.qzeros"]
    if form == "awq":
        return nibbles(words, AWQ_ORDER).T, nibbles(zeros, AWQ_ORDER).T
    return nibbles(words.T.contiguous(), tuple(range(8))), nibbles(zeros, tuple(range(8))).T + 1


@pytest.mark.parametrize("form", METHODS)
def test_the_stored_integers_are_the_nearest(form: str, written: dict[str, Path]) -> None:
    """Catches a wrong order of nibbles, groups across inputs, zero points off by one, zeros that become numbers."""
    stored = load_file(written[form] / "model.safetensors")
    told = json.loads((written[form] / "config.json").read_text())["quantization_config"]
    assert told == {**METHODS[form], "bits": 4, "group_size": 128}
    points = set()
    for name, weight in all_weights(open_graft(BASE, SHAPE), CPU, torch.bfloat16).items():
        if not name.endswith("_proj.weight"):
            assert same_bits(stored.pop(name), weight)
            continue
        layer, exact = name.removesuffix(".weight"), weight.float().numpy()
        integers, zeros = stored_integers(form, stored, layer)
        scales = stored[f"{layer}.scales"]
        assert scales.dtype == torch.float16
        step = scales.float().numpy().T.repeat(128, axis=1)
        error = np.abs((integers - zeros.repeat(128, axis=1)) * step - exact)
        ends = (integers == 0) | (integers == 15)  # what is cut off there: half a step of the zero point's rounding
        assert np.all(error <= step * np.where(ends, 1.01, 0.501))
        assert not error[exact == 0].any()
        points |= set(zeros.flatten().tolist())
        for own in ("qweight", "qzeros", "scales", "g_idx"):
            group = stored.pop(f"{layer}.{own}", None)
            assert (group is None) == (form == "awq" and own == "g_idx")
        if form == "gptq":
            assert group is not None
            assert group.tolist() == [i // 128 for i in range(weight.shape[1])]
    assert not stored
    assert points == {8} if form == "gptq" else len(points) > 3


@pytest.mark.parametrize("form", METHODS)
def test_what_is_read_is_what_is_stored(form: str, written: dict[str, Path]) -> None:
    """Weights to the bit: those of the file, and those of the graft in memory."""
    stored = load_file(written[form] / "model.safetensors")
    read = all_weights(open_checkpoint(written[form]), CPU, torch.float32)
    memory = all_weights(open_graft(BASE, f"{SHAPE}:{form}"), CPU, torch.bfloat16)
    for name, weight in read.items():
        if name.endswith("_proj.weight"):
            layer = name.removesuffix(".weight")
            integers, zeros = stored_integers(form, stored, layer)
            scales = stored[f"{layer}.scales"].float().numpy().T
            wide = torch.from_numpy((integers - zeros.repeat(128, axis=1)) * scales.repeat(128, axis=1)).float()
            assert torch.equal(weight, wide)
        assert same_bits(memory[name], weight.to(torch.bfloat16))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("form", METHODS)
def test_ar_sd_and_ssd_write_the_same(form: str, dtype: str, written: dict[str, Path]) -> None:
    prompts = ["Once upon a time", "The little", "Tom and"]
    params = [SamplingParams(max_new_tokens=12, temperature=t, seed=3, ignore_eos=True) for t in (0.0, 1.0, 0.7)]

    def answers(model: str, batch: int, **speculation: Any) -> list[list[int]]:
        with LLM(model, device="cpu", dtype=dtype, max_num_seqs=batch, speculation=speculation or None) as llm:
            return [output.token_ids for output in llm.generate(prompts, params)]

    path, draft = str(written[form]), BASE
    alone = answers(path, 1)
    assert answers(f"graft:{BASE}@{SHAPE}:{form}", 3) == alone
    assert answers(path, 3, mode="sd", draft=draft, k=3) == alone
    assert answers(path, 3, mode="ssd", draft=draft, k=3, placement="inline") == alone


@pytest.mark.parametrize("form", METHODS)
def test_the_command_writes_them(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the size that 4 bits have, and a note that names the rounding."""
    monkeypatch.chdir(tmp_path)
    options = ["--shape", SHAPE, "--quantization", form, "--device", "cpu"]
    done = CliRunner().invoke(app, ["graft", BASE, *options])
    assert (done.exit_code, done.stdout) == (0, f"{BASE}@{SHAPE}-{form}\n"), done.output
    found = open_checkpoint(tmp_path / done.stdout.strip())
    assert f"rounded to {form}: that shape's speed, a text close to {BASE}'s" in found.note
    assert {found.formats(f"model.layers.0.{name}").name for name in ("mlp.up_proj", "self_attn.o_proj")} == {"int4"}
    stored = load_file(tmp_path / done.stdout.strip() / "model.safetensors")
    packed = sum(each.nbytes for name, each in stored.items() if "_proj." in name and "g_idx" not in name)
    weights = sum(8 * each.numel() for name, each in stored.items() if name.endswith("qweight"))
    assert packed == weights * (4 + (16 + 4) / 128) / 8


def test_shapes_that_the_layouts_cannot_hold_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    known = SHAPES[SHAPE]
    layers = tuple(replace(layer, mlp=replace(layer.mlp, intermediate_size=904)) for layer in known.layers)
    monkeypatch.setitem(SHAPES, "narrow", replace(known, layers=layers))
    with pytest.raises(ConfigError, match=r"experts\.0\.\w+ is mxfp4 already, not floats: use another shape"):
        open_graft("tiny-llama", "gpt-oss-20b:awq").formats("lm_head")
    with pytest.raises(ConfigError, match=r"gptq has groups of 16 inputs or more .* use another shape"):
        open_graft(BASE, "narrow:gptq").formats("lm_head")
