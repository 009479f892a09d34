"""`ssd pull`: downloads a model from the Hugging Face hub."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from ssd.cli.console import errors, print_line
from ssd.cli.options import command
from ssd.errors import ConfigError
from ssd.models.hub import HubName, local_model
from ssd.models.repository import DEFAULT_QUANTIZATION, gigabytes

if TYPE_CHECKING:
    from ssd.models.download import Advance, Plan

HELP: Final = """\
Download a model from the Hugging Face hub: [bold]only the files that running it needs, each checked by its hash[/].

NAME is [cyan]org/name[/], or [cyan]org/name:Q4_K_M[/] for one file of a repository with GGUF files; Q4_K_M is also \
what is taken of several if none is named. The model is kept in the hub's cache, and every command takes it by the \
same name. What is there already is not downloaded again; after Ctrl-C or a lost connection the same command goes on \
where it stopped.

SSD_HF_CACHE, HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they do for other tools. A gated model needs \
a token of an account that has accepted its licence: [cyan]hf auth login[/], or HF_TOKEN.

[bold]Try[/]

  ssd pull Qwen/Qwen3-0.6B

  ssd pull Qwen/Qwen3-8B-GGUF:Q8_0

  ssd pull ORG/NAME --file '*Q5_K_M*.gguf'
"""


@command
def pull(
    name: Annotated[str, typer.Argument(metavar="NAME", help="org/name, or org/name:QUANTISATION for a GGUF file.")],
    file: Annotated[
        str | None, typer.Option(metavar="PATTERN", help="The GGUF file: its quantisation, name or a pattern of it.")
    ] = None,
    revision: Annotated[
        str | None,
        typer.Option(
            help="Branch, tag or commit. Other commands take main if it is there, too: give them the folder that is "
            "printed.",
            show_default="main",
        ),
    ] = None,
) -> None:
    found = hub_name(name, file)
    path = local_model(found, revision)
    if path is not None:
        print_line(f"{found} is there")
    else:
        path = download_shown(found, revision)
        print_line(f"Talk to it with: ssd run {found}")
    typer.echo(path)


def hub_name(name: str, file: str | None = None) -> HubName:
    """The name on the hub; ConfigError for anything else."""
    found = HubName.of(name)
    if found is None:
        raise ConfigError(f"NAME={name!r}: must be the name of a model on the hub, such as Qwen/Qwen3-0.6B")
    if file is not None and found.file is not None:
        raise ConfigError(f"--file {file}: {name} names a file already: leave one of them out")
    return found if file is None else HubName(found.repository, file)


def download_shown(name: HubName, revision: str | None = None, ask_beyond: float | None = None) -> Path:
    """Downloads a model and shows how far it is. `ask_beyond`: bytes beyond which a person at the terminal is asked."""
    from ssd.models.download import download, plan

    with errors.status(f"asking the hub for {name}"):
        planned = plan(name, revision)
    _print_plan(planned)
    missing = planned.size - planned.present
    if (
        ask_beyond is not None
        and missing > ask_beyond
        and sys.stdin.isatty()
        and not typer.confirm(f"Download {gigabytes(missing)}?", default=True, err=True)
    ):
        raise typer.Exit(1)
    try:
        with _bar(planned) as advance:
            return download(planned, advance)
    except KeyboardInterrupt:
        print_line("Interrupted: what was downloaded is kept, and the same command goes on with it.")
        raise


def _print_plan(plan: Plan) -> None:
    count = len(plan.files)
    what = plan.gguf or f"{count} files"
    why = f" ({DEFAULT_QUANTIZATION} unless you name another)" if plan.gguf and plan.is_default else ""
    kept = f", {gigabytes(plan.present)} of it there" if plan.present else ""
    print_line(f"{plan.name}: {what}{why}, {gigabytes(plan.size)}{kept}, into {plan.snapshot.entry}")


@contextmanager
def _bar(plan: Plan) -> Iterator[Advance]:
    """A bar on a terminal; elsewhere nothing."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    shown = errors.is_terminal
    with Progress(*columns, TimeRemainingColumn(), console=errors, transient=True, disable=not shown) as progress:
        task = progress.add_task(escape(str(plan.name)), total=plan.size, completed=plan.present)
        yield lambda size: progress.advance(task, size)
