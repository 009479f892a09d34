"""Imports the engine in a process that is the `ssd` command's own: quicker than a library may.

Most of the time until a small model's first token is the import of torch.
"""

from __future__ import annotations

import gc
import sys
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ssd.llm import LLM

# What tells torch's compiler the shapes of results: a quarter of the import's time, and 20 MB. Modules of the compiler
# import it themselves.
_COMPILER_ONLY: Final = "torch._meta_registrations"


def import_llm() -> type[LLM]:
    """The class LLM, with all that it imports. What was imported is left out of later garbage collections."""
    collecting = gc.isenabled()
    gc.disable()  # millions of objects are made, and next to none is garbage
    try:
        if "torch" not in sys.modules:
            _import_torch()
        from ssd.llm import LLM
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
    return LLM


def _import_torch() -> None:
    sys.modules[_COMPILER_ONLY] = ModuleType(_COMPILER_ONLY)
    try:
        import torch  # noqa: F401
    finally:
        del sys.modules[_COMPILER_ONLY]
