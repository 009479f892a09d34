"""What a step of a model reads and computes, from its description alone: a shape, a graft's, or a `config.json`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from typing import Any, Final, NamedTuple

from ssd.errors import ConfigError, ModelNotFound
from ssd.grafts.shapes import SHAPES
from ssd.layers.spec import AttentionSpec, ExpertsSpec, GQASpec, LayerSpec
from ssd.models.config import DecoderConfig
from ssd.models.families import decoder_config
from ssd.models.hub import cache_places, is_hub_id, snapshot_in
from ssd.models.repository import CONFIG
from ssd.simulation.hardware import FORMATS
from ssd.text.json_file import read_json

EAGLE: Final = "eagle"  # as a draft: an EAGLE-3 head of the target's width
_EAGLE_VOCABULARY: Final = 32000  # of published heads
_KV_BYTES: Final = 2  # of a number, in bfloat16
_METHODS: Final = {"gptq": "awq", "awq": "awq", "fp8": "fp8_dynamic", "mxfp4": "mxfp4"}  # formats, by `quant_method`


class Product(NamedTuple):
    """Weights that a step multiplies."""

    weights: float  # number of them that are read
    row_weights: float  # number of them that each row is multiplied by
    format: str


@dataclass(frozen=True)
class Model:
    """A model as the simulation sees it. `format`: of the layers' weights; embedding and head are in bfloat16 unless
    `rounded_head` (a draft's)."""

    name: str
    config: DecoderConfig
    format: str = "bf16"
    rounded_head: bool = False

    def products(self, rows: float) -> Iterator[Product]:
        """What a step of so many rows reads: everything but the embedding; of experts those that random rows hit."""
        for layer, count in Counter(self.config.layers).items():
            dense, experts = _layer_weights(layer, self.config.hidden_size)
            yield Product(count * dense, count * dense, self.dense_format)
            if isinstance(layer.mlp, ExpertsSpec):
                chosen = layer.mlp.experts_per_token / layer.mlp.num_experts
                yield Product(count * experts * (1 - (1 - chosen) ** rows), count * experts * chosen, self.format)
        yield Product(self.head_weights, self.head_weights, self.format if self.rounded_head else "bf16")

    @property
    def dense_format(self) -> str:
        """Of the products outside of experts: MXFP4 is a format of experts alone."""
        return "bf16" if self.format == "mxfp4" else self.format

    @property
    def head_weights(self) -> int:
        return self.config.vocab_size * self.config.hidden_size

    def read_bytes(self, rows: float = 1) -> float:
        return sum(each.weights * FORMATS[each.format].bits / 8 for each in self.products(rows))

    @cached_property
    def weight_bytes(self) -> float:
        """Of all weights in memory."""
        embedding = 0 if self.config.tie_embeddings and not self.rounded_head else self.head_weights * 2
        return self.read_bytes(1e9) + embedding

    def gpu_bytes(self, ranks: int, sequences: int = 0, length: int = 0) -> float:
        """What one rank keeps: weights, and KV of sequences of this length."""
        return self.weight_bytes / ranks + sequences * self.kv_bytes(length, ranks)

    def kv_bytes(self, context: float, ranks: int = 1) -> float:
        """KV of a sequence of so many tokens, on one rank."""
        total = 0.0
        for layer in self.config.layers:
            heads = layer.attention.heads(ranks)
            kept = (1 if heads.latent_dim else 2) * heads.num_kv_heads * heads.head_dim
            total += min(context, layer.attention.window or context) * kept * _KV_BYTES
        return total


def _layer_weights(layer: LayerSpec, hidden: int) -> tuple[int, int]:
    """Weights of a layer's matrices: those that every row uses, and those of all experts."""
    own, mlp = _attention_weights(layer.attention, hidden), layer.mlp
    each = 3 * hidden * mlp.intermediate_size
    if isinstance(mlp, ExpertsSpec):
        return own + hidden * (mlp.num_experts + 3 * mlp.shared_size), mlp.num_experts * each
    return own + each, 0


def _attention_weights(attention: AttentionSpec, hidden: int) -> int:
    heads = attention.num_heads
    if isinstance(attention, GQASpec):
        return 2 * hidden * (heads + attention.num_kv_heads) * attention.head_dim
    queries, latent = heads * attention.query_dim, attention.latent_dim
    made = queries * hidden if attention.query_rank is None else attention.query_rank * (hidden + queries)
    kept = hidden * attention.head_dim + latent * heads * (attention.key_dim + attention.value_dim)
    return made + kept + heads * attention.value_dim * hidden


class _Head(Model):
    """An EAGLE-3 head: a layer whose attention reads token and feature side by side, and a head of its own."""

    def products(self, rows: float) -> Iterator[Product]:
        yield from super().products(rows)
        attention, hidden = self.config.attention, self.config.hidden_size
        second = hidden * (attention.num_heads + 2 * attention.num_kv_heads) * attention.head_dim
        yield Product(second, second, self.format)


def eagle_head(target: Model) -> Model:
    layer = target.config.layers[0]
    own = DecoderConfig("eagle", _EAGLE_VOCABULARY, target.config.hidden_size, (layer,), target.config.max_position)
    return _Head(EAGLE, own)


def open_model(name: str, field: str = "model", *, draft: bool = False) -> Model:
    """`SHAPE`, `SHAPE:FORMAT`, a graft, a `config.json`, a directory with one, or a name of the hub that is in a cache.

    The format is that of the checkpoint's `quantization_config`, unless one is named.
    """
    named, _, form = name.rpartition(":")
    if form not in FORMATS:
        named, form = name, ""
    shape = named.rpartition("@")[2] if named.startswith("graft:") else named
    if shape in SHAPES:
        config, stored = SHAPES[shape], "mxfp4" if SHAPES[shape].family == "gpt_oss" else "bf16"
    else:
        raw = read_json(_config_file(named, field))
        config, stored = decoder_config(raw), _stored_format(raw, field)
    return Model(name, config, form or stored, rounded_head=draft and bool(form))


def _config_file(name: str, field: str) -> Path:
    path = Path(name).expanduser()
    places = [path, path / CONFIG, Path(__file__).parents[1] / "bundle" / name / CONFIG]
    if is_hub_id(name):
        places += [found / CONFIG for entry in cache_places(name) if (found := snapshot_in(entry)) is not None]
    found = next((place for place in places if place.is_file() and place.suffix == ".json"), None)
    if found is None:
        close = get_close_matches(name.lower(), SHAPES, n=1)
        meant = f"did you mean {close[0]}? Else " if close else ""
        raise ModelNotFound(
            f"{field}={name!r} is no shape, no config.json and no model in a local cache: {meant}use one of "
            f"{', '.join(SHAPES)}, with or without a format (:{', :'.join(FORMATS)}), or a config.json"
        )
    return found


def _stored_format(raw: dict[str, Any], field: str) -> str:
    """The format that a `quantization_config` says, as far as it decides speed: bits of the weights, and of rows."""
    stored = raw.get("quantization_config") or raw.get("compression_config") or {}
    for group in (stored.get("config_groups") or {}).values():
        bits, rows = (group.get("weights") or {}).get("num_bits"), group.get("input_activations")
        return "int4" if bits == 4 else "fp8_dynamic" if rows else "fp8"
    method = str(stored.get("quant_method"))
    if stored and method not in _METHODS:
        raise ConfigError(
            f"{field}: quant_method={method!r} is not known here: write NAME:FORMAT, {', '.join(FORMATS)}"
        )
    return _METHODS.get(method, "bf16")
