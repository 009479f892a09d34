"""Models that are loaded through a cache of packed weights, as the engine does; also in processes of their own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.assembly.open import open_checkpoint
from ssd.kernels.device import kernels
from ssd.layers.formats.rounded import rounded
from ssd.layers.parameter import Build
from ssd.models import weight_cache, weight_folder
from ssd.models.decoder import Decoder
from ssd.models.weight_cache import WeightCache

CPU = torch.device("cpu")


def use_cache(place: Path, patch: pytest.MonkeyPatch) -> None:
    """An empty cache for weights of any size."""
    place.mkdir(mode=0o700, exist_ok=True)
    patch.setattr(weight_folder, "folder", lambda: place)
    patch.setattr(weight_cache, "LEAST", 0)
    patch.setattr(weight_cache, "_warned", set())
    patch.setenv(weight_folder.LIMIT, "1")


def empty_decoder(path: Path | str, dtype: torch.dtype = torch.float32, form: str | None = None) -> Any:
    checkpoint = open_checkpoint(path)
    build = Build(kernels(CPU).ops(), CPU, dtype, format_of=rounded(form, checkpoint.formats))
    return checkpoint, Decoder(checkpoint.config, build, max_positions=16)


def load(path: Path | str, dtype: torch.dtype = torch.float32, form: str | None = None) -> tuple[Decoder, bool]:
    """As the engine does; and whether the weights came from the cache."""
    checkpoint, decoder = empty_decoder(path, dtype, form)
    kept = WeightCache.of(checkpoint, decoder, {"form": form})
    if kept is None:
        decoder.load(checkpoint.weights(CPU, dtype))
        return decoder, False
    if kept.restore():
        return decoder, True
    with kept.filling() as complete:
        decoder.load(checkpoint.weights(CPU, dtype), complete)
    return decoder, False


def build_apart(path: Path, place: Path, start: Any, results: Any) -> None:
    """Loads the model in a process of its own, at the same time as others."""
    with pytest.MonkeyPatch.context() as patch:
        use_cache(place, patch)
        start.wait()
        decoder, _ = load(path)
        results.put(float(decoder.head.logits(torch.ones(1, 256)).double().sum()))
