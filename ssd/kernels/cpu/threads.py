"""The number of threads of CPU kernels."""

from __future__ import annotations

import ctypes
import functools
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

_local = threading.local()


def num_threads() -> int:
    """Threads of a kernel that the calling thread runs: what `set_threads` said, else torch's number."""
    return getattr(_local, "count", 0) or torch.get_num_threads()


def set_threads(count: int) -> None:
    """Sets the number for kernels of the calling thread. Its torch operators, which are small, have one from then on:
    OpenMP's workers keep their cores busy for a while after each of them, and kernels need these cores."""
    _local.count = count
    _set_openmp_threads(1)


@contextmanager
def use_threads(count: int) -> Iterator[None]:
    """`set_threads` for what is inside."""
    before, of_torch = getattr(_local, "count", 0), torch.get_num_threads()
    set_threads(count)
    try:
        yield
    finally:
        _local.count = before
        _set_openmp_threads(of_torch)


def _set_openmp_threads(count: int) -> None:
    """`torch.set_num_threads` for the calling thread alone: threads that call torch later for the first time do not get
    this number."""
    library = _openmp()
    if library is not None:
        library.omp_set_num_threads(count)


@functools.cache
def _openmp() -> ctypes.CDLL | None:
    """The OpenMP runtime that torch has loaded. Only Linux tells which."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return None
    for path in openmp_paths(maps, str(Path(torch.__file__).parent)):
        with suppress(OSError):
            return ctypes.CDLL(path)
    return None


def openmp_paths(maps: str, torch_folder: str) -> list[str]:
    """The OpenMP runtimes that a process has mapped (/proc/PID/maps), torch's first: other packages bring their own."""
    mapped = {fields[5] for line in maps.splitlines() if len(fields := line.split(None, 5)) == 6}
    paths = sorted(path for path in mapped if re.search(r"/lib(?:gomp|iomp5|omp)[-.\w]*\.so[^/]*$", path))
    own = f"{torch_folder}/", f"{torch_folder}.libs/"
    return sorted(paths, key=lambda path: not path.startswith(own))
