"""`ssd bench`: ways of decoding, and other engines, measured in turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ssd.cli import speculation
from ssd.cli.console import Device, DType, Eager, Temperature, TensorParallelSize, errors, explained, follow
from ssd.errors import ConfigError
from ssd.prompts import OWN_SETS

if TYPE_CHECKING:
    from ssd.bench.report import Report
    from ssd.bench.run import BenchConfig

HELP: Final = """\
Measure how fast a model decodes: [bold]AR, SD, SSD and other engines, in turns[/], prompt by prompt. The report warns \
of a machine that was busy meanwhile: ratios are then not to be trusted.

A method is [cyan]ar[/], [cyan]sd[/], [cyan]ssd[/] or [cyan]ngram[/], perhaps with its number of drafted tokens: \
[cyan]ssd:6[/], [cyan]sd:auto[/]. All methods share the weights, and that they write the same tokens is checked (exit \
code 1 if not). Only decoding is compared: prompts are timed apart, warm-up is not counted. Prompts come from \
SSD_DATASET_DIR (or [cyan]--folder[/]) if it has the set, else from those that come with ssd; the report says which.

[bold]Try[/]

  ssd bench

  ssd bench tiny-qwen3 --compare ar,sd:2,ssd:3,ngram:4 --sets gsm8k --plot report.html --json report.json

  ssd bench MODEL --draft DRAFT --peer hf,hf:4 --prompts 4

  ssd bench graft:tiny-qwen3@qwen3-32b --draft graft:tiny-qwen3-draft@qwen3-0.6b --compare ar,sd:6,ssd:6

  ssd bench MODEL --compare ar --peer http://127.0.0.1:8000
"""


def bench(
    model: Annotated[str, typer.Argument(help="Any MODEL, as `ssd --help` describes them.")] = "tiny-llama",
    draft: speculation.Draft = None,
    compare: Annotated[str, typer.Option(metavar="METHODS", help="What is measured; ratios are to the first.")] = "",
    peer: Annotated[
        str,
        typer.Option(
            help="Others, by commas: hf, vllm, sglang, llamacpp (vllm:4: drafting), URLs of OpenAI-like servers."
        ),
    ] = "",
    k: Annotated[str, typer.Option("--k", metavar="N|auto", help="Draft tokens of methods without a number.")] = "4",
    draft_quantization: speculation.DraftQuantization = None,
    acceptance: speculation.Acceptance = None,
    fan_out: speculation.FanOut = None,
    budget: speculation.Budget = None,
    backup: speculation.Backup = None,
    placement: speculation.Placement = None,
    draft_replicas: speculation.DraftReplicas = None,
    draft_tensor_parallel_size: speculation.DraftTensorParallelSize = None,
    sets: Annotated[str, typer.Option(help="Prompt sets, by commas; random: tokens at random.")] = ",".join(OWN_SETS),
    folder: Annotated[Path | None, typer.Option(help="Of prompt sets.", show_default="$SSD_DATASET_DIR")] = None,
    prompts: Annotated[int, typer.Option(help="Of each set.")] = 8,
    input_len: Annotated[int | None, typer.Option(help="Truncate prompts to this number of tokens.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="Of each answer.")] = 128,
    chat: Annotated[bool, typer.Option(help="Put questions through the chat template.")] = True,
    batch: Annotated[int, typer.Option(help="Requests at the same time.")] = 1,
    temperature: Temperature = 0.0,
    seed: Annotated[int, typer.Option(help="Of all answers.")] = 0,
    repeats: Annotated[int, typer.Option(help="Turns of every contender on every prompt.")] = 2,
    device: Device = "auto",
    dtype: DType = "auto",
    gpu_memory: Annotated[float, typer.Option(help="Share of the GPU's memory for ssd: leave some to peers.")] = 0.9,
    tensor_parallel_size: TensorParallelSize = 1,
    eager: Eager = False,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here; -: to stdout.")] = None,
    plot: Annotated[
        list[Path] | None, typer.Option(help="Draw the report: a .png, .svg or .html file. May be repeated.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Two rounds of every method on a time line: a .json file for Perfetto, or .svg, .png."),
    ] = None,
    wandb: Annotated[bool, typer.Option("--wandb", help="Log to Weights & Biases, too.")] = False,
    group: Annotated[str | None, typer.Option(help="Of the wandb run.")] = None,
    name: Annotated[str | None, typer.Option(help="Of the wandb run.")] = None,
) -> None:
    with explained():
        from ssd.bench.run import BenchConfig

        drafter = draft or speculation.bundled_draft(model)
        flags = {"acceptance": acceptance, "fan_out": fan_out, "budget": budget, "backup": backup}
        flags |= {"placement": placement, "draft_quantization": draft_quantization}
        degrees = {"draft_replicas": draft_replicas, "draft_tensor_parallel_size": draft_tensor_parallel_size}
        config = BenchConfig(
            model,
            drafter,
            methods=compare or ("ar,sd,ssd" if drafter else "ar,ngram"),
            peers=_listed(peer),
            k=int(k) if k.isdecimal() else k,
            speculation=speculation.given(**flags, **degrees),
            sets=_listed(sets),
            num_prompts=prompts,
            input_len=input_len,
            output_len=max_tokens,
            chat=chat,
            folder=folder,
            batch=batch,
            temperature=temperature,
            seed=seed,
            repeats=repeats,
            engine={
                "device": device,
                "dtype": dtype,
                "tensor_parallel_size": tensor_parallel_size,
                "eager": eager,
                "gpu_memory_utilization": gpu_memory,
            },
        )
        follow(tensor_parallel_size)
        report = benchmark(config, json_file, plot or [], trace or [], wandb=wandb, group=group, name=name)
        if report.same_text is False:
            raise typer.Exit(1)


def benchmark(
    config: BenchConfig,
    json_file: Path | None = None,
    plots: list[Path] | None = None,
    traces: list[Path] | None = None,
    *,
    wandb: bool = False,
    group: str | None = None,
    name: str | None = None,
) -> Report:
    """Runs a benchmark and writes its report; output files are checked first."""
    from ssd.bench import pictures, tracing, weights_and_biases
    from ssd.bench.run import run

    for file in plots or []:
        pictures.check_file(file)
    for file in traces or []:
        tracing.check_file(file)
    to_stdout = json_file == Path("-")
    if json_file is not None and not to_stdout and not json_file.parent.is_dir():
        raise ConfigError(f"json {json_file}: there is no folder {json_file.parent}")
    if wandb:
        weights_and_biases.check_installed()
    report = run(config, _progress, traces or [])
    out = sys.stderr if to_stdout else sys.stdout
    report.show(Console(file=out, width=None if out.isatty() else 160))
    if to_stdout:
        typer.echo(report.as_json(), nl=False)
    elif json_file is not None:
        json_file.write_text(report.as_json(), encoding="utf-8")
    for file in plots or []:
        pictures.write_picture(report, file)
    if wandb:
        weights_and_biases.log(report, group, name)
    return report


def _progress(steps: Iterator[str], count: int) -> Iterator[str]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=errors, transient=True) as progress:
        task = progress.add_task("loading", total=count)
        for step in steps:
            progress.update(task, advance=1, description=step)
            yield step


def _listed(text: str) -> tuple[str, ...]:
    return tuple(filter(None, (part.strip() for part in text.split(","))))
