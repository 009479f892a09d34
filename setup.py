"""CPU kernels compiled with the package, for machines without a C compiler; where there is one, ssd compiles its own.

Everything else is in pyproject.toml.
"""

import platform

from setuptools import Extension, setup

FLAGS = [
    "-std=gnu11",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-Wno-psabi",
]  # see ssd/kernels/cpu.py
if platform.machine() in ("x86_64", "AMD64"):
    FLAGS.append("-march=x86-64-v3")  # AVX2 and FMA

# Loaded by ctypes. Without a compiler the package is installed all the same.
kernels = Extension(
    "ssd.kernels._cpu",
    ["ssd/kernels/cpu.c"],
    extra_compile_args=FLAGS,
    libraries=["m", "pthread"],
    py_limited_api=True,
    optional=True,
)
setup(ext_modules=[kernels], options={"bdist_wheel": {"py_limited_api": "cp311"}})
