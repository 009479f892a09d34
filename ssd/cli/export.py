"""`ssd graft` and `ssd export-draft`: checkpoints written for other engines, and for later."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from ssd.cli.console import errors, print_note
from ssd.cli.options import command
from ssd.errors import ConfigError
from ssd.grafts.shapes import SHAPES

GRAFT_HELP: Final = f"""\
Write a small model as a checkpoint in the shape of a published one: [bold]that shape's speed, the small \
model's text[/].

The graft computes the same function, so it says what the small model says, while every weight of the large shape is \
read and multiplied. That makes honest measurements of speed possible where the published weights are not. Nothing \
needs to be written to try it: [cyan]ssd generate graft:tiny-llama@llama-3.1-8b "Once upon a time"[/].

[bold]Shapes[/]: {", ".join(SHAPES)}

[bold]Try[/]

  ssd graft tiny-llama --shape llama-3.1-8b

  ssd generate ./tiny-llama@llama-3.1-8b "Once upon a time" --metrics

  ssd graft tiny-llama --shape llama-3.1-8b --quantization fp8   (in memory: graft:tiny-llama@llama-3.1-8b:fp8)
"""
DRAFT_HELP: Final = """\
Write an EAGLE-3 head or a block draft (DFlash, DFlash 2, DSpark) in the layout of its authors, which other engines \
load, too.

DRAFT is a directory, a hub id or a graft of one; its own layout may be that of speculators.

[bold]Try[/]

  ssd export-draft tiny-llama-eagle --out ./head

  ssd export-draft graft:tiny-llama-block@llama-3.1-8b --target graft:tiny-llama@llama-3.1-8b --out ./block-8b
"""
DTYPE: Final = typer.Option(help="Type of the weights.")
DEVICE: Final = typer.Option(help="Where the weights are made.")
Device = Literal["auto", "cpu", "cuda"]


@command
def graft(
    base: Annotated[str, typer.Argument(metavar="MODEL", help="The small model: bundled, or a directory.")],
    shape: Annotated[str, typer.Option(help="The published model whose shape it gets.")],
    out: Annotated[Path | None, typer.Option(help="Directory to write.", show_default="./MODEL@SHAPE")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], DTYPE] = "bfloat16",
    quantization: Annotated[
        Literal["fp8", "fp8_dynamic", "int8", "int4", "awq", "gptq"] | None,
        typer.Option(
            help="Round the weights of the layers, and write them as compressed-tensors; awq and gptq: in 4 bits, "
            "groups of 128, in these layouts. awq has zero points.",
            show_default="no",
        ),
    ] = None,
    device: Annotated[Device, DEVICE] = "auto",
) -> None:
    import torch

    from ssd.assembly.device import resolve_device
    from ssd.assembly.open import open_graft
    from ssd.grafts.export import stored_bytes, write_graft

    grafted = open_graft(base, f"{shape}:{quantization}" if quantization else shape)
    folder = out or Path("-".join(filter(None, [f"{grafted.base_name}@{grafted.shape_name}", grafted.quantization])))
    kind: torch.dtype = getattr(torch, dtype)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task(f"writing {folder.name}", total=stored_bytes(grafted, kind))
        write_graft(grafted, folder, kind, resolve_device(device), lambda size: progress.advance(task, size))
    print_note(grafted.note)
    typer.echo(folder)


@command
def export_draft(
    draft: Annotated[str, typer.Argument(metavar="DRAFT", help="The head or block draft.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that it drafts for: a graft of a draft needs it.")
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], DTYPE] = "bfloat16",
    device: Annotated[Device, DEVICE] = "auto",
) -> None:
    import torch

    from ssd.assembly.device import resolve_device
    from ssd.assembly.open import open_checkpoint, open_feature_draft
    from ssd.grafts.draft_graft import DraftGraft
    from ssd.grafts.export import write_draft
    from ssd.models.mtp import MTPCheckpoint

    found = open_feature_draft(draft, "DRAFT")
    if found is None or isinstance(found, MTPCheckpoint):
        raise ConfigError(f"DRAFT={draft!r} is no EAGLE head or block draft: name the directory or hub id of one")
    if target is None and isinstance(found, DraftGraft):
        raise ConfigError(f"DRAFT={draft!r} is a graft: name the graft that it drafts for with --target")
    if target is not None:
        found = found.for_target(open_checkpoint(target, "target"))
    kind: torch.dtype = getattr(torch, dtype)
    write_draft(found, out, kind, resolve_device(device))
    print_note(found.note)
    typer.echo(out)
