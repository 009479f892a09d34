"""Random codes of quantised checkpoints, for tests of kernels."""

from __future__ import annotations

import torch

from ssd.kernels.codes import Codes, CodeType, bits_of


def some_codes(kind: CodeType, rows: int, depth: int, group: int, *, offsets: bool, device: torch.device) -> Codes:
    """Random codes of a checkpoint: all values occur, scales (and offsets) differ from group to group. Weights are
    below 2, so that products fit into float16."""
    torch.manual_seed(depth + group)
    values = torch.randint(0, 1 << bits_of(kind), (rows, depth), dtype=torch.uint8, device=device)
    if kind == "fp8":
        values[values & 0x7F == 0x7F] = 0  # not a number
    scales = torch.rand(rows, depth // group, device=device) + 0.5
    if kind == "fp4":
        scales = torch.exp2(torch.randint(-3, 3, scales.shape, device=device))  # powers of two
    shift = torch.randn(rows, depth // group, device=device) if offsets else None
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
