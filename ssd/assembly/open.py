"""Opening a checkpoint of any kind: a bundled model, a Hugging Face directory, a GGUF file, a hub id or a graft."""

from __future__ import annotations

import os
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Final

from ssd.config import MTP
from ssd.errors import ConfigError, ModelNotFound, UnsupportedModel
from ssd.grafts.draft_graft import DraftGraft
from ssd.grafts.graft import GraftCheckpoint
from ssd.models.block import BlockCheckpoint
from ssd.models.checkpoint import Checkpoint, HFCheckpoint
from ssd.models.download import find_or_download
from ssd.models.eagle import EagleCheckpoint
from ssd.models.families import BLOCK_DRAFT, EAGLE_HEAD, MTP_HEAD, draft_kind
from ssd.models.feature_draft import FeatureCheckpoint
from ssd.models.gguf import GGUFCheckpoint
from ssd.models.hub import HubName, is_hub_id, local_model, snapshot_in
from ssd.models.mtp import MTPCheckpoint
from ssd.text.json_file import read_json

BUNDLE: Final = Path(__file__).parents[1] / "bundle"  # the small models that come with the package
GRAFT_PREFIX: Final = "graft:"
HEAD: Final = "-eagle"  # ends the names of bundled heads
BLOCK: Final = "-block"  # and of block drafts
_FEATURE_DRAFTS: Final[Mapping[str, type[FeatureCheckpoint]]] = {
    BLOCK_DRAFT: BlockCheckpoint,
    EAGLE_HEAD: EagleCheckpoint,
    MTP_HEAD: MTPCheckpoint,
}


def open_checkpoint(model: str | os.PathLike[str], field: str = "model") -> Checkpoint:
    """Open a bundled model, a directory, a `.gguf` file, a hub id (`org/name`, or `org/name:Q4_K_M` for one of its GGUF
    files; local cache first, then download), or `graft:BASE@SHAPE`: any of them in the shape of a published
    model, perhaps rounded (`graft:BASE@SHAPE:fp8`).

    A bundled name wins over a directory of that name, which is `./name`. `field`: the option that names the model, for
    errors.
    """
    name = os.fspath(model)
    if name.startswith(GRAFT_PREFIX):
        base, _, shape = name.removeprefix(GRAFT_PREFIX).rpartition("@")
        if not base:
            raise ConfigError(f"{field}={name!r}: write graft:BASE@SHAPE, such as graft:tiny-llama@llama-3.1-8b")
        return open_graft(base, shape, field)
    path = model_path(name, field)
    return _open_file(path) if path.is_file() else HFCheckpoint.open(path)


def open_feature_draft(draft: str, field: str = "speculation draft") -> FeatureCheckpoint | None:
    """Opens a draft on the target's features: a head or a block draft (bundled, a directory, a hub id, or a graft of
    one); None if `draft` is something else."""
    if draft.startswith(GRAFT_PREFIX):
        base, _, shape = draft.removeprefix(GRAFT_PREFIX).rpartition("@")
        found = open_feature_draft(base, field) if base else None
        return None if found is None else DraftGraft.of(found, shape)
    path = model_path(draft, field)
    kind = _kind_in(path)
    return None if kind is None else kind.open(path)


def feature_draft_kind(draft: str) -> type[FeatureCheckpoint] | None:
    """What kind of draft on the target's features this is, of a graft that of its base; None: something else."""
    if draft == MTP:
        return MTPCheckpoint
    base = draft.removeprefix(GRAFT_PREFIX).rpartition("@")[0] if draft.startswith(GRAFT_PREFIX) else draft
    return _kind_in(model_path(base, "speculation draft")) if base else None


def _kind_in(path: Path) -> type[FeatureCheckpoint] | None:
    config = path / "config.json"
    kind = draft_kind(read_json(config)) if config.is_file() else None
    return None if kind is None else _FEATURE_DRAFTS[kind]


def model_path(name: str, field: str = "model") -> Path:
    """The directory or file of a model that is no graft: every name of one goes through here.

    What is on the hub and in no local cache is downloaded.
    """
    path = BUNDLE / name if name in bundled() else Path(name).expanduser()
    if path.is_file():
        return path
    if path.is_dir():
        return _inside_cache_entry(path)
    if is_hub_id(name):
        return find_or_download(name, field)
    known = bundled_models() if field == "model" else bundled()  # a draft may be no model
    close = get_close_matches(name, known, n=1)
    raise ModelNotFound(
        f"{field}={name!r}: no such directory or .gguf file, and not a hub id of the form org/name or org/name:Q4_K_M; "
        f"{f'did you mean {close[0]}? Else ' if close else ''}"
        f"pass an existing path, a hub id or a bundled model ({', '.join(known) or 'none is here'})"
    )


def is_local(model: str) -> bool:
    """Whether `open_checkpoint` would open it without a download, or refuse it."""
    if model.startswith(GRAFT_PREFIX):
        return is_local(model.removeprefix(GRAFT_PREFIX).rpartition("@")[0])
    name = HubName.of(model)
    if name is None or model in bundled() or Path(model).expanduser().exists():
        return True
    return local_model(name) is not None


def absolute_path(model: str) -> str:
    """A name that `open_checkpoint` understands in any working directory: existing paths become absolute."""
    if model.startswith(GRAFT_PREFIX):
        base, _, shape = model.removeprefix(GRAFT_PREFIX).rpartition("@")
        return f"{GRAFT_PREFIX}{absolute_path(base)}@{shape}"
    path = Path(model).expanduser()
    return str(path.absolute()) if path.exists() and model not in bundled() else model


def open_graft(base: str, shape: str, field: str = "model") -> GraftCheckpoint:
    """`base`, which is anything that `open_checkpoint` opens, in a shape that `GraftCheckpoint.of` knows."""
    return GraftCheckpoint.of(open_checkpoint(base, field), shape, Path(base).name)


def bundled_models() -> list[str]:
    """Names of the small models that come with the package."""
    return [name for name in bundled() if not name.endswith((HEAD, BLOCK))]


def bundled() -> list[str]:
    """Names of all models that come with the package, EAGLE heads and block drafts among them."""
    return sorted(file.parent.name for file in BUNDLE.glob("*/config.json"))


def bundled_draft(model: str) -> str | None:
    """The draft that belongs to a bundled model."""
    return f"{model}-draft" if f"{model}-draft" in bundled_models() else None


def _open_file(path: Path) -> GGUFCheckpoint:
    """A single file can only be a GGUF."""
    if path.suffix.lower() != ".gguf":
        raise UnsupportedModel(f"{path}: a single file must be a .gguf; for safetensors pass the directory")
    return GGUFCheckpoint.open(path)


def _inside_cache_entry(path: Path) -> Path:
    """`models--org--name` given as a path means its snapshot; any other directory means itself."""
    return path if (path / "config.json").is_file() else snapshot_in(path) or path
