"""Writes the tables of figures in README.md and docs/ from bench/results: `python scripts/figures.py`.

It replaces what is between these markers and the next `<!-- end -->`:

    <!-- figures: NAME -->                                 all rows of bench/results/NAME.json, and where they come from
    <!-- figures: NAME, NAME headlines: COLUMN | COLUMN -->  rows that these files name in "headlines", some columns

A result has `command` (or `similar`: a command that measures the same, where another script did), `commit`, `date`,
`machine` and `rows`, as `ssd/bench/record.py` writes them; `title`, `headlines`, `note` are added by hand. `commit` is
the state that was measured, or the commit that entered a figure into the docs.
"""

from __future__ import annotations

import json
import re
import textwrap
from decimal import Decimal
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
MARKER = re.compile(r"(<!-- figures: ([\w, -]+?)(?: headlines: (.+?))? -->\n).*?(<!-- end -->)", re.DOTALL)


def rendered(page: str) -> str:
    """The page, with the tables of the results as they are now."""
    return MARKER.sub(_section, page)


def names_in(page: str) -> set[str]:
    return {name for found in MARKER.finditer(page) for name in found[2].split(", ")}


def result(name: str) -> dict[str, Any]:
    """Numbers keep the digits that the file has."""
    return dict(json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"), parse_float=Decimal))


def _section(found: re.Match[str]) -> str:
    marker, names, headlines, end = found.groups()
    results = {name: result(name) for name in names.split(", ")}
    if headlines:
        rows = {shown: each["rows"][row] for each in results.values() for shown, row in each["headlines"].items()}
        table = _table("", headlines.split(" | "), rows)
    else:
        [only] = results.values()
        columns = dict.fromkeys(column for row in only["rows"].values() for column in row)
        table = _table(only.get("title", ""), [*columns], only["rows"])
    return f"{marker}\n{table}\n\n{_sources(results)}\n\n{end}"


def _table(title: str, columns: list[str], rows: dict[str, dict[str, Any]]) -> str:
    lines = [[title, *columns], ["---"] * (len(columns) + 1)]
    lines += [[name, *(_cell(row.get(column)) for column in columns)] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(line)} |".replace("|  |", "| |") for line in lines)


def _cell(figure: Any) -> str:
    if figure is None:
        return "-"
    if isinstance(figure, dict):
        low, high = figure["range"]
        shown = f"{low:,} to {high:,}"
        return f"{figure['median']:,} ({shown})" if "median" in figure else shown
    return f"{figure:,}"


def _sources(results: dict[str, dict[str, Any]]) -> str:
    if len(results) > 1:
        each = [f"`bench/results/{name}.json` ({_when(found)})" for name, found in results.items()]
        return _wrapped(f"Sources: {', '.join(each)}.")
    [found] = results.values()
    ran = ", ".join(f"`{command}`" for command in commands(found))
    machine = ", ".join(value if key in ("cpu", "gpu") else f"{key} {value}" for key, value in found["machine"].items())
    lines = [f"{'' if 'command' in found else 'Similar: '}{ran}.", f"{machine}; {_when(found)}.", found.get("note", "")]
    return "\n".join(_wrapped(line) for line in lines if line)


def commands(found: dict[str, Any]) -> list[str]:
    """What was run, or what measures the same."""
    named = found.get("command") or found["similar"]
    return [named] if isinstance(named, str) else list(named)


def _wrapped(line: str) -> str:
    return textwrap.fill(line, 120, break_long_words=False, break_on_hyphens=False)


def _when(found: dict[str, Any]) -> str:
    return f"{found['date']}, commit {found['commit']}"


def main() -> None:
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        page.write_text(rendered(text), encoding="utf-8")


if __name__ == "__main__":
    main()
