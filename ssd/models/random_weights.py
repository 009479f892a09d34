"""Random weights, made on the device they are wanted on: for benchmarks, where only the shape counts."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd.models.config import DecoderConfig
from ssd.models.decoder import parameter_shapes
from ssd.text.tokenizer import Tokenizer

_SEED = 0


@dataclass(frozen=True)
class RandomCheckpoint:
    """Random matrices of one shape, and norms of one. Has no tokenizer: prompts are token ids."""

    config: DecoderConfig
    path: Path = Path("random")
    stop_token_ids: tuple[int, ...] = ()
    note: str = ""

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in parameter_shapes(self.config).items():
            tensor = torch.ones(shape, dtype=dtype, device=device)
            yield name, tensor if len(shape) == 1 else fill_random(tensor, name)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(None)


def fill_random(tensor: torch.Tensor, name: str) -> torch.Tensor:
    """Small normal numbers, in place: a function of the name, whatever was made before."""
    generator = torch.Generator(tensor.device).manual_seed(zlib.crc32(name.encode(), _SEED))
    return tensor.normal_(std=0.02, generator=generator)
