"""Names of models on the Hugging Face hub, and where the hub's caches on this machine have them.

Knows nothing of what is in the files, and asks no server: `ssd.models.download` does. The hub's own library is
imported when a name of the hub is met.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Final, NamedTuple

from ssd.errors import SSDError
from ssd.models.repository import CONFIG, INDEX, checkpoint_names, matching

_NAME: Final = re.compile(r"([\w.-]+/[\w.-]+)(?::([^:@]+))?")


class HubName(NamedTuple):
    """`org/name`, or `org/name:FILE` for one GGUF file: its quantisation, its name or a pattern of its name."""

    repository: str
    file: str | None = None

    @classmethod
    def of(cls, model: str) -> HubName | None:
        found = _NAME.fullmatch(model)
        return None if found is None else cls(found[1], found[2])

    def __str__(self) -> str:
        return self.repository if self.file is None else f"{self.repository}:{self.file}"


def is_hub_id(model: str) -> bool:
    """Whether it has the form org/name or org/name:FILE."""
    return HubName.of(model) is not None


def local_model(name: HubName, revision: str | None = None) -> Path | None:
    """The snapshot or GGUF file of a model that a local cache has as a whole, else None. `revision`: only this one."""
    for entry in cache_places(name.repository):
        for snapshot in snapshots_in(entry, revision):
            found = model_in(snapshot, name)
            if found is not None:
                return found
    return None


def model_in(snapshot: Path, name: HubName) -> Path | None:
    """The model in a snapshot: a directory, or a GGUF file; None if something of it is missing."""
    names = names_in(snapshot)
    if name.file is None and CONFIG in names and any("/" not in each and ".safetensors" in each for each in names):
        return snapshot if is_whole(snapshot) else None
    files = matching(names, name.file)
    return snapshot / files[0] if len(files) == 1 else None


def is_whole(snapshot: Path) -> bool:
    """Whether a checkpoint's directory has all of its weight files."""
    index = snapshot / INDEX
    try:
        return bool(checkpoint_names(snapshot.name, names_in(snapshot), index if index.is_file() else None))
    except SSDError:
        return False


def names_in(snapshot: Path) -> list[str]:
    """The files below a snapshot; a link to a blob that is not there is none."""
    return [str(file.relative_to(snapshot).as_posix()) for file in sorted(snapshot.rglob("*")) if file.is_file()]


# --- the caches -------------------------------------------------------------------------------------------------------


def cache_folders() -> list[Path]:
    """The hub's caches, in order of preference; a download goes to the first of SSD_HF_CACHE and the hub's own."""
    from huggingface_hub import constants

    own, home = os.environ.get("SSD_HF_CACHE"), os.environ.get("HF_HOME")
    folders = [own, f"{own}/hub"] if own else []  # either the hub folder itself, or an HF_HOME that holds one
    folders += [f"{home}/hub"] if home else []
    return list(dict.fromkeys(Path(folder).expanduser() for folder in [*folders, constants.HF_HUB_CACHE]))


def download_folder() -> Path:
    from huggingface_hub import constants

    return Path(os.environ.get("SSD_HF_CACHE") or constants.HF_HUB_CACHE).expanduser()


def cache_entry(repository: str) -> str:
    return "models--" + repository.replace("/", "--")


def cache_places(repository: str) -> list[Path]:
    """Where the caches may keep this repository, in order of preference."""
    return [folder / cache_entry(repository) for folder in cache_folders()]


def cached_repositories() -> Iterator[tuple[str, Path]]:
    """Every model repository in the caches, with its entry; of one in several caches the preferred entry."""
    seen: set[str] = set()
    for folder in cache_folders():
        for entry in sorted(folder.glob("models--*--*")):
            repository = entry.name.removeprefix("models--").replace("--", "/", 1)
            if repository not in seen and is_hub_id(repository):
                seen.add(repository)
                yield repository, entry


def snapshots_in(entry: Path, revision: str | None = None) -> list[Path]:
    """The snapshots of a cache entry: the one that refs/main names, then the newest first; or that of a revision."""
    main = _commit(entry, revision or "main")
    found = [path for path in entry.glob("snapshots/*") if path.is_dir()]
    if revision is not None:
        found = [path for path in found if path.name in (revision, main)]
    return sorted(found, key=lambda path: (path.name == main, path.stat().st_mtime), reverse=True)


def snapshot_in(entry: Path) -> Path | None:
    """The first snapshot that holds a config."""
    return next((path for path in snapshots_in(entry) if (path / CONFIG).is_file()), None)


def short_name(path: PurePath) -> str:
    """A model's path without its folders; the repository, where it is a snapshot of a cache."""
    if path.parent.name != "snapshots":
        return path.name
    return path.parents[1].name.removeprefix("models--").replace("--", "/", 1)


def _commit(entry: Path, revision: str) -> str:
    ref = entry / "refs" / revision
    return ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
