"""GGUF's blocks of weights: 32 or 256 of a row, each with its scales, as llama.cpp's files store them.

Blocks of 4, 5, 6 and 8 bits stay integers in memory (`BLOCKS`). The integers, scales and offsets give the weights of
`gguf.quants.dequantize` to the bit. Types that are not listed are widened by `ssd.models.gguf` when they are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

import torch

from ssd.errors import UnsupportedModel
from ssd.kernels.codes import Codes, CodeType, Factors, bits_of, fused_codes
from ssd.layers.formats import Use
from ssd.layers.formats.coded import Coded, cut

_CHUNK: Final = 1 << 21  # bytes that are unpacked at a time


class Numbers(NamedTuple):
    """Scales or offsets of blocks: a float16 of each, times integers of its groups if it has several."""

    unit: torch.Tensor  # float16 [rows, blocks, 1]
    integers: torch.Tensor | None = None  # int8 [rows, blocks, groups]

    def widened(self) -> torch.Tensor:
        unit = self.unit.float()
        return (unit if self.integers is None else unit * self.integers.float()).flatten(1)


Parts = tuple[torch.Tensor, Numbers, Numbers | None]  # values, scales, offsets of [rows, blocks, bytes]


@dataclass(frozen=True, kw_only=True)
class Blocks(Coded):
    """One type of blocks: a tensor `weight`, uint8 [rows, bytes of a row].

    Kernels have codes of 8 or 4 bits, so that memory differs from the file's: a weight of 5 or 6 bits takes a byte. A
    scale (or offset) takes four; on a CPU two, or one if it is an integer times a number of its block.
    """

    coarse = True  # what these types are made for: llama.cpp rounds the rows of their products to 8 bits, too

    name: str
    weights: int  # of a block
    num_stored: int  # bytes of a block
    type: CodeType
    group: int  # weights of one scale
    offsets: bool
    unpack: Callable[[torch.Tensor], Parts]

    def shapes(self, rows: int, depth: int) -> dict[str, tuple[int, ...]]:
        if depth % self.weights:
            raise UnsupportedModel(
                f"a weight is stored as {self.name}, in blocks of {self.weights}, but its rows have {depth} elements "
                "by the metadata: download the file again"
            )
        return {"weight": (rows, depth // self.weights * self.num_stored)}

    def share(self, tensor: str, rows: slice, columns: slice) -> tuple[slice, ...]:
        if columns == slice(None):
            return rows, columns
        blocks = cut(columns, self.weights, f"a {self.name} block")
        return rows, slice(blocks.start * self.num_stored, blocks.stop * self.num_stored)

    def codes(self, stored: Mapping[str, torch.Tensor]) -> Codes:
        """On a CPU some rows at a time: what is made on the way from bytes to codes takes several times as much."""
        weight = stored["weight"]
        if weight.device.type != "cpu":
            return self._codes(weight)
        return fused_codes([self._codes(rows) for rows in torch.split(weight, max(1, _CHUNK // weight.shape[1]))])

    def _codes(self, weight: torch.Tensor) -> Codes:
        blocks = weight.reshape(len(weight), -1, self.num_stored)
        values, scales, offsets = self.unpack(blocks)
        numbers = [scales] if offsets is None else [scales, offsets]
        integers = [each.integers.flatten(1) for each in numbers if each.integers is not None]
        units = [each.unit[..., 0] for each in numbers]
        return Codes(
            *(values.flatten(1), scales.widened(), self.type, blocks.shape[1] * self.weights),
            offsets=None if offsets is None else offsets.widened(),
            factors=Factors(torch.stack(integers), torch.stack(units)) if integers else None,
        )

    def num_bytes(self, rows: int, depth: int, dtype: torch.dtype, use: Use) -> int:
        numbers = depth // self.group * (2 if self.offsets else 1)
        return rows * (depth * bits_of(self.type) // 8 + 4 * numbers)


def _number(blocks: torch.Tensor, at: int, integers: torch.Tensor | None = None) -> Numbers:
    """The float16 at a byte of each block."""
    return Numbers(blocks[..., at : at + 2].contiguous().view(torch.float16), integers)


def _fields(stored: torch.Tensor, bits: int, run: int) -> torch.Tensor:
    """Integers of `bits` bits: the lowest bits of `run` bytes, then the next bits of the same bytes, and so on."""
    words = stored.clone(memory_format=torch.contiguous_format).view(torch.int64)  # 8 bytes at a time
    mask = int.from_bytes(bytes([(1 << bits) - 1] * 8))
    runs = words.view(*stored.shape[:2], -1, 1, run // 8)
    return torch.cat([runs >> shift & mask for shift in range(0, 8, bits)], 3).view(torch.uint8).flatten(2)


def _fifth_bits(stored: torch.Tensor) -> torch.Tensor:
    """Bit i % 8 of byte i // 8 for weight i, in its place above four others."""
    numbers = torch.arange(256, device=stored.device)[:, None]
    of_byte = (numbers >> torch.arange(8, device=stored.device) & 1).byte() << 4
    return of_byte.view(torch.int64)[:, 0][stored.int()].view(torch.uint8).flatten(2)


def _k_scales(blocks: torch.Tensor) -> tuple[Numbers, Numbers]:
    """Scales and offsets of 8 groups, each an integer of 6 bits times a float16 of the block.

    Of 12 bytes, four and four hold the integers of the first groups; the others' low bits are in the last four bytes,
    their high bits above the first ones.
    """
    scale, least, low = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = torch.cat((scale & 63, low & 15 | scale >> 2 & 48), 2)
    offsets = torch.cat((least & 63, low >> 4 | least >> 2 & 48), 2)
    least_of_block = _number(blocks, 2, offsets.view(torch.int8))
    return _number(blocks, 0, scales.view(torch.int8)), least_of_block._replace(unit=-least_of_block.unit)


def _q4_0(blocks: torch.Tensor) -> Parts:
    return _fields(blocks[..., 2:], 4, 16), _number(blocks, 0), None


def _q4_1(blocks: torch.Tensor) -> Parts:
    return _fields(blocks[..., 4:], 4, 16), _number(blocks, 0), _number(blocks, 2)


def _q5_0(blocks: torch.Tensor) -> Parts:
    values = _fields(blocks[..., 6:], 4, 16) | _fifth_bits(blocks[..., 2:6])
    return values - 16, _number(blocks, 0), None  # modulo 256: the bits of an int8


def _q5_1(blocks: torch.Tensor) -> Parts:
    values = _fields(blocks[..., 8:], 4, 16) | _fifth_bits(blocks[..., 4:8])
    return values, _number(blocks, 0), _number(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> Parts:
    return blocks[..., 2:], _number(blocks, 0), None


def _q4_k(blocks: torch.Tensor) -> Parts:
    return _fields(blocks[..., 16:], 4, 32), *_k_scales(blocks)


def _q5_k(blocks: torch.Tensor) -> Parts:
    values = _fields(blocks[..., 48:], 4, 32) | _fields(blocks[..., 16:48], 1, 32) << 4
    return values, *_k_scales(blocks)


def _q6_k(blocks: torch.Tensor) -> Parts:
    values = _fields(blocks[..., :128], 4, 64) | _fields(blocks[..., 128:192], 2, 32) << 4
    return values - 32, _number(blocks, 208, blocks[..., 192:208].contiguous().view(torch.int8)), None


BLOCKS: Final = {
    "Q4_0": Blocks(name="Q4_0", weights=32, num_stored=18, type="int4", group=32, offsets=False, unpack=_q4_0),
    "Q4_1": Blocks(name="Q4_1", weights=32, num_stored=20, type="uint4", group=32, offsets=True, unpack=_q4_1),
    "Q5_0": Blocks(name="Q5_0", weights=32, num_stored=22, type="int8", group=32, offsets=False, unpack=_q5_0),
    "Q5_1": Blocks(name="Q5_1", weights=32, num_stored=24, type="int8", group=32, offsets=True, unpack=_q5_1),
    "Q8_0": Blocks(name="Q8_0", weights=32, num_stored=34, type="int8", group=32, offsets=False, unpack=_q8_0),
    "Q4_K": Blocks(name="Q4_K", weights=256, num_stored=144, type="uint4", group=32, offsets=True, unpack=_q4_k),
    "Q5_K": Blocks(name="Q5_K", weights=256, num_stored=176, type="int8", group=32, offsets=True, unpack=_q5_k),
    "Q6_K": Blocks(name="Q6_K", weights=256, num_stored=210, type="int8", group=16, offsets=False, unpack=_q6_k),
}
