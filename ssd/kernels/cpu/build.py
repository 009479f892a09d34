"""Compiles the CPU kernels (`csrc`) for a variant of instructions, once per machine: `python -m ssd.kernels.cpu.build`.

Needs nothing but the standard library, so that it can be done while packages are installed.
"""

from __future__ import annotations

import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from contextlib import suppress
from pathlib import Path

from ssd.errors import SSDError
from ssd.kernels import cache
from ssd.kernels.cpu.variants import FLAGS, Variant, usable

FOLDER = Path(__file__).parent  # where `setup.py` puts libraries
SOURCE = FOLDER / "csrc" / "ssd.c"  # includes the other files there and in `isa`
COMPILE_TIMEOUT_S = 900  # with sanitizers and AVX-512, minutes


class BuildError(SSDError):
    """The kernels could not be compiled or loaded; the text says why."""


def candidates() -> list[Variant]:
    """Variants that this machine may use, the best first; $SSD_CPU_VARIANT names one of them."""
    wanted = os.environ.get("SSD_CPU_VARIANT")
    found = [each for each in usable() if wanted in (None, "", each.name)]
    if not found:
        names = ", ".join(each.name for each in usable())
        raise BuildError(f"SSD_CPU_VARIANT={wanted!r} is not one that this processor can run: {names}")
    return found


def library_of(variant: Variant) -> Path:
    """The shared library of a variant: compiled if need be, or, without a compiler, that of the package."""
    compiler = find_compiler()
    return prebuilt(variant) if compiler is None else _compiled(compiler, variant)


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
    machine = (str(found.st_size), str(found.st_mtime_ns), *flags, platform.machine())
    identity = [*compiler, str(binary), *machine, variant.source]
    sources = (file.read_bytes() for file in sorted(SOURCE.parent.rglob("*.[ch]")))
    return hashlib.sha256(b"".join(sources) + "\0".join(identity).encode()).hexdigest()[:20]


def _compile(compiler: list[str], variant: Variant) -> bytes:
    """Says so before: a warning, which Python shows by default, since the process seems to hang meanwhile."""
    logging.getLogger("ssd.loading").warning(
        "compiling CPU kernels (%s), once for this machine: takes up to half a minute", variant.name
    )
    with tempfile.TemporaryDirectory() as scratch:
        library = Path(scratch) / "cpu.so"
        source = str(SOURCE.with_name(variant.source))
        _run([*compiler, *FLAGS, *variant.flags, "-shared", source, "-o", str(library), "-lm", "-lpthread"])
        return library.read_bytes()


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=COMPILE_TIMEOUT_S, check=False)
    if done.returncode:
        raise BuildError(f"{shlex.join(command)} failed: {done.stderr.strip()[-500:]}")


def main() -> None:
    """Compiles the best variant. If that fails, the first use tries the others, and says why none can be compiled."""
    with suppress(BuildError, OSError, subprocess.SubprocessError):
        library_of(candidates()[0])


if __name__ == "__main__":
    main()
