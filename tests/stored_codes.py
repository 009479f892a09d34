"""Random codes of quantised checkpoints, for tests of kernels."""

from __future__ import annotations

from dataclasses import replace

import torch

from ssd.kernels.codes import Codes, CodeType, Factors, bits_of, dequantize
from ssd.kernels.triton.packing import NumberKind


def some_codes(kind: CodeType, rows: int, depth: int, group: int, *, offsets: bool, device: torch.device) -> Codes:
    """Random codes of a checkpoint: all values occur, scales (and offsets) differ from group to group. Weights are
    below 2, so that products fit into float16."""
    torch.manual_seed(depth + group)
    values = torch.randint(0, 1 << bits_of(kind), (rows, depth), dtype=torch.uint8, device=device)
    if kind == "fp8":
        values[values & 0x7F == 0x7F] = 0  # not a number
    # Multiples of 2^-12: products with codes are exact, whether or not an offset is added in the same instruction.
    scales = ((torch.rand(rows, depth // group, device=device) + 0.5) * 4096).round() / 4096
    if kind == "fp4":
        scales = torch.exp2(torch.randint(-3, 3, scales.shape, device=device))  # powers of two
    shift = (torch.randn(rows, depth // group, device=device) * 4096).round() / 4096 if offsets else None
    unit = 2.0 ** -bits_of(kind)
    return Codes(values, scales * unit, kind, depth, None if shift is None else shift * unit)


CODES: list[tuple[CodeType, int, bool]] = [  # type, group (0: a whole row), offsets
    ("fp8", 0, False),
    ("fp8", 128, False),
    ("fp4", 32, False),
    ("int8", 0, False),
    ("int8", 16, False),
    ("int8", 32, True),
    ("int4", 32, False),
    ("int4", 128, False),
    ("int4", 0, False),
    ("uint4", 32, True),
    ("uint4", 64, True),
]


def numbered_codes(
    code: CodeType, rows: int, depth: int, group: int, offset: bool, kind: NumberKind, device: torch.device
) -> Codes:
    """Random codes with scales and offsets that a GPU stores so."""
    codes = some_codes(code, rows, depth, group, offsets=offset, device=device)
    scales, offsets, factors = codes.scales, codes.offsets, None
    if kind in ("float16", "zeros"):
        scales = scales.half().float()
        offsets = None if offsets is None else offsets.half().float()
    if kind == "zeros":
        offsets = -scales * torch.randint(-20, 21, scales.shape, device=device)
    if kind == "factors":
        count, blocks = 1 if offsets is None else 2, codes.values.shape[1] // 256
        integers = torch.randint(0 if count == 2 else -64, 64, (count, *scales.shape), dtype=torch.int8, device=device)
        units = (torch.rand(count, len(scales), blocks, device=device) * 2**-10).half()
        units[1:] *= -1
        scales, *others = units.float().repeat_interleave(scales.shape[1] // blocks, 2) * integers.float()
        offsets, factors = others[0] if others else None, Factors(integers, units)
    return replace(codes, scales=scales, offsets=offsets, factors=factors)


def multiplied_weights(codes: Codes) -> torch.Tensor:
    """The bfloat16 weights that a GPU makes of codes in groups (`packing`)."""
    if bits_of(codes.type) == 8:
        return dequantize(codes, torch.bfloat16)
    offsets = torch.zeros_like(codes.scales) if codes.offsets is None else codes.offsets
    offsets = offsets - 8 * codes.scales if codes.type == "int4" else offsets
    scales, offsets = codes.scales.bfloat16().float(), offsets.bfloat16().float()
    wide = codes.values.view(len(scales), -1, codes.group).float() * scales[:, :, None] + offsets[:, :, None]
    return wide.flatten(1)[:, : codes.depth].bfloat16()


NUMBERS: list[tuple[CodeType, int, bool, NumberKind, int]] = [  # type, group, offsets, numbers, depth
    ("uint4", 32, True, "factors", 1024),  # Q4_K
    ("int8", 16, False, "factors", 768),  # Q6_K
    ("int8", 32, True, "factors", 512),  # Q5_K
    ("int8", 32, False, "float16", 640),  # Q5_0, Q8_0
    ("uint4", 32, True, "float16", 320),  # Q4_1; the last block is not whole
    ("int8", 32, True, "float16", 256),  # Q5_1
    ("int4", 128, True, "zeros", 1280),  # AWQ, GPTQ
    ("int4", 128, True, "float32", 512),
    ("int8", 128, True, "zeros", 384),
    ("fp8", 128, False, "float32", 1152),  # blocks of 128 x 128
]
