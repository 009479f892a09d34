"""Which files of a repository make a model: those of a safetensors checkpoint, or one GGUF file.

Knows names and sizes only: the rules are the same for what the hub lists and for what a local snapshot holds.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Final

from ssd.errors import ConfigError, ModelNotFound, SSDError, UnsupportedModel
from ssd.text.json_file import read_json

WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
UNWANTED: Final = ("original/*", "consolidated*", "*/*.safetensors", "*.bin.index.json")
CONFIG: Final = "config.json"
INDEX: Final = "model.safetensors.index.json"
SINGLE: Final = "model.safetensors"
PICKLES: Final = ("*.bin", "*.pt", "*.pth")
DEFAULT_QUANTIZATION: Final = "Q4_K_M"

_PART: Final = re.compile(r"-(\d{5})-of-(\d{5})(?=\.gguf$)", re.IGNORECASE)
_QUANTIZATION: Final = re.compile(
    r"(?:^|[-._/])((?:I?Q|TQ)\d\w*|BF16|FP?16|FP?32|MXFP4\w*)(?=\.gguf$|-\d{5}-of-\d{5}\.gguf$)", re.IGNORECASE
)
_SHOWN: Final = 30  # files in an error


# --- a checkpoint in safetensors --------------------------------------------------------------------------------------


def weight_names(names: Iterable[str], index: Path | None) -> list[str]:
    """The safetensors that make up the model: those of the index, else `model.safetensors`, else all of them.

    `names`: files of the directory; `index`: a copy of its index, if it has one.
    """
    if index is not None:
        return indexed_names(index)
    found = sorted(name for name in names if "/" not in name and name.endswith(".safetensors"))
    return [SINGLE] if SINGLE in found else [name for name in found if not name.startswith("consolidated")]


def indexed_names(index: Path) -> list[str]:
    """The weight files that an index names."""
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SSDError(f"{index} has no weight_map: download the checkpoint again")
    for name in weight_map.values():
        if not isinstance(name, str) or len(name) > 255 or {"..", "/"} & set(PurePath(name).parts):
            raise SSDError(f"{index}: weight_map names {str(name)[:60]!r}, expected a file of this directory")
    return sorted(set(weight_map.values()))


def checkpoint_names(repository: str, names: Iterable[str], index: Path | None) -> list[str]:
    """All files that running the checkpoint needs; errors if the repository has no weights that can be opened."""
    names = set(names)
    weights = weight_names(names, index)
    if missing := [name for name in weights if name not in names]:
        raise ModelNotFound(f"{repository} lacks weight files that its index names, among them {missing[0]}")
    if not weights:
        pickled = sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in PICKLES))
        what = f"holds pickled weights only ({pickled[0]}), which can run code when loaded" if pickled else "has none"
        raise UnsupportedModel(f"{repository} {what}: ssd needs safetensors or a GGUF file")
    others = (name for name in names if "/" not in name and not name.endswith(".safetensors"))
    return [*weights, *sorted(name for name in others if _fits(name, WANTED) and not _fits(name, UNWANTED))]


def _fits(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


# --- one GGUF file of several -----------------------------------------------------------------------------------------


def gguf_names(names: Iterable[str]) -> list[str]:
    """The GGUF files that are models; of one in several parts the first."""
    found = sorted(name for name in names if name.lower().endswith(".gguf"))
    models = [name for name in found if not re.search(r"mmproj|imatrix", PurePath(name).name, re.IGNORECASE)]
    return [name for name in models if (part := _PART.search(name)) is None or int(part[1]) == 1]


def quantization(name: str) -> str:
    """The quantisation at the end of a GGUF file's name, such as Q4_K_M; "" without one."""
    found = _QUANTIZATION.search(name)
    return found[1].upper() if found else ""


def tag(name: str, names: Iterable[str]) -> str:
    """What selects this file among the others behind `org/name:`."""
    own = quantization(name)
    return own if own and matching(names, own) == [name] else PurePath(name).name


def matching(names: Iterable[str], wanted: str | None) -> list[str]:
    """The GGUF models that `wanted` means: a quantisation, a file name or a pattern of it.

    None: the only one, else the one in DEFAULT_QUANTIZATION.
    """
    found = gguf_names(names)
    if wanted is None and len(found) == 1:
        return found
    sought = (wanted or DEFAULT_QUANTIZATION).lower()
    if not (sought.endswith(".gguf") or set("*?[") & set(sought)):
        return [name for name in found if quantization(name).lower() == sought]
    return [name for name in found if fnmatchcase(name.lower(), sought) or fnmatchcase(_base(name), sought)]


def _base(name: str) -> str:
    return PurePath(name).name.lower()


def chosen_gguf(repository: str, sizes: Mapping[str, int], wanted: str | None) -> str:
    """The one GGUF model that `wanted` means; else an error that lists what there is."""
    found = matching(sizes, wanted)
    if len(found) == 1:
        _refuse_parts(repository, found[0])
        return found[0]
    models = gguf_names(sizes)
    if not models:
        raise ModelNotFound(f"{repository} has no GGUF file, so no {wanted!r}: leave it out for its safetensors")
    sought = f"{wanted!r}" if wanted else f"the usual {DEFAULT_QUANTIZATION}"
    listed = "\n".join(f"  {gigabytes(_size(name, sizes)):>9}  {name}" for name in (found or models)[:_SHOWN])
    more = len(found or models) - _SHOWN
    listed += f"\n  and {more} more" if more > 0 else ""
    example = tag((found or models)[0], sizes)
    raise (ConfigError if found else ModelNotFound)(
        f"{repository} has {f'{len(found)} GGUF files for' if found else 'no GGUF file for'} {sought}; choose one of\n"
        f"{listed}\nby its quantisation or a pattern of its name, such as {repository}:{example}"
    )


def _refuse_parts(repository: str, name: str) -> None:
    part = _PART.search(name)
    if part and int(part[2]) > 1:
        raise UnsupportedModel(
            f"{repository}: {name} is in {int(part[2])} parts, and ssd reads GGUF models of one file: choose a smaller "
            "quantisation, or join the parts with `llama-gguf-split --merge` and pass the path of the result"
        )


def _size(name: str, sizes: Mapping[str, int]) -> int:
    """Of a file, or of all its parts."""
    stem = _PART.sub("", name)
    return sum(size for other, size in sizes.items() if _PART.sub("", other) == stem)


def gigabytes(size: int) -> str:
    return f"{size / 1e9:,.1f} GB" if size >= 1e9 else f"{size / 1e6:,.1f} MB"


def gib(size: int) -> str:
    return f"{size / (1 << 30):,.1f} GiB" if size >= 1 << 30 else f"{size / (1 << 20):,.1f} MiB"
