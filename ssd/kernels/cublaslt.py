"""Products of cuBLASLt, for many rows: up to 2.5 times as fast as `ssd.kernels.linear`, with the same bits.

Without split-K, cuBLASLt sums each output element over the depth in the same order as our kernel. It is called through
ctypes, with a handle of our own, no workspace and no reduction scheme, so that neither the choice of algorithms depends
on what else the process does with cuBLAS, nor the other way round. An algorithm is used only after its product of a
random matrix was equal to ours, bit by bit, on this machine.
"""

from __future__ import annotations

import bisect
import ctypes
import functools
import logging
from pathlib import Path
from typing import Final

import torch

from ssd.kernels.compiling import compiling
from ssd.kernels.linear import choose_tile, linear

log = logging.getLogger("ssd")

MIN_ROWS: Final = 65  # below, our kernel is as fast (H200)
_BUCKETS: Final = [
    96,
    128,
    192,
    256,
    320,
    384,
    448,
    512,
    *(p * n // 2 for p in (512, 1024, 2048, 4096, 8192) for n in (3, 4)),
]
_P = ctypes.c_void_p
# cublasLt.h and library_types.h
_TYPES: Final = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
_COMPUTE_32F, _TRANSPOSED, _DESC_TRANSA = 68, 1, 3
_PREF_MAX_WORKSPACE, _PREF_REDUCTION_SCHEMES = 1, 3


class _Heuristic(ctypes.Structure):
    _fields_ = [
        ("algorithm", ctypes.c_uint64 * 8),
        ("workspace", ctypes.c_size_t),
        ("state", ctypes.c_int),
        ("waves", ctypes.c_float),
        ("reserved", ctypes.c_int * 4),
    ]


class CublasLt:
    """x [M, K] times weight [N, K] transposed, for 16-bit types."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._one, self._zero = ctypes.c_float(1.0), ctypes.c_float(0.0)
        self._handle, self._product, self._preference = _P(), _P(), _P()
        self._call("Create", ctypes.byref(self._handle))
        self._call("MatmulDescCreate", ctypes.byref(self._product), _COMPUTE_32F, _TYPES[torch.float32])
        self._set("MatmulDescSetAttribute", self._product, _DESC_TRANSA, ctypes.c_int32(_TRANSPOSED))
        self._call("MatmulPreferenceCreate", ctypes.byref(self._preference))
        self._set("MatmulPreferenceSetAttribute", self._preference, _PREF_MAX_WORKSPACE, ctypes.c_uint64(0))
        self._set("MatmulPreferenceSetAttribute", self._preference, _PREF_REDUCTION_SCHEMES, ctypes.c_uint32(0))
        self._checked: dict[tuple[object, ...], _Heuristic | None] = {}  # None: there is none with our bits
        self._layouts: dict[tuple[int, int, int, int], ctypes.c_void_p] = {}

    def linear(self, x: torch.Tensor, weight: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor | None:
        """None if our own kernel has to do it."""
        rows, (columns, depth) = x.shape[0], weight.shape
        if rows < MIN_ROWS or x.dtype not in (torch.float16, torch.bfloat16) or columns % 8 or depth % 8:
            return None
        bucket = _BUCKETS[min(bisect.bisect_left(_BUCKETS, rows), len(_BUCKETS) - 1)]
        key = (bucket, columns, depth, x.dtype, out_dtype)
        if key not in self._checked:
            if torch.cuda.is_current_stream_capturing():
                return None
            if compiling():
                linear(x, weight, out_dtype=out_dtype, tile=choose_tile(64, columns, depth))  # that of the check
                return x.new_empty((rows, columns), dtype=out_dtype)
            self._checked[key] = self._check(bucket, weight, x.dtype, out_dtype)
        chosen = self._checked[key]
        if chosen is None:
            return None
        y = x.new_empty((rows, columns), dtype=out_dtype)
        return y if self._multiply(x, weight, y, chosen) else None

    def _check(self, rows: int, weight: torch.Tensor, dtype: torch.dtype, out_dtype: torch.dtype) -> _Heuristic | None:
        """The best algorithm for a shape, if it has our bits."""
        columns, depth = weight.shape
        chosen, count = _Heuristic(), ctypes.c_int()
        a, b, d = self._arguments(rows, columns, depth, depth, dtype, out_dtype)
        found = self._library.cublasLtMatmulAlgoGetHeuristic(
            self._handle, self._product, a, b, d, d, self._preference, 1, ctypes.byref(chosen), ctypes.byref(count)
        )
        if found != 0 or count.value == 0 or chosen.state != 0 or chosen.workspace != 0:
            return None
        generator = torch.Generator(weight.device).manual_seed(rows)
        x = torch.randn((rows, depth), generator=generator, dtype=torch.float32, device=weight.device).to(dtype)
        y = x.new_empty((rows, columns), dtype=out_dtype)
        same = self._multiply(x, weight, y, chosen) and torch.equal(
            y, linear(x, weight, out_dtype=out_dtype, tile=choose_tile(64, columns, depth))
        )
        if not same:
            log.warning(
                "cuBLASLt's product of %d x %d weights has other bits than ours on this GPU: ours are used, which is "
                "slower for many rows",
                columns,
                depth,
            )
        return chosen if same else None

    def _multiply(self, x: torch.Tensor, weight: torch.Tensor, y: torch.Tensor, chosen: _Heuristic) -> bool:
        columns, depth = weight.shape
        a, b, d = self._arguments(x.shape[0], columns, depth, x.stride(0), x.dtype, y.dtype)
        status = self._library.cublasLtMatmul(
            *(self._handle, self._product, ctypes.byref(self._one), _P(weight.data_ptr()), a, _P(x.data_ptr()), b),
            *(ctypes.byref(self._zero), _P(y.data_ptr()), d, _P(y.data_ptr()), d, ctypes.byref(chosen.algorithm)),
            *(None, ctypes.c_size_t(0), _P(torch.cuda.current_stream().cuda_stream)),
        )
        return bool(status == 0)

    def _arguments(
        self, rows: int, columns: int, depth: int, x_stride: int, dtype: torch.dtype, out_dtype: torch.dtype
    ) -> tuple[ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]:
        """Layouts of W, x and y, which to cuBLAS are column-major: y^T = (W^T)^T x^T."""
        kind = _TYPES[dtype]
        return (
            self._layout(kind, depth, columns, depth),
            self._layout(kind, depth, rows, x_stride),
            self._layout(_TYPES[out_dtype], columns, rows, columns),
        )

    def _layout(self, kind: int, rows: int, columns: int, stride: int) -> ctypes.c_void_p:
        key = (kind, rows, columns, stride)
        if key not in self._layouts:
            made, size = _P(), ctypes.c_uint64
            self._call(
                "MatrixLayoutCreate", ctypes.byref(made), kind, size(rows), size(columns), ctypes.c_int64(stride)
            )
            self._layouts[key] = made
        return self._layouts[key]

    def _set(self, function: str, of: ctypes.c_void_p, attribute: int, value: ctypes._SimpleCData[int]) -> None:
        self._call(function, of, attribute, ctypes.byref(value), ctypes.c_size_t(ctypes.sizeof(value)))

    def _call(self, name: str, *arguments: object) -> None:
        status = getattr(self._library, f"cublasLt{name}")(*arguments)
        if status != 0:
            raise OSError(f"cublasLt{name} returned {status}")


@functools.cache
def load() -> CublasLt | None:
    """The cuBLASLt that torch has loaded; None if there is none."""
    try:
        maps = Path("/proc/self/maps").read_text()
        path = next(line.split()[-1] for line in maps.splitlines() if "/libcublasLt.so" in line)
        return CublasLt(ctypes.CDLL(path))
    except (OSError, StopIteration) as error:
        log.debug("cuBLASLt is not used: %r", error)
        return None
