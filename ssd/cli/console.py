"""Shared by the commands: options, error messages, loading a model, formatting speeds."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from ssd.core import RequestMetrics, SamplingParams
from ssd.errors import SSDError
from ssd.parallel.launch import Launch

if TYPE_CHECKING:
    from ssd.llm import LLM

errors = Console(stderr=True)

Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0: greedy; higher: more varied.")]
TopK = Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0: all.")]
TopP = Annotated[float, typer.Option(help="Sample among the likeliest tokens that hold this much mass.")]
MinP = Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")]
RepetitionPenalty = Annotated[float, typer.Option(help="Above 1: avoid tokens of prompt and output.")]
PresencePenalty = Annotated[float, typer.Option(help="Above 0: avoid tokens that the output has.")]
FrequencyPenalty = Annotated[float, typer.Option(help="Above 0: avoid tokens by how often the output has them.")]
Stop = Annotated[list[str] | None, typer.Option(help="End the text before this string. May be repeated.")]
Seed = Annotated[int | None, typer.Option(help="The same seed writes the same text.", show_default="drawn at random")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda, or a GPU: cuda:1.")]
TensorParallelSize = Annotated[
    int, typer.Option(help="Split the model over so many GPUs, from --device on (or processes of the CPU).")
]
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


def follow(tensor_parallel_size: int) -> None:
    """In processes of torchrun other than rank 0: computes for rank 0, and exits when it does."""
    if Launch.found() is not None:  # else not worth the import of torch
        from ssd.assembly.torchrun import join

        join(tensor_parallel_size)


def load(model: str, **options: Any) -> LLM:
    """Loads a model, with a spinner."""
    follow(options.get("tensor_parallel_size", 1))
    with errors.status(f"loading {escape(model)}"):
        from ssd.llm import LLM

        return LLM(model, **options)


def seeded(params: SamplingParams) -> SamplingParams:
    """The parameters, with a seed drawn at random if they have none: known, it can be reported and used again."""
    return params if params.seed is not None else replace(params, seed=secrets.randbits(32))


def option_name(name: str) -> str:
    """An option's name in use; `tokens` and `max-new-tokens` are former names of `max-tokens`."""
    return "max-tokens" if name in ("tokens", "max-new-tokens") else name


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
