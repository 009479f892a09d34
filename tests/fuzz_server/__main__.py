"""`python -m fuzz_server`: exit code 1 if anything was found."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Annotated

import conftest  # noqa: F401  (first: it sets the environment that torch is loaded in)
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress

from fuzz_server.run import GROWTH, Report, fuzz, replay

console = Console()


def main(
    requests: Annotated[int, typer.Option(min=1000, help="Requests in all.")] = 100_000,
    minutes: Annotated[float, typer.Option(help="It ends earlier after this time.")] = math.inf,
    seed: Annotated[int | None, typer.Option(help="Of the requests.")] = None,
    again: Annotated[Path | None, typer.Option("--replay", help="Sends the request of this file instead.")] = None,
    folder: Annotated[Path, typer.Option(help="Where failing requests are written.")] = Path("fuzz-failures"),
) -> None:
    """Sends `ssd serve` requests that are odd, broken or hardly HTTP."""
    if again is not None:
        problem = replay(again)
        console.print(problem or "passed", markup=False, highlight=False)
        raise typer.Exit(1 if problem else 0)
    seed = random.randrange(10**9) if seed is None else seed
    with Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as bar:
        task = bar.add_task(f"SEED={seed}", total=requests)
        report = fuzz(requests, seed, minutes * 60, lambda: bar.advance(task))
    print_report(report, folder)
    if report.problems:
        raise typer.Exit(1)


def print_report(report: Report, folder: Path) -> None:
    answers = ", ".join(f"{name}: {count}" for name, count in report.statuses.most_common())
    console.print(f"{report.statuses.total()} requests in {report.seconds:.0f} s", highlight=False)
    console.print(f"by status (None: closed without an answer): {answers}", highlight=False)
    for name in ("threads", "files", "rss"):
        before, after = (getattr(held, name) for held in (report.before, report.after))
        console.print(f"{name}: {before:.0f} after the warm-up, {after:.0f} at the end", highlight=False)
    console.print(f"RSS in MiB; {GROWTH:g} MiB of growth are allowed", highlight=False)
    for problem in report.problems[:20]:
        console.print(problem, markup=False, highlight=False, style="red", soft_wrap=True)
    for number, request in enumerate(report.failing[:20]):
        folder.mkdir(exist_ok=True)
        path = folder / f"request-{number}.bin"
        path.write_bytes(request)
        console.print(f"PYTHONPATH=tests python -m fuzz_server --replay {path}", highlight=False, soft_wrap=True)
    console.print(f"{len(report.problems)} problems", style="red" if report.problems else "green", highlight=False)


if __name__ == "__main__":
    typer.run(main)
