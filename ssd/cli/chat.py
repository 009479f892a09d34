"""`ssd chat`: a conversation with a model in the terminal.

The command and its backends, an engine or a server; the conversation itself is in `conversation`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from io import TextIOWrapper
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from ssd.cli.console import bundled_draft, load, seeded
from ssd.cli.conversation import SETTABLE, Answer, Backend, Conversation, Message, Write, note, parameters
from ssd.cli.options import Flags, Given, command, flag_of
from ssd.config import EngineConfig
from ssd.core import Delta, FinishReason, RequestMetrics, SamplingParams
from ssd.errors import ConfigError, RequestError

if TYPE_CHECKING:
    from ssd.bench.openai import ServerContender
    from ssd.cli.replies import Tools
    from ssd.llm import LLM
    from ssd.text.tokenizer import Tokenizer

HELP: Final = """\
Talk to a model: [bold]answers come as they are written, and the model remembers the conversation[/].

Type a message and press Enter; lines that are pasted together are one message. Ctrl-C stops an answer, Ctrl-D ends \
the chat, and [cyan]/help[/] lists what else there is: [cyan]/reset[/], [cyan]/system TEXT[/], \
[cyan]/set top_p 0.9[/], [cyan]/save FILE[/], [cyan]/load FILE[/]. What was said before is not computed again: it is \
in the prefix cache. When the context is full, the oldest turns are left out.

A model that comes with ssd is helped by its draft, as far as that pays; any other by the one that [cyan]--draft[/] \
names.

Over a pipe every line is a message; the answers go to standard output, everything else to standard error.

[bold]Try[/]

  ssd chat

  ssd chat --mode ssd --colour --metrics

  ssd chat MODEL --system "Answer in one sentence." -t 0.7 --seed 4

  echo "Who wrote Hamlet?" | ssd chat

  ssd chat http://127.0.0.1:8000   [dim]# a running ssd serve, or any OpenAI-like server; its key: OPENAI_API_KEY[/]
"""
A_DEMO: Final = """\
The models that come with ssd are a demo, not an oracle: 12.7 million parameters (their drafts: 1.9), trained for \
minutes. They write recognisable English, small Python functions and short arithmetic, and they are usually wrong.
"""
Read = Callable[[str], str]  # reads an entry, after a prompt

PLAIN: Final = """\
{{ bos_token }}{% for message in messages %}{{ message.role | capitalize }}: {{ message.content | trim }}
{% endfor %}Assistant:"""
PLAIN_STOP: Final = "\nUser:"


@command
def chat(
    model: Annotated[
        str, typer.Argument(help="Any MODEL, as `ssd --help` describes them, or the URL of a server.")
    ] = "tiny-llama",
    system: Annotated[str | None, typer.Option(metavar="TEXT", help="System message.")] = None,
    history: Annotated[
        Path | None, typer.Option(help="Keep what is typed in this file, for the arrow keys of later chats.")
    ] = None,
    tools: Annotated[
        Path | None,
        typer.Option(
            help="JSON file with tools that the model may call: a list in OpenAI's shape. What is typed after a call "
            "is its result."
        ),
    ] = None,
    metrics: Annotated[bool, typer.Option("--metrics", help="Report times and speed after every answer.")] = False,
    colour: Annotated[bool, typer.Option("--colour", help="Show accepted draft tokens in green.")] = False,
    *,
    sampling: Annotated[Given, Flags(SamplingParams, only={*SETTABLE.values()}, defaults={"max_new_tokens": 512})],
    engine: Annotated[Given, Flags(EngineConfig, without={"max_num_seqs"})],
) -> None:
    params, read = SamplingParams(**sampling), typed(history)
    if model.startswith(("http://", "https://")):
        from ssd.bench.openai import ServerContender

        own = {"colour": colour, "tools": tools}
        for name in (*engine.pop("speculation", {}), *engine, *(name for name, value in own.items() if value)):
            raise ConfigError(f"{flag_of(name)}: a server answers, which has its own: leave it out")
        talk_to_server(ServerContender(model), params, read, system=system, metrics=metrics)
        return
    drafting = engine.get("speculation", {})
    if "draft" not in drafting and drafting.get("mode") != "ar" and (draft := bundled_draft(model)):
        engine["speculation"] = {"mode": "sd", "draft": draft, "k": "auto", **drafting}
    if tools is not None:
        from ssd.cli.replies import read_tools

        engine["tools"] = read_tools(tools)
    talk(model, params, read, system=system, metrics=metrics, colour=colour, **engine)


def talk(
    model: str,
    params: SamplingParams,
    read: Read = input,
    *,
    system: str | None,
    metrics: bool,
    colour: bool,
    tools: Tools | None = None,
    **engine: Any,
) -> None:
    """Loads a model and runs a conversation with it. Further keywords are options of the engine."""
    with load(model, {"max_num_seqs": 1, **engine}) as llm:
        backend = EngineBackend(llm, params, colour, tools or [])
        if interactive():
            _print_greeting(llm, params, colour)
        if llm.note:
            note(llm.note)
        if backend.plain:
            note(f"{model} has no chat template: the turns are marked in plain text, which it may not understand.")
        converse(backend, system, metrics, read)


def talk_to_server(
    server: ServerContender, params: SamplingParams, read: Read = input, *, system: str | None, metrics: bool
) -> None:
    """Runs a conversation with a server's model."""
    backend = ServerBackend(server, params)
    if interactive():
        note(f"{backend.name} answers (temperature {params.temperature:g})")
    converse(backend, system, metrics, read)


def converse(backend: Backend, system: str | None, metrics: bool, read: Read = input) -> None:
    """Runs the conversation, with line editing in a terminal."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="replace")  # bytes that are no text are no reason to end
    if interactive():
        with suppress(ImportError):
            import readline  # which `input` then uses

            readline.parse_and_bind("set enable-bracketed-paste on")  # pasted lines are one entry
        note("/help lists the commands, Ctrl-D ends the chat.\n")
    Conversation(backend, system=system, metrics=metrics, interactive=interactive(), read=read).run()


def typed(history: Path | None) -> Read:
    """`input`, which adds every entry to a file of JSON strings, one a line; earlier entries go to readline."""
    if history is None:
        return input
    try:
        with open(os.open(history.expanduser(), os.O_RDWR | os.O_CREAT, 0o600), encoding="utf-8") as file:  # private
            entries = [str(json.loads(line)) for line in file]
    except (OSError, ValueError) as error:
        raise ConfigError(f"--history {history}: cannot be used ({error}): name another file") from error
    if interactive():
        with suppress(ImportError):
            import readline

            for entry in entries:
                readline.add_history(entry)

    def read(prompt: str) -> str:
        entry = input(prompt)
        if entry:
            with history.expanduser().open("a", encoding="utf-8") as file:
                file.write(json.dumps(entry, ensure_ascii=False) + "\n")
        return entry

    return read


def interactive() -> bool:
    """Whether input and output are a terminal."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def _print_greeting(llm: LLM, params: SamplingParams, colour: bool) -> None:
    from ssd.assembly.device import resolve_device
    from ssd.assembly.open import bundled_models

    wanted = llm.config.speculation
    drafter = "" if wanted.mode == "ar" else f"; {wanted.draft} drafts ({wanted.mode.upper()}, K = {wanted.k})"
    settings = f"{resolve_device(llm.config.device)}, temperature {params.temperature:g}"
    note(Text.assemble((llm.config.model, "bold not dim"), f" answers ({settings}){drafter}"))
    if llm.config.model in bundled_models():
        note(A_DEMO.rstrip())
    if colour:
        note(Text.assemble(("Green", "green"), ": guessed by the draft, and right."))


# --- the backends -----------------------------------------------------------------------------------------------------


class EngineBackend:
    """Answers with an engine of this process. Ctrl-C ends an answer after the current round."""

    unit = "tokens"

    def __init__(self, llm: LLM, params: SamplingParams, colour: bool = False, tools: Tools | None = None) -> None:
        from ssd.cli.replies import ReplyFormat

        if llm.engine.tokenizer is None:
            raise RequestError(
                f"{llm.config.model} has no tokenizer, so it cannot chat: put a tokenizer.json into its directory"
            )
        self.name = llm.config.model
        self.plain = not knows_chats(llm)
        self._llm = llm
        self._tokenizer = llm.engine.tokenizer
        self.params = params
        self._colour = colour
        template = "" if self.plain else self._tokenizer.template_source(tools=tools or None)
        self._format = ReplyFormat(self._tokenizer, template, tools or [])

    def fits(self, messages: list[Message], answers: int) -> bool:
        longest = self._llm.engine.max_model_len
        return len(self._encode(messages)) + min(answers * self.params.max_new_tokens, longest // 2) <= longest

    def answer(self, messages: list[Message], write: Write) -> Answer:
        from ssd.llm import check_served

        tokens, params = self._encode(messages), seeded(self.params)
        sent = self._format.sampling(replace(params, stop=(*params.stop, PLAIN_STOP)) if self.plain else params)
        origins = Origins(tokens, self._tokenizer, sent.shown_token_ids) if self._colour else None
        reader = self._format.reader(tokens)
        answer = self._llm.driver.submit(tokens, sent, stream=True)
        with on_interrupt(answer.abort):
            try:
                for delta in answer:
                    for piece, drafted in origins.split(delta) if origins is not None else [(delta.text, False)]:
                        for text, reasoning in reader.feed(piece):
                            write(text, drafted, reasoning)
                for text, reasoning in reader.finish():
                    write(text, False, reasoning)
            finally:
                answer.abort()  # if writing failed
        output = answer.result()
        check_served(output)
        return Answer(reader.content, output.finish_reason, output.metrics, params, reader.fields)

    def _encode(self, messages: list[Message]) -> list[int]:
        if not self.plain:
            return self._llm.encode(messages, {"tools": self._format.tools} if self._format.tools else None)
        text = self._tokenizer.apply_chat_template(messages, chat_template=PLAIN)
        return self._tokenizer.encode(text, add_special_tokens=False)


def knows_chats(llm: LLM) -> bool:
    """Whether the model has a chat template; False for a base model."""
    try:
        messages = [{"role": "user", "content": "Hello!"}]
        return llm.engine.tokenizer is not None and bool(llm.engine.tokenizer.apply_chat_template(messages))
    except RequestError:
        return False


class Origins:
    """Splits the text of an answer into drafted and other text; accepted draft tokens come first in a round."""

    def __init__(self, prompt_token_ids: list[int], tokenizer: Tokenizer, shown: Seq[int] = ()) -> None:
        from ssd.text.detokenizer import IncrementalDecoder

        self._decoder = IncrementalDecoder(tokenizer, prompt_token_ids, shown_token_ids=shown)
        self._drafted: deque[bool] = deque()  # per pending character: whether its token was drafted

    def split(self, delta: Delta) -> Iterator[tuple[str, bool]]:
        """A delta's text in pieces, each with whether it was drafted."""
        for place, token in enumerate(delta.token_ids):
            self._drafted += [place < delta.num_accepted] * len(self._decoder.push(token))
        for drafted, characters in groupby(delta.text, lambda _: bool(self._drafted) and self._drafted.popleft()):
            yield "".join(characters), drafted


class ServerBackend:
    """A server answers. It does not say how many tokens a piece of text holds."""

    unit = "pieces"

    def __init__(self, server: ServerContender, params: SamplingParams) -> None:
        self.name = f"{server.name} ({server.model})"
        self.params = params
        self._server = server

    def fits(self, messages: list[Message], answers: int) -> bool:
        return True  # else it says so itself

    def answer(self, messages: list[Message], write: Write) -> Answer:
        metrics, text = RequestMetrics(arrival=time.perf_counter()), ""
        reason: FinishReason | None = None
        params, usual = self.params, parameters(SamplingParams())
        asked = {name: value for name, value in parameters(params).items() if value != usual[name]}
        asked |= {"temperature": params.temperature, "max_tokens": params.max_new_tokens}
        try:
            with closing(self._server.stream_chat(messages, asked)) as pieces:
                for piece in pieces:
                    metrics.first_token = metrics.first_token or time.perf_counter()
                    metrics.output_tokens += 1
                    text += piece
                    write(piece, False)
            reason = "length" if self._server.finish_reason == "length" else None
        except KeyboardInterrupt:
            reason = "abort"
        metrics.finished = time.perf_counter()
        return Answer(text, reason, metrics, params)


@contextmanager
def on_interrupt(end: Callable[[], None]) -> Iterator[None]:
    """Calls `end` on Ctrl-C instead of raising KeyboardInterrupt."""
    before = signal.signal(signal.SIGINT, lambda *_: end())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
