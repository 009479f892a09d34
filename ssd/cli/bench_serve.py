"""`ssd bench serve`: load on a server, and what becomes of its latencies."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeVar

import typer

from ssd.bench.config import Requests
from ssd.cli.console import JSON_FILE, measuring, print_error, print_note, report_console, write_json
from ssd.cli.options import Flags, Given, command
from ssd.core import SamplingParams
from ssd.errors import ConfigError
from ssd.version import VERSION

if TYPE_CHECKING:
    from ssd.bench.serve import Load

T = TypeVar("T")

HELP: Final = """\
Put load on any [bold]OpenAI-compatible server[/], and measure first token, time per token and throughput.

Requests arrive at random ([cyan]--request-rate[/], a Poisson process), or a fixed number is in flight \
([cyan]--concurrency[/]); lists by commas make a sweep. Prompts have lengths like ShareGPT's, or come from a prompt \
set. Tokens are counted by the server's usage. The exit code is 1 if a request failed.

[bold]Try[/]

  ssd bench serve http://127.0.0.1:8000 --concurrency 1,2,4,8,16 --plot frontier.png

  ssd bench serve http://127.0.0.1:8000 --request-rate 1,2,4 --goodput ttft:200,tpot:30 --json load.json

  ssd bench serve ssd=http://127.0.0.1:8000 vllm=http://127.0.0.1:8001 --dataset gsm8k
"""


@command
def bench_serve(
    urls: Annotated[
        list[str], typer.Argument(help="URLs of servers, perhaps with a name: NAME=URL.", metavar="URL...")
    ],
    model: Annotated[str | None, typer.Option(help="Model's name there.", show_default="the server's first")] = None,
    request_rate: Annotated[str, typer.Option(metavar="RATES", help="Arrivals per second, separated by commas.")] = "",
    concurrency: Annotated[str, typer.Option(metavar="NUMBERS", help="Requests in flight, separated by commas.")] = "",
    goodput: Annotated[
        list[str] | None, typer.Option(help="Count requests within these ms: ttft:200,tpot:30,e2e:5000.")
    ] = None,
    json_file: Annotated[Path | None, JSON_FILE] = None,
    plot: Annotated[list[Path] | None, typer.Option(help="Draw the latency-throughput frontier: .png or .svg.")] = None,
    earlier: Annotated[
        list[Path] | None, typer.Option("--with", help="Show the results of this earlier --json file, too.")
    ] = None,
    *,
    sent: Annotated[Given, Flags(Requests)],
    sampling: Annotated[Given, Flags(SamplingParams, only={"temperature", "seed"}, defaults={"seed": 0})],
) -> None:
    from ssd.bench import drawing, frontier, serve
    from ssd.bench.openai import ServerContender

    loads, goals = _loads(request_rate, concurrency), serve.parse_goals(goodput or [])
    requests = Requests(**sent, **sampling)
    for file in plot or []:
        drawing.check_file("plot", file, frontier.KINDS)
    out = report_console(json_file)
    before = [row for file in earlier or [] for row in _read(file)]
    servers = [ServerContender(url, model, name) for name, url in map(_named, urls)]
    with measuring("warm-up", out) as progress:
        rows = serve.sweep(servers, loads, requests, goals, progress)
    out.print(frontier.table([*before, *rows]))
    for note in dict.fromkeys(server.note for server in servers if server.note):
        print_note(note, out)
    settings = {**asdict(requests), "goodput": goals}
    report = {"version": VERSION, "command": shlex.join(sys.argv), "settings": settings, "results": rows}
    write_json(report, json_file)
    for file in plot or []:
        frontier.draw([*before, *rows], file)
    for error in dict.fromkeys(error for row in rows for error in row["errors"]):
        print_error(error)
    if any(row["failed"] for row in rows):
        raise typer.Exit(1)


def _loads(request_rate: str, concurrency: str) -> list[Load]:
    """A sweep over one of the two; of the other at most one value."""
    from ssd.bench.serve import Load

    rates = _numbers("request-rate", request_rate, float) or [math.inf]
    numbers: list[int | None] = [*_numbers("concurrency", concurrency, int)] or [None]
    if len(rates) > 1 and len(numbers) > 1:
        raise ConfigError("request-rate and concurrency: sweep over one of them, and give one value of the other")
    if rates == [math.inf] and numbers == [None]:
        numbers = [1]
    return [Load(rate, number) for rate in rates for number in numbers]


def _numbers(name: str, text: str, kind: Callable[[str], T]) -> list[T]:
    try:
        return [kind(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise ConfigError(f"{name} {text!r}: write numbers, separated by commas") from None


def _named(text: str) -> tuple[str, str]:
    name, found, url = text.partition("=")
    return (name, url) if found and "/" not in name else ("", text)


def _read(file: Path) -> list[dict[str, Any]]:
    try:
        return list(json.loads(file.read_text(encoding="utf-8"))["results"])
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"with {file}: not a --json file of this command ({error})") from error
