"""What a decoder looks like: the one description that every family's checkpoint is translated into.

Knows nothing of files, devices or the engine.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ssd.errors import UnsupportedModel
from ssd.layers.spec import GQASpec, KVGroup, LayerSpec, MLPSpec, RopeConfig

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class DecoderConfig:
    """One decoder-only transformer: its layers and what is around them."""

    family: str
    vocab_size: int
    hidden_size: int
    layers: tuple[LayerSpec, ...]
    max_position: int
    rms_eps: float = 1e-5
    tie_embeddings: bool = False
    dtype: str = "bfloat16"  # what the checkpoint was saved in
    float32_norms: bool = False  # the weights of norms are multiplied in float32
    tensor_prefix: str = ""  # of its tensors' names in a checkpoint, which has other models' tensors, too

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def layer(self) -> LayerSpec:
        """The description of every layer, for what is made for models of equal layers (GGUF, EAGLE heads)."""
        first, *others = self.layers
        if any(other != first for other in others):
            raise UnsupportedModel(f"the layers of this {self.family} model differ, and equal ones are needed here")
        return first

    @property
    def full_layers(self) -> list[int]:
        """The layers whose attention sees the whole context."""
        return [i for i, layer in enumerate(self.layers) if layer.attention.window is None]

    @property
    def attention(self) -> GQASpec:
        attention = self.layer.attention
        if not isinstance(attention, GQASpec):
            raise UnsupportedModel(
                f"this {self.family} model has latent attention, and keys and values are needed here"
            )
        return attention

    @property
    def mlp(self) -> MLPSpec:
        mlp = self.layer.mlp
        if not isinstance(mlp, MLPSpec):
            raise UnsupportedModel(f"this {self.family} model has experts, and a plain MLP is needed here")
        return mlp

    def with_layers(self, count: int | None = None, **attention: Any) -> DecoderConfig:
        """The same with changes of all layers' attention; `count`: with so many layers, if all are equal."""
        layers = self.layers if count is None else (self.layer,) * count
        return replace(
            self, layers=tuple(replace(each, attention=replace(each.attention, **attention)) for each in layers)
        )

    def kv_groups(self, *, windowed: bool) -> tuple[KVGroup, ...]:
        """The layers by what they keep of a sequence's KV, those that keep all of it first.

        `windowed`: what lies behind a window is freed (a target's); else all layers keep everything (a draft's).
        """
        kinds: dict[int | None, list[int]] = {}
        for i, layer in enumerate(self.layers):
            kinds.setdefault(layer.attention.window if windowed else None, []).append(i)
        return tuple(KVGroup(kind, tuple(kinds[kind])) for kind in sorted(kinds, key=lambda kind: kind or 0))

    def kv_bytes_per_token(self, dtype: torch.dtype, ranks: int = 1, *, windowed: bool = False) -> int:
        """KV memory of one token in a block, on one of the ranks: of each layout as many layers as it has in the group
        with most of them, since layers of different groups share the same tensors."""
        layouts = [layer.attention.kv_layout(dtype, ranks) for layer in self.layers]
        counts = (Counter(layouts[i] for i in group.layers) for group in self.kv_groups(windowed=windowed))
        most = functools.reduce(operator.or_, counts)
        return sum(layout.bytes_per_token * count for layout, count in most.items())

    def splits(self, ranks: int) -> bool:
        """Whether the model can be split over so many ranks."""
        return all(layer.splits(ranks) for layer in set(self.layers))


def equal_layers(
    family: str,
    vocab_size: int,
    hidden_size: int,
    intermediate_size: int,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    max_position: int,
    rms_eps: float = 1e-5,
    rope: RopeConfig = RopeConfig(),  # noqa: B008 (frozen)
    tie_embeddings: bool = False,
    *,
    mlp_bias: bool = False,
    dtype: str = "bfloat16",
    **attention: Any,
) -> DecoderConfig:
    """A decoder whose layers are all the same; `attention`: further fields of `GQASpec`."""
    layer = LayerSpec(
        GQASpec(num_heads, num_kv_heads, head_dim, rope, **attention), MLPSpec(intermediate_size, mlp_bias)
    )
    return DecoderConfig(
        family, vocab_size, hidden_size, (layer,) * num_layers, max_position, rms_eps, tie_embeddings, dtype
    )
