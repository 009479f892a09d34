"""Imports the engine, quicker than a library may: this process is the `ssd` command's own.

Most of the time until the first token of a small model is the import of torch.
"""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence as Seq
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ssd.llm import LLM

# Shapes of results for torch's compiler, which takes a quarter of the import's time, and 20 MB.
_FOR_COMPILER: Final = "torch._meta_registrations"


def import_llm() -> type[LLM]:
    """The class LLM, with all that it imports, which later garbage collections leave out."""
    first = "torch" not in sys.modules  # else the process is somebody else's, too
    if first:
        gc.disable()  # a million objects are made, and none of them is garbage
        _import_torch()
    from ssd.llm import LLM

    if first:
        gc.freeze()
        gc.enable()
    return LLM


def _import_torch() -> None:
    """All of torch but what its compiler needs, which is imported with the next module of torch: the compiler's are not
    among those that `import torch` brings."""
    sys.modules[_FOR_COMPILER] = ModuleType(_FOR_COMPILER)
    try:
        import torch  # noqa: F401
    finally:
        del sys.modules[_FOR_COMPILER]
    sys.meta_path.insert(0, _RestOfTorch())


class _RestOfTorch(MetaPathFinder):
    """Asked for the first module of torch that is not there yet: imports the rest before it, in torch's own order."""

    def find_spec(self, name: str, path: Seq[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        if not name.startswith("torch.") or self not in sys.meta_path:  # another thread was first
            return None
        sys.meta_path.remove(self)
        if name == _FOR_COMPILER:
            return None
        importlib.import_module(_FOR_COMPILER)
        module = sys.modules.get(name)
        if module is None:
            return None
        spec = ModuleSpec(name, _Imported(), is_package=hasattr(module, "__path__"))
        module.__spec__ = spec  # which Python takes in place of what is returned
        return spec


class _Imported(Loader):
    """For a module that was imported with the rest."""

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return sys.modules[spec.name]

    def exec_module(self, module: ModuleType) -> None:
        """It was executed."""
