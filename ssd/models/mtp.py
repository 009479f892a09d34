"""MTP heads (multi-token prediction): one more layer of the target, which its own checkpoint may have.

Its input at position p is `eh_proj` of two norms side by side: that of the embedding of the token there, and that of
the target's last hidden states at p - 1 (after its last norm). For further tokens it reads its own hidden states, after
its last norm. The decoder layer is of the target's kind; embedding and head are the target's.

Knows the tensor names of DeepSeek-V3 and GLM, of Qwen3-Next, and of speculators.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple, Self

import torch

from ssd.errors import UnsupportedModel
from ssd.kernels.weights import Rows
from ssd.layers.formats import FormatOf, dense
from ssd.layers.linear import ColumnLinear
from ssd.layers.norm import RMSNorm
from ssd.layers.parameter import Build, Parameter
from ssd.models.checkpoint import HFCheckpoint, Weights, stored_formats, stored_in, weight_files
from ssd.models.config import DecoderConfig
from ssd.models.decoder import DecoderLayer
from ssd.models.families import decoder_config
from ssd.models.feature_draft import FeatureCheckpoint, FeatureConfig, Shared
from ssd.models.fields import OBJECT, check_field
from ssd.models.fused_experts import single_experts
from ssd.models.head import Head
from ssd.text.json_file import read_json

log = logging.getLogger("ssd")
_NESTED: Final = "transformer_layer_config"  # in a config.json of speculators
_COPIES: Final = ("embed_tokens", "shared_head.head")  # of the target's embedding and head


class Names(NamedTuple):
    """A layout: the names of a head's parts in its files."""

    layer: str
    enorm: str
    hnorm: str
    eh_proj: str
    norm: str
    normed: bool = True  # it was trained on hidden states after the target's last norm

    def holds(self, tensor: str) -> bool:
        """Whether a tensor is one of the head."""
        part = tensor.rpartition(".")[0]
        copies = [f"{self.layer}.{name}" for name in _COPIES]
        return part in self or (part not in copies and tensor.startswith(f"{self.layer}."))


def _within(layer: str, *parts: str, normed: bool = True) -> Names:
    enorm, hnorm, eh_proj, norm = (f"{layer}.{part}" for part in parts)
    return Names(layer, enorm, hnorm, eh_proj, norm, normed)


_DEEPSEEK: Final = re.compile(r"(model\.layers\.(\d+))\.eh_proj")
_QWEN: Final = Names("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_SPECULATORS: Final = _within(
    "mtp_layers.0", "token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm", normed=False
)


def names_in(path: Path) -> Names | None:
    """The names of the head's parts in the files of a directory, of several heads those of the first; None: it has no
    head."""
    parts = {name.rpartition(".")[0] for name, _ in stored_in(weight_files(path))}
    found = sorted((match for part in parts if (match := _DEEPSEEK.fullmatch(part))), key=lambda match: int(match[2]))
    if not found:
        return next((names for names in (_QWEN, _SPECULATORS) if names.eh_proj in parts), None)
    if len(found) > 1:
        log.info("%s has %d MTP heads: the first one writes all tokens of a draft", path.name, len(found))
    return _within(found[0][1], "enorm", "hnorm", "eh_proj", "shared_head.norm")


@dataclass(frozen=True)
class MTPConfig(FeatureConfig):
    """A head's one layer and what is around it."""

    kind = "MTP head"

    names: Names = _QWEN

    @classmethod
    def of(cls, target: DecoderConfig, names: Names) -> Self:
        """The last layer of the target that sees the whole context, once more."""
        layer = target.layers[target.full_layers[-1] if target.full_layers else -1]
        layer = replace(layer, attention=replace(layer.attention, first_position=1))
        return cls(
            **vars(target) | {"family": "mtp", "layers": (layer,), "tie_embeddings": False},
            draft_vocab_size=target.vocab_size,
            target_hidden_size=target.hidden_size,
            feature_layers=(target.num_layers,),
            names=names,
        )

    def for_target(self, target: DecoderConfig) -> Self:
        own = replace(self, feature_layers=(target.num_layers,))
        super(MTPConfig, own).for_target(target)
        return self.of(target, self.names)

    def make(self, build: Build, max_positions: int, shared: Shared | None = None) -> MTPHead:
        return MTPHead(self, build, max_positions=max_positions, shared=shared)


class MTPHead(Head):
    """The head."""

    norm_output, adds = True, False

    def __init__(self, config: MTPConfig, build: Build, *, max_positions: int, shared: Shared | None = None) -> None:
        self.mtp = config
        super().__init__(config, build, max_positions=max_positions, shared=shared)
        names, size = config.names, config.hidden_size
        self.enorm, self.hnorm, self.norm = (
            RMSNorm(build, name, size, config.rms_eps, float32=config.float32_norms)
            for name in (names.enorm, names.hnorm, names.norm)
        )
        self.eh_proj = ColumnLinear(build, {names.eh_proj: size}, 2 * size)
        if shared is not None:
            self.head, self._target_norm = shared.head, shared.norm

    def _make_layers(self, build: Build) -> Seq[DecoderLayer]:
        self.layer = DecoderLayer(build, self.mtp.names.layer, self.mtp.layers[0], self.mtp, self.rope_tables)
        return [self.layer]

    def parameters(self) -> Iterator[Parameter]:
        yield from (self.enorm, self.hnorm, self.eh_proj, self.norm)
        yield from self.layer.parameters()

    def fuse(self, features: torch.Tensor) -> torch.Tensor:
        return self._target_norm(features) if self.mtp.names.normed else features

    def inputs(self, token_ids: torch.Tensor, hidden: torch.Tensor) -> tuple[Rows, torch.Tensor]:
        embedded = self.enorm(self.embedding.embed(token_ids))
        x = self.eh_proj(torch.cat((embedded, self.hnorm(hidden)), dim=1))
        return self.layer.input_norm.rows(x, None), x


# --- checkpoints ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MTPCheckpoint(FeatureCheckpoint):
    """A head in the target's own checkpoint, or in a directory of its own."""

    config: MTPConfig
    stored: FormatOf = dense

    @classmethod
    def open(cls, path: Path) -> Self:
        """A directory of its own, whose config.json is that of the target, or of speculators."""
        raw = read_json(path / "config.json")
        try:
            check_field(_NESTED, raw.get(_NESTED), OBJECT, "config.json")
            layer: Mapping[str, Any] = dict(raw.get(_NESTED) or raw) | {"architectures": None}
            return cls._of(path, decoder_config(layer), stored_formats(raw, path))
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from None

    @classmethod
    def of(cls, target: HFCheckpoint) -> Self:
        """That of the target's own checkpoint."""
        return cls._of(target.path, target.config, target.formats)

    @classmethod
    def _of(cls, path: Path, target: DecoderConfig, formats: FormatOf) -> Self:
        names = names_in(path)
        if names is None:
            known = ", ".join(("model.layers.N.eh_proj", _QWEN.eh_proj, _SPECULATORS.eh_proj))
            raise UnsupportedModel(f"{path.name} has no MTP head, which would have one of {known}: use another draft")
        return cls(path, MTPConfig.of(target, names), formats)

    @property
    def formats(self) -> FormatOf:
        return self.stored

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        names, count = self.config.names, self.config.feature_layers[0] + 1
        own = (each for each in stored_in(weight_files(self.path)) if names.holds(each[0]))
        return single_experts(own, replace(self.config, layers=self.config.layers * count))

    def target_ids(self) -> None:
        return None
