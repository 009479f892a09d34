"""The help of a command. typer's own gives every part of an option a column, and cuts off names at 80 columns."""

from __future__ import annotations

from typing import Any, Final

import typer.core
from rich.console import Console
from rich.padding import Padding
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

_NAMES: Final = 31  # columns for names and types: room for the longest name


class Command(typer.core.TyperCommand):
    """Its help has two columns: names above their types where both are too wide, and what an option means."""

    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        console = Console(highlight=False)
        console.print(Padding(Text(self.get_usage(ctx), style="bold"), 1))
        console.print(Padding(Text.from_markup(self.help or "", emoji=False), (0, 1, 1, 1)))
        panels: dict[str, Table] = {"Arguments": _table(), "Options": _table()}
        for each in self.get_params(ctx):
            default = "Arguments" if each.param_type_name == "argument" else "Options"
            panel = getattr(each, "rich_help_panel", None) or default
            names, meaning = (Text(text) for text in each.get_help_record(ctx))
            names.highlight_regex(r"(?<!\S)-[\w-]+", "bold cyan")
            meaning.highlight_regex(r"\[[^]]*\]$", "dim")
            panels.setdefault(panel, _table()).add_row(names, meaning)
        for title, table in panels.items():
            if table.rows:
                console.print(Panel(table, title=title, title_align="left", border_style="dim"))


def without_types(params: list[Any]) -> list[Any]:
    """Parameters whose flags are shown without a type: they take no value."""
    for each in params:
        if getattr(each, "is_flag", False) or getattr(each, "count", False):
            each.metavar = ""
    return params


def _table() -> Table:
    table = Table.grid(padding=(0, 2, 0, 0), expand=True)
    table.add_column(width=_NAMES, overflow="fold", style="yellow")
    table.add_column(ratio=1)
    return table
