"""`ssd generate`: continue one prompt."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.box import SIMPLE
from rich.table import Table
from rich.text import Text

from ssd.cli.console import draft_summary, errors, follow, load, print_note, seeded, speed_summary
from ssd.cli.explain import spelling
from ssd.cli.options import Flags, Given, command
from ssd.cli.paths import visible
from ssd.config import EngineConfig
from ssd.core import RequestOutput, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from ssd.llm import LLM, Prompt

_NO_FLAGS = frozenset({"speculate", "shown_token_ids", "priority", "prompt_logprobs", "pooling"})


@command
def generate(
    model: Annotated[str, typer.Argument(help="Bundled model, directory, .gguf file, hub id or graft:MODEL@SHAPE.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue. '-' reads standard input.")],
    chat: Annotated[bool, typer.Option("--chat", help="Send the prompt through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message (with --chat).")] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="Report times and speed (on stderr).")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as one JSON object.")] = False,
    *,
    sampling: Annotated[Given, Flags(SamplingParams, without=_NO_FLAGS)],
    engine: Annotated[Given, Flags(EngineConfig)],
) -> None:
    """Continue a prompt and print the text as it comes.

    The text alone goes to standard output, so it can be piped; everything else goes to standard error.

    [bold]Try[/]

      ssd generate tiny-llama "Once upon a time, there was" -t 0.8 --seed 4

      ssd generate tiny-llama "A pull request is" -m 32 --metrics

      ssd generate tiny-llama "A pull request is" -m 32 --draft tiny-llama-draft

      ssd generate MODEL "A pull request is" --draft DRAFT --mode ssd --k 3
    """
    params = seeded(SamplingParams(**sampling))
    follow(engine)
    text = sys.stdin.read() if prompt == "-" else prompt
    if system is not None and not chat:
        raise typer.BadParameter("--system needs --chat")
    question: Prompt = _messages(text, system) if chat else text
    with load(model, engine) as llm:
        if json_output:
            _print_json(llm, question, params, metrics)
        elif params.n > 1:
            _print_samples(llm, question, params, metrics)
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
    if stream.output is not None:
        _print_details(llm, stream.output, params, metrics)


def _print_samples(llm: LLM, prompt: Prompt, params: SamplingParams, metrics: bool) -> None:
    [output] = llm.generate(prompt, params)
    for sample in output.samples:
        errors.rule(f"sample {sample.index}")
        typer.echo(sample.text)
    _print_details(llm, output, params, metrics)


def _print_json(llm: LLM, prompt: Prompt, params: SamplingParams, metrics: bool) -> None:
    """Everything, so that each sample can be had again: its `seed` alone writes it, as the only sample."""
    [output] = llm.generate(prompt, params)
    printed: dict[str, Any] = {"model": llm.config.model, **asdict(output), "prompt": prompt}
    bias = params.logit_bias.items()
    printed["params"]["logit_bias"] = {token: value if math.isfinite(value) else str(value) for token, value in bias}
    typer.echo(json.dumps(printed | ({"note": llm.note} if llm.note else {}), ensure_ascii=False))
    if metrics:
        _print_metrics(output, params, llm.note)


def _print_details(llm: LLM, output: RequestOutput, params: SamplingParams, metrics: bool) -> None:
    """Log-probabilities and metrics, if they are wanted."""
    spell = spelling(llm.engine.tokenizer)
    for sample in output.samples:
        if sample.logprobs:
            errors.print(_logprobs(sample.logprobs, spell, f"log-probabilities of sample {sample.index}"))
    if metrics:
        _print_metrics(output, params, llm.note)


def _logprobs(tokens: list[TokenLogprobs], spell: Callable[[int], str], title: str) -> Table:
    """A line for each token: its log-probability, and the likeliest tokens at its place."""
    table = Table("token", "log-probability", "likeliest", title=title, box=SIMPLE)
    for token in tokens:
        likeliest = "  ".join(f"{visible(spell(each))} {value:.2f}" for each, value in token.top.items())
        table.add_row(Text(visible(spell(token.token_id))), f"{token.logprob:.2f}", Text(likeliest))
    return table


def _print_metrics(output: RequestOutput, params: SamplingParams, note: str) -> None:
    m = output.metrics
    seed = "" if params.greedy else f", seed {params.seed}"
    errors.print(
        f"[dim]{m.prompt_tokens} prompt tokens ({m.cached_tokens} cached), {m.output_tokens} new, {speed_summary(m)}; "
        f"finished by {output.finish_reason}{seed}[/]",
        soft_wrap=True,
    )
    print_note(draft_summary(m))
    print_note(note)
