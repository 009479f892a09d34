"""What a checkpoint gives to the engine, and the ordinary kind: a directory in Hugging Face's layout.

A checkpoint gives the decoder's description, the stop tokens, the weights one by one under their Hugging Face names,
and the tokenizer. Weights are read from safetensors only: no pickle is ever opened. `ssd.assembly.open` opens all
kinds.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors import SafetensorError, safe_open

from ssd.errors import ModelNotFound, SSDError, UnsupportedModel
from ssd.layers.formats import FormatOf, dense
from ssd.layers.parameter import LazyTensor
from ssd.models.config import DecoderConfig
from ssd.models.content import Sources
from ssd.models.decoder import check_fits
from ssd.models.families import DTYPES, decoder_config, text_config
from ssd.models.fields import TOKEN_ID, check_field
from ssd.models.fused_experts import single_experts
from ssd.models.quantization import formats_of
from ssd.models.repository import INDEX, PICKLES, indexed_names, weight_names
from ssd.models.streaming import StoredTensor, header_bytes, read_tensors, stored_tensors
from ssd.text.json_file import read_json
from ssd.text.tokenizer import Tokenizer, load_tokenizer

log = logging.getLogger("ssd")
Weights = Iterator[tuple[str, torch.Tensor | LazyTensor]]


class Stored(Protocol):
    """A checkpoint, or a draft's on features."""

    @property
    def formats(self) -> FormatOf:
        """How the weight of each linear layer is stored."""
        ...

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        """Every parameter under its Hugging Face name, as it is stored, one at a time.

        On that device if it is read there, and of that type if it is made when it is asked for.
        """
        ...


class Checkpoint(Stored, Protocol):
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

    @property
    def sources(self) -> Sources:
        """The files that decide the weights; {} if these are computed."""
        ...

    def tokenizer(self) -> Tokenizer: ...


class FileTensor:
    """A tensor in a safetensors file; what is indexed is read."""

    def __init__(self, stored: Any) -> None:
        self.shape = tuple(stored.get_shape())
        self._stored = stored

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        part: torch.Tensor = self._stored[index]
        return part


def all_weights(checkpoint: Stored, device: torch.device, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All weights on the device, quantised ones widened, converted to one type."""
    layers: dict[str, dict[str, torch.Tensor]] = {}
    for name, tensor in checkpoint.weights(device, dtype):
        layer, _, own = name.rpartition(".")
        layers.setdefault(f"{layer}." if layer else "", {})[own] = tensor[()].to(device)
    return {
        layer + own: tensor.to(dtype)
        for layer, stored in layers.items()
        for own, tensor in checkpoint.formats(layer.removesuffix(".")).widened(stored).items()
    }


_FOUR_BITS: Final = ("int4", "awq", "gptq")


def graft_note(base: str, shape: str, quantization: str | None = None) -> str:
    if quantization is None:
        return f"graft of {base} in the shape of {shape}: that shape's speed, {base}'s text"
    text = f"a text close to {base}'s" if quantization in _FOUR_BITS else f"the text of {base} in {quantization}"
    return f"graft of {base} in the shape of {shape}, rounded to {quantization}: that shape's speed, {text}"


def rounding_note(quantization: str | None) -> str:
    """For measurements of a model whose float weights are rounded; "" for others."""
    return "" if quantization is None else f"weights rounded to {quantization} when loaded"


@dataclass(frozen=True)
class HFCheckpoint:
    """A directory as `save_pretrained` writes it: config.json, safetensors, tokenizer files."""

    path: Path
    config: DecoderConfig
    stop_token_ids: tuple[int, ...]
    note: str = ""
    formats: FormatOf = dense
    mtp_heads: int = 0  # layers in its files beyond those of the model

    @classmethod
    def open(cls, path: Path) -> HFCheckpoint:
        """Read the configuration; weights and tokenizer are read when asked for."""
        raw = text_config(read_json(_config_file(path)))
        files = weight_files(path)
        try:
            config = decoder_config(raw)
            formats = stored_formats(raw, path, config.tensor_prefix)
            most = 1 if formats is dense else 2  # parameters of a byte
            check_fits(config, most * sum(file.stat().st_size for file in files))
            stops = _stop_token_ids(path, raw)
        except UnsupportedModel as error:
            raise UnsupportedModel(f"{path}: {error}") from None
        if not (raw.get("dtype") or raw.get("torch_dtype")):
            config = replace(config, dtype=_stored_dtype(files[0], config.dtype))
        graft = raw.get("ssd_graft")
        note = graft_note(graft.get("base"), graft.get("shape"), graft.get("quantization")) if graft else ""
        heads = int(raw.get("num_nextn_predict_layers") or 0)
        return cls(path=path, config=config, stop_token_ids=stops, note=note, formats=formats, mtp_heads=heads)

    @property
    def sources(self) -> Sources:
        described = [file for file in (self.path / "config.json", self.path / INDEX) if file.is_file()]
        return {file: file.stat().st_size for file in described} | {
            file: header_bytes(file) for file in weight_files(self.path)
        }

    def weights(self, device: torch.device, dtype: torch.dtype) -> Weights:
        files = weight_files(self.path)
        read: Weights = _read_to_gpu(files, device) if device.type == "cuda" else read_safetensors(files)
        return self._of_model(read)

    def stored(self) -> Weights:
        """Every parameter, of which a rank reads its share only."""
        return self._of_model(stored_in(weight_files(self.path)))

    def _of_model(self, weights: Weights) -> Weights:
        return single_experts(self._without_heads(_with_prefix(weights, self.config.tensor_prefix)), self.config)

    def _without_heads(self, weights: Weights) -> Weights:
        """Without the tensors of MTP heads, which are drafts (`ssd.models.mtp`)."""
        first, found = self.config.num_layers, False
        heads = "mtp.", *(f"model.layers.{i}." for i in range(first, first + self.mtp_heads))
        for name, tensor in weights:
            if name.startswith(heads):
                found = True
            else:
                yield name, tensor
        if found:
            log.info('%s has an MTP head: speculation={"mode": "sd", "draft": "mtp"} drafts with it', self.path.name)

    def tokenizer(self) -> Tokenizer:
        return load_tokenizer(self.path)


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
    index = path / INDEX
    if index.is_file():
        return _shards(index)
    names = weight_names((file.name for file in path.glob("*.safetensors")), None)
    if names:
        return _regular([path / name for name in names])
    pickles = sorted(file.name for pattern in PICKLES for file in path.glob(pattern))
    if pickles:
        raise UnsupportedModel(
            f"{path} holds pickled weights only ({pickles[0]}), which can run code when loaded: convert them with "
            "`model.save_pretrained(dir)` of transformers, which writes safetensors, or a draft head with "
            "`safetensors.torch.save_file(torch.load(file, weights_only=True), 'model.safetensors')`"
        )
    raise ModelNotFound(f"{path} holds no *.safetensors: download the weights as well (`hf download ORG/NAME`)")


def _shards(index: Path) -> list[Path]:
    files = [index.parent / name for name in indexed_names(index)]
    missing = [file.name for file in files if not file.exists()]
    if missing:
        raise ModelNotFound(
            f"{index.parent} lacks {len(missing)} of {len(files)} weight files named in {index.name}: "
            f"{', '.join(missing)[:500]}; download the checkpoint again (`hf download ORG/NAME`)"
        )
    return _regular(files)


def _regular(files: list[Path]) -> list[Path]:
    """The files; a device, a pipe or a directory under such a name is refused, since reading it might never end."""
    for file in files:
        if not file.is_file():
            raise SSDError(f"{file} is not a regular file: download the checkpoint again")
    return files


def stored_formats(raw: Mapping[str, Any], path: Path, prefix: str = "") -> FormatOf:
    """How the weights in a directory are stored, by its config.json; by names without the prefix."""
    quantized = raw.get("quantization_config") or raw.get("compression_config")  # the older name
    names = (name.removeprefix(prefix) for name, _ in stored_in(weight_files(path)))
    return formats_of(quantized, names) if quantized else dense


def _with_prefix(weights: Weights, prefix: str) -> Weights:
    """The tensors whose names begin with it, under the names without it; the others are another model's."""
    skipped = 0
    for name, tensor in weights:
        if name.startswith(prefix):
            yield name.removeprefix(prefix), tensor
        else:
            skipped += 1
    if skipped:
        log.info("skipped %d tensors whose names do not begin with %s: they are of another model", skipped, prefix)


def stored_in(files: Seq[Path]) -> Iterator[tuple[str, FileTensor]]:
    """The tensors of files, nothing of which is read yet."""
    for file in files:
        with whole(file), safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a file handle, not a mapping)
                yield name, FileTensor(tensors.get_slice(name))


def read_safetensors(files: Seq[Path]) -> Iterator[tuple[str, torch.Tensor]]:
    """One tensor in memory at a time."""
    for file in files:
        with whole(file), safe_open(file, framework="pt", device="cpu") as tensors:
            for name in tensors.keys():  # noqa: SIM118  (a file handle, not a mapping)
                yield name, tensors.get_tensor(name)


def _read_to_gpu(files: Seq[Path], device: torch.device) -> Iterator[tuple[str, torch.Tensor]]:
    """Straight to a GPU, where the files have the usual dtypes only."""
    stored: list[StoredTensor] = []
    others = []
    for file in files:
        with whole(file), safe_open(file, framework="pt", device="cpu"):  # validates the header
            found = stored_tensors(file)
        if found is None:
            others.append(file)
        else:
            stored += found
    with whole(files[0].parent):
        yield from read_tensors(stored, device)
    yield from read_safetensors(others)


@contextmanager
def whole(file: Path) -> Iterator[None]:
    """Errors of reading it, in the project's words."""
    try:
        yield
    except (SafetensorError, OSError, ValueError) as error:
        raise SSDError(f"{file} is not a whole safetensors file ({error}): download it again") from error


def _stored_dtype(file: Path, default: str) -> str:
    """The dtype of the first tensor, for a config.json without one."""
    for _, tensor in read_safetensors([file]):
        name = str(tensor.dtype).removeprefix("torch.")
        return name if name in DTYPES else default
    return default


def _stop_token_ids(path: Path, raw: Mapping[str, Any]) -> tuple[int, ...]:
    """The generation config knows every stop token of a chat model; config.json often names one only."""
    generation = path / "generation_config.json"
    sources = [read_json(generation)] if generation.is_file() else []
    for source in (*sources, raw):
        eos = source.get("eos_token_id")
        if eos is not None and eos != []:
            tokens = eos if isinstance(eos, list) else [eos]
            for token in tokens:
                check_field("eos_token_id", token, TOKEN_ID, "generation_config.json or config.json")
            return tuple(dict.fromkeys(token for token in tokens if token is not None))
    eos = load_tokenizer(path).eos_token_id
    return () if eos is None else (eos,)
