"""The `ssd` command."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Any, Final

import typer
import typer.core

from ssd.cli import bench, bench_serve, chat, demo, explain, export, generate, serve
from ssd.version import VERSION

HELP: Final = """\
[bold]ssd[/]: exact, extremely fast decoding of large language models.

A MODEL is a bundled model such as [cyan]tiny-llama[/], a Hugging Face directory, a [cyan].gguf[/] file, or a hub id \
such as [cyan]meta-llama/Llama-3.2-1B[/] (looked up in SSD_HF_CACHE and the Hugging Face cache, downloaded when it is \
in neither). [cyan]graft:MODEL@SHAPE[/] is a small model at the cost of a large one: see [cyan]ssd graft[/].

[bold]Try[/]

  ssd demo

  ssd chat

  ssd generate MODEL "Once upon a time"

  ssd generate MODEL "What is the capital of France?" --chat

  ssd generate MODEL "A haiku:" -t 0.8 --seed 7 -n 3

  ssd generate MODEL "Once upon a time" --draft DRAFT --mode ssd

  ssd serve MODEL --draft DRAFT --mode ssd

  ssd explain

  ssd bench MODEL --draft DRAFT --compare ar,sd,ssd

  ssd bench serve http://127.0.0.1:8000 --concurrency 1,2,4,8
"""


class _Commands(typer.core.TyperGroup):
    """`bench serve` is a command of two words: `bench` itself takes a model."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        return super().resolve_command(ctx, [" ".join(args[:2]), *args[2:]] if args[:2] == ["bench", "serve"] else args)


app = typer.Typer(
    cls=_Commands,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help=HELP,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"ssd {VERSION}")
        raise typer.Exit


class _StandardError(logging.Handler):
    """Writes to what is `sys.stderr` at the time: a spinner replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        sys.stderr.write(self.format(record) + "\n")


@app.callback()
def main(
    verbose: Annotated[
        int, typer.Option("--verbose", "-v", count=True, help="Log what the engine does; -vv: every detail.")
    ] = 0,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    logging.basicConfig(format="%(levelname)s %(message)s", handlers=[_StandardError()])
    levels = (logging.WARNING, logging.INFO, logging.DEBUG)
    logging.getLogger("ssd").setLevel(levels[min(verbose, 2)])


app.command(help=demo.HELP)(demo.demo)
app.command(help=chat.HELP)(chat.chat)
app.command()(generate.generate)
app.command(help=serve.HELP)(serve.serve)
app.command(help=explain.HELP)(explain.explain)
app.command(help=bench.HELP)(bench.bench)
app.command("bench serve", help=bench_serve.HELP)(bench_serve.bench_serve)
app.command(help=export.GRAFT_HELP)(export.graft)
app.command(help=export.EAGLE_HELP)(export.export_eagle)


@app.command("version")
def versions() -> None:
    """Print the version of ssd, of torch, and the devices it sees."""
    import torch

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu only"]
    typer.echo(f"ssd {VERSION}, torch {torch.__version__}, {', '.join(devices)}")
