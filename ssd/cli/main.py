"""The `ssd` command."""

from __future__ import annotations

import functools
import logging
import sys
from typing import Annotated, Any, Final

import typer
import typer.core

from ssd.cli import (
    bench,
    bench_serve,
    cache,
    chat,
    demo,
    draft_server,
    explain,
    export,
    generate,
    models,
    pull,
    run,
    serve,
    simulate,
    verify,
)
from ssd.cli.help import Command, without_types
from ssd.version import VERSION

HELP: Final = """\
[bold]ssd[/]: exact, extremely fast decoding of large language models.

A MODEL is a bundled model such as [cyan]tiny-llama[/], a Hugging Face directory, a [cyan].gguf[/] file, or a hub id \
such as [cyan]meta-llama/Llama-3.2-1B[/], with [cyan]:Q4_K_M[/] behind it for one of its GGUF files (looked up in \
SSD_HF_CACHE and the Hugging Face cache, downloaded when it is in neither). [cyan]graft:MODEL@SHAPE[/] is a small \
model at the cost of a large one: see [cyan]ssd graft[/].

[bold]Try[/]

  ssd demo

  ssd chat

  ssd run Qwen/Qwen3-0.6B "What is the capital of France?"

  ssd list

  ssd generate MODEL "Once upon a time"

  ssd generate MODEL "What is the capital of France?" --chat

  ssd generate MODEL "A haiku:" -t 0.8 --seed 7 -n 3

  ssd generate MODEL "Once upon a time" --draft DRAFT --mode ssd

  ssd serve MODEL --draft DRAFT --mode ssd

  ssd explain

  ssd bench MODEL --draft DRAFT --compare ar,sd,ssd

  ssd verify MODEL --draft DRAFT

  ssd bench serve http://127.0.0.1:8000 --concurrency 1,2,4,8

  ssd simulate llama-3.1-70b --draft llama-3.2-1b --gpu h100-sxm --tensor-parallel-size 4 --accept 5.3 --k 6
"""


class _Commands(typer.core.TyperGroup):
    """`bench serve` and `cache clear` are commands of two words: `bench` itself takes a model, `cache` lists."""

    def get_params(self, ctx: Any) -> list[Any]:
        return without_types(super().get_params(ctx))

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        two = " ".join(args[:2])
        return super().resolve_command(ctx, [two, *args[2:]] if two in self.commands else args)


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


_add = functools.partial(app.command, cls=Command)
_add(help=demo.HELP)(demo.demo)
_add(help=chat.HELP)(chat.chat)
_add(help=run.HELP)(run.run)
_add(help=pull.HELP)(pull.pull)
_add("list", help=models.HELP)(models.list_models)
_add()(generate.generate)
_add(help=serve.HELP, context_settings={"auto_envvar_prefix": "SSD"})(serve.serve)  # SSD_PORT stands for --port
_add("draft-server", help=draft_server.HELP)(draft_server.draft_server)
_add(help=explain.HELP)(explain.explain)
_add(help=verify.HELP)(verify.verify)
_add(help=bench.HELP)(bench.bench)
_add("bench serve", help=bench_serve.HELP)(bench_serve.bench_serve)
_add(help=simulate.HELP)(simulate.simulate)
_add("cache", help=cache.HELP)(cache.show)
_add("cache clear", help=cache.CLEAR_HELP)(cache.clear)
_add(help=export.GRAFT_HELP)(export.graft)
_add(help=export.DRAFT_HELP)(export.export_draft)


@_add("version")
def versions() -> None:
    """Print what a bug report needs: versions, processor, GPUs, and which CPU kernels are used."""
    from ssd.cli.versions import report

    for heading, found in report().items():
        typer.echo(f"{heading}: {found}")
