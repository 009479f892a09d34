"""Forward passes over the rows of several draft runs, each at its own depth."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch

from ssd.kernels.ops import Branches, DeviceBatch
from ssd.models.decoder import Decoder, KVCache

_SIZES = (4, 8, 12, 16, 24, 32, 48, 64)  # rows of a pass, padded: each has recordings; more rows are a multiple of 64


class JointPass:
    """Joins batches of runs over one KV cache. `tables`: the block tables of all engines.

    A row is the newest token of a branch, as in `DraftBuffers.row_batch`. A token that is read is a branch of depth 0,
    whose slot is in the block of its position. Every size of a pass has inputs at fixed addresses.
    """

    def __init__(self, decoder: Decoder, kv: KVCache, tables: torch.Tensor) -> None:
        self._decoder, self._kv, self._tables = decoder, kv, tables
        self._inputs: dict[int, _Inputs] = {}  # by size

    def __call__(self, batches: Seq[DeviceBatch]) -> list[torch.Tensor]:
        """The logits of each batch, in one forward pass."""
        if len(batches) == 1:
            return [self._decoder(batches[0], self._kv)]
        counts = [len(each.token_ids) for each in batches]
        size = padded(sum(counts))
        if size not in self._inputs:
            self._inputs[size] = _Inputs(size, self._tables)
        logits = self._decoder(self._inputs[size].fill(batches), self._kv)
        own = torch.split(logits[: sum(counts)], counts)
        return [
            rows if each.logit_rows is None else rows[each.logit_rows] for rows, each in zip(own, batches, strict=True)
        ]


def padded(rows: int) -> int:
    return next((size for size in _SIZES if size >= rows), -(-rows // _SIZES[-1]) * _SIZES[-1])


class _Inputs:
    """The tensors of a pass of one size. There is room for as many sequences as rows."""

    def __init__(self, size: int, tables: torch.Tensor) -> None:
        def ints(count: int) -> torch.Tensor:
            return torch.zeros(count, dtype=torch.int32, device=tables.device)

        self.tokens, self.positions, self.slots, self.depths, self.rows = (ints(size) for _ in range(5))
        self.start = ints(size + 1)
        self._tables, self._size = tables, size
        self._batch = DeviceBatch(
            token_ids=self.tokens,
            positions=self.positions,
            slot_mapping=self.slots,
            query_start=self.start,
            context_len=self.positions,  # not used for branches
            logit_rows=None,
            tiles=ints(0).view(2, 0),  # not used on a CPU
            prefill_tiles=None,
            branches=Branches(0, 1, self.depths),
            block_tables=tables[:, 1:],
            table_rows=self.rows,
        )

    def fill(self, batches: Seq[DeviceBatch]) -> DeviceBatch:
        first, sequence = 0, 0
        for each in batches:
            end, last = first + len(each.token_ids), sequence + len(each.table_rows)
            self.tokens[first:end] = each.token_ids
            self.positions[first:end] = each.positions
            self.slots[first:end] = each.slot_mapping
            self.depths[first:end] = 0 if each.branches is None else each.branches.depth
            torch.add(each.table_rows, self._first_row(each), out=self.rows[sequence:last])
            torch.add(each.query_start[1:], first, out=self.start[sequence + 1 : last + 1])
            first, sequence = end, last
        self.tokens[first:], self.positions[first:], self.slots[first:] = 0, 0, -1
        self.start[sequence + 1 :] = self._size  # padding is one more sequence, others are empty
        return self._batch.again()

    def _first_row(self, batch: DeviceBatch) -> int:
        """Where the block tables of this batch begin among those of all engines."""
        tables = self._tables
        return (batch.block_tables.data_ptr() - tables.data_ptr()) // (tables.stride(0) * tables.element_size())
