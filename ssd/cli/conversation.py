"""A conversation in a terminal or over a pipe: messages, commands, history, metrics.

Answers come from a `Backend`: an engine, a server, or a fake in tests.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import chain, islice, takewhile
from pathlib import Path
from typing import Any, Final, Protocol

import typer
from rich.text import Text

from ssd.cli.console import draft_summary, errors, total
from ssd.core import FinishReason, RequestMetrics, SamplingParams
from ssd.errors import RequestError, SSDError

Message = dict[str, Any]

PROMPT: Final = "> "
CONTINUED: Final = "… "
QUOTES: Final = '"""'
COMMANDS: Final = f"""\
/reset           forget the conversation
/system TEXT     another system prompt (without TEXT: none), and a new conversation
/set NAME VALUE  another sampling parameter: /set top_p 0.9 (without NAME: those in use)
/save FILE       write the conversation, with the parameters and seed of every answer, into a new JSON file
/load FILE       go on with a conversation that was saved
/help            this list
/exit            end the chat, as Ctrl-D does

Ctrl-C stops an answer. Lines that are pasted together are one message (with GNU readline), and so are the lines \
between two lines of {QUOTES}; a line that ends with a backslash goes on in the next one. After a space, a line that \
begins with a slash is a message too."""
SETTABLE: Final = {  # by the name in /set, in a saved conversation and in a server's protocol
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")},
    **{name: name for name in ("presence_penalty", "frequency_penalty", "stop", "seed")},
    "max_tokens": "max_new_tokens",
}
ENDINGS: Final[dict[FinishReason | None, str]] = {"length": "(cut off: the length limit)", "abort": "(stopped)"}
LEAVE: Final = "Ctrl-C once more ends the chat, and so do /exit and Ctrl-D"
SPARE_ANSWERS: Final = 4  # freed at once when old turns are dropped, so that the next turns keep their prefix


class Write(Protocol):
    """Takes a piece of an answer, whether it was drafted, and whether it is reasoning."""

    def __call__(self, piece: str, drafted: bool, reasoning: bool = False, /) -> None: ...


class Command(str):
    """A line that begins with a slash."""


@dataclass(frozen=True)
class Answer:
    """The answer to one message."""

    text: str
    finish_reason: FinishReason | None  # None: not known
    metrics: RequestMetrics
    params: SamplingParams  # with the seed that was used, if it is known
    fields: Message = field(default_factory=dict)  # of the message, beside its text: reasoning, a tool call


@dataclass(frozen=True)
class Turn:
    """A message and its answer."""

    question: Message
    answer: Message
    sampling: dict[str, Any] | None = None  # parameters of the answer; None: not known

    @property
    def messages(self) -> tuple[Message, Message]:
        return self.question, self.answer

    @property
    def call(self) -> Message | None:
        """The tool call that the answer ends with."""
        calls = self.answer.get("tool_calls")
        return calls[0] if calls else None


class Backend(Protocol):
    """What answers messages."""

    params: SamplingParams  # of the next answer

    @property
    def name(self) -> str: ...

    @property
    def unit(self) -> str:
        """The unit of its metrics: tokens, or something else if they are not known."""
        ...

    def fits(self, messages: list[Message], answers: int) -> bool:
        """Whether the context holds these messages and `answers` more answers."""
        ...

    def answer(self, messages: list[Message], write: Write) -> Answer:
        """Writes the answer as it is generated. Ctrl-C ends it ("abort"); the text until then is the answer."""
        ...


class Conversation:
    """Reads messages and commands with `read(prompt)`, and answers the messages.

    `interactive`: prompts are shown, and Ctrl-C stops an answer instead of the chat.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        system: str | None = None,
        metrics: bool = False,
        interactive: bool = True,
        read: Callable[[str], str] = input,
    ) -> None:
        self.backend = backend
        self.system = system
        self.turns: list[Turn] = []
        self.num_unsent = 0  # oldest turns, which no longer fit the context
        self._costs: list[RequestMetrics] = []
        self._metrics = metrics
        self._interactive = interactive
        self._read = read

    def run(self) -> None:
        """Until /exit, the end of the input, or two Ctrl-C in a row."""
        while (entry := self._entry()) is not None:
            try:
                self._respond(entry)
            except KeyboardInterrupt:  # before an answer has begun, or after its end
                if not self._interactive:
                    raise
                note(ENDINGS["abort"])
        if self._metrics and self._costs:
            note(f"the whole chat: {report(self._costs, self.backend.unit)}")

    def _respond(self, entry: str) -> None:
        if isinstance(entry, Command):
            self.command(entry)
        elif entry.strip():
            self.ask(entry)

    # --- what is typed ------------------------------------------------------------------------------------------------

    def _entry(self) -> str | None:
        """The next message or command; None at the end."""
        for last in (False, True):
            try:
                line = self._line(PROMPT)
                if line.rstrip() == "/exit":
                    return None
                return Command(line) if line.startswith("/") and "\n" not in line else self._message(line)
            except EOFError:
                if self._interactive:
                    typer.echo()
                return None
            except KeyboardInterrupt:
                if not self._interactive:
                    raise
                typer.echo()
                if not last:
                    note(LEAVE)
        return None

    def _message(self, line: str) -> str:
        """The complete message that begins with this line, or with these lines if they were pasted."""
        first, *pasted = line.split("\n")
        if first.strip() == QUOTES:
            lines = chain(pasted, (each for entry in self._lines() for each in entry.split("\n")))
            return "\n".join(takewhile(lambda each: each.strip() != QUOTES, lines))
        return self._continued(line.rstrip("\n"))

    def _continued(self, line: str) -> str:
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines += islice(self._lines(), 1)
        return "\n".join(lines)

    def _lines(self) -> Iterator[str]:
        with suppress(EOFError):
            while True:
                yield self._line(CONTINUED)

    def _line(self, prompt: str) -> str:
        return self._read(prompt if self._interactive else "")

    # --- commands -----------------------------------------------------------------------------------------------------

    def command(self, line: str) -> None:
        name, _, text = line.partition(" ")
        text = text.strip()
        match name:
            case "/help":
                note(COMMANDS)
            case "/reset":
                self._forget()
                note("the conversation is forgotten")
            case "/system":
                self.system = text or None
                self._forget()
                note(f"a new conversation, {f'with the system prompt: {text}' if text else 'without one'}")
            case "/set":
                note(self._set(text))
            case "/save":
                note(self._save(text))
            case "/load":
                note(self._load(text))
            case _:
                note(f"{name} is no command: /help lists them. After a space, this line would be a message")

    def _forget(self) -> None:
        self.turns.clear()
        self.num_unsent = 0

    def _set(self, text: str) -> str:
        """Sets a sampling parameter; returns a message for the user."""
        name, _, value = text.partition(" ")
        if name and (name not in SETTABLE or not value.strip()):
            return f"/set needs a name and a value, such as /set top_p 0.9. The names: {', '.join(SETTABLE)}"
        if name:
            try:
                self.backend.params = replace(self.backend.params, **{SETTABLE[name]: _value(value.strip())})
            except RequestError as error:
                return str(error)
        used = parameters(self.backend.params)
        return ", ".join(f"{each} {json.dumps(used[each], ensure_ascii=False)}" for each in ([name] if name else used))

    def _save(self, file: str) -> str:
        """Saves the conversation; returns a message for the user."""
        if not file:
            return "/save needs the name of a file that does not exist yet: /save FILE"
        spoken = {
            "model": self.backend.name,
            "messages": [*self._head(), *(message for turn in self.turns for message in turn.messages)],
            "sampling": [turn.sampling for turn in self.turns],  # of every answer
        }
        try:
            with Path(file).expanduser().open("x", encoding="utf-8") as out:
                json.dump(spoken, out, ensure_ascii=False, indent=2)
        except FileExistsError:
            return f"{file} exists and stays as it is: choose another name"
        except OSError as error:
            return f"{file} cannot be written ({error.strerror}): choose another name"
        return f"saved in {file}"

    def _load(self, file: str) -> str:
        """Replaces the conversation by a saved one; returns a message for the user."""
        if not file:
            return "/load needs the name of a file that /save has written: /load FILE"
        try:
            self.system, self.turns = _conversation(json.loads(Path(file).expanduser().read_text(encoding="utf-8")))
        except OSError as error:
            return f"{file} cannot be read ({error.strerror}): choose another file"
        except (ValueError, LookupError, TypeError, AttributeError):
            return f"{file} is no conversation that /save has written: choose another file"
        self.num_unsent = 0
        return f"loaded from {file}: the conversation goes on after its {len(self.turns)} turns"

    # --- answers ------------------------------------------------------------------------------------------------------

    def ask(self, text: str) -> None:
        """Answers a message, or goes on with the result of a tool call. An SSDError ends this message only."""
        question, last, thinks = self._question(text), "\n", False

        def write(piece: str, drafted: bool, reasoning: bool = False) -> None:
            nonlocal last, thinks
            if reasoning and not self._interactive:
                return
            if thinks and not reasoning and last != "\n":
                typer.echo()
            thinks = reasoning
            typer.echo(typer.style(piece, fg="green" if drafted else None, dim=reasoning or None), nl=False)
            last = piece[-1:] or last

        try:
            num_unsent = self._too_old(question)
            answer = self.backend.answer(self._messages(num_unsent, question), write)
        except SSDError as error:
            typer.echo("", nl=last != "\n")
            note(Text.assemble(("error: ", "bold red"), str(error)))
            return
        typer.echo("", nl=last != "\n" or not answer.text)
        if num_unsent > self.num_unsent:
            self.num_unsent = num_unsent
            note(f"(the context is full: the model does not see the {num_unsent} oldest turns any more)")
        if answer.text or answer.fields:
            used = parameters(answer.params) | {"unsent_turns": num_unsent}
            self.turns.append(Turn(question, {"role": "assistant", "content": answer.text, **answer.fields}, used))
        self._conclude(answer)

    def _question(self, text: str) -> Message:
        """A message of the user, or the result of the tool that was called last."""
        call = self.turns[-1].call if self.turns else None
        if call is None:
            return {"role": "user", "content": text}
        return {"role": "tool", "tool_call_id": call["id"], "name": call["function"]["name"], "content": text}

    def _conclude(self, answer: Answer) -> None:
        """Prints the notes after an answer."""
        if answer.finish_reason == "abort" and not self._interactive:
            raise KeyboardInterrupt
        if answer.finish_reason in ENDINGS:
            note(ENDINGS[answer.finish_reason])
        for call in answer.fields.get("tool_calls", ()):
            arguments = call["function"]["arguments"]
            text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
            note(f"({call['function']['name']} {text} is called: what you type next is its result)")
        self._costs.append(answer.metrics)
        if self._metrics:
            note(report([answer.metrics], self.backend.unit))
        if self._interactive:
            typer.echo()

    def _too_old(self, question: Message) -> int:
        """Number of oldest turns to leave out, so that the others fit."""
        unsent, answers = self.num_unsent, 1
        while unsent < len(self.turns) and not self.backend.fits(self._messages(unsent, question), answers):
            unsent, answers = unsent + 1, SPARE_ANSWERS
        return unsent

    def _messages(self, start: int, question: Message) -> list[Message]:
        return [*self._head(), *(message for turn in self.turns[start:] for message in turn.messages), question]

    def _head(self) -> list[Message]:
        return [] if self.system is None else [{"role": "system", "content": self.system}]


def parameters(params: SamplingParams) -> dict[str, Any]:
    """The sampling parameters by the names of `SETTABLE`."""
    return {name: getattr(params, field) for name, field in SETTABLE.items()}


def _value(text: str) -> Any:
    """A value of /set: none, JSON, or else the text itself."""
    try:
        return None if text.lower() == "none" else json.loads(text)
    except ValueError:
        return text


def _conversation(saved: Any) -> tuple[str | None, list[Turn]]:
    """System prompt and turns of a saved conversation; ValueError, or what Python raises, for anything else."""
    messages = [{**m, "role": str(m["role"]), "content": str(m["content"])} for m in saved["messages"]]
    system = messages.pop(0)["content"] if messages and messages[0]["role"] == "system" else None
    if [m["role"].replace("tool", "user") for m in messages] != ["user", "assistant"] * (len(messages) // 2):
        raise ValueError("not in turns")
    pairs = list(zip(messages[::2], messages[1::2], strict=True))
    known = saved.get("sampling") or [None] * len(pairs)
    return system, [Turn(*pair, each) for pair, each in zip(pairs, known, strict=True)]


def note(text: str | Text) -> None:
    """Prints a note to standard error: dim, wrapped in terminals only."""
    errors.print(Text("", style="dim").append(text), soft_wrap=not errors.is_terminal)


def report(metrics: Seq[RequestMetrics], unit: str) -> str:
    """A summary of the metrics of some answers."""
    counts = total(metrics)
    waits = [m.time_to_first_token for m in metrics if m.time_to_first_token is not None]
    timed = [m for m in metrics if m.decode_tokens_per_second is not None]
    seconds = sum((m.output_tokens - 1) / (m.decode_tokens_per_second or 1.0) for m in timed)
    speed = f"{sum(m.output_tokens - 1 for m in timed) / seconds:.1f}" if timed else "-"
    first = f"{sum(waits) / len(waits):.3f}" if waits else "-"
    parts = [f"{counts.output_tokens} {unit}, {speed} {unit}/s, first after {first} s"]
    if counts.prompt_tokens:
        parts.append(f"{counts.cached_tokens} of {counts.prompt_tokens} prompt tokens cached")
    return "; ".join([*parts, *filter(None, [draft_summary(counts)])])
