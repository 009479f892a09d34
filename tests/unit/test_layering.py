"""Imports go one way: none upwards between packages, and none in a circle between modules."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import ssd

ROOT = Path(ssd.__file__).parent
ROOMS = [  # from the ground floor up
    {"errors", "core", "config", "version"},
    {"kernels", "prompts"},
    {"parallel", "text"},
    {"layers"},
    {"models"},
    {"execution"},
    {"decoding"},
    {"engine"},
    {"drafting"},
    {"assembly"},
    {"llm", "worker"},
    {"bench"},
    {"cli", "__main__", "__init__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(ROOMS) for room in rooms}


def room_of(module: str) -> str:
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(file: Path) -> str:
    return ".".join(("ssd", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(file): file for file in ROOT.rglob("*.py")}


def imports(file: Path) -> set[str]:
    """The modules of ours that a file imports, at its top, inside functions or for the type checker."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                found.add(name if name in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def test_imports_go_downwards() -> None:
    wrong = []
    for module, file in MODULES.items():
        if module != "ssd":  # it offers LLM
            floor = FLOOR[room_of(module)]
            wrong += [f"{module} imports {other}" for other in imports(file) if FLOOR[room_of(other)] > floor]
    assert not wrong


def test_no_modules_import_each_other() -> None:
    """Catches an import that hides inside a function from the circle it closes."""
    TopologicalSorter({module: imports(file) for module, file in MODULES.items()}).prepare()  # raises CycleError
