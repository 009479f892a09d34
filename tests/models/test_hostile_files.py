"""Files that are damaged or made to do harm: opening and loading one ends soon, with a model or with an SSDError."""

from __future__ import annotations

import base64
import copy
import json
import os
import random
import shutil
import struct
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import byte_tokenizer
from gguf_files import metadata, write
from reference_ops import ReferenceOps
from safetensors.torch import save_file
from test_gguf import tensors

from ssd.assembly.open import open_checkpoint
from ssd.errors import SSDError, UnsupportedModel
from ssd.layers.parameter import Build
from ssd.models import gguf_tokenizer
from ssd.models.config import equal_layers
from ssd.models.decoder import Decoder, parameter_shapes
from ssd.models.families import decoder_config
from ssd.text.tokenizer import load_tokenizer

CPU = torch.device("cpu")
PATIENCE = 5.0  # seconds for one file
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 320,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    "tie_word_embeddings": True,
    "attention_bias": False,
    "eos_token_id": [3, 5],
    "dtype": "float32",
}
YARN = {"rope_type": "yarn", "factor": 4.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}
TOKENIZER: dict[str, Any] = {
    "bos_token": {"content": "<spare300>", "lstrip": False},
    "eos_token": "<spare301>",
    "additional_special_tokens": ["<spare302>"],
    "added_tokens_decoder": {"320": {"content": "<new>", "special": True}},
    "chat_template": [{"name": "default", "template": "{{ messages[0].content }}"}],
}
KIMI: dict[str, Any] = {
    "architectures": ["KimiK25ForConditionalGeneration"],
    "model_type": "kimi_k25",
    "vision_config": {"hidden_size": 3},
    "text_config": {
        **{key: CONFIG[key] for key in ("num_hidden_layers", "max_position_embeddings", "rms_norm_eps", "rope_theta")},
        **{"model_type": "kimi_k2", "vocab_size": 515, "hidden_size": 32, "intermediate_size": 32, "dtype": "float32"},
        **{"num_attention_heads": 2, "num_key_value_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16, "v_head_dim": 8},
        **{"qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "first_k_dense_replace": 1, "n_routed_experts": 4},
        **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 16, "n_shared_experts": 1},
        **{"routed_scaling_factor": 2.5, "rope_scaling": {**YARN, "original_max_position_embeddings": 16}},
        "quantization_config": {
            **{"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "ue8m0"},
            "weight_block_size": [16, 16],
        },
    },
}
TIKTOKEN: dict[str, Any] = {
    "tokenizer_class": "TikTokenTokenizer",
    "added_tokens_decoder": {"259": {"content": "[BOS]", "special": True}, "514": {"content": "[PAD]"}},
    "bos_token": "[BOS]",
    "additional_special_tokens": ["[PAD]"],
    "chat_template": "{{ messages[0].content }}",
}
HOSTILE: list[Any] = [
    None,
    True,
    False,
    "",
    "x",
    "1e-5",
    [],
    {},
    [[1]],
    [None],
    {"a": {"b": 1}},
    0,
    -1,
    1,
    1.5,
    1e-300,
    float("nan"),
    float("inf"),
    float("-inf"),
    10**6,
    10**9,
    2**63,
    10**400,
    "../" * 3,
    "/dev/zero",
]


def make_directory(path: Path) -> Path:
    path.mkdir()
    shapes = parameter_shapes(
        equal_layers("llama", 320, 8, 8, 2, 2, 1, 4, 64, tie_embeddings=True),
    )
    save_file({name: torch.ones(shape) for name, shape in shapes.items()}, path / "model-1.safetensors")
    index = {"metadata": {"total_size": 1}, "weight_map": dict.fromkeys(shapes, "model-1.safetensors")}
    write_json(path / "model.safetensors.index.json", index)
    write_json(path / "config.json", CONFIG)
    write_json(path / "generation_config.json", {"eos_token_id": 3})
    write_json(path / "tokenizer_config.json", TOKENIZER)
    byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


def make_kimi(path: Path) -> Path:
    """A model with latents, tiktoken's ranks, and FP8 in blocks with scales in 8 bits; its text model is nested."""
    path.mkdir()
    shapes = {f"language_model.{name}": shape for name, shape in parameter_shapes(decoder_config(KIMI)).items()}
    tensors = {name: torch.ones(shape) for name, shape in shapes.items()}
    for name in [name for name in shapes if name.endswith("down_proj.weight")]:
        scale = torch.full((2, shapes[name][1] // 16), 127, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        tensors |= {name: tensors[name].to(torch.float8_e4m3fn), f"{name}_scale_inv": scale}
    save_file(tensors, path / "model.safetensors")
    write_json(path / "config.json", KIMI)
    write_json(path / "tokenizer_config.json", TIKTOKEN)
    ranks = [*(bytes([byte]) for byte in range(256)), b"ab", b"abc", b"\xe4\xb8"]
    lines = [f"{base64.b64encode(token).decode()} {rank}\n" for rank, token in enumerate(ranks)]
    (path / "tiktoken.model").write_text("".join(lines))
    return path


def make_gguf(path: Path) -> Path:
    tokens = ["a", "b", "ab", "<|im_end|>", *(f"t{i}" for i in range(36))]
    values = metadata(
        "qwen2",
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__pre="qwen2",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__merges=["a b"],
        tokenizer__ggml__token_type=[1, 1, 1, 3, *[1] * 36],
        tokenizer__ggml__eos_token_id=3,
        tokenizer__chat_template="{{ messages[0].content }}<|im_end|>",
    )
    return write(path, "qwen2", values, tensors("qwen2"), "Q8_0")


def write_json(file: Path, content: object) -> None:
    file.write_text(json.dumps(content))


def load(path: Path) -> None:
    checkpoint = open_checkpoint(path)
    tokenizer = checkpoint.tokenizer()
    if tokenizer.available:
        tokenizer.encode("Hello <|im_end|>")
    build = Build(ReferenceOps(), CPU, torch.float32, format_of=checkpoint.formats)
    decoder = Decoder(checkpoint.config, build, max_positions=16)
    decoder.load(checkpoint.weights(CPU, torch.float32))


def check_ends_well(path: Path, what: str) -> bool:
    """Whether it was loaded; any error but an SSDError fails the test, and so does a long time."""
    start = time.monotonic()
    try:
        load(path)
        return True
    except SSDError:
        return False
    except BaseException as error:
        raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
    finally:
        assert time.monotonic() - start < PATIENCE, what


# --- a seeded fuzzer --------------------------------------------------------------------------------------------------


def damaged(data: bytes, dice: random.Random) -> bytes:
    """Bytes flipped, the end cut off, or a number replaced by an absurd one; mostly in the header."""
    content = bytearray(data)
    near = min(len(data), 4096 if dice.random() < 0.8 else len(data)) - 8
    kind = dice.randrange(4)
    if kind == 0:
        return data[: dice.randrange(len(data))]
    if kind == 1:
        number = dice.choice([0, 1, 9, 1 << 16, 1 << 31, 1 << 40, (1 << 63) - 1, (1 << 64) - 1])
        content[(place := dice.randrange(near)) : place + 8] = struct.pack("<Q", number)
    elif kind == 2:
        content[(place := dice.randrange(near)) : place + 4] = struct.pack("<I", dice.choice([0, 9, 1 << 20, 1 << 31]))
    else:
        for _ in range(dice.randrange(1, 5)):
            content[dice.randrange(near)] = dice.randrange(256)
    return bytes(content)


def places(value: Any, before: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*before, key)
        yield from places(inner, (*before, key))


def replaced(content: Any, dice: random.Random) -> Any:
    """With one value replaced by a hostile one."""
    changed = copy.deepcopy(content)
    *way, last = dice.choice(list(places(content)))
    inner = changed
    for key in way:
        inner = inner[key]
    inner[last] = dice.choice(HOSTILE)
    return changed


def fuzz_gguf(tmp_path: Path, seed: int, count: int) -> None:
    dice = random.Random(seed)
    gguf, broken = make_gguf(tmp_path / "whole.gguf"), tmp_path / "broken.gguf"
    load(gguf)
    header = gguf.read_bytes()
    for i in range(count):
        broken.write_bytes(damaged(header, dice))
        check_ends_well(broken, f"seed {seed}, GGUF {i}")


def fuzz(whole: Path, seed: int, count: int) -> None:
    dice, broken = random.Random(seed), whole.with_name("broken")
    load(whole)
    shutil.copytree(whole, broken)
    files = sorted(file.name for file in whole.iterdir())
    for i in range(count):
        name = dice.choice(files)
        original = (whole / name).read_bytes()
        if name.endswith(".json") and dice.random() < 0.8:
            content = json.loads(original)
            if name == "config.json" and dice.random() < 0.3:
                content["rope_scaling"] = YARN
            (broken / name).write_text(json.dumps(replaced(content, dice)))
        else:
            (broken / name).write_bytes(damaged(original, dice))
        check_ends_well(broken, f"seed {seed}, {name} {i}: {(broken / name).read_bytes()[:600]!r}")
        (broken / name).write_bytes(original)


@pytest.fixture
def no_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    """A GGUF whose tokenizer is of another kind is converted by transformers, which takes seconds."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise SSDError("no conversion in this test")

    monkeypatch.setattr(gguf_tokenizer, "transformers_backend", refuse)


@pytest.mark.usefixtures("no_conversion")
def test_damaged_files_end_with_a_model_or_an_error_of_ours(tmp_path: Path) -> None:
    fuzz(make_directory(tmp_path / "whole"), seed=0, count=120)
    fuzz_gguf(tmp_path, seed=0, count=120)


def test_damaged_files_of_kimi_end_with_a_model_or_an_error_of_ours(tmp_path: Path) -> None:
    fuzz(make_kimi(tmp_path / "whole"), seed=0, count=50)


@pytest.mark.slow
@pytest.mark.usefixtures("no_conversion")
@pytest.mark.parametrize("seed", range(1, 5))
@pytest.mark.parametrize("make", [make_directory, make_kimi])
def test_many_damaged_files_end_with_a_model_or_an_error_of_ours(
    seed: int, make: Callable[[Path], Path], tmp_path: Path
) -> None:
    fuzz(make(tmp_path / "whole"), seed, count=2000)
    fuzz_gguf(tmp_path, seed, count=2000 if make is make_directory else 0)


# --- single cases -----------------------------------------------------------------------------------------------------


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return make_directory(tmp_path / "m")


def edit(file: Path, **changes: Any) -> None:
    write_json(file, {**json.loads(file.read_text()), **changes})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 60000),
        ("hidden_size", 1 << 22),
        ("intermediate_size", 1 << 40),
        ("vocab_size", 1 << 27),
        ("max_position_embeddings", 10**12),
        ("head_dim", 1 << 13),
        ("num_hidden_layers", "2"),
        ("tie_word_embeddings", "false"),
        ("rope_scaling", []),
        ("rope_scaling", {**CONFIG["rope_scaling"], "high_freq_factor": 1.0}),
        ("rope_scaling", {**YARN, "factor": 1e6, "original_max_position_embeddings": 1 << 22}),
        ("quantization_config", "awq"),
        ("architectures", "LlamaForCausalLM"),
        *((name, value) for name in ("rms_norm_eps", "rope_theta") for value in (0, -1.0, float("nan"), float("inf"))),
    ],
)
def test_absurd_values_of_a_config_are_refused_before_the_model_is_built(
    field: str, value: object, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    edit(directory / "config.json", **{field: value})
    monkeypatch.setattr("ssd.models.checkpoint.safe_open", None)
    with pytest.raises(UnsupportedModel, match=str(directory)):
        open_checkpoint(directory)


@pytest.mark.parametrize("eos", ["3", [-1], [1.5], [[3]], True, 1 << 40])
def test_stop_tokens_that_are_no_token_ids_are_refused(eos: object, directory: Path) -> None:
    edit(directory / "generation_config.json", eos_token_id=eos)
    with pytest.raises(UnsupportedModel, match="eos_token_id"):
        open_checkpoint(directory)


@pytest.mark.parametrize("file", ["model-1.safetensors", "model.safetensors", "a.safetensors"])
@pytest.mark.parametrize("kind", ["pipe", "device", "directory"])
def test_weights_that_are_no_regular_file_are_refused(file: str, kind: str, directory: Path) -> None:
    """Opening a pipe waits for a writer, and /dev/zero never ends."""
    (directory / "model-1.safetensors").unlink()
    if file != "model-1.safetensors":
        (directory / "model.safetensors.index.json").unlink()
    place = directory / file
    {"pipe": os.mkfifo, "device": lambda p: p.symlink_to("/dev/zero"), "directory": Path.mkdir}[kind](place)
    with pytest.raises(SSDError, match=f"{file} is not a regular file"):
        open_checkpoint(directory)


@pytest.mark.parametrize(
    "file", ["tokenizer_config.json", "generation_config.json", "additional_chat_templates/x.jinja"]
)
def test_a_pipe_among_the_text_files_does_not_hang(file: str, directory: Path) -> None:
    place = directory / file
    place.parent.mkdir(exist_ok=True)
    place.unlink(missing_ok=True)
    os.mkfifo(place)
    check_ends_well(directory, file)


@pytest.mark.parametrize("name", ["../other/model.safetensors", "/other/model.safetensors", 7, None, "x" * 5000])
def test_the_index_names_files_of_its_directory_only(name: object, directory: Path) -> None:
    edit(directory / "model.safetensors.index.json", weight_map={"model.norm.weight": name})
    with pytest.raises(SSDError, match=r"index\.json: weight_map names"):
        open_checkpoint(directory)


def test_json_that_is_nested_too_deeply_is_refused(directory: Path) -> None:
    (directory / "config.json").write_text("[" * 100_000)
    with pytest.raises(SSDError, match=r"config\.json cannot be read as JSON"):
        open_checkpoint(directory)


def replace_rule(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


@pytest.mark.parametrize("step", ["normalizer", "pre_tokenizer", "decoder"])
@pytest.mark.parametrize(
    "rules",
    [
        [replace_rule({"String": "x"}, "xx")] * 40,
        [replace_rule({"Regex": ""}, "xyz")] * 4,
        [replace_rule({"String": "x"}, "x" * 1000)],
    ],
)
def test_a_tokenizer_that_makes_texts_endless_is_refused_before_it_is_loaded(
    rules: list[dict[str, Any]], step: str, directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a file of 4 kB that takes all memory: each of 40 rules doubles the text. They may be nested."""
    half = len(rules) // 2
    nested = {"type": "Sequence", f"{step}s": [{"type": "Sequence", f"{step}s": rules[:half]}, *rules[half:]]}
    edit(directory / "tokenizer.json", **{step: nested})
    monkeypatch.setattr("ssd.text.tokenizer.tokenizers", None)
    with pytest.raises(SSDError, match=f"tokenizer.json: the rules of '{step}' can make a text more than 64 times"):
        load_tokenizer(directory)


def test_the_rules_of_usual_tokenizers_are_accepted(directory: Path) -> None:
    """Those of Llama 2 and T5, and a regex for runs of spaces."""
    spaces = [replace_rule({"String": " "}, "▁"), replace_rule({"Regex": " {2,}"}, "▁")]
    rules = [{"type": "Prepend", "prepend": "▁"}, *spaces]
    edit(directory / "tokenizer.json", normalizer={"type": "Sequence", "normalizers": rules})
    assert load_tokenizer(directory).available


@pytest.mark.parametrize("field", sorted(TOKENIZER))
@pytest.mark.parametrize("value", [7, "x", [7], {"x": 7}, [{"name": 1}]])
def test_fields_of_a_tokenizer_config_may_have_any_type(field: str, value: object, directory: Path) -> None:
    edit(directory / "tokenizer_config.json", **{field: value})
    check_ends_well(directory, f"{field}={value}")


def gguf_header(*values: bytes, num_tensors: int = 0) -> bytes:
    return struct.pack("<4sIQQ", b"GGUF", 3, num_tensors, len(values) if not num_tensors else 0) + b"".join(values)


def text(content: str, length: int | None = None) -> bytes:
    return struct.pack("<Q", len(content) if length is None else length) + content.encode()


@pytest.mark.parametrize(
    "content",
    [
        gguf_header(text("x", length=1 << 62)),
        gguf_header(text("x") + struct.pack("<I", 8) + text("y", length=(1 << 64) - 1)),
        gguf_header(text("x") + struct.pack("<IIQ", 9, 4, 1 << 62)),
        gguf_header(text("x") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000),
        gguf_header(text("general.alignment") + struct.pack("<II", 4, 0)),
        gguf_header(text("general.alignment") + struct.pack("<I", 8) + text("x")),
        gguf_header(text("x") + struct.pack("<IIQ", 0, 0, 0), num_tensors=1),
        gguf_header(text("x") + struct.pack("<IQIQ", 1, 0, 0, 0), num_tensors=1),
        gguf_header(text("x") + struct.pack("<IQIQ", 1, 33, 8, 0) + bytes(64), num_tensors=1),  # blocks of 32
        gguf_header(text("x") + struct.pack("<I", 1 << 31), num_tensors=1),
        gguf_header(b"", num_tensors=1 << 62),
        gguf_header(*(text(c) + struct.pack("<IQIQ", 1, 16, 0, 0) for c in "abcde"), bytes(96), num_tensors=5),
    ],
)
def test_absurd_numbers_in_a_gguf_header_are_refused(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(content)
    with pytest.raises(SSDError, match="not a whole GGUF file"):
        open_checkpoint(path)


@pytest.mark.parametrize(
    "changes",
    [
        {"llama__block_count": 60000},
        {"llama__feed_forward_length": 1 << 23},
        {"llama__context_length": 1 << 30},
        {"llama__block_count": "1"},
        {"llama__attention__head_count": 64},
        {"llama__attention__layer_norm_rms_epsilon": float("nan")},
        {"llama__attention__layer_norm_rms_epsilon": 0.0},
        {"llama__rope__freq_base": float("inf")},
        {"llama__rope__freq_base": -1.0},
        {"llama__rope__scaling__type": 7},
        {"tokenizer__ggml__eos_token_id": "x"},
        {"tokenizer__ggml__tokens": [1, 2]},
        {"tokenizer__chat_template": 7},
        {"split__count": "x"},
    ],
)
def test_absurd_values_of_gguf_metadata_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", metadata("llama", **changes), tensors("llama"))
    with pytest.raises(UnsupportedModel, match=r"m\.gguf"):
        open_checkpoint(path)
