"""`ssd demo`: a model answers a few prompts in more than one way, and the texts are compared.

Knows nothing of how an answer comes about: it asks, shows what comes, and compares.
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.box import SIMPLE
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from ssd.cli import speculation
from ssd.cli.console import explained, load, pace, print_note
from ssd.core import RequestOutput, SamplingParams
from ssd.errors import RequestError, SSDError

if TYPE_CHECKING:
    from ssd.llm import LLM, Prompt

HELP: Final = """\
Let a model that comes with ssd write a few texts here and now: [bold]no network, no GPU needed[/].

Shows each text as it is written, and its speed. Then answers all prompts again, as one batch and with a draft that \
guesses ahead, and compares: the texts must be the same, token for token. Exits with 1 if they are not.

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
why all {count} prompts could be answered three times, one at a time, as one batch and with a draft, and every text \
came out the same, token for token ({tokens} tokens compared). The same command writes them again.
"""
SPECULATION: Final = """\
Plain decoding costs one pass through the model for every token. In the last row {draft} guessed {k} tokens ahead and \
the model checked them in one pass: {accepted} of {guessed} guesses were right, {per_round:.2f} tokens came out of a \
pass, and the texts are still the same. A wrong guess costs time, never text.
"""
NEXT: Final = """\
[bold]What to try next[/]

  [cyan]ssd demo --seed 11 --prompt "Can a fish ride a bicycle?"[/]
  [cyan]ssd demo --model tiny-qwen3[/]
  [cyan]ssd generate tiny-llama "Once upon a time, there was" -t 0.8 --seed 4[/]

  [dim]# a small model's text at the cost of a large one: `ssd graft --help` says why[/]
  [cyan]ssd generate graft:tiny-qwen3@qwen3-0.6b "Once upon a time" -m 32 --metrics[/]

  [dim]# in Python[/]
  [cyan]from ssd import LLM, SamplingParams

  with LLM("tiny-llama") as llm:
      params = SamplingParams(temperature=0.8, seed=4)
      print(llm.generate("Once upon a time, there was", params)[0].text)[/]"""
WIDEST: Final = 100  # columns: longer lines are hard to read
WORD_SPACE: Final = re.compile(r"^ (?=\S)")  # which the first word of a continuation brings with it
FRAMES_PER_SECOND: Final = 12  # drawing takes time from writing


@dataclass(frozen=True)
class Question:
    title: str
    text: str
    chat: bool = True  # asked through the chat template, or plain text to be continued
    stop: tuple[str, ...] = ()

    def prompt(self, as_chat: bool) -> Prompt:
        return [{"role": "user", "content": self.text}] if self.chat and as_chat else self.text


QUESTIONS: Final = (
    Question("a story to continue", "It was a dark night, and the old captain", chat=False),
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
    """A question as it is put to a model."""

    question: Question
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Writing:
    """The answers to all questions, written in one way."""

    way: str
    outputs: list[RequestOutput]
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(output.token_ids) for output in self.outputs)


def demo(
    model: Annotated[str, typer.Option(help="Any MODEL, as `ssd --help` describes them.")] = "tiny-llama",
    prompt: Annotated[list[str] | None, typer.Option(help="Ask this first, as a chat. May be repeated.")] = None,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-m", help="Longest answer, in tokens.")] = 64,
    temperature: Annotated[float, typer.Option("--temperature", "-t", help="0: greedy; higher: more varied.")] = 0.8,
    seed: Annotated[int, typer.Option(help="The same seed writes the same texts, another seed other ones.")] = 4,
    draft: speculation.Draft = None,
    k: speculation.K = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    with explained():
        params = SamplingParams(temperature=temperature, seed=seed, max_new_tokens=max_new_tokens)
        questions = [*(Question("your question", text) for text in prompt or ()), *QUESTIONS]
        console = Console(highlight=False)
        console.width = min(console.width, WIDEST)
        wanted = speculation.options(None, draft or bundled_draft(model), k or 2, None)
        with load(model, device=device) as llm, load(model, device=device, speculation=wanted) as drafted:
            show(llm, drafted, questions, params, console)


def bundled_draft(model: str) -> str:
    """The draft that belongs to a bundled model; look-up for any other."""
    from ssd.models.checkpoint import bundled_models

    return f"{model}-draft" if f"{model}-draft" in bundled_models() else "ngram"


def show(llm: LLM, drafted: LLM, questions: list[Question], params: SamplingParams, console: Console) -> None:
    """The whole demo. SSDError if a text depends on the way it was written."""
    chats = knows_chats(llm)
    _print_heading(llm, params, chats, console)
    asked = [Asked(q, q.prompt(chats), replace(params, stop=q.stop)) for q in questions]
    writings = [
        one_at_a_time(llm, asked, console),
        as_one_batch(llm, asked, console),
        with_a_draft(drafted, asked, console),
    ]
    differences = [difference(asked, writings[0], writing) for writing in writings]
    _print_speeds(writings, differences, console)
    for found in filter(None, differences):
        raise SSDError(found)
    _print_explanation(llm, writings[0], drafted, console)
    console.print(NEXT, soft_wrap=True)


def knows_chats(llm: LLM) -> bool:
    """False for a base model, which is asked in plain text."""
    try:
        messages = [{"role": "user", "content": "Hello!"}]
        return llm.engine.tokenizer is not None and bool(llm.engine.tokenizer.apply_chat_template(messages))
    except RequestError:
        return False


# --- ways of writing, and whether it matters --------------------------------------------------------------------------


def one_at_a_time(llm: LLM, asked: list[Asked], console: Console) -> Writing:
    """Each answer by itself, shown as it comes."""
    started = time.perf_counter()
    outputs = [_stream(llm, each, console) for each in asked]
    return Writing("one at a time", outputs, time.perf_counter() - started)


def as_one_batch(llm: LLM, asked: list[Asked], console: Console) -> Writing:
    with console.status("once more, as one batch"):
        started = time.perf_counter()
        outputs = llm.generate([each.prompt for each in asked], [each.params for each in asked])
        return Writing("as one batch", outputs, time.perf_counter() - started)


def with_a_draft(llm: LLM, asked: list[Asked], console: Console) -> Writing:
    """Each answer by itself again, with somebody who guesses ahead."""
    with console.status("and once more, speculatively"):
        started = time.perf_counter()
        outputs = [llm.generate(each.prompt, each.params)[0] for each in asked]
        return Writing("one at a time, drafted", outputs, time.perf_counter() - started)


def difference(asked: list[Asked], reference: Writing, other: Writing) -> str | None:
    """Where two writings part, in words; None if they are the same, token for token."""
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


def _stream(llm: LLM, asked: Asked, console: Console) -> RequestOutput:
    console.rule(asked.question.title, style="dim", align="left")
    stream, text = llm.stream(asked.prompt, asked.params), ""
    with Live(console=console, refresh_per_second=FRAMES_PER_SECOND, transient=True) as live:
        for piece in stream:
            text += piece
            live.update(exchange(asked.question, text))
    assert stream.output is not None  # the stream has ended
    console.print(exchange(asked.question, stream.output.text, _speed(stream.output)))
    console.print()
    return stream.output


def exchange(question: Question, answer: str, speed: str = "") -> Table:
    """What was asked and what is written so far, exactly as they are: neither is markup."""
    grid = Table.grid(padding=(0, 2), expand=True)
    grid.add_column(style="dim")
    grid.add_column(ratio=1)
    grid.add_row("prompt", Text(question.text.rstrip("\n"), style="dim"))
    grid.add_row("answer", Text(WORD_SPACE.sub("", answer.strip("\n"))))
    grid.add_row("", Text(speed, style="cyan"))
    return grid


def _speed(output: RequestOutput) -> str:
    limit = " (the limit)" if output.finish_reason == "length" else ""
    return f"{len(output.token_ids)} tokens{limit}, {pace(output.metrics)}"


def _print_heading(llm: LLM, params: SamplingParams, chats: bool, console: Console) -> None:
    from ssd.assembly import resolve_device

    settings = f"{resolve_device(llm.config.device)}, temperature {params.temperature:g}, seed {params.seed}"
    console.print(Text.assemble((llm.config.model, "bold"), f" writes a few texts ({settings})"))
    print_note(llm.note, console)
    if not chats:
        console.print("[dim]It has no chat template: questions are asked as plain text.[/]")
    console.print()


def _print_speeds(writings: list[Writing], differences: list[str | None], console: Console) -> None:
    table = Table("all answers", box=SIMPLE, show_edge=False)
    for name in ("tokens", "seconds", "tokens/s"):
        table.add_column(name, justify="right")
    table.add_column("the same texts?")
    for writing, differs in zip(writings, differences, strict=True):
        figures = f"{writing.num_tokens}", f"{writing.seconds:.2f}", f"{writing.num_tokens / writing.seconds:.1f}"
        same = "" if writing is writings[0] else "[bold red]no[/]" if differs else "[green]yes, token for token[/]"
        table.add_row(writing.way, *figures, same)
    console.print(table, "")


def _print_explanation(llm: LLM, reference: Writing, drafted: LLM, console: Console) -> None:
    from ssd.models.checkpoint import bundled_models

    console.print("[bold]What you have just seen[/]\n")
    if llm.config.model in bundled_models():
        console.print(A_DEMO)
    console.print(EXACTNESS.format(count=len(reference.outputs), tokens=reference.num_tokens))
    counts, settings = drafted.engine.metrics, drafted.config.speculation
    console.print(
        SPECULATION.format(
            draft=settings.draft,
            k=settings.k,
            accepted=counts.spec_decode_num_accepted_tokens,
            guessed=counts.spec_decode_num_draft_tokens,
            per_round=counts.output_tokens / max(1, counts.num_rounds),
        )
    )
