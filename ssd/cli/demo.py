"""`ssd demo`: generates a few texts with AR, as a batch, with SD and with SSD, and compares them."""

from __future__ import annotations

import re
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from ssd.cli import speculation
from ssd.cli.console import Device, explained, load, print_note, speed_summary
from ssd.cli.explain import tinted
from ssd.config import NGRAM, SpeculationConfig
from ssd.core import RequestMetrics, RequestOutput, SamplingParams
from ssd.errors import RequestError, SSDError

if TYPE_CHECKING:
    from ssd.llm import LLM, Prompt

HELP: Final = """\
Let a model that comes with ssd write a few texts here and now: [bold]no network, no GPU needed[/].

Shows each text as it is written, and its speed. Then answers all prompts again: as one batch, with a draft that \
guesses ahead (speculative decoding, SD), and with a draft that never waits (speculative speculative decoding, SSD). \
Shows what was guessed and compares: the texts must be the same, token for token. Exits with 1 if they are not.

[bold]Try[/]

  ssd demo

  ssd demo --seed 11 --prompt "Can a fish ride a bicycle?"

  ssd demo --model tiny-qwen3 --temperature 0
"""
A_DEMO: Final = """\
The models that come with ssd are a demo, not an oracle: 12.7 million parameters (their drafts: 1.9), trained for \
minutes. They write recognisable English, small Python functions and short arithmetic, and they are usually wrong.
"""
EXACTNESS: Final = """\
Each text is a function of the model, the prompt, the parameters and the seed, [bold]and of nothing else[/]. That is \
why all {count} prompts could be answered {ways} ways and every text came out the same, token for token ({tokens} \
tokens compared). The same command writes them again.
"""
SD: Final = """\
[bold]SD.[/] Plain decoding (AR) costs one pass through the model for every token. Here {draft} guessed {k} tokens \
ahead and the model checked them in one pass: {accepted} of {drafted} guesses were right, {per_round:.2f} tokens came \
out of a pass. A wrong guess costs time, never text.
"""
SSD: Final = """\
[bold]SSD.[/] In SD the model waits while the draft guesses; here the draft {where} prepared the next guesses for \
every likely outcome while the model was still checking the last ones. {hits} of {look_ups} times the outcome was \
among them, and the next guesses were there at once. [cyan]ssd explain[/] shows it round by round.
"""
PLACES: Final = {
    "process": "on a core of its own",
    "stream": "beside it on the GPU",
    "inline": "(which takes turns with the model, for want of a second core: so it cannot be faster)",
}
SLOWER: Final = """\
Below 1, guessing took more time than it saved: it pays where a pass of the model takes much longer than one of its \
draft, and where other programs leave the draft its core."""
NEXT: Final = """\
[bold]What to try next[/]

  [cyan]ssd demo --seed 11 --prompt "Can a fish ride a bicycle?"[/]
  [cyan]ssd demo --model tiny-qwen3[/]
  [cyan]ssd explain --out paths.html[/]
  [cyan]ssd generate tiny-llama "Once upon a time, there was" -t 0.8 --seed 4 -m 64[/]

  [dim]# a small model's text at the cost of a large one: `ssd graft --help` says why[/]
  [cyan]ssd generate graft:tiny-qwen3@qwen3-0.6b "One evening the old gardener" -t 0.8 --seed 4 -m 32 --metrics[/]

  [dim]# in Python[/]
  [cyan]from ssd import LLM, SamplingParams

  with LLM("tiny-llama") as llm:
      params = SamplingParams(temperature=0.8, seed=4, max_new_tokens=64)
      print(llm.generate("Once upon a time, there was", params)[0].text)[/]"""
INSTALL: Final = """
  [dim]# `ssd` in an environment of your own[/]
  [cyan]pip install ssd-engine[/]"""
ACTIVATE: Final = """
  [dim]# `ssd` in this shell[/]
  [cyan]source {script}[/]"""
MAX_WIDTH: Final = 100  # columns
WORD_SPACE: Final = re.compile(r"^ (?=\S)")  # before the first word of a continuation
NUMBERS: Final = {3: "three", 4: "four"}
FRAMES_PER_SECOND: Final = 12  # drawing takes time from generating


@dataclass(frozen=True)
class Question:
    title: str
    text: str
    chat: bool = True  # asked through the chat template, or plain text to be continued
    stop: tuple[str, ...] = ()

    def prompt(self, as_chat: bool) -> Prompt:
        return [{"role": "user", "content": self.text}] if self.chat and as_chat else self.text


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


@dataclass(frozen=True)
class Asked:
    """A question with its prompt and parameters."""

    question: Question
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Writing:
    """The answers to all questions, generated in one way."""

    way: str
    outputs: list[RequestOutput]
    seconds: float
    first: Text | None = None  # the first answer; accepted draft tokens are green
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)  # with the placement that was chosen

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)

    @property
    def speed(self) -> float:
        return self.num_tokens / self.seconds

    def total(self, count: Callable[[RequestMetrics], int]) -> int:
        return sum(count(output.metrics) for output in self.outputs)

    def share(self, part: Callable[[RequestMetrics], int], whole: Callable[[RequestMetrics], int]) -> str:
        """A percentage, or "" if there is nothing."""
        return f"{self.total(part) / self.total(whole):.0%}" if self.total(whole) else ""


def demo(
    model: Annotated[str, typer.Option(help="Any MODEL, as `ssd --help` describes them.")] = "tiny-llama",
    prompt: Annotated[list[str] | None, typer.Option(help="Ask this first, as a chat. May be repeated.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-m", help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy; higher: more varied.")] = 0.8,
    seed: Annotated[int, typer.Option(help="The same seed writes the same texts, another seed other ones.")] = 4,
    draft: speculation.Draft = None,
    k: speculation.K = None,
    device: Device = "auto",
) -> None:
    with explained():
        params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
        questions = [*(Question("your question", text) for text in prompt or ()), *QUESTIONS]
        console = Console(highlight=False)
        console.width = min(console.width, MAX_WIDTH)
        writings: list[Writing] = []
        with load(model, device=device) as llm:
            chats = knows_chats(llm)
            _print_heading(llm, params, chats, console)
            asked = [Asked(q, q.prompt(chats), replace(params, stop=q.stop)) for q in questions]
            writings += [one_at_a_time(llm, asked, console), as_one_batch(llm, asked, console)]
        guesser = draft or speculation.bundled_draft(model) or NGRAM
        for mode in ("sd",) if guesser == NGRAM else ("sd", "ssd"):  # one engine at a time: each has all cores
            wanted = speculation.options(mode=mode, draft=guesser, k=k or "2")
            with load(model, device=device, speculation=wanted) as llm:
                writings.append(with_a_draft(llm, asked, console))
        conclude(model, asked, writings, console)


def conclude(model: str, asked: list[Asked], writings: list[Writing], console: Console) -> None:
    """Compares the writings and prints the summary. SSDError if their texts differ."""
    differences = [difference(asked, writings[0], writing) for writing in writings]
    _print_side_by_side(asked[0].question, writings, console)
    _print_speeds(writings, differences, console)
    for found in filter(None, differences):
        raise SSDError(found)
    _print_explanation(model, writings, console)
    console.print(NEXT, soft_wrap=True)
    console.print(INSTALL)
    if script := activation():
        console.print(ACTIVATE.format(script=escape(script)), soft_wrap=True)


def activation() -> str | None:
    """The script that puts `ssd` on the path; None where it is there already, or outside a virtual environment."""
    folder, found = Path(sys.prefix, "bin"), shutil.which("ssd")
    if sys.prefix == sys.base_prefix or (found is not None and Path(found).parent == folder):
        return None
    script = folder / "activate"
    return str(script.relative_to(Path.cwd()) if script.is_relative_to(Path.cwd()) else script)


def knows_chats(llm: LLM) -> bool:
    """Whether the model has a chat template; False for a base model."""
    try:
        messages = [{"role": "user", "content": "Hello!"}]
        return llm.engine.tokenizer is not None and bool(llm.engine.tokenizer.apply_chat_template(messages))
    except RequestError:
        return False


# --- generating and comparing -----------------------------------------------------------------------------------------


def one_at_a_time(llm: LLM, asked: list[Asked], console: Console) -> Writing:
    """One request after the other, shown as they are generated. Drawing time is not counted."""
    streamed = [_stream(llm, each, console) for each in asked]
    outputs = [output for output, _ in streamed]
    return Writing("one at a time (AR)", outputs, sum(seconds for _, seconds in streamed), Text(outputs[0].text))


def as_one_batch(llm: LLM, asked: list[Asked], console: Console) -> Writing:
    with console.status("once more, as one batch"):
        started = time.perf_counter()
        outputs = llm.generate([each.prompt for each in asked], [each.params for each in asked])
        return Writing("as one batch (AR)", outputs, time.perf_counter() - started)


def with_a_draft(llm: LLM, asked: list[Asked], console: Console) -> Writing:
    """One request after the other, with speculation."""
    from ssd.assembly.device import resolve_device
    from ssd.assembly.drafters import placed
    from ssd.cli.trace import Recorder

    wanted = placed(llm.config.speculation, resolve_device(llm.config.device))
    recorder = Recorder(branches=False)
    way = "with a draft (SD)" if wanted.mode == "sd" else "draft runs ahead (SSD)"
    with console.status(f"and once more, {way}"), llm.driver.observing(recorder):
        started = time.perf_counter()
        outputs = [llm.generate(each.prompt, each.params)[0] for each in asked]
        seconds = time.perf_counter() - started
    first = recorder.trace(outputs[0].request_id, len(outputs[0].token_ids))
    return Writing(way, outputs, seconds, tinted(first, llm.engine.tokenizer, outputs[0]), wanted)


def difference(asked: list[Asked], reference: Writing, other: Writing) -> str | None:
    """The first difference of two writings, as an error message; None if all tokens are equal."""
    for each, one, two in zip(asked, reference.outputs, other.outputs, strict=True):
        if one.token_ids != two.token_ids:
            return (
                f"{each.question.title}: from token {_shared(one.token_ids, two.token_ids) + 1} on, the text written "
                f"{other.way} is not the one written {reference.way}. Without a C compiler the CPU's sums have no "
                "fixed order and this can happen: install one. Otherwise it is a bug in ssd: please report it"
            )
    return None


def _shared(one: list[int], two: list[int]) -> int:
    """How many leading tokens are the same."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, two, strict=False)))


# --- what the reader sees ---------------------------------------------------------------------------------------------


def _stream(llm: LLM, asked: Asked, console: Console) -> tuple[RequestOutput, float]:
    """The answer, and its time in seconds without drawing."""
    console.rule(asked.question.title, style="dim", align="left")
    started, drawing, drawn = time.perf_counter(), 0.0, 0.0
    stream, text = llm.stream(asked.prompt, asked.params), ""
    with Live(console=console, auto_refresh=False, transient=True) as live:
        for piece in stream:
            text += piece
            now = time.perf_counter()
            if now - drawn > 1 / FRAMES_PER_SECOND:
                live.update(exchange(asked.question, text), refresh=True)
                drawn = time.perf_counter()
                drawing += drawn - now
        seconds = time.perf_counter() - started - drawing
    assert stream.output is not None  # the stream has ended
    console.print(exchange(asked.question, stream.output.text, _speed(stream.output)))
    console.print()
    return stream.output, seconds


def exchange(question: Question, answer: str, speed: str = "") -> Table:
    """A prompt and its answer so far, without interpreting markup."""
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim")
    grid.add_column(ratio=1)
    grid.add_row("prompt", Text(question.text.rstrip("\n"), style="dim"))
    grid.add_row("answer", tidy(Text(answer)))
    grid.add_row("", Text(speed, style="cyan"))
    return grid


def _speed(output: RequestOutput) -> str:
    limit = " (the limit)" if output.finish_reason == "length" else ""
    return f"{len(output.token_ids)} tokens{limit}, {speed_summary(output.metrics)}"


def _print_heading(llm: LLM, params: SamplingParams, chats: bool, console: Console) -> None:
    from ssd.assembly.device import resolve_device

    settings = f"{resolve_device(llm.config.device)}, temperature {params.temperature:g}, seed {params.seed}"
    console.print(Text.assemble((llm.config.model, "bold"), f" writes a few texts ({settings})"))
    print_note(llm.note, console)
    if not chats:
        console.print("[dim]It has no chat template: questions are asked as plain text.[/]")
    console.print()


def _print_side_by_side(question: Question, writings: list[Writing], console: Console) -> None:
    """The first answer of every writing that has one, in columns."""
    shown = [(writing, writing.first) for writing in writings if writing.first is not None]
    console.rule(f"{question.title}, {len(shown)} times", style="dim", align="left")
    table = Table(*(writing.way for writing, _ in shown), box=SIMPLE, show_edge=False, expand=True)
    for column in table.columns:
        column.ratio = 1
    table.add_row(*(tidy(text) for _, text in shown))
    table.add_row(*(Text(_passes(writing.outputs[0].metrics), style="cyan") for writing, _ in shown))
    console.print(table)
    console.print("\n[green]Green[/]: guessed by the draft, and right.\n", style="dim")


def tidy(text: Text) -> Text:
    """Strips blank lines around a text and the space before the first word of a continuation."""
    plain = text.plain
    start, end = len(plain) - len(plain.lstrip("\n")), len(plain.rstrip("\n"))
    return text[start + bool(WORD_SPACE.match(plain[start:])) : end] if start < end else Text()


def _passes(metrics: RequestMetrics) -> str:
    passes = f"{metrics.output_tokens} tokens in {metrics.rounds} passes"
    return f"{passes}, {metrics.accepted} of {metrics.drafted} guesses right" if metrics.drafted else passes


def _print_speeds(writings: list[Writing], differences: list[str | None], console: Console) -> None:
    table = Table("all answers", box=SIMPLE, show_edge=False)
    for name in ("tokens", "seconds", "tokens/s", "accepted", "hits"):
        table.add_column(name, justify="right")
    table.add_column("same?")
    for writing, differs in zip(writings, differences, strict=True):
        figures = f"{writing.num_tokens}", f"{writing.seconds:.2f}", f"{writing.speed:.1f}"
        accepted = writing.share(lambda m: m.accepted, lambda m: m.drafted)
        hits = writing.share(lambda m: m.hits, lambda m: m.look_ups)
        same = "" if writing is writings[0] else "[bold red]no[/]" if differs else "[green]yes[/]"
        table.add_row(writing.way, *figures, accepted, hits, same)
    console.print(table)
    console.print()


def _print_explanation(model: str, writings: list[Writing], console: Console) -> None:
    from ssd.models.open import bundled_models

    console.print("[bold]What you have just seen[/]\n")
    if model in bundled_models():
        console.print(A_DEMO)
    plain, drafted = writings[0], [writing for writing in writings if writing.speculation.mode != "ar"]
    ways, count = NUMBERS[len(writings)], len(plain.outputs)
    console.print(EXACTNESS.format(count=count, ways=ways, tokens=plain.num_tokens * (len(writings) - 1)))
    for writing in drafted:
        console.print(_explanation(writing))
    if len(drafted) == 1:
        console.print("SSD needs a draft model: name one with [cyan]--draft[/] to see it.\n")
    gains = {writing.speculation.mode.upper(): writing.speed / plain.speed for writing in drafted}
    said = ", ".join(f"{name} {gain:.2f} times" for name, gain in gains.items())
    slower = SLOWER if min(gains.values()) < 1 else ""
    console.print(f"[bold]Speed[/] against AR, here and now (a rough measure of short work): {said}. {slower}\n")


def _explanation(writing: Writing) -> str:
    wanted = writing.speculation
    if wanted.mode == "ssd":
        hits, look_ups = writing.total(lambda m: m.hits), writing.total(lambda m: m.look_ups)
        return SSD.format(where=PLACES[wanted.placement], hits=hits, look_ups=look_ups)
    accepted, drafted = writing.total(lambda m: m.accepted), writing.total(lambda m: m.drafted)
    per_round = writing.num_tokens / writing.total(lambda m: m.rounds)
    return SD.format(draft=wanted.draft, k=wanted.k, accepted=accepted, drafted=drafted, per_round=per_round)
