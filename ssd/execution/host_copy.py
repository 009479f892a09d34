"""Copies of device tensors that the host reads later."""

from __future__ import annotations

import torch

from ssd.execution.clock import now


class HostCopy:
    """Copies of tensors of one device, on their way to the host.

    From a GPU they are asynchronous, through pinned memory, whose contents are undefined until the stream has reached
    `arrived`. So they are read through `wait` only.
    """

    def __init__(self, *tensors: torch.Tensor) -> None:
        self._copies = tuple(map(_copy, tensors))
        self.arrived = now(tensors[0].device)

    def wait(self) -> tuple[torch.Tensor, ...]:
        """The copies, once they have arrived."""
        self.arrived.wait()
        return self._copies


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.is_cuda:
        return tensor.clone()
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    return host.copy_(tensor, non_blocking=True)
