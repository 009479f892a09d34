"""`ssd version`: what a report of a bug needs to say about the machine."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from ssd.version import VERSION

_PACKAGES: Final = ("torch", "triton", "tokenizers", "transformers", "fastapi", "llguidance")


def report() -> dict[str, str]:
    """By heading: versions, processor, GPUs, and which CPU kernels are used."""
    import torch

    from ssd.bench.record import processor
    from ssd.execution.threads import num_cores
    from ssd.kernels.cpu import library
    from ssd.kernels.cpu.build import BuildError, find_compiler

    packages = [f"{name} {_version(name)}" for name in _PACKAGES]
    gpus = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    try:
        variant, compiler = library.build().variant, find_compiler()
        kernels = f"{variant}, compiled with {' '.join(compiler)}" if compiler else f"{variant}, those of the package"
    except BuildError as error:
        kernels = str(error)
    return {
        "ssd": VERSION,
        "Python": f"{platform.python_version()}, {platform.platform()}",
        "packages": ", ".join(packages),
        "CPU": f"{processor()}, {num_cores()} cores",
        "CPU kernels": kernels,
        "GPUs": "; ".join(f"{g.name}, {g.total_memory >> 30} GiB, {g.major}.{g.minor}" for g in gpus) or "none",
        "CUDA": torch.version.cuda or "none",
    }


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "-"
