"""Integers of 4 or 8 bits, packed in words of 32: compressed-tensors, GPTQ and AWQ, which differ in layout only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, Literal

import torch

from ssd.errors import ConfigError, UnsupportedModel
from ssd.kernels.quantized import Codes, bits_of
from ssd.layers.formats import FLOATS, Use
from ssd.layers.formats.coded import Activations, Coded, codes_of, cut

_INDEX: Final = ("g_idx", "weight_g_idx", "weight_shape")
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)  # where the next integer of a word is, from its lowest bits


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

    def codes_from(self, values: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor | None) -> Codes:
        """Codes of unsigned integers [rows, depth], with scales and zero points [rows, groups]."""
        middle = 1 << (bits_of(self.name) - 1)
        signed = values if self.name == "int4" else values ^ middle  # int8: two's complement
        return codes_of(signed, scales, None if zeros is None else zeros.short() - middle, self.name, self.group)

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        """At most: zero points in the middle of the range take no memory."""
        numbers = 2 if {"weight_zero_point", "qzeros"} & self.names else 1
        return rows * (depth * bits_of(self.name) // 8 + 4 * numbers * self.groups(depth))


@dataclass(frozen=True)
class PackedRows(Packed):
    """compressed-tensors `pack-quantized`: words along the inputs."""

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        groups = self.groups(depth)
        shapes: dict[str, tuple[int, ...]] = {
            "weight_packed": (rows, self.words(depth)),
            "weight_scale": (rows, groups),
        }
        if "weight_zero_point" in self.names:
            shapes["weight_zero_point"] = (self.words(rows), groups)
        if "weight_shape" in self.names:
            shapes["weight_shape"] = (2,)
        if "weight_g_idx" in self.names:
            shapes["weight_g_idx"] = (depth,)
        if self.activations is not None and self.activations.static:
            shapes["input_scale"] = (1,)
        return shapes

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        if tensor == "weight_packed":
            return rows, self.cut_words(columns)
        if tensor == "weight_scale":
            return rows, self.cut_groups(columns)
        if tensor == "weight_zero_point":
            return self.cut_words(rows), self.cut_groups(columns)
        return ()

    def order(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        depth = stored["weight_packed"].shape[1] * self.per_word
        return _order(stored.get("weight_g_idx"), depth, self.group, "weight_g_idx")

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        values, zeros = self.unpacked(stored["weight_packed"]), stored.get("weight_zero_point")
        _check_shape(stored.get("weight_shape"), values)
        zeros = None if zeros is None else self.unpacked(zeros.t()).t()
        return self.codes_from(_in_order(values, self.order(stored)), stored["weight_scale"], zeros)


@dataclass(frozen=True)
class GPTQ(Packed):
    """Words along the inputs, of transposed weights. Zero points are stored minus `zero_bias`."""

    zero_bias: int = 1

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        groups = self.groups(depth)
        shapes: dict[str, tuple[int, ...]] = {
            "qweight": (self.words(depth), rows),
            "qzeros": (groups, self.words(rows)),
            "scales": (groups, rows),
        }
        return shapes | ({"g_idx": (depth,)} if "g_idx" in self.names else {})

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        if tensor == "qweight":
            return self.cut_words(columns), rows
        if tensor == "g_idx":
            return ()
        return self.cut_groups(columns), rows if tensor == "scales" else self.cut_words(rows)

    def order(self, stored: Mapping[str, torch.Tensor]) -> torch.Tensor | None:
        return _order(stored.get("g_idx"), len(stored["qweight"]) * self.per_word, self.group, "g_idx")

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        values = self.unpacked(stored["qweight"].t())
        zeros = self.unpacked(stored["qzeros"]).t().short() + self.zero_bias
        return self.codes_from(_in_order(values, self.order(stored)), stored["scales"].t(), zeros)


@dataclass(frozen=True)
class AWQ(Packed):
    """Words along the outputs, of transposed weights, in an order of their own (`version: gemm`)."""

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        groups = self.groups(depth)
        return {"qweight": (depth, self.words(rows)), "qzeros": (groups, self.words(rows)), "scales": (groups, rows)}

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        inputs = columns if tensor == "qweight" else self.cut_groups(columns)
        return inputs, rows if tensor == "scales" else self.cut_words(rows)

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        values, zeros = (self._transposed(stored[name]) for name in ("qweight", "qzeros"))
        return self.codes_from(values, stored["scales"].t(), zeros)

    def _transposed(self, words: torch.Tensor) -> torch.Tensor:
        integers = self.unpacked(words).view(len(words), -1, len(_AWQ_ORDER))
        return integers[:, :, _AWQ_ORDER].flatten(1).t()


def _check_shape(stated: torch.Tensor | None, values: torch.Tensor) -> None:
    """Of the whole layer, of which a rank has a part."""
    if stated is None:
        return
    if any(size < part or size % part for size, part in zip(stated.tolist(), values.shape, strict=True)):
        raise UnsupportedModel(f"weight_shape is {stated.tolist()}, but {list(values.shape)} weights are stored")


def _in_order(values: torch.Tensor, order: torch.Tensor | None) -> torch.Tensor:
    return values if order is None else values[:, order]


def _order(groups: torch.Tensor | None, depth: int, size: int | None, name: str) -> torch.Tensor | None:
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
