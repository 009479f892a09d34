"""Tensors compared bit by bit."""

from __future__ import annotations

import torch


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors of one device have the same type, shape and bits.

    `torch.equal` takes -0.0 for 0.0, and no NaN for itself.
    """
    return one.dtype is other.dtype and one.shape == other.shape and torch.equal(_bytes(one), _bytes(other))


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)
