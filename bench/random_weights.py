"""A checkpoint of random weights, made on the device they are wanted on: where only the shape counts."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from ssd.grafts.graft import fill_random
from ssd.layers.formats import DENSE, FormatOf, WeightFormat, dense
from ssd.layers.formats.coded import Activations
from ssd.layers.formats.compressed_tensors import PackedRows
from ssd.layers.formats.fp8 import Unpacked
from ssd.layers.formats.mxfp4 import MXFP4
from ssd.models.checkpoint import Sources
from ssd.models.config import DecoderConfig
from ssd.models.decoder import parameter_shapes
from ssd.text.tokenizer import Tokenizer

DISTINCT: Final = 50
PUBLISHED: Final[dict[str, WeightFormat]] = {
    "mxfp4": MXFP4(),
    "int4_group": PackedRows("int4", 32, frozenset({"weight_packed", "weight_scale"})),
    "fp8_block": Unpacked("fp8", 128, 128, activations=Activations(group=128)),
}


def random_part(form: WeightFormat, name: str, size: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """A stored tensor of a published format, random. Weights are of both signs: a mean would be the same for all
    tokens."""
    integers = functools.partial(torch.randint, size=size, device=device)
    if isinstance(form, MXFP4):
        return integers(110, 120, dtype=torch.uint8) if "scale" in name else integers(0, 256, dtype=torch.uint8)
    if name == "weight_packed":
        return integers(-(1 << 31), 1 << 31, dtype=torch.int32)
    if name == "weight_scale":
        scales = torch.rand(size, device=device) / 100
        return (scales * (2 * integers(0, 2) - 1)).bfloat16() if isinstance(form, PackedRows) else scales
    assert isinstance(form, Unpacked)
    signs = integers(0, 2, dtype=torch.uint8) << 7
    return (integers(0, 0x7F, dtype=torch.uint8) | signs).view(torch.float8_e4m3fn)


def experts_in(form: str) -> FormatOf:
    """The routed experts in a published format, all else dense."""
    return lambda layer: PUBLISHED[form] if ".experts." in f"{layer}." else DENSE


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

    @property
    def sources(self) -> Sources:
        return {}

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for name, shape in parameter_shapes(self.config).items():
            layer, _, own = name.rpartition(".")
            form = self.formats(layer) if own == "weight" and len(shape) > 1 else DENSE
            if form in PUBLISHED.values():  # others round floats
                parts = form.shapes(*shape).items()
                yield from ((f"{layer}.{part}", random_part(form, part, size, device)) for part, size in parts)
                continue
            tensor = torch.ones(shape, dtype=dtype, device=device)
            if len(shape) > 1:
                fill_random(tensor, name).mul_(self.embedding if "embed_tokens" in name else 1)
            yield name, tensor

    def tokenizer(self) -> Tokenizer:
        return Tokenizer(None)
