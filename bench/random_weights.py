"""A checkpoint of random weights, made on the device they are wanted on: where only the shape counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from ssd.grafts.graft import fill_random
from ssd.layers.formats import FormatOf, dense
from ssd.models.config import DecoderConfig
from ssd.models.decoder import parameter_shapes
from ssd.text.tokenizer import Tokenizer


@dataclass(frozen=True)
class RandomCheckpoint:
    """Random matrices of one shape, and norms of one. Has no tokenizer: prompts are token ids."""

    config: DecoderConfig
    path: Path = Path("random")
    stop_token_ids: tuple[int, ...] = ()
    note: str = ""
    formats: FormatOf = dense

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in parameter_shapes(self.config).items():
            tensor = torch.ones(shape, dtype=dtype, device=device)
            yield name, tensor if len(shape) == 1 else fill_random(tensor, name)

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(None)
