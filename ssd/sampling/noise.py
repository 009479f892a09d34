"""Sampling noise: Gumbel noise as a pure function of (seed, position, token).

A counter-based generator without state: a request's noise does not depend on the other requests of a batch, chunked
prefill, preemption or drafts, and no global generator is used. Target and draft use the same noise (*coupled*
sampling). The rejection rule needs several independent draws at a position: each has its own `Stream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

from ssd.kernels.device import kernels

_BITS = 24  # of a uniform float32
_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MIX1 = 0xBF58_476D_1CE4_E5B9
_MIX2 = 0x94D0_49BB_1331_11EB


def constants() -> tuple[int, int, int]:
    """The generator's constants as signed int64, for kernels."""
    return signed(_GOLDEN), signed(_MIX1), signed(_MIX2)


class Stream(IntEnum):
    """Purpose of a draw. Draws of different streams are independent."""

    CHOICE = 0  # the target's token; with coupled sampling also the draft's
    DRAFT = 1  # rejection rule: the draft's token
    ACCEPT = 2  # rejection rule: whether it is accepted
    RECOVERY = 3  # rejection rule: the target's token after a rejection


def mix64(x: int) -> int:
    """A bijective 64-bit finaliser (SplitMix64's): every input bit moves every output bit."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def seed_key(seed: int) -> int:
    """The key of a sequence, from which those of its positions are derived."""
    return mix64(seed + _GOLDEN)


def position_key(seed: int, position: int, stream: Stream = Stream.CHOICE) -> int:
    """The key of one stream at one position of a sequence."""
    key = mix64(seed_key(seed) + position * _GOLDEN)
    return mix64(key ^ mix64(stream)) if stream else key


def position_keys(seed_keys: torch.Tensor, positions: torch.Tensor, stream: Stream = Stream.CHOICE) -> torch.Tensor:
    """`position_key` of many rows, on their device: int64 [R]."""
    keys = _mix(seed_keys + positions.long() * signed(_GOLDEN))
    return _mix(keys ^ signed(mix64(stream))) if stream else keys


def uniform(seed: int, position: int) -> float:
    """The uniform number in (0, 1) of the ACCEPT stream."""
    bits = mix64(position_key(seed, position, Stream.ACCEPT) + _GOLDEN) >> 12
    return (bits + 0.5) * 2.0**-52  # 53 significant bits: exact, never rounded to 1


def uniforms(seed_keys: torch.Tensor, positions: torch.Tensor, stream: Stream) -> torch.Tensor:
    """Uniform numbers in [0, 1) of many rows, on their device: float32 [R]."""
    keys = position_keys(seed_keys, positions, stream)
    return ((keys >> (63 - _BITS)) & ((1 << _BITS) - 1)).float() * 2.0**-_BITS


def gumbel(keys: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, one row per key: float32 [len(keys), vocab_size]."""
    return gumbel_of(torch.tensor([signed(k) for k in keys], dtype=torch.int64, device=device), vocab_size)


def gumbel_of(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """`gumbel` of keys on the device."""
    found: torch.Tensor = kernels(keys.device).sampling.gumbel(keys, vocab_size, *constants())
    return found


def _mix(x: torch.Tensor) -> torch.Tensor:
    """`mix64` of every element."""
    x = (x ^ _shift_right(x, 30)) * signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * signed(_MIX2)
    return x ^ _shift_right(x, 31)


def signed(x: int) -> int:
    """The two's-complement int64 with the same bits (torch has no full uint64 arithmetic)."""
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)
