"""Rotary position embedding: the tables of cosines and sines, for every kind of stretching we know."""

from __future__ import annotations

import math

import torch

from ssd.layers.spec import RopeConfig


class RopeTables(dict[tuple[RopeConfig, int], tuple[torch.Tensor, torch.Tensor]]):
    """Cosines and sines by rotary embedding and head size, made when they are first asked for."""

    def __init__(self, num_positions: int, device: torch.device) -> None:
        super().__init__()
        self._num_positions, self._device = num_positions, device

    def __missing__(self, key: tuple[RopeConfig, int]) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = rope_tables(*key, self._num_positions)
        self[key] = cos.to(self._device), sin.to(self._device)
        return self[key]


def rope_tables(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin, float32 [num_positions, head_dim / 2]."""
    frequencies, amplitude = _frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32, device="cpu")[:, None] * frequencies[None, :]
    return angles.cos() * amplitude, angles.sin() * amplitude


def _frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32, device="cpu") / head_dim
    base = 1.0 / (rope.theta**exponent)
    if rope.scaling == "linear":
        return base / rope.factor, 1.0
    if rope.scaling == "llama3":
        return _llama3(base, rope), 1.0
    if rope.scaling == "yarn":
        return _yarn(base, 1.0 / (rope.factor * rope.theta**exponent), rope, head_dim)
    return base, 1.0


def _llama3(base: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    """Long waves are stretched by `factor`, short ones kept, those between blended."""
    wavelength = 2 * math.pi / base
    cycles = rope.original_max_position / wavelength
    blend = (cycles - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    between = (1 - blend) * base / rope.factor + blend * base
    stretched = torch.where(cycles < rope.low_freq_factor, base / rope.factor, between)
    return torch.where(cycles > rope.high_freq_factor, base, stretched)


def _yarn(base: torch.Tensor, stretched: torch.Tensor, rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Dimensions that turn often are kept, those that turn rarely are stretched, with a ramp between."""

    def dimension(turns: float) -> float:
        return head_dim * math.log(rope.original_max_position / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    index = torch.arange(head_dim // 2, dtype=torch.float32, device=base.device)
    keep = 1 - ((index - low) / max(high - low, 0.001)).clamp(0, 1)
    amplitude = rope.attention_factor
    if amplitude is None:
        amplitude = 0.1 * math.log(rope.factor) + 1.0 if rope.factor > 1 else 1.0
    return stretched * (1 - keep) + base * keep, amplitude
