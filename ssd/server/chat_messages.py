"""Messages of chats with tool calls and reasoning, in OpenAI's shape: those of requests, and those of answers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from ssd.server.errors import ApiError
from ssd.server.parsing import Event, Reasoning, message
from ssd.server.tools import CallArguments, CallBegin, Text

Json = dict[str, Any]


def template_message(where: str, given: Json) -> Json:
    """A message as chat templates take it: the arguments of tool calls are objects, not JSON text."""
    calls = given.get("tool_calls")
    if not calls:
        return given
    if not isinstance(calls, list):
        raise ApiError(400, f"{where}.tool_calls: expected a list", param="messages")
    return {**given, "tool_calls": [_template_call(f"{where}.tool_calls[{j}]", call) for j, call in enumerate(calls)]}


def _template_call(where: str, call: object) -> Json:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(call, Mapping) or not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise ApiError(400, f"{where}: expected a function with its name and arguments", param="messages")
    arguments = function.get("arguments", {})
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        arguments = None
    if not isinstance(arguments, Mapping):
        raise ApiError(400, f"{where}.function.arguments: expected a JSON object as text", param="messages")
    return {**call, "function": {**function, "arguments": arguments}}


def message_fields(events: Iterable[Event]) -> Json:
    """An answer's message, without its role."""
    whole = message(events)
    fields: Json = {"content": whole.text if whole.text or not whole.calls else None}
    if whole.reasoning:
        fields["reasoning_content"] = whole.reasoning
    if whole.calls:
        fields["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in whole.calls
        ]
    return fields


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
