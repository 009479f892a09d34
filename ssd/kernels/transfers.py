"""Copies from the host to a device. To a GPU they are asynchronous, from pinned memory."""

from __future__ import annotations

import numpy as np
import torch


def to_device(array: np.ndarray, device: torch.device) -> torch.Tensor:
    """Copies to the device, on a GPU asynchronously (from pinned memory)."""
    tensor = torch.from_numpy(array)
    if device.type != "cuda":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def upload(array: np.ndarray, to: torch.Tensor) -> None:
    """Copies into an existing tensor, as `to_device` does."""
    tensor = torch.from_numpy(array)
    to.copy_(tensor.pin_memory() if to.is_cuda else tensor, non_blocking=True)
