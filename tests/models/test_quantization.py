"""Checkpoints with a `quantization_config`: every published format is read as it is meant, and runs exactly."""

from __future__ import annotations

import copy
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import mostly_slow, ragged_prompts
from quantized_checkpoints import FORMATS, PublishedFormat, write_checkpoint
from reference_ops import ReferenceOps
from safetensors.torch import load_file, save_file
from split_models import logits, on_ranks
from test_hostile_files import HOSTILE, check_ends_well, damaged, places
from test_parity import engine_logits, prompt

from ssd import LLM, SamplingParams
from ssd.assembly.memory import weight_bytes
from ssd.errors import ConfigError, SSDError, UnsupportedModel
from ssd.layers.formats import DENSE
from ssd.layers.formats.coded import Coded
from ssd.layers.parameter import Build
from ssd.models.checkpoint import HFCheckpoint, all_weights
from ssd.models.decoder import Decoder
from ssd.models.quantization import METHODS, formats_of
from ssd.parallel.tensor import TensorParallel

Made = Callable[[str], tuple[str, Any]]


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
    found = all_weights(checkpoint, torch.device("cpu"), torch.float32)
    theirs = model.state_dict()
    assert found.keys() == theirs.keys()
    for each, weight in theirs.items():
        assert torch.equal(found[each], weight), each  # values: the rounding here makes -0.0, an integer has none
    assert isinstance(checkpoint.formats("model.layers.1.mlp.down_proj"), Coded)


@pytest.mark.parametrize("name", mostly_slow(FORMATS, fast=list(FORMATS)[::4]))
def test_logits_equal_those_of_the_widened_model(made: Made, name: str) -> None:
    """By transformers, with inputs rounded as the format says; a rounding may fall to the other side of a half."""
    path, model = made(name)
    with LLM(path, device="cpu", dtype="float32", max_num_seqs=2) as llm:
        ours = engine_logits(llm, prompt(70))
    with torch.no_grad():
        theirs = model(torch.tensor([prompt(70)])).logits[0]
    limit = 1e-5 if FORMATS[name].inputs is None else 2e-2
    assert (ours - theirs).norm() / theirs.norm() < limit


# --- exactness --------------------------------------------------------------------------------------------------------

PROMPTS = ragged_prompts(6, longest=40)
PARAMS = [
    SamplingParams(temperature=float(i % 2), seed=i, max_new_tokens=16, ignore_eos=True) for i in range(len(PROMPTS))
]
QUICK = {("awq", "bfloat16"), ("fp8-block", "bfloat16")}


@pytest.mark.parametrize(
    ("name", "dtype"), mostly_slow(itertools.product(FORMATS, ["float32", "bfloat16"]), fast=QUICK)
)
def test_ar_sd_and_ssd_write_the_same(made: Made, name: str, dtype: str) -> None:
    """At temperatures 0 and 1, one request at a time or all at once, drafted by the model itself in another type of
    weights: catches a product whose bits depend on the other rows."""
    path, _ = made(name)
    draft, _ = made("ct-int4-channel")

    def answers(batch: int, **speculation: Any) -> list[list[int]]:
        with LLM(path, device="cpu", dtype=dtype, max_num_seqs=batch, speculation=speculation or None) as llm:
            groups = [slice(i, i + batch) for i in range(0, len(PROMPTS), batch)]
            outputs = [output for group in groups for output in llm.generate(PROMPTS[group], PARAMS[group])]
            if speculation:
                assert llm.engine.metrics.spec_decode_num_accepted_tokens > 0
        return [output.token_ids for output in outputs]

    alone = answers(1)
    assert answers(6, mode="sd", draft=draft, k=3) == alone
    assert answers(4, mode="ssd", draft=draft, k=3, placement="inline") == alone


@pytest.mark.parametrize(
    "name", ["ct-fp8-block", "ct-fp8-weight-only", "ct-int4-zero-point", "ct-int4-channel", "gptq-zero-point", "awq-32"]
)
def test_two_ranks_equal_one(made: Made, name: str) -> None:
    """Catches a share of words, groups or blocks that is not the rank's.

    Formats whose inputs have one scale for all columns are left out: each rank rounds its own columns.
    """
    checkpoint = HFCheckpoint.open(Path(made(name)[0]))
    split = on_ranks(2, lambda tp: logits(checkpoint, tp))[0]
    assert (split - logits(checkpoint, TensorParallel())).norm() / split.norm() < (
        1e-5 if "fp8-b" not in name else 2e-2
    )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gptq-act-order", "act-order.*tensor_parallel_size=1"),
        ("fp8-block", "tensor_parallel_size: blocks of 128 weights would be cut"),
        ("ct-int4", "tensor_parallel_size: groups of 128 weights would be cut"),
    ],
)
def test_what_cannot_be_split_is_refused(made: Made, name: str, message: str) -> None:
    checkpoint = HFCheckpoint.open(Path(made(name)[0]))
    build = Build(ReferenceOps(), torch.device("cpu"), torch.float32, TensorParallel(0, 2), checkpoint.formats)
    with pytest.raises(ConfigError, match=message):
        Decoder(checkpoint.config, build, max_positions=8).load(checkpoint.stored())


def test_memory_is_that_of_the_codes(made: Made) -> None:
    """Catches estimates of a quantised model as if it were not: it would be refused for its size."""
    whole = HFCheckpoint.open(Path(made("awq")[0]))
    layers = 2 * (4 * 128 * 128 + 3 * 128 * 256)
    dense = weight_bytes(whole.config, torch.bfloat16)
    assert dense - weight_bytes(whole.config, torch.bfloat16, whole.formats) == layers * 2 - layers // 2 - layers // 16


# --- mixtures ---------------------------------------------------------------------------------------------------------


def group_of(name: str) -> dict[str, Any]:
    group: dict[str, Any] = copy.deepcopy(FORMATS[name].config["config_groups"]["group_0"])
    return group | {"format": FORMATS[name].config["format"]}


def test_config_groups_ignored_layers_and_parts_of_one_weight_in_different_formats(tmp_path: Path) -> None:
    """As llm-compressor writes mixed precision: catches a part of q, k, v in the format of another part."""
    groups = {
        "group_0": {
            **group_of("ct-fp8-channel"),
            "targets": ["re:.*(k_proj|down_proj)$", "model.layers.0.mlp.up_proj"],
        },
        "group_1": {**group_of("ct-int4"), "targets": ["Linear"]},
    }
    config = {**FORMATS["ct-int4"].config, "format": "mixed-precision", "config_groups": groups}
    config["ignore"] = ["lm_head", "re:.*self_attn.v_proj", "model.layers.1.mlp.up_proj"]
    fp8, int4 = FORMATS["ct-fp8-channel"], FORMATS["ct-int4"]
    by_name = {"q_proj": int4, "k_proj": fp8, "o_proj": int4, "gate_proj": int4, "down_proj": fp8}
    model = write_checkpoint(tmp_path, by_name, config)
    checkpoint = HFCheckpoint.open(tmp_path)
    names = {name: checkpoint.formats(f"model.layers.1.{name}").name for name in ("mlp.gate_proj", "mlp.down_proj")}
    assert names == {"mlp.gate_proj": "int4", "mlp.down_proj": "fp8"}
    assert checkpoint.formats("model.layers.0.mlp.up_proj").name == "fp8"  # a name comes before a class
    others = ("lm_head", "model.embed_tokens", "model.layers.0.self_attn.v_proj", "model.layers.1.mlp.up_proj")
    assert all(checkpoint.formats(name) is DENSE for name in others)
    config["ignore"] = ["lm_head", "re:.*self_attn.v_proj", "re:.*mlp.up_proj"]
    edit(tmp_path, quantization_config=None, compression_config=config)  # its older name
    assert logits_error(tmp_path, model) < 2e-2


def logits_error(path: Path, model: Any) -> float:
    """Of the checkpoint's logits against those of the transformers model, relative."""
    with LLM(str(path), device="cpu", dtype="float32", max_num_seqs=2) as llm:
        ours = engine_logits(llm, prompt(50))
    with torch.no_grad():
        theirs = model(torch.tensor([prompt(50)])).logits[0]
    return float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("name", ["gptq", "awq", "fp8-tensor"])
def test_layers_that_are_stored_unquantised_are_left_so(name: str, tmp_path: Path) -> None:
    """Whatever words the config has for them; those of a list that names one of the others in full are wrong."""
    config = {**FORMATS[name].config, "modules_to_not_convert": ["down_proj", "model.layers.0.self_attn.k_proj"]}
    kept = {key: FORMATS[name] for key in ("q_proj", "v_proj", "gate_proj", "up_proj")}
    model = write_checkpoint(tmp_path, kept, config)
    assert logits_error(tmp_path, model) < 2e-2
    edit(tmp_path, quantization_config={**config, "modules_to_not_convert": ["model.layers.0.mlp.up_proj"]})
    with pytest.raises(UnsupportedModel, match=r"model\.layers\.0\.mlp\.up_proj is not quantised, but"):
        HFCheckpoint.open(tmp_path)


def test_rules_of_gptqmodel_for_single_layers(tmp_path: Path) -> None:
    """Other bits and groups by pattern; excluded layers are stored as they are."""
    rules = {"-:.*o_proj": {}, "+:.*mlp\\.down": {"bits": 8, "group_size": 32}, r".*k_proj": {"group_size": 64}}
    config = {**FORMATS["gptq"].config, "dynamic": rules}
    narrow = PublishedFormat(config, FORMATS["gptq"].pack, {"group": 64})
    by_name = {key: FORMATS["gptq"] for key in ("q_proj", "v_proj", "gate_proj", "up_proj")}
    by_name |= {"k_proj": narrow, "down_proj": FORMATS["gptq-int8"]}
    model = write_checkpoint(tmp_path, by_name, config)
    assert logits_error(tmp_path, model) < 1e-5


def test_tensors_that_mean_nothing_here_are_accepted(made: Made, tmp_path: Path) -> None:
    """Scales for a KV cache in FP8, and the biases of zeros that old GPTQ files have; other biases are refused."""
    path = copied(made("gptq")[0], tmp_path)
    scales = {f"model.layers.0.self_attn.{name}": torch.ones(1) for name in ("k_scale", "v_scale")}
    change(path, {**scales, "model.layers.0.mlp.up_proj.bias": torch.zeros(256)})
    load(path)
    change(path, {"model.layers.0.mlp.up_proj.bias": torch.ones(256)})
    with pytest.raises(UnsupportedModel, match=r"up_proj\.bias"):
        load(path)


# --- bad input --------------------------------------------------------------------------------------------------------


def edit(path: Path, **changes: Any) -> None:
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def copied(source: str, path: Path) -> Path:
    for file in Path(source).iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


def change(path: Path, tensors: dict[str, torch.Tensor | None]) -> None:
    """Replaces tensors of a checkpoint; None removes one."""
    stored = {**load_file(path / "model.safetensors"), **tensors}
    save_file({name: tensor for name, tensor in stored.items() if tensor is not None}, path / "model.safetensors")


def load(path: Path) -> None:
    checkpoint, cpu = HFCheckpoint.open(path), torch.device("cpu")
    build = Build(ReferenceOps(), cpu, torch.float32, format_of=checkpoint.formats)
    Decoder(checkpoint.config, build, max_positions=8).load(checkpoint.weights(cpu, torch.float32))


LAYER = "model.layers.1.mlp.down_proj"  # 128 x 256
EXPONENTS = torch.tensor([[127, 255]], dtype=torch.uint8).view(torch.float8_e8m0fnu)  # 1 and NaN


@pytest.mark.parametrize(
    ("name", "tensor", "value", "message"),
    [
        ("gptq", "qweight", torch.zeros(32, 128), "qweight is float32, expected int32"),
        ("gptq", "qweight", torch.zeros(16, 128, dtype=torch.int32), r"qweight has shape \(16, 128\), the config says"),
        ("gptq", "scales", torch.zeros(0, 128), r"scales has shape \(0, 128\)"),
        ("gptq", "scales", torch.full((2, 128), float("nan")), "scales has numbers that are not finite"),
        ("gptq", "scales", torch.ones(2, 128, dtype=torch.int32), "scales is int32, expected bfloat16 or"),
        ("gptq", "qzeros", None, r"lacks 1 tensors, among them \['.*qzeros"),
        (
            "gptq",
            "g_idx",
            torch.full((256,), 7, dtype=torch.int32),
            "down_proj: g_idx: expected groups 0 to 1 with 128",
        ),
        ("gptq", "g_idx", torch.full((256,), -1, dtype=torch.int32), "g_idx: expected groups 0 to 1"),
        ("gptq", "g_idx", torch.zeros(256), "g_idx is float32, expected int32 or int64"),
        ("ct-int4", "weight_shape", torch.tensor([128, 250]), r"weight_shape is \[128, 250\]"),
        ("ct-int4", "weight_shape", torch.tensor([128, 264]), r"weight_shape is \[128, 264\]"),  # no whole parts
        ("ct-int4", "weight_scale", torch.full((128, 2), float("inf")), "weight_scale has numbers that are not finite"),
        ("ct-fp8-channel", "weight", torch.ones(128, 256), "weight is float32, expected float8_e4m3fn"),
        ("ct-fp8-channel", "weight", torch.ones(128, 256, dtype=torch.int8), "weight is int8, expected float8_e4m3fn"),
        ("ct-fp8-channel", "weight_scale", torch.full((128, 1), -1.0), "weight_scale has negative numbers"),
        ("ct-fp8-channel", "weight_scale", torch.ones(128), r"weight_scale has shape \(128,\)"),
        ("ct-fp8-tensor-static", "input_scale", torch.zeros(1), "input_scale is 0, expected a positive number"),
        ("ct-fp8-tensor-static", "input_scale", None, "lacks 1 tensors"),
        ("fp8-block-ue8m0-float32", "weight_scale_inv", torch.full((1, 2), 3.0), "no powers of two.*remove scale_fmt"),
        ("fp8-block-ue8m0", "weight_scale_inv", EXPONENTS, "weight_scale_inv has negative numbers or NaN"),
        ("fp8-block", "weight_scale_inv", EXPONENTS, "is float8_e8m0fnu, expected bfloat16 or"),
    ],
)
def test_tensors_that_contradict_the_format_are_refused(
    made: Made, tmp_path: Path, name: str, tensor: str, value: torch.Tensor | None, message: str
) -> None:
    path = copied(made(name)[0], tmp_path)
    change(path, {f"{LAYER}.{tensor}": value})
    with pytest.raises(UnsupportedModel, match=message):
        load(path)


def test_fp8_weights_without_a_config_are_refused(made: Made, tmp_path: Path) -> None:
    """Their scales are unknown; they would be read as numbers that are some hundred times too large."""
    path = copied(made("fp8-tensor")[0], tmp_path)
    stored = load_file(path / "model.safetensors")
    change(path, {name: None for name in stored if name.endswith("weight_scale")})
    with pytest.raises(UnsupportedModel, match="quant_method='fp8', but no layer has a tensor weight_scale"):
        HFCheckpoint.open(path)
    edit(path, quantization_config=None)
    with pytest.raises(UnsupportedModel, match=r"weight is float8_e4m3fn, expected bfloat16 .* quantization_config"):
        load(path)


def changed(name: str, **changes: Any) -> dict[str, Any]:
    return {**FORMATS[name].config, **changes}


def weights(name: str, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(FORMATS[name].config)
    config["config_groups"]["group_0"]["weights"] |= changes
    return config


def inputs(name: str, **changes: Any) -> dict[str, Any]:
    config = copy.deepcopy(FORMATS[name].config)
    config["config_groups"]["group_0"]["input_activations"] |= changes
    return config


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, f"quant_method='bitsandbytes': ssd runs {', '.join(METHODS)}"),
        ({}, "quant_method=None"),
        (changed("gptq", bits=3), "bits=3: ssd runs 4, 8"),
        (changed("gptq", bits="4"), "bits='4' .* expected an integer"),
        (changed("gptq", group_size=100), "group_size=100: ssd runs 16, 32, 64, 128 and -1"),
        (changed("gptq", group_size=None), "group_size=None"),
        (changed("gptq", checkpoint_format="marlin"), "checkpoint_format='marlin': ssd runs gptq, gptq_v2"),
        (changed("gptq", dynamic={"+:(a)\\1": {}}), r"dynamic=.*has '\\\\1', which is not known.*patterns of"),
        (changed("gptq", dynamic={f"{i:02}{'.' * 498}": {} for i in range(20)}), "dynamic='19.*have 10000 characters"),
        (changed("gptq", dynamic={".*": {"bits": 2}}), "bits=2"),
        (changed("awq", version="gemv"), "version='gemv': ssd runs gemm"),
        (changed("awq", bits=8), "bits=8: ssd runs 4"),
        (changed("fp8-block", weight_block_size=[128]), r"weight_block_size=\[128\]"),
        (changed("fp8-block", weight_block_size=[128, 100]), r"weight_block_size=\[128, 100\]"),
        (changed("fp8-block", activation_scheme="static"), "activation_scheme='static': ssd runs dynamic with"),
        (changed("fp8-block", fmt="e5m2"), "fmt='e5m2': ssd runs e4m3"),
        (changed("fp8-block", scale_fmt="e4m3"), "scale_fmt='e4m3': ssd runs ue8m0, or none"),
        (changed("fp8-tensor", scale_fmt="ue8m0"), "scale_fmt='ue8m0': ssd runs it with weight_block_size only"),
        (changed("ct-int4", format="marlin-24"), "format='marlin-24': ssd runs pack-quantized, int-quantized"),
        (changed("ct-int4", quantization_status="frozen"), "quantization_status='frozen': ssd runs compressed"),
        (changed("ct-int4", ignore=["re:("]), "ignore='\\(' is no regular expression"),
        (
            changed("ct-int4", ignore=["re:x(?=y)"]),
            r"ignore='x\(\?=y\)' has '\(\?=' where it is not known.*look-aheads",
        ),
        (changed("ct-int4", ignore=["re:" + "." * 501]), "ignore=.* has more than 500 characters"),
        (changed("ct-int4", ignore=[7]), "ignore=7"),
        (changed("ct-int4", config_groups={}), "config_groups={}"),
        (weights("ct-int4", num_bits=3), "group_0.weights.num_bits='int 3': ssd runs int 4, int 8"),
        (weights("ct-int4", strategy="tensor_group"), "weights.strategy='tensor_group': ssd runs tensor, channel"),
        (weights("ct-int4", group_size=100), "group_size=100"),
        (weights("ct-int4", symmetric="no"), "symmetric='no'.*expected true or false"),
        (weights("ct-mxfp4", group_size=16), "weights.group_size=16: ssd runs 32 with MXFP4"),
        (inputs("ct-w8a8", symmetric=False), "input_activations.symmetric=False: ssd runs true"),
        (inputs("ct-w8a8", num_bits=4), "input_activations.num_bits='int 4'"),
        (inputs("ct-fp8-block", group_size=32), "input_activations.group_size=32: .*of the weights .64."),
    ],
)
def test_configs_that_are_not_supported_are_named(config: dict[str, Any], message: str) -> None:
    tensors = [f"{LAYER}.{own}" for own in ("qweight", "weight_scale_inv", "weight")]
    with pytest.raises(UnsupportedModel, match=message):
        formats_of(config, tensors)(LAYER)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("ct-int4-act-order", "weight_g_idx"),
        ("gptq-act-order", "g_idx"),
        ("ct-int4-zero-point", "weight_zero_point"),
        ("ct-w8a8-zero-point", "weight_zero_point"),
    ],
)
def test_a_tensor_that_the_config_promises_is_needed(made: Made, name: str, tensor: str, tmp_path: Path) -> None:
    """Catches a layer that is read as if it had no order or no zero points: a file that lacks them gives nonsense."""
    path = copied(made(name)[0], tmp_path)
    change(path, {f"{LAYER}.{tensor}": None})
    with pytest.raises(UnsupportedModel, match=f"{LAYER}.{tensor}"):
        load(path)


@pytest.mark.parametrize("pattern", [".?" * 32 + "!", "(x+x+)+y", "(.*)*!", "(.|.)" * 99 + "!", "(.?|)" * 99 + "!"])
def test_no_pattern_makes_a_load_hang(pattern: str) -> None:
    """Catches backtracking, which takes years for these: in names of ignored layers, and in GPTQ's rules."""
    ignored = formats_of(changed("ct-int4", ignore=[f"re:{pattern}"]), [])
    assert ignored(LAYER).name == "int4"
    ruled = formats_of(changed("gptq", dynamic={f"+:{pattern}": {"bits": 8}}), [f"{LAYER}.qweight"])
    assert ruled(LAYER).name == "int4"


@pytest.mark.parametrize("name", ["ct-fp8-block", "ct-int4-zero-point", "fp8-block", "gptq", "awq"])
def test_hostile_configs_end_with_a_model_or_an_error_of_ours(name: str) -> None:
    """Every value of a config in turn, replaced by every hostile one."""
    config, dice = {**FORMATS[name].config, "dynamic": {".*up": {"bits": 8}}}, random.Random(name)
    tensors = [f"{LAYER}.{own}" for own in ("qweight", "weight_scale_inv", "weight")]
    start = time.thread_time()
    for way in list(places(config)):
        for value in dice.sample(HOSTILE, 12):
            broken = copy.deepcopy(config)
            inner = broken
            for key in way[:-1]:
                inner = inner[key]
            inner[way[-1]] = value
            try:
                form = formats_of(broken, tensors)(LAYER)
                form.num_bytes(*(128, 256), torch.bfloat16, None)  # type: ignore[arg-type]
                form.shapes(128, 256)
            except SSDError:
                continue
    assert time.thread_time() - start < 5


@pytest.mark.parametrize("name", ["ct-fp8-channel", "gptq-act-order"])
def test_damaged_weights_end_with_a_model_or_an_error_of_ours(made: Made, name: str, tmp_path: Path) -> None:
    """Types, shapes and offsets of a header that do not fit the format, and files that are cut off."""
    path, dice = copied(made(name)[0], tmp_path), random.Random(1)
    whole = (path / "model.safetensors").read_bytes()
    assert check_ends_well(path, "whole")
    for i in range(30):
        (path / "model.safetensors").write_bytes(damaged(whole, dice))
        check_ends_well(path, f"{name} {i}")
