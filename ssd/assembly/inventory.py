"""The models of this machine that can be run by name: the bundled ones, and those in the hub's caches.

Knows what they are from their configs and headers; no weight is read, and no server is asked.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from ssd.assembly.memory import format_names
from ssd.assembly.open import BUNDLE, bundled_models, open_checkpoint
from ssd.errors import SSDError
from ssd.models.checkpoint import weight_files
from ssd.models.decoder import num_parameters
from ssd.models.families import draft_kind
from ssd.models.hub import HubName, cached_repositories, local_model, names_in, snapshots_in
from ssd.models.repository import CONFIG, gguf_names, quantization, tag
from ssd.text.json_file import read_json

DRAFT_SHARE: Final = 4  # a draft is suggested if it is smaller than its target so many times


class Found(NamedTuple):
    """A model by its name; `path` None: the download is not complete."""

    name: str
    path: Path | None
    size: int  # bytes of its weight files


@dataclass(frozen=True)
class LocalModel:
    """A model of this machine. `obstacle`: why it cannot be run; then what could not be found out is "" or 0."""

    name: str
    format: str = ""  # of the weights
    parameters: int = 0
    size: int = 0  # bytes of its weight files
    last_used: float = 0.0  # when these were last read, as the file system records it: seconds since 1970
    obstacle: str = ""


def local_models() -> Iterator[LocalModel]:
    """All of them, those that cannot be run, too."""
    return map(_described, _found())


def suggested_draft(model: str) -> str | None:
    """The smallest model of this machine with the tokenizer of `model` and at most a quarter of its size."""
    target = open_checkpoint(model)
    tokenizer, most = target.tokenizer(), _size(target.path) // DRAFT_SHARE
    for found in sorted(_found(), key=lambda each: each.size):
        if found.path is None or not 0 < found.size <= most:
            continue
        try:
            other = open_checkpoint(found.path).tokenizer()
        except SSDError:
            continue
        if tokenizer.available and other.available and tokenizer.difference(other) is None:
            return found.name
    return None


def _found() -> Iterator[Found]:
    for name in bundled_models():
        yield Found(name, BUNDLE / name, _size(BUNDLE / name))
    for repository, entry in cached_repositories():
        snapshots = snapshots_in(entry)
        ggufs: dict[str, Path] = {}
        for snapshot in reversed(snapshots):  # a file of the preferred one replaces that of another
            names = names_in(snapshot)
            ggufs |= {f"{repository}:{tag(name, names)}": snapshot / name for name in gguf_names(names)}
        path = local_model(HubName(repository))
        if not ggufs or (path is not None and path.is_dir()):
            yield Found(repository, path, _size(path) if path else 0)
        for name, file in ggufs.items():
            yield Found(name, file, _size(file))


def _described(found: Found) -> LocalModel:
    name, path, size = found
    if path is None:
        return LocalModel(name, obstacle=f"not complete, or no model: `ssd pull {name}` downloads what is missing")
    used = max(file.stat().st_atime for file in _weights(path))
    try:
        if path.is_dir() and (kind := draft_kind(read_json(path / CONFIG))):
            return LocalModel(name, size=size, last_used=used, obstacle=f"{kind}: drafts for its model (--draft)")
        checkpoint = open_checkpoint(path)
        stored = format_names(checkpoint.config, checkpoint.formats) or checkpoint.config.dtype
    except SSDError as error:
        reason = str(error).removeprefix(f"{path}: ").splitlines()[0]
        return LocalModel(name, size=size, last_used=used, obstacle=reason)
    form = f"GGUF {quantization(path.name)}".rstrip() if path.is_file() else stored
    return LocalModel(name, form, num_parameters(checkpoint.config), size, used)


def _weights(path: Path) -> list[Path]:
    return [path] if path.is_file() else weight_files(path)


def _size(path: Path) -> int:
    return sum(file.stat().st_size for file in _weights(path))
