"""Integers of 4 or 8 bits in words of 32: what compressed-tensors, GPTQ and AWQ share. They differ in layout."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.codes import Codes, bits_of
from ssd.layers.formats import FLOATS, Use
from ssd.layers.formats.coded import Activations, Coded, codes_of, cut

_INDEX: Final = ("g_idx", "weight_g_idx", "weight_shape")


@dataclass(frozen=True)
class Packed(Coded):
    """Integers, with a scale (and perhaps a zero point) for each `group` weights of an output channel.

    `group`: None for a whole channel. `names`: the tensors that the layer is stored as, some of which are optional.
    """

    name: Literal["int4", "int8"] = field()
    group: int | None
    names: frozenset[str]
    activations: Activations | None = None

    @property
    def per_word(self) -> int:
        """Integers of a word."""
        return 32 // bits_of(self.name)

    def types(self, tensor: str) -> tuple[torch.dtype, ...]:
        if tensor in _INDEX:
            return torch.int32, torch.int64
        return FLOATS if "scale" in tensor else (torch.int32,)

    def groups(self, depth: int) -> int:
        return 1 if self.group is None else -(-depth // self.group)

    def words(self, length: int) -> int:
        """Words that hold so many integers."""
        if length % self.per_word:
            raise UnsupportedModel(
                f"quantization_config: a layer has {length} inputs or outputs, which words of {self.per_word} "
                f"{self.name} do not divide"
            )
        return length // self.per_word

    def cut_groups(self, columns: slice) -> slice:
        return slice(None) if self.group is None else cut(columns, self.group, "groups")

    def cut_words(self, part: slice) -> slice:
        return cut(part, self.per_word, "words")

    def unpacked(self, words: torch.Tensor) -> torch.Tensor:
        """int32 [n, words] -> uint8 [n, integers]: unsigned, those in the lowest bits first."""
        integers = words.contiguous().view(torch.uint8)
        return integers if self.per_word == 4 else torch.stack((integers & 15, integers >> 4), 2).flatten(1)

    def words_of(self, integers: torch.Tensor) -> torch.Tensor:
        """The inverse of `unpacked`."""
        packed = integers if self.per_word == 4 else integers[:, ::2] | integers[:, 1::2] << 4
        return packed.contiguous().view(torch.int32)

    def codes_from(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Codes:
        """Codes of unsigned integers [rows, depth], with scales and zero points [rows, groups]."""
        middle = 1 << (bits_of(self.name) - 1)
        signed = values if self.name == "int4" else values ^ middle  # int8: two's complement
        return codes_of(signed, scales, None if zeros is None else zeros.short() - middle, self.name, self.group)

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        """At most: zero points in the middle of the range take no memory."""
        numbers = 2 if {"weight_zero_point", "qzeros"} & self.names else 1
        return rows * (depth * bits_of(self.name) // 8 + 4 * numbers * self.groups(depth))


def rounded_to_four_bits(
    weight: torch.Tensor, group: int, *, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A float weight as integers from 0 to 15 (uint8 [rows, depth]), with scales (float16) and zero points (uint8)
    [rows, groups]: (integer - zero point) * scale. Zeros stay zeros.

    The range of a group, from its least to its largest number and with zero in it, has 15 steps; `symmetric`: the same
    on both sides of zero, whose integer is 8 then.
    """
    groups = weight.float().view(len(weight), -1, group)
    low, high = groups.amin(2).clamp_max(0), groups.amax(2).clamp_min(0)
    span = 2 * torch.maximum(-low, high) if symmetric else high - low
    scales = (span / 15).half()
    scales = torch.where(scales == 0, 1.0, scales)
    zeros = torch.full_like(low, 8.0) if symmetric else (-low / scales.float()).round().clamp(0, 15)
    steps = (groups / scales.float()[:, :, None]).round()
    integers = (steps + zeros[:, :, None]).clamp(0, 15).to(torch.uint8)
    return integers.flatten(1), scales, zeros.to(torch.uint8)


def in_order(values: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return values if order is None else values[:, order]


def act_order(groups: torch.Tensor | None, depth: int, size: int | None, name: str) -> torch.Tensor | None:
    """The inputs, sorted by group, of a weight whose groups are no neighbours (GPTQ's act-order); None if they are.

    `groups`: the group of each input of the whole layer, which may have more inputs than this rank (`depth`).
    """
    if groups is None:
        return None
    groups, count = groups.long(), len(groups)
    size = size or count
    usual = torch.arange(count, device=groups.device) // size
    if torch.equal(groups, usual):
        return None
    if count != depth:
        raise ConfigError(
            "tensor_parallel_size: the inputs of a layer with act-order (desc_act) cannot be split: use "
            "tensor_parallel_size=1, or a checkpoint without act-order"
        )
    order = torch.argsort(groups, stable=True)
    if not torch.equal(groups[order], usual):
        raise UnsupportedModel(
            f"{name}: expected groups 0 to {int(usual[-1])} with {size} inputs each, as group_size says; download the "
            "checkpoint again"
        )
    return order
