"""`ssd generate`: continue one prompt."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from ssd.cli import speculation
from ssd.cli.console import Device, DType, Eager, Temperature, errors, explained, load, print_note, speed_summary
from ssd.core import RequestOutput, SamplingParams

if TYPE_CHECKING:
    from ssd.llm import LLM, Prompt


def generate(
    model: Annotated[str, typer.Argument(help="Bundled model, directory, .gguf file, hub id or graft:MODEL@SHAPE.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue. '-' reads standard input.")],
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message (with --chat).")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-m", help="Stop after this many tokens.")] = 256,
    temperature: Temperature = 0.0,
    top_k: Annotated[int, typer.Option(help="Sample among the k likeliest tokens; 0: all.")] = 0,
    top_p: Annotated[float, typer.Option(help="Sample among the likeliest tokens that hold this much mass.")] = 1.0,
    min_p: Annotated[float, typer.Option(help="Drop tokens below this share of the likeliest one.")] = 0.0,
    repetition_penalty: Annotated[float, typer.Option(help="Above 1: avoid tokens of prompt and output.")] = 1.0,
    seed: Annotated[int | None, typer.Option(help="The same seed writes the same text.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="End the text before this string. May be repeated.")] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own stop tokens.")] = False,
    n: Annotated[int, typer.Option("-n", help="How many samples to write.")] = 1,
    mode: speculation.Mode = None,
    draft: speculation.Draft = None,
    k: speculation.K = None,
    acceptance: speculation.Acceptance = None,
    fan_out: speculation.FanOut = None,
    budget: speculation.Budget = None,
    backup: speculation.Backup = None,
    placement: speculation.Placement = None,
    speculation_json: speculation.Speculation = None,
    device: Device = "auto",
    dtype: DType = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and output together.")] = None,
    eager: Eager = False,
    metrics: Annotated[bool, typer.Option("--metrics", help="Report times and speed (on stderr).")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
) -> None:
    """Continue a prompt and print the text as it comes.

    The text alone goes to standard output, so it can be piped; everything else goes to standard error.

    [bold]Try[/]

      ssd generate tiny-llama "Once upon a time, there was" -t 0.8 --seed 4

      ssd generate tiny-llama "A pull request is" -m 32 --metrics

      ssd generate tiny-llama "A pull request is" -m 32 --draft tiny-llama-draft

      ssd generate MODEL "A pull request is" --draft DRAFT --mode ssd --k 3
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
        wanted = speculation.options(
            speculation_json,
            mode=mode,
            draft=draft,
            k=k,
            acceptance=acceptance,
            fan_out=fan_out,
            budget=budget,
            backup=backup,
            placement=placement,
        )
        with load(
            model, device=device, dtype=dtype, max_model_len=max_model_len, eager=eager, speculation=wanted
        ) as llm:
            if json_output or n > 1:
                _print_output(llm.generate(question, params)[0], json_output, metrics, llm.note)
            else:
                _print_stream(llm, question, params, metrics)


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
    errors.print(
        f"[dim]{m.prompt_tokens} prompt tokens ({m.cached_tokens} cached), {m.output_tokens} new, {speed_summary(m)}; "
        f"finished by {output.finish_reason}[/]"
    )
    print_note(speculation.drafting(m))
    print_note(note)
