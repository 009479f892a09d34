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

from ssd.cli import speculation
from ssd.cli.console import (
    Device,
    DType,
    Eager,
    FrequencyPenalty,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Seed,
    Stop,
    Temperature,
    TensorParallelSize,
    TopK,
    TopP,
    errors,
    explained,
    follow,
    load,
    print_note,
    seeded,
    speed_summary,
)
from ssd.cli.explain import spelling
from ssd.cli.paths import visible
from ssd.core import RequestOutput, SamplingParams, TokenLogprobs

if TYPE_CHECKING:
    from ssd.llm import LLM, Prompt


def generate(
    model: Annotated[str, typer.Argument(help="Bundled model, directory, .gguf file, hub id or graft:MODEL@SHAPE.")],
    prompt: Annotated[str, typer.Argument(help="The text to continue. '-' reads standard input.")],
    chat: Annotated[bool, typer.Option("--chat", help="Ask through the model's chat template.")] = False,
    system: Annotated[str | None, typer.Option(help="System message (with --chat).")] = None,
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", help="Stop after this many tokens.")] = 256,
    temperature: Temperature = 0.0,
    top_k: TopK = 0,
    top_p: TopP = 1.0,
    min_p: MinP = 0.0,
    repetition_penalty: RepetitionPenalty = 1.0,
    presence_penalty: PresencePenalty = 0.0,
    frequency_penalty: FrequencyPenalty = 0.0,
    logit_bias: Annotated[
        list[str] | None,
        typer.Option(
            metavar="ID=VALUE",
            help="Add a value to the logit of a token, by its id; -inf forbids it. May be repeated.",
        ),
    ] = None,
    stop: Stop = None,
    seed: Seed = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Go on past the model's own stop tokens.")] = False,
    n: Annotated[int, typer.Option("-n", help="How many samples to write.")] = 1,
    logprobs: Annotated[
        int | None, typer.Option(metavar="N", help="Report the log-probabilities of each token and of the N likeliest.")
    ] = None,
    mode: speculation.Mode = None,
    draft: speculation.Draft = None,
    k: speculation.K = None,
    draft_quantization: speculation.DraftQuantization = None,
    acceptance: speculation.Acceptance = None,
    fan_out: speculation.FanOut = None,
    budget: speculation.Budget = None,
    backup: speculation.Backup = None,
    placement: speculation.Placement = None,
    draft_replicas: speculation.DraftReplicas = None,
    draft_tensor_parallel_size: speculation.DraftTensorParallelSize = None,
    speculation_json: speculation.Speculation = None,
    device: Device = "auto",
    dtype: DType = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and output together.")] = None,
    tensor_parallel_size: TensorParallelSize = 1,
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
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=dict(map(_bias, logit_bias or ())),
            seed=seed,
            stop=stop or (),
            ignore_eos=ignore_eos,
            max_new_tokens=max_tokens,
            logprobs=logprobs,
            n=n,
        )
        params = seeded(params)
        follow(tensor_parallel_size)
        text = sys.stdin.read() if prompt == "-" else prompt
        if system is not None and not chat:
            raise typer.BadParameter("--system needs --chat")
        question: Prompt = _messages(text, system) if chat else text
        wanted = speculation.options(
            speculation_json,
            mode=mode,
            draft=draft,
            k=k,
            draft_quantization=draft_quantization,
            acceptance=acceptance,
            fan_out=fan_out,
            budget=budget,
            backup=backup,
            placement=placement,
            draft_replicas=draft_replicas,
            draft_tensor_parallel_size=draft_tensor_parallel_size,
        )
        with load(
            model,
            device=device,
            dtype=dtype,
            max_model_len=max_model_len,
            tensor_parallel_size=tensor_parallel_size,
            eager=eager,
            speculation=wanted,
        ) as llm:
            if json_output:
                _print_json(llm, question, params, metrics)
            elif n > 1:
                _print_samples(llm, question, params, metrics)
            else:
                _print_stream(llm, question, params, metrics)


def _bias(text: str) -> tuple[int, float]:
    token, _, value = text.partition("=")
    try:
        return int(token), float(value)
    except ValueError:
        raise typer.BadParameter(f"--logit-bias {text}: must be ID=VALUE, such as 42=-5 or 42=-inf") from None


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
        f"finished by {output.finish_reason}{seed}[/]"
    )
    print_note(speculation.drafting(m))
    print_note(note)
