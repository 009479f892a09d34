"""Kernels in CUDA C++, compiled at run time with the NVRTC that torch ships, and kept in the user's cache."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal

import torch

from ssd.kernels import cache
from ssd.kernels.cuda.driver import DriverError, call

log = logging.getLogger("ssd")
PTX: Final = Path(__file__).parent / "csrc" / "ptx.cu"  # what all sources begin with
_P = ctypes.c_void_p
# cuda.h
_FUNC_MAX_DYNAMIC_SHARED: Final = 8
_COOPERATIVE: Final = 2
_PROGRAMMATIC: Final = 6
_BFLOAT16: Final = 9  # of a tensor map
_SWIZZLE_128B: Final = 3
_PROMOTION_256B: Final = 3


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute with a value that is an int."""

    _fields_ = [("id", ctypes.c_int64), ("value", ctypes.c_int), ("rest", ctypes.c_char * 60)]


class _Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        *((name, ctypes.c_uint) for name in ("grid_x", "grid_y", "grid_z", "block_x", "block_y", "block_z", "shared")),
        *(("stream", _P), ("attributes", _P), ("num_attributes", ctypes.c_uint)),
    ]


class BuildError(Exception):
    """A kernel cannot be used; the text says why."""


def source_of(path: Path) -> bytes:
    """The source, with what it includes in its place."""
    text = PTX.read_text(encoding="utf-8") + path.read_text(encoding="utf-8")
    return re.sub(r'#include "(.+)"', lambda name: path.with_name(name[1]).read_text(encoding="utf-8"), text).encode()


@functools.cache
def _library() -> ctypes.CDLL:
    """The NVRTC of torch's CUDA version."""
    name = f"libnvrtc.so.{str(torch.version.cuda).split('.')[0]}"
    site = Path(torch.__file__).parent.parent
    found = [str(path) for folder in (site / "torch" / "lib", *site.glob("nvidia/*/lib")) for path in folder.glob(name)]
    for path in (*found, name):
        try:
            return ctypes.CDLL(path)
        except OSError:
            continue
    raise BuildError(f"{name} was not found")


def compile_source(path: Path, macros: Mapping[str, int], architecture: str) -> bytes:
    """A source's cubin."""
    library, program, size = _library(), _P(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}", "--std=c++17", *(f"-D{name}={n}" for name, n in macros.items())]
    array = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    library.nvrtcCreateProgram(ctypes.byref(program), source_of(path), path.name.encode(), 0, None, None)
    try:
        failed = library.nvrtcCompileProgram(program, len(options), array)
        what = "ProgramLog" if failed else "CUBIN"
        getattr(library, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        text = ctypes.create_string_buffer(size.value)
        getattr(library, f"nvrtcGet{what}")(program, text)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))
    if failed:
        shown = " ".join(options)
        raise BuildError(f"NVRTC: {path.name} {shown}: {text.value.decode(errors='replace')[:500]}")
    return text.raw


def compiled(path: Path, macros: Mapping[str, int], device: torch.device) -> bytes:
    """The cubin from the user's cache, compiling it first if it is not there yet."""
    architecture = "sm_{}{}a".format(*torch.cuda.get_device_capability(device))  # a: with its own instructions
    major, minor = ctypes.c_int(), ctypes.c_int()
    _library().nvrtcVersion(ctypes.byref(major), ctypes.byref(minor))
    identity = f"{sorted(macros.items())} {architecture} {major.value}.{minor.value}"
    key = hashlib.sha256(source_of(path) + identity.encode()).hexdigest()[:20]
    made = cache.compiled(f"{path.stem}-{key}", ".cubin", lambda: compile_source(path, macros, architecture))
    return made.read_bytes()


class Kernel:
    """One kernel of a cubin, loaded to a device."""

    def __init__(self, cubin: bytes, name: str, device: torch.device) -> None:
        self._module, self._function = _P(), _P()
        with torch.cuda.device(device):
            torch.cuda.synchronize()  # there is a context
            call("cuModuleLoadData", ctypes.byref(self._module), cubin)
            call("cuModuleGetFunction", ctypes.byref(self._function), self._module, name.encode())

    def constant(self, name: str) -> int:
        """A constant of the source."""
        at, size, value = _P(), ctypes.c_size_t(), ctypes.c_uint32()
        call("cuModuleGetGlobal_v2", ctypes.byref(at), ctypes.byref(size), self._module, name.encode())
        call("cuMemcpyDtoH_v2", ctypes.byref(value), at, size)
        return value.value

    def allow_shared(self, size: int) -> None:
        """Bytes of shared memory that a launch may ask for."""
        call("cuFuncSetAttribute", self._function, _FUNC_MAX_DYNAMIC_SHARED, size)

    def launch(
        self,
        blocks: int,
        threads: int,
        shared: int,
        how: Literal["cooperative", "early"],
        *params: ctypes.Structure,
    ) -> None:
        """On the current stream. Cooperative: all blocks run at the same time, or the launch fails. Early: see
        `launch`."""
        attribute = _Attribute(_COOPERATIVE if how == "cooperative" else _PROGRAMMATIC, 1)
        stream, arguments = torch.cuda.current_stream().cuda_stream, (_P * len(params))(*map(ctypes.addressof, params))
        config = _Config(blocks, 1, 1, threads, 1, 1, shared, stream, ctypes.addressof(attribute), 1)
        call("cuLaunchKernelEx", ctypes.byref(config), self._function, arguments, None)


def kernels(
    path: Path, macros: Sequence[Mapping[str, int]], name: str, device: torch.device, shared: int, slower: str
) -> list[Kernel]:
    """The kernel of one source for each set of macros, with so many bytes of shared memory at most. None where they
    cannot be built, after a warning: what is `slower` then."""
    try:
        with ThreadPoolExecutor() as pool:  # NVRTC uses one core each
            cubins = list(pool.map(lambda each: compiled(path, each, device), macros))
        made = [Kernel(cubin, name, device) for cubin in cubins]
        for kernel in made:
            kernel.allow_shared(shared)
    except (BuildError, DriverError, OSError) as error:
        log.warning("%s: %s", slower, error)
        return []
    return made


class TensorMap(ctypes.Structure):
    """CUtensorMap."""

    _fields_ = [("of", ctypes.c_uint64 * 16)]


@functools.lru_cache(4096)
def tensor_map(at: int, rows: int, columns: int, stride: int, box: tuple[int, int]) -> TensorMap:
    """Of a bfloat16 matrix whose rows are `stride` bytes apart, in parts of 64 columns: [parts, rows, 64]. Boxes are
    some parts of some rows; they are swizzled (128B), and zero beyond the last row."""
    memory = ctypes.create_string_buffer(192)
    made = TensorMap.from_buffer(memory, -ctypes.addressof(memory) % 64)
    sizes, strides = (ctypes.c_uint64 * 3)(64, rows, columns // 64), (ctypes.c_uint64 * 2)(stride, 128)
    boxes, steps = (ctypes.c_uint32 * 3)(64, *reversed(box)), (ctypes.c_uint32 * 3)(1, 1, 1)
    address = (ctypes.byref(made), _BFLOAT16, 3, _P(at))
    call("cuTensorMapEncodeTiled", *address, sizes, strides, boxes, steps, 0, _SWIZZLE_128B, _PROMOTION_256B, 0)
    return made
