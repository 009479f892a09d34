"""`ssd simulate`: what a pair of models gives on hardware that one does not have."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import asdict, fields
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.box import SIMPLE
from rich.table import Table

from ssd.cli.console import JSON_FILE, report_console, write_json
from ssd.cli.options import Flags, Given, command, flag_of
from ssd.errors import ConfigError
from ssd.options import options_of
from ssd.simulation.config import SimulationConfig

if TYPE_CHECKING:
    from ssd.simulation.run import Point

HELP: Final = """\
Tell what AR, SD and SSD would give: [bold]tokens per second, latencies, shares of the time, and costs[/], on GPUs \
that you do not have. No weights are needed, and nothing is loaded.

A MODEL is a published shape such as [cyan]llama-3.1-70b[/] (with [cyan]:fp8[/] or another format behind it), a \
[cyan]config.json[/] or its directory, a graft, or a model of the hub that is in a cache. With a MODEL alone the \
command tells what it needs, and its speed on every type of GPU.

Rounds are simulated event by event: verifications, preparations, messages, misses, arrivals. Times of steps follow \
from the bytes that they read and what they compute, at the shares that were measured on an H200. How many draft \
tokens are accepted, and how many drafts are prepared, is yours to say. docs/scaling.md compares predictions with \
measurements.

[bold]Try[/]

  ssd simulate llama-3.1-70b

  ssd simulate llama-3.1-70b --draft llama-3.2-1b --gpu h100-sxm --tensor-parallel-size 4 --k 6 --accept 5.3

  ssd simulate qwen3-32b --draft qwen3-0.6b --placement stream --k 6 --accept 4   (one H200 for both)

  ssd simulate llama-3.1-8b:fp8 --draft eagle --compare ar,sd --accept 0.8,0.7,0.6 --batch 16 --price 2.5

  ssd simulate qwen3-32b --draft qwen3-0.6b --accept 4 --rate 8 --batch 32 --prompt 1000 --tokens 300

  ssd simulate qwen3-32b --draft qwen3-0.6b --accept 4 --sweep batch=1,2,4,8,16,32 --plot batches.svg
"""
_TITLES: Final = {
    "tokens_per_second": "tokens/s",
    "ratio": "ratio",
    "tokens_per_second_per_gpu": "tokens/s a GPU",
    "tokens_per_round": "tokens a round",
    "round_ms": "round, ms",
    "verification_ms": "verification, ms",
    "token_ms": "ms a token",
    "latency_50": "request, median, s",
    "latency_99": "request, 99 %, s",
    "first_token_50": "first token, median, s",
    "target_busy": "target busy",
    "draft_busy": "draft busy",
    "cost": "cost of 1M tokens",
}
_KINDS: Final = (".png", ".svg")


@command
def simulate(
    model: Annotated[str, typer.Argument(help="A shape, a config.json, a graft, or a model in a local cache.")],
    sweeps: Annotated[
        list[str] | None,
        typer.Option(
            "--sweep",
            metavar="OPTION=V,V,…",
            help="Vary an option. May be repeated: the first one is the picture's x axis, others are lines.",
        ),
    ] = None,
    json_file: Annotated[Path | None, JSON_FILE] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the first sweep: a .png or .svg file.")] = None,
    show: Annotated[str, typer.Option(metavar="NAME", help="What is drawn: a name of --json.")] = "tokens_per_second",
    *,
    settings: Annotated[Given, Flags(SimulationConfig)],
) -> None:
    from ssd.bench import drawing
    from ssd.simulation.run import Figures, needs, sweep

    varied = dict(map(_sweep, sweeps or []))
    if plot is not None:
        drawing.check_file("plot", plot, _KINDS)
        if not varied:
            raise ConfigError("plot: there is no --sweep to draw")
    showable = [each.name for each in fields(Figures) if each.name != "mode"]
    if show not in showable:
        raise ConfigError(f"show={show!r}: must be one of {', '.join(showable)}")
    console = report_console(json_file)
    if not varied and not settings.keys() - {"prompt", "tokens"}:
        rows = needs(SimulationConfig(model, **settings))
        console.print(_needs_table(rows))
        write_json({"model": model, "needs": rows}, json_file)
        return
    first = {name: values[0] for name, values in varied.items()}
    config = SimulationConfig(model, **{**settings, **first})
    points = list(sweep(config, varied))
    console.print(_table(points))
    if plot is not None:
        plot.write_bytes(_drawn(points, show, plot.suffix[1:]))
    written = [{**point.values, "figures": [asdict(each) for each in point.figures]} for point in points]
    write_json({"config": asdict(config), "points": written}, json_file)


def _sweep(text: str) -> tuple[str, list[Any]]:
    """A field of the settings, and its values."""
    given, equals, values = text.partition("=")
    known = {name: each for name, each in options_of(SimulationConfig).items() if each.simple}
    name = given.strip().lstrip("-").replace("-", "_")
    if name not in known or not equals or not values:
        near = get_close_matches(name, known, n=1)
        meant = f"did you mean {near[0]}? " if near else ""
        raise ConfigError(
            f"sweep={text!r}: {meant}write OPTION=V,V,…, such as batch=1,2,4; options: {', '.join(known)}"
        )
    return name, [known[name].parse(value) for value in values.split(",")]


def _table(points: Seq[Point]) -> Table:
    """Columns in which some mode has a figure."""
    shown = [name for name in _TITLES if any(getattr(each, name) is not None for p in points for each in p.figures)]
    table = Table(*map(flag_of, points[0].values), "mode", "GPUs", "engines", box=SIMPLE, show_edge=False)
    for name in shown:
        table.add_column(_TITLES[name], justify="right")
    for point in points:
        for each in point.figures:
            cells = [_number(getattr(each, name)) for name in shown]
            table.add_row(*map(str, point.values.values()), each.mode, str(each.gpus), str(each.engines), *cells)
    return table


def _needs_table(rows: Seq[dict[str, Any]]) -> Table:
    table = Table("GPU", "GPUs", box=SIMPLE, show_edge=False)
    for title in ("weights each, GiB", "KV, tokens", "at most, tokens/s", "AR, tokens/s"):
        table.add_column(title, justify="right")
    for row in rows:
        name, gpus, *figures = row.values()
        table.add_row(name, str(gpus or "more than 8"), *map(_number, figures))
    return table


def _number(value: float | None) -> str:
    """Three digits at least."""
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _drawn(points: Seq[Point], show: str, kind: str) -> bytes:
    """A line for each mode and each combination of the values of further sweeps."""
    from ssd.bench import drawing

    figure = drawing.new_figure(6.4, 3.8)
    axes = figure.subplots()
    x, *others = points[0].values
    lines: dict[str, list[tuple[Any, float]]] = {}
    for point in points:
        names = [f"{other} {point.values[other]}" for other in others]
        for each in point.figures[show == "ratio" :]:  # that of the first mode is 1
            value = getattr(each, show)
            if value is not None:
                lines.setdefault(", ".join([each.mode, *names]), []).append((point.values[x], value))
    for name, line in lines.items():
        axes.plot(*zip(*line, strict=True), marker="o", markersize=3, label=name)
    ticks = list(dict.fromkeys(point.values[x] for point in points))
    if not isinstance(ticks[0], str):
        axes.set_xscale("log" if min(ticks) > 0 and max(ticks) >= 16 * min(ticks) else "linear")
        axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    axes.set_xlabel(x.replace("_", " "))
    axes.set_ylabel(_TITLES.get(show, show))
    values = [value for line in lines.values() for _, value in line]
    if min(values) > 0 and max(values) >= 16 * min(values):
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=8, frameon=False)
    return drawing.encode(figure, kind)
