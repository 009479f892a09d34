"""The names of `ssd.sampling.noise`, where the noise is."""

from ssd.sampling.noise import (
    Stream,
    constants,
    gumbel,
    gumbel_of,
    gumbel_reference,
    mix64,
    position_key,
    position_keys,
    seed_key,
    signed,
    uniform,
)

__all__ = [
    "Stream",
    "constants",
    "gumbel",
    "gumbel_of",
    "gumbel_reference",
    "mix64",
    "position_key",
    "position_keys",
    "seed_key",
    "signed",
    "uniform",
]
