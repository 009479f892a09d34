"""Shared by the commands: options, error messages, loading a model, formatting speeds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ssd.core import RequestMetrics
from ssd.errors import SSDError

if TYPE_CHECKING:
    from ssd.llm import LLM

errors = Console(stderr=True)

Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: greedy; higher: more varied.")]
Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DType = Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")]
Eager = Annotated[bool, typer.Option("--eager", help="No CUDA graphs: starts sooner, decodes slower.")]


@contextmanager
def explained() -> Iterator[None]:
    """Prints an SSDError as one line and exits with 1; with 130 on Ctrl-C."""
    try:
        yield
    except SSDError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


def load(model: str, **options: Any) -> LLM:
    """Loads a model, with a spinner."""
    with errors.status(f"loading {escape(model)}"):
        from ssd.llm import LLM

        return LLM(model, **options)


def speed_summary(metrics: RequestMetrics) -> str:
    first, speed = metrics.time_to_first_token, metrics.decode_tokens_per_second
    return (
        f"first after {'-' if first is None else f'{first:.3f} s'}, "
        f"then {'-' if speed is None else f'{speed:.1f} tokens/s'}"
    )


def print_note(note: str, console: Console = errors) -> None:
    """Prints a model's caveat, if it has one."""
    if note:
        console.print(f"[dim]{escape(note)}[/]", highlight=False, soft_wrap=True)
