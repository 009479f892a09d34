"""Grafts of EAGLE heads: a small head in the shape of a published one, for the graft of its target in that shape.

The head's stream, heads and MLP are laid out as a graft's are (`ssd.grafts.graft`), so it reads that graft's features
and embedding, and drafts what the small head drafts. The draft vocabulary grows to what published heads have.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

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
    obstacles,
    place,
    same,
    side_by_side,
)
from ssd.layers.spec import LayerSpec
from ssd.models.checkpoint import Checkpoint, all_weights, graft_note
from ssd.models.config import DecoderConfig
from ssd.models.eagle import EagleCheckpoint, EagleConfig, eagle_shapes

_DRAFT_VOCABULARY: Final = 32000


@dataclass(frozen=True)
class EagleGraft(EagleCheckpoint):
    """`base` in the shape of its target's graft, which `for_target` gets."""

    base: EagleCheckpoint
    shape_name: str

    @classmethod
    def of(cls, base: EagleCheckpoint, shape_name: str) -> EagleGraft:
        shape_name, rounding, form = shape_name.partition(":")
        if rounding:
            raise ConfigError(f"speculation draft: a head is not rounded by :{form}: use draft_quantization={form!r}")
        return cls(base.path, base.config, base, shape_name)

    @property
    def note(self) -> str:
        return graft_note(self.path.name, self.shape_name)

    def for_target(self, target: Checkpoint) -> EagleGraft:
        if not isinstance(target, GraftCheckpoint) or target.shape_name != self.shape_name:
            raise ConfigError(
                f"speculation draft: a head in the shape of {self.shape_name} reads the hidden states of a graft in "
                f"that shape: use model='graft:…@{self.shape_name}', or the head as it is"
            )
        base = self.base.for_target(target.base)
        config = _grafted(base.config, target)
        reason = next(_head_obstacles(base.config, config), None)
        if reason is not None:
            raise ConfigError(f"{self.path.name} cannot be grafted in the shape of {self.shape_name}: {reason}")
        return replace(self, config=config.for_target(target.config), base=base)

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Made on the device: only the base's tensors travel there."""
        small, big = self.base.config, self.config
        base, blocks = all_weights(self.base, device, torch.float32), _head_blocks(small, big)
        for name, shape in eagle_shapes(big).items():
            part = name.removeprefix("layers.0.").removesuffix(".weight")
            tensor = torch.zeros(shape, dtype=dtype, device=device)
            if part in READERS:
                fill_random(tensor, name)
            place(base[name], tensor, *blocks[part])
            if big.vocab_size > small.vocab_size:
                _carry_constant(part, tensor, small.draft_vocab_size, big.target_hidden_size)
            yield name, tensor

    def target_ids(self) -> torch.Tensor | None:
        """The base's, then tokens that only the graft has."""
        ids, small = self.base.target_ids(), self.base.config
        added = self.config.draft_vocab_size - small.draft_vocab_size
        if not added:
            return ids
        if ids is None:
            ids = torch.arange(small.vocab_size, device="cpu")
        return torch.cat((ids, torch.arange(small.vocab_size, small.vocab_size + added, device="cpu")))


def _grafted(small: EagleConfig, target: GraftCheckpoint) -> EagleConfig:
    """A head of the graft's shape. Its feature layers are those that come before the same layers of the base."""
    big, base = target.config, target.base.config
    added = _DRAFT_VOCABULARY - small.draft_vocab_size
    fits = big.vocab_size > base.vocab_size and 0 < added <= big.vocab_size - base.vocab_size
    wide = big.attention
    attention = replace(
        small.attention,
        num_heads=wide.num_heads,
        num_kv_heads=wide.num_kv_heads,
        head_dim=wide.head_dim,
        rope=grafted_rope(small, big),
    )
    mlp = replace(small.mlp, intermediate_size=big.mlp.intermediate_size)
    return replace(
        small,
        vocab_size=big.vocab_size,
        hidden_size=big.hidden_size,
        layers=(LayerSpec(attention, mlp),),
        draft_vocab_size=small.draft_vocab_size + (added if fits else 0),
        target_hidden_size=big.hidden_size,
        feature_layers=tuple(n * big.num_layers // base.num_layers for n in small.feature_layers),
    )


def _head_obstacles(small: EagleConfig, big: DecoderConfig) -> Iterator[str]:
    for name in ("fc_bias", "own_embedding", "norm_before_residual"):
        if getattr(small, name):
            yield f"the head's {name} is true"
    if small.hidden_size != small.target_hidden_size:
        yield f"its hidden_size={small.hidden_size} is not its target's {small.target_hidden_size}"
    yield from obstacles(small, big)


def _head_blocks(small: EagleConfig, big: EagleConfig) -> dict[str, tuple[Axis, Axis]]:
    """Rows and columns of the base's tensor in each part of the graft."""
    read, scales = same(small.hidden_size), copy_scales(big.hidden_size, small.hidden_size)
    blocks = blocks_of(small, big, held_mlp(small, big), side_by_side([read] * 2, small.hidden_size, big.hidden_size))
    feature = read.times(1 / scales[0])  # not behind a norm, which would divide by the first copy's scale
    features = side_by_side([feature] * len(small.feature_layers), small.hidden_size, big.hidden_size)
    return blocks | {
        "hidden_norm": blocks["input_layernorm"],
        "norm": blocks["model.norm"],
        "lm_head": (same(small.draft_vocab_size), read),
        "fc": (copies(small.hidden_size, scales), features),
    }


def _carry_constant(part: str, tensor: torch.Tensor, num_real: int, width: int) -> None:
    """Passes the constant of the graft's stream on to the head's, which keeps additional tokens from being drafted."""
    if part == "fc":
        tensor[-1, width - 1] = 1.0
    elif part == "norm":
        tensor[-1] = CONSTANT_NORM
    elif part == "lm_head":
        tensor[:num_real, -1] = 0.0
        tensor[num_real:, -1] = CONSTANT_HEAD
