"""Imports the engine, quicker than a library may: this process is the `ssd` command's own."""

from __future__ import annotations

import gc
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssd.llm import LLM


def import_llm() -> type[LLM]:
    """The class LLM, with all that it imports, which later garbage collections leave out."""
    first = "torch" not in sys.modules  # else the process is somebody else's, too
    if first:
        gc.disable()  # a million objects are made, and none of them is garbage
    from ssd.llm import LLM

    if first:
        gc.freeze()
        gc.enable()
    return LLM
