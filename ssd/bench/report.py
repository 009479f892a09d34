"""A benchmark's report: tables for the terminal, and JSON."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import PurePath
from typing import Any

from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ssd.bench.measure import MEAN
from ssd.bench.record import Figure, spread
from ssd.models.hub import short_name

Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    header: dict[str, Any]  # versions, machine, settings
    rows: list[Row]  # of `measure.figures`
    notes: list[str]
    same_text: bool | None  # whether all methods of this engine wrote the same tokens; None: not comparable
    texts: list[str]  # answers of the first contender to the first set
    warnings: list[str] = field(default_factory=list)  # why the figures are not to be trusted

    def as_dict(self) -> dict[str, Any]:
        told = {"warnings": self.warnings, "notes": self.notes, "same_text": self.same_text}
        rows = {name: _figures(self.row(name, MEAN)) for name in self.contenders}  # as in `record`
        return {**self.header, **told, "rows": rows, "results": self.rows}

    @property
    def title(self) -> str:
        settings = self.header["settings"]
        models = " + ".join(_short(name) for name in (settings["model"], settings["draft"]) if name)
        if form := settings["engine"].get("quantization"):
            models = f"{models}, quantization={form}"
        return f"{models}, batch {settings['batch']}, temperature {settings['temperature']:g}, {self.header['device']}"

    @property
    def sets(self) -> list[str]:
        return list(dict.fromkeys(row["set"] for row in self.rows if row["set"] != MEAN))

    @property
    def contenders(self) -> list[str]:
        return list(dict.fromkeys(row["contender"] for row in self.rows))

    def row(self, contender: str, name: str) -> Row:
        return next(row for row in self.rows if (row["contender"], row["set"]) == (contender, name))

    def show(self, console: Console) -> None:
        console.print(self._means(SPEEDS, self.title, CAPTION))
        console.print(self._means(LATENCIES, "latency, ms: median, 90th and 99th percentile", ""))
        if len(self.sets) > 1:
            console.print(self._by_set())
        if self.same_text is not None:
            console.print(
                "every method wrote the same tokens"
                if self.same_text
                else "[bold red]the methods wrote different tokens: this is a bug, please report it[/]"
            )
        for warning in self.warnings:
            console.print(f"[bold yellow]warning: {escape(warning)}[/]", highlight=False, soft_wrap=True)
        for note in self.notes:
            console.print(f"[dim]{escape(note)}[/]", highlight=False, soft_wrap=True)

    def _means(self, headings: tuple[str, ...], title: str, caption: str) -> Table:
        table = Table(title=title, caption=caption or None, box=SIMPLE)
        for heading in headings:
            table.add_column(heading, justify="right" if heading else "left", no_wrap=True)
        for contender in self.contenders:
            table.add_row(*cells(self.row(contender, MEAN), headings, self.contenders[0]))
        return table

    def _by_set(self) -> Table:
        table = Table("", title="tokens/s, set by set", box=SIMPLE)
        for name in self.sets:
            table.add_column(name, justify="right")
        for contender in self.contenders:
            rates = [self.row(contender, name)["decode_tokens_per_second"] for name in self.sets]
            table.add_row(contender, *(f"{rate:.1f}" for rate in rates))
        return table


SPEEDS = ("", "tokens/s", "speed-up", "accepted", "tokens/round", "hits")
LATENCIES = ("", "first token", "between deliveries", "a token")
PERCENTILES = ("p50", "p90", "p99")
CAPTION = "decoding only: prompts, warm-up and loading apart; speed-up: mean of paired turns, with its 95 % interval"


def cells(row: Row, headings: tuple[str, ...], first: str) -> list[str]:
    """A row of a table."""
    texts = {
        "": row["contender"],
        "tokens/s": f"{row['decode_tokens_per_second']:.1f}",
        "speed-up": "1" if row["contender"] == first else speed_up(row),
        "accepted": _share(row.get("acceptance")),
        "tokens/round": _share(row.get("tokens_per_round")),
        "hits": _share(row.get("hit_rate")),
        "first token": _percentiles(row["ttft_ms"]),
        "between deliveries": _percentiles(row["gap_ms"]),
        "a token": f"{row['ms_per_token']:.2f}" if row["ms_per_token"] else "",
    }
    return [texts[heading] for heading in headings]


def speed_up(row: Row) -> str:
    """The ratio to the first contender and its interval, if there is one."""
    interval = row["ratio_interval"]
    return f"{row['ratio']:.2f}" + ("" if interval is None else f" ({interval[0]:.2f} to {interval[1]:.2f})")


def _figures(row: Row) -> dict[str, Figure]:
    """The columns of `SPEEDS` as figures."""
    rates = row["decode_tokens_per_second"], *row["decode_tokens_per_second_range"]
    ratios = row["ratio"], *(row["ratio_interval"] or ())
    shares = {"accepted": "acceptance", "tokens/round": "tokens_per_round", "hits": "hit_rate"}
    found: dict[str, Figure] = {"tokens/s": spread(rates), "speed-up": spread(ratios, 2)}
    return found | {name: round(row[key], 2) for name, key in shares.items() if row.get(key) is not None}


def _short(model: str) -> str:
    """A model's name without its folders."""
    path = PurePath(model)
    return short_name(path) if path.is_absolute() else model


def _share(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _percentiles(values: dict[str, float] | None) -> str:
    """In one cell, with a decimal where it matters."""
    return " ".join(f"{v:.0f}" if (v := values[name]) >= 100 else f"{v:.1f}" for name in PERCENTILES) if values else ""
