"""The house has one direction: nothing imports from a room above it."""

from __future__ import annotations

import ast
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


def imports(file: Path) -> set[str]:
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "ssd":
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "ssd" else {node.module}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names if alias.name.split(".")[0] == "ssd"}
    return found


def test_imports_go_downwards() -> None:
    wrong = []
    for file in ROOT.rglob("*.py"):
        relative = file.relative_to(ROOT)
        room = relative.parts[0].removesuffix(".py")
        if room != "__init__":
            wrong += [f"{relative} imports {m}" for m in imports(file) if FLOOR[room_of(m)] > FLOOR[room]]
    assert not wrong
