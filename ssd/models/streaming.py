"""Reads safetensors to a GPU: threads read pieces of the files into pinned memory, from where the GPU copies them.

Reading through a memory map, page by page, takes several times as long as the copy to the GPU.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

import torch

_DTYPES: Final = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
_PIECE: Final = 16 << 20  # bytes
_BUFFERS: Final = 16  # pieces that are being read or copied
_THREADS: Final = 8


class StoredTensor(NamedTuple):
    """A tensor in a file."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file


class _Piece(NamedTuple):
    """Some bytes of a tensor."""

    of: StoredTensor
    start: int
    size: int
    last: bool


def header_bytes(file: Path) -> int:
    """Those before the data of a safetensors file."""
    with file.open("rb") as opened:
        return 8 + int.from_bytes(opened.read(8), "little")


def stored_tensors(file: Path) -> list[StoredTensor] | None:
    """The tensors of a safetensors file whose header was validated, by offset; None if a dtype is of another kind."""
    with file.open("rb") as opened:
        size = int.from_bytes(opened.read(8), "little")
        header = json.loads(opened.read(size))
    header.pop("__metadata__", None)
    if any(entry["dtype"] not in _DTYPES for entry in header.values()):
        return None
    found = [
        StoredTensor(file, name, _DTYPES[entry["dtype"]], tuple(entry["shape"]), 8 + size + entry["data_offsets"][0])
        for name, entry in header.items()
    ]
    return sorted(found, key=lambda tensor: tensor.offset)


def read_tensors(
    tensors: Seq[StoredTensor], device: torch.device, *, piece: int = _PIECE
) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors on the device, in this order; complete when the current stream has reached this point."""
    with ExitStack() as stack:
        files = {file: os.open(file, os.O_RDONLY) for file in dict.fromkeys(tensor.file for tensor in tensors)}
        for opened in files.values():
            stack.callback(os.close, opened)
        parts = [part for tensor in tensors for part in _cut(tensor, piece)]
        largest = max((part.size for part in parts), default=0)
        buffers = stack.enter_context(_pinned(min(_BUFFERS, len(parts)), largest, device))
        pool = stack.enter_context(ThreadPoolExecutor(_THREADS))
        waiting = iter(parts)
        reading: deque[tuple[_Piece, torch.Tensor, Future[None]]] = deque()

        def start(buffer: torch.Tensor, copied: torch.cuda.Event | None) -> None:
            for part in islice(waiting, 1):
                reading.append((part, buffer, pool.submit(_read, files[part.of.file], part, buffer, copied)))

        for buffer in buffers:
            start(buffer, None)
        whole = flat = torch.empty(0, device=device)
        while reading:
            part, buffer, read = reading.popleft()
            read.result()
            if part.start == 0:
                whole = torch.empty(part.of.shape, dtype=part.of.dtype, device=device)
                flat = whole.view(-1).view(torch.uint8)
            flat[part.start : part.start + part.size].copy_(buffer[: part.size], non_blocking=True)
            start(buffer, _recorded(device))
            if part.last:
                yield part.of.name, whole


def _cut(tensor: StoredTensor, piece: int) -> Iterator[_Piece]:
    size = math.prod(tensor.shape) * tensor.dtype.itemsize
    for start in range(0, max(1, size), piece):
        yield _Piece(tensor, start, min(piece, size - start), start + piece >= size)


def _read(file: int, piece: _Piece, buffer: torch.Tensor, copied: torch.cuda.Event | None) -> None:
    """Fills a buffer, once its last content was copied."""
    if copied is not None:
        copied.synchronize()
    done, view = 0, buffer.numpy().data
    while done < piece.size:
        count = os.preadv(file, [view[done : piece.size]], piece.of.offset + piece.start + done)
        if count == 0:
            raise OSError(f"{piece.of.file} ends within {piece.of.name}")
        done += count


@contextmanager
def _pinned(count: int, size: int, device: torch.device) -> Iterator[list[torch.Tensor]]:
    """Buffers for asynchronous copies to a GPU; given back to the system in the end."""
    memory = mmap.mmap(-1, max(1, count * size))
    memory.madvise(mmap.MADV_HUGEPAGE)  # fewer pages to pin
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    if device.type != "cuda":
        yield list(torch.split(whole, max(1, size)))
        return
    runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    torch.cuda.check_error(runtime.cudaHostRegister(whole.data_ptr(), len(whole), 0))
    try:
        yield list(torch.split(whole, max(1, size)))
    finally:
        torch.cuda.synchronize(device)
        torch.cuda.check_error(runtime.cudaHostUnregister(whole.data_ptr()))


def _recorded(device: torch.device) -> torch.cuda.Event | None:
    """An event of the current stream."""
    return torch.cuda.current_stream(device).record_event() if device.type == "cuda" else None
