"""Grafts: the small model's logits and text in larger shapes, in memory and on disk; what cannot be grafted is refused.

Bases are random models with random norms, made on the spot; transformers is the oracle for what is written.
"""

from __future__ import annotations

import functools
import json
import math
import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bits import same_bits
from conftest import LLAMA3_ROPE, VOCAB, byte_tokenizer, mostly_slow, ragged_prompts, randomise_vectors
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from typer.testing import CliRunner

from ssd import LLM, ConfigError, ModelNotFound, SamplingParams, SSDError
from ssd.assembly import open as open_module
from ssd.assembly.open import open_checkpoint, open_feature_draft, open_graft
from ssd.bench.transformers_peer import files_of
from ssd.cli.main import app
from ssd.grafts import export
from ssd.grafts.graft import GraftCheckpoint, blocks_of, copy_scales, held_mlp
from ssd.grafts.shapes import SHAPES, shape_of
from ssd.kernels.codes import decoded, quantize
from ssd.kernels.cpu.library import load as cpu_kernels
from ssd.layers.rotary import rope_tables
from ssd.layers.spec import ExpertsSpec, MLPSpec, RopeConfig
from ssd.models.checkpoint import all_weights
from ssd.models.config import DecoderConfig, equal_layers

CPU = torch.device("cpu")
BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "tie_word_embeddings": True,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"rope_parameters": LLAMA3_ROPE}),
    "qwen3": ("Qwen3", {}),
}


def sizes(hidden: int, mlp: int, layers: int, heads: int, kv: int, dim: int, vocab: int, tied: bool) -> DecoderConfig:
    """A shape whose other values (rope, epsilon, positions) must be replaced by the base's."""
    return equal_layers("llama", vocab, hidden, mlp, layers, heads, kv, dim, 99, 0.1, RopeConfig(7.0), tied)


TARGETS = {
    "larger-groups": sizes(256, 200, 5, 16, 4, 16, 512, True),
    "split-groups-4x-heads": sizes(320, 112, 4, 5, 5, 64, 400, False),
    "2x-heads": sizes(512, 128, 3, 8, 4, 32, VOCAB, True),
    "everything": sizes(768, 300, 7, 12, 4, 64, 1000, True),
    "same-but-untied": sizes(64, 112, 3, 4, 2, 16, VOCAB, False),
}
CASES = [(family, target) for family in FAMILIES for target in TARGETS]


@pytest.fixture(scope="session")
def make_base(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    made: dict[str, Path] = {}

    def make(family: str, **changes: Any) -> Path:
        key = f"{family}{changes}"
        if key not in made:
            name, own = FAMILIES[family]
            torch.manual_seed(0)
            config = getattr(transformers, f"{name}Config")(**{**BASE, **own, **changes})
            model = getattr(transformers, f"{name}ForCausalLM")(config)
            randomise_vectors(model)
            model.generation_config.eos_token_id = [3, 4]
            made[key] = tmp_path_factory.mktemp("bases") / f"tiny-{family}"
            model.save_pretrained(made[key])
            byte_tokenizer().save(str(made[key] / "tokenizer.json"))
        return made[key]

    return make


@pytest.fixture(autouse=True)
def _shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets under names of their own, `llama-2x-heads` and so on, and one of Qwen 2 for Llama bases."""
    for family in FAMILIES:
        for name, shape in TARGETS.items():
            known = replace(shape.with_layers(qk_norm=family == "qwen3"), family=family)
            monkeypatch.setitem(SHAPES, f"{family}-{name}", known)
    biased = replace(TARGETS["everything"].with_layers(qkv_bias=True), family="qwen2")
    monkeypatch.setitem(SHAPES, "llama-qwen2", biased)


def both(base: Path, shape: str, dtype: str) -> tuple[LLM, LLM]:
    return (LLM(str(base), device="cpu", dtype=dtype), LLM(f"graft:{base}@{shape}", device="cpu", dtype=dtype))


def logits(llm: LLM, tokens: list[int]) -> torch.Tensor:
    return llm.engine.round.target.runner.logits_of(tokens, len(tokens)).clone()


def difference(ours: torch.Tensor, base: torch.Tensor) -> float:
    assert not ours.isnan().any()
    return float((ours[:, :VOCAB] - base).norm() / base.norm())


PROMPT = ragged_prompts(1, 200, seed=5)[0] + list(range(100))


# --- the same function ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answers:
    """Of one model, in one type."""

    logits: torch.Tensor
    token_ids: list[list[int]]
    texts: list[str]


def answers(model: str, dtype: str, quantization: str | None = None) -> Answers:
    """Greedy, sampled and truncated."""
    with LLM(model, device="cpu", dtype=dtype, quantization=quantization) as llm:
        prompts = ragged_prompts(12, 24)
        greedy = SamplingParams(max_new_tokens=24, ignore_eos=True)
        sampled = [replace(greedy, temperature=1.0, seed=i) for i in range(8)]
        truncated = [replace(greedy, temperature=1.5, top_p=0.9, min_p=0.01, seed=i) for i in range(4)]
        outputs = llm.generate(prompts * 2, [greedy] * 12 + sampled + truncated)
        texts = [output.text for output in outputs]
        return Answers(logits(llm, PROMPT), [output.token_ids for output in outputs], texts)


@pytest.fixture(scope="session")
def base_answers(make_base: Callable[..., Path]) -> Callable[[str, str], Answers]:
    return functools.cache(lambda family, dtype: answers(str(make_base(family)), dtype))


@pytest.mark.parametrize(
    ("family", "target"),
    mostly_slow(CASES, fast={("llama", "larger-groups"), ("qwen3", "everything")}),
)
def test_logits_and_texts_are_the_bases(
    family: str, target: str, make_base: Callable[..., Path], base_answers: Callable[[str, str], Answers]
) -> None:
    """Catches any slip in the geometry: copies, rotary positions, head seats, scales, tying, additional tokens."""
    ours = answers(f"graft:{make_base(family)}@{family}-{target}", "float32")
    base = base_answers(family, "float32")
    assert base.logits.std() > 1
    assert difference(ours.logits, base.logits) < 1e-5
    assert (ours.logits[:, VOCAB:] < -1e3).all()
    assert ours.token_ids == base.token_ids
    assert ours.texts == base.texts


@pytest.mark.parametrize(
    ("family", "target"),
    mostly_slow(CASES, fast={("llama", "split-groups-4x-heads"), ("qwen3", "2x-heads")}),
)
def test_bfloat16_logits_are_the_bases(family: str, target: str, make_base: Callable[..., Path]) -> None:
    """Catches a factor that is no power of two: it would round all weights anew (a difference of 0.02 or more here).

    The square root of two, for heads of twice the size, is the one that must be. AMX adds up inputs in pairs, which are
    others in a graft: then sums are rounded otherwise (a difference of 0.016).
    """
    base, graft = both(make_base(family), f"{family}-{target}", "bfloat16")
    with base, graft:
        limit = 0.1 if target == "2x-heads" else 0.02 if cpu_kernels().variant == "amx" else 0.01
        assert difference(logits(graft, PROMPT), logits(base, PROMPT)) < limit


@given(st.integers(1, 500))
def test_copies_keep_the_sum_of_squares(ratio: int) -> None:
    for divisor in (1, 2, 16):
        scales = copy_scales(ratio, divisor)
        assert sum(scale**2 for scale in scales) * divisor == ratio
        assert all(math.frexp(scale)[0] == 0.5 for scale in scales)
        assert scales == sorted(scales, reverse=True)
        assert divisor > 1 or ratio < 4 or len(scales) < ratio  # a dimension is left for the constant
    assert copy_scales(8, 3) == []


@pytest.mark.parametrize(
    "rope",
    [
        RopeConfig(500000.0),
        RopeConfig(10000.0, "linear", 4.0),
        RopeConfig(500000.0, "llama3", 8.0, original_max_position=64),
    ],
    ids=lambda rope: rope.scaling,
)
@pytest.mark.parametrize("ratio", [1, 2, 4])
def test_the_first_dimensions_of_larger_heads_turn_alike(rope: RopeConfig, ratio: int) -> None:
    """The reason why the frequencies' base is raised to the ratio of the head sizes."""
    raised = replace(rope, theta=rope.theta**ratio)
    for small, big in zip(rope_tables(rope, 32, 600), rope_tables(raised, 32 * ratio, 600), strict=True):
        assert torch.allclose(small, big[:, :16], atol=600 * 2**-23)  # one bit of the frequency


# --- rounded ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", mostly_slow(["fp8", "int8"], fast={"fp8"}))
def test_a_rounded_graft_writes_the_text_of_its_rounded_base(
    form: str, make_base: Callable[..., Path], base_answers: Callable[[str, str], Answers]
) -> None:
    """Codes of one scale per output channel. Catches a head or an embedding that is rounded on one side only, and
    weights that are not rounded. In float32: sums of bfloat16 by AMX depend on the order of the inputs."""
    dtype = "float32"
    graft = f"graft:{make_base('llama')}@llama-split-groups-4x-heads:{form}"
    ours, base = answers(graft, dtype), answers(str(make_base("llama")), dtype, form)
    assert ours.token_ids == base.token_ids
    assert difference(ours.logits, base.logits) < 0.01
    assert difference(base.logits, base_answers("llama", dtype).logits) > 0.01


@pytest.mark.parametrize("form", ["fp8", "int8"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bases_weights_have_the_same_codes_in_a_graft(
    family: str, form: Any, make_base: Callable[..., Path]
) -> None:
    """Catches random numbers beside the base's weights that are larger, and so would set the scale: in this base none
    is above 0.05."""
    base = open_checkpoint(make_base(family, initializer_range=0.01))
    graft = GraftCheckpoint.of(base, f"{family}-split-groups-4x-heads")
    small, big = (all_weights(each, CPU, torch.bfloat16) for each in (base, graft))
    blocks = blocks_of(base.config, graft.config, held_mlp(base.config, graft.config))
    for part in (name for name in blocks if name.endswith("_proj")):
        name, (rows, columns) = f"model.layers.0.{part}.weight", blocks[part]
        real = rows.scale != 0
        expected, found = quantize(small[name], form), quantize(big[name], form)
        codes = found.values[rows.target[real][:, None], columns.target]
        assert torch.equal(codes, expected.values[rows.source[real]][:, columns.source]), part


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_a_rounded_graft_says_so(form: str, make_base: Callable[..., Path]) -> None:
    graft = open_graft(str(make_base("llama")), f"llama-everything:{form}")
    assert graft.quantization == form
    assert f"in the shape of llama-everything, rounded to {form}: that shape's speed" in graft.note
    assert ("a text close to tiny-llama's" if form == "int4" else f"the text of tiny-llama in {form}") in graft.note


def test_a_graft_is_rounded_once(make_base: Callable[..., Path]) -> None:
    path = make_base("llama")
    with pytest.raises(ConfigError, match="ends with no format: use :fp8, :fp8_dynamic, :int8, :int4, :awq, :gptq"):
        open_checkpoint(f"graft:{path}@llama-everything:fp7")
    with pytest.raises(ConfigError, match=r"quantization='int8': the checkpoint is quantised already .*leave it out"):
        LLM(f"graft:{path}@llama-everything:fp8", device="cpu", quantization="int8")
    with pytest.raises(ConfigError, match="not rounded by :fp8: use draft_quantization='fp8'"):
        open_feature_draft("graft:tiny-llama-eagle@llama-3.1-8b:fp8")
    with pytest.raises(ConfigError, match=r"ssd graft m --shape llama-3\.1-8b --quantization fp8`"):
        files_of("graft:m@llama-3.1-8b:fp8")


# --- what fills the rest ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_the_rest_is_random_and_a_function_of_the_name(family: str, make_base: Callable[..., Path]) -> None:
    """Catches matrices of zeros in additional layers, and weights that depend on the order in which they are made."""
    base = open_checkpoint(make_base(family))
    graft = GraftCheckpoint.of(base, f"{family}-everything")
    deeper = SHAPES[f"{family}-everything"].with_layers(9)
    weights = dict(graft.weights(CPU, torch.bfloat16))
    others = dict(GraftCheckpoint(base, "tiny", deeper, "deeper").weights(CPU, torch.bfloat16))
    additional = [name for name in weights if name.startswith("model.layers.1.")]
    matrices = [weights[name] for name in additional if weights[name].dim() == 2]
    assert len(matrices) == 7
    assert all(0.019 < matrix.float().std() < 0.021 for matrix in matrices)
    assert all(weights[name].count_nonzero() == 0 for name in additional if weights[name].dim() == 1)
    assert len({float(matrix.flatten()[0]) for matrix in matrices}) == 7
    assert all(same_bits(weights[name], others[name]) for name in additional)
    assert all(tensor.dtype == torch.bfloat16 for tensor in weights.values())
    head = weights["model.layers.0.self_attn.q_proj.weight"][-64:]  # beside the base's four heads
    assert 0.019 < head.float().std() < 0.021


# --- what cannot be grafted -------------------------------------------------------------------------------------------


def changed(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    """Changes of fields of the config, its attention or its MLP, or of the number of layers."""
    attention = {name: changes.pop(name) for name in ("head_dim", "num_heads", "num_kv_heads") if name in changes}
    layers = config.with_layers(changes.pop("num_layers", None), **attention).layers
    size = changes.pop("intermediate_size", config.mlp.intermediate_size)
    return replace(config, layers=tuple(replace(layer, mlp=MLPSpec(size)) for layer in layers), **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"family": "qwen3"}, "family is qwen3, the base's is llama"),
        ({"hidden_size": 160}, "hidden_size=160 is no multiple of the base's 64"),
        ({"head_dim": 24}, "head_dim=24 is no multiple of the base's 16"),
        ({"head_dim": 128}, "head_dim=128 is too large for the base's 16"),
        ({"intermediate_size": 100}, "intermediate_size=100 is below the base's 112"),
        ({"num_layers": 2}, "num_layers=2 is below the base's 3"),
        ({"vocab_size": 300}, "vocab_size=300 is below the base's 320"),
        ({"num_kv_heads": 1, "num_heads": 1}, "num_kv_heads=1 is below the 4"),
        ({"num_kv_heads": 3, "num_heads": 3}, "num_kv_heads=3 is below the 4"),
        ({"hidden_size": 192}, "vocab_size=512 is above.*hidden_size=192 must be at least four times the base's 64"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, make_base: Callable[..., Path]
) -> None:
    base = open_checkpoint(make_base("llama"))
    with pytest.raises(ConfigError, match=f"{message}.*use a shape that fits: .*llama-everything"):
        GraftCheckpoint(base, "tiny", changed(TARGETS["larger-groups"], **changes), "other")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "qkv_bias is true"),
        ({"mlp_bias": True}, "mlp_bias is true"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "rope scaling is yarn"),
    ],
)
def test_bases_that_do_not_fit_are_refused(
    changes: dict[str, Any], message: str, make_base: Callable[..., Path]
) -> None:
    with pytest.raises(ConfigError, match=f"{message}.*use another base"):
        open_graft(str(make_base("llama", **changes)), "llama-everything")


def test_an_untied_base_needs_an_untied_shape(make_base: Callable[..., Path]) -> None:
    path = make_base("llama", tie_word_embeddings=False)
    with pytest.raises(ConfigError, match=r"tie_embeddings is true.*use a shape that fits: .*llama-same-but-untied"):
        open_graft(str(path), "llama-everything")
    base, graft = both(path, "llama-split-groups-4x-heads", "float32")
    with base, graft:
        assert difference(logits(graft, PROMPT), logits(base, PROMPT)) < 1e-5


def test_a_shape_of_fewer_layers(make_base: Callable[..., Path]) -> None:
    """The first ones of a published model, also where layers differ; before a format."""
    path = str(make_base("llama"))
    graft = open_graft(path, "llama-everything:layers=4:int8")
    assert graft.shape == replace(SHAPES["llama-everything"], layers=SHAPES["llama-everything"].layers[:4])
    assert (graft.shape_name, graft.quantization) == ("llama-everything:layers=4", "int8")
    first = shape_of("deepseek-v3:layers=4").layers
    assert [isinstance(layer.mlp, ExpertsSpec) for layer in first] == [False, False, False, True]
    for count in ("0", "62", "four", ""):
        with pytest.raises(ConfigError, match="expected a number of layers from 1 to 61"):
            shape_of(f"deepseek-v3:layers={count}")
    with pytest.raises(ConfigError, match="latent attention, whose one rotated key"):
        open_graft(path, "deepseek-v3")


def test_what_is_no_graft_is_explained(make_base: Callable[..., Path]) -> None:
    path = make_base("llama")
    with pytest.raises(ConfigError, match=r"shape='llama-9b' is not known: .*use one of .*llama-3\.1-8b"):
        open_checkpoint(f"graft:{path}@llama-9b")
    with pytest.raises(ConfigError, match="write graft:BASE@SHAPE"):
        open_checkpoint("graft:tiny-llama")
    with pytest.raises(ModelNotFound, match="no_such"):
        open_checkpoint("graft:no_such@llama-3.1-8b")
    with pytest.raises(ConfigError, match=r"float16.*bfloat16"):
        next(open_graft(str(path), "llama-everything").weights(CPU, torch.float16))


def test_a_base_that_lacks_tensors_is_refused(make_base: Callable[..., Path], tmp_path: Path) -> None:
    shutil.copytree(make_base("llama"), tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "num_hidden_layers": 4}))
    with pytest.raises(SSDError, match=r"lacks or misshapes 9 tensors, among them \['model\.layers\.3"):
        next(open_graft(str(tmp_path / "m"), "llama-everything").weights(CPU, torch.float32))


# --- on disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def graft(make_base: Callable[..., Path]) -> GraftCheckpoint:
    return open_graft(str(make_base("llama")), "llama-everything")


@pytest.mark.parametrize(
    ("family", "target", "shard_bytes"),
    [
        pytest.param("llama", "everything", 3_000_000, marks=pytest.mark.slow),
        pytest.param("qwen3", "split-groups-4x-heads", export.SHARD_BYTES, marks=pytest.mark.slow),
        ("llama", "qwen2", export.SHARD_BYTES),
    ],
)
def test_written_grafts_are_the_same_to_everybody(
    family: str,
    target: str,
    shard_bytes: int,
    make_base: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Catches a config.json that transformers or we read differently, lost tensors, lost stop tokens."""
    monkeypatch.setattr(export, "SHARD_BYTES", shard_bytes)
    base = make_base(family)
    graft = open_graft(str(base), f"{family}-{target}")
    out = tmp_path / "new" / "graft"
    export.write_graft(graft, out, torch.float32, CPU)
    assert [path.name for path in out.parent.iterdir()] == ["graft"]
    assert (len(list(out.glob("*.safetensors"))) > 1) == (out / "model.safetensors.index.json").exists()
    assert (out / "model.safetensors.index.json").exists() == (shard_bytes == 3_000_000)

    written = open_checkpoint(out)
    assert written.config == replace(graft.config, dtype="float32")
    assert written.stop_token_ids == graft.stop_token_ids == (3, 4)
    assert (
        written.note
        == graft.note
        == f"graft of tiny-{family} in the shape of {family}-{target}: " + (f"that shape's speed, tiny-{family}'s text")
    )
    theirs = transformers.AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    original = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    with torch.no_grad():
        expected = original(torch.tensor([PROMPT])).logits[0]
        assert difference(theirs(torch.tensor([PROMPT])).logits[0], expected) < 1e-5
    params = SamplingParams(max_new_tokens=16, temperature=1.0, seed=3)
    with LLM(str(out), device="cpu") as disk, LLM(f"graft:{base}@{family}-{target}", device="cpu") as memory:
        assert difference(logits(disk, PROMPT), expected) < 1e-5
        assert disk.note == memory.note == graft.note
        assert same_bits(logits(disk, PROMPT), logits(memory, PROMPT))
        assert disk.generate("hello", params)[0].text == memory.generate("hello", params)[0].text


def unpacked(words: torch.Tensor, bits: int) -> torch.Tensor:
    """The integers of 32-bit words, the first in the lowest bits, less half of their range."""
    fields = [(words.long() >> shift) & ((1 << bits) - 1) for shift in range(0, 32, bits)]
    return torch.stack(fields, 2).flatten(1) - (1 << bits - 1)


@pytest.mark.parametrize("form", ["fp8", "int8", "int4"])
def test_written_codes_are_those_in_memory(
    form: Any, make_base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit, in the layout of compressed-tensors: read back by code of its own. Catches a wrong order of bits, a
    scale that is rounded, a group size or a layer that the config does not tell."""
    monkeypatch.setitem(SHAPES, "two-groups", sizes(192, 128, 3, 4, 2, 16, VOCAB, True))
    graft = open_graft(str(make_base("llama")), f"two-groups:{form}")
    sizes_told: list[int] = []
    export.write_graft(graft, tmp_path / "g", torch.bfloat16, CPU, sizes_told.append)
    stored, config = (
        load_file(tmp_path / "g" / "model.safetensors"),
        json.loads((tmp_path / "g/config.json").read_text()),
    )
    told = config["quantization_config"]
    assert (told["quant_method"], told["ignore"]) == ("compressed-tensors", ["lm_head"])
    assert told["format"] == ("float-quantized" if form == "fp8" else "pack-quantized")
    assert config["ssd_graft"]["quantization"] == form
    for name, tensor in graft.weights(CPU, torch.bfloat16):
        if not name.endswith("_proj.weight"):
            assert same_bits(stored.pop(name), tensor)
            continue
        part, codes = name.removesuffix(".weight"), quantize(tensor, form)
        assert same_bits(stored.pop(f"{part}.weight_scale"), codes.scales)
        [group] = [g for g in told["config_groups"].values() if any(matches(target, part) for target in g["targets"])]
        weights = group["weights"]
        assert group["input_activations"] is None
        assert weights["num_bits"] == (4 if form == "int4" else 8)
        assert weights["strategy"] == ("group" if form == "int4" else "channel")
        assert weights["group_size"] == (codes.group if form == "int4" else None)
        if form == "fp8":
            assert same_bits(stored.pop(f"{part}.weight").float(), decoded(codes.values, "fp8"))
            continue
        assert stored.pop(f"{part}.weight_shape").tolist() == list(tensor.shape)
        integers = unpacked(stored.pop(f"{part}.weight_packed"), weights["num_bits"])
        assert torch.equal(integers.float(), decoded(codes.values, form))
    assert not stored
    assert len(told["config_groups"]) == (2 if form == "int4" else 1)
    assert sum(sizes_told) == pytest.approx(export.stored_bytes(graft, torch.bfloat16), rel=0.01)


def matches(target: str, part: str) -> bool:
    return target == "Linear" or re.match(target.removeprefix("re:"), part) is not None


def test_nothing_is_left_of_an_interrupted_writing(graft: GraftCheckpoint, tmp_path: Path) -> None:
    """Catches a half-written directory that looks like a checkpoint."""

    def interrupt(size: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        export.write_graft(graft, tmp_path / "g", torch.bfloat16, CPU, interrupt)
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_refused(
    graft: GraftCheckpoint, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").touch()
    for taken in (tmp_path / "full", tmp_path / "full" / "thesis.txt"):
        with pytest.raises(ConfigError, match="not an empty directory: name another"):
            export.write_graft(graft, taken, torch.bfloat16, CPU)
    with pytest.raises(SSDError, match="cannot be written"):
        export.write_graft(graft, tmp_path / "full" / "thesis.txt" / "g", torch.bfloat16, CPU)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10, 9, 1))  # type: ignore[attr-defined]
    with pytest.raises(ConfigError, match=r"GB are to be written, 0\.0 GB are free"):
        export.write_graft(graft, tmp_path / "new", torch.bfloat16, CPU)


# --- the command ------------------------------------------------------------------------------------------------------


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def test_the_command_writes_what_generate_reads(
    make_base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = str(make_base("qwen3"))
    monkeypatch.chdir(tmp_path)
    done = run("graft", base, "--shape", "qwen3-everything", "--device", "cpu")
    assert (done.exit_code, done.stdout) == (0, "tiny-qwen3@qwen3-everything\n"), done.output
    assert open_checkpoint("tiny-qwen3@qwen3-everything").config.dtype == "bfloat16"
    options = ("hello", "-m", "6", "--ignore-eos", "--device", "cpu", "--dtype", "bfloat16")
    plain = run("generate", base, *options, "--metrics")
    grafted = run("generate", "./tiny-qwen3@qwen3-everything", *options, "--metrics")
    assert grafted.stdout == plain.stdout != ""
    note = "graft of tiny-qwen3 in the shape of qwen3-everything"
    assert note in " ".join(grafted.stderr.split())
    assert "graft" not in plain.stderr
    in_memory = json.loads(run("generate", f"graft:{base}@qwen3-everything", *options, "--json").stdout)
    assert note in in_memory["note"]
    assert "note" not in json.loads(run("generate", base, *options, "--json").stdout)


def test_mistakes_exit_with_one_and_misuse_with_two(make_base: Callable[..., Path], tmp_path: Path) -> None:
    base = str(make_base("qwen3"))
    wrong = run("graft", base, "--shape", "llama-3.1-8b", "--out", str(tmp_path / "g"))
    assert wrong.exit_code == 1
    assert "family is llama" in " ".join(wrong.stderr.split())
    assert list(tmp_path.iterdir()) == []
    assert run("graft", base).exit_code == 2
    assert run("graft", base, "--shape", "qwen3-8b", "--dtype", "int4").exit_code == 2
    assert run("graft", base, "--shape", "qwen3-8b", "--quantization", "int3").exit_code == 2


def test_help_lists_the_shapes() -> None:
    text = " ".join(run("graft", "--help").stdout.split())
    assert all(name in text for name in ("llama-3.1-8b", "qwen3-32b", "tiny-llama@llama-3.1-8b", "--quantization"))


def test_the_command_writes_rounded_grafts(
    make_base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    options = ("--shape", "qwen3-2x-heads", "--quantization", "int4", "--device", "cpu")
    done = run("graft", str(make_base("qwen3")), *options)
    assert (done.exit_code, done.stdout) == (0, "tiny-qwen3@qwen3-2x-heads-int4\n"), done.output
    assert "rounded to int4" in " ".join(done.stderr.split())
    assert json.loads((tmp_path / done.stdout.strip() / "config.json").read_text())["quantization_config"]


# --- bundled models ---------------------------------------------------------------------------------------------------


@pytest.fixture
def bundle(make_base: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    shutil.copytree(make_base("llama"), tmp_path / "bundle" / "tiny-llama")
    monkeypatch.setattr(open_module, "BUNDLE", tmp_path / "bundle")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "bundle"


def test_bundled_names_win_over_directories(bundle: Path, tmp_path: Path) -> None:
    (tmp_path / "tiny-llama").mkdir()
    assert open_checkpoint("tiny-llama").path == bundle / "tiny-llama"
    assert open_checkpoint("graft:tiny-llama@llama-everything").path == bundle / "tiny-llama"
    with pytest.raises(ModelNotFound, match=r"no config\.json"):
        open_checkpoint("./tiny-llama")
    with pytest.raises(ModelNotFound, match=r"tiny-lama.*bundled model \(tiny-llama\)"):
        open_checkpoint("tiny-lama")


@pytest.mark.parametrize(
    ("model", "meant"),
    [
        ("tiny-lama", "tiny-llama"),
        ("tiny_qwen3", "tiny-qwen3"),
        ("tiny-llama-drft", "tiny-llama-draft"),
        ("graft:tiny-lama@llama-3.1-8b", "tiny-llama"),
        ("graft:tiny-llama@llama3.1-8b", "llama-3.1-8b"),
    ],
)
def test_a_misspelt_name_gets_a_suggestion(model: str, meant: str) -> None:
    with pytest.raises(SSDError, match=f"did you mean {re.escape(meant)}\\?"):
        open_checkpoint(model)


@pytest.mark.parametrize("model", ["zzz", "graft:tiny-llama@zzz"])
def test_a_name_like_no_other_gets_none(model: str) -> None:
    with pytest.raises(SSDError) as error:
        open_checkpoint(model)
    assert "did you mean" not in str(error.value)


def test_writers_of_one_process_do_not_disturb_each_other(graft: GraftCheckpoint, tmp_path: Path) -> None:
    """Catches a directory that two threads write to: the second removes what the first has written."""

    def write_too(size: int) -> None:
        if size and not (tmp_path / "g").exists():
            export.write_graft(graft, tmp_path / "g", torch.bfloat16, CPU)

    with pytest.raises(SSDError, match="cannot be written"):  # the other one was quicker
        export.write_graft(graft, tmp_path / "g", torch.bfloat16, CPU, write_too)
    assert [each.name for each in tmp_path.iterdir()] == ["g"]
    assert open_checkpoint(str(tmp_path / "g")).config.num_layers == graft.config.num_layers
