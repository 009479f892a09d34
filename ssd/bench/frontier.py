"""The latency-throughput frontier of a load test as a picture (PNG or SVG), and as a table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE
from rich.table import Table

from ssd.bench import drawing

KINDS: Final = (".png", ".svg")
_COLOURS: Final = ("#4c8bf5", "#e07a1f", "#0b9e6b", "#a259c4", "#c43d4b", "#7a6a4f", "#2bb3c0", "#9aa5b1")
_PANELS: Final = (("ttft_ms", "time to first token"), ("tpot_ms", "time per output token"), ("e2e_ms", "end to end"))

Row = dict[str, Any]


def draw(rows: Seq[Row], file: Path) -> None:
    """A panel per latency: output tokens/s against the median (line) and the 99th percentile (dashed)."""
    figure = drawing.new_figure(12, 4)
    for axes, (latency, title) in zip(figure.subplots(1, len(_PANELS)), _PANELS, strict=True):
        for colour, server in zip(cycle(_COLOURS), dict.fromkeys(row["server"] for row in rows), strict=False):
            points = [row for row in rows if row["server"] == server and row[latency]]
            speed = [row["output_throughput"] for row in points]
            median, slow = ([row[latency][name] for row in points] for name in ("p50", "p99"))
            axes.plot(speed, median, "o-", color=colour, label=f"{server}, p50", markersize=4)
            axes.plot(speed, slow, "o--", color=colour, label=f"{server}, p99", markersize=3, alpha=0.6)
            for row, x, y in zip(points, speed, median, strict=True):
                axes.annotate(point_name(row), (x, y), textcoords="offset points", xytext=(4, -9), fontsize=7)
        axes.set_title(title, fontsize=10)
        axes.set_xlabel("output tokens a second")
        axes.set_ylabel("ms")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    figure.get_axes()[0].legend(fontsize=7, frameon=False)
    file.write_bytes(drawing.encode(figure, file.suffix[1:], dpi=120))


def point_name(row: Row) -> str:
    """The load of a row: 4/s for a rate, else the number in flight."""
    return f"{row['request_rate']:g}/s" if row["request_rate"] else str(row["concurrency"] or "all")


def table(rows: Seq[Row]) -> Table:
    latencies = ("ttft", "tpot", "itl", "e2e")
    goodput = any("goodput" in row for row in rows)
    headings = ("server", "load", "done", "failed", "req/s", "tok/s", *latencies, *(["good/s"] if goodput else []))
    shown = Table(box=SIMPLE, caption="latencies in ms: median | 99th percentile", padding=(0, 0, 0, 1))
    for heading in headings:
        shown.add_column(heading, justify="left" if heading == "server" else "right", no_wrap=heading != "server")
    for row in rows:
        spreads = [row[f"{name}_ms"] for name in latencies]
        cells = [row["server"], point_name(row), str(row["completed"]), str(row["failed"])]
        cells += [f"{row['request_throughput']:.2f}", f"{row['output_throughput']:.1f}"]
        cells += [f"{spread['p50']:.1f}|{spread['p99']:.1f}" if spread else "-" for spread in spreads]
        shown.add_row(*cells, *([f"{row['goodput']:.2f}"] if "goodput" in row else []))
    return shown
