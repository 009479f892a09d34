"""A benchmark's report: a table for people, JSON for machines, and a page to look at."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from ssd.bench.measure import MEAN

Row = dict[str, Any]


@dataclass(frozen=True)
class Report:
    header: dict[str, Any]  # what the figures depend on
    rows: list[Row]  # as `measure.figures` makes them
    notes: list[str]
    same_text: bool | None  # whether all methods of this engine wrote the same tokens; None: not comparable
    texts: list[str]  # answers of the first contender to the first set

    def as_dict(self) -> dict[str, Any]:
        return {**self.header, "notes": self.notes, "same_text": self.same_text, "results": self.rows}

    def as_json(self) -> str:
        return json.dumps(self.as_dict(), indent=1) + "\n"

    @property
    def title(self) -> str:
        settings = self.header["settings"]
        models = " + ".join(name for name in (settings["model"], settings["draft"]) if name)
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
        console.print(self._summary())
        if len(self.sets) > 1:
            console.print(self._by_set())
        if self.same_text is not None:
            console.print(
                "every method wrote the same tokens"
                if self.same_text
                else "[bold red]the methods wrote different tokens: this is a bug, please report it[/]"
            )
        for note in self.notes:
            console.print(f"[dim]{escape(note)}[/]", highlight=False, soft_wrap=True)

    def _summary(self) -> Table:
        table = Table(title=self.title, caption="decoding only: prompts, warm-up and loading apart")
        for heading in HEADINGS:
            table.add_column(heading, justify="left" if not heading else "right")
        for contender in self.contenders:
            table.add_row(*cells(self.row(contender, MEAN), self.contenders[0]))
        return table

    def _by_set(self) -> Table:
        table = Table("", title="tokens/s, set by set")
        for name in self.sets:
            table.add_column(name, justify="right")
        for contender in self.contenders:
            rates = [self.row(contender, name)["decode_tokens_per_second"] for name in self.sets]
            table.add_row(contender, *(f"{rate:.1f}" for rate in rates))
        return table


HEADINGS = (
    "",
    "tokens/s",
    "speed-up",
    "first token ms",
    "gap ms p50/p90/p99",
    "ms/token",
    "accepted",
    "tokens/round",
    "hits",
)


def cells(row: Row, first: str) -> list[str]:
    """One row of the table, as HEADINGS names them."""
    low, high = row["ratio_range"]
    spread = f" ({low:.2f} to {high:.2f})" if high - low >= 0.005 else ""
    gaps, ttft = row["gap_ms"], row["ttft_ms"]
    return [
        row["contender"],
        f"{row['decode_tokens_per_second']:.1f}",
        "1" if row["contender"] == first else f"{row['ratio']:.2f}{spread}",
        f"{ttft['p50']:.1f}" if ttft else "",
        "/".join(f"{gaps[p]:.1f}" for p in ("p50", "p90", "p99")) if gaps else "",
        f"{row['ms_per_token']:.2f}" if row["ms_per_token"] else "",
        *(f"{row[name]:.2f}" if row.get(name) else "" for name in ("acceptance", "tokens_per_round", "hit_rate")),
    ]
