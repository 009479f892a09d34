"""Tensor parallelism for the layers: slices of a rank, all-reduce and all-gather.

Knows nothing of models or algorithms. A group of one does nothing and needs no process group.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ssd.errors import ConfigError


@dataclass(frozen=True)
class TensorParallel:
    """One rank's place in a group of `size`; `group` is a torch.distributed process group (None: the default one)."""

    rank: int = 0
    size: int = 1
    group: Any = None

    def slice(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """This rank's share of a full tensor."""
        return tensor if self.size == 1 else tensor.chunk(self.size, dim=dim)[self.rank]

    def share(self, length: int, what: str) -> int:
        """This rank's share of a length that must divide evenly."""
        if length % self.size:
            raise ConfigError(f"{what} = {length} cannot be split over {self.size} ranks: choose a divisor of it")
        return length // self.size

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        if self.size > 1:
            torch.distributed.all_reduce(tensor, group=self.group)
        return tensor

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """Concatenates the ranks' last dimensions, in order of rank."""
        if self.size == 1:
            return tensor
        parts = [torch.empty_like(tensor) for _ in range(self.size)]
        torch.distributed.all_gather(parts, tensor.contiguous(), group=self.group)
        return torch.cat(parts, dim=-1)
