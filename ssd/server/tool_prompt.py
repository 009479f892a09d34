"""Tools for a model whose chat template has none: described in a system message, with calls and results as text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Final

from ssd.server.protocol import Json
from ssd.text.tool_calls import ToolParser

_PROMPT: Final = """\
You can call functions. Here they are, as one JSON object per line:
<tools>
{tools}
</tools>
To call a function, write its name and its arguments, which follow the JSON Schema of its parameters:
{call}
You get its result in the next message. If no function is needed, answer in plain text."""


def as_text(messages: Sequence[Json], tools: Sequence[Json], parser: type[ToolParser]) -> list[Json]:
    """The chat for a template that knows neither tools, nor calls, nor their results."""
    return with_tools([_as_text(message, parser) for message in messages], tools, parser)


def with_tools(messages: Sequence[Json], tools: Sequence[Json], parser: type[ToolParser]) -> list[Json]:
    """The chat for a template that knows calls and results, but describes no tools."""
    if not tools:
        return list(messages)
    call = parser.written([("the name", json.dumps({"name of an argument": "its value"}))])
    described = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools), call=call)
    if not messages or messages[0].get("role") != "system":
        return [{"role": "system", "content": described}, *messages]
    first = {**messages[0], "content": [*_parts(messages[0].get("content")), _part(f"\n\n{described}")]}
    return [first, *messages[1:]]


def _as_text(message: Json, parser: type[ToolParser]) -> Json:
    if message.get("role") == "tool":
        content = [_part("<tool_response>\n"), *_parts(message.get("content")), _part("\n</tool_response>")]
        return {"role": "user", "content": content}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = parser.written((each["name"], _json(each["arguments"])) for each in functions)
    before = _parts(message.get("content"))
    text = ("\n" if before else "") + calls
    return {"role": message["role"], "content": [*before, _part(text)]}


def _json(arguments: object) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _parts(content: object) -> list[Json]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _part(text: str) -> Json:
    return {"type": "text", "text": text}
