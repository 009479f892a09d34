"""CUDA kernels on a CPU (`emulated_ptx.h`)."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path

from ssd.kernels import cache

HERE = Path(__file__).parent
COMPILER = shutil.which("g++") or shutil.which("clang++")


class TensorMap(ctypes.Structure):
    """Of a matrix of 16-bit numbers, with `stride` of them from row to row, `width` parts of 64, and the sizes of a
    box."""

    _sizes = ("rows", "stride", "width", "parts", "box_rows")
    _fields_ = [("at", ctypes.c_void_p), *((name, ctypes.c_longlong) for name in _sizes)]


def emulated_kernel(source: Path, entry: str, macros: Mapping[str, int]) -> ctypes.CDLL:
    """A library whose `launch(addresses of params, blocks, threads, shared bytes, seed)` says if all waits ended."""
    return _compiled(source, tuple({**macros, "ENTRY": entry}.items()))


@functools.cache
def _compiled(source: Path, macros: tuple[tuple[str, int | str], ...]) -> ctypes.CDLL:
    code = f'#include "emulated_ptx.h"\n#include "{source}"\n#include "emulated_main.h"\n'
    options = [f"-D{name}={value}" for name, value in macros]
    command = [str(COMPILER), "-O1", "-w", "-std=c++17", "-fPIC", "-shared", f"-I{HERE}", *options, "-xc++", "-"]

    def make() -> bytes:
        with tempfile.TemporaryDirectory() as folder:
            library = Path(folder) / "kernel.so"
            subprocess.run([*command, "-o", library], input=code, text=True, check=True)
            return library.read_bytes()

    sources = b"".join(file.read_bytes() for file in sorted((*HERE.glob("*.h"), *source.parent.iterdir())))
    key = hashlib.sha256(repr(command).encode() + code.encode() + sources).hexdigest()[:20]
    return ctypes.CDLL(str(cache.compiled(f"emulated-{key}", ".so", make)))


def addresses(*params: ctypes.Structure) -> ctypes.Array[ctypes.c_void_p]:
    return (ctypes.c_void_p * len(params))(*map(ctypes.addressof, params))


def constant(library: ctypes.CDLL, name: str) -> int:
    return ctypes.c_uint32.in_dll(library, name).value


def params_of_source(source: Path) -> list[str]:
    """The names of the fields of the source's `Params`, in their order."""
    body = re.search(r"struct Params {(.*?)\n};", source.read_text(encoding="utf-8"), re.DOTALL)
    assert body is not None
    code = re.sub(r"//[^\n]*", "", body[1])
    return [name for line in code.split(";") for name in re.findall(r"(\w+)\s*(?:,|$)", line.strip())]
