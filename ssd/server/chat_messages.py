"""Messages of chats with tool calls and reasoning, in OpenAI's shape: those of requests, and those of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from typing import Any, Final

from ssd.server.errors import invalid
from ssd.server.protocol import Json
from ssd.text.events import CallArguments, CallBegin, Event, Reasoning, Text
from ssd.text.message_format import takes_text

ROLES: Final = ("system", "user", "assistant", "tool")


def template_message(where: str, given: Json, template: str) -> Json:
    """A message as chat templates take it: the arguments of tool calls are objects, or JSON text (see `takes_text`).

    Beside the roles of the API there are those that the model's template names.
    """
    role, calls = given.get("role"), given.get("tool_calls")
    if role == "developer":
        given = {**given, "role": "system"}
    elif role not in ROLES and not re.search(f"""["']{re.escape(str(role))}["']""", template):
        raise invalid(f"{where}.role", f"{role!r:.60} is not one of {', '.join(ROLES)}, developer")
    if not calls:
        return given
    if not isinstance(calls, list):
        raise invalid(f"{where}.tool_calls", "expected a list")
    as_text = takes_text(template)
    checked = [_template_call(f"{where}.tool_calls[{j}]", call, as_text) for j, call in enumerate(calls)]
    return {**given, "tool_calls": checked}


def checked_call(where: str, call: object) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """A call of a request, and its function, which has a name."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise invalid(where, "expected a function with its name and arguments")
    return call, function


def _template_call(where: str, given: object, as_text: bool) -> Json:
    call, function = checked_call(where, given)
    stated = function.get("arguments", {})
    try:
        arguments = json.loads(stated) if isinstance(stated, str) else stated
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise invalid(f"{where}.function.arguments", "expected a JSON object as text")
    if as_text:
        arguments = stated if isinstance(stated, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", **call, "function": {**function, "arguments": arguments}}


def message_fields(events: Iterable[Event]) -> Json:
    """An answer's message, without its role: one delta of everything, with other defaults."""
    delta = message_delta(events)
    for call in delta.get("tool_calls", ()):
        del call["index"]
    return {"content": None if "tool_calls" in delta else "", **delta}


def message_delta(events: Iterable[Event]) -> Json:
    """The delta of a chunk: one entry per tool call that begins or goes on."""
    text = reasoning = ""
    calls: dict[int, Json] = {}
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
            case _:
                pass
    delta: Json = {"content": text} if text or not (reasoning or calls) else {}
    return (
        delta
        | ({"reasoning_content": reasoning} if reasoning else {})
        | ({"tool_calls": list(calls.values())} if calls else {})
    )
