"""What a checkpoint gives to the engine, and the ordinary kind: a directory in Hugging Face's layout.

A checkpoint gives the decoder's description, the stop tokens, the weights one by one under their Hugging Face names,
and the tokenizer. Weights are read from safetensors only: no pickle is ever opened. `ssd.models.open` opens all kinds.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ssd.errors import ModelNotFound, SSDError, UnsupportedModel
from ssd.models.config import DecoderConfig
from ssd.models.families import decoder_config
from ssd.text.tokenizer import Tokenizer, load_tokenizer


class Checkpoint(Protocol):
    """The interface of a checkpoint, whatever its file format."""

    @property
    def path(self) -> Path: ...

    @property
    def config(self) -> DecoderConfig: ...

    @property
    def stop_token_ids(self) -> tuple[int, ...]: ...

    @property
    def note(self) -> str:
        """A caveat to print with every measurement of this model; "" for an ordinary one."""
        ...

    def weights(self, device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Every parameter under its Hugging Face name, on that device and in that type, one at a time."""
        ...

    def tokenizer(self) -> Tokenizer: ...


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
        files = weight_files(path)
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
        for file in weight_files(self.path):
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


# --- files of one directory -------------------------------------------------------------------------------------------


def _config_file(path: Path) -> Path:
    config = path / "config.json"
    if config.is_file():
        return config
    ggufs = sorted(file.name for file in path.glob("*.gguf"))
    remedy = f"pass one of its GGUF files ({', '.join(ggufs)})" if ggufs else "pass a Hugging Face model directory"
    raise ModelNotFound(f"{path}: the directory has no config.json; {remedy}")


def weight_files(path: Path) -> list[Path]:
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
    """The dtype of the first tensor, for a config.json without one."""
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
