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
    texts = [_as_text(message, parser) for message in messages]
    if not tools:
        return texts
    call = _written(parser, json.dumps("the name"), "{…}")
    described = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools), call=call)
    if not texts or texts[0].get("role") != "system":
        return [{"role": "system", "content": described}, *texts]
    first = {**texts[0], "content": [*_parts(texts[0].get("content")), _part(f"\n\n{described}")]}
    return [first, *texts[1:]]


def _as_text(message: Json, parser: type[ToolParser]) -> Json:
    if message.get("role") == "tool":
        content = [_part("<tool_response>\n"), *_parts(message.get("content")), _part("\n</tool_response>")]
        return {"role": "user", "content": content}
    if not message.get("tool_calls"):
        return message
    functions = [call["function"] for call in message["tool_calls"]]
    calls = (_written(parser, json.dumps(f["name"]), json.dumps(f["arguments"], ensure_ascii=False)) for f in functions)
    before = _parts(message.get("content"))
    text = ("\n" if before else "") + parser.separator.join(calls)
    return {"role": message["role"], "content": [*before, _part(text)]}


def _written(parser: type[ToolParser], name: str, arguments: str) -> str:
    """A call as the model writes it; `name` and `arguments` are JSON."""
    opening, closing = ("", "") if parser.bare else (parser.opening, parser.closing)
    return f'{opening}{parser.lead}{{"name": {name}, "{parser.key}": {arguments}}}{parser.trail}{closing}'


def _parts(content: object) -> list[Json]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}] if content else []


def _part(text: str) -> Json:
    return {"type": "text", "text": text}
