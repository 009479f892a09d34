"""GGUF files: a whole model, quantised or not, in one file.

Reads the header itself (the `gguf` package takes seconds over a vocabulary) and leaves the many block formats to
`gguf.quants`. Weights come out as float32 under their Hugging Face names. Knows nothing of directories, devices or the
engine; the weights' layout is undone here, so that nobody else knows they came from a GGUF.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt
import tokenizers
import torch
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

from ssd.errors import SSDError, UnsupportedModel
from ssd.models.config import DecoderConfig, RopeConfig
from ssd.models.families import check_shape
from ssd.models.tokenizer import Tokenizer, transformers_backend

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")

_MODEL_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "output.weight": "lm_head.weight",
    }
)
_LAYER_NAMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
)
_LAYER_TENSOR: Final = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_ROPE_FACTORS: Final = "rope_freqs.weight"
_CHAT_ENDS: Final = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>")


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies in the file, and how it is stored."""

    name: str
    shape: tuple[int, ...]  # as torch counts: rows first
    type_code: int
    offset: int  # from the start of the file


@dataclass(frozen=True)
class Header:
    """Everything in the file but the numbers."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


@dataclass(frozen=True)
class GGUFCheckpoint:
    """A GGUF file of one of the supported architectures."""

    path: Path
    config: DecoderConfig
    stop_token_ids: tuple[int, ...]
    header: Header

    @classmethod
    def open(cls, path: Path) -> GGUFCheckpoint:
        """Read the header, and refuse what cannot be run before any weight is touched."""
        _types()  # a missing package is better known now than after the engine is half built
        header = read_header(path)
        try:
            config = _decoder_config(header, path)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from None
        return cls(path, config, stop_token_ids(header.metadata), header)

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        data = np.memmap(self.path, dtype=np.uint8, mode="r")
        for info in self.header.tensors.values():
            if info.name != _ROPE_FACTORS:
                weight = read_tensor(data, info, self.path)
                yield _hf_name(info.name, self.config), torch.from_numpy(self._unpermuted(info.name, weight))

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.header.metadata, self.path)

    def _unpermuted(self, name: str, weight: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """Llama's q and k rows are stored with the two halves of each head interleaved (rotary by pairs)."""
        heads = {"attn_q": self.config.num_heads, "attn_k": self.config.num_kv_heads}
        part = name.split(".")[-2]
        if self.config.family != "llama" or part not in heads:
            return weight
        pairs = weight.reshape(heads[part], self.config.head_dim // 2, 2, *weight.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


# --- the file ---------------------------------------------------------------------------------------------------------


class _Cursor:
    """Reads the header's little-endian values one after the other."""

    _SCALARS: Final = "BbHhIif?" + " " * 2 + "Qqd"  # struct letters by the format's type codes; 8, 9 are not scalars
    _STRING: Final = 8
    _ARRAY: Final = 9

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        start, self.position = self.position, self.position + length
        return self._data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == self._STRING:
            return self.text()
        if kind == self._ARRAY:
            return self._array(*self.take("IQ"))
        (value,) = self.take(self._letter(kind))
        return float(str(np.float32(value))) if kind == 6 else value  # 1e-05 was written, not 9.999999747e-06

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == self._STRING:
            return [self.text() for _ in range(count)]
        if kind == self._ARRAY:
            return [self.value(kind) for _ in range(count)]
        return list(self.take(f"{count}{self._letter(kind)}"))

    def _letter(self, kind: int) -> str:
        letter = self._SCALARS[kind : kind + 1].strip()
        if not letter:
            raise ValueError(f"unknown value type {kind}")
        return letter


def read_header(path: Path) -> Header:
    """Parse metadata and the table of tensors; the numbers stay on disk."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            return _parse(_Cursor(data))
    except (OSError, ValueError, struct.error) as error:
        raise SSDError(f"{path} is not a whole GGUF file ({error}): download it again") from error


def _parse(cursor: _Cursor) -> Header:
    _, version, tensor_count, value_count = cursor.take("4sIQQ")
    if version not in (2, 3):
        raise ValueError(f"version {version}, expected 2 or 3")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(*cursor.take("I"))
    rows = [_tensor_row(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: TensorInfo(name, shape, code, start + offset) for name, shape, code, offset in rows}
    return Header(MappingProxyType(metadata), MappingProxyType(tensors))


def _tensor_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    (dimensions,) = cursor.take("I")
    shape = tuple(reversed(cursor.take(f"{dimensions}Q")))  # the file counts the fastest dimension first
    code, offset = cursor.take("IQ")
    return name, shape, code, offset


def _types() -> type[GGMLQuantizationType]:
    try:
        from gguf import GGMLQuantizationType
    except ImportError as error:
        raise SSDError("reading GGUF files needs the gguf package: `pip install gguf`") from error
    kinds: type[GGMLQuantizationType] = GGMLQuantizationType
    return kinds


def read_tensor(data: npt.NDArray[np.uint8], info: TensorInfo, path: Path) -> npt.NDArray[np.float32]:
    """One tensor, dequantised."""
    kind = _tensor_type(info)
    from gguf import GGML_QUANT_SIZES, quants

    per_block, block_bytes = GGML_QUANT_SIZES[kind]
    row_bytes = info.shape[-1] // per_block * block_bytes
    end = info.offset + math.prod(info.shape[:-1]) * row_bytes
    if end > data.size:
        raise SSDError(f"{path} ends inside of tensor {info.name}: download it again")
    rows = np.array(data[info.offset : end]).reshape(*info.shape[:-1], row_bytes)  # a copy: the file is read-only
    try:
        return np.ascontiguousarray(quants.dequantize(rows, kind), dtype=np.float32).reshape(info.shape)
    except NotImplementedError:
        _refuse_type(info, kind.name)


def _tensor_type(info: TensorInfo) -> GGMLQuantizationType:
    try:
        return _types()(info.type_code)
    except ValueError:
        _refuse_type(info, str(info.type_code))


def _refuse_type(info: TensorInfo, kind: str) -> NoReturn:
    raise UnsupportedModel(
        f"tensor {info.name} is stored as {kind}, which the installed gguf package cannot dequantise: "
        "use a newer gguf package or another quantisation of the model (Q8_0, Q4_K, F16 ...)"
    )


# --- the model --------------------------------------------------------------------------------------------------------


def _decoder_config(header: Header, path: Path) -> DecoderConfig:
    metadata, tensors = header.metadata, header.tensors
    family = metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        raise UnsupportedModel(f"general.architecture={family!r}: ssd runs GGUF files of {', '.join(ARCHITECTURES)}")
    _refuse_variants(metadata, family)
    heads, hidden = _size(metadata, f"{family}.attention.head_count"), _size(metadata, f"{family}.embedding_length")
    head_dim = _size(metadata, f"{family}.attention.key_length", hidden // heads)
    config = DecoderConfig(
        family=family,
        vocab_size=_rows(header, "token_embd.weight"),
        hidden_size=hidden,
        intermediate_size=_size(metadata, f"{family}.feed_forward_length"),
        num_layers=_size(metadata, f"{family}.block_count"),
        num_heads=heads,
        num_kv_heads=_size(metadata, f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        max_position=_size(metadata, f"{family}.context_length"),
        rms_eps=float(metadata.get(f"{family}.attention.layer_norm_rms_epsilon", 1e-6)),
        rope=_rope(header, family, head_dim, path),
        tie_embeddings="output.weight" not in tensors,
        qkv_bias="blk.0.attn_q.bias" in tensors,
        output_bias="blk.0.attn_output.bias" in tensors,
        mlp_bias="blk.0.ffn_gate.bias" in tensors,
        qk_norm=family == "qwen3",
        dtype=_dtype(header),
    )
    check_shape(config)
    for name in tensors:
        _hf_name(name, config)
    return config


def _refuse_variants(metadata: Mapping[str, Any], family: str) -> None:
    """What the same architecture name may also stand for: experts, sliding windows, files in several parts."""
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(
            f"split.count={metadata['split.count']}: ssd reads GGUF models of one file; join the parts with "
            "`llama-gguf-split --merge`"
        )
    for key in ("expert_count", "attention.sliding_window"):
        if metadata.get(f"{family}.{key}"):
            raise UnsupportedModel(
                f"{family}.{key}={metadata[f'{family}.{key}']}: ssd runs dense models only, "
                "with attention to the whole context"
            )
    head_dim, value_dim = (
        metadata.get(f"{family}.attention.key_length"),
        metadata.get(f"{family}.attention.value_length"),
    )
    if head_dim != value_dim:
        raise UnsupportedModel(f"attention.key_length={head_dim}, value_length={value_dim}: ssd needs them equal")


def _size(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; some files write one per layer, which is fine as long as they are all the same."""
    value = metadata.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UnsupportedModel(f"{key}={value!r}: expected one positive integer for all layers")
    return value


def _rows(header: Header, name: str) -> int:
    if name not in header.tensors:
        raise UnsupportedModel(f"tensor {name} is missing: the file holds no whole model; download it again")
    return header.tensors[name].shape[0]


def _dtype(header: Header) -> str:
    """What to compute in: the file's own float type, and bfloat16 for quantised blocks."""
    kinds = {_tensor_type(info).name for info in header.tensors.values()} - {"F32"}
    return {"F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16" if kinds else "float32"


def _hf_name(name: str, config: DecoderConfig) -> str:
    """The Hugging Face name of a tensor; tensors that the family's decoder has no place for are refused."""
    if name in _MODEL_NAMES or name == _ROPE_FACTORS:
        return _MODEL_NAMES.get(name, name)
    match = _LAYER_TENSOR.fullmatch(name)
    part = match.group(2) if match else ""
    if match is None or part not in _LAYER_NAMES or (part.endswith(("q_norm", "k_norm")) and not config.qk_norm):
        raise UnsupportedModel(f"tensor {name}: unknown in the {config.family} architecture")
    return f"model.layers.{match.group(1)}.{_LAYER_NAMES[part]}.{match.group(3)}"


# --- the rotary embedding ---------------------------------------------------------------------------------------------


def _rope(header: Header, family: str, head_dim: int, path: Path) -> RopeConfig:
    metadata = header.metadata
    rotated = metadata.get(f"{family}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(f"{family}.rope.dimension_count={rotated}: ssd rotates whole heads ({head_dim})")
    theta = float(metadata.get(f"{family}.rope.freq_base", 10000.0))
    if _ROPE_FACTORS in header.tensors:
        data = np.memmap(path, dtype=np.uint8, mode="r")
        return llama3_rope(theta, read_tensor(data, header.tensors[_ROPE_FACTORS], path))
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    factor = float(metadata.get(f"{family}.rope.scaling.factor", metadata.get(f"{family}.rope.scale_linear", 1.0)))
    if kind == "yarn":
        return _yarn(metadata, family, theta, factor)
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"{family}.rope.scaling.type={kind!r}: ssd supports none, linear, yarn and llama3")
    return RopeConfig(theta=theta) if factor == 1.0 else RopeConfig(theta=theta, scaling="linear", factor=factor)


def _yarn(metadata: Mapping[str, Any], family: str, theta: float, factor: float) -> RopeConfig:
    scaling = f"{family}.rope.scaling"
    extra = metadata.get(f"{scaling}.attn_factor")  # multiplies the usual factor
    return RopeConfig(
        theta=theta,
        scaling="yarn",
        factor=factor,
        original_max_position=_size(metadata, f"{scaling}.original_context_length"),
        beta_fast=float(metadata.get(f"{scaling}.yarn_beta_fast", 32.0)),
        beta_slow=float(metadata.get(f"{scaling}.yarn_beta_slow", 1.0)),
        attention_factor=None if extra is None else float(extra) * (0.1 * math.log(max(factor, 1.0)) + 1.0),
    )


def llama3_rope(theta: float, factors: npt.NDArray[np.float32]) -> RopeConfig:
    """Recover Llama 3.1's scaling from the divisors of each frequency that the file stores in its place.

    The largest divisor is the factor; the other three numbers are the same in all published models. If they do not
    reproduce the stored divisors, the file means something else and is refused.
    """
    if np.all(factors == 1.0):
        return RopeConfig(theta=theta)
    rope = RopeConfig(theta=theta, scaling="llama3", factor=float(factors.max()))
    turns = rope.original_max_position * theta ** -(np.arange(factors.size) / factors.size) / (2 * math.pi)
    smooth = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / rope.factor + smooth)
    if not np.allclose(factors, expected, rtol=1e-4):
        raise UnsupportedModel(
            f"tensor {_ROPE_FACTORS}: its divisors (1 to {rope.factor}) are not Llama 3's frequency scaling, the only "
            "one that ssd can recover from a GGUF; use the model's safetensors"
        )
    return rope


# --- the tokenizer ----------------------------------------------------------------------------------------------------


def stop_token_ids(metadata: Mapping[str, Any]) -> tuple[int, ...]:
    """The ids that the file names, and the tokens that its chat template ends a turn with."""
    named = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    template = metadata.get("tokenizer.chat_template", "")
    used = [token for token in _CHAT_ENDS if token in template]
    tokens = metadata.get("tokenizer.ggml.tokens", []) if used else []
    ends = [index for index, token in enumerate(tokens) if token in used]
    return tuple(dict.fromkeys(token_id for token_id in (*named, *ends) if token_id is not None))


def load_tokenizer(metadata: Mapping[str, Any], path: Path) -> Tokenizer:
    """The file's tokenizer: built here for the byte-level vocabularies we know, else by transformers (slowly)."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        return Tokenizer(None)
    splitting = metadata.get("tokenizer.ggml.pre")
    known = metadata.get("tokenizer.ggml.model") == "gpt2" and splitting in _SPLITTINGS
    backend = _byte_level(metadata) if known else transformers_backend(path.parent, gguf_file=path.name)
    special = {
        f"{name}_token": tokens[metadata[key]]
        for name, key in _SPECIAL_KEYS.items()
        if metadata.get(key) is not None and metadata[key] < len(tokens)
    }
    sentencepiece = metadata.get("tokenizer.ggml.model") == "llama"
    add_bos = metadata.get("tokenizer.ggml.add_bos_token", sentencepiece or splitting in ("llama-bpe", "llama3"))
    add_eos = metadata.get("tokenizer.ggml.add_eos_token", False)
    _set_bos_eos(backend, special.get("bos_token"), special.get("eos_token"), add_bos, add_eos)
    return Tokenizer(backend, chat_templates=_chat_templates(metadata), special_tokens=special)


def _set_bos_eos(backend: tokenizers.Tokenizer, bos: str | None, eos: str | None, add_bos: bool, add_eos: bool) -> None:
    """Make `encode` add exactly these tokens."""
    before = [bos] if add_bos and bos is not None else []
    after = [eos] if add_eos and eos is not None else []
    pairs = [(token, backend.token_to_id(token)) for token in dict.fromkeys((*before, *after))]
    known = [(token, token_id) for token, token_id in pairs if token_id is not None]
    backend.post_processor = processors.TemplateProcessing(single=[*before, "$A", *after], special_tokens=known)


_SPECIAL_KEYS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "bos": "tokenizer.ggml.bos_token_id",
        "eos": "tokenizer.ggml.eos_token_id",
        "unk": "tokenizer.ggml.unknown_token_id",
        "pad": "tokenizer.ggml.padding_token_id",
    }
)
_CONTROL, _USER_DEFINED = 3, 4  # token types: special, and matched whole without being special


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """The byte-level BPE that Llama 3, Qwen and SmolLM use; they differ in how text is split into words."""
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    split, ignore_merges = _SPLITTINGS[metadata["tokenizer.ggml.pre"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, merges, ignore_merges=ignore_merges))
    backend.pre_tokenizer = _splitter(split)
    backend.decoder = decoders.ByteLevel()
    if metadata["tokenizer.ggml.pre"] == "qwen2":
        backend.normalizer = normalizers.NFC()
    kinds = metadata.get("tokenizer.ggml.token_type", [])
    added = [(tokens[index], kind) for index, kind in enumerate(kinds) if kind in (_CONTROL, _USER_DEFINED)]
    backend.add_tokens(
        [tokenizers.AddedToken(token, special=kind == _CONTROL, normalized=False) for token, kind in added]
    )
    return backend


def _splitter(pattern: str | None) -> pre_tokenizers.PreTokenizer:
    """By a pattern of the model's own, or (None) by GPT-2's with every digit apart."""
    if pattern is None:
        parts = [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    else:
        split = pre_tokenizers.Split(tokenizers.Regex(pattern), behavior="isolated")
        parts = [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    return pre_tokenizers.Sequence(parts)


def _words(digits: str) -> str:
    """Contractions, words with what precedes them, numbers, punctuation, line ends, spaces."""
    return (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
        + digits
        + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


_SPLITTINGS: Final[Mapping[str, tuple[str | None, bool]]] = MappingProxyType(
    {
        "smollm": (None, False),
        "llama-bpe": (_words(r"\p{N}{1,3}"), True),
        "llama3": (_words(r"\p{N}{1,3}"), True),
        "qwen2": (_words(r"\p{N}"), False),
    }
)


def _chat_templates(metadata: Mapping[str, Any]) -> dict[str, str]:
    """The default one, and those with a name of their own."""
    prefix = "tokenizer.chat_template"
    named = {key.removeprefix(prefix + "."): text for key, text in metadata.items() if key.startswith(prefix + ".")}
    return {"default": metadata[prefix], **named} if prefix in metadata else named
