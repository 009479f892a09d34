"""`ssd export-eagle`: an EAGLE head written out in the layout of its authors."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from ssd.cli.console import explained, print_note

HELP: Final = """\
Write an EAGLE-3 head in the layout of the EAGLE authors, which other engines load, too.

HEAD is a directory, a hub id or a graft of one; its own layout may be that of speculators.

[bold]Try[/]

  ssd export-eagle tiny-llama-eagle --out ./head

  ssd export-eagle graft:tiny-llama-eagle@llama-3.1-8b --target graft:tiny-llama@llama-3.1-8b --out ./head-8b
"""


def export_eagle(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="The head.")],
    out: Annotated[Path, typer.Option(help="Directory to write.")],
    target: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model that it drafts for: a graft of a head needs it.")
    ] = None,
    dtype: Annotated[Literal["bfloat16", "float16", "float32"], typer.Option(help="Type of the weights.")] = "bfloat16",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the weights are made.")] = "auto",
) -> None:
    with explained():
        import torch

        from ssd.assembly.device import resolve_device
        from ssd.errors import ConfigError
        from ssd.models.eagle_export import write_eagle
        from ssd.models.eagle_graft import EagleGraft
        from ssd.models.open import open_checkpoint, open_eagle

        found = open_eagle(head, "HEAD")
        if found is None:
            raise ConfigError(f"HEAD={head!r} is no EAGLE head: name the directory or hub id of one")
        if target is None and isinstance(found, EagleGraft):
            raise ConfigError(f"HEAD={head!r} is a graft: name the graft that it drafts for with --target")
        if target is not None:
            found = found.for_target(open_checkpoint(target, "target"))
        kind: torch.dtype = getattr(torch, dtype)
        write_eagle(found, out, kind, resolve_device(device))
        if found.note:
            print_note(found.note)
        typer.echo(out)
