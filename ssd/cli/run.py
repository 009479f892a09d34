"""`ssd run`: a conversation with a model by its name, which is downloaded if it is not there."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from ssd.cli.chat import EngineBackend, talk
from ssd.cli.console import bundled_draft, load, print_line, print_note
from ssd.cli.conversation import SETTABLE, note, report
from ssd.cli.options import Flags, Given, command
from ssd.cli.pull import download_shown
from ssd.config import EngineConfig
from ssd.core import SamplingParams
from ssd.models.hub import HubName, local_model

HELP: Final = """\
Talk to a model by its name: [bold]it is downloaded if it is not there[/].

With a PROMPT the answer goes to standard output, and that is all; without one it is the conversation of \
[cyan]ssd chat[/]. NAME is [cyan]org/name[/] on the Hugging Face hub, [cyan]org/name:Q4_K_M[/] for a GGUF file, or any \
other MODEL. At a terminal you are asked before more than 4 GB are downloaded.

A draft makes answers faster and changes no token. If a model of this machine has the same tokenizer and at most a \
quarter of the size, its name is printed; [cyan]--draft auto[/] takes it, and measures whether it pays \
([cyan]--mode auto[/]).

[bold]Try[/]

  ssd run Qwen/Qwen3-0.6B

  ssd run Qwen/Qwen3-0.6B "What is the capital of France?"

  ssd run Qwen/Qwen3-8B-GGUF:Q4_K_M --draft auto

  git diff | ssd run Qwen/Qwen3-8B -   [dim]# the prompt is read from standard input[/]
"""
ASK_BEYOND: Final = 4e9  # bytes
AUTO: Final = "auto"


@command
def run(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A name on the hub, or any other MODEL.")],
    prompt: Annotated[str | None, typer.Argument(help="Answer this and exit. '-' reads standard input.")] = None,
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="Report times and speed after every answer.")] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Download without asking.")] = False,
    *,
    sampling: Annotated[Given, Flags(SamplingParams, only={*SETTABLE.values()}, defaults={"max_new_tokens": 512})],
    engine: Annotated[Given, Flags(EngineConfig, without={"max_num_seqs"})],
) -> None:
    params, text = SamplingParams(**sampling), sys.stdin.read() if prompt == "-" else prompt
    drafting = dict(engine.get("speculation", {}))
    for each in (name, drafting.get("draft")):
        fetch(each, yes)
    engine["speculation"] = with_draft(name, drafting)
    if text is None:
        talk(name, params, system=system, metrics=metrics, colour=False, **engine)
    else:
        answer_once(name, text, params, system, metrics, engine)


def fetch(model: str | None, yes: bool) -> None:
    """Downloads a model that is a name on the hub and in no local cache."""
    found = HubName.of(model) if model else None
    if found is not None and not Path(str(model)).expanduser().exists() and local_model(found) is None:
        download_shown(found, ask_beyond=None if yes else ASK_BEYOND)


def with_draft(model: str, drafting: Given) -> Given:
    """The options of speculation, with the draft that is wanted: a bundled model's own, or what `auto` finds."""
    draft, mode = drafting.get("draft"), drafting.get("mode")
    if mode == "ar" or draft not in (None, AUTO):
        return drafting
    own = bundled_draft(model)
    found = own or _suggested(model)
    if own is None and draft is None:
        if found is not None:
            note(f"--draft {found} may make it faster; --draft auto takes it as far as that pays.")
        return drafting
    if found is None:
        note("No model of this machine can be its draft: it answers without one.")
        return {name: value for name, value in drafting.items() if name not in ("draft", "mode")}
    return {"mode": "sd" if draft is None else "auto", "k": "auto", **drafting, "draft": found}


def answer_once(
    model: str, prompt: str, params: SamplingParams, system: str | None, metrics: bool, engine: dict[str, Any]
) -> None:
    """Prints one answer. An error ends the command."""

    def write(piece: str, drafted: bool, reasoning: bool = False) -> None:
        if not reasoning:
            typer.echo(piece, nl=False)

    with load(model, {"max_num_seqs": 1, **engine}) as llm:
        backend = EngineBackend(llm, params)
        print_note(llm.note)
        head = [] if system is None else [{"role": "system", "content": system}]
        answer = backend.answer([*head, {"role": "user", "content": prompt}], write)
        typer.echo()
        if answer.finish_reason == "abort":
            raise KeyboardInterrupt
        if answer.finish_reason == "length":
            print_line(f"(cut off after {params.max_new_tokens} tokens: --max-tokens)")
        if metrics:
            note(report([answer.metrics], backend.unit))


def _suggested(model: str) -> str | None:
    from ssd.assembly.inventory import suggested_draft
    from ssd.assembly.open import GRAFT_PREFIX

    return None if model.startswith(GRAFT_PREFIX) else suggested_draft(model)
