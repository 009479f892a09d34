"""What all layers are built with, and what loads a checkpoint's tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch

from ssd.kernels.ops import Ops
from ssd.layers.formats import FormatOf, dense
from ssd.parallel.tensor import TensorParallel


class LazyTensor(Protocol):
    """A tensor in a file, of which only what is indexed is read."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor: ...


@dataclass(frozen=True)
class Build:
    """The kernels, device, types, ranks and weight formats of one model, for all of its layers."""

    ops: Ops
    device: torch.device
    dtype: torch.dtype
    tp: TensorParallel = TensorParallel()  # noqa: RUF009 (frozen)
    format_of: FormatOf = dense
    kv_cache_dtype: torch.dtype | None = None  # None: `dtype`

    @property
    def kv_dtype(self) -> torch.dtype:
        return self.kv_cache_dtype or self.dtype


class Loadable(Protocol):
    """What a checkpoint's tensors are loaded to."""

    loaded: ClassVar[tuple[str, ...]]  # attributes that hold what was loaded


class Parameter(Loadable, Protocol):
    """A layer that owns tensors of a checkpoint."""

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Names and full shapes of its tensors in a checkpoint."""

    def load(self, name: str, tensor: torch.Tensor | LazyTensor) -> None:
        """Takes one of these tensors, as it is stored; the last one completes the layer."""

    def num_bytes(self) -> int:
        """Memory of the whole layer, on all ranks together."""


def share_of(tensor: torch.Tensor | LazyTensor, index: tuple[slice, ...], device: torch.device) -> torch.Tensor:
    """A part of a tensor on the device, as it is stored; a copy, since a view would keep the whole tensor."""
    share = tensor[index].to(device)
    return share if share.shape == tuple(tensor.shape) else share.clone()
