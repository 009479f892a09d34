"""What a generated message consists of, in the order in which it is generated, and the message in OpenAI's shape."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class CallBegin:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    """A piece of the arguments' JSON text."""

    index: int
    text: str


@dataclass(frozen=True)
class CallEnd:
    """`broken`: for a call that began and then is not valid JSON, its text in the message. `complete` False: the
    message was cut inside of the call."""

    index: int
    broken: str | None = None
    complete: bool = True


Event = Reasoning | Text | CallBegin | CallArguments | CallEnd


def settled(events: Sequence[Event]) -> list[Event]:
    """Those of a whole message: a call that is broken is text."""
    broken = {e.index: Text(e.broken) for e in events if isinstance(e, CallEnd) and e.broken is not None}
    whole: list[Event] = []
    for event in events:
        if not isinstance(event, (CallBegin, CallArguments, CallEnd)) or event.index not in broken:
            whole.append(event)
        elif isinstance(event, CallEnd):
            whole.append(broken[event.index])
    return whole


def message_fields(events: Iterable[Event]) -> dict[str, Any]:
    """An answer's message, without its role: one delta of everything, with other defaults."""
    delta = message_delta(events)
    for call in delta.get("tool_calls", ()):
        del call["index"]
    return {"content": None if "tool_calls" in delta else "", **delta}


def message_delta(events: Iterable[Event]) -> dict[str, Any]:
    """The delta of a chunk: one entry per tool call that begins or goes on."""
    text = reasoning = ""
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        match event:
            case Text(more):
                text += more
            case Reasoning(more):
                reasoning += more
            case CallBegin(index, id_, name):
                function = {"name": name, "arguments": ""}
                calls[index] = {"index": index, "id": id_, "type": "function", "function": function}
            case CallArguments(index, more):
                call = calls.setdefault(index, {"index": index, "function": {"arguments": ""}})
                call["function"]["arguments"] += more
    parts = {"content": text, "reasoning_content": reasoning, "tool_calls": list(calls.values())}
    return {name: part for name, part in parts.items() if part} or {"content": ""}
