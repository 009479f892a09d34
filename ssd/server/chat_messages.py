"""Messages of requests: what chat templates get of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

from ssd.server.errors import invalid, unsupported
from ssd.server.ignored import current
from ssd.server.protocol import Json
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


def unseen(where: str, kind: object) -> str:
    """The text in place of a part of this type in a tool's result, with a warning; it is refused where parameters are
    strict.

    Agents send what their tools have returned, such as a picture, and would end if that were refused.
    """
    ignored = current()
    if ignored.strict or not isinstance(kind, str):
        raise unsupported(where, f"parts of type {kind!r:.60} are not supported")
    ignored.add(f"{where}.type={kind:.40}", "only text can be read here, the model is told that it cannot see this")
    return f"[{kind:.40}: not shown, only text can be read]"
