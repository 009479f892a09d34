"""A `DeviceBatch` from plain lists, for tests of kernels."""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq

import torch

from ssd.kernels.ops import Branches, DeviceBatch


def make_device_batch(
    positions: Seq[int],
    slot_mapping: Seq[int],
    query_start: Seq[int],
    context_len: Seq[int],
    tables: Seq[Seq[int]],
    *,
    tile_tokens: int,
    device: torch.device,
    prefill: bool = False,
    branches: Branches | None = None,
) -> DeviceBatch:
    """Block tables in the order of the sequences."""

    def tensor(values: object) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    tiles = [
        (sequence, first)
        for sequence, (start, stop) in enumerate(itertools.pairwise(query_start))
        for first in range(0, stop - start, tile_tokens)
    ]
    width = max(map(len, tables))
    return DeviceBatch(
        token_ids=tensor([0] * len(positions)),
        positions=tensor(positions),
        slot_mapping=tensor(slot_mapping),
        query_start=tensor(query_start),
        context_len=tensor(context_len),
        block_tables=tensor([[*table, *[0] * (width - len(table))] for table in tables]),
        tiles=tensor([] if prefill else tiles).view(-1, 2).t().contiguous(),
        prefill_tiles=tensor(tiles).t().contiguous() if prefill else None,
        logit_rows=None,
        table_rows=tensor(range(len(tables))),
        branches=branches,
    )


def paged_batch(
    sequences: Seq[tuple[int, int]], block_size: int, *, tile_tokens: int, device: torch.device, prefill: bool = False
) -> tuple[DeviceBatch, int]:
    """Sequences of (tokens before, query tokens), each in blocks of its own, the last one first; how many blocks."""
    starts, lengths, positions, slots, used = [0], [], [], [], 0
    tables: list[list[int]] = []
    for before, count in sequences:
        blocks = -(-(before + count) // block_size)
        tables.append(list(reversed(range(used, used + blocks))))
        positions += range(before, before + count)
        slots += [tables[-1][at // block_size] * block_size + at % block_size for at in range(before, before + count)]
        starts.append(starts[-1] + count)
        lengths.append(before + count)
        used += blocks
    batch = make_device_batch(
        positions, slots, starts, lengths, tables, tile_tokens=tile_tokens, device=device, prefill=prefill
    )
    return batch, used
