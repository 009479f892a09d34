"""Quantised weights as the kernels of a GPU read them.

Codes are stored in words of 32 bits, in blocks of some words of an output. There are two choices of what is multiplied:

* Codes, as bfloat16 numbers, whose sums are scaled: fp8 and int8 with one scale an output, fp4, int4 and fp8 in groups
  without offsets in experts, and int4 where there is no CUDA kernel for weights (`grouped_rows`).
  Part i (a byte, or half of one) of word j is weight i * words + j of the block, so that the parts with one i are a run
  of consecutive weights, and two words are widened at a time (`paired`).
* Weights: types with offsets, 8 bits in groups, and int4. The parts of a word are consecutive weights;
  integers are stored without a sign, and scales as in `GroupNumbers`. A weight is scale * code + offset in float32,
  rounded to the type of x. If that is bfloat16, the scale and the offset of codes of 4 bits are rounded to it before:
  so one instruction makes two weights of their codes.

Outputs come one after the other, or (for CUDA kernels) in strips of sixteen: first the first blocks of all strips, then
the second ones, and so on. So a block of several strips is one piece of memory. Within a block of a strip, after the
first eight words of its first output come those of its second (`few_rows`, `expert_rows`: threads read them from shared
memory without bank conflicts), or codes are in the order in which the lanes of a warp multiply them (`_fragments`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal, NamedTuple

import torch

from ssd.kernels.codes import Codes, CodeType, bits_of

STRIP: Final = 16  # outputs
UNIT: Final = 8  # words of one output, one after the other
_LEAST_SEGMENT: Final = 1024  # of the depth, see `PackedCodes.segment`
_MOST_SEGMENTS: Final = 4
_STRIPS: Final = 2048  # that an H200 multiplies at the same time
GROUP_SIZES: Final = (128, 64, 32, 16)
# Parts of a pair of words of fp4: which bits are those of the first word (others: of the second), and by how many bits
# they are rotated to the left. Then each number is where bfloat16 has its sign (bits 15 and 31), the last bits of its
# exponent and the first one of its mantissa (bits 6 to 8 and 22 to 24). Two parts are in bits that three others leave
# of each word. Eight parts take sixteen instructions and a product each; no arrangement of a single word has four parts
# that are rotations of each other.
SHARED_BITS = 0x0C180C18
FP4_PLACES = (
    *((-1, 0), (-1, 6), (-1, -6), (SHARED_BITS, 4)),
    *((0, 2), (0, -4), (0, -8), (SHARED_BITS, -2)),
)


NumberKind = Literal["float32", "float16", "factors", "zeros"]


class GroupNumbers(NamedTuple):
    """Scales and offsets of groups. For a block of a strip, one after the other:

    * `float32`, `float16`: scales [groups of a block, STRIP], then offsets, if there are any.
    * `factors`: integers of 8 bits [groups, STRIP] of the scales, those of the offsets, and float16 numbers [STRIP]
      that they are multiplied by, likewise (`codes.Factors`).
    * `zeros`: scales in float16, then integers of 8 bits: an offset is minus their product.
    """

    data: torch.Tensor  # uint8 [blocks, strips, bytes]
    kind: NumberKind
    offsets: bool


@dataclass(frozen=True)
class PackedCodes:
    """A quantised weight [columns, depth] in words."""

    words: torch.Tensor  # int32 [columns, width], or [blocks, strips, units, STRIP, UNIT], or see `_fragments`
    scales: torch.Tensor | None  # of codes, see `_scales`
    numbers: GroupNumbers | None  # of weights
    exponents: torch.Tensor | None  # of fp4, int32 [blocks, columns, 2]: bytes, see `_exponents`
    type: CodeType
    dtype: torch.dtype  # of its products
    columns: int
    depth: int
    block: int  # words of a block
    group: int  # weights of one scale
    paired: bool  # see `paired`
    count: torch.Tensor | None = None  # int32 [strips]: of segments that are computed, see `grouped_rows`

    @property
    def parts(self) -> int:
        """Weights of a word."""
        return 32 // bits_of(self.type)

    @property
    def width(self) -> int:
        """Words of an output."""
        return len(self.words) * self.block if self.strips else self.words.shape[1]

    @property
    def strips(self) -> bool:
        return self.words.dim() == 5

    @property
    def parts_of_group(self) -> int:
        """Tiles of a group of codes; 0: a scale is for a whole row."""
        grouped = self.group < self.depth and self.exponents is None and self.numbers is None
        return self.group // self.block if grouped else 0

    @property
    def segment(self) -> int:
        """Of the depth, that is summed up in one order, before segments are added. Where there are few outputs in
        groups and strips, a chain of products that depend on each other would take longer than reading the weight. A
        property of the weight, on every GPU: 2 or 4 where an H200 can compute as many at the same time."""
        segments = _MOST_SEGMENTS if self.strips and self.numbers is not None else 1
        strips, block = -(-self.columns // STRIP), self.block * self.parts
        while segments > 1 and (strips * segments > _STRIPS or self.depth < segments * _LEAST_SEGMENT):
            segments //= 2
        return min(self.depth, -(-self.depth // (block * segments)) * block)


def is_widened(codes: Codes, experts: int = 0) -> bool:
    """Whether weights are multiplied, and not codes, on every GPU. `experts`: whose weight it is, if any."""
    widened = ("int8",) if experts else ("fp8", "int8")
    return codes.type == "uint4" or codes.offsets is not None or (codes.type in widened and codes.scales.shape[1] > 1)


def pack(codes: Codes, dtype: torch.dtype, *, strips: bool = True, weights: bool | None = None) -> PackedCodes:
    """Not `strips`: outputs come one after the other. `weights`: whether weights are multiplied, and not codes; None:
    where they must be."""
    weights = is_widened(codes) if weights is None else weights
    return _packed_weights(codes, dtype, strips) if weights else _packed_codes(codes, dtype, strips)


def _packed_codes(codes: Codes, dtype: torch.dtype, strips: bool) -> PackedCodes:
    """In blocks of 64 words, or of 32: with groups in strips, and where the depth is no multiple of 64 words. Of groups
    of 16: 16 words."""
    grouped = codes.scales.shape[1] > 1
    codes = _regrouped(codes) if grouped else codes
    bits, group = bits_of(codes.type), codes.group
    parts, strips = 32 // bits, strips and (grouped or bits == 8)
    block = 64 if codes.depth % (64 * parts) == 0 else 32
    if grouped:
        block = min(block, group, 32 if strips else 64)
    rows, width = codes.values.shape
    missing, more = -width % (parts * block), -rows % STRIP if strips else 0
    values = torch.nn.functional.pad(codes.values, (0, missing, 0, more), value=8 if codes.type == "int4" else 0)
    words = _words(values.view(rows + more, -1, parts, block), 2, bits)
    pairs = codes.type != "int8" and dtype is torch.bfloat16 and words.is_cuda
    if pairs:
        words = paired(words, codes.type)
    if codes.type == "fp4":
        scales, exponents = _exponents(codes.scales, missing // group)
    else:
        scales, exponents = _scales(codes, missing // group, parts * block // group if strips and grouped else 1), None
    words = in_strips(words, block) if strips else words
    return PackedCodes(words, scales, None, exponents, codes.type, dtype, rows, codes.depth, block, group, pairs)


def _scales(codes: Codes, missing: int, together: int) -> torch.Tensor:
    """Scales [groups, columns], float32. Those of groups in strips are [blocks, columns, groups of a block], which are
    `together`. Those of groups of 4 bits are bfloat16 where that is exact, as of most published weights."""
    if codes.scales.shape[1] == 1:
        return codes.scales.t().contiguous()
    scales = torch.nn.functional.pad(codes.scales, (0, missing))
    if codes.type == "int4" and torch.equal(scales.bfloat16().float(), scales):
        scales = scales.bfloat16()
    return scales.view(len(scales), -1, together).transpose(0, 1).contiguous()


def _packed_weights(codes: Codes, dtype: torch.dtype, strips: bool) -> PackedCodes:
    """In blocks of 256 weights, or of 128."""
    codes, bits = _regrouped(_with_offsets(codes) if bits_of(codes.type) == 4 else codes), bits_of(codes.type)
    (rows, width), parts = codes.values.shape, 32 // bits
    depth = 256 if strips and width % 256 == 0 else 128
    missing, more = -width % depth, -rows % STRIP
    values = codes.values ^ 128 if codes.type == "int8" else codes.values
    values = torch.nn.functional.pad(
        values, (0, missing, 0, more if strips else 0), value=128 if codes.type == "int8" else 0
    )
    words = _fragments(values, bits, depth) if strips else _words(values.view(rows, -1, depth // parts, parts), 3, bits)
    numbers = _group_numbers(codes, (missing // codes.group, more), depth // codes.group)
    count = torch.zeros(words.shape[1], dtype=torch.int32, device=words.device) if strips else None
    return PackedCodes(
        words, None, numbers, None, codes.type, dtype, rows, codes.depth, depth // parts, codes.group, False, count
    )


def _words(values: torch.Tensor, dim: int, bits: int) -> torch.Tensor:
    """Codes along a dimension as the parts of words: [rows, words]."""
    words = values.select(dim, 0).to(torch.int32)
    for i in range(1, 32 // bits):
        words |= values.select(dim, i).to(torch.int32) << (bits * i)
    return words.flatten(1)


def _with_offsets(codes: Codes) -> Codes:
    """Codes of 4 bits without a sign. Offsets that change no weight, but the rounding of a float32 sum, are zero."""
    offsets, factors = torch.zeros_like(codes.scales) if codes.offsets is None else codes.offsets, codes.factors
    if codes.type == "int4":
        offsets, factors = offsets - 8 * codes.scales, None
    small = (offsets != 0) & (offsets.abs() < 2.0**-20 * codes.scales.abs())
    if small.any():
        offsets, factors = offsets.masked_fill(small, 0.0), None
    return replace(codes, type="uint4", offsets=offsets, factors=factors)


def _regrouped(codes: Codes) -> Codes:
    """In groups of a size that kernels have."""
    if codes.group in GROUP_SIZES:
        return codes
    whole = codes.scales.shape[1] == 1
    group = next((each for each in GROUP_SIZES if (codes.depth if whole else codes.group) % each == 0), 0)
    if not group and not whole:
        raise ValueError(f"groups of {codes.group} weights are not supported: they must be 16, 32, 64 or 128")
    group = group or GROUP_SIZES[0]
    padded = torch.nn.functional.pad(codes.values, (0, -codes.values.shape[1] % group))
    times = padded.shape[1] // group if whole else codes.group // group
    scales, offsets = (
        None if each is None else each.repeat_interleave(times, 1) for each in (codes.scales, codes.offsets)
    )
    assert scales is not None
    return replace(codes, values=padded, scales=scales, offsets=offsets, factors=None)


def _group_numbers(codes: Codes, missing: tuple[int, int], of_block: int) -> GroupNumbers:
    """In the smallest kind that has the same numbers. `missing`: groups and rows of padding."""
    blocks = (codes.scales.shape[1] + missing[0]) // of_block

    def records(numbers: torch.Tensor, count: int) -> torch.Tensor:
        """Numbers [rows, n] as bytes [blocks, strips, ...], `count` of each row for a block."""
        padded = torch.nn.functional.pad(numbers, (0, blocks * count - numbers.shape[1], 0, missing[1]))
        return padded.view(-1, STRIP, blocks, count).permute(2, 0, 3, 1).contiguous().flatten(2).view(torch.uint8)

    def is_half(numbers: torch.Tensor) -> bool:
        return bool((numbers.half().float() == numbers).all())

    scales, offsets, factors = codes.scales, codes.offsets, codes.factors
    both = [scales] if offsets is None else [scales, offsets]
    zeros = None if offsets is None else torch.where(scales == 0, 0.0, -offsets / scales).round().clamp(-128, 127)
    kind: NumberKind
    if factors is not None and factors.units.shape[2] == blocks:
        kind, found = "factors", [records(each, of_block) for each in factors.integers]
        found += [records(each, 1) for each in factors.units]
    elif zeros is not None and is_half(scales) and torch.equal(-scales * zeros, both[1]):
        kind, found = "zeros", [records(scales.half(), of_block), records(zeros.to(torch.int8), of_block)]
    elif all(map(is_half, both)):
        kind, found = "float16", [records(each.half(), of_block) for each in both]
    else:
        kind, found = "float32", [records(each, of_block) for each in both]
    return GroupNumbers(torch.cat(found, 2), kind, offsets is not None)


def in_strips(words: torch.Tensor, block: int) -> torch.Tensor:
    """Words of outputs, in strips."""
    return words.view(-1, STRIP, words.shape[1] // block, block // UNIT, UNIT).permute(2, 0, 3, 1, 4).contiguous()


def _fragments(values: torch.Tensor, bits: int, depth: int) -> torch.Tensor:
    """Codes as the tensor cores take them from registers, int32 [blocks, strips, loads, 32 lanes, 4].

    Of each 16 of the depth, lane 4 r + q has weights 2 q, 2 q + 1, then 2 q + 8 and 2 q + 9, of outputs r and r + 8:
    the first two of both outputs, then the others, from the lowest bits on. That is two words of codes of 8 bits. Of 4
    bits, it is the lower half of a word for the first number of each two, and the upper half for the second, and output
    r + 8 comes before r.
    """
    strips, blocks, steps = len(values) // STRIP, values.shape[1] // depth, depth // 16
    order = values.view(strips, 2, 8, blocks, steps, 2, 4, 2).permute(3, 0, 4, 2, 6, 5, 1, 7)
    codes = order.reshape(blocks, strips, steps, 32, 8)
    if bits == 4:
        codes = codes.unflatten(-1, (2, 2, 2)).flip(-2).movedim(-1, -3).flatten(-3)
        codes = codes[..., ::2] | codes[..., 1::2] << 4
    words = codes.contiguous().view(torch.int32).view(blocks, strips, steps * bits // 16, 16 // bits, 32, bits // 4)
    return words.transpose(3, 4).reshape(blocks, strips, steps * bits // 16, 32, 4).contiguous()


def _exponents(scales: torch.Tensor, missing: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Powers of two [rows, groups] as a power for each row, and what numbers of its groups are multiplied with first.

    That is 2^127 for the largest of a row: numbers are made from codes as they are, which divides them by 2^126. Its
    exponent is a byte; the bytes of a block's eight groups are two words.
    """
    exponents = scales.view(torch.int32) >> 23
    top = exponents.amax(1)
    fields = torch.nn.functional.pad((exponents - top[:, None] + 254).clamp_min(0), (0, missing)).to(torch.uint8)
    words = fields.view(torch.int32).view(len(scales), -1, 2).transpose(0, 1).contiguous()
    return ((top - 1).clamp_min(0) << 23).view(torch.float32), words


def paired(words: torch.Tensor, kind: CodeType) -> torch.Tensor:
    """Parts of words j and j + 1 as a GPU widens them with the fewest instructions, two at a time: the first half of
    the parts in one word, the second half in the next; those of word j in the lower 16 bits.

    Integers of 4 bits stay in their order. The first number of fp8 is where bfloat16 has its sign (bit 15), exponent
    and mantissa (bits 4 to 10). The second one is in the other bits: its sign in bit 11, its bits 4 to 6 in bits 12 to
    14, its bits 0 to 3 in bits 0 to 3. For fp4 see `FP4_PLACES`.
    """
    one, other = words.view(len(words), -1, 2).unbind(-1)
    if kind == "fp8":
        made = [_halves(one, i) | (_halves(other, i) << 16) for i in (0, 2)]
    elif kind == "int4":
        made = [(one & 0xFFFF) | (other << 16), ((one >> 16) & 0xFFFF) | (other & -0x10000)]
    else:
        made = [torch.zeros_like(one), torch.zeros_like(one)]
        for i, (first, turn) in enumerate(FP4_PLACES):
            codes = [(word >> (4 * i)) & 15 for word in (one, other)]
            low, high = (((code & 8) << 12) | ((code & 7) << 6) for code in codes)
            numbers = _rotated(low | (high << 16), -turn)
            made = [word | (numbers & bits) for word, bits in zip(made, (first, ~first), strict=True)]
    return torch.stack(made, -1).flatten(1)


def _halves(words: torch.Tensor, part: int) -> torch.Tensor:
    first, second = ((words >> (8 * i)) & 255 for i in (part, part + 1))
    placed = ((first & 128) << 8) | ((first & 127) << 4)
    return placed | ((second & 128) << 4) | ((second & 112) << 8) | (second & 15)


def _rotated(words: torch.Tensor, turn: int) -> torch.Tensor:
    """To the left, by some bits."""
    turn %= 32
    return words if turn == 0 else (words << turn) | ((words >> (32 - turn)) & ((1 << turn) - 1))
