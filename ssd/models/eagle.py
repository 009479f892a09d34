"""EAGLE-3 draft heads: one decoder layer that reads hidden states of the target beside the tokens.

A *feature* of a position is the target's hidden states after three of its layers, side by side; `fuse` makes them as
wide as the head. The head's input at position p is the token there and the fused feature of p - 1, so position 0 has
none. After its first token it reads its own hidden states in their place. Its vocabulary is a part of the target's.

Loads the layouts of the EAGLE authors and SpecForge (`midlayer.*`), and of speculators (`layers.0.*`). Knows nothing of
sequences, KV blocks or drafting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch

from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.ops import DeviceBatch
from ssd.kernels.weights import Weight
from ssd.layers.formats import FormatOf, dense
from ssd.layers.linear import ColumnLinear, Embedding
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build, LazyTensor, Parameter
from ssd.layers.rotary import RopeTables
from ssd.models.checkpoint import Checkpoint, Weights, read_safetensors, stored_in, weight_files
from ssd.models.config import DecoderConfig
from ssd.models.decoder import Decoder, DecoderLayer, KVCache, outline
from ssd.models.families import decoder_config
from ssd.models.fields import FLAG, LIST, OBJECT, TEXT, VOCABULARY, WIDTH, Field, check_fields, shown
from ssd.text.json_file import read_json

_FIELDS: Final[Mapping[str, Field]] = {
    "architectures": LIST,
    "speculators_model_type": TEXT,
    "transformer_layer_config": OBJECT,
    "eagle_config": OBJECT,
    "eagle_aux_hidden_state_layer_ids": LIST,
    "draft_vocab_size": VOCABULARY,
    "target_hidden_size": WIDTH,
    "norm_before_residual": FLAG,
    "norm_before_fc": FLAG,
}
_CHUNK: Final = 8192  # tokens that are compared at a time
_MAPS: Final = ("d2t", "t2d")
_INTEGERS: Final = (torch.int64, torch.int32, torch.int16)
_LAYER: Final = "layers.0"
_OLD_PREFIX, _PREFIX = "midlayer.", f"{_LAYER}."


@dataclass(frozen=True)
class EagleConfig(DecoderConfig):
    """A head's one layer and what is around it. `vocab_size` is the target's."""

    draft_vocab_size: int = 0
    target_hidden_size: int = 0
    feature_layers: tuple[int, ...] = ()  # numbers of layers after which hidden states are taken; (): the default
    norm_before_residual: bool = False  # the residual stream begins with the normed hidden states
    fc_bias: bool = False
    own_embedding: bool = False  # False: it uses the target's

    def for_target(self, target: DecoderConfig) -> EagleConfig:
        """The head's config with the layers that are its features; ConfigError if it does not fit the target."""
        layers = self.feature_layers or (2, target.num_layers // 2, target.num_layers - 3)
        if all(layer.attention.window is not None for layer in target.layers):
            raise ConfigError(
                "all layers of the target have sliding windows, but an EAGLE head needs KV of the whole context in the "
                "target's blocks: use a draft model"
            )
        if self.vocab_size != target.vocab_size:
            raise _misfit("vocab_size", self.vocab_size, target.vocab_size)
        if self.target_hidden_size != target.hidden_size:
            raise _misfit("target_hidden_size", self.target_hidden_size, target.hidden_size)
        if not self.own_embedding and self.hidden_size != target.hidden_size:
            raise ConfigError(
                f"the EAGLE head has hidden_size={self.hidden_size}, the target {target.hidden_size}, and its file no "
                "embed_tokens.weight: use a head with an embedding of its own"
            )
        if len(set(layers)) < len(layers) or not all(1 <= layer <= target.num_layers for layer in layers):
            raise ConfigError(
                f"the EAGLE head reads hidden states after the layers {layers}, which must be different numbers from 1 "
                f"to {target.num_layers}: set eagle_aux_hidden_state_layer_ids in its config.json"
            )
        return replace(self, feature_layers=layers)


def _misfit(field: str, own: int, target: int) -> ConfigError:
    return ConfigError(
        f"the EAGLE head has {field}={own}, the target {target}: use the head that was trained for this model"
    )


class EagleLayer(DecoderLayer):
    """A decoder layer whose q, k and v read the embedding and the hidden states, each behind a norm of its own."""

    def __init__(self, build: Build, config: EagleConfig, tables: RopeTables) -> None:
        super().__init__(build, _LAYER, config.layer, config, tables, width=2 * config.hidden_size)
        self.hidden_norm = RMSNorm(build, f"{_LAYER}.hidden_norm", config.hidden_size, config.rms_eps)

    def parameters(self) -> Iterator[Parameter]:
        yield from super().parameters()
        yield self.hidden_norm

    def norms(self, embedded: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The input of q, k and v, and its second half: the normed hidden states."""
        normed = self.hidden_norm(hidden)
        return torch.cat((self.input_norm(embedded), normed), dim=1), normed


class EagleHead(Decoder):
    """The head. `load` it, and give it `hidden`, before use.

    A call takes the hidden states before its tokens from the first rows of `hidden`, and leaves its own there. Its
    logits are those of the target's vocabulary, -inf for tokens that it does not have.
    """

    hidden: torch.Tensor  # [rows, hidden_size]

    def __init__(
        self, config: EagleConfig, build: Build, *, max_positions: int, embedding: Embedding | None = None
    ) -> None:
        """`embedding`: the target's."""
        self.eagle = config
        super().__init__(config, build, max_positions=max_positions)
        width, inputs = config.hidden_size, (len(config.feature_layers) or 3) * config.target_hidden_size
        self.fc = ColumnLinear(build, {"fc": width}, inputs, bias=config.fc_bias)
        self.norm = RMSNorm(build, "norm", width, config.rms_eps)
        self._own = Embedding(build, "embed_tokens", config.vocab_size, width, embedding=True)
        self._shared = embedding
        self.embedding = self._own if embedding is None or config.own_embedding else embedding
        self.head = Embedding(build, "lm_head", config.draft_vocab_size, width, head=True)
        self._target_ids: torch.Tensor | None = None  # of the tokens in the draft vocabulary

    def _make_layers(self, build: Build) -> Seq[DecoderLayer]:
        self.layer = EagleLayer(build, self.eagle, self.rope_tables)
        return [self.layer]

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.fc, self.norm, self.head)
        if self.eagle.own_embedding:
            yield self._own
        yield from self.layer.parameters()

    def load(
        self,
        weights: Iterable[tuple[str, torch.Tensor | LazyTensor]],
        complete: Callable[[Parameter], None] = lambda _: None,
    ) -> None:
        """Loads the checkpoint's tensors. An embedding that is a copy of the target's is not kept."""
        super().load(weights, complete)
        shared = self._shared
        if shared is None or not self.eagle.own_embedding or self.eagle.hidden_size != self.eagle.target_hidden_size:
            return
        ids = torch.arange(self.config.vocab_size, dtype=torch.int32, device=self.device)
        chunks = torch.split(ids, _CHUNK)
        if all(torch.equal(self._own.embed(chunk), shared.embed(chunk)) for chunk in chunks):
            self.embedding, self._own.weight = shared, Weight()

    def map_tokens(self, target_ids: torch.Tensor | None) -> None:
        """`target_ids`: the target's ids of the draft vocabulary; None: they are the same."""
        self._target_ids = None if target_ids is None else target_ids.to(self.device)

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.fc(features)

    def store(self, batch: DeviceBatch, hidden: torch.Tensor, kv: KVCache) -> None:
        """Writes K and V of tokens with the hidden states before them, and computes nothing else."""
        joined, _ = self.layer.norms(self.embedding.embed(batch.token_ids), hidden)
        [own] = kv
        self.layer.attention.store(joined, batch, own)

    def __call__(
        self,
        batch: DeviceBatch,
        kv: KVCache,
        features: Mapping[int, torch.Tensor] | None = None,
        states: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Float32 logits of all rows, over the target's vocabulary."""
        hidden = self.hidden[: len(batch.token_ids)]
        joined, normed = self.layer.norms(self.embedding.embed(batch.token_ids), hidden)
        residual = normed if self.eagle.norm_before_residual else hidden
        [own] = kv
        x = self.norm(self.layer.after_norm(joined, residual, batch, own), residual)  # residual: now its hidden states
        if residual is not hidden:
            hidden.copy_(residual)
        logits = self.head.logits(x)
        if self._target_ids is None:
            return logits
        full = logits.new_full((len(logits), self.config.vocab_size), -torch.inf)
        return full.index_copy_(1, self._target_ids, logits)


def eagle_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor that is loaded for a head of this config (of speculators' layout), but for the token maps."""
    return EagleHead(config, outline(), max_positions=1).shapes()


# --- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EagleCheckpoint:
    """A directory with a head: config.json and safetensors. The tokenizer is the target's."""

    path: Path
    config: EagleConfig

    @classmethod
    def open(cls, path: Path) -> EagleCheckpoint:
        try:
            shapes = {_modern(name): tensor.shape for name, tensor in stored_in(weight_files(path))}
            return cls(path, eagle_config(read_json(path / "config.json"), shapes))
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from None

    @property
    def formats(self) -> FormatOf:
        return dense

    @property
    def note(self) -> str:
        """A caveat to print with every measurement of this head; "" for an ordinary one."""
        return ""

    def for_target(self, target: Checkpoint) -> EagleCheckpoint:
        """The head with the layers that are its features; ConfigError if it does not fit the target."""
        return replace(self, config=self.config.for_target(target.config))

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        """Every parameter under its name in speculators' layout, as it is stored."""
        for name, tensor in read_safetensors(weight_files(self.path)):
            if name not in _MAPS:
                yield _modern(name), tensor

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


def eagle_config(raw: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> EagleConfig:
    """From a config.json of either layout, and the shapes of the stored tensors under speculators' names."""
    check_fields(raw, _FIELDS, "config.json")
    for name in ("fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight"):
        if name not in shapes:
            raise UnsupportedModel(f"{name} is missing: ssd runs EAGLE-3 heads, not those of EAGLE 1 and 2")
    if raw.get("norm_before_fc"):
        raise UnsupportedModel("norm_before_fc=true: ssd runs heads whose fc reads the hidden states as they are")
    layer = dict(raw.get("transformer_layer_config") or raw)
    if layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModel(f"num_hidden_layers={shown(layer['num_hidden_layers'])}: ssd runs heads of one layer")
    layer |= {"architectures": None, "model_type": layer.get("model_type") or "llama", "num_hidden_layers": 1}
    layer.pop("draft_vocab_size", None)
    decoder = decoder_config(layer).with_layers(first_position=1)
    layers, fc_inputs = _feature_layers(raw), (shapes["fc.weight"] or (0,))[-1]
    return EagleConfig(
        **vars(decoder) | {"family": "eagle3", "tie_embeddings": False},
        draft_vocab_size=raw.get("draft_vocab_size") or decoder.vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or fc_inputs // (len(layers) or 3),
        feature_layers=layers,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        fc_bias="fc.bias" in shapes,
        own_embedding="embed_tokens.weight" in shapes,
    )


def _feature_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Counted as speculators and vLLM do, from the embedding. SpecForge's `eagle_config` names layers, from 0."""
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    ids = raw.get("eagle_aux_hidden_state_layer_ids") or nested or []
    if not isinstance(ids, list) or not all(type(i) is int and 0 <= i < 1 << 16 for i in ids):
        raise UnsupportedModel(f"eagle_aux_hidden_state_layer_ids={shown(ids)}: expected a list of layer numbers")
    return tuple(ids) if raw.get("eagle_aux_hidden_state_layer_ids") else tuple(i + 1 for i in ids)


def authors_name(name: str) -> str:
    """The name of a tensor in the authors' layout, from that in speculators'."""
    return _OLD_PREFIX + name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name


def _modern(name: str) -> str:
    return _PREFIX + name.removeprefix(_OLD_PREFIX) if name.startswith(_OLD_PREFIX) else name
