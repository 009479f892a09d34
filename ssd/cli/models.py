"""`ssd list`: the models of this machine that can be run by name."""

from __future__ import annotations

import json
import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from ssd.cli.console import errors
from ssd.cli.options import command
from ssd.models.repository import gigabytes

if TYPE_CHECKING:
    from ssd.assembly.inventory import LocalModel

HELP: Final = """\
List the models of this machine that every command takes by name: [bold]the bundled ones, and those of the hub's \
cache[/].

For each its format, parameters, size on disk, and when it was last read, as the file system records it. With \
[cyan]--all[/] also what is in the cache and cannot be run, with the reason.

[bold]Try[/]

  ssd list

  ssd list --all

  ssd list --json | jq -r '.[].name'
"""
_UNITS: Final = ((86400, "day"), (3600, "hour"), (60, "minute"))  # seconds


@command
def list_models(
    everything: Annotated[bool, typer.Option("--all", help="Also what cannot be run, with the reason.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as a JSON array.")] = False,
) -> None:
    with errors.status("looking into the cache"):
        from ssd.assembly.inventory import local_models

        models = [model for model in local_models() if everything or not model.obstacle]
    if json_output:
        typer.echo(json.dumps([_fields(model) for model in models], indent=1))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(_table(models, time.time()))
    if console.is_terminal:
        console.print("[dim]ssd run NAME talks to one; ssd pull ORG/NAME downloads another.[/]")


def _table(models: list[LocalModel], now: float) -> Table:
    table = Table("name", "format", box=SIMPLE, show_edge=False)
    table.columns[0].overflow = "fold"
    for name in ("parameters", "size", "last read"):
        table.add_column(name, justify="right", no_wrap=True)
    if any(model.obstacle for model in models):
        table.add_column("cannot be run")
    for model in models:
        cells = [model.name, model.format, _count(model.parameters), gigabytes(model.size) if model.size else ""]
        cells += [_ago(now - model.last_used) if model.last_used else "", model.obstacle]
        table.add_row(*map(Text, cells[: len(table.columns)]), style="dim" if model.obstacle else None)
    return table


def _fields(model: LocalModel) -> dict[str, object]:
    used = datetime.fromtimestamp(model.last_used, UTC).isoformat(timespec="seconds") if model.last_used else None
    return asdict(model) | {"last_used": used}


def _count(parameters: int) -> str:
    for size, unit in ((1e9, "B"), (1e6, "M")):
        if parameters >= size:
            return f"{parameters / size:.1f} {unit}"
    return f"{parameters:,}" if parameters else ""


def _ago(seconds: float) -> str:
    for length, unit in _UNITS:
        if (count := int(seconds // length)) >= 1:
            return f"{count} {unit}{'s' if count > 1 else ''} ago"
    return "now"
