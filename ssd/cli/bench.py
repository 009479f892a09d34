"""`ssd bench`: ways of decoding, and other engines, measured in turns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ssd.cli.console import bundled_draft, errors, follow
from ssd.cli.options import MODEL, Flags, Given, command
from ssd.config import K_DEFAULT, EngineConfig, SpeculationConfig
from ssd.core import SamplingParams
from ssd.errors import ConfigError
from ssd.prompts import OWN_SETS

if TYPE_CHECKING:
    from ssd.bench.report import Report
    from ssd.bench.run import BenchConfig

HELP: Final = """\
Measure how fast a model decodes: [bold]AR, SD, SSD and other engines, in turns[/], prompt by prompt. The report warns \
of a machine that was busy meanwhile: ratios are then not to be trusted.

A method is [cyan]ar[/], [cyan]sd[/], [cyan]ssd[/], [cyan]auto[/] or [cyan]ngram[/], perhaps with its number of \
drafted tokens: [cyan]ssd:6[/], [cyan]sd:auto[/]. All methods share the weights, and that they write the same tokens \
is checked (exit code 1 if not). Only decoding is compared: prompts are timed apart, warm-up is not counted. Prompts \
come from SSD_DATASET_DIR (or [cyan]--folder[/]) if it has the set, else from those that come with ssd; the report \
says which.

[bold]Try[/]

  ssd bench

  ssd bench tiny-qwen3 --compare ar,sd:2,ssd:3,ngram:4 --sets gsm8k --plot report.html --json report.json

  ssd bench MODEL --draft DRAFT --peer hf,hf:4 --prompts 4

  ssd bench graft:tiny-qwen3@qwen3-32b --draft graft:tiny-qwen3-draft@qwen3-0.6b --compare ar,sd:6,ssd:6

  ssd bench MODEL --compare ar --peer http://127.0.0.1:8000
"""


@command
def bench(
    model: Annotated[str, MODEL] = "tiny-llama",
    compare: Annotated[
        str, typer.Option(metavar="METHODS", help="Methods to measure, separated by commas; ratios are to the first.")
    ] = "",
    peer: Annotated[
        str,
        typer.Option(
            help="Other engines, separated by commas: hf, vllm, sglang, llamacpp (vllm:4: with 4 draft tokens), or "
            "URLs of OpenAI-compatible servers."
        ),
    ] = "",
    sets: Annotated[str, typer.Option(help="Prompt sets, separated by commas; random: random tokens.")] = ",".join(
        OWN_SETS
    ),
    folder: Annotated[Path | None, typer.Option(help="Folder of prompt sets.", show_default="$SSD_DATASET_DIR")] = None,
    prompts: Annotated[int, typer.Option(help="Number of prompts of each set.")] = 8,
    input_len: Annotated[int | None, typer.Option(help="Truncate prompts to this number of tokens.")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="Maximum length of an answer.")] = 128,
    chat: Annotated[bool, typer.Option(help="Send questions through the chat template.")] = True,
    batch: Annotated[int, typer.Option(help="Requests at the same time.")] = 1,
    repeats: Annotated[int, typer.Option(help="Turns of every method on every prompt.")] = 2,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write all figures here; -: to stdout.")] = None,
    plot: Annotated[
        list[Path] | None, typer.Option(help="Draw the report: a .png, .svg or .html file. May be repeated.")
    ] = None,
    trace: Annotated[
        list[Path] | None,
        typer.Option(help="Two rounds of every method on a time line: a .json file for Perfetto, or .svg, .png."),
    ] = None,
    wandb: Annotated[bool, typer.Option("--wandb", help="Log to Weights & Biases, too.")] = False,
    group: Annotated[str | None, typer.Option(help="Group of the wandb run.")] = None,
    name: Annotated[str | None, typer.Option(help="Name of the wandb run.")] = None,
    *,
    sampling: Annotated[Given, Flags(SamplingParams, only={"temperature", "seed"}, defaults={"seed": 0})],
    speculation: Annotated[Given, Flags(SpeculationConfig, without={"mode"})],
    engine: Annotated[Given, Flags(EngineConfig, without={"max_num_seqs", "speculation"})],
) -> None:
    from ssd.bench.run import BenchConfig

    draft = speculation.pop("draft", None) or bundled_draft(model)
    config = BenchConfig(
        model,
        draft,
        methods=compare or ("ar,sd,ssd" if draft else "ar,ngram"),
        peers=_listed(peer),
        k=speculation.pop("k", K_DEFAULT),
        speculation=speculation,
        sets=_listed(sets),
        num_prompts=prompts,
        input_len=input_len,
        output_len=max_tokens,
        chat=chat,
        folder=folder,
        batch=batch,
        repeats=repeats,
        engine=engine,
        **sampling,
    )
    follow(engine)
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
