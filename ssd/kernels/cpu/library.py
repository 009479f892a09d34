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
def load() -> Kernels:
    """The kernels of this process."""
    return build()


def build() -> Kernels:
    """Compile (or find in the cache) and load the kernels, for the best instruction set that this machine can use.

    BuildError where that is impossible: nothing else computes rows whose bits do not depend on the batch.
    """
    failures = list[str]()
    for variant in candidates():
        try:
            return Kernels(ctypes.CDLL(str(library_of(variant))), variant.name)
        except (BuildError, OSError, subprocess.SubprocessError) as error:  # an old compiler does not know it
            failures.append(str(error))
            logger.debug("CPU kernels: %s failed: %s", variant.name, error)
    raise BuildError(
        f"there are no CPU kernels: {failures[-1]}. Install a C compiler such as gcc or clang, set CC to one, or "
        "install a wheel of ssd, which has compiled kernels"
    )
