"""`python -m soak`: exit code 1 if anything was wrong."""

from __future__ import annotations

from typing import Annotated

import conftest  # noqa: F401  (first: it sets the environment that torch is loaded in)
import typer
from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress
from rich.table import Table

from soak.run import Plan, Report, soak
from ssd import LLM

console = Console()


def main(
    requests: Annotated[int, typer.Option(min=20, help="Requests in all.")] = 20_000,
    seed: Annotated[int, typer.Option(help="Of the requests and their order.")] = 0,
) -> None:
    """Drives `ssd serve` with many clients and compares every answer with plain decoding."""
    plan = Plan(requests, seed, min(1000, requests // 4), vanishing=requests // 100, slow=requests // 400)
    with (
        LLM("tiny-llama", device="cpu", max_model_len=512) as llm,
        Progress(*Progress.get_default_columns(), MofNCompleteColumn()) as bar,
    ):
        task = bar.add_task(f"SEED={seed}", total=requests)
        report = soak(llm, plan, lambda: bar.advance(task))
    print_report(report)
    if report.problems:
        raise typer.Exit(1)


def print_report(report: Report) -> None:
    counts = ", ".join(f"{number} {name}" for name, number in report.counts.items())
    console.print(f"{counts}; {report.seconds:.0f} s after the warm-up", highlight=False)
    console.print(f"drafters restarted: {report.metrics['drafter_failures_total']:.0f}", highlight=False)
    table = Table("", "after the warm-up", "at the end")
    for name in ("threads", "files", "rss", "pss"):
        table.add_row(name, *(f"{getattr(held, name):.0f}" for held in (report.before, report.after)))
    console.print(table)
    console.print(f"RSS and PSS (anonymous memory) in MiB; {Plan.growth:g} of growth are allowed", highlight=False)
    for problem in report.problems[:20]:
        console.print(problem, markup=False, highlight=False, style="red", soft_wrap=True)
    console.print(f"{len(report.problems)} problems", style="red" if report.problems else "green", highlight=False)


if __name__ == "__main__":
    typer.run(main)
