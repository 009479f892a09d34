"""`ssd cache`: the packed weights that are kept for later starts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer
from rich.console import Console
from rich.table import Table

from ssd.cli.options import command
from ssd.errors import SSDError
from ssd.models import weight_folder
from ssd.models.repository import gib
from ssd.models.weight_file import Damaged, read_header

HELP: Final = """\
List the weights that are kept for later starts on this CPU.

The kernels of a CPU read weights in an order of their own. A model of 64 MiB or more is packed into it when it is \
loaded for the first time, and written to a file of the user's cache; later starts map that file into memory, which \
takes no time, and all processes share it. A file belongs to one checkpoint, type, quantization and instruction set. \
When the checkpoint or ssd has changed, it is written anew.

SSD_WEIGHT_CACHE is the limit of all files in GiB, 0 for none; else it is a fifth of the free disk, and 50 GiB at \
most. Beyond it the least recently used files are removed. Nothing is lost by it but the time to pack them again.

[bold]Try[/]

  ssd cache

  ssd cache clear llama-3.2-1b-q4_k_m.gguf

  ssd cache clear

  SSD_WEIGHT_CACHE=8 ssd serve MODEL

  SSD_WEIGHT_CACHE=0 ssd generate MODEL "Once upon a time"
"""
CLEAR_HELP: Final = """\
Remove weights that are kept for later starts: those of one model, or all.

Processes that use them go on.

[bold]Try[/]

  ssd cache clear

  ssd cache clear llama-3.2-1b-q4_k_m.gguf
"""
_UNITS: Final = (("days", 86400), ("hours", 3600), ("minutes", 60), ("seconds", 1))


class _Kept(NamedTuple):
    model: str
    weights: str  # their formats and the type of their products
    file: weight_folder.Entry


@command
def show() -> None:
    place = _folder()
    kept = _kept(place)
    used, most = (gib(size) for size in (sum(each.file.size for each in kept), weight_folder.limit(place)))
    typer.echo(f"{place}: {used} of at most {most}")
    table = Table("model", "weights", "size", "last used", box=None, pad_edge=False)
    for each in reversed(kept):
        table.add_row(each.model, each.weights, gib(each.file.size), _ago(time.time() - each.file.used))
    if kept:
        Console(highlight=False).print(table)


@command
def clear(
    name: Annotated[str | None, typer.Argument(help="A model, as `ssd cache` names it; all if left out.")] = None,
) -> None:
    kept = _kept(_folder())
    chosen = [each.file for each in kept if name in (None, each.model)]
    if name is not None and not chosen:
        names = ", ".join(dict.fromkeys(each.model for each in kept)) or "none"
        raise SSDError(f"NAME={name!r} is not in the cache: use one of the models there ({names})")
    for file in chosen:
        file.path.unlink(missing_ok=True)
    typer.echo(f"removed {gib(sum(file.size for file in chosen))} in {len(chosen)} file{'s'[: len(chosen) != 1]}")


def _folder() -> Path:
    try:
        return weight_folder.folder()
    except OSError as error:
        raise SSDError(f"there is no place for a cache: {error}") from None


def _kept(place: Path) -> list[_Kept]:
    """The least recently used first; a damaged file has no model's name."""
    found = []
    for file in weight_folder.entries(place):
        try:
            header = read_header(file.path)
            found.append(_Kept(header["model"], header["weights"], file))
        except (Damaged, OSError):
            found.append(_Kept(file.path.name, "damaged", file))
    return found


def _ago(seconds: float) -> str:
    name, unit = next((each for each in _UNITS if seconds >= 2 * each[1]), _UNITS[-1])
    return f"{max(0, int(seconds / unit))} {name} ago"
