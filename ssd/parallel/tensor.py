"""Tensor parallelism for the layers: a rank's share of a weight, and sums and gathers over the ranks.

Knows nothing of models, processes or algorithms. A single rank has no group, and these are no-ops.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ssd.kernels.device import kernels

MESSAGE_BYTES = 4 << 20  # bytes that NVLink moves in the latency of one NCCL call, about 10 us (not measured)


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place among `size` ranks; `group` is a backend of torch.distributed (gloo or NCCL)."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def share(self, length: int, unit: int = 1) -> slice:
        """This rank's part of a dimension of whole units; ranks share a unit where there are fewer units than ranks."""
        units = length // unit
        each = max(1, units // self.size)
        first = self.rank * units // self.size
        return slice(first * unit, (first + each) * unit)

    def sum(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Adds the partial sums (float32) of all ranks in order of rank, and rounds once.

        An all-reduce would add in an order that depends on the size of the tensor, and so on the batch.
        """
        if self.group is None:
            return partial.to(dtype)
        if partial.numel() % self.size == 0 and self._saved_by_shares(partial, dtype) >= MESSAGE_BYTES:
            return self._sum_by_shares(partial, dtype)
        parts = partial.new_empty(self.size * partial.numel())
        self.group._allgather_base(parts, partial.flatten()).wait()
        return self._added(parts, dtype).view_as(partial)

    def _sum_by_shares(self, partial: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The same bits in two messages with fewer bytes: each rank adds a share of the elements, and all gather the
        rounded shares."""
        parts = partial.new_empty(partial.numel())
        self.group.alltoall_base(parts, partial.flatten(), [], []).wait()
        total = partial.new_empty(partial.numel(), dtype=dtype)
        self.group._allgather_base(total, self._added(parts, dtype)).wait()
        return total.view_as(partial)

    def _saved_by_shares(self, partial: torch.Tensor, dtype: torch.dtype) -> int:
        """Bytes that each rank need not receive."""
        share = partial.numel() // self.size
        return (self.size - 1) * (partial.nbytes - share * (partial.itemsize + dtype.itemsize))

    def _added(self, parts: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The ranks' parts, added in order of rank and rounded. May overwrite the first."""
        add_parts = kernels(parts.device).add_parts
        if add_parts is not None:
            return add_parts(parts, self.size, dtype)
        total, *others = parts.chunk(self.size)
        for other in others:
            total += other
        return total.to(dtype)

    def gather(self, part: torch.Tensor, length: int) -> torch.Tensor:
        """On rank 0: the ranks' last dimensions side by side, the first `length` columns. Elsewhere its own part."""
        if self.group is None:
            return part
        if self.rank:
            self.group.gather([], [part.contiguous()], _to_first()).wait()
            return part
        parts = [torch.empty_like(part) for _ in range(self.size)]
        self.group.gather([parts], [part.contiguous()], _to_first()).wait()
        width = part.shape[-1]
        used = [min(width, max(0, length - rank * width)) for rank in range(self.size)]
        return torch.cat([each[..., :count] for each, count in zip(parts, used, strict=True)], dim=-1)

    def broadcast(self, tensor: torch.Tensor) -> None:
        """Overwrites a tensor with that of rank 0."""
        if self.group is not None:
            self.group.broadcast(tensor, 0).wait()


def _to_first() -> Any:
    from torch.distributed import GatherOptions

    options = GatherOptions()
    options.rootRank = 0
    return options
