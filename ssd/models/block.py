"""Block drafts (DFlash, DFlash 2, DSpark): a whole draft in one forward pass, from hidden states of the target.

A block of queries, the last token and then masks, attends to all positions before it and, both ways, to itself; layers
may have sliding windows, and be causal. Keys and values of the positions before it are made of features
(`ssd.models.feature_draft`) by each layer's own projections; those of the block are of no use after the pass. In DFlash
each mask predicts the token in its own place; in DSpark (`anchored`) each query predicts the next one, and a Markov
head adds to the logits what follows from the token before. In DFlash 2 convolutions along the block surround attention
and MLP, and a selector scores the likeliest tokens of each place by the token that was chosen before.

Loads the layouts of the DFlash authors, of DeepSpec, and of speculators.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Final, Literal, Protocol

import torch

from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.device import kernels
from ssd.kernels.ops import DeviceBatch, ExpertOutputs
from ssd.layers.attention import LayerKV
from ssd.layers.linear import ColumnLinear, Embedding
from ssd.layers.mlp import MLP
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build, LazyTensor, Parameter
from ssd.layers.rotary import RopeTables
from ssd.layers.spec import GQASpec, LayerSpec
from ssd.models.checkpoint import Weights
from ssd.models.decoder import DecoderLayer, KVCache
from ssd.models.families import block_kind, decoder_config, typed_windows
from ssd.models.feature_draft import FeatureCheckpoint, FeatureConfig, FeatureDraft, Shared, layer_ids
from ssd.models.fields import (
    FACTOR,
    FLAG,
    LAYERS,
    LIST,
    OBJECT,
    POSITIONS,
    TEXT,
    TOKEN_ID,
    VOCABULARY,
    WIDTH,
    Field,
    check_field,
    check_fields,
    shown,
    size,
)

MarkovKind = Literal["vanilla", "gated", "rnn"]
_KINDS: Final = ("vanilla", "gated", "rnn")
_BLOCK: Final = size(256)
_FIELDS: Final[Mapping[str, Field]] = {
    "architectures": LIST,
    "speculators_model_type": TEXT,
    "transformer_layer_config": OBJECT,
    "dflash_config": OBJECT,
    "aux_hidden_state_layer_ids": LIST,
    "target_layer_ids": LIST,
    "block_size": _BLOCK,
    "mask_token_id": TOKEN_ID,
    "draft_vocab_size": VOCABULARY,
    "sample_from_anchor": FLAG,
    "sliding_window_non_causal": FLAG,
    "is_causal": FLAG,
    "markov_rank": WIDTH,
    "markov_head_type": TEXT,
}
_LAYER_FIELDS: Final[Mapping[str, Field]] = {
    "num_hidden_layers": LAYERS,
    "layer_types": LIST,
    "sliding_window": POSITIONS,
}
_NESTED_FIELDS: Final[Mapping[str, Field]] = {
    "block_size": _BLOCK,
    "swa_window_size": POSITIONS,
    "use_swa": FLAG,
    "causal": FLAG,
    "is_causal": FLAG,
    "attention_sink_bias": FLAG,
}
_UNUSED: Final = ("embed_tokens.weight", "lm_head.weight")  # of a draft with the target's vocabulary: copies
_CONFIDENCE: Final = "confidence_head.proj"
SELECTOR_FIELDS: Final[Mapping[str, Field]] = {  # of a config.json, in the order of SelectorSpec's
    "conv_kernel_size": size(64),
    "conv_group_size": WIDTH,
    "selector_rank": WIDTH,
    "selector_top_k": size(1024),
    "input_embedding_scale": FACTOR,
    "output_multiplier": FACTOR,
    "final_logit_softcapping": FACTOR,
}


@dataclass(frozen=True)
class SelectorSpec:
    """What DFlash 2 has beside DFlash."""

    taps: int = 2
    group: int = 16  # channels whose taps change together
    rank: int = 256
    candidates: int = 16
    embedding_scale: float = 1.0
    multiplier: float = 1.0  # of logits
    softcap: float | None = None


@dataclass(frozen=True)
class BlockConfig(FeatureConfig):
    """The layers of a block draft and what is around them."""

    kind = "block draft"

    block_size: int = 0  # queries of a whole block
    mask_token: int = 0
    anchored: bool = False
    markov: MarkovKind | None = None
    markov_rank: int = 0
    selector: SelectorSpec | None = None  # of DFlash 2
    confidence_inputs: int = 0  # of a confidence head; 0: there is none
    causal_layers: tuple[int, ...] = ()  # in which a query sees no later ones of its block

    def make(self, build: Build, max_positions: int, shared: Shared | None = None) -> BlockDraft:
        return BlockDraft(self, build, max_positions=max_positions, shared=shared)

    @property
    def most_drafted(self) -> int:
        return self.block_size if self.anchored else self.block_size - 1

    def queries(self, count: int) -> int:
        """Queries of a block that writes so many tokens."""
        return count if self.anchored else count + 1


class Walk(Protocol):
    """Makes the logits of a block's places, one after the other, of the token that was chosen before."""

    def parameters(self) -> Iterator[Parameter]: ...

    def begin(self) -> None:
        """Before the first place."""

    def follow(self, rows: torch.Tensor) -> None:
        """From now on there are rows (int64) that go on from these rows."""

    def logits(self, own: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        """Float32 [rows, draft vocabulary]. `tokens`: the last of each row. Of each sequence, which has as many rows as
        the others, one after the other: `own`: those of the query alone, `hidden`: the query's states."""


class MarkovHead:
    """Adds to the logits what follows from the token before, and perhaps from the query's state."""

    def __init__(self, build: Build, config: BlockConfig) -> None:
        rank, width, name = config.markov_rank, config.hidden_size, "markov_head"
        self.kind = config.markov
        self.before = Embedding(build, f"{name}.markov_w1", config.vocab_size, rank, embedding=True)
        self._after = Embedding(build, f"{name}.markov_w2", config.draft_vocab_size, rank, head=True)
        outputs, inputs = (3 * rank, 2 * rank + width) if self.kind == "rnn" else (rank, rank + width)
        layer = "joint_proj" if self.kind == "rnn" else "gate_proj"
        gated = self.kind != "vanilla"
        self._gate = ColumnLinear(build, {f"{name}.{layer}": outputs}, inputs, bias=True) if gated else None
        self._state: torch.Tensor | None = None

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.before, self._after)
        if self._gate is not None:
            yield self._gate

    def begin(self) -> None:
        """Before the first token of the drafts."""
        self._state = None

    def follow(self, rows: torch.Tensor) -> None:
        if self._state is not None:
            self._state = self._state[rows]

    def logits(self, own: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        bias = self._bias(self.before.embed(tokens), hidden)
        return (own[:, None] + bias.view(len(own), -1, bias.shape[1])).flatten(0, 1)

    def _bias(self, e: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        if self._gate is None:
            return self._after.logits(e)
        hidden = _by_row(hidden, len(e))
        if self.kind == "gated":
            gate = self._gate(torch.cat((hidden, e), dim=1))
            return self._after.logits(torch.sigmoid(gate) * e)
        state = torch.zeros_like(e) if self._state is None else self._state
        keep, new, out = self._gate(torch.cat((state, e, hidden), dim=1)).chunk(3, dim=1)
        keep = torch.sigmoid(keep)
        self._state = keep * state + (1 - keep) * torch.tanh(new)
        return self._after.logits(torch.tanh(out).contiguous())


class ConfidenceHead:
    """The chance that a token is accepted if all before it are, by its query's states and perhaps the token before."""

    loaded: ClassVar[tuple[str, ...]] = ("weight", "bias")

    def __init__(self, build: Build, inputs: int, before: Embedding | None) -> None:
        """`before`: the Markov head's embedding of the token before; None: it is not read."""
        self._before = before
        self.weight, self.bias = (torch.empty(0, device=build.device) for _ in range(2))  # until they are loaded
        self._shapes = {f"{_CONFIDENCE}.weight": (1, inputs), f"{_CONFIDENCE}.bias": (1,)}

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return dict(self._shapes)

    def load(self, name: str, tensor: torch.Tensor | LazyTensor) -> None:
        setattr(self, name.rpartition(".")[2], tensor[(slice(None),)].to(self.weight))

    def num_bytes(self) -> int:
        return sum(map(math.prod, self._shapes.values())) * self.weight.itemsize

    def __call__(self, states: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Float32 [rows]; `tokens`: the one before each row."""
        read = states if self._before is None else torch.cat((states, self._before.embed(tokens)), dim=1)
        return torch.nn.functional.linear(read.float(), self.weight, self.bias)[:, 0].sigmoid()


class Selector:
    """Leaves the likeliest tokens of a place, with what the token before and the query's state say of each."""

    def __init__(self, build: Build, config: BlockConfig, spec: SelectorSpec) -> None:
        name, rank = "candidate_selector", spec.rank
        self._candidates = spec.candidates
        self._before = Embedding(build, f"{name}.predecessor_codebook", config.vocab_size, rank, embedding=True)
        self._after = Embedding(build, f"{name}.successor_codebook", config.vocab_size, rank, embedding=True)
        self._hidden = ColumnLinear(build, {f"{name}.hidden_projection": rank}, config.hidden_size)

    def parameters(self) -> Iterator[Parameter]:
        yield from (self._before, self._after, self._hidden)

    def begin(self) -> None:
        pass

    def follow(self, rows: torch.Tensor) -> None:
        pass

    def logits(self, own: torch.Tensor, tokens: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        values, found = (_by_row(each, len(tokens)) for each in own.topk(self._candidates, dim=1))
        wanted = self._before.embed(tokens).float() * _by_row(self._hidden(hidden.contiguous()), len(tokens)).float()
        after = self._after.embed(found.flatten().int()).float().view(*found.shape, -1)
        scores = values + (after * wanted[:, None]).sum(-1)
        return own.new_full((len(tokens), own.shape[1]), -torch.inf).scatter_(1, found, scores)


def _by_row(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Of each row what its sequence has."""
    return values if len(values) == rows else values.repeat_interleave(rows // len(values), dim=0)


class Convolution:
    """A causal convolution along the block, before and after a sublayer; its taps depend on the sublayer's input."""

    loaded: ClassVar[tuple[str, ...]] = ("base",)

    def __init__(self, build: Build, name: str, width: int, spec: SelectorSpec) -> None:
        self._name, self._width, self._spec = name, width, spec
        outputs = 2 * spec.taps * width // spec.group
        self.projection = ColumnLinear(build, {f"{name}.kernel_projection": outputs}, width)
        self.base = torch.empty(0, dtype=build.dtype, device=build.device)  # [2, taps, width], until it is loaded

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {f"{self._name}.base_kernel": (2, self._spec.taps, self._width)}

    def load(self, name: str, tensor: torch.Tensor | LazyTensor) -> None:
        self.base = tensor[(slice(None),)].to(self.base)

    def num_bytes(self) -> int:
        return 2 * self._spec.taps * self._width * self.base.itemsize

    def __call__(self, x: torch.Tensor, change: torch.Tensor, place: int, queries: int) -> torch.Tensor:
        """Over the rows of each block, which has so many; `change`: of the taps, `place`: 1 after the sublayer."""
        convolve = kernels(x.device).features.convolve
        out: torch.Tensor = convolve(x, change, self.base[place], place=place, queries=queries)
        return out


class ConvolvedLayer(DecoderLayer):
    """A decoder layer with convolutions around attention and MLP. `queries` of each block are set before a pass."""

    queries: int

    def __init__(self, build: Build, name: str, spec: LayerSpec, config: BlockConfig, tables: RopeTables) -> None:
        super().__init__(build, name, spec, config, tables)
        assert config.selector is not None
        self._around = [
            Convolution(build, f"{name}.{part}_conv", config.hidden_size, config.selector)
            for part in ("attention", "mlp")
        ]

    def parameters(self) -> Iterator[Parameter]:
        yield from super().parameters()
        for each in self._around:
            yield from (each, each.projection)

    def __call__(
        self, x: torch.Tensor | ExpertOutputs, residual: torch.Tensor | None, batch: DeviceBatch, kv: LayerKV
    ) -> tuple[torch.Tensor | ExpertOutputs, torch.Tensor]:
        assert isinstance(x, torch.Tensor)
        assert isinstance(self.mlp, MLP)
        normed, residual = self.input_norm(x, residual), x if residual is None else residual
        attention, mlp = self._around
        change = attention.projection(normed)
        out = self.attention(attention(normed, change, 0, self.queries), batch, kv)
        normed = self.mlp_norm(attention(out, change, 1, self.queries), residual)
        change = mlp.projection(normed)
        return mlp(self.mlp(mlp(normed, change, 0, self.queries)), change, 1, self.queries), residual


class BlockDraft(FeatureDraft):
    """The draft. `load` it before use."""

    def __init__(self, config: BlockConfig, build: Build, *, max_positions: int, shared: Shared | None = None) -> None:
        self.block = config
        super().__init__(config, build, max_positions=max_positions, shared=shared)
        self._batch_of = {i: int(i in config.causal_layers) for i in range(config.num_layers)}
        self.fc = self.feature_projection(build)
        self.hidden_norm = RMSNorm(build, "hidden_norm", config.hidden_size, config.rms_eps)
        self.norm = RMSNorm(build, "norm", config.hidden_size, config.rms_eps)
        self._own_head = config.draft_vocab_size < config.vocab_size
        if not self._own_head and shared is not None:
            self.head = shared.head
        self.walk: Walk | None = None  # None: the places do not depend on each other
        if config.markov is not None:
            self.walk = MarkovHead(build, config)
        elif config.selector is not None:
            self.walk = Selector(build, config, config.selector)
        self.confidence: ConfidenceHead | None = None
        if inputs := config.confidence_inputs:
            before = self.walk.before if isinstance(self.walk, MarkovHead) else None
            self.confidence = ConfidenceHead(build, inputs, before if inputs > config.hidden_size else None)

    def _make_layers(self, build: Build) -> Seq[DecoderLayer]:
        kind = DecoderLayer if self.block.selector is None else ConvolvedLayer
        return [
            kind(build, f"layers.{i}", spec, self.block, self.rope_tables) for i, spec in enumerate(self.config.layers)
        ]

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.fc, self.hidden_norm, self.norm)
        for layer in self.layers:
            yield from layer.parameters()
        if self._own_head:
            yield self.head
        if self.walk is not None:
            yield from self.walk.parameters()
        if self.confidence is not None:
            yield self.confidence

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self.hidden_norm(self.fc(features))

    def store(self, batch: DeviceBatch, hidden: torch.Tensor, kv: KVCache) -> None:
        for layer, own in zip(self.layers, kv, strict=True):
            layer.attention.store(hidden, batch, own)

    def states(self, batch: DeviceBatch, kv: KVCache, queries: int) -> torch.Tensor:
        """The states of a batch's queries, so many in each block, of which `logits` are made. Of a draft with causal
        layers the batch has another one for these."""
        for layer in self.layers:
            if isinstance(layer, ConvolvedLayer):
                layer.queries = queries
        return self.norm(*self._hidden(batch, kv, {}))

    def logits(self, states: torch.Tensor) -> torch.Tensor:
        """Float32, over the draft's vocabulary."""
        logits, spec = self.head.logits(states), self.block.selector
        if spec is None:
            return logits
        logits = logits * spec.multiplier
        return logits if spec.softcap is None else spec.softcap * torch.tanh(logits / spec.softcap)


# --- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class BlockCheckpoint(FeatureCheckpoint):
    """A directory with a block draft."""

    config: BlockConfig

    @staticmethod
    def config_of(raw: Mapping[str, Any], shapes: Mapping[str, Seq[int]]) -> BlockConfig:
        return block_config(raw, shapes)

    def for_target(self, target: Any) -> BlockCheckpoint:
        fitting = super().for_target(target)
        if target.config.num_layers in fitting.config.feature_layers:
            raise ConfigError(
                f"the block draft reads the states after the target's last layer, {target.config.num_layers}, of which "
                "published drafts mean the normed ones: ssd does not run it"
            )
        return fitting

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        """Without copies of the target's embedding and head."""
        unused = _UNUSED if self.config.draft_vocab_size == self.config.vocab_size else _UNUSED[:1]
        for name, tensor in super().weights(device, dtype):
            if name not in unused:
                yield name, tensor


def block_config(raw: Mapping[str, Any], shapes: Mapping[str, Seq[int]]) -> BlockConfig:
    """From a config.json of any layout, and the shapes of the stored tensors."""
    check_fields(raw, _FIELDS, "config.json")
    kind = block_kind(raw)
    for name in ("fc.weight", "hidden_norm.weight", "norm.weight"):
        if name not in shapes:
            raise UnsupportedModel(f"{name} is missing: it is no block draft, or not all of one")
    layer, nested = dict(raw.get("transformer_layer_config") or raw), dict(raw.get("dflash_config") or {})
    if nested.get("attention_sink_bias"):
        raise UnsupportedModel("dflash_config.attention_sink_bias=true: ssd runs block drafts without sinks")
    windows, causal = _windows(raw, nested, layer, kind)
    layer |= {"architectures": None, "model_type": layer.get("model_type") or "qwen3"}
    draft_vocab = layer.pop("draft_vocab_size", None)
    for key in ("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"):
        layer.pop(key, None)
    decoder = decoder_config(layer)
    rank = int(raw.get("markov_rank") or 0) if kind == "dspark" else 0
    block = raw.get("block_size", nested.get("block_size"))
    check_field("block_size", block, _BLOCK, "config.json")
    mask = raw.get("mask_token_id", nested.get("mask_token_id"))
    check_field("mask_token_id", mask, TOKEN_ID, "config.json")
    if not isinstance(block, int) or not isinstance(mask, int) or mask >= decoder.vocab_size:
        raise UnsupportedModel(
            f"block_size={shown(block)}, mask_token_id={shown(mask)}: a block draft has a size and a token of its "
            "vocabulary as mask"
        )
    sizes = (window and window + (0 if i in causal else block) for i, window in enumerate(windows))
    layers = tuple(_windowed(each, size) for each, size in zip(decoder.layers, sizes, strict=True))
    config = BlockConfig(
        **vars(decoder) | {"family": kind, "tie_embeddings": False, "layers": layers},
        draft_vocab_size=raw.get("draft_vocab_size") or draft_vocab or decoder.vocab_size,
        target_hidden_size=decoder.hidden_size,
        feature_layers=_feature_layers(raw, nested, (shapes["fc.weight"] or (0,))[-1] // decoder.hidden_size),
        block_size=block,
        mask_token=mask,
        anchored=bool(raw.get("sample_from_anchor", kind == "dspark")),
        markov=_markov(raw) if rank else None,
        markov_rank=rank,
        selector=_selector(raw, nested, decoder.hidden_size) if kind == "dflash2" else None,
        causal_layers=causal,
        confidence_inputs=(shapes.get(f"{_CONFIDENCE}.weight") or (0,))[-1],
    )
    if config.confidence_inputs not in (0, config.hidden_size, config.hidden_size + rank):
        raise UnsupportedModel(
            f"{_CONFIDENCE}.weight has {config.confidence_inputs} columns: a confidence head reads "
            f"hidden_size={config.hidden_size} states, and perhaps markov_rank={rank} numbers of the token before"
        )
    if config.selector is not None and config.draft_vocab_size != config.vocab_size:
        raise UnsupportedModel(f"draft_vocab_size={config.draft_vocab_size}: DFlash 2 has the target's vocabulary")
    if config.most_drafted < 1:
        raise UnsupportedModel(f"block_size={block}: a block of it writes nothing")
    return config


def _windowed(layer: LayerSpec, window: int | None) -> LayerSpec:
    assert isinstance(layer.attention, GQASpec)
    return replace(layer, attention=replace(layer.attention, window=window))


def _windows(
    raw: Mapping[str, Any], nested: Mapping[str, Any], layer: Mapping[str, Any], kind: str | None
) -> tuple[list[int | None], tuple[int, ...]]:
    """The sliding window of each layer (None: the whole context), and the numbers of the causal ones.

    Layers with windows are causal unless the config says otherwise, the others are not. The window of a causal layer
    ends at each query, that of another one begins so many positions before the block.
    """
    check_fields(layer, _LAYER_FIELDS, "config.json")
    check_fields(nested, _NESTED_FIELDS, "dflash_config of config.json")
    count, window = int(layer.get("num_hidden_layers") or 0), nested.get("swa_window_size", layer.get("sliding_window"))
    types = layer.get("layer_types") or ["full_attention"] * count
    if nested.get("use_swa") and "sliding_attention" not in types:
        types = ["sliding_attention"] * count
    windows = typed_windows(types, count, window)
    stated = [own for own in (raw.get("is_causal"), nested.get("is_causal"), nested.get("causal")) if own is not None]
    bidirectional = raw.get("sliding_window_non_causal", kind == "dflash2" and "transformer_layer_config" in raw)
    return windows, tuple(i for i, own in enumerate(windows) if (stated[0] if stated else own and not bidirectional))


def _selector(raw: Mapping[str, Any], nested: Mapping[str, Any], width: int) -> SelectorSpec:
    given = {key: nested.get(key, raw.get(key)) for key in SELECTOR_FIELDS}
    check_fields(given, SELECTOR_FIELDS, "config.json")
    names = ("taps", "group", "rank", "candidates", "embedding_scale", "multiplier", "softcap")
    found = {name: value for name, value in zip(names, given.values(), strict=True) if value is not None}
    spec = SelectorSpec(**found)
    if width % spec.group:
        raise UnsupportedModel(f"conv_group_size={spec.group} does not divide hidden_size={width}")
    if spec.embedding_scale != 1.0:
        raise UnsupportedModel(f"input_embedding_scale={spec.embedding_scale:g}: ssd runs drafts without one")
    return spec


def _markov(raw: Mapping[str, Any]) -> MarkovKind:
    kind = raw.get("markov_head_type") or "vanilla"
    if kind not in _KINDS:
        raise UnsupportedModel(f"markov_head_type={shown(kind)}: expected one of {', '.join(_KINDS)}")
    return kind  # type: ignore[return-value]


def _feature_layers(raw: Mapping[str, Any], nested: Mapping[str, Any], count: int) -> tuple[int, ...]:
    """Numbers of layers after which states are taken. speculators name layers by their inputs, the others by their
    outputs, from 0; without names they are at equal distances."""
    if (ids := raw.get("aux_hidden_state_layer_ids")) is not None:
        return layer_ids("aux_hidden_state_layer_ids", ids, least=1)
    found = raw.get("target_layer_ids", nested.get("target_layer_ids"))
    if found is not None:
        return tuple(i + 1 for i in layer_ids("target_layer_ids", found))
    layers = raw.get("num_target_layers")
    if not isinstance(layers, int) or count < 2:
        raise UnsupportedModel("target_layer_ids is missing: which layers of the target the draft reads")
    return tuple(round(1 + i * (layers - 4) / (count - 1)) + 1 for i in range(count))
