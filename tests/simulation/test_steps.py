"""Sizes of models and seconds of steps, against what the engine itself says of them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import ssd
from ssd.assembly.memory import weight_bytes
from ssd.bench.floor import streamed_bytes
from ssd.errors import ConfigError, ModelNotFound
from ssd.grafts.shapes import SHAPES
from ssd.layers.formats import FormatOf, dense
from ssd.layers.formats.mxfp4 import MXFP4
from ssd.layers.formats.rounded import rounded
from ssd.models.decoder import Decoder, outline
from ssd.simulation.hardware import FORMATS, GPUS, LAYER, interpolated
from ssd.simulation.models import eagle_head, open_model
from ssd.simulation.steps import Steps


def experts_packed(name: str) -> object:
    return MXFP4() if ".experts." in name else dense(name)


@pytest.mark.parametrize("shape", SHAPES)
def test_bytes_are_those_that_the_decoder_counts(shape: str) -> None:
    """Norms and biases are left out, which are less than a thousandth."""
    config, formats = SHAPES[shape], experts_packed if SHAPES[shape].family == "gpt_oss" else dense
    model, decoder = open_model(shape), Decoder(config, outline(torch.bfloat16, formats), max_positions=1)  # type: ignore[arg-type]
    for rows in (1, 8):
        assert model.read_bytes(rows) == pytest.approx(streamed_bytes(decoder, rows), rel=2e-3)
    assert model.weight_bytes == pytest.approx(weight_bytes(config, torch.bfloat16, formats), rel=2e-3)  # type: ignore[arg-type]
    for ranks in (n for n in (1, 4) if config.splits(n)):
        expected = sum(layer.attention.kv_layout(torch.bfloat16, ranks).bytes_per_token for layer in config.layers)
        assert model.kv_bytes(100, ranks) == 100 * expected


@pytest.mark.parametrize("form", ["fp8", "fp8_dynamic", "int8", "int4"])
def test_rounded_weights_have_the_bytes_of_their_codes(form: str) -> None:
    formats: FormatOf = rounded(form, exact=True)
    expected = weight_bytes(SHAPES["llama-3.1-8b"], torch.bfloat16, formats)
    assert open_model(f"llama-3.1-8b:{form}").weight_bytes == pytest.approx(expected, rel=0.02)


def test_a_window_bounds_the_kv_that_is_read() -> None:
    model = open_model("gpt-oss-20b")
    assert model.kv_bytes(128) == 128 * model.kv_bytes(1)
    assert model.kv_bytes(32768) == (32768 + 128) * model.kv_bytes(1) / 2


def test_names_of_models(tmp_path: Path) -> None:
    """A checkpoint's own format is used unless one is named."""
    assert open_model("graft:tiny-llama@llama-3.1-8b:fp8").config == SHAPES["llama-3.1-8b"]
    assert open_model("tiny-llama").config.hidden_size == 256
    raw = json.loads((Path(ssd.__file__).parent / "bundle" / "tiny-llama" / "config.json").read_text())
    for stored, form in (
        (None, "bf16"),
        ({"quant_method": "gptq", "bits": 4}, "awq"),
        ({"quant_method": "fp8"}, "fp8_dynamic"),
        ({"config_groups": {"0": {"weights": {"num_bits": 4}}}}, "int4"),
        ({"config_groups": {"0": {"weights": {"num_bits": 8}, "input_activations": {"num_bits": 8}}}}, "fp8_dynamic"),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": stored}))
        assert open_model(str(tmp_path)).format == form
        assert open_model(str(tmp_path / "config.json")).format == form
        assert open_model(f"{tmp_path}:int8").format == "int8"
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": {"quant_method": "hqq"}}))
    with pytest.raises(ConfigError, match=r"model: quant_method='hqq' is not known here: write NAME:FORMAT"):
        open_model(str(tmp_path))
    with pytest.raises(ModelNotFound, match=r"draft='qwen3-33b' is no shape.*did you mean qwen3-32b\?"):
        open_model("qwen3-33b", "draft")


def test_an_eagle_head_is_one_layer_of_its_target() -> None:
    """0.76 GB a step for an 8B (docs/benchmarks.md)."""
    assert eagle_head(open_model("llama-3.1-8b")).read_bytes() == pytest.approx(0.76e9, rel=0.03)


def test_seconds_grow_with_everything_and_shrink_with_ranks() -> None:
    model, gpu = open_model("llama-3.1-70b"), GPUS["h200"]
    one = Steps(model, gpu, 1, 300)
    times = [one.seconds(rows, rows) for rows in (1, 2, 8, 64, 256, 1024)]
    assert times == sorted(times)
    assert one.floor < times[0] < 1.2 * one.floor
    assert [Steps(model, gpu, ranks, 300).seconds(8, 8) for ranks in (8, 4, 2, 1)] == sorted(
        Steps(model, gpu, ranks, 300).seconds(8, 8) for ranks in (1, 2, 4, 8)
    )
    assert Steps(model, gpu, 1, 3000).seconds(8, 8) > one.seconds(8, 8)
    assert Steps(model, gpu, 1, 300, slowdown=1.5).seconds(8, 8) == pytest.approx(1.5 * one.seconds(8, 8))
    assert one.busy(8, 8) < one.seconds(8, 8)


def test_sums_move_what_the_docs_say() -> None:
    """docs/scaling.md: 64 and 512 rows of a 70B on 4 ranks, 1,013 and 3,039 MB (beside the message of shares)."""
    steps = Steps(open_model("llama-3.1-70b"), GPUS["h200"], 4, 300)
    for rows, moved in ((64, 1013e6), (512, 3039e6 + 161 * (4 << 20))):
        logits = 4 * rows * 128256 * 3 / 4
        assert steps._sums(rows) == pytest.approx(161 * 5e-6 + (moved + logits) / 450e9, rel=1e-3)


def test_tables() -> None:
    assert [interpolated(LAYER, size) for size in (1, 125, 1e6)] == [30e-6, 30e-6, 18e-6]
    assert 19e-6 < interpolated(LAYER, 300) < 26e-6
    assert all(0 < form.read <= 1 and 0 < form.compute <= 1 for form in FORMATS.values())
