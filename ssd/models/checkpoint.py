"""Finding and opening a checkpoint: a bundled model, a Hugging Face directory, a GGUF file, a hub id or a graft.

`open_checkpoint` is the one door. It answers with what the engine needs: the decoder's description, the stop tokens,
the weights one by one under their Hugging Face names, and the tokenizer. Weights are read from safetensors only: no
pickle is ever opened. Knows nothing of the decoder's modules or the engine.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ssd.errors import ConfigError, ModelNotFound, SSDError, UnsupportedModel
from ssd.models.config import DecoderConfig
from ssd.models.families import decoder_config
from ssd.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("ssd")

BUNDLE: Final = Path(__file__).parents[1] / "bundle"  # the small models that come with the package
GRAFT_PREFIX: Final = "graft:"

_HUB_ID: Final = re.compile(r"[\w.-]+/[\w.-]+")
_WANTED: Final = ("*.json", "*.safetensors", "*.jinja", "tokenizer*", "*.model", "merges.txt", "vocab.txt")
_UNWANTED: Final = ("original/*", "consolidated*", "*/*.safetensors")


class Checkpoint(Protocol):
    """What the engine asks of a checkpoint, whatever file format it is in."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def note(self) -> str:
        """What every report about this model must say; empty for an ordinary one."""
        ...

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its Hugging Face name, on that device and in that type, one at a time."""
        ...

    def tokenizer(self) -> Tokenizer: ...


def open_checkpoint(model: str | os.PathLike[str]) -> Checkpoint:
    """Open a bundled model, a directory, a `.gguf` file, a hub id `org/name` (local cache first, then download), or
    `graft:BASE@SHAPE`: any of them in the shape of a published model.

    A bundled name wins over a directory of that name, which is `./name`.
    """
    name = os.fspath(model)
    if name.startswith(GRAFT_PREFIX):
        return _open_graft(name)
    path = BUNDLE / name if name in bundled_models() else Path(model).expanduser()
    if path.is_file():
        return _open_file(path)
    if path.is_dir():
        return HFCheckpoint.open(_inside_cache_entry(path))
    return HFCheckpoint.open(_from_hub(name))


def bundled_models() -> list[str]:
    """Names of the small models that come with the package."""
    return sorted(file.parent.name for file in BUNDLE.glob("*/config.json"))


def bundled_draft(model: str) -> str | None:
    """The draft that belongs to a bundled model."""
    return f"{model}-draft" if f"{model}-draft" in bundled_models() else None


def graft_note(base: str, shape: str) -> str:
    return f"graft of {base} in the shape of {shape}: that shape's speed, {base}'s text"


@dataclass(frozen=True)
class HFCheckpoint:
    """A directory as `save_pretrained` writes it: config.json, safetensors, tokenizer files."""

    path: Path
    config: DecoderConfig
    stop_token_ids: tuple[int, ...]
    note: str = ""

    @classmethod
    def open(cls, path: Path) -> HFCheckpoint:
        """Read the configuration; weights and tokenizer are read when asked for."""
        raw = read_json(_config_file(path))
        files = _weight_files(path)
        try:
            config = decoder_config(raw)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from None
        if not (raw.get("dtype") or raw.get("torch_dtype")):
            config = replace(config, dtype=_stored_dtype(files[0], config.dtype))
        graft = raw.get("ssd_graft")
        note = graft_note(graft.get("base"), graft.get("shape")) if graft else ""
        return cls(path=path, config=config, stop_token_ids=_stop_token_ids(path, raw), note=note)

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        for file in _weight_files(self.path):
            for name, tensor in _read_safetensors(file):
                yield name, tensor.to(device, dtype)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object, or an error that names the file."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SSDError(f"{file} cannot be read as JSON ({error}): download the checkpoint again") from error
    if not isinstance(content, dict):
        raise SSDError(f"{file} holds a JSON {type(content).__name__}, expected an object: download it again")
    return content


def _open_graft(name: str) -> Checkpoint:
    from ssd.models.graft import GraftCheckpoint

    base, _, shape = name.removeprefix(GRAFT_PREFIX).rpartition("@")
    if not base:
        raise ConfigError(f"model={name!r}: write graft:BASE@SHAPE, such as graft:tiny-llama@llama-3.1-8b")
    return GraftCheckpoint.open(base, shape)


# --- files of one directory -------------------------------------------------------------------------------------------


def _open_file(path: Path) -> Checkpoint:
    """A single file can only be a GGUF."""
    from ssd.models.gguf import GGUFCheckpoint

    if path.suffix.lower() != ".gguf":
        raise UnsupportedModel(f"model={path}: a single file must be a .gguf; for safetensors pass the directory")
    return GGUFCheckpoint.open(path)


def _config_file(path: Path) -> Path:
    config = path / "config.json"
    if config.is_file():
        return config
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    remedy = f"pass one of its GGUF files ({', '.join(ggufs)})" if ggufs else "pass a Hugging Face model directory"
    raise ModelNotFound(f"model={path}: the directory has no config.json; {remedy}")


def _weight_files(path: Path) -> list[Path]:
    """The safetensors that make up the model: those of the index, else `model.safetensors`, else all of them."""
    index = path / "model.safetensors.index.json"
    if index.is_file():
        return _shards(index)
    single = path / "model.safetensors"
    if single.is_file():
        return [single]
    files = sorted(file for file in path.glob("*.safetensors") if not file.name.startswith("consolidated"))
    if files:
        return files
    pickles = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in path.glob(pattern))
    if pickles:
        raise UnsupportedModel(
            f"{path} holds pickled weights only ({pickles[0]}), which can run code when loaded: convert them with "
            "`model.save_pretrained(dir)` of transformers, which writes safetensors"
        )
    raise ModelNotFound(f"{path} holds no *.safetensors: download the weights as well (`hf download ORG/NAME`)")


def _shards(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SSDError(f"{index} has no weight_map: download the checkpoint again")
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        raise ModelNotFound(
            f"{index.parent} lacks {len(missing)} of {len(files)} weight files named in {index.name}: "
            f"{', '.join(missing)}; download the checkpoint again (`hf download ORG/NAME`)"
        )
    return files


def _read_safetensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor in memory at a time."""
    try:
        with safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a file handle, not a mapping)
                yield name, tensors.get_tensor(name)
    except SafetensorError as error:
        raise SSDError(f"{file} is not a whole safetensors file ({error}): download it again") from error


def _stored_dtype(file: Path, default: str) -> str:
    """What the first tensor is stored in, for a config.json that does not say."""
    for _, tensor in _read_safetensors(file):
        return str(tensor.dtype).removeprefix("torch.") if tensor.is_floating_point() else default
    return default


def _stop_token_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The generation config knows every stop token of a chat model; config.json often names one only."""
    generation = path / "generation_config.json"
    sources = [read_json(generation)] if generation.is_file() else []
    for source in (*sources, raw):
        eos = source.get("eos_token_id")
        if eos is not None and eos != []:
            return tuple(dict.fromkeys(int(token) for token in (eos if isinstance(eos, list) else [eos])))
    eos = load_tokenizer(path).eos_token_id
    return () if eos is None else (eos,)


# --- the hub's cache --------------------------------------------------------------------------------------------------


def _from_hub(model: str) -> Path:
    """The snapshot of a hub id: from a local cache if one has it, else downloaded."""
    if not _HUB_ID.fullmatch(model):
        raise ModelNotFound(
            f"model={model!r}: no such directory or .gguf file, and not a hub id of the form org/name; "
            f"pass an existing path, a hub id or a bundled model ({', '.join(bundled_models()) or 'none is here'})"
        )
    places = cache_places(model)
    for place in places:
        snapshot = snapshot_in(place)
        if snapshot is not None:
            return snapshot
    return _download(model, places)


def cache_places(model: str) -> list[Path]:
    """Where the hub's cache may keep this model, in order of preference."""
    from huggingface_hub import constants

    own, home = os.environ.get("SSD_HF_CACHE"), os.environ.get("HF_HOME")
    folders = [own, f"{own}/hub"] if own else []  # either the hub folder itself, or an HF_HOME that holds one
    folders += [f"{home}/hub"] if home else []
    entry = "models--" + model.replace("/", "--")
    return list(dict.fromkeys(Path(folder).expanduser() / entry for folder in [*folders, constants.HF_HUB_CACHE]))


def _inside_cache_entry(path: Path) -> Path:
    """`models--org--name` given as a path means its snapshot; any other directory means itself."""
    return path if (path / "config.json").is_file() else snapshot_in(path) or path


def snapshot_in(entry: Path) -> Path | None:
    """Of a cache entry, the snapshot that refs/main names, else the newest one; only those that hold a config count."""
    snapshots = [path for path in entry.glob("snapshots/*") if (path / "config.json").is_file()]
    ref = entry / "refs" / "main"
    main = ref.read_text(encoding="utf-8").strip() if ref.is_file() else ""
    return max(snapshots, key=lambda path: (path.name == main, path.stat().st_mtime), default=None)


def _download(model: str, places: Iterable[Path]) -> Path:
    """Fetch what is needed to run the model, or say where it was looked for and what to do."""
    from huggingface_hub import snapshot_download

    log.info("%s is in no local cache: downloading it from the Hugging Face hub", model)
    cache = os.environ.get("SSD_HF_CACHE")
    try:
        return Path(
            snapshot_download(
                model,
                cache_dir=Path(cache).expanduser() if cache else None,
                allow_patterns=list(_WANTED),
                ignore_patterns=list(_UNWANTED),
            )
        )
    except Exception as error:  # offline, unknown or gated repository, full disk: the remedy is the same
        looked = "\n  ".join(str(place) for place in places)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFound(
            f"model={model!r} was found in none of these places:\n  {looked}\n"
            f"and could not be downloaded ({type(error).__name__}: {reason}).\n"
            f"Run `hf download {model}` on a machine with network access (gated models need `hf auth login`), "
            "set SSD_HF_CACHE to the folder that holds models--org--name, or pass the model's directory."
        ) from error
