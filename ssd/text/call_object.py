"""Reads tool calls as they are generated: what is common to all formats, and calls that are JSON objects."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from typing import Any, Final


class Call(ABC):
    """A call that is read piece by piece. `name` and `arguments` (JSON text) are known, or grow, while it is read."""

    def __init__(self) -> None:
        self.id: str | None = None  # what the model calls it, in formats with ids
        self.name: str | None = None
        self.arguments = ""
        self.ended = False
        self.valid = False  # ended, and a call of one of the tools

    @abstractmethod
    def feed(self, text: str) -> int:
        """Returns how many characters belong to the call."""


class JsonObject:
    """Finds the end of a JSON object that is read piece by piece. What does not begin with `{` ends at once."""

    def __init__(self) -> None:
        self.text = ""
        self.ended = False
        self._depth = 0
        self._in_string = False
        self._escaped = False

    def feed(self, text: str) -> int:
        """Returns how many characters belong to the object."""
        before = len(self.text)
        self.text += text
        for position in range(before, len(self.text)):
            self._read(position, self.text[position])
            if self.ended:
                self.text = self.text[: position + 1]
                break
        return len(self.text) - before

    def _read(self, position: int, character: str) -> None:
        if self._escaped:
            self._escaped = False
        elif self._in_string:
            self._escaped = character == "\\"
            self._in_string = character != '"'
        elif self._depth == 0 and character != "{":
            self.ended = not character.isspace()
        elif character == '"':
            self._in_string = True
        elif character in "{[":
            self._open(position, character)
        elif character in "}]":
            self._close(position)

    def _open(self, position: int, character: str) -> None:
        self._depth += 1

    def _close(self, position: int) -> None:
        self._depth -= 1
        self.ended = self._depth == 0


class CallObject(JsonObject, Call):
    """A call that is a JSON object with a name and arguments.

    They are known while it is read if the name comes first, as models write it; otherwise at its end.
    """

    _HEAD: Final = re.compile(
        r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,'
        r'\s*"(?:arguments|parameters)"\s*:\s*'
    )
    _KEYS: Final = frozenset(f'"{key}"' for key in ("name", "arguments", "parameters", "type", "function", "id"))

    def __init__(self, names: Collection[str]) -> None:
        Call.__init__(self)
        JsonObject.__init__(self)
        self._names = names
        self._first_key = -1  # where it starts; -1 before, -2 when it was checked
        self._arguments_at = (-1, -1)  # start and end in the text

    def feed(self, text: str) -> int:
        used = super().feed(text)
        if self.ended:
            self._parse()
        start, end = self._arguments_at
        if start >= 0 and self.name is not None:
            self.arguments = self.text[start : end if end >= 0 else None]
        return used

    def _read(self, position: int, character: str) -> None:
        within = self._in_string
        super()._read(position, character)
        if self._first_key == -1 and self._in_string:
            self._first_key = position
        elif self._first_key >= 0 and within and not self._in_string:
            self.ended = self.text[self._first_key : position + 1] not in self._KEYS
            self._first_key = -2

    def _open(self, position: int, character: str) -> None:
        if self._depth == 1 and character == "{" and self._arguments_at[0] < 0:
            head = self._HEAD.fullmatch(self.text, 0, position)
            if head is not None:
                self.name = self._known(loads(head[1]))
                self.ended = self.name is None
                self._arguments_at = (position, -1)
        super()._open(position, character)

    def _close(self, position: int) -> None:
        super()._close(position)
        start, end = self._arguments_at
        if self._depth == 1 and start >= 0 and end < 0:
            self._arguments_at = (start, position + 1)

    def _parse(self) -> None:
        """At the end: whether it is a call; its name and arguments if they are not known yet."""
        value = loads(self.text)
        if self.name is not None:
            self.valid = isinstance(value, dict)
        elif isinstance(value, dict):
            function = value.get("function", value)
            arguments = _arguments(function) if isinstance(function, dict) else None
            if arguments is not None:
                self.name, self.arguments = self._known(function.get("name")), arguments
                self.valid = self.name is not None

    def _known(self, name: object) -> str | None:
        return name if isinstance(name, str) and name in self._names else None


def _arguments(function: Mapping[str, Any]) -> str | None:
    """The arguments of a call as JSON text; None if they are not an object."""
    value = function.get("arguments", function.get("parameters", {}))
    if isinstance(value, str):
        return value if isinstance(loads(value), dict) else None
    return json.dumps(value) if isinstance(value, dict) else None


def loads(text: str) -> Any:
    """The value of a JSON text; None if it is not valid."""
    try:
        return json.loads(text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return None


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")
