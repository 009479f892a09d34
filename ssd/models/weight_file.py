"""A file of packed weights, which later processes map into memory.

    start    magic, version, place, size and SHA-256 of the header
    data     tensors, at multiples of 64 bytes
    header   JSON: what the tensors are, and the CRC-32 of each MiB of data

The header comes last, so that data can be written while weights are packed. Knows nothing of models and of torch.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import os
import random
import struct
import tempfile
import zlib
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final

SUFFIX: Final = ".weights"
SCRATCH: Final = "unfinished-"  # how the names of files begin that are not complete
_MAGIC: Final = b"ssd-weights\0"
_VERSION: Final = 1
_START: Final = struct.Struct("<12sIQQ32s")
_DATA: Final = 1 << 16  # where it begins: a multiple of the page size of all machines
_ALIGNMENT: Final = 64  # of a tensor: a line of the processor's cache
_BLOCK: Final = 1 << 20  # bytes of one checksum
_CHECKED: Final = 16  # blocks, whenever a file is opened


class Damaged(Exception):
    """It is no whole file of this version; the text says why."""


class Writer:
    """Writes a file under another name, until `publish` gives it its own; `close` removes one that has none."""

    def __init__(self, folder: Path) -> None:
        handle, scratch = tempfile.mkstemp(dir=folder, prefix=SCRATCH)
        self._scratch: Path | None = Path(scratch)
        self._file = os.fdopen(handle, "w+b", buffering=0)
        self._sums: list[int] = []
        self._size = self._file.seek(_DATA)  # the start comes last

    def add(self, data: memoryview) -> int:
        """Appends a tensor; returns its place in the file."""
        self._append(memoryview(bytes(-self._size % _ALIGNMENT)))
        place = self._size
        self._append(data)
        return place

    def page(self) -> int:
        """Pads the file; returns a place where a map can begin."""
        self._append(memoryview(bytes(-self._size % mmap.ALLOCATIONGRANULARITY)))
        return self._size

    def mapped(self, first: int) -> mmap.mmap | None:
        """What was written from a page on; it stays valid. None: nothing was."""
        if first == self._size:
            return None
        return mmap.mmap(self._file.fileno(), self._size - first, mmap.MAP_SHARED, mmap.PROT_READ, offset=first)

    def publish(self, path: Path, header: Mapping[str, Any]) -> None:
        """Completes the file and gives it its name, in place of a file that had it."""
        assert self._scratch is not None
        text = json.dumps({**header, "sums": self._sums}).encode()
        self._write(text)
        self._file.seek(0)
        self._write(_START.pack(_MAGIC, _VERSION, self._size, len(text), hashlib.sha256(text).digest()))
        os.fsync(self._file.fileno())
        os.replace(self._scratch, path)
        self._scratch = None

    def close(self) -> None:
        self._file.close()
        if self._scratch is not None:
            with suppress(OSError):
                self._scratch.unlink()

    def _append(self, data: memoryview) -> None:
        while len(data):
            used = (self._size - _DATA) % _BLOCK  # of the last block
            part = data[: _BLOCK - used]
            before = self._sums.pop() if used else 0
            self._sums.append(zlib.crc32(part, before))
            self._write(part)
            self._size += len(part)
            data = data[len(part) :]

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]


def read_header(path: Path) -> dict[str, Any]:
    """What `publish` was given. Damaged if the file is not whole."""
    with path.open("rb") as file:
        return _header(file)[0]


def map_file(path: Path) -> tuple[dict[str, Any], mmap.mmap]:
    """The header, and the file in memory, which is shared with other processes.

    Damaged if the file is not whole, or if some of its blocks, others each time, have other checksums than it says.
    """
    with path.open("rb") as file:
        header, end = _header(file)
        mapped = mmap.mmap(file.fileno(), end, mmap.MAP_SHARED, mmap.PROT_READ)
    mapped.madvise(mmap.MADV_WILLNEED)  # a disk reads all of it at once
    sums = header["sums"]
    with memoryview(mapped) as data:
        for i in random.sample(range(len(sums)), min(_CHECKED, len(sums))):
            first = _DATA + i * _BLOCK
            if zlib.crc32(data[first : min(end, first + _BLOCK)]) != sums[i]:
                raise Damaged(f"block {i} of {len(sums)} has another checksum")
    return header, mapped


def _header(file: BinaryIO) -> tuple[dict[str, Any], int]:
    """The header, and where the data ends."""
    start = file.read(_START.size)
    if len(start) < _START.size or not start.startswith(_MAGIC):
        raise Damaged("it is no file of weights")
    _, version, end, size, digest = _START.unpack(start)
    if version != _VERSION:
        raise Damaged(f"it has version {version}, not {_VERSION}")
    if os.fstat(file.fileno()).st_size != end + size:
        raise Damaged("it has another length than it says")
    file.seek(end)
    text = file.read(size)
    if hashlib.sha256(text).digest() != digest:
        raise Damaged("its header has another checksum")
    header: dict[str, Any] = json.loads(text)
    return header, end
