"""Scales of a KV cache in fp8, which checkpoints may have."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import ClassVar, Final

import torch

from ssd.errors import UnsupportedModel
from ssd.kernels.ops import UNSCALED
from ssd.layers.parameter import Build, LazyTensor

# As llm-compressor, vLLM, ModelOpt and Quark (like older versions of compressed-tensors) name that of the keys.
_NAMES: Final = ("{}_scale", "attn.{}_scale", "{0}_proj.{0}_scale", "{}_proj.output_scale")


class LayerScales:
    """The scales of one layer's keys and values: 1 where the checkpoint has none, or the cache is not in fp8."""

    loaded: ClassVar[tuple[str, ...]] = ("value",)

    def __init__(self, build: Build, attention: str) -> None:
        """`attention`: the layer's name in a checkpoint."""
        self.value = UNSCALED
        self.names = {f"{attention}.{name.format(kind)}": kind for name in _NAMES for kind in ("k", "v")}
        self._used = build.kv_dtype == torch.float8_e4m3fn
        self._loaded: dict[str, str] = {}  # name by kind

    def load(self, name: str, tensor: torch.Tensor | LazyTensor) -> None:
        if not self._used:
            return
        kind = self.names[name]
        if kind in self._loaded:
            raise UnsupportedModel(f"{name} and {self._loaded[kind]} are the same KV scale: remove one of them")
        self._loaded[kind] = name
        self.value = replace(self.value, **{kind: _read(name, tensor)})


def _read(name: str, tensor: torch.Tensor | LazyTensor) -> float:
    if tuple(tensor.shape) not in ((), (1,)):
        raise UnsupportedModel(
            f"{name} has shape {tuple(tensor.shape)}, and ssd takes one KV scale for a layer: use kv_cache_dtype='auto'"
        )
    value = float(tensor[()].float())
    if not 0 < value < math.inf:
        raise UnsupportedModel(
            f"{name} is {value}, expected a positive number: calibrate it again, or use kv_cache_dtype='auto'"
        )
    return value
