"""Results of benchmarks as files: command, commit, machine, date, and rows of named figures.

The files in `bench/results` have this layout; `scripts/figures.py` makes the tables of the docs from them. The name of
a column has its unit. A figure is a number, or {"median": …, "range": [least, most]}.
"""

from __future__ import annotations

import json
import math
import platform
import re
import shlex
import statistics
import subprocess
import sys
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from datetime import date
from pathlib import Path
from typing import Any, Final

import torch
from rich.table import Table

from ssd.execution.threads import num_cores

Figure = float | dict[str, Any]
Rows = dict[str, dict[str, Figure]]  # by the row's name, then by column

HELP: Final = "write the figures here, with command, commit, machine and date: a file as in bench/results"
_ROOT: Final = Path(__file__).parents[2]
_SECRET: Final = re.compile(r"(--draft-token[ =])\S+")
_CELL: Final = re.compile(r"(-?[\d.]+)%?(?: \((-?[\d.]+) to (-?[\d.]+)\))?")


def record(file: Path | None, rows: Mapping[str, Mapping[str, Figure]], notes: Seq[str] = ()) -> None:
    """Writes a result; nothing without a file."""
    if file is not None:
        result = {**origin(), "rows": rows} | ({"note": "; ".join(notes)} if notes else {})
        file.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def origin() -> dict[str, Any]:
    """What was run, which state of the code, when, and where."""
    script = Path(sys.argv[0])
    name = f"python bench/{script.name}" if script.suffix == ".py" and script.parent.name != "ssd" else "ssd"
    machine = {"cpu": f"{processor()}, {num_cores()} cores", "torch": torch.__version__}
    if torch.cuda.is_available():
        machine |= {"gpu": torch.cuda.get_device_name(0), "cuda": str(torch.version.cuda)}
    command = _SECRET.sub(r"\1…", f"{name} {shlex.join(sys.argv[1:])}".strip())
    return {"command": command, "commit": _commit(), "date": date.today().isoformat(), "machine": machine}


def spread(values: Seq[float], digits: int = 1) -> Figure:
    """Median and range; of one value itself."""
    if len(values) == 1:
        return round(values[0], digits)
    ends = [round(min(values), digits), round(max(values), digits)]
    return {"median": round(statistics.median(values), digits), "range": ends}


def text(figure: Figure) -> str:
    """As a table shows it."""
    if not isinstance(figure, dict):
        return f"{figure:,}"
    low, high = figure["range"]
    return f"{figure['median']:,} ({low:,} to {high:,})"


def rows_of(table: Table, names: int = 1, prefix: str = "") -> Rows:
    """A printed table as rows. Its first `names` columns name a row; cells that are no figures are left out."""
    columns = [(str(column.header), [str(cell) for cell in column.cells]) for column in table.columns]
    rows: Rows = {}
    for at in range(table.row_count):
        labels = [(header, cells[at]) for header, cells in columns[:names]]
        name = prefix + ", ".join(f"{header} {cell}" if _figure(cell) is not None else cell for header, cell in labels)
        found = {header: _figure(cells[at]) for header, cells in columns[names:]}
        rows[name] = {header: figure for header, figure in found.items() if figure is not None}
    return rows


def _figure(cell: str) -> Figure | None:
    found = _CELL.fullmatch(cell)
    if found is None or not math.isfinite(value := _number(found[1])):
        return None
    return value if found[2] is None else {"median": value, "range": [_number(found[2]), _number(found[3])]}


def _number(digits: str) -> float:
    return float(digits) if "." in digits else int(digits)


def _commit() -> str | None:
    """The checkout's commit, `-dirty` where files differ from it; None outside of a checkout."""
    if not (_ROOT / ".git").exists():
        return None
    command = ["git", "-C", str(_ROOT), "describe", "--always", "--dirty", "--exclude", "*"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or None


def processor() -> str:
    """The model's name where Linux knows it (x86), else the architecture."""
    cpus = Path("/proc/cpuinfo")
    lines = cpus.read_text().splitlines() if cpus.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())
