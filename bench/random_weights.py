"""A checkpoint of random weights, made on the device they are wanted on: where only the shape counts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ssd.grafts.graft import fill_random
from ssd.layers.formats import FormatOf, dense
from ssd.models.config import DecoderConfig
from ssd.models.decoder import parameter_shapes
from ssd.text.tokenizer import Tokenizer

DISTINCT: Final = 50


@dataclass(frozen=True)
class RandomCheckpoint:
    """Random matrices of one shape, and norms of one. Has no tokenizer: prompts are token ids.

    `embedding`: a factor of its numbers. With 1 most of a row is what layers add, which is nearly the same for all
    tokens, and routers choose the same experts for all of them. With DISTINCT most of it is the token's own embedding.
    """

    config: DecoderConfig
    path: Path = Path("random")
    stop_token_ids: tuple[int, ...] = ()
    note: str = ""
    formats: FormatOf = dense
    embedding: int = 1

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in parameter_shapes(self.config).items():
            tensor = torch.ones(shape, dtype=dtype, device=device)
            if len(shape) > 1:
                fill_random(tensor, name).mul_(self.embedding if "embed_tokens" in name else 1)
            yield name, tensor

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(None)
