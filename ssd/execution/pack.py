"""From a `Batch` of plain lists to the integers that the kernels read."""

from __future__ import annotations

import itertools

import numpy as np
import torch

from ssd.core import Batch
from ssd.kernels.ops import DeviceBatch


def block_table_array(tables: list[list[int]]) -> np.ndarray:
    """Ragged block tables as one rectangle."""
    out = np.zeros((len(tables), max(map(len, tables))), dtype=np.int32)
    for row, table in zip(out, tables, strict=True):
        row[: len(table)] = table
    return out


def make_tiles(query_start: list[int], tile_tokens: int) -> tuple[list[int], list[int]]:
    """Cuts every sequence's queries into attention tiles: for each its sequence, and its first query token there."""
    sequences: list[int] = []
    firsts: list[int] = []
    for s, (start, stop) in enumerate(itertools.pairwise(query_start)):
        for first in range(0, stop - start, tile_tokens):
            sequences.append(s)
            firsts.append(first)
    return sequences, firsts


def to_device(batch: Batch, device: torch.device, *, tile_tokens: int, split_kv: bool) -> DeviceBatch:
    def tensor(values: object, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return DeviceBatch(
        token_ids=tensor(batch.token_ids),
        positions=tensor(batch.positions),
        slots=tensor(batch.slots),
        query_start=tensor(batch.query_start),
        context_len=tensor(batch.context_len),
        block_tables=torch.from_numpy(block_table_array(batch.block_tables)).to(device),
        tiles=tensor(make_tiles(batch.query_start, tile_tokens)),
        logit_rows=None if len(batch.logit_rows) == batch.num_tokens else tensor(batch.logit_rows, torch.int64),
        split_kv=split_kv,
    )
