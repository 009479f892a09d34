"""Finds the local checkpoint of a model family and size. Nothing is downloaded.

`SSD_TARGET_MODEL` and `SSD_DRAFT_MODEL` name checkpoints to use for any size, `SSD_EAGLE3_SPECFORGE` an EAGLE-3 head;
with `SSD_TINY_MODELS=1` every size means the bundled models (for tests).
"""

from __future__ import annotations

import os
import re
from typing import Final, Literal, TypeVar

from ssd.assembly.open import HEAD
from ssd.errors import ConfigError, ModelNotFound
from ssd.models.hub import cache_places, snapshot_in

T = TypeVar("T")
Family = Literal["llama", "qwen"]
TARGET_VARIABLE: Final = "SSD_TARGET_MODEL"
DRAFT_VARIABLE: Final = "SSD_DRAFT_MODEL"
HEAD_VARIABLE: Final = "SSD_EAGLE3_SPECFORGE"
TINY_VARIABLE: Final = "SSD_TINY_MODELS"
DEFAULT_DRAFT: Final[dict[Family, str]] = {"llama": "1", "qwen": "0.6"}

_HUB: Final[dict[Family, dict[str, tuple[str, ...]]]] = {
    "llama": {
        "1": ("meta-llama/Llama-3.2-1B-Instruct",),
        "3": ("meta-llama/Llama-3.2-3B-Instruct",),
        "8": ("meta-llama/Llama-3.1-8B-Instruct",),
        "70": ("meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.1-70B-Instruct"),
    },
    "qwen": {size: (f"Qwen/Qwen3-{size}B",) for size in ("0.6", "1.7", "4", "8", "14", "32")},
}
_HEADS: Final[dict[Family, dict[str, tuple[str, ...]]]] = {
    "llama": {
        "8": ("lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge",),
        "70": ("lmsys/SGLang-EAGLE3-Llama-3.3-70B-Instruct-SpecForge",),
    },
    "qwen": {"32": ("RedHatAI/Qwen3-32B-speculator.eagle3",)},
}
_SHAPES: Final[dict[Family, dict[str, str]]] = {
    "llama": {"1": "llama-3.2-1b", "3": "llama-3.2-3b", "8": "llama-3.1-8b", "70": "llama-3.1-70b"},
    "qwen": {size: f"qwen3-{size}b" for size in ("0.6", "1.7", "4", "8", "14", "32")},
}
BUNDLED: Final[dict[Family, str]] = {"llama": "tiny-llama", "qwen": "tiny-qwen3"}
_SPELLED: Final = re.compile(r"(llama|qwen)-?\d(?:\.\d)?-(\d+(?:\.\d+)?)b(?:-instruct)?")


def find(family: Family, size: str) -> str:
    """The local snapshot of that model; ModelNotFound tells where it was searched for and how to get it."""
    if os.environ.get(TINY_VARIABLE) == "1":
        return _tiny(family, size)
    remedy = (
        f"python scripts/download_from_hf.py {family} --sizes {size} (SSD_HF_CACHE says where to; the Llama models "
        f"want their licence accepted first), or set {TARGET_VARIABLE} and {DRAFT_VARIABLE} to directories"
    )
    return _snapshot(f"{family} {size}", _entry(_HUB, family, size), remedy)


def find_head(family: Family, size: str) -> str:
    """The local snapshot of the EAGLE-3 head for a size."""
    if os.environ.get(TINY_VARIABLE) == "1":
        return BUNDLED[family] + HEAD
    remedy = f"python scripts/download_from_hf.py eagle --sizes {size}, or set {HEAD_VARIABLE} to a directory"
    return _snapshot(f"EAGLE-3 head for {family} {size}", _entry(_HEADS, family, size, "EAGLE-3 heads"), remedy)


def _snapshot(what: str, names: tuple[str, ...], remedy: str) -> str:
    places = [place for name in names for place in cache_places(name)]
    snapshot = next((found for place in places if (found := snapshot_in(place)) is not None), None)
    if snapshot is None:
        looked = "\n  ".join(map(str, places))
        raise ModelNotFound(
            f"{what}: no weights of {' or '.join(names)}. Looked in\n  {looked}\n"
            f"To get them: {remedy}, or measure that size without its weights: --graft"
        )
    return str(snapshot)


def graft(family: Family, size: str, *, draft: bool = False) -> str:
    """The bundled model, or its draft, in that size: the size's speed, the bundled model's text."""
    return f"graft:{BUNDLED[family]}{'-draft' if draft else ''}@{_entry(_SHAPES, family, size)}"


def graft_head(family: Family, size: str) -> str:
    """The head of `graft`'s model."""
    return f"graft:{BUNDLED[family]}{HEAD}@{_entry(_SHAPES, family, size)}"


def _tiny(family: Family, size: str) -> str:
    """The bundled model in place of a size; the bundled draft for the default draft's size."""
    _entry(_SHAPES, family, size)
    return BUNDLED[family] + ("-draft" if size == DEFAULT_DRAFT[family] else "")


def spelled(name: str) -> tuple[Family, str] | None:
    """Family and size of a name such as `llama-3-8b` or `qwen3-32b`; None for anything else."""
    match = _SPELLED.fullmatch(name.lower())
    if match is None or match[2] not in _SHAPES[match[1]]:  # type: ignore[index]
        return None
    return match[1], match[2]  # type: ignore[return-value]


def _entry(table: dict[Family, dict[str, T]], family: Family, size: str, what: str = "models") -> T:
    if size not in table[family]:
        raise ConfigError(f"size={size}: {family} {what} come in {', '.join(table[family])}")
    return table[family][size]
