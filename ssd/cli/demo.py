"""`ssd demo`: generates a few texts with AR, as a batch, with SD and with SSD, and compares them."""

from __future__ import annotations

import shutil
import sys
import time
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ssd.cli.chat import A_DEMO, Origins, knows_chats
from ssd.cli.console import DEMO_MODEL, bundled_draft, draft_summary, load, print_note, speed_summary, total
from ssd.cli.options import Flags, Given, command
from ssd.config import SUFFIX, EngineConfig, SpeculationConfig
from ssd.core import RequestOutput, SamplingParams
from ssd.errors import SSDError

if TYPE_CHECKING:
    from ssd.llm import LLM, Prompt

HELP: Final = """\
Let a model that comes with ssd write a few texts here and now: [bold]no network, no GPU needed[/].

Shows each text as it is written, and its speed. Then answers all prompts again: as one batch, with a draft model \
(speculative decoding, SD), and with a draft model that prepares while the target verifies (speculative speculative \
decoding, SSD). The texts must be the same, token for token. Exits with 1 if they are not.

[bold]Try[/]

  ssd demo

  ssd demo --seed 11 --prompt "Can a fish ride a bicycle?"
"""
EXPLANATION: Final = """\
[bold]The same text.[/] A text is a function of the model, the prompt, the parameters and the seed, and of nothing \
else. So all {count} prompts gave the same text {ways} times, token for token, and the same command gives it again.

[bold]SD.[/] Autoregressive decoding (AR) costs one pass through the model per token. In SD a draft model guesses the \
next tokens, and the model verifies them in one pass. A wrong guess costs time, never text.

[bold]SSD.[/] In SD the model waits while the draft is written. In SSD the draft model prepares the next draft for \
every likely outcome while the model verifies, on a core or GPU of its own; if the outcome is among them, the next \
draft is there at once. [cyan]ssd explain[/] shows it round by round.

[bold]Speed.[/] The ratios are a rough measure of short work; [cyan]ssd bench[/] is accurate. SD pays where the model \
is much slower than its draft model. SSD pays beyond that where the draft model has hardware to spare: here it takes \
cores that the model could use itself, so with few cores SD can be faster. [cyan]--mode auto[/] measures AR, SD and \
SSD, and takes the fastest.
"""
NEXT: Final = """\
[bold]What to try next[/]{activate}

  [cyan]ssd demo --seed 11 --prompt "Can a fish ride a bicycle?"[/]
  [cyan]ssd chat[/]
  [cyan]ssd explain --out paths.html[/]
  [cyan]ssd generate tiny-llama "Once upon a time, there was" -t 0.8 --seed 4 -m 64[/]
  [cyan]ssd serve {model} --draft {draft} --mode auto[/]  [dim]# and open http://127.0.0.1:8000[/]

  [dim]# in Python; `pip install .` in an environment of your own[/]
  [cyan]from ssd import LLM

  with LLM("tiny-llama") as llm:
      print(llm.generate("Once upon a time, there was")[0].text)[/]"""
MAX_WIDTH: Final = 100  # columns


class Question(NamedTuple):
    title: str
    text: str
    chat: bool = True  # sent through the chat template, or plain text to be continued
    stop: tuple[str, ...] = ()

    def prompt(self, as_chat: bool) -> Prompt:
        return [{"role": "user", "content": self.text}] if self.chat and as_chat else self.text


class Asked(NamedTuple):
    question: Question
    prompt: Prompt
    params: SamplingParams


class Run(NamedTuple):
    """The answers to all questions by one method."""

    method: str
    outputs: list[RequestOutput]
    seconds: float

    @property
    def speed(self) -> float:
        return sum(len(output.token_ids) for output in self.outputs) / self.seconds


QUESTIONS: Final = (
    Question("a story to continue", "Mr. Holmes sat by the fire, and", chat=False),
    Question(
        "a function to complete",
        'def count_vowels(text: str) -> int:\n    """Count the vowels in a string."""\n',
        chat=False,
        stop=("\n\n\n",),  # where the next function would begin
    ),
    Question("some arithmetic", "Tom has 3 boxes with 12 pencils each. How many pencils does he have?"),
    Question("a question", "Who wrote Hamlet?"),
)
SAMPLING: Final = {"temperature": 0.8, "seed": 4, "max_new_tokens": 64}


@command
def demo(
    model: Annotated[str, typer.Option(help="Any MODEL, as `ssd --help` describes them.")] = DEMO_MODEL,
    prompt: Annotated[list[str] | None, typer.Option(help="Ask this first, as a chat. May be repeated.")] = None,
    *,
    sampling: Annotated[Given, Flags(SamplingParams, only={*SAMPLING}, defaults=SAMPLING)],
    speculation: Annotated[Given, Flags(SpeculationConfig, only={"draft", "k"}, defaults={"k": 3})],
    engine: Annotated[Given, Flags(EngineConfig, only={"device"})],
) -> None:
    params = SamplingParams(**sampling)
    console = Console(highlight=False)
    console.width = min(console.width, MAX_WIDTH)
    with load(model, engine) as llm:
        chats = knows_chats(llm)
        _print_heading(llm, params, chats, console)
        questions = [*(Question("your question", text) for text in prompt or ()), *QUESTIONS]
        asked = [Asked(each, each.prompt(chats), replace(params, stop=each.stop)) for each in questions]
        runs = [one_at_a_time(llm, asked, console, "one at a time (AR)", shown=len(asked)), as_one_batch(llm, asked)]
    draft = speculation.get("draft") or bundled_draft(model) or SUFFIX
    methods = {"sd": "with a draft (SD)"} | ({"ssd": "draft prepared ahead (SSD)"} if draft != SUFFIX else {})
    for mode, method in methods.items():  # one engine at a time: each has all cores
        with load(model, {**engine, "speculation": {**speculation, "mode": mode, "draft": draft}}) as llm:
            runs.append(one_at_a_time(llm, asked, console, method, shown=1))
    if draft == SUFFIX:
        console.print("SSD needs a draft model: name one with [cyan]--draft[/].\n")
    conclude(model, asked, runs, console)


def conclude(model: str, asked: list[Asked], runs: list[Run], console: Console) -> None:
    """Compares the runs and prints the summary. SSDError if their texts differ."""
    from ssd.assembly.open import bundled_models

    differences = [difference(asked, runs[0], run) for run in runs]
    _print_speeds(runs, differences, console)
    for found in filter(None, differences):
        raise SSDError(found)
    console.print(EXPLANATION.format(count=len(asked), ways=len(runs)))
    if model in (DEMO_MODEL, *bundled_models()):
        console.print(A_DEMO)
    script = activation()
    activate = f"\n\n  [cyan]source {escape(script)}[/]  [dim]# `ssd` in this shell[/]" if script else ""
    pair = {"model": DEMO_MODEL, "draft": bundled_draft(DEMO_MODEL)}
    console.print(NEXT.format(activate=activate, **pair), soft_wrap=True)


def activation() -> str | None:
    """The script that puts `ssd` on the path; None where it is there already, or outside a virtual environment."""
    folder, found = Path(sys.prefix, "bin"), shutil.which("ssd")
    if sys.prefix == sys.base_prefix or (found is not None and Path(found).parent == folder):
        return None
    script = folder / "activate"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


# --- generating and comparing -----------------------------------------------------------------------------------------


def one_at_a_time(llm: LLM, asked: list[Asked], console: Console, method: str, *, shown: int) -> Run:
    """The first `shown` texts are printed as they are generated. Times are the engine's, without printing."""
    outputs = [write(llm, each, console, method) for each in asked[:shown]]
    outputs += [llm.generate(each.prompt, each.params)[0] for each in asked[shown:]]
    times = [output.metrics for output in outputs]
    return Run(method, outputs, sum((each.finished or each.arrival) - each.arrival for each in times))


def as_one_batch(llm: LLM, asked: list[Asked]) -> Run:
    started = time.perf_counter()
    outputs = llm.generate([each.prompt for each in asked], [each.params for each in asked])
    return Run("as one batch (AR)", outputs, time.perf_counter() - started)


def write(llm: LLM, asked: Asked, console: Console, method: str) -> RequestOutput:
    """Prints a text as it is generated, with accepted draft tokens in green."""
    from ssd.llm import check_served

    drafts = "" if llm.config.speculation.mode == "ar" else "; green: drafted and accepted"
    console.rule(f"{asked.question.title}, {method}{drafts}", style="dim", align="left")
    prompt = asked.question.text + ("\n" if asked.question.chat else "")
    console.print(Text(prompt, style="dim"), end="", soft_wrap=True)
    answer = llm.stream_deltas(asked.prompt, asked.params)
    origins = Origins(llm.encode(asked.prompt), llm.tokenizer)
    for delta in answer:
        for piece, accepted in origins.split(delta):
            console.print(Text(piece, style="green" if accepted else ""), end="", soft_wrap=True)
    output = answer.result()
    check_served(output)
    summary = [f"{len(output.token_ids)} tokens, {speed_summary(output.metrics)}", draft_summary(output.metrics)]
    console.print(Text("\n" + "\n".join(filter(None, summary)) + "\n", style="cyan"))
    return output


def difference(asked: list[Asked], reference: Run, other: Run) -> str | None:
    """The first difference of two runs, as an error message; None if all tokens are equal."""
    for each, one, two in zip(asked, reference.outputs, other.outputs, strict=True):
        pairs = enumerate(zip_longest(one.token_ids, two.token_ids), start=1)
        place = next((place for place, (a, b) in pairs if a != b), None)
        if place is not None:
            return (
                f"{each.question.title}: from token {place} on, the text written {other.method} is not the one "
                f"written {reference.method}. That is a bug in ssd: please report it"
            )
    return None


# --- what the reader sees ---------------------------------------------------------------------------------------------


def _print_heading(llm: LLM, params: SamplingParams, chats: bool, console: Console) -> None:
    from ssd.assembly.device import resolve_device

    settings = f"{resolve_device(llm.config.device)}, temperature {params.temperature:g}, seed {params.seed}"
    console.print(Text.assemble((llm.config.model, "bold"), f" writes a few texts ({settings})"))
    print_note(llm.note, console)
    console.print("" if chats else "[dim]It has no chat template: questions are asked as plain text.[/]\n")


def _print_speeds(runs: list[Run], differences: list[str | None], console: Console) -> None:
    """A row per run: its speed, the ratio to the first, acceptance and hits, whether its texts are the first's."""
    table = Table("all texts", box=SIMPLE, show_edge=False)
    for name in ("tokens/s", "ratio", "accepted", "hits"):
        table.add_column(name, justify="right")
    table.add_column("same text?")
    for run, differs in zip(runs, differences, strict=True):
        metrics = total(output.metrics for output in run.outputs)
        accepted = f"{metrics.accepted / metrics.drafted:.0%}" if metrics.drafted else ""
        hits = f"{metrics.hits / metrics.look_ups:.0%}" if metrics.look_ups else ""
        same = "" if run is runs[0] else "[bold red]no[/]" if differs else "[green]yes[/]"
        table.add_row(run.method, f"{run.speed:.1f}", f"{run.speed / runs[0].speed:.2f}", accepted, hits, same)
    console.print(table)
    console.print()
