"""Reads tool calls whose names, and perhaps whose arguments, are between tags, as they are generated."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from ssd.text.call_object import Call, JsonObject, loads
from ssd.text.reasoning import partial_length

KEY, KEY_END, VALUE, VALUE_END = "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"
_MAX_HEAD: Final = 512  # characters before the arguments
_MAX_REFERENCES: Final = 16  # from one schema to the next
TEXT: Final = {"string"}
Schema = Mapping[str, Any]


class NamedCall(Call):
    """A call whose arguments are a JSON object, behind a head with the name (DeepSeek, Kimi)."""

    def __init__(self, names: Collection[str], head: re.Pattern[str]) -> None:
        """`head`: all that is before the object, with the group `name` and perhaps `id`."""
        super().__init__()
        self._names, self._pattern, self._head = names, head, ""
        self._object: JsonObject | None = None

    def feed(self, text: str) -> int:
        used = 0
        if self._object is None:
            head = text.partition("{")[0][: _MAX_HEAD - len(self._head)]
            self._head += head
            used = len(head)
            if used == len(text) and len(self._head) < _MAX_HEAD:
                return used
            found = self._pattern.fullmatch(self._head)
            if found is None or found["name"] not in self._names:
                self.ended = True
                return used
            self.name, self.id, self._object = found["name"], found.groupdict().get("id"), JsonObject()
        used += self._object.feed(text[used:])
        self.arguments, self.ended = self._object.text, self._object.ended
        self.valid = self.ended and isinstance(loads(self.arguments), dict)
        return used


class TaggedCall(Call):
    """A call whose arguments are pairs of tags (GLM): `name<arg_key>key</arg_key><arg_value>value</arg_value>`.

    There may be white space between all of them. The value of a parameter whose schema says that it is text is that
    text, and comes piece by piece. Any other value is JSON, or text where it is not JSON of a type that the schema has.
    The call ends with `closing`.
    """

    def __init__(self, schemas: Mapping[str, Schema], closing: str) -> None:
        super().__init__()
        self._schemas, self._closing = schemas, closing
        self._named = ""
        self._text = ""  # since the last tag
        self._expected: tuple[str, ...] = ()  # tags, one of which comes next; none in the name and in values
        self._key: str | None = None
        self._types: Collection[str] | None = None  # of the current value; None: any

    def feed(self, text: str) -> int:
        used = 0
        while used < len(text) and not self.ended:
            in_value = self._key is not None and not self._expected
            end = text.find(">", used) if in_value else used  # a value ends with a tag
            piece = text[used : end + 1] if end >= 0 else text[used:]
            self._text, used = self._text + piece, used + len(piece)
            if self._expected:
                self._read_tag()
            elif not self._named:
                self._read_name()
            elif self._key is None:
                self._read_key()
            else:
                self._read_value()
        return used

    def _read_name(self) -> None:
        """Up to the first tag."""
        if self._text.endswith("<"):
            self._named, self._text, self._expected = self._text[:-1].strip(), "<", (KEY, self._closing)
            self.ended = self._named not in self._schemas
        else:
            self.ended = len(self._text) >= _MAX_HEAD

    def _read_tag(self) -> None:
        found = self._text.lstrip()
        if found not in self._expected:
            self.ended = not any(tag.startswith(found) for tag in self._expected)
            return
        self._text, self._expected, self.name = "", (), self._named
        if found == self._closing:
            self.arguments += "}" if self.arguments else "{}"
            self.ended = self.valid = True
        elif found == VALUE and self._types == TEXT:
            self.arguments += '"'

    def _read_key(self) -> None:
        if not self._text.endswith(KEY_END):
            return
        self._key, self._text = self._text.removesuffix(KEY_END).strip(), ""
        schema = self._schemas[self._named]
        properties = schema.get("properties")
        wanted = properties.get(self._key) if isinstance(properties, Mapping) else None
        self._types, self._expected = types_of(wanted, schema), (VALUE,)
        self.arguments += f"{', ' if self.arguments else '{'}{json.dumps(self._key, ensure_ascii=False)}: "

    def _read_value(self) -> None:
        ended, text_only = self._text.endswith(VALUE_END), self._types == TEXT
        if text_only:
            held = len(VALUE_END) if ended else partial_length(self._text, VALUE_END)
            value, self._text = self._text[: len(self._text) - held], self._text[len(self._text) - held :]
            self.arguments += json.dumps(value, ensure_ascii=False)[1:-1]
        if ended:
            self.arguments += '"' if text_only else _as_json(self._text.removesuffix(VALUE_END), self._types)
            self._key, self._text, self._expected = None, "", (KEY, self._closing)


_KINDS: Final = {str: "string", bool: "boolean", int: "integer", float: "number", list: "array", dict: "object"}


def _as_json(text: str, types: Collection[str] | None) -> str:
    value = loads(text)
    kind = _kind(value)
    accepted = types is None or kind in types or (kind == "integer" and "number" in types)
    valid = value is not None or text.strip() == "null"
    if valid and (accepted or (types is not None and "string" not in types)):
        return text.strip()
    return json.dumps(text, ensure_ascii=False)


def _kind(value: object) -> str:
    return _KINDS.get(type(value), "null")


def types_of(schema: object, root: Schema) -> Collection[str] | None:
    """The types that a schema of a parameter allows; None if it does not say. `root`: that of all arguments."""
    found: set[str] = set()
    left, seen = [schema], set[int]()
    while left:
        each = resolved(left.pop(), root)
        if id(each) in seen:  # of choices that refer to each other
            continue
        seen.add(id(each))
        named, values = each.get("type"), each.get("enum", [each["const"]] if "const" in each else None)
        choices = each.get("anyOf", each.get("oneOf"))
        if isinstance(named, (str, list)):
            found |= {named} if isinstance(named, str) else set(map(str, named))
        elif isinstance(values, list):
            found |= set(map(_kind, values))
        elif isinstance(choices, list):
            left += choices
        else:
            return None
    return found


def resolved(schema: object, root: Schema) -> Schema:
    """The schema that a reference to one means."""
    for _ in range(_MAX_REFERENCES):
        reference = schema.get("$ref") if isinstance(schema, Mapping) else None
        if not isinstance(reference, str):
            break
        schema = root
        for part in reference.removeprefix("#/").split("/"):
            schema = schema.get(part) if isinstance(schema, Mapping) else None
    return schema if isinstance(schema, Mapping) else {}
