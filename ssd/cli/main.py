"""The `ssd` command: what people type. Prints for people, exits with the right code."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.console import Console
from rich.markup import escape

from ssd.core import RequestOutput, SamplingParams
from ssd.errors import SSDError
from ssd.models.shapes import SHAPES

if TYPE_CHECKING:
    from rich.progress import Progress

    from ssd.llm import LLM, Prompt

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_show_locals=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="""[bold]ssd[/]: exact, extremely fast decoding of large language models.

    A MODEL is a bundled model such as [cyan]tiny-llama[/], a Hugging Face directory, a [cyan].gguf[/] file, or a hub
    id such as [cyan]meta-llama/Llama-3.2-1B[/] (looked up in SSD_HF_CACHE and the Hugging Face cache, downloaded when
    it is in neither). [cyan]graft:MODEL@SHAPE[/] is a small model at the cost of a large one: see [cyan]ssd graft[/].

    [bold]Try[/]

      ssd generate MODEL "Once upon a time"

      ssd generate MODEL "What is the capital of France?" --chat

      ssd generate MODEL "A haiku:" -t 0.8 --seed 7 -n 3
    """,
)
errors = Console(stderr=True)


@contextmanager
def explained() -> Iterator[None]:
    """Mistakes as one sentence and exit code 1, Ctrl-C as 130."""
    try:
        yield
    except SSDError as error:
        errors.print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        raise typer.Exit(130) from None


@app.callback()
def main(verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log what the engine does.")] = False) -> None:
    logging.basicConfig(level=logging.INFO if verbose else logging.WARNING, format="%(levelname)s %(message)s")


@app.command()
def version() -> None:
    """Print the version of ssd, of torch, and the devices it sees."""
    import torch

    import ssd

    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] or ["cpu only"]
    typer.echo(f"ssd {ssd.__version__}, torch {torch.__version__}, {', '.join(devices)}")


@app.command()
def generate(
    model: Annotated[str, typer.Argument(help="Bundled model, directory, .gguf file, hub id or graft:MODEL@SHAPE.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue. '-' reads standard input.")],
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message (with --chat).")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-m", help="Stop after this many tokens.")] = 256,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy; higher: more varied.")] = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that hold this much mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: avoid tokens of prompt and output.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string. May be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own stop tokens.")] = False,
    n: Annotated[int, typer.Option("-n", help="How many samples to write.")] = 1,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and output together.")] = None,
    eager: Annotated[bool, typer.Option("--eager", help="No CUDA graphs: starts sooner, decodes slower.")] = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Report times and speed (on stderr).")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Continue a prompt and print the text as it comes.

    The text alone goes to standard output, so it can be piped; everything else goes to standard error.
    """
    with explained():
        params = SamplingParams(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            stop=stop or (),
            ignore_eos=ignore_eos,
            max_new_tokens=max_new_tokens,
            n=n,
        )
        text = sys.stdin.read() if prompt == "-" else prompt
        if system is not None and not chat:
            raise typer.BadParameter("--system needs --chat")
        question: Prompt = _messages(text, system) if chat else text
        from ssd.llm import LLM

        with errors.status(f"loading {escape(model)}"):
            llm = LLM(model, device=device, dtype=dtype, max_model_len=max_model_len, eager=eager)
        with llm:
            if json_output or n > 1:
                _print_output(llm.generate(question, params)[0], json_output, metrics, llm.note)
            else:
                _print_stream(llm, question, params, metrics)


@app.command(
    help=f"""Write a small model as a checkpoint in the shape of a published one: [bold]that shape's speed, the small
    model's text[/].

    The graft computes the same function, so it says what the small model says, while every weight of the large shape
    is read and multiplied. That makes honest measurements of speed possible where the published weights are not.
    Nothing needs to be written to try it: [cyan]ssd generate graft:tiny-llama@llama-3.1-8b "Once upon a time"[/].

    [bold]Shapes[/]: {", ".join(SHAPES)}

    [bold]Try[/]

      ssd graft tiny-llama --shape llama-3.1-8b

      ssd generate ./tiny-llama@llama-3.1-8b "Once upon a time" --metrics
    """
)
def graft(
    base: Annotated[str, typer.Argument(metavar="MODEL", help="The small model: bundled, or a directory.")],
    shape: Annotated[str, typer.Option(help="The published model whose shape it gets.")],
    out: Annotated[Path | None, typer.Option(help="Directory to write.", show_default="./MODEL@SHAPE")] = None,
    dtype: Annotated[Literal["bfloat16", "float32"], typer.Option(help="Type of the weights.")] = "bfloat16",
    device: Annotated[Literal["auto", "cpu", "cuda"], typer.Option(help="Where the weights are made.")] = "auto",
) -> None:
    with explained():
        import torch

        from ssd.assembly import resolve_device
        from ssd.models.export import stored_bytes, write_graft
        from ssd.models.graft import GraftCheckpoint

        grafted = GraftCheckpoint.open(base, shape)
        folder = out or Path(f"{grafted.base_name}@{shape}")
        kind: torch.dtype = getattr(torch, dtype)
        with _byte_progress() as progress:
            task = progress.add_task(f"writing {folder.name}", total=stored_bytes(grafted.config, kind))
            write_graft(grafted, folder, kind, resolve_device(device), lambda size: progress.advance(task, size))
        errors.print(f"[dim]{escape(grafted.note)}[/]", highlight=False, soft_wrap=True)
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


def _messages(text: str, system: str | None) -> list[dict[str, str]]:
    head = [{"role": "system", "content": system}] if system is not None else []
    return [*head, {"role": "user", "content": text}]


def _print_stream(llm: LLM, prompt: Prompt, params: SamplingParams, metrics: bool) -> None:
    stream = llm.stream(prompt, params)
    for piece in stream:
        sys.stdout.write(piece)
        sys.stdout.flush()
    sys.stdout.write("\n")
    sys.stdout.flush()
    if metrics and stream.output is not None:
        _print_metrics(stream.output, llm.note)


def _print_output(output: RequestOutput, as_json: bool, metrics: bool, note: str) -> None:
    if as_json:
        typer.echo(json.dumps(asdict(output) | ({"note": note} if note else {}), ensure_ascii=False))
    else:
        for sample in output.samples:
            errors.rule(f"sample {sample.index}")
            typer.echo(sample.text)
    if metrics:
        _print_metrics(output, note)


def _print_metrics(output: RequestOutput, note: str) -> None:
    m = output.metrics
    first = f"{m.time_to_first_token:.3f} s" if m.time_to_first_token is not None else "-"
    speed = f"{m.decode_tokens_per_second:.1f} tokens/s" if m.decode_tokens_per_second is not None else "-"
    errors.print(
        f"[dim]{m.prompt_tokens} prompt tokens ({m.cached_tokens} cached), {m.output_tokens} new, "
        f"first after {first}, then {speed}; finished by {output.finish_reason}[/]"
    )
    if note:
        errors.print(f"[dim]{escape(note)}[/]", highlight=False, soft_wrap=True)
