"""Loads the CPU kernels that `build` compiles."""

from __future__ import annotations

import ctypes
import functools
import logging
import subprocess

from ssd.kernels.cpu.build import BuildError, candidates, library_of
from ssd.kernels.cpu.kernels import Kernels

logger = logging.getLogger("ssd")


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
    """Compile (or find in the cache) and load the kernels, for the best instruction set that this machine can use."""
    failures = list[str]()
    for variant in candidates():
        try:
            return Kernels(ctypes.CDLL(str(library_of(variant))), variant.name)
        except (BuildError, OSError) as error:  # an old compiler or system does not know it
            failures.append(str(error))
            logger.debug("CPU kernels: %s failed: %s", variant.name, error)
    raise BuildError(failures[-1])
