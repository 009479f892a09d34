"""Recordings of C calls: what a CUDA graph is for a GPU.

A step of a small model is some 200 calls of C kernels, of which each takes Python 10 microseconds. The second time that
a forward pass has the same memory for its inputs, its calls are recorded; from then on they are repeated by one call.
The numbers in the inputs may differ, as in a graph. What also computes with torch is not recorded.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

_MOST: Final = 256  # recordings of a model; a draft of up to 64 branches has 100
_MOST_BYTES: Final = 64 << 20  # of their results
_HARMLESS: Final = ("__get__", "__len__", "data_ptr", "dim", "element_size", "numel", "size", "stride", "view")
_local = threading.local()
_Result = TypeVar("_Result")


class Arena:
    """Memory of results, which is used again when their last tensor is gone."""

    def __init__(self) -> None:
        self._free: dict[int, list[np.ndarray]] = {}

    def empty(self, shape: Seq[int], dtype: torch.dtype) -> torch.Tensor:
        count = 1
        for size in shape:
            count *= size
        size = max(64, 1 << (count * dtype.itemsize - 1).bit_length())
        free = self._free.setdefault(size, [])
        memory = free.pop() if free else _aligned(size)
        own = memory[: count * dtype.itemsize]  # torch keeps this array as long as there are tensors of it
        weakref.finalize(own, free.append, memory)
        return torch.from_numpy(own).view(dtype).view(tuple(shape))


def _aligned(size: int, alignment: int = 64) -> np.ndarray:
    memory = np.empty(size + alignment, dtype=np.uint8)
    first = -memory.ctypes.data % alignment
    return memory[first : first + size]


class Calls:
    """Recorded calls, as `ssd_repeat` takes them."""

    def __init__(self, calls: Seq[tuple[int, bytes]]) -> None:
        sizes = [len(arguments) for _, arguments in calls]  # multiples of 8
        self._arguments = np.frombuffer(b"".join(arguments for _, arguments in calls) or bytes(8), dtype=np.int64)
        first = self._arguments.ctypes.data
        places = [first + end - size for end, size in zip(itertools.accumulate(sizes), sizes, strict=True)]
        self._table = np.array([(f, place) for (f, _), place in zip(calls, places, strict=True)], dtype=np.int64)
        self.address = self._table.ctypes.data  # of `struct call`s

    def __len__(self) -> int:
        return len(self._table)


class Tape(TorchFunctionMode):
    """The calls inside `with` of the current thread. `complete`: nothing else was computed."""

    def __init__(self, arena: Arena) -> None:
        super().__init__()
        self.arena, self.complete = arena, True
        self._calls: list[tuple[int, bytes]] = []

    def add(self, function: int, arguments: bytes) -> None:
        """A call of the function at an address."""
        self._calls.append((function, arguments))

    def empty(self, shape: Seq[int], dtype: torch.dtype) -> torch.Tensor:
        complete = self.complete  # making a tensor of the arena's memory is an operation, too
        made = self.arena.empty(shape, dtype)
        self.complete = complete
        return made

    @property
    def calls(self) -> Calls:
        return Calls(self._calls)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        same = func is torch.Tensor.contiguous and result is args[0]
        view = func is torch.Tensor.__getitem__ and _is_basic(args[1])
        self.complete &= same or view or func.__name__ in _HARMLESS
        return result


def _is_basic(index: Any) -> bool:
    """Whether an index makes a view: whole numbers and slices do."""
    return all(isinstance(each, int | slice) for each in (index if isinstance(index, tuple) else (index,)))


def current() -> Tape | None:
    """The tape that calls of this thread are recorded on."""
    return getattr(_local, "tape", None)


def empty(shape: Seq[int], dtype: torch.dtype) -> torch.Tensor:
    """Memory for a result: that of the arena if it is recorded."""
    tape = current()
    return torch.empty(shape, dtype=dtype, device="cpu") if tape is None else tape.empty(shape, dtype)


@contextmanager
def recording(tape: Tape) -> Iterator[None]:
    _local.tape = tape
    try:
        with tape:
            yield
    finally:
        _local.tape = None


class Recording(NamedTuple):
    calls: Calls | None  # None: it is always computed anew
    result: Any
    keeps: object


class Recordings:
    """The recordings of one model, by what its calls depend on. Their results are valid until the next pass."""

    def __init__(self, repeat: Callable[[Calls], None]) -> None:
        self._repeat, self._arena = repeat, Arena()
        self._seen: OrderedDict[Hashable, Recording | None] = OrderedDict()  # None: not recorded yet

    def clear(self) -> None:
        self._seen.clear()

    def run(self, key: Hashable, compute: Callable[[], _Result], keeps: object) -> _Result:
        """What `compute` returns; `keeps`: what the key names by its identity. Inside of another one, which records all
        calls, there is no recording."""
        if current() is not None:
            return compute()
        if key not in self._seen:
            self._seen[key] = None
            if len(self._seen) > _MOST:
                self._seen.popitem(last=False)
            return compute()
        self._seen.move_to_end(key)
        found = self._seen[key]
        if found is None:
            tape = Tape(self._arena)
            with recording(tape):
                made = compute()
            self._seen[key] = Recording(tape.calls if tape.complete else None, made if tape.complete else None, keeps)
            self._forget(_MOST_BYTES)
            return made
        if found.calls is None:
            return compute()
        self._repeat(found.calls)
        return cast(_Result, found.result)

    def _forget(self, most_bytes: int) -> None:
        """Old recordings, so that the results of the others take no more memory than that; not the newest one."""
        kept = [(key, found.result.nbytes) for key, found in self._seen.items() if found and found.result is not None]
        excess = sum(size for _, size in kept) - most_bytes
        for key, size in kept[:-1]:
            if excess <= 0:
                break
            self._seen[key] = None
            excess -= size
