"""`ssd verify`: the same tokens in every mode, batch and memory, checked on the user's own model and prompts."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Annotated, Final

import typer

from ssd.bench.config import BenchConfig, is_url
from ssd.cli.console import JSON_FILE, bundled_draft, follow, measuring, report_console, write_json
from ssd.cli.options import Flags, Given, command, flag_of
from ssd.config import EngineConfig, SpeculationConfig
from ssd.core import SamplingParams
from ssd.errors import ConfigError

HELP: Final = """\
Check on your own model and prompts that [bold]speculation, batches and memory change no token[/].

Every prompt is answered by plain decoding alone, at temperature 0 and, with a seed, 1. Then AR, SD, SSD and \
[cyan]auto[/] answer all of them: one at a time, several at once, with their prompts in small chunks, with prompts \
from the prefix cache, and with so few KV blocks that requests are preempted. The tokens must be equal, and their \
log-probabilities to the bit. What could not be compared is listed with its reason.

Of a URL, any OpenAI-compatible server is held against itself: every prompt alone, again, and beside others.

The exit code is 0 if all is equal, 1 if something differs, 2 if something failed and so could not be compared.

[bold]Try[/]

  ssd verify tiny-llama

  ssd verify MODEL --draft DRAFT --sets gsm8k --prompts 4 --max-tokens 128 --json equal.json --html equal.html

  ssd verify MODEL --draft suffix --dtype bfloat16 --quantization int8

  ssd verify http://127.0.0.1:8000/v1 --batch 16
"""


@functools.partial(command, error_code=2)
def verify(
    model: Annotated[
        str, typer.Argument(help="Any MODEL, as `ssd --help` describes them, or a server's URL.", metavar="MODEL|URL")
    ],
    name: Annotated[
        str | None, typer.Option("--model", help="Model's name at the URL.", show_default="the server's first")
    ] = None,
    json_file: Annotated[Path | None, JSON_FILE] = None,
    html: Annotated[Path | None, typer.Option(help="Write the report as a page, a .html file.")] = None,
    *,
    settings: Annotated[
        Given,
        Flags(
            BenchConfig,
            only={"sets", "num_prompts", "output_len", "chat", "folder", "batch"},
            defaults={"num_prompts": 2, "output_len": 64, "batch": 8},
        ),
    ],
    sampling: Annotated[Given, Flags(SamplingParams, only={"seed"}, defaults={"seed": 0})],
    speculation: Annotated[Given, Flags(SpeculationConfig, without={"mode", "acceptance", "saguaro_c"})],
    engine: Annotated[Given, Flags(EngineConfig, without={"max_num_seqs", "prefix_caching", "speculation"})],
) -> None:
    from ssd.bench.drawing import check_file

    if html is not None:
        check_file("html", html, (".html",), plain=(".html",))
    console = report_console(json_file)
    if is_url(model):
        from ssd.bench.openai import ServerContender
        from ssd.bench.verify_server import verify_server

        if given := [flag_of(each) for each in (*speculation, *engine)]:
            raise ConfigError(f"{', '.join(given)}: chosen by the server, leave it out")
        server = ServerContender(model, name)
        with measuring(f"asking {server.name}", console) as progress:
            report = verify_server(server, BenchConfig(model, **settings, **sampling), progress)
    else:
        from ssd.bench.verify import verify as verify_model

        if name is not None:
            raise ConfigError(f"--model {name}: names a model of a server, leave it out")
        draft = speculation.pop("draft", None) or bundled_draft(model)
        config = BenchConfig(model, draft, speculation=speculation, engine=engine, **settings, **sampling)
        follow(engine)
        with measuring(f"loading {model}", console) as progress:
            report = verify_model(config, progress)
    report.show(console)
    write_json(report.as_dict(), json_file)
    if html is not None:
        html.write_text(report.as_page(), encoding="utf-8")
    if not (report.equal and report.complete):
        raise typer.Exit(2 if report.equal else 1)
