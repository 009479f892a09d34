"""Grafts of drafts on features: a small EAGLE head or block draft in the shape of a published one, for the graft of its
target in that shape.

Stream, heads and MLP of the draft are laid out as a graft's are (`ssd.grafts.graft`), so it reads that graft's features
and embedding, and drafts what the small one drafts. A head's draft vocabulary, and a block draft's layers and Markov
head, grow to what published ones have.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar, Final, Self

import torch

from ssd.errors import ConfigError
from ssd.grafts.graft import (
    CONSTANT_HEAD,
    CONSTANT_NORM,
    READERS,
    Axis,
    GraftCheckpoint,
    blocks_of,
    copies,
    copy_scales,
    fill_random,
    grafted_rope,
    held_mlp,
    name_and_format,
    obstacles,
    place,
    same,
    side_by_side,
)
from ssd.layers.spec import LayerSpec
from ssd.models.block import BlockCheckpoint, BlockConfig
from ssd.models.checkpoint import Checkpoint, all_weights, graft_note
from ssd.models.eagle import EagleCheckpoint, EagleConfig
from ssd.models.feature_draft import FeatureCheckpoint, FeatureConfig

_DRAFT_VOCABULARY: Final = 32000
_BLOCK_LAYERS: Final = 5
_MARKOV_RANK: Final = 256
_LAYER: Final = re.compile(r"layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class DraftGraft(FeatureCheckpoint):
    """`base` in the shape of its target's graft, which `for_target` gets."""

    base: FeatureCheckpoint
    shape_name: str

    random: ClassVar[tuple[str, ...]] = READERS  # parts whose weights beside the base's do not matter

    @staticmethod
    def of(base: FeatureCheckpoint, shape_name: str) -> DraftGraft:
        shape_name, form = name_and_format(shape_name)
        if form is not None:
            raise ConfigError(
                f"speculation draft: the {base.config.kind} is not rounded by :{form}: use draft_quantization={form!r}"
            )
        if isinstance(base, DraftGraft):
            raise ConfigError(f"speculation draft: {base.path.name} is a graft already: name what it is a graft of")
        if isinstance(base, BlockCheckpoint):
            return BlockGraft(base.path, base.config, base, shape_name)
        if not isinstance(base, EagleCheckpoint):
            raise ConfigError(
                f"speculation draft: {base.path.name} is an {base.config.kind}, of which there are no grafts"
            )
        return EagleGraft(base.path, base.config, base, shape_name)

    @property
    def note(self) -> str:
        return graft_note(self.path.name, self.shape_name)

    def for_target(self, target: Checkpoint) -> Self:
        if not isinstance(target, GraftCheckpoint) or target.shape_name != self.shape_name:
            raise ConfigError(
                f"speculation draft: the {self.config.kind} in the shape of {self.shape_name} reads the hidden states "
                f"of a graft in that shape: use model='graft:…@{self.shape_name}', or the draft as it is"
            )
        fitted = replace(self, base=self.base.for_target(target.base))
        config = fitted._grown(target)
        reason = next(fitted._obstacles(config), None)
        if reason is not None:
            raise ConfigError(f"{self.path.name} cannot be grafted in the shape of {self.shape_name}: {reason}")
        return replace(fitted, config=config.for_target(target.config))

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Made on the device: only the base's tensors travel there. What layers add that only the graft has is zero."""
        small, big = self.base.config, self.config
        base, blocks = all_weights(self.base, device, torch.float32), self._blocks()
        hosted = {i * big.num_layers // small.num_layers: i for i in range(small.num_layers)}
        for name, shape in big.shapes().items():
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            part, origin = name.removesuffix(".weight"), base.get(name)
            if (layer := _LAYER.fullmatch(part)) is not None:
                number, part = int(layer[1]), layer[2]
                origin = base[f"layers.{hosted[number]}.{part}.weight"] if number in hosted else None
            if part in self.random:
                fill_random(tensor, name)
            if origin is not None:
                place(origin, tensor, *blocks[part])
            if big.vocab_size > small.vocab_size:
                self._carry_constant(part, tensor)
            yield name, tensor

    def _grown(self, target: GraftCheckpoint) -> FeatureConfig:
        """A draft of the graft's shape. Its feature layers are those that come before the same layers of the base."""
        small, big, base = self.base.config, target.config, target.base.config
        wide = big.attention
        attention = replace(
            small.attention,
            num_heads=wide.num_heads,
            num_kv_heads=wide.num_kv_heads,
            head_dim=wide.head_dim,
            rope=grafted_rope(small, big),
        )
        layer = LayerSpec(attention, replace(small.mlp, intermediate_size=big.mlp.intermediate_size))
        return replace(
            small,
            vocab_size=big.vocab_size,
            hidden_size=big.hidden_size,
            layers=(layer,) * small.num_layers,
            target_hidden_size=big.hidden_size,
            feature_layers=tuple(n * big.num_layers // base.num_layers for n in small.feature_layers),
        )

    def _obstacles(self, big: FeatureConfig) -> Iterator[str]:
        small = self.base.config
        if small.hidden_size != small.target_hidden_size:
            yield f"its hidden_size={small.hidden_size} is not its target's {small.target_hidden_size}"
        yield from obstacles(small, big)

    def _blocks(self) -> dict[str, tuple[Axis, Axis]]:
        """Rows and columns of the base's tensor in each part of the graft."""
        small, big = self.base.config, self.config
        read, scales = same(small.hidden_size), copy_scales(big.hidden_size, small.hidden_size)
        blocks = blocks_of(small, big, held_mlp(small, big), self._attended())
        feature = read.times(1 / scales[0])  # not behind a norm, which would divide by the first copy's scale
        features = side_by_side([feature] * len(small.feature_layers), small.hidden_size, big.hidden_size)
        return blocks | {
            "hidden_norm": blocks["input_layernorm"],
            "norm": blocks["model.norm"],
            "fc": (copies(small.hidden_size, scales), features),
        }

    def _attended(self) -> Axis | None:
        """Columns of q, k and v; None: they read what is as wide as the stream."""
        return None

    def _carry_constant(self, part: str, tensor: torch.Tensor) -> None:
        """Passes the constant of the graft's stream on to the logits, which keeps additional tokens from being
        drafted."""
        if part == "norm":
            tensor[-1] = CONSTANT_NORM


@dataclass(frozen=True)
class EagleGraft(DraftGraft, EagleCheckpoint):
    base: EagleCheckpoint
    config: EagleConfig

    def _grown(self, target: GraftCheckpoint) -> EagleConfig:
        """With the draft vocabulary of published heads, if the shape's vocabulary has room for it."""
        small, config = self.base.config, super()._grown(target)
        assert isinstance(config, EagleConfig)
        added = _DRAFT_VOCABULARY - small.draft_vocab_size
        fits = 0 < added <= config.vocab_size - small.vocab_size
        return replace(config, draft_vocab_size=small.draft_vocab_size + (added if fits else 0))

    def _obstacles(self, big: FeatureConfig) -> Iterator[str]:
        for name in ("fc_bias", "own_embedding", "norm_before_residual"):
            if getattr(self.base.config, name):
                yield f"the head's {name} is true"
        yield from super()._obstacles(big)

    def _blocks(self) -> dict[str, tuple[Axis, Axis]]:
        small = self.base.config
        return super()._blocks() | {"lm_head": (same(small.draft_vocab_size), same(small.hidden_size))}

    def _attended(self) -> Axis:
        width = self.base.config.hidden_size
        return side_by_side([same(width)] * 2, width, self.config.hidden_size)

    def _carry_constant(self, part: str, tensor: torch.Tensor) -> None:
        super()._carry_constant(part, tensor)
        if part == "fc":
            tensor[-1, self.config.target_hidden_size - 1] = 1.0
        elif part == "lm_head":
            real = self.base.config.draft_vocab_size
            tensor[:real, -1] = 0.0
            tensor[real:, -1] = CONSTANT_HEAD

    def target_ids(self) -> torch.Tensor | None:
        """The base's, then tokens that only the graft has."""
        ids, small = self.base.target_ids(), self.base.config
        added = self.config.draft_vocab_size - small.draft_vocab_size
        if not added:
            return ids
        if ids is None:
            ids = torch.arange(small.vocab_size, device="cpu")
        return torch.cat((ids, torch.arange(small.vocab_size, small.vocab_size + added, device="cpu")))


@dataclass(frozen=True)
class BlockGraft(DraftGraft, BlockCheckpoint):
    """The additional layers read the features without a norm, so what their attention finds is dropped by o."""

    base: BlockCheckpoint
    config: BlockConfig
    tied: bool = False  # the target's head, which is the draft's, is its embedding

    random = (*READERS, "markov_head.markov_w1")

    def for_target(self, target: Checkpoint) -> Self:
        return replace(super().for_target(target), tied=target.config.tie_embeddings)

    def _grown(self, target: GraftCheckpoint) -> BlockConfig:
        """With the layers and the rank of published ones. Its head is the target's."""
        config = super()._grown(target)
        assert isinstance(config, BlockConfig)
        return replace(
            config,
            layers=config.layers[:1] * max(_BLOCK_LAYERS, config.num_layers),
            draft_vocab_size=config.vocab_size,
            markov_rank=max(_MARKOV_RANK, config.markov_rank) if config.markov else 0,
            confidence_inputs=0,
        )

    def _obstacles(self, big: FeatureConfig) -> Iterator[str]:
        small = self.base.config
        if small.selector is not None or small.markov not in (None, "vanilla"):
            yield "it is no DFlash draft, nor DSpark with a vanilla Markov head"
        if small.causal_layers or any(layer.attention.window for layer in small.layers):
            yield "it has sliding windows or causal layers"
        if small.draft_vocab_size != small.vocab_size:
            yield f"its draft_vocab_size={small.draft_vocab_size} is not the target's {small.vocab_size}"
        yield from super()._obstacles(big)

    def _blocks(self) -> dict[str, tuple[Axis, Axis]]:
        small, blocks = self.base.config, super()._blocks()
        markov = same(small.vocab_size), same(small.markov_rank)
        if self.tied:
            (row, columns), [scale, *_] = blocks["norm"], copy_scales(self.config.hidden_size, small.hidden_size)
            blocks["norm"] = row, columns.times(1 / scale)
        return blocks | {f"markov_head.markov_w{i}": markov for i in (1, 2)}
