"""The environment variables by which torchrun tells a process its rank. Knows nothing of what ranks compute."""

from __future__ import annotations

import os
from dataclasses import dataclass

from ssd.errors import ConfigError

_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Launch:
    """A process's place among those that were started together, on this host and on others."""

    rank: int
    size: int
    local_rank: int  # among those of this host
    local_size: int
    host: str  # name or address of rank 0's host

    @classmethod
    def found(cls) -> Launch | None:
        """None for a process that torchrun has not started, or has started as the only one."""
        values = [os.environ.get(name, "") for name in _VARIABLES]
        if not all(values):
            return None
        *numbers, host, port = values
        if not all(number.isdecimal() for number in (*numbers, port)):
            found = ", ".join(f"{name}={value}" for name, value in zip(_VARIABLES, values, strict=True))
            raise ConfigError(f"{found}: must be numbers but for MASTER_ADDR; unset them, or use torchrun")
        rank, size, local_rank, local_size = map(int, numbers)
        launch = cls(rank, size, local_rank, local_size, host)
        return launch if launch.size > 1 else None

    @property
    def beside_first(self) -> bool:
        """Whether this is the host of rank 0: ranks are numbered host by host."""
        return self.rank == self.local_rank

    def check(self, size: int) -> None:
        if self.size != size:
            raise ConfigError(
                f"tensor_parallel_size={size}, but torchrun has started WORLD_SIZE={self.size} processes: use "
                f"tensor_parallel_size={self.size}, or let --nnodes times --nproc-per-node be {size}"
            )


def environment_without_torchrun() -> dict[str, str]:
    """For a child process, which would otherwise take itself for a rank of torchrun."""
    return {name: value for name, value in os.environ.items() if name not in _VARIABLES}


def local_rank(rank: int) -> int:
    """A rank's number on its host."""
    launch = Launch.found()
    return rank if launch is None else launch.local_rank


def local_size(size: int) -> int:
    """How many of `size` ranks are on this host."""
    launch = Launch.found()
    return size if launch is None else launch.local_size
