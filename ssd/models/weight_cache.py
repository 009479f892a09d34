"""Packed weights of models in the user's cache: written when a model is loaded for the first time on a CPU, and mapped
into memory from then on, which takes no time and is shared by all processes.

What is mapped has the bits of what was packed. A file is used for the checkpoint, options, kernels and code that it was
written for; for others it is written anew.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import math
import mmap
import os
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import torch

from ssd.kernels.cpu.kernels import Kernels
from ssd.kernels.cpu.ops import CpuExperts, CpuOps, CpuWeight
from ssd.kernels.cpu.pack import PackedExperts, PackedWeight
from ssd.kernels.ops import KVScales
from ssd.kernels.weights import RowRounding
from ssd.layers.formats.coded import MixedWeight, OrderedWeight
from ssd.layers.formats.rounded import RoundedWeight
from ssd.layers.parameter import Loadable
from ssd.models import weight_folder
from ssd.models.checkpoint import Checkpoint
from ssd.models.content import checksum
from ssd.models.decoder import Decoder
from ssd.models.hub import short_name
from ssd.models.weight_file import SUFFIX, Damaged, Writer, map_file

log = logging.getLogger("ssd")
LEAST: Final = 64 << 20  # bytes: smaller models are loaded in a second
_PACKAGE: Final = Path(__file__).parents[1]
_CODE: Final = ("kernels/*.py", "kernels/cpu/**/*.[hcp]*", "layers/**/*.py", "models/*.py")  # what packs weights
_CLASSES: Final = {
    each.__name__: each
    for each in (
        *(CpuWeight, CpuExperts, PackedWeight, PackedExperts),
        *(MixedWeight, OrderedWeight, RoundedWeight, RowRounding, KVScales),
    )
}


class WeightCache:
    """The file of one model that is loaded with certain options."""

    def __init__(self, checkpoint: Checkpoint, decoder: Decoder, options: Mapping[str, Any]) -> None:
        """`options`: what decides, beside the types of the decoder, which weights the checkpoint's tensors become."""
        assert isinstance(decoder.ops, CpuOps)
        self._decoder, self._kernels, self._model = decoder, decoder.ops.kernels, short_name(checkpoint.path)
        types = [str(each).removeprefix("torch.") for each in (decoder.dtype, decoder.kv_dtype)]
        place = json.dumps([str(checkpoint.path.resolve()), *types, self._kernels.variant, options], sort_keys=True)
        content = f"{place} {self._kernels.build} {_code()} {checksum(checkpoint.sources)}"
        self._header = {
            "key": hashlib.sha256(content.encode()).hexdigest(),
            "model": self._model,
            "weights": f"{decoder.quantized} for {types[0]}" if decoder.quantized else types[0],
        }
        name = re.sub(r"[^\w.-]+", "-", self._model)[-80:]
        self._folder = weight_folder.folder()
        self.path = self._folder / f"{name}-{hashlib.sha256(place.encode()).hexdigest()[:12]}{SUFFIX}"

    @classmethod
    def of(cls, checkpoint: Checkpoint, decoder: Decoder, options: Mapping[str, Any]) -> WeightCache | None:
        """None where weights are not kept: on a GPU, those of one rank of several, of small models, of grafts, and
        where the user wants none or has no place for them."""
        if not isinstance(decoder.ops, CpuOps) or decoder.tp.size > 1 or decoder.num_bytes() < LEAST:
            return None
        try:
            wanted = checkpoint.sources and weight_folder.limit(weight_folder.folder())
            return cls(checkpoint, decoder, options) if wanted else None
        except OSError as error:
            _warn(error)
            return None

    def restore(self) -> bool:
        """Gives the decoder its weights; False if the file has not all of them."""
        try:
            header, mapped = map_file(self.path)
            if header["key"] != self._header["key"]:
                log.info("%s: packed anew, since the checkpoint or the kernels have changed", self._model)
                return False
            reader = _Reader(mapped, 0, self._kernels)
            found = {name: reader.value(stored) for name, stored in header["loaded"].items()}
            for name, each in _loadable(self._decoder).items():
                _set(each, found[name])
        except FileNotFoundError:
            return False
        except (Damaged, OSError, ValueError, LookupError, TypeError) as error:
            log.warning("%s is damaged (%s): the weights are packed anew", self.path, error)
            return False
        with suppress(OSError):
            os.utime(self.path)  # used now
        return True

    @contextmanager
    def filling(self) -> Iterator[Callable[[Loadable], None]]:
        """A function for each parameter that has been loaded: its tensors are written to the file, and become a map of
        it, so that they take no memory of this process. At the end the file gets its name.

        Where it cannot be written, tensors stay in memory as they are.
        """
        names = {id(each): name for name, each in _loadable(self._decoder).items()}
        loaded: dict[str, Any] = {}
        writer = self._writer()

        def keep(each: Loadable) -> None:
            nonlocal writer
            if writer is None:
                return
            try:
                first = writer.page()
                stored = [_stored(getattr(each, name), writer) for name in each.loaded]
                mapped = writer.mapped(first)
            except (OSError, TypeError) as error:
                writer.close()
                writer = None
                _warn(error)
                return
            loaded[names[id(each)]] = stored
            if mapped is not None:
                _set(each, _Reader(mapped, first, self._kernels).value(stored))

        try:
            yield keep
            for each in _loadable(self._decoder).values():
                if names[id(each)] not in loaded:  # KV scales, which a checkpoint need not have
                    keep(each)
            if writer is not None:
                self._publish(writer, loaded)
        finally:
            if writer is not None:
                writer.close()

    def _publish(self, writer: Writer, loaded: Mapping[str, Any]) -> None:
        try:
            writer.publish(self.path, {**self._header, "loaded": loaded})
        except OSError as error:
            _warn(error)

    def _writer(self) -> Writer | None:
        size = self._decoder.num_bytes()
        try:
            if weight_folder.make_room(self._folder, size, self.path):
                return Writer(self._folder)
            log.warning("the weights of %s are not kept: see `ssd cache`", self._model)
        except OSError as error:
            _warn(error)
        return None


def _loadable(decoder: Decoder) -> dict[str, Loadable]:
    """All that loading fills in, each under the name of one of its tensors."""
    found: dict[str, Loadable] = {next(iter(each.shapes())): each for each in decoder.parameters()}
    for layer in decoder.layers:
        scales = layer.attention.kv_scales
        found[next(iter(scales.names))] = scales
    return found


def _set(each: Loadable, values: tuple[Any, ...]) -> None:
    for name, value in zip(each.loaded, values, strict=True):
        setattr(each, name, value)


def _stored(value: Any, writer: Writer) -> Any:
    """A value of a parameter as JSON, with the places of its tensors, which are written to the file."""
    if isinstance(value, torch.Tensor):
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
        return {"place": writer.add(data.data), "type": _name(value.dtype), "shape": list(value.shape)}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": _name(value)}
    if isinstance(value, Kernels):
        return {"kernels": value.variant}
    if isinstance(value, tuple | list):
        return [_stored(each, writer) for each in value]
    if _CLASSES.get(type(value).__name__) is not type(value):
        raise TypeError(f"{type(value).__name__} is not among the classes of packed weights")
    own = {field.name: _stored(getattr(value, field.name), writer) for field in fields(value)}
    return {"class": type(value).__name__, "fields": own}


class _Reader:
    """The inverse of `_stored`, for a file or a part of it in memory that begins at `first`."""

    def __init__(self, mapped: mmap.mmap, first: int, kernels: Kernels) -> None:
        with warnings.catch_warnings(action="ignore"):  # that nothing can be written to it
            self._data = torch.frombuffer(mapped, dtype=torch.uint8)
        self._first, self._kernels = first, kernels

    def value(self, stored: Any) -> Any:
        if isinstance(stored, list):
            return tuple(self.value(each) for each in stored)
        if not isinstance(stored, dict):
            return stored
        if "place" in stored:
            return self._tensor(stored["place"], stored["shape"], getattr(torch, stored["type"]))
        if "class" in stored:
            return _CLASSES[stored["class"]](**{name: self.value(each) for name, each in stored["fields"].items()})
        return self._kernels if "kernels" in stored else getattr(torch, stored["dtype"])

    def _tensor(self, place: int, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
        first, size = place - self._first, math.prod(shape) * dtype.itemsize
        if not 0 <= first <= first + size <= len(self._data):
            raise ValueError(f"a tensor of {size} bytes lies outside of the file")
        return self._data[first : first + size].view(dtype).view(shape)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


@functools.cache
def _code() -> str:
    """Hash of the source that decides what is packed and how: nobody has to remember a number when it changes."""
    digest = hashlib.sha256()
    for pattern in _CODE:
        for file in sorted(_PACKAGE.glob(pattern)):
            digest.update(file.read_bytes())
    return digest.hexdigest()


_warned: set[str] = set()


def _warn(error: Exception) -> None:
    """Once: a target and its draft have the same disk."""
    if str(error) not in _warned:
        log.warning("packed weights are not kept for later starts: %s", error)
    _warned.add(str(error))
