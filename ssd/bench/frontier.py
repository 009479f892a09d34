"""The latency-throughput frontier of a load test as a picture (PNG or SVG), and as a table."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import cycle, product
from pathlib import Path
from typing import Any, Final

from rich.box import SIMPLE
from rich.table import Table

from ssd.bench import drawing

KINDS: Final = (".png", ".svg")
_COLOURS: Final = ("#4c8bf5", "#e07a1f", "#0b9e6b", "#a259c4", "#c43d4b", "#7a6a4f", "#2bb3c0", "#9aa5b1")
_SHAPES: Final = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">")
_STYLES: Final = {"p50": "-", "p99": "--"}
_PANELS: Final = (("ttft_ms", "time to first token"), ("tpot_ms", "time per output token"), ("e2e_ms", "end to end"))

Row = dict[str, Any]


def draw(rows: Seq[Row], file: Path) -> None:
    """A panel per latency: output tokens/s against the median (line) and the 99th percentile (dashed).

    The shape of a point is its load: numbers beside points would cover each other.
    """
    from matplotlib.lines import Line2D
    from matplotlib.ticker import LogLocator, NullFormatter

    panels = [panel for panel in _PANELS if any(row[panel[0]] for row in rows)] or _PANELS
    figure = drawing.new_figure(4 * len(panels), 4.6)
    colours = dict(zip(dict.fromkeys(row["server"] for row in rows), cycle(_COLOURS), strict=False))
    known = {name for row in rows for latency, _ in panels for name in row[latency] or {}}
    styles = {name: style for name, style in _STYLES.items() if name in known}
    shapes = dict(zip(dict.fromkeys(point_name(row) for row in rows), cycle(_SHAPES), strict=False))
    every_axes = figure.subplots(1, len(panels), squeeze=False)[0]
    for axes, (latency, title) in zip(every_axes, panels, strict=True):
        for (server, colour), (name, style) in product(colours.items(), styles.items()):
            points = [row for row in rows if row["server"] == server and name in (row[latency] or {})]
            axes.plot(*_curve(points, latency, name), style, color=colour, linewidth=1.3)
            for row in points:
                axes.plot(*_curve([row], latency, name), shapes[point_name(row)], color=colour, markersize=5)
        axes.set_title(title, fontsize=11)
        axes.set_xlabel("output tokens a second")
        axes.set_ylabel("ms")
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 3, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_xlim(left=0)
        axes.grid(axis="y", color="#e3e7ec")
        axes.spines[["top", "right"]].set_visible(False)
    keys = [Line2D([], [], color=colour, linewidth=3, label=server) for server, colour in colours.items()]
    keys += [Line2D([], [], color="#333333", linestyle=style, label=name) for name, style in styles.items()]
    keys += [Line2D([], [], color="#333333", marker=m, linestyle="", label=_load(load)) for load, m in shapes.items()]
    figure.legend(handles=keys, loc="outside lower center", ncols=-(-len(keys) // 2), frameon=False, fontsize=10)
    file.write_bytes(drawing.encode(figure, file.suffix[1:], dpi=120))


def _curve(points: Seq[Row], latency: str, percentile: str) -> tuple[list[float], list[float]]:
    return [row["output_throughput"] for row in points], [row[latency][percentile] for row in points]


def _load(name: str) -> str:
    return name if name.endswith("/s") else f"{name} in flight"


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
