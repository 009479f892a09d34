"""Two ranks on one GPU, which NCCL refuses: their sums go through the host, over gloo. For tests, in both processes."""

from __future__ import annotations

import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch

from ssd.assembly import ranks
from ssd.parallel.group import make_group

COMPILING = timedelta(minutes=2)  # one rank may compile kernels while the other waits
_START = "import sys; sys.path[:0] = {path!r}; import one_gpu; one_gpu.follow()"
COMMAND = (sys.executable, "-c", _START.format(path=[str(Path(__file__).parent), str(Path(ranks.__file__).parents[2])]))


class HostGroup:
    """The calls of `TensorParallel`, on copies in the host's memory."""

    def __init__(self, rank: int, size: int, device: torch.device, **where: Any) -> None:
        self._group = make_group(rank, size, torch.device("cpu"), **where)
        self._group._set_default_timeout(COMPILING)

    def broadcast(self, tensor: torch.Tensor, root: int) -> HostGroup:
        return self._run([tensor], lambda x: self._group.broadcast(x, root))

    def _allgather_base(self, out: torch.Tensor, part: torch.Tensor) -> HostGroup:
        return self._run([out, part], self._group._allgather_base)

    def alltoall_base(self, out: torch.Tensor, part: torch.Tensor, *sizes: list[int]) -> HostGroup:
        return self._run([out, part], lambda x, y: self._group.alltoall_base(x, y, *sizes))

    def gather(self, out: list[list[torch.Tensor]], part: list[torch.Tensor], options: Any) -> HostGroup:
        first = out[0] if out else []
        return self._run(
            [*part, *first], lambda x, *each: self._group.gather([list(each)] if each else [], [x], options)
        )

    def wait(self) -> None:
        """What was called is complete."""

    def abort(self) -> None:
        """There is nothing to wait for."""

    def _run(self, tensors: list[torch.Tensor], call: Callable[..., Any]) -> HostGroup:
        copies = [tensor.cpu() for tensor in tensors]
        call(*copies).wait()
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.copy_(copy)
        return self


def share_the_gpu(patch: Callable[[Any, str, Any], None] = setattr) -> None:
    patch(ranks, "make_group", HostGroup)
    patch(ranks, "rank_device", lambda device, rank: torch.device(device.type, 0))
    patch(ranks, "FOLLOWER_COMMAND", COMMAND)


def follow() -> None:
    from ssd import worker

    share_the_gpu()
    worker.follow()
