"""The noise behind sampling: Gumbel noise as a pure function of (seed, position, token).

Counter-based, so it has no state: nothing about a request's randomness depends on its company in the batch, on
chunking, on preemption or on how tokens were proposed, and no global generator is touched. Target and draft use the
same noise, which is what makes sampling *coupled*. The rejection rule needs several independent draws at a position:
each has its own `Stream`.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum

import torch

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_GOLDEN = 0x9E37_79B9_7F4A_7C15
_MIX1 = 0xBF58_476D_1CE4_E5B9
_MIX2 = 0x94D0_49BB_1331_11EB


class Stream(IntEnum):
    """What a position's noise is for. Draws for different purposes are independent."""

    CHOICE = 0  # the target's own token; with coupled sampling the draft's as well
    DRAFT = 1  # what the draft draws under the rejection rule
    ACCEPT = 2  # whether that stands
    RECOVERY = 3  # what the target draws instead


def mix64(x: int) -> int:
    """A bijective 64-bit finaliser (SplitMix64's): every input bit moves every output bit."""
    x &= _MASK
    x = ((x ^ (x >> 30)) * _MIX1) & _MASK
    x = ((x ^ (x >> 27)) * _MIX2) & _MASK
    return x ^ (x >> 31)


def position_key(seed: int, position: int, stream: Stream = Stream.CHOICE) -> int:
    """One stream of one position of one sequence."""
    key = mix64(mix64(seed + _GOLDEN) + position * _GOLDEN)
    return mix64(key ^ mix64(stream)) if stream else key


def uniform(seed: int, position: int) -> float:
    """The number in (0, 1) that decides whether a drafted token stands."""
    bits = mix64(position_key(seed, position, Stream.ACCEPT) + _GOLDEN) >> 12
    return (bits + 0.5) * 2.0**-52  # 53 significant bits: nothing is rounded, least of all to one


def gumbel(keys: Sequence[int], vocab_size: int, device: torch.device) -> torch.Tensor:
    """Standard Gumbel noise, one row a key: float32 [len(keys), vocab_size]."""
    key = torch.tensor([_signed(k) for k in keys], dtype=torch.int64, device=device)
    if device.type == "cuda":
        from ssd.kernels import noise

        return noise.gumbel(key, vocab_size, _signed(_GOLDEN), _signed(_MIX1), _signed(_MIX2))
    x = torch.arange(vocab_size, dtype=torch.int64, device=device) * _signed(_GOLDEN) + key[:, None]
    x = (x ^ _shift_right(x, 30)) * _signed(_MIX1)
    x = (x ^ _shift_right(x, 27)) * _signed(_MIX2)
    bits = _shift_right(x ^ _shift_right(x, 31), 32)
    # float64: 32 random bits keep their full resolution where it matters, next to one.
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_().to(torch.float32)


def _signed(x: int) -> int:
    """The two's-complement int64 with the same bits (torch has no full uint64 arithmetic)."""
    return x - (1 << 64) if x >> 63 else x


def _shift_right(x: torch.Tensor, n: int) -> torch.Tensor:
    """Logical right shift of int64."""
    return (x >> n) & ((1 << (64 - n)) - 1)
