"""Tensors of all experts of a layer, as tensors of single experts, and back.

GPT-OSS is published with such tensors, and transformers writes them with `save_original_format=False`. Quantised ones
are those of MXFP4 (`ssd.layers.formats.mxfp4`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Final

import torch

from ssd.layers.formats.mxfp4 import GROUP
from ssd.layers.parameter import LazyTensor
from ssd.layers.spec import ExpertsSpec
from ssd.models.config import DecoderConfig

_FUSED: Final = re.compile(r"(model\.layers\.(\d+)\.)\w+\.experts\.(gate_up_proj|down_proj)(|_bias|_blocks|_scales)")
_ROUTER: Final = re.compile(r"(model\.layers\.(\d+)\.)mlp\.gate\.weight")
_SINGLE: Final = re.compile(r"(model\.layers\.(\d+)\.\w+\.experts\.)(\d+)\.(\w+)\.(\w+)")
_BLOCK: Final = GROUP // 2  # bytes of a group
_OWN: Final = {"": "weight", "_bias": "bias", "_blocks": "weight_packed", "_scales": "weight_scale"}
_DIMENSIONS: Final = {"": 3, "_bias": 2, "_blocks": 4, "_scales": 3}


def single_experts(
    weights: Iterator[tuple[str, torch.Tensor | LazyTensor]], config: DecoderConfig
) -> Iterator[tuple[str, torch.Tensor | LazyTensor]]:
    """The same tensors under the names that `ExpertNames` has."""
    for name, tensor in weights:
        fused = _FUSED.fullmatch(name)
        match = fused or _ROUTER.fullmatch(name)
        spec = config.layers[int(match[2])].mlp if match and int(match[2]) < config.num_layers else None
        wrong = fused is not None and len(tensor.shape) != _DIMENSIONS[fused[4]]
        if match is None or wrong or not isinstance(spec, ExpertsSpec):
            yield name, tensor
        elif fused is None:
            yield f"{match[1]}{spec.names.block}.{spec.names.router}.weight", tensor
        else:
            for part, share in _shares(spec, fused[3], fused[4], tensor):
                yield f"{match[1]}{spec.names.block}.experts.{part}.{_OWN[fused[4]]}", share


def all_experts(
    weights: Iterable[tuple[str, torch.Tensor]], config: DecoderConfig
) -> Iterator[tuple[str, torch.Tensor]]:
    """The inverse, for layers with `interleaved` experts of MXFP4."""
    pending: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in weights:
        match = _SINGLE.fullmatch(name)
        spec = None if match is None else config.layers[int(match[2])].mlp
        if match is None or not isinstance(spec, ExpertsSpec) or not spec.interleaved:
            yield name, tensor
            continue
        place, expert, part, own = match[1], match[3], match[4], match[5]
        kind = next(kind for kind, each in _OWN.items() if each == own)
        fused = "down_proj" if part == spec.names.down else "gate_up_proj"
        found = pending.setdefault(f"{place}{fused}{kind}", {})
        found[f"{expert}.{part}"] = tensor.view(len(tensor), -1, _BLOCK) if kind == "_blocks" else tensor
        if len(found) == spec.num_experts * (1 if fused == "down_proj" else 2):
            yield f"{place}{fused}{kind}", _stacked(spec, fused, pending.pop(f"{place}{fused}{kind}"))


def _stacked(spec: ExpertsSpec, fused: str, found: dict[str, torch.Tensor]) -> torch.Tensor:
    names, each = spec.names, [str(i) for i in range(spec.num_experts)]
    if fused == "down_proj":
        return torch.stack([found[f"{i}.{names.down}"] for i in each])
    both = [torch.stack([found[f"{i}.{part}"] for i in each]) for part in (names.gate, names.up)]
    return torch.stack(both, 2).flatten(1, 2)


def _shares(
    spec: ExpertsSpec, projection: str, kind: str, tensor: torch.Tensor | LazyTensor
) -> Iterator[tuple[str, torch.Tensor]]:
    """The number and projection of an expert, and its tensor."""
    for i in range(tensor.shape[0]):
        rows = tensor[slice(i, i + 1),][0]
        rows = rows.t() if kind == "" and spec.interleaved else rows.flatten(1) if kind == "_blocks" else rows
        if projection == "down_proj":
            yield f"{i}.{spec.names.down}", rows
            continue
        gate, up = (rows[::2], rows[1::2]) if spec.interleaved else rows.chunk(2)
        yield f"{i}.{spec.names.gate}", gate
        yield f"{i}.{spec.names.up}", up
