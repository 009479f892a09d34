"""Compiles the CPU kernels (`csrc`) for this processor, once per machine, and loads them."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from ssd.kernels import cache
from ssd.kernels.cpu.kernels import BuildError, Kernels
from ssd.kernels.cpu.variants import FLAGS, Variant, usable

logger = logging.getLogger("ssd")

FOLDER = Path(__file__).parent  # where `setup.py` puts libraries
SOURCE = FOLDER / "csrc" / "ssd.c"  # includes the other files there
COMPILE_TIMEOUT_S = 900  # with sanitizers and AVX-512, minutes


@functools.cache
def load() -> Kernels | None:
    """The kernels, compiled if need be; None, after one warning that says what to do, where that is impossible."""
    try:
        return build()
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        logger.warning(
            "CPU kernels are off (%s); the engine falls back to plain torch, which is slower and whose numbers may "
            "vary with the batch. Install gcc or clang, or point $CC to one, and start again.",
            error,
        )
        return None


def build() -> Kernels:
    """Compile (or find in the cache) and load the kernels, for the best instruction set that this machine can use.

    Without a compiler: those that came with the package. $SSD_CPU_VARIANT names another instruction set.
    """
    compiler, wanted, failures = find_compiler(), os.environ.get("SSD_CPU_VARIANT"), list[str]()
    variants = [each for each in usable() if wanted in (None, "", each.name)]
    if not variants:
        names = ", ".join(each.name for each in usable())
        raise BuildError(f"SSD_CPU_VARIANT={wanted!r} is not one that this processor can run: {names}")
    for variant in variants:
        try:
            return _built(compiler, variant)
        except (BuildError, OSError) as error:  # an old compiler or system does not know it
            failures.append(str(error))
            logger.debug("CPU kernels: %s failed: %s", variant.name, error)
    raise BuildError(failures[-1])


def _built(compiler: list[str] | None, variant: Variant) -> Kernels:
    if compiler is None:
        return Kernels(ctypes.CDLL(str(prebuilt(variant))), variant.name)
    return Kernels(ctypes.CDLL(str(_compiled(compiler, variant))), variant.name)


def find_compiler() -> list[str] | None:
    """The compiler's command: $CC (which may carry options), else cc, gcc or clang."""
    for candidate in (os.environ.get("CC", ""), "cc", "gcc", "clang"):
        try:
            command = shlex.split(candidate)
        except ValueError as error:
            raise BuildError(f"CC={candidate!r} cannot be read ({error})") from error
        path = shutil.which(command[0]) if command else None
        if path is not None:
            return [path, *command[1:]]
    return None


def prebuilt(variant: Variant) -> Path:
    """The library that `setup.py` has compiled."""
    found = next(iter(sorted(FOLDER.glob(f"{variant.library}.*so"))), None)
    if found is None:
        raise BuildError(f"no C compiler found, and the package was installed without kernels for {variant.name}")
    return found


def _compiled(compiler: list[str], variant: Variant) -> Path:
    """The shared library's path, compiling it first if this machine has not yet."""
    return cache.compiled(f"cpu-{_key(compiler, variant)}", ".so", lambda: _compile(compiler, variant))


def _key(compiler: list[str], variant: Variant) -> str:
    """Hash of everything that affects the machine code. The compiler's file is hashed in place of its version."""
    binary = Path(compiler[0]).resolve()
    found = binary.stat()
    flags = (*FLAGS, *variant.flags)
    identity = [*compiler, str(binary), str(found.st_size), str(found.st_mtime_ns), *flags, platform.machine()]
    sources = (file.read_bytes() for file in sorted(SOURCE.parent.iterdir()))
    return hashlib.sha256(b"".join(sources) + "\0".join(identity).encode()).hexdigest()[:20]


def _compile(compiler: list[str], variant: Variant) -> bytes:
    """Says so before: a warning, which Python shows by default, since the process seems to hang meanwhile."""
    logging.getLogger("ssd.loading").warning(
        "compiling CPU kernels (%s), once for this machine: takes about half a minute", variant.name
    )
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "cpu.so"
        _run([*compiler, *FLAGS, *variant.flags, "-shared", str(SOURCE), "-o", str(library), "-lm", "-lpthread"])
        return library.read_bytes()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")
