"""`ssd.sampling.noise.gumbel_of` in plain torch."""

from __future__ import annotations

import torch

from ssd.sampling import noise


def gumbel_reference(keys: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Equal up to the rounding of a logarithm."""
    golden = noise.signed(noise._GOLDEN)
    x = noise._mix(torch.arange(vocab_size, dtype=torch.int64, device=keys.device) * golden + keys[:, None])
    bits = noise._shift_right(x, 32)
    # float64: 32 random bits keep their resolution near one.
    uniform = (bits.to(torch.float64) + 0.5) * 2.0**-32
    return uniform.log_().neg_().log_().neg_().to(torch.float32)
