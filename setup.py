"""CPU kernels compiled with the package, for machines without a C compiler; where there is one, ssd compiles its own.

Everything else is in pyproject.toml.
"""

import platform
import runpy

from setuptools import Extension, setup

variants = runpy.run_path("ssd/kernels/variants.py")

# Loaded by ctypes. What the compiler does not know is left out; without a compiler that is all of them.
kernels = [
    Extension(
        f"ssd.kernels.{each.library}",
        ["ssd/kernels/cpu.c"],
        extra_compile_args=[*variants["FLAGS"], *each.flags],
        libraries=["m", "pthread"],
        py_limited_api=True,
        optional=True,
    )
    for each in variants["VARIANTS"].get(platform.machine(), (variants["PLAIN"],))
]
setup(ext_modules=kernels, options={"bdist_wheel": {"py_limited_api": "cp311"}})
