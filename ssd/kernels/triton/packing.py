"""Quantised weights as the kernels of a GPU read them.

Codes are stored in words of 32 bits, in blocks of some words of an output: part i (a byte, or half of one) of word j is
weight i * words + j of the block. So the parts with one i are a run of consecutive weights, widened two at a time.

Outputs come one after the other, or (for `few_rows` and `expert_rows`) in strips of sixteen: first the first blocks of
all strips, then the second ones, and so on; within a block of a strip, after the first eight words of its first output
come those of its second. So a block of several strips is one piece of memory, and threads read its words from shared
memory without bank conflicts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ssd.kernels.codes import Codes, CodeType, bits_of, dequantize

STRIP = 16  # outputs
UNIT = 8  # words of one output, one after the other
_PAIRED = ("fp8", "fp4", "int4", "uint4")  # codes that are stored in pairs
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


@dataclass(frozen=True)
class PackedCodes:
    """A quantised weight [columns, depth] in words."""

    words: torch.Tensor  # int32 [columns, width], or [blocks, strips, units, STRIP, UNIT]
    scales: torch.Tensor  # float32 [groups, columns]; in strips (but fp4) [blocks, strips, groups of a block, STRIP]
    offsets: torch.Tensor | None  # float32 [groups, columns]
    exponents: torch.Tensor | None  # of fp4, int32 [blocks, columns, 2]: bytes, see `_exponents`
    type: CodeType
    dtype: torch.dtype  # of its products
    columns: int
    depth: int
    block: int  # words of a block
    group: int  # weights of one scale
    exact: bool  # products are row-invariant
    paired: bool  # see `paired`

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
        """Tiles of a group; 0: a scale is for a whole row."""
        grouped = self.group < self.depth and self.exponents is None
        return self.group // self.block if grouped or self.offsets is not None else 0

    def scales_of(self, index: torch.Tensor) -> torch.Tensor:
        """Scales [len(index), groups] of some outputs."""
        if self.strips and self.exponents is None:
            return self.scales[:, index // STRIP, :, index % STRIP].flatten(1)
        return self.scales.t()[index]


def pack(codes: Codes, dtype: torch.dtype, *, exact: bool = True, strips: bool = True) -> PackedCodes:
    """In blocks of 64 words, or of fewer where the depth or the groups are no multiple of that.

    Not `strips`: outputs come one after the other.
    """
    bits = bits_of(codes.type)
    parts, group = 32 // bits, codes.group
    block = 64 if codes.depth % (64 * parts) == 0 else 32
    grouped = codes.scales.shape[1] > 1 or codes.offsets is not None
    if grouped:
        block = min(block, group)
        if group % block or parts * block % group:
            raise ValueError(f"groups of {group} weights are not supported: they must be 16, 32, 64 or 128")
    rows, width = codes.values.shape
    fours = codes.type == "int4" and codes.offsets is None and parts * block % (4 * group) == 0  # groups of a block
    strips = strips and exact and (fours or codes.type == "fp4" if grouped else bits == 8)
    missing, more = -width % (parts * block), -rows % STRIP if strips else 0
    values = torch.nn.functional.pad(codes.values, (0, missing, 0, more), value=8 if codes.type == "int4" else 0)
    values = values.view(rows + more, -1, parts, block)
    words = values[:, :, 0].to(torch.int32)
    for i in range(1, parts):
        words |= values[:, :, i].to(torch.int32) << (bits * i)
    pairs = codes.type in _PAIRED and dtype is torch.bfloat16 and words.is_cuda
    words = words.flatten(1)
    if pairs:
        words = paired(words, codes.type)

    def columns(numbers: torch.Tensor) -> torch.Tensor:
        around = (0, missing // group if grouped else 0, 0, more)
        numbers = torch.nn.functional.pad(numbers, around)
        if strips:
            of_block = parts * block // group if grouped else 1
            return numbers.view(-1, STRIP, numbers.shape[1] // of_block, of_block).permute(2, 0, 3, 1).contiguous()
        return numbers.t().contiguous()

    scales, exponents = codes.scales, None
    if codes.type == "fp4":
        scales, exponents = _exponents(scales, missing // group)
    return PackedCodes(
        in_strips(words, block) if strips else words,
        columns(scales) if exponents is None else scales[None],
        None if codes.offsets is None else columns(codes.offsets),
        exponents,
        codes.type,
        dtype,
        *(rows, codes.depth, block, group, exact, pairs),
    )


def in_strips(words: torch.Tensor, block: int) -> torch.Tensor:
    """Words of outputs, in strips."""
    return words.view(-1, STRIP, words.shape[1] // block, block // UNIT, UNIT).permute(2, 0, 3, 1, 4).contiguous()


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
    elif kind == "fp4":
        made = [torch.zeros_like(one), torch.zeros_like(one)]
        for i, (first, turn) in enumerate(FP4_PLACES):
            codes = [(word >> (4 * i)) & 15 for word in (one, other)]
            low, high = (((code & 8) << 12) | ((code & 7) << 6) for code in codes)
            numbers = _rotated(low | (high << 16), -turn)
            made = [word | (numbers & bits) for word, bits in zip(made, (first, ~first), strict=True)]
    else:
        made = [(one & 0xFFFF) | (other << 16), ((one >> 16) & 0xFFFF) | (other & -0x10000)]
    return torch.stack(made, -1).flatten(1)


def _halves(words: torch.Tensor, part: int) -> torch.Tensor:
    first, second = ((words >> (8 * i)) & 255 for i in (part, part + 1))
    placed = ((first & 128) << 8) | ((first & 127) << 4)
    return placed | ((second & 128) << 4) | ((second & 112) << 8) | (second & 15)


def _rotated(words: torch.Tensor, turn: int) -> torch.Tensor:
    """To the left, by some bits."""
    turn %= 32
    return words if turn == 0 else (words << turn) | ((words >> (32 - turn)) & ((1 << turn) - 1))


def _unpaired(words: torch.Tensor, kind: CodeType) -> torch.Tensor:
    """What `paired` was made from."""
    if kind not in ("fp8", "fp4"):
        return paired(words, kind)
    low, high = words.view(len(words), -1, 2).unbind(-1)
    if kind == "fp4":
        made = [torch.zeros_like(low), torch.zeros_like(low)]
        for i, (first, turn) in enumerate(FP4_PLACES):
            numbers = _rotated((low & first) | (high & ~first), turn)
            made = [
                word | (((numbers >> (at + 12)) & 8 | (numbers >> (at + 6)) & 7) << (4 * i))
                for word, at in zip(made, (0, 16), strict=True)
            ]
        return torch.stack(made, -1).flatten(1)

    def parts(half: torch.Tensor) -> torch.Tensor:
        """Their sixteen bits."""
        first = ((half >> 8) & 128) | ((half >> 4) & 127)
        second = ((half >> 4) & 128) | ((half >> 8) & 112) | (half & 15)
        return first | (second << 8)

    both = [parts(low >> shift & 0xFFFF) | parts(high >> shift & 0xFFFF) << 16 for shift in (0, 16)]
    return torch.stack(both, -1).flatten(1)


def packed_rows(weight: PackedCodes, index: torch.Tensor) -> torch.Tensor:
    """Rows of a weight, widened."""
    bits, count = bits_of(weight.type), len(index)
    shift = torch.arange(0, 32, bits, dtype=torch.int32, device=index.device)
    words = weight.words[:, index // STRIP, :, index % STRIP].flatten(1) if weight.strips else weight.words[index]
    if weight.paired:
        words = _unpaired(words, weight.type)
    values = (words.view(count, -1, 1, weight.block) >> shift[:, None]) & ((1 << bits) - 1)
    scales = weight.scales_of(index)
    if weight.exponents is not None:
        fields = weight.exponents[:, index].transpose(0, 1).contiguous().view(torch.uint8).flatten(1).float()
        scales = (scales * torch.exp2(fields - 253))[:, : weight.depth // weight.group]
    values = values.to(torch.uint8).flatten(1)[:, : scales.shape[1] * weight.group]
    offsets = None if weight.offsets is None else weight.offsets.t()[index]
    return dequantize(Codes(values, scales, weight.type, weight.depth, offsets), weight.dtype)
