"""CPU kernels compiled with a wheel, for machines without a C compiler; where there is one, ssd compiles its own.

An editable install compiles none: the first use compiles the one that this processor needs. Everything else is in
pyproject.toml.
"""

import copy
import os
import platform
import runpy
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

variants = runpy.run_path("ssd/kernels/cpu/variants.py")

# Loaded by ctypes. What the compiler does not know is left out; without a compiler that is all of them.
kernels = [
    Extension(
        f"ssd.kernels.cpu.{each.library}",
        [f"ssd/kernels/cpu/csrc/{each.source}"],
        depends=sorted(map(str, Path("ssd/kernels/cpu/csrc").rglob("*.h"))),
        extra_compile_args=[*variants["FLAGS"], *each.flags],
        libraries=["m", "pthread"],
        py_limited_api=True,
        optional=True,
    )
    for each in (variants["SUFFIX"], *variants["VARIANTS"].get(platform.machine(), (variants["PLAIN"],)))
]


class BuildKernels(build_ext):
    """Compiles the variants in parallel; most have one source, so each has a folder for its object file."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.parallel = self.parallel or os.cpu_count()
        if self.editable_mode:
            self.extensions = []

    def build_extension(self, ext: Extension) -> None:
        own = copy.copy(self)
        own.build_temp = str(Path(self.build_temp, ext.name))
        super(BuildKernels, own).build_extension(ext)


setup(
    ext_modules=kernels,
    cmdclass={"build_ext": BuildKernels},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
