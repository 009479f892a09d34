"""Drafts that read hidden states of the target: what heads and block drafts share.

A *feature* of a position is the target's hidden states after some of its layers, side by side; `fuse` makes them as
wide as the draft. Its vocabulary may be a part of the target's, and its embedding and head the target's own. Knows
nothing of sequences, KV blocks or drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Final, NamedTuple, Self

import torch

from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.ops import DeviceBatch
from ssd.kernels.weights import Weight
from ssd.layers.formats import FormatOf, dense
from ssd.layers.linear import ColumnLinear, Embedding
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build, LazyTensor, Parameter
from ssd.models.checkpoint import Checkpoint, Weights, read_safetensors, stored_in, weight_files
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder, KVCache, outline
from ssd.models.fields import shown
from ssd.text.json_file import read_json

_CHUNK: Final = 8192  # tokens that are compared at a time
_MAPS: Final = ("d2t", "t2d")
_INTEGERS: Final = (torch.int64, torch.int32, torch.int16)


@dataclass(frozen=True)
class FeatureConfig(DecoderConfig):
    """The draft's layers and what is around them. `vocab_size` is the target's."""

    kind: ClassVar[str]  # in messages

    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    feature_layers: tuple[int, ...] = ()  # numbers of layers after which hidden states are taken; (): the default
    own_embedding: bool = False  # False: it uses the target's

    def for_target(self, target: DecoderConfig) -> Self:
        """The config with the layers that are its features; ConfigError if it does not fit the target."""
        layers = self.feature_layers or (2, target.num_layers // 2, target.num_layers - 3)
        if all(layer.attention.window is not None for layer in target.layers):
            raise ConfigError(
                f"all layers of the target have sliding windows, but an {self.kind} needs KV of the whole context in "
                "the target's blocks: use a draft model"
            )
        if self.vocab_size != target.vocab_size:
            raise self._misfit("vocab_size", self.vocab_size, target.vocab_size)
        if self.target_hidden_size != target.hidden_size:
            raise self._misfit("target_hidden_size", self.target_hidden_size, target.hidden_size)
        if not self.own_embedding and self.hidden_size != target.hidden_size:
            raise ConfigError(
                f"the {self.kind} has hidden_size={self.hidden_size}, the target {target.hidden_size}, and its file no "
                "embed_tokens.weight: use one with an embedding of its own"
            )
        if len(set(layers)) < len(layers) or not all(1 <= layer <= target.num_layers for layer in layers):
            raise ConfigError(
                f"the {self.kind} reads hidden states after the layers {layers}, which must be different numbers from "
                f"1 to {target.num_layers}: set its layer ids in its config.json"
            )
        return replace(self, feature_layers=layers)

    def make(self, build: Build, max_positions: int, shared: Shared | None = None) -> FeatureDraft:
        """The draft, without its weights."""
        raise NotImplementedError

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor that is loaded for a draft of this config, but for the token maps."""
        return self.make(outline(), 1).shapes()

    def _misfit(self, field: str, own: int, target: int) -> ConfigError:
        return ConfigError(
            f"the {self.kind} has {field}={own}, the target {target}: use the one that was trained for this model"
        )


class Shared(NamedTuple):
    """What a draft may use of the target."""

    embedding: Embedding
    head: Embedding
    norm: RMSNorm  # the last one


class FeatureDraft(Decoder):
    """A draft on features. `load` it before use."""

    head: Embedding
    embedding: Embedding

    def __init__(
        self, config: FeatureConfig, build: Build, *, max_positions: int, shared: Shared | None = None
    ) -> None:
        self.feature_config = config
        super().__init__(config, build, max_positions=max_positions)
        width = config.hidden_size
        self._own = Embedding(build, "embed_tokens", config.vocab_size, width, embedding=True)
        self._shared = shared
        self.embedding = self._own if shared is None or config.own_embedding else shared.embedding
        self.head = Embedding(build, "lm_head", config.draft_vocab_size, width, head=True)

    def feature_projection(self, build: Build, *, bias: bool = False) -> ColumnLinear:
        """Makes features as wide as the draft."""
        config = self.feature_config
        inputs = (len(config.feature_layers) or 3) * config.target_hidden_size
        return ColumnLinear(build, {"fc": config.hidden_size}, inputs, bias=bias)

    def load(
        self,
        weights: Iterable[tuple[str, torch.Tensor | LazyTensor]],
        complete: Callable[[Parameter], None] = lambda _: None,
    ) -> None:
        """Loads the checkpoint's tensors. An embedding that is a copy of the target's is not kept."""
        super().load(weights, complete)
        shared, config = self._shared, self.feature_config
        if shared is None or not config.own_embedding or config.hidden_size != config.target_hidden_size:
            return
        ids = torch.arange(self.config.vocab_size, dtype=torch.int32, device=self.device)
        chunks = torch.split(ids, _CHUNK)
        if all(torch.equal(self._own.embed(chunk), shared.embedding.embed(chunk)) for chunk in chunks):
            self.embedding, self._own.weight = shared.embedding, Weight()

    def map_tokens(self, target_ids: torch.Tensor | None) -> None:
        """`target_ids`: the target's ids of the draft vocabulary; None: they are the same."""
        self.target_ids = None if target_ids is None else target_ids.to(self.device, torch.int32)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        """Features as the draft reads them."""
        raise NotImplementedError

    def store(self, batch: DeviceBatch, hidden: torch.Tensor, kv: KVCache) -> None:
        """Writes K and V of tokens with their fused features, and computes nothing else."""
        raise NotImplementedError


# --- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FeatureCheckpoint:
    """A directory with a draft on features: config.json and safetensors. The tokenizer is the target's."""

    path: Path
    config: FeatureConfig

    @classmethod
    def open(cls, path: Path) -> Self:
        try:
            shapes = {cls.name_of(name): tensor.shape for name, tensor in stored_in(weight_files(path))}
            return cls(path, cls.config_of(read_json(path / "config.json"), shapes))
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from None

    @staticmethod
    def config_of(raw: Mapping[str, Any], shapes: Mapping[str, Seq[int]]) -> FeatureConfig:
        """From a config.json, and the shapes of the stored tensors under the names of `weights`."""
        raise NotImplementedError

    @staticmethod
    def name_of(stored: str) -> str:
        """The name of a tensor in the layout that is loaded."""
        return stored

    @property
    def formats(self) -> FormatOf:
        return dense

    @property
    def note(self) -> str:
        """A caveat to print with every measurement of this draft; "" for an ordinary one."""
        return ""

    def for_target(self, target: Checkpoint) -> Self:
        """With the layers that are its features; ConfigError if it does not fit the target."""
        return replace(self, config=self.config.for_target(target.config))

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        """Every parameter under its name in the layout that is loaded, as it is stored."""
        for name, tensor in read_safetensors(weight_files(self.path)):
            if name not in _MAPS:
                yield self.name_of(name), tensor

    def target_ids(self) -> torch.Tensor | None:
        """The target's ids of the draft vocabulary; None: it has no map."""
        stored = (tensor for name, tensor in read_safetensors(weight_files(self.path)) if name == "d2t")
        offsets, size, total = next(stored, None), self.config.draft_vocab_size, self.config.vocab_size
        if offsets is None and size == total:
            return None
        ids = None
        if offsets is not None and offsets.shape == (size,) and offsets.dtype in _INTEGERS:
            ids = torch.arange(size, device=offsets.device) + offsets.long()
        if ids is None or int(ids.min()) < 0 or int(ids.max()) >= total or len(set(ids.tolist())) < size:
            raise UnsupportedModel(
                f"{self.path}: d2t has to map {size} draft tokens to different ones of {total}, by integers: download "
                "it again"
            )
        return ids


def full_attention(layer: Mapping[str, Any]) -> None:
    """UnsupportedModel if some layers of a draft have sliding windows."""
    kinds = layer.get("layer_types") or []
    if not isinstance(kinds, list) or any(kind != "full_attention" for kind in kinds):
        raise UnsupportedModel(f"layer_types={shown(kinds)}: ssd runs drafts on features with full attention only")


def layer_ids(key: str, ids: object, least: int = 0) -> tuple[int, ...]:
    """A list of layer numbers of a config.json."""
    if not isinstance(ids, list) or not all(type(i) is int and least <= i < 1 << 16 for i in ids):
        raise UnsupportedModel(f"{key}={shown(ids)}: expected a list of layer numbers")
    return tuple(ids)
