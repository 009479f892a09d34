"""Products of cuBLASLt, with the same bits as those of `ssd.kernels.triton.linear`, where they are faster.

Without split-K, cuBLASLt sums each output element over the depth in the same order as our kernel. It is called through
ctypes, with a handle of our own, no workspace and no reduction scheme, so that neither the choice of algorithms depends
on what else the process does with cuBLAS, nor the other way round. An algorithm is used only if its product of a random
matrix is equal to ours, bit by bit, on this machine. The fastest one, or our kernel, is found by measurement for every
shape and bucket of rows, and kept in the user's cache.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import hashlib
import itertools
import json
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
import triton

from ssd.kernels import cache
from ssd.kernels.triton import linear as own
from ssd.kernels.triton.compile import compiling
from ssd.kernels.triton.elementwise import silu_and_mul

log = logging.getLogger("ssd")

_LARGE: Final = (p * n // 2 for p in (512, 1024, 2048, 4096, 8192) for n in (3, 4))
_BUCKETS: Final = [16, 32, 64, 96, 128, 192, 256, 320, 384, 448, 512, *_LARGE]
_OURS_UP_TO: Final = 64  # rows; for more, the library is faster
_FIRST_FROM: Final = 1024  # rows; from these on its first algorithm is the fastest
_CANDIDATES: Final = 5  # algorithms that are compared for fewer
_FEW_CANDIDATES: Final = 24  # and for up to _OURS_UP_TO, where a product takes as long as its weight is read
_MOST_COPIES: Final = 32  # of a weight; those of a tiny model stay in the GPU's cache when it runs, too
_P = ctypes.c_void_p
# cublasLt.h and library_types.h
_TYPES: Final = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _TRANSPOSED, _DESC_TRANSA = 68, 1, 3
_DESC_EPILOGUE, _DESC_BIAS, _EPILOGUE_BIAS = 7, 8, 4
_PREF_MAX_WORKSPACE, _PREF_REDUCTION_SCHEMES = 1, 3
_LAYOUT_BATCHES, _LAYOUT_BATCH_STRIDE = 5, 6


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


_Algorithm = ctypes.Array[ctypes.c_uint64]


class CublasLt:
    """x [M, K] times weight [N, K] transposed, for 16-bit types."""

    def __init__(self, library: ctypes.CDLL, choices: Choices) -> None:
        self._library = library
        self._choices = choices
        self._handle, self._plain, self._biased, self._preference = _P(), _P(), _P(), _P()
        self._call("Create", ctypes.byref(self._handle))
        for product in (self._plain, self._biased):
            self._call("MatmulDescCreate", ctypes.byref(product), _COMPUTE_32F, _TYPES[torch.float32])
            self._set("MatmulDescSetAttribute", product, _DESC_TRANSA, ctypes.c_int32(_TRANSPOSED))
        self._set("MatmulDescSetAttribute", self._biased, _DESC_EPILOGUE, ctypes.c_int32(_EPILOGUE_BIAS))
        self._call("MatmulPreferenceCreate", ctypes.byref(self._preference))
        self._set("MatmulPreferenceSetAttribute", self._preference, _PREF_MAX_WORKSPACE, ctypes.c_uint64(0))
        self._set("MatmulPreferenceSetAttribute", self._preference, _PREF_REDUCTION_SCHEMES, ctypes.c_uint32(0))
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._matmul = library.cublasLtMatmul
        self._matmul.argtypes = [*[_P] * 14, ctypes.c_size_t, _P]
        self._chosen: dict[tuple[Any, ...], _Algorithm | None] = {}  # None: our kernel
        self._layouts: dict[tuple[int, ...], ctypes.c_void_p] = {}

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        out_dtype: torch.dtype,
        *,
        gated: bool = False,
    ) -> torch.Tensor | None:
        """None if our own kernel has to do it. `gated`: with `silu_and_mul` of the product."""
        y = x.new_empty((1, len(x), len(weight)), dtype=out_dtype)
        if not self._product(x, weight, bias, y, gated):
            return None
        return silu_and_mul(y[0]) if gated else y[0]

    def sums_of_segments(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor) -> bool:
        """Writes the products of equal parts of the depth, one after the other, to y [parts, rows, columns], float32.
        False if our own kernel has to do it."""
        return self._product(x, weight, None, y, gated=False)

    def _product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, gated: bool
    ) -> bool:
        rows, (columns, depth), out_dtype = x.shape[0], weight.shape, y.dtype
        if x.dtype not in (torch.float16, torch.bfloat16) or columns % 8 or depth % 8:
            return False
        if bias is not None and (gated or not bias.dtype is x.dtype is out_dtype):
            return False
        if compiling():  # whatever was chosen before: an algorithm may refuse some numbers of rows of its bucket
            self._compile(x, weight, bias, y, gated)
            return True
        bucket = _BUCKETS[min(bisect.bisect_left(_BUCKETS, rows), len(_BUCKETS) - 1)]
        key = (bucket, columns, depth, x.dtype, out_dtype, gated, bias is not None, len(y))
        if key not in self._chosen:
            name = " ".join(map(str, key))
            if name not in self._choices:
                if torch.cuda.is_current_stream_capturing():
                    return False
                self._choose(name, bucket, weight, bias, x.dtype, out_dtype, gated, len(y))
            self._chosen[key] = self._choices[name]
        algorithm = self._chosen[key]
        return algorithm is not None and self._multiply(x, weight, bias, y, algorithm)

    def _compile(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, y: torch.Tensor, gated: bool
    ) -> None:
        """Launches all kernels that `_choose` compares, and those that it may choose."""
        _reference(x, weight, bias, y.dtype, len(y))
        if len(x) <= _OURS_UP_TO and len(y) == 1:
            own.linear(x, weight, bias, gated=gated, out_dtype=y.dtype)

    def _choose(
        self,
        name: str,
        rows: int,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        gated: bool,
        segments: int,
    ) -> None:
        """Chooses the fastest algorithm of those with our bits; None if our kernel is faster, or there are none."""
        columns, depth = weight.shape
        found = self._algorithms(rows, weight, bias, dtype, out_dtype, segments)
        generator = torch.Generator(weight.device).manual_seed(rows)
        x = torch.randn((rows, depth), generator=generator, dtype=torch.float32, device=weight.device).to(dtype)
        y = x.new_empty((segments, rows, columns), dtype=out_dtype)
        ours = _reference(x, weight, bias, out_dtype, segments)
        equal = [each for each in found if self._multiply(x, weight, bias, y, each) and torch.equal(y, ours)]
        if not equal:
            log.warning(
                "cuBLASLt has no product of %d x %d weights with our bits on this GPU: ours are used, which is slower "
                "for many rows",
                columns,
                depth,
            )
            self._choices.set(name, None, keep=False)
            return

        def library(algorithm: _Algorithm) -> Callable[[torch.Tensor], object]:
            return lambda w: (self._multiply(x, w, bias, y, algorithm), silu_and_mul(y[0]) if gated else None)

        runs: list[tuple[_Algorithm | None, Callable[[torch.Tensor], object]]] = [(e, library(e)) for e in equal]
        if rows <= _OURS_UP_TO and segments == 1:
            runs.insert(0, (None, lambda w: own.linear(x, w, bias, gated=gated, out_dtype=out_dtype)))
        times = measure([run for _, run in runs], weight) if len(runs) > 1 else [0.0]
        best = min(range(len(runs)), key=times.__getitem__)
        log.debug("%s: %s us, number %d is used", name, [round(1e3 * time, 1) for time in times], best)
        self._choices.set(name, runs[best][0])

    def _algorithms(
        self,
        rows: int,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        segments: int,
    ) -> list[_Algorithm]:
        most = _FEW_CANDIDATES if rows <= _OURS_UP_TO else _CANDIDATES if rows < _FIRST_FROM else 1
        count = ctypes.c_int()
        found = (_Heuristic * most)()
        a, b, d = self._arguments(rows, weight, weight.shape[1], dtype, out_dtype, segments)
        status = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._with(bias), a, b, d, d, self._preference, most, found, ctypes.byref(count)
        )
        if status != 0:
            return []
        return [each.algorithm for each in found[: count.value] if each.state == 0 and each.workspace == 0]

    def _with(self, bias: torch.Tensor | None) -> ctypes.c_void_p:
        """The description of a product."""
        if bias is None:
            return self._plain
        self._set("MatmulDescSetAttribute", self._biased, _DESC_BIAS, ctypes.c_uint64(bias.data_ptr()))
        return self._biased

    def _multiply(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        y: torch.Tensor,
        algorithm: _Algorithm,
    ) -> bool:
        a, b, d = self._arguments(x.shape[0], weight, x.stride(0), x.dtype, y.dtype, len(y))
        to = y.data_ptr()
        status = self._matmul(
            *(self._handle, self._with(bias), ctypes.addressof(self._one), weight.data_ptr(), a, x.data_ptr(), b),
            *(ctypes.addressof(self._zero), to, d, to, d, ctypes.addressof(algorithm), None, 0),
            torch.cuda.current_stream().cuda_stream,
        )
        return bool(status == 0)

    def _arguments(
        self,
        rows: int,
        weight: torch.Tensor,
        x_stride: int,
        dtype: torch.dtype,
        out_dtype: torch.dtype,
        segments: int,
    ) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
        """Layouts of W, x and y, which to cuBLAS are column-major: y^T = (W^T)^T x^T. Segments are batches."""
        kind, columns, depth = _TYPES[dtype], len(weight), weight.shape[1] // segments
        return (
            self._layout(kind, depth, columns, weight.stride(0), segments, depth),
            self._layout(kind, depth, rows, x_stride, segments, depth),
            self._layout(_TYPES[out_dtype], columns, rows, columns, segments, rows * columns),
        )

    def _layout(
        self, kind: int, rows: int, columns: int, stride: int, batches: int, batch_stride: int
    ) -> ctypes.c_void_p:
        key = (kind, rows, columns, stride, batches, batch_stride)
        if key not in self._layouts:
            made, size = _P(), ctypes.c_uint64
            self._call(
                "MatrixLayoutCreate", ctypes.byref(made), kind, size(rows), size(columns), ctypes.c_int64(stride)
            )
            if batches > 1:
                self._set("MatrixLayoutSetAttribute", made, _LAYOUT_BATCHES, ctypes.c_int32(batches))
                self._set("MatrixLayoutSetAttribute", made, _LAYOUT_BATCH_STRIDE, ctypes.c_int64(batch_stride))
            self._layouts[key] = made
        return self._layouts[key]

    def _set(self, function: str, of: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData[int]) -> None:
        self._call(function, of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        if status != 0:
            raise OSError(f"cublasLt{name} returned {status}")


def _reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype, segments: int
) -> torch.Tensor:
    """Our products of equal parts of the depth: [parts, rows, columns]."""
    depth = weight.shape[1] // segments
    tile = own.choose_tile(64, len(weight), depth)
    each = ((x[:, i : i + depth], weight[:, i : i + depth].contiguous()) for i in range(0, depth * segments, depth))
    return torch.stack([own.linear(part, w, bias, out_dtype=out_dtype, tile=tile) for part, w in each])


class Choices:
    """Algorithms that were compared and chosen before (None: our kernel), in a file of one JSON list per line."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._found: dict[str, _Algorithm | None] = {}
        try:
            lines = path.read_text(encoding="ascii").splitlines()
        except (OSError, UnicodeDecodeError):
            lines = []
        for line in lines:
            try:
                key, words = json.loads(line)
                self._found[key] = (ctypes.c_uint64 * 8)(*words) if words else None
            except (ValueError, TypeError, IndexError):  # written by two processes at a time, or cut off
                continue

    def __contains__(self, key: str) -> bool:
        return key in self._found

    def __getitem__(self, key: str) -> _Algorithm | None:
        return self._found[key]

    def set(self, key: str, algorithm: _Algorithm | None, *, keep: bool = True) -> None:
        """`keep`: also for later processes."""
        self._found[key] = algorithm
        if not keep:
            return
        try:
            with self._path.open("a", encoding="ascii") as file:
                file.write(json.dumps([key, list(algorithm or ())]) + "\n")
        except OSError as error:
            log.debug("the choice of a product cannot be kept: %s", error)


def measure(runs: list[Callable[[torch.Tensor], object]], weight: torch.Tensor, repeats: int = 5) -> list[float]:
    """Milliseconds of each run, the least of some, one after the other on weights that are not in the GPU's cache.

    In turns: a GPU that is slower for a while is so for all of them. The GPU is kept busy until all launches of a turn
    are queued: for a narrow weight they take longer than its products.
    """
    cache = torch.cuda.get_device_properties(weight.device).L2_cache_size
    copies = [weight, *(weight.clone() for _ in range(min(3 * cache // weight.nbytes, _MOST_COPIES)))]
    other = torch.empty(8 * cache, dtype=torch.uint8, device=weight.device)
    for run in runs:
        run(weight)
    launches = max(_launch_seconds(run, weight) for run in runs) * len(copies)
    busy = 2 + int(launches / _fill_seconds(other))
    events = [[[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in runs] for _ in range(repeats)]  # type: ignore[no-untyped-call]
    for turn in events:
        for run, (begin, end) in zip(runs, turn, strict=True):
            for _ in range(busy):
                other.zero_()
            begin.record()  # type: ignore[no-untyped-call]
            for each in copies:
                run(each)
            end.record()  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(weight.device)
    return [min(begin.elapsed_time(end) for begin, end in each) / len(copies) for each in zip(*events, strict=True)]


def _launch_seconds(run: Callable[[torch.Tensor], object], weight: torch.Tensor) -> float:
    """Of the host, the least of some."""
    times = [time.perf_counter()]
    for _ in range(3):
        run(weight)
        times.append(time.perf_counter())
    return min(end - start for start, end in itertools.pairwise(times))


def _fill_seconds(other: torch.Tensor) -> float:
    """Of the GPU."""
    torch.cuda.synchronize(other.device)
    start = time.perf_counter()
    other.zero_()
    torch.cuda.synchronize(other.device)
    return time.perf_counter() - start


@functools.cache
def load() -> CublasLt | None:
    """The cuBLASLt that torch has loaded; None if there is none."""
    try:
        maps = Path("/proc/self/maps").read_text()
        path = next(line.split()[-1] for line in maps.splitlines() if "/libcublasLt.so" in line)
        library = ctypes.CDLL(path)
        library.cublasLtGetVersion.restype = ctypes.c_size_t
        return CublasLt(library, Choices(cache.directory() / f"products-{_key(library.cublasLtGetVersion())}.json"))
    except (OSError, StopIteration) as error:
        log.debug("cuBLASLt is not used: %r", error)
        return None


def _key(version: int) -> str:
    """Hash of everything that affects bits and speed."""
    gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
    what = f"{gpu.name} {gpu.major}.{gpu.minor} {version} {torch.version.cuda} {triton.__version__} "
    sources = b"".join(Path(each).read_bytes() for each in (own.__file__, __file__))
    return hashlib.sha256(what.encode() + sources).hexdigest()[:16]
