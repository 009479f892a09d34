"""`ssd graft`: a small model written out in the shape of a published one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from ssd.cli.console import errors, explained, print_note
from ssd.models.shapes import SHAPES

if TYPE_CHECKING:
    from rich.progress import Progress

HELP: Final = f"""\
Write a small model as a checkpoint in the shape of a published one: [bold]that shape's speed, the small \
model's text[/].

The graft computes the same function, so it says what the small model says, while every weight of the large shape is \
read and multiplied. That makes honest measurements of speed possible where the published weights are not. Nothing \
needs to be written to try it: [cyan]ssd generate graft:tiny-llama@llama-3.1-8b "Once upon a time"[/].

[bold]Shapes[/]: {", ".join(SHAPES)}

[bold]Try[/]

  ssd graft tiny-llama --shape llama-3.1-8b

  ssd generate ./tiny-llama@llama-3.1-8b "Once upon a time" --metrics
"""


def graft(
    base: Annotated[str, typer.Argument(metavar="MODEL", help="The small model: bundled, or a directory.")],
    shape: Annotated[str, typer.Option(help="The published model whose shape it gets.")],
    out: Annotated[Path | None, typer.Option(help="Directory to write.", show_default="./MODEL@SHAPE")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Type of the weights.")] = "bfloat16",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the weights are made.")] = "auto",
) -> None:
    with explained():
        import torch

        from ssd.assembly.device import resolve_device
        from ssd.models.export import stored_bytes, write_graft
        from ssd.models.open import open_graft

        grafted = open_graft(base, shape)
        folder = out or Path(f"{grafted.base_name}@{shape}")
        kind: torch.dtype = getattr(torch, dtype)
        with _byte_progress() as progress:
            task = progress.add_task(f"writing {folder.name}", total=stored_bytes(grafted.config, kind))
            write_graft(grafted, folder, kind, resolve_device(device), lambda size: progress.advance(task, size))
        print_note(grafted.note)
        typer.echo(folder)


def _byte_progress() -> Progress:
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    return Progress(
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TimeRemainingColumn(),
        console=errors,
        transient=True,
    )
