"""Imports go one way: a package imports packages of lower layers only, and no modules import each other."""

from __future__ import annotations

import ast
import functools
from graphlib import TopologicalSorter
from pathlib import Path

import ssd

ROOT = Path(ssd.__file__).parent
LAYERS = [  # of packages, the lowest first
    {"errors", "version", "kv"},
    {"options"},
    {"constraints"},
    {"core"},
    {"config", "kernels", "prompts", "text"},
    {"parallel"},
    {"layers", "sampling"},
    {"models"},
    {"grafts"},
    {"execution", "simulation"},
    {"decoding"},
    {"drafting", "engine"},
    {"assembly"},
    {"llm", "worker", "draft_server"},
    {"bench", "server", "__init__"},
    {"cli"},
    {"__main__"},
]
LAYER_OF = {package: layer for layer, packages in enumerate(LAYERS) for package in packages}


def package_of(module: str) -> str:
    """The part of ssd that a module belongs to: a package, or a single file."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else "__init__"


def module_of(file: Path) -> str:
    return ".".join(("ssd", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__")


MODULES = {module_of(file): file for file in ROOT.rglob("*.py")}


@functools.cache
def imports(file: Path) -> set[str]:
    """The modules of ssd that a file imports, at its top, inside functions or for the type checker."""
    found: set[str] = set()
    statements: list[ast.AST] = [ast.parse(file.read_text(encoding="utf-8"))]
    for node in statements:
        for block in ("body", "orelse", "handlers", "finalbody", "cases"):
            statements += getattr(node, block, [])
        if isinstance(node, ast.ImportFrom) and node.module:
            for name in (f"{node.module}.{alias.name}" for alias in node.names):
                found.add(name if name in MODULES else node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & MODULES.keys()


def test_every_package_has_a_layer() -> None:
    assert {package_of(module) for module in MODULES} == LAYER_OF.keys()


def test_packages_import_lower_layers_only() -> None:
    wrong = []
    for module, file in MODULES.items():
        own = package_of(module)
        others = {other for other in imports(file) if package_of(other) != own}
        wrong += [f"{module} imports {other}" for other in others if LAYER_OF[package_of(other)] >= LAYER_OF[own]]
    assert not wrong


def test_no_modules_import_each_other() -> None:
    """Catches an import that hides inside a function from the circle it closes."""
    TopologicalSorter({module: imports(file) for module, file in MODULES.items()}).prepare()  # raises CycleError


def test_kernels_that_every_device_has_are_those_of_the_device() -> None:
    """Catches a function of one device's kernels that is called on all of them: `kernels(device)` has the right one."""
    devices = [{file.stem for file in (ROOT / "kernels" / each).glob("[a-z]*.py")} for each in ("cpu", "triton")]
    both = {f"ssd.kernels.{each}.{name}" for name in set.intersection(*devices) - {"ops"} for each in ("cpu", "triton")}
    assert "ssd.kernels.cpu.trees" in both
    outside = {module: file for module, file in MODULES.items() if package_of(module) != "kernels"}
    assert not [f"{module} imports {other}" for module, file in outside.items() for other in imports(file) & both]
