"""The tools of a response: functions, also those of namespaces, as the tools of a chat, which have one name each.

A function `status` of the namespace `crm` is `crm__status` in the chat. A call of it has both names again, in the
fields `name` and `namespace`, by which clients find their tool.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from ssd.server import parameters
from ssd.server.errors import invalid, unsupported
from ssd.server.fields import known_fields
from ssd.server.ignored import current
from ssd.server.protocol import Json

_FUNCTION: Final = ("name", "description", "parameters", "strict")
_MOST_CHARS: Final = 64  # of a function's name


@dataclass(frozen=True)
class ResponseTools:
    chat: list[Json]  # as tools of a chat
    names: Mapping[str, Json]  # `name` and `namespace` of a function in a namespace, by its name in the chat
    paths: Mapping[str, str]  # where they are in the request, by their paths in the chat


def chat_name(namespace: object, name: object) -> str:
    """The name of a function in the chat; `namespace`: None for one without."""
    if not namespace:
        return str(name)
    whole = re.sub(r"[^a-zA-Z0-9_.-]", "_", f"{str(namespace).rstrip('_')}__{name}")
    if len(whole) <= _MOST_CHARS:
        return whole
    return f"{whole[: _MOST_CHARS - 9]}_{hashlib.sha256(whole.encode()).hexdigest()[:8]}"


def response_tools(given: Sequence[Json]) -> ResponseTools:
    """The tools that can be called. Those of other types (a web search, say) are left out with a warning, or refused
    where parameters are strict."""
    chat: list[Json] = []
    names: dict[str, Json] = {}
    paths: dict[str, str] = {}
    for where, namespace, tool in _functions(given):
        known_fields(where, tool, ("type", *_FUNCTION), parameters.RESPONSES_TOOL)
        function = {name: tool[name] for name in _FUNCTION if name in tool}
        if namespace is not None:
            function["name"] = chat_name(namespace, tool.get("name"))
            names[function["name"]] = {"name": tool.get("name"), "namespace": namespace}
        paths[f"tools[{len(chat)}]"] = where
        chat.append({"type": "function", "function": function})
    return ResponseTools(chat, names, {chat: where for chat, where in paths.items() if chat != where})


def _functions(given: Sequence[Json]) -> Iterator[tuple[str, str | None, Json]]:
    """Functions with their paths and namespaces. The first of a namespace has the description of it."""
    for i, tool in enumerate(given):
        where = f"tools[{i}]"
        if tool.get("type") == "namespace":
            yield from _of_namespace(where, tool)
        elif tool.get("type") == "function":
            yield where, None, tool
        else:
            _leave_out(where, tool.get("type"))


def _of_namespace(where: str, namespace: Json) -> Iterator[tuple[str, str, Json]]:
    known_fields(where, namespace, ("type", "name", "description", "tools"))
    name, tools, about = namespace.get("name"), namespace.get("tools"), namespace.get("description")
    if not isinstance(name, str) or not name:
        raise invalid(f"{where}.name", "expected the name of a namespace")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise invalid(f"{where}.tools", "expected a list of tools")
    for j, tool in enumerate(tools):
        at = f"{where}.tools[{j}]"
        if tool.get("type") != "function":
            _leave_out(at, tool.get("type"))
            continue
        if not isinstance(tool.get("name"), str) or not tool["name"]:
            raise invalid(f"{at}.name", "expected the name of a function")
        if about:
            texts = (text for text in (about, tool.get("description")) if isinstance(text, str) and text)
            tool, about = {**tool, "description": "\n\n".join(texts)}, None
        yield at, name, tool


def _leave_out(where: str, kind: object) -> None:
    ignored = current()
    if ignored.strict:
        raise unsupported(
            f"{where}.type", "only tools of type 'function' or 'namespace' are supported: leave others out"
        )
    ignored.add(f"{where}.type={kind!s:.40}", "only functions can be called here, the model is not told of it", "tools")
