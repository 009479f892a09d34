"""`ssd bench`: ways of decoding, and other engines, measured in turns."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ssd.bench.config import BenchConfig
from ssd.cli.console import DEMO_MODEL, JSON_FILE, bundled_draft, follow, measuring, report_console, write_json
from ssd.cli.options import MODEL, Flags, Given, command
from ssd.config import EngineConfig, SpeculationConfig
from ssd.core import SamplingParams

if TYPE_CHECKING:
    from ssd.bench.report import Report

HELP: Final = """\
Measure how fast a model decodes: [bold]AR, SD, SSD and other engines, in turns[/], prompt by prompt. The report warns \
of a machine that was busy meanwhile: ratios are then not to be trusted.

A method is [cyan]ar[/], [cyan]sd[/], [cyan]ssd[/], [cyan]auto[/] or [cyan]suffix[/], perhaps with its number of \
drafted tokens (else as many as an engine takes): [cyan]ssd:6[/], [cyan]sd:auto[/]; or [cyan]tree:16[/], a draft tree \
of 16 nodes, [cyan]tree:16:6[/] with paths of up to 6 tokens, [cyan]ssd-tree:16:6[/] the same prepared as in SSD. All \
methods share the weights, and that they write the same tokens is checked (exit code 1 if not). Only decoding is \
compared: prompts are timed apart, warm-up is not counted. Prompts come from SSD_DATASET_DIR (or [cyan]--folder[/]) if \
it has the set, else from those that come with ssd; the report says which.

[bold]Try[/]

  ssd bench   (a bundled pair at a size at which drafts pay on a CPU; two to three minutes on two cores)

  ssd bench tiny-qwen3 --compare ar,sd:2,ssd:3,suffix:16 --sets gsm8k --plot report.html --json report.json

  ssd bench MODEL --draft DRAFT --peer hf,hf:4 --prompts 4

  ssd bench tiny-llama --draft tiny-llama-eagle --compare ar,sd:4,tree:16:4 --prompts 2

  ssd bench graft:tiny-qwen3@qwen3-32b --draft graft:tiny-qwen3-draft@qwen3-0.6b --compare ar,sd:6,ssd:6

  ssd bench MODEL --draft-url unix:ssd-draft.sock --compare ar,ssd   [dim]# drafts of a draft server[/]

  ssd bench MODEL --compare ar --peer http://127.0.0.1:8000
"""


@command
def bench(
    model: Annotated[str, MODEL] = DEMO_MODEL,
    json_file: Annotated[Path | None, JSON_FILE] = None,
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
    settings: Annotated[Given, Flags(BenchConfig, without={"prompt_offset", "max_rounds"})],
    sampling: Annotated[Given, Flags(SamplingParams, only={"temperature", "seed"}, defaults={"seed": 0})],
    speculation: Annotated[Given, Flags(SpeculationConfig, without={"mode", "tree"})],
    engine: Annotated[Given, Flags(EngineConfig, without={"max_num_seqs", "speculation"})],
) -> None:
    draft = speculation.pop("draft", None) or bundled_draft(model)
    short, best_k = ({"num_prompts": 2}, 3) if model == DEMO_MODEL else ({}, None)
    usual = "ar,sd,ssd,auto" if draft else "ar,ssd" if "draft_url" in speculation else "ar,suffix"
    settings = {"methods": usual, **short, **settings}
    k = speculation.pop("k", best_k)
    config = BenchConfig(model, draft, k=k, speculation=speculation, engine=engine, **sampling, **settings)
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
    from ssd.bench import drawing, pictures, tracing, weights_and_biases
    from ssd.bench.run import run

    for file in plots or []:
        drawing.check_file("plot", file, pictures.KINDS)
    for file in traces or []:
        drawing.check_file("trace", file, tracing.KINDS)
    console = report_console(json_file)
    if wandb:
        weights_and_biases.check_installed()
    with measuring(f"loading {config.model}", console) as progress:
        report = run(config, progress, traces or [])
    report.show(console)
    write_json(report.as_dict(), json_file)
    for file in plots or []:
        pictures.write_picture(report, file)
    if wandb:
        weights_and_biases.log(report, group, name)
    return report
