"""The GGUF container: metadata, the table of tensors, and their data.

The header is read here (the `gguf` package takes seconds over a vocabulary); the many block formats are left to
`gguf.quants`. Knows nothing of models.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn

import numpy as np
import numpy.typing as npt

from ssd.errors import SSDError, UnsupportedModel

if TYPE_CHECKING:
    from gguf import GGMLQuantizationType


@dataclass(frozen=True)
class TensorInfo:
    """Offset, shape and storage type of one tensor."""

    name: str
    shape: tuple[int, ...]  # as torch counts: rows first
    type_code: int
    offset: int  # from the start of the file


@dataclass(frozen=True)
class Header:
    """The file's header: everything but the tensor data."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


class _Cursor:
    """Reads the header's little-endian values one after the other."""

    _SCALARS: Final = "BbHhIif?" + " " * 2 + "Qqd"  # struct letters by the format's type codes; 8, 9 are not scalars
    _STRING: Final = 8
    _ARRAY: Final = 9

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self.position = 0

    def take(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self.position)
        self.position += struct.calcsize("<" + layout)
        return values

    def text(self) -> str:
        (length,) = self.take("Q")
        start, self.position = self.position, self.position + length
        if self.position > len(self._data):
            raise ValueError(f"a text of {length} bytes goes beyond the end of the file")
        return self._data[start : self.position].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == self._STRING:
            return self.text()
        if kind == self._ARRAY:
            return self._array(*self.take("IQ"))
        (value,) = self.take(self._letter(kind))
        return float(str(np.float32(value))) if kind == 6 else value  # 1e-05 was written, not 9.999999747e-06

    def _array(self, kind: int, count: int) -> list[Any]:
        if kind == self._STRING:
            return self._texts(count)
        if kind == self._ARRAY:
            raise ValueError("an array of arrays")
        return list(self.take(f"{count}{self._letter(kind)}"))

    def _texts(self, count: int) -> list[str]:
        """Those of a vocabulary, of which there are hundreds of thousands: faster than `text` for each."""
        data, place, read_length, found = self._data, self.position, struct.Struct("<Q").unpack_from, []
        for _ in range(count):
            (length,) = read_length(data, place)
            begin, place = place + 8, place + 8 + length
            if place > len(data):
                raise ValueError(f"a text of {length} bytes goes beyond the end of the file")
            found.append(data[begin:place].decode("utf-8", "replace"))
        self.position = place
        return found

    def _letter(self, kind: int) -> str:
        letter = self._SCALARS[kind : kind + 1].strip()
        if not letter:
            raise ValueError(f"unknown value type {kind}")
        return letter


def read_header(path: Path) -> Header:
    """Parse metadata and the table of tensors; tensor data stays on disk."""
    if not path.is_file():
        raise SSDError(f"{path} is not a regular file: pass the path of a GGUF file")
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if data[:4] != b"GGUF":
                raise ValueError("it does not begin with GGUF")
            header = _parse(_Cursor(data))
            _check_tensors(header, len(data), path)
            return header
    except (OSError, ValueError, struct.error) as error:
        raise SSDError(f"{path} is not a whole GGUF file ({error}): download it again") from error


def _parse(cursor: _Cursor) -> Header:
    _, version, tensor_count, value_count = cursor.take("4sIQQ")
    if version not in (2, 3):
        raise ValueError(f"version {version}, expected 2 or 3")
    metadata: dict[str, Any] = {}
    for _ in range(value_count):
        key = cursor.text()
        metadata[key] = cursor.value(*cursor.take("I"))
    rows = [_tensor_row(cursor) for _ in range(tensor_count)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 20:
        raise ValueError(f"general.alignment={str(alignment)[:20]}, expected a power of two")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: TensorInfo(name, shape, code, start + offset) for name, shape, code, offset in rows}
    return Header(metadata, tensors)


def _tensor_row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.text()
    (dimensions,) = cursor.take("I")
    if not 1 <= dimensions <= 4:
        raise ValueError(f"tensor {name[:60]!r} of {dimensions} dimensions, expected 1 to 4")
    shape = tuple(reversed(cursor.take(f"{dimensions}Q")))  # the file counts the fastest dimension first
    code, offset = cursor.take("IQ")
    return name, shape, code, offset


def _check_tensors(header: Header, num_bytes: int, path: Path) -> None:
    """Every tensor must lie inside of the file, and all of them together must not be larger than it."""
    total = 0
    for info in header.tensors.values():
        size = _num_bytes(info)
        if info.offset + size > num_bytes:
            raise SSDError(f"{path} ends inside of tensor {info.name}: download it again")
        total += size
    if total > num_bytes:
        raise ValueError(f"its tensors overlap: {total} bytes in a file of {num_bytes}")


def _num_bytes(info: TensorInfo) -> int:
    """Bytes of a tensor's data; its rows consist of whole blocks."""
    from gguf import GGML_QUANT_SIZES

    per_block, block_bytes = GGML_QUANT_SIZES[tensor_type(info)]
    if min(info.shape) < 1 or info.shape[-1] % per_block:
        raise ValueError(f"tensor {info.name[:60]!r} has shape {info.shape}, its blocks have {per_block} values")
    return int(math.prod(info.shape) // per_block * block_bytes)


def quantisation_types() -> type[GGMLQuantizationType]:
    try:
        from gguf import GGMLQuantizationType
    except ImportError as error:
        raise SSDError("reading GGUF files needs the gguf package: `pip install gguf`") from error
    kinds: type[GGMLQuantizationType] = GGMLQuantizationType
    return kinds


def stored_rows(path: Path, info: TensorInfo) -> npt.NDArray[np.uint8]:
    """The bytes of one tensor, row by row. They are read, not mapped: pages of a map would stay in memory."""
    found = np.fromfile(path, np.uint8, _num_bytes(info), offset=info.offset)
    if found.size < _num_bytes(info):
        raise SSDError(f"{path} ends inside of tensor {info.name}: download it again")
    return found.reshape(*info.shape[:-1], -1)


def read_tensor(path: Path, info: TensorInfo) -> npt.NDArray[np.float32]:
    """One tensor, dequantised."""
    kind = tensor_type(info)
    from gguf import quants

    try:
        values = quants.dequantize(stored_rows(path, info), kind)
        return np.ascontiguousarray(values, dtype=np.float32).reshape(info.shape)
    except NotImplementedError:
        _refuse_type(info, kind.name)


def tensor_type(info: TensorInfo) -> GGMLQuantizationType:
    try:
        return quantisation_types()(info.type_code)
    except ValueError:
        _refuse_type(info, str(info.type_code))


def _refuse_type(info: TensorInfo, kind: str) -> NoReturn:
    raise UnsupportedModel(
        f"tensor {info.name} is stored as {kind}, which the installed gguf package cannot dequantise: "
        "use a newer gguf package or another quantisation of the model (Q8_0, Q4_K, F16 ...)"
    )
