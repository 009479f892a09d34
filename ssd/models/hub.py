"""Models of the Hugging Face hub: in a local cache, else downloaded.

Knows nothing of what is in the files. The hub's own library is imported when a hub id is met.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from ssd.errors import ModelNotFound

loading = logging.getLogger("ssd.loading")

WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
UNWANTED: Final = ("original/*", "consolidated*", "*/*.safetensors")

_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")


def is_hub_id(model: str) -> bool:
    """Whether it has the form org/name."""
    return _ID.fullmatch(model) is not None


def name_of(path: Path) -> str:
    """What a user calls a checkpoint: org/name of a snapshot in a cache, else the name of the file or directory."""
    entry = path.parent.parent
    snapshot = path.parent.name == "snapshots" and entry.name.startswith("models--")
    return entry.name.removeprefix("models--").replace("--", "/") if snapshot else path.name


def snapshot_of(model: str, field: str = "model") -> Path:
    """The snapshot of a hub id: from a local cache if one has it, else downloaded. `field`: what errors call it."""
    places = cache_places(model)
    for place in places:
        snapshot = snapshot_in(place)
        if snapshot is not None:
            return snapshot
    return _download(model, places, field)


def cache_places(model: str) -> list[Path]:
    """Where the hub's cache may keep this model, in order of preference."""
    from huggingface_hub import constants

    own, home = os.environ.get("SSD_HF_CACHE"), os.environ.get("HF_HOME")
    folders = [own, f"{own}/hub"] if own else []  # either the hub folder itself, or an HF_HOME that holds one
    folders += [f"{home}/hub"] if home else []
    entry = "models--" + model.replace("/", "--")
    return list(dict.fromkeys(Path(folder).expanduser() / entry for folder in [*folders, constants.HF_HUB_CACHE]))


def snapshot_in(entry: Path) -> Path | None:
    """The snapshot of a cache entry that refs/main names, else the newest one; only those that hold a config count."""
    snapshots = [path for path in entry.glob("snapshots/*") if (path / "config.json").is_file()]
    ref = entry / "refs" / "main"
    main = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
    return max(snapshots, key=lambda path: (path.name == main, path.stat().st_mtime), default=None)


def _download(model: str, places: Iterable[Path], field: str) -> Path:
    """Fetch what is needed to run the model, or say where it was looked for and what to do."""
    from huggingface_hub import snapshot_download

    loading.info("%s is in no local cache: downloading it from the Hugging Face hub", model)
    cache = os.environ.get("SSD_HF_CACHE")
    try:
        return Path(
            snapshot_download(
                model,
                cache_dir=Path(cache).expanduser() if cache else None,
                allow_patterns=list(WANTED),
                ignore_patterns=list(UNWANTED),
            )
        )
    except Exception as error:  # offline, unknown or gated repository, full disk: the remedy is the same
        looked = "\n  ".join(str(place) for place in places)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"{field}={model!r} was found in none of these places:\n  {looked}\n"
            f"and could not be downloaded ({type(error).__name__}: {reason}).\n"
            f"Run `hf download {model}` on a machine with network access (gated models need `hf auth login`), "
            "set SSD_HF_CACHE to the folder that holds models--org--name, or pass the model's directory."
        ) from error
