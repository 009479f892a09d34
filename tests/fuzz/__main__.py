"""`python -m fuzz`: random cases for some minutes, or one case again. Exit code 1: something was found."""

from __future__ import annotations

import logging
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import conftest  # noqa: F401  (first: it sets the environment that torch is loaded in)
import transformers
import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from fuzz.case import Case, random_case
from fuzz.oracle import Oracle
from fuzz.run import Invalid, run
from fuzz.shrink import shrink

SHRINK_SECONDS = 60.0
TOTALS = ("requests", "tokens", "rounds")  # everything else is counted in cases
console = Console()


@dataclass(frozen=True)
class Found:
    """A case that fails, as small as it got, and how."""

    case: Case
    error: Exception
    again: bool  # it failed a second time


def failure(case: Case, oracle: Oracle) -> Exception | None:
    """How a case fails, if it does."""
    try:
        run(case, oracle)
    except Invalid:
        return None
    except Exception as error:
        return error
    return None


def find(case: Case, oracle: Oracle, covered: Counter[str], seconds: float = SHRINK_SECONDS) -> Found | None:
    """Runs a case; one that fails is shrunk."""
    try:
        covered.update(run(case, oracle))
        return None
    except Exception as error:
        first = error
    if failure(case, oracle) is None:
        return Found(case, first, again=False)
    small = shrink(case, lambda simpler: failure(simpler, oracle) is not None, seconds)
    return Found(small, failure(small, oracle) or first, again=True)


def print_summary(num_cases: int, covered: Counter[str]) -> None:
    totals = ", ".join(f"{covered.pop(name, 0)} {name}" for name in TOTALS)
    console.print(f"{num_cases} cases, {totals}", highlight=False)
    table = Table("cases with", "")
    for name, count in covered.most_common():
        table.add_row(name.replace("_", " "), str(count))
    console.print(table)


def report(found: Found, path: Path) -> None:
    path.write_text(found.case.to_json() + "\n")
    how = "" if found.again else " (it did not fail again: not shrunk)"
    console.print(f"[red]failed[/]{how}: {type(found.error).__name__}", highlight=False)
    console.print(str(found.error), markup=False, highlight=False)
    console.print(f"PYTHONPATH=tests python -m fuzz --replay {path}", markup=False, highlight=False, soft_wrap=True)


def main(
    minutes: Annotated[float, typer.Option(help="How long new cases are tried.")] = 2.0,
    seed: Annotated[int | None, typer.Option(help="Of the first case; the next has the next number.")] = None,
    processes: Annotated[bool, typer.Option(help="Now and then a draft in a process of its own.")] = True,
    replay: Annotated[Path | None, typer.Option(help="Runs the case of this file instead.")] = None,
    folder: Annotated[Path, typer.Option(help="Where failing cases are written.")] = Path("fuzz-failures"),
) -> None:
    """Compares random engines with plain decoding of each request alone."""
    logging.getLogger("ssd").setLevel(logging.CRITICAL)  # faults are planned
    transformers.utils.logging.disable_progress_bar()
    with Oracle() as oracle:
        if replay is not None:
            run(Case.from_json(replay.read_text()), oracle)
            console.print("passed")
            return
        seed = random.randrange(10**9) if seed is None else seed
        console.print(f"SEED={seed}", highlight=False)
        founds = fuzz(oracle, minutes * 60, seed, processes, folder)
    if founds:
        raise typer.Exit(1)


def fuzz(oracle: Oracle, seconds: float, seed: int, processes: bool, folder: Path) -> int:
    """Tries cases until the time is up; returns how many failed."""
    covered: Counter[str] = Counter()
    num_cases = num_failed = 0
    end = time.monotonic() + seconds
    columns = SpinnerColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("")
        while not num_cases or time.monotonic() < end:
            number = seed + num_cases
            case = random_case(number, processes=processes)
            progress.update(task, description=f"case {number}: {case.mode}, {case.model}, {num_failed} failed")
            found = find(case, oracle, covered)
            if found is not None:
                num_failed += 1
                folder.mkdir(exist_ok=True)
                report(found, folder / f"case-{number}.json")
            num_cases += 1
    print_summary(num_cases, covered)
    return num_failed


if __name__ == "__main__":
    typer.run(main)
