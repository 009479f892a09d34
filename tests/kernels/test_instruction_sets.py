"""`csrc/isa` is the only place that knows what the CPU kernels are compiled for, and `isa.h` the only list of it."""

from __future__ import annotations

import re
import tomllib

from ssd.kernels.cpu.build import FOLDER, SOURCE

ISA = SOURCE.parent / "isa"
SYSTEM = {"__linux__", "__clang__", "MADV_HUGEPAGE"}  # what system.h asks for
INTRINSIC = r"\b(_mm\d*_|_tile_|__m\d+|v\w+q?_[fsu](8|16|32|64)\b|(u?int|float)\d+x\d+_t)"


def test_kernels_do_not_ask_for_instruction_sets() -> None:
    """Neither by conditionals, of which there are those of the system and the compiler only, nor by intrinsics."""
    for file in sorted(SOURCE.parent.glob("*.[ch]")):
        text = file.read_text()
        conditions = re.findall(r"^\s*#\s*(?:if|ifdef|ifndef|elif)\b(.*)$", text, re.MULTILINE)
        asked = {name for each in conditions for name in re.findall(r"\b(?!defined)[A-Za-z_]\w*", each)}
        assert asked <= (SYSTEM if file.name == "system.h" else set()), (file.name, asked)
        assert not re.search(INTRINSIC, text), file.name


def test_what_an_instruction_set_supplies_is_in_the_list() -> None:
    """Catches a name that is misspelt or that nothing asks for: then the portable version would be used instead."""
    listed = set(re.findall(r"^#ifndef (\w+)", (ISA / "isa.h").read_text(), re.MULTILINE))
    for file in ISA.iterdir():
        supplied = set(re.findall(r"^#define (\w+) \1$", file.read_text(), re.MULTILINE))
        assert supplied <= listed, (file.name, supplied - listed)


def test_sources_of_both_folders_are_package_data() -> None:
    """Without them, an installed package has no kernels but for those that were compiled with it."""
    package = FOLDER.parents[1]
    project = tomllib.loads((package.parent / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["ssd"]
    packaged = {file for pattern in patterns for file in package.glob(pattern)}
    assert {file for file in SOURCE.parent.rglob("*") if file.is_file()} <= packaged
