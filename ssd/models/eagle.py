"""EAGLE-3 draft heads: one decoder layer that reads hidden states of the target beside the tokens.

What it reads and recycles says `ssd.models.head`: its own hidden states are those before the last norm, or (EAGLE-3.1)
after it.

Loads the layouts of the EAGLE authors and SpecForge (`midlayer.*`), and of speculators (`layers.0.*`). Knows nothing of
sequences, KV blocks or drafting.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any, Final

import torch

from ssd.errors import UnsupportedModel
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build, Parameter
from ssd.layers.rotary import RopeTables
from ssd.models.decoder import DecoderLayer
from ssd.models.families import decoder_config
from ssd.models.feature_draft import FeatureCheckpoint, FeatureConfig, Shared, full_attention, layer_ids
from ssd.models.fields import FLAG, LIST, OBJECT, TEXT, VOCABULARY, WIDTH, Field, check_fields, shown
from ssd.models.head import Head

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
    "fc_norm": FLAG,
    "norm_output": FLAG,
}
_OTHERS: Final = frozenset(  # keys of speculators' layout that change nothing here
    {"auto_map", "dtype", "torch_dtype", "transformers_version", "model_type", "speculators_version"}
    | {"speculators_config", "tie_word_embeddings", "has_no_defaults_at_init", "embed_requires_grad"}
)
_LAYER: Final = "layers.0"
_OLD_PREFIX, _PREFIX = "midlayer.", f"{_LAYER}."


@dataclass(frozen=True)
class EagleConfig(FeatureConfig):
    """A head's one layer and what is around it."""

    kind = "EAGLE head"

    norm_before_residual: bool = False  # the residual stream begins with the normed hidden states
    norm_before_fc: bool = False  # one norm of all hidden states of the target before they are fused
    fc_norm: bool = False  # the same, a norm for those of each layer
    norm_output: bool = False  # the hidden states that it goes on from are those after its last norm
    fc_bias: bool = False

    def make(self, build: Build, max_positions: int, shared: Shared | None = None) -> EagleHead:
        return EagleHead(self, build, max_positions=max_positions, shared=shared)


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


class EagleHead(Head):
    """The head."""

    def __init__(self, config: EagleConfig, build: Build, *, max_positions: int, shared: Shared | None = None) -> None:
        self.eagle = config
        super().__init__(config, build, max_positions=max_positions, shared=shared)
        self.norm = RMSNorm(build, "norm", config.hidden_size, config.rms_eps)
        self.norm_output = config.norm_output
        self.adds = not (config.norm_before_residual or config.norm_output)
        self.fc = self.feature_projection(build, bias=config.fc_bias)
        size, count = config.target_hidden_size, len(config.feature_layers) or 3
        names = ["input_norm"] * config.norm_before_fc + [f"fc_norm.{i}" for i in range(count)] * config.fc_norm
        width = size * count if config.norm_before_fc else size
        self._feature_norms = [RMSNorm(build, name, width, config.rms_eps) for name in names]

    def _make_layers(self, build: Build) -> Seq[DecoderLayer]:
        self.layer: EagleLayer = EagleLayer(build, self.eagle, self.rope_tables)
        return [self.layer]

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.fc, self.norm, self.head)
        yield from self._feature_norms
        if self.eagle.own_embedding:
            yield self._own
        yield from self.layer.parameters()

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        if not self._feature_norms:
            return self.fc(features)
        parts = features.chunk(len(self._feature_norms), dim=1)
        normed = [norm(part.contiguous()) for norm, part in zip(self._feature_norms, parts, strict=True)]
        return self.fc(torch.cat(normed, dim=1))

    def inputs(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        joined, normed = self.layer.norms(self.embedding.embed(token_ids), hidden)
        return joined, normed if self.eagle.norm_before_residual else hidden


# --- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EagleCheckpoint(FeatureCheckpoint):
    """A directory with a head."""

    config: EagleConfig

    @staticmethod
    def config_of(raw: Mapping[str, Any], shapes: Mapping[str, Seq[int]]) -> EagleConfig:
        return eagle_config(raw, shapes)

    @staticmethod
    def name_of(stored: str) -> str:
        """In speculators' layout."""
        return _PREFIX + stored.removeprefix(_OLD_PREFIX) if stored.startswith(_OLD_PREFIX) else stored


def eagle_config(raw: Mapping[str, Any], shapes: Mapping[str, Seq[int]]) -> EagleConfig:
    """From a config.json of either layout, and the shapes of the stored tensors under speculators' names."""
    check_fields(raw, _FIELDS, "config.json")
    if (kind := raw.get("speculators_model_type")) not in (None, "eagle3"):
        raise UnsupportedModel(f"speculators_model_type={shown(kind)}: ssd runs heads of the type eagle3")
    for name in ("fc.weight", "layers.0.hidden_norm.weight", "lm_head.weight"):
        if name not in shapes:
            raise UnsupportedModel(f"{name} is missing: ssd runs EAGLE-3 heads, not those of EAGLE 1 and 2")
    if "speculators_model_type" in raw and (unknown := sorted(raw.keys() - _FIELDS.keys() - _OTHERS)):
        raise UnsupportedModel(f"{unknown[0]}={shown(raw[unknown[0]])}: ssd does not know what this changes of a head")
    if raw.get("norm_before_fc") and raw.get("fc_norm"):
        raise UnsupportedModel("norm_before_fc and fc_norm exclude each other: the config.json has both")
    layer = dict(raw.get("transformer_layer_config") or raw)
    if layer.get("num_hidden_layers", 1) != 1:
        raise UnsupportedModel(f"num_hidden_layers={shown(layer['num_hidden_layers'])}: ssd runs heads of one layer")
    layer |= {"architectures": None, "model_type": layer.get("model_type") or "llama", "num_hidden_layers": 1}
    full_attention(layer)
    layer.pop("draft_vocab_size", None)
    decoder = decoder_config(layer).with_layers(first_position=1)
    layers, fc_inputs = _feature_layers(raw), (shapes["fc.weight"] or (0,))[-1]
    return EagleConfig(
        **vars(decoder) | {"family": "eagle3", "tie_embeddings": False},
        draft_vocab_size=raw.get("draft_vocab_size") or decoder.vocab_size,
        target_hidden_size=raw.get("target_hidden_size") or fc_inputs // (len(layers) or 3),
        feature_layers=layers,
        norm_before_residual=bool(raw.get("norm_before_residual", False)),
        norm_before_fc=bool(raw.get("norm_before_fc")),
        fc_norm=bool(raw.get("fc_norm")),
        norm_output=bool(raw.get("norm_output")),
        fc_bias="fc.bias" in shapes,
        own_embedding="embed_tokens.weight" in shapes,
    )


def _feature_layers(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Counted as speculators and vLLM do, from the embedding. SpecForge's `eagle_config` names layers, from 0."""
    nested = (raw.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids")
    key = "eagle_aux_hidden_state_layer_ids"
    ids = layer_ids(key, raw.get(key) or nested or [])
    return ids if raw.get(key) else tuple(i + 1 for i in ids)


def authors_name(name: str) -> str:
    """The name of a tensor in the authors' layout, from that in speculators'."""
    return _OLD_PREFIX + name.removeprefix(_PREFIX) if name.startswith(_PREFIX) else name
