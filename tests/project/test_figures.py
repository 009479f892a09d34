"""Figures of the docs come from bench/results, and every result says how it was measured."""

from __future__ import annotations

import importlib
import re
import runpy
import sys
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.table import Table

from ssd.bench.record import record, rows_of, spread
from ssd.cli.main import app

ROOT = Path(__file__).parents[2]
FIGURES = runpy.run_path(str(ROOT / "scripts" / "figures.py"))
NAMES = sorted(file.stem for file in (ROOT / "bench" / "results").iterdir())


@pytest.mark.parametrize("page", FIGURES["PAGES"], ids=lambda page: page.name)
def test_tables_are_what_the_script_writes(page: Path) -> None:
    """Catches a result that was changed without `python scripts/figures.py`, and a table that was changed by hand."""
    assert FIGURES["rendered"](page.read_text()) == page.read_text()


def test_every_result_is_shown() -> None:
    shown = [FIGURES["names_in"](page.read_text()) for page in FIGURES["PAGES"]]
    assert set().union(*shown) == set(NAMES)


def test_pages_of_figures_have_no_tables_of_their_own() -> None:
    """Catches figures without a source."""
    for name in ("README.md", "docs/benchmarks.md", "docs/comparison.md"):
        without = FIGURES["MARKER"].sub("", (ROOT / name).read_text())
        assert not re.findall(r"^\|.*\d.*\|$", without, re.MULTILINE), name


@pytest.mark.parametrize("name", NAMES)
def test_a_result_is_well_formed(name: str) -> None:
    result = FIGURES["result"](name)
    assert ("command" in result) != ("similar" in result)
    assert re.fullmatch(r"[0-9a-f]{7,}", result["commit"])
    date.fromisoformat(result["date"])
    assert set(result["machine"]) <= {"cpu", "gpu", "torch", "cuda", "triton", "driver"}
    assert result["rows"]
    assert all(_is_figure(figure) for row in result["rows"].values() for figure in row.values())
    assert set(result.get("headlines", {}).values()) <= set(result["rows"])


@pytest.fixture(scope="module")
def known() -> set[str]:
    """The names of all commands."""
    return set(typer.main.get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", NAMES)
def test_a_result_names_a_command_that_exists(name: str, known: set[str]) -> None:
    for command in FIGURES["commands"](FIGURES["result"](name)):
        program, first, *_ = command.split()
        assert first in known if program == "ssd" else program == "python" and (ROOT / first).is_file(), command


def test_scripts_can_be_imported() -> None:
    """Catches a script of bench/ that uses what was renamed: most of them need a GPU, and run in no test."""
    for file in (ROOT / "bench").glob("*.py"):
        importlib.import_module(file.stem)


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "argv", ["bench/linear.py", "--rows", "1"])
    monkeypatch.setitem(FIGURES["result"].__globals__, "RESULTS", tmp_path)
    return tmp_path / "new.json"


def test_what_a_benchmark_records_is_a_result(written: Path) -> None:
    table = Table("rows", "form", "ms", "ratio", "warning")
    table.add_row("8", "int8", "1.50", "1.21 (1.20 to 1.22)", "busy")
    record(written, rows_of(table, names=2) | {"all": {"ms": spread([3.04, 1, 2])}})
    result = FIGURES["result"]("new")
    assert result["command"] == "python bench/linear.py --rows 1"
    assert "torch" in result["machine"]
    assert result["rows"]["rows 8, int8"] == {
        "ms": Decimal("1.5"),
        "ratio": {"median": Decimal("1.21"), "range": [Decimal("1.2"), Decimal("1.22")]},
    }
    shown = FIGURES["rendered"]("<!-- figures: new -->\n<!-- end -->")
    assert "| rows 8, int8 | 1.5 | 1.21 (1.2 to 1.22) |" in shown
    assert "| all | 2 (1 to 3.0) | - |" in shown


def _is_figure(figure: Any) -> bool:
    if isinstance(figure, dict):
        return (
            set(figure) <= {"median", "range"} and len(figure["range"]) == 2 and all(map(_is_figure, figure["range"]))
        )
    return isinstance(figure, int | Decimal) and not isinstance(figure, bool)
