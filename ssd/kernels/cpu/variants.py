"""How `cpu/csrc` is compiled: for which instruction sets, and which of them this processor has.

Needs nothing but the standard library: `setup.py` reads it, too.
"""

from __future__ import annotations

import platform
import re
from pathlib import Path
from typing import Final, NamedTuple

FLAGS: Final = ("-std=gnu11", "-fms-extensions", "-O3", "-fPIC", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
_AVX2: Final = ("avx2", "fma", "bmi2", "f16c")
_AVX512: Final = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")


class Variant(NamedTuple):
    """Kernels for processors that have what it `needs`, as Linux names it in /proc/cpuinfo."""

    name: str
    needs: tuple[str, ...] = ()
    flags: tuple[str, ...] = ()  # of GCC and Clang, beside `FLAGS`
    source: str = "ssd.c"  # in `csrc`

    @property
    def library(self) -> str:
        """Name of the extension module in the package."""
        return "_cpu_" + self.name.replace("-", "_")


VARIANTS: Final[dict[str, tuple[Variant, ...]]] = {  # by machine, the fastest first
    "x86_64": (
        Variant(
            "amx",
            (*_AVX512, "avx512_vnni", "amx_tile", "amx_int8", "amx_bf16"),
            ("-march=x86-64-v4", "-mavx512vnni", "-mamx-tile", "-mamx-int8", "-mamx-bf16"),
        ),
        Variant("avx512-vnni", (*_AVX512, "avx512_vnni"), ("-march=x86-64-v4", "-mavx512vnni")),
        Variant("avx512", _AVX512, ("-march=x86-64-v4",)),
        Variant("avx-vnni", (*_AVX2, "avx_vnni"), ("-march=x86-64-v3", "-mavxvnni")),
        Variant("avx2", _AVX2, ("-march=x86-64-v3",)),
        Variant("sse2"),
    ),
    "aarch64": (Variant("dotprod", ("asimddp",), ("-march=armv8.2-a+dotprod",)), Variant("neon")),
}

PLAIN: Final = Variant("plain")  # of other machines
SUFFIX: Final = Variant("suffix", source="suffix.c")  # suffix trees, for all processors: also beside a GPU


def usable() -> list[Variant]:
    """Those that this processor can run, the fastest first; the last one needs nothing."""
    has = features()
    return [each for each in VARIANTS.get(platform.machine(), (PLAIN,)) if has.issuperset(each.needs)]


def features() -> frozenset[str]:
    """The processor's instruction sets; none where Linux does not tell them."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return frozenset(found.group(1).split()) if found else frozenset()
