"""GGUF files: a whole model, quantised or not, in one file.

Weights are returned in the layout and under the names of a Hugging Face checkpoint: as they are stored where
`ssd.layers.formats.gguf` has a format for their blocks, else dequantised. Knows nothing of directories or the engine.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from ssd.errors import UnsupportedModel
from ssd.layers.formats import DENSE, FormatOf
from ssd.layers.formats.gguf import BLOCKS, Blocks
from ssd.layers.spec import RopeConfig
from ssd.models.checkpoint import Weights
from ssd.models.config import DecoderConfig, equal_layers
from ssd.models.content import Sources
from ssd.models.decoder import check_fits, parameter_shapes
from ssd.models.fields import (
    EPSILON,
    FACTOR,
    HEAD_DIM,
    HEADS,
    LAYERS,
    POSITIONS,
    TEXT,
    THETA,
    WIDTH,
    Field,
    check_field,
    check_shape,
    number,
    shown,
)
from ssd.models.gguf_file import (
    Header,
    TensorInfo,
    quantisation_types,
    read_header,
    read_tensor,
    stored_rows,
    tensor_type,
)
from ssd.models.gguf_tokenizer import load_tokenizer, stop_token_ids
from ssd.text.tokenizer import Tokenizer

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")

_FIELDS: Final[Mapping[str, Field]] = {  # behind the architecture's name
    "block_count": LAYERS,
    "context_length": POSITIONS,
    "embedding_length": WIDTH,
    "feed_forward_length": WIDTH,
    "attention.head_count": HEADS,
    "attention.head_count_kv": HEADS,
    "attention.key_length": HEAD_DIM,
    "attention.value_length": HEAD_DIM,
    "attention.sliding_window": Field("an integer", (int,), 0, 1 << 23),  # 0: none
    "attention.layer_norm_rms_epsilon": EPSILON,
    "rope.dimension_count": HEAD_DIM,
    "rope.freq_base": THETA,
    "rope.scale_linear": FACTOR,
    "rope.scaling.type": TEXT,
    "rope.scaling.factor": number(0.0, 1e6),  # 0: none
    "rope.scaling.original_context_length": POSITIONS,
    "rope.scaling.yarn_beta_fast": FACTOR,
    "rope.scaling.yarn_beta_slow": FACTOR,
    "rope.scaling.attn_factor": FACTOR,
}
_ROPE_FACTORS: Final = "rope_freqs.weight"


@dataclass(frozen=True)
class GGUFTensor:
    """A tensor of a file, read when it is indexed: bytes of `blocks`, or else widened to float32."""

    path: Path
    info: TensorInfo
    blocks: Blocks | None
    restored: Callable[[str, npt.NDArray[Any]], npt.NDArray[Any]]  # to Hugging Face's order of rows

    @property
    def shape(self) -> tuple[int, ...]:
        return self.info.shape if self.blocks is None else self.blocks.shapes(*self.info.shape)["weight"]

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        read = read_tensor if self.blocks is None else stored_rows
        return torch.from_numpy(self.restored(self.info.name, read(self.path, self.info)))[index]


@dataclass(frozen=True)
class GGUFCheckpoint:
    """A GGUF file of one of the supported architectures."""

    path: Path
    config: DecoderConfig
    stop_token_ids: tuple[int, ...]
    header: Header
    note: str = ""

    @classmethod
    def open(cls, path: Path) -> GGUFCheckpoint:
        """Read the header, and refuse what cannot be run before any weight is touched."""
        quantisation_types()  # a missing package is better known now than after the engine is half built
        header = read_header(path)
        try:
            config = _decoder_config(header, path)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from None
        return cls(path, config, stop_token_ids(header.metadata, path), header)

    @cached_property
    def formats(self) -> FormatOf:
        stored = ((self._names.get(info.name), _blocks(info)) for info in self.header.tensors.values())
        found = {name.removesuffix(".weight"): blocks for name, blocks in stored if name and blocks}
        return lambda name: found.get(name, DENSE)

    @property
    def sources(self) -> Sources:
        return {self.path: min(info.offset for info in self.header.tensors.values())}

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        for info in self.header.tensors.values():
            if info.name != _ROPE_FACTORS:
                yield self._names[info.name], GGUFTensor(self.path, info, _blocks(info), self._unpermuted)

    @cached_property
    def _names(self) -> dict[str, str]:
        return _hf_names(self.config)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.header.metadata, self.path)

    def _unpermuted(self, name: str, weight: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Llama's q and k rows are stored with the two halves of each head interleaved (rotary by pairs)."""
        spec = self.config.attention
        heads = {"attn_q": spec.num_heads, "attn_k": spec.num_kv_heads}
        part = name.split(".")[-2]
        if self.config.family != "llama" or part not in heads:
            return weight
        if weight.shape[0] != heads[part] * spec.head_dim:
            return weight  # its shape is refused on loading
        pairs = weight.reshape(heads[part], spec.head_dim // 2, 2, *weight.shape[1:])
        return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(weight.shape)


def _blocks(info: TensorInfo) -> Blocks | None:
    """The format of a matrix that stays packed."""
    return BLOCKS.get(tensor_type(info).name) if len(info.shape) == 2 else None


def _decoder_config(header: Header, path: Path) -> DecoderConfig:
    metadata, tensors = header.metadata, header.tensors
    family = metadata.get("general.architecture")
    if family not in ARCHITECTURES:
        raise UnsupportedModel(
            f"general.architecture={shown(family)}: ssd runs GGUF files of {', '.join(ARCHITECTURES)}"
        )
    _check_metadata(metadata, family)
    _refuse_variants(metadata, family)
    heads, hidden = _size(metadata, f"{family}.attention.head_count"), _size(metadata, f"{family}.embedding_length")
    head_dim = _size(metadata, f"{family}.attention.key_length", hidden // heads)
    config = equal_layers(
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
        window=_size(metadata, f"{family}.attention.sliding_window", 0) or None,
        dtype=_dtype(header),
    )
    check_shape(config)
    check_fits(config, sum(math.prod(info.shape) for info in tensors.values()))
    if unknown := tensors.keys() - _hf_names(config).keys() - {_ROPE_FACTORS}:
        raise UnsupportedModel(f"tensor {min(unknown)[:60]}: unknown in the {family} architecture")
    return config


def _check_metadata(metadata: Mapping[str, Any], family: str) -> None:
    """Types and ranges; an integer may be a list of them, one for each layer."""
    check_field("split.count", metadata.get("split.count"), HEADS, "the metadata")
    for key, field in _FIELDS.items():
        value = metadata.get(f"{family}.{key}")
        for each in value if isinstance(value, list) and field.types == (int,) else [value]:
            check_field(f"{family}.{key}", each, field, "the metadata")


def _refuse_variants(metadata: Mapping[str, Any], family: str) -> None:
    """Refuse variants under the same architecture name: experts, files in several parts."""
    if metadata.get("split.count", 1) > 1:
        raise UnsupportedModel(
            f"split.count={metadata['split.count']}: ssd reads GGUF models of one file; join the parts with "
            "`llama-gguf-split --merge`"
        )
    if experts := metadata.get(f"{family}.expert_count"):
        raise UnsupportedModel(f"{family}.expert_count={shown(experts)}: ssd runs dense models only")
    head_dim, value_dim = (
        metadata.get(f"{family}.attention.key_length"),
        metadata.get(f"{family}.attention.value_length"),
    )
    if head_dim != value_dim:
        raise UnsupportedModel(
            f"attention.key_length={shown(head_dim)}, value_length={shown(value_dim)}: ssd needs them equal"
        )


def _size(metadata: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A positive integer; some files write one per layer, which is fine as long as they are all the same."""
    value = metadata.get(key, default)
    if isinstance(value, list) and len(set(value)) == 1:
        value = value[0]
    if not isinstance(value, int):
        raise UnsupportedModel(f"{key}={shown(value)}: expected one positive integer for all layers")
    return value


def _rows(header: Header, name: str) -> int:
    if name not in header.tensors:
        raise UnsupportedModel(f"tensor {name} is missing: the file holds no whole model; download it again")
    return header.tensors[name].shape[0]


def _dtype(header: Header) -> str:
    """What to compute in: the file's own float type, and bfloat16 for quantised blocks."""
    kinds = {tensor_type(info).name for info in header.tensors.values()} - {"F32"}
    return {"F16": "float16"}.get(kinds.pop(), "bfloat16") if len(kinds) == 1 else "bfloat16" if kinds else "float32"


def _hf_names(config: DecoderConfig) -> dict[str, str]:
    """The Hugging Face names of a decoder's tensors, by their names in a GGUF file."""
    from gguf import MODEL_ARCH, get_tensor_name_map

    names = get_tensor_name_map(MODEL_ARCH[config.family.upper()], config.num_layers)
    return {names.get_name(name, (".weight", ".bias")): name for name in parameter_shapes(config)}


# --- the rotary embedding ---------------------------------------------------------------------------------------------


def _rope(header: Header, family: str, head_dim: int, path: Path) -> RopeConfig:
    metadata = header.metadata
    rotated = metadata.get(f"{family}.rope.dimension_count", head_dim)
    if rotated != head_dim:
        raise UnsupportedModel(f"{family}.rope.dimension_count={shown(rotated)}: ssd rotates whole heads ({head_dim})")
    theta = float(metadata.get(f"{family}.rope.freq_base", 10000.0))
    if _ROPE_FACTORS in header.tensors:
        return llama3_rope(theta, read_tensor(path, header.tensors[_ROPE_FACTORS]))
    kind = metadata.get(f"{family}.rope.scaling.type", "none")
    factor = float(metadata.get(f"{family}.rope.scaling.factor") or metadata.get(f"{family}.rope.scale_linear", 1.0))
    if kind == "yarn":
        if not metadata.get(f"{family}.rope.scaling.factor"):
            raise UnsupportedModel(f"{family}.rope.scaling.factor is missing: type yarn needs a positive number")
        return _yarn(metadata, family, theta, factor)
    if kind not in ("none", "linear"):
        raise UnsupportedModel(f"{family}.rope.scaling.type={shown(kind)}: ssd supports none, linear, yarn and llama3")
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
    check_field(f"largest divisor of {_ROPE_FACTORS}", float(factors.max()), FACTOR, "the file")
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
