"""StructuredOutput: what the text of a request must look like. Checked here as far as possible without a tokenizer."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

from ssd.constraints.closed import closed
from ssd.errors import RequestError

MAX_CHARACTERS: Final = 128 * 1024  # of a schema, regex or grammar, and of all choices together
_KINDS: Final = ("json_schema", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutput:
    """Exactly one of these is given, and perhaps more that says how it is meant.

    `json_schema`: a JSON Schema as a dict or JSON text (kept as text). `json_object`: any JSON object. `regex`: a
    regular expression that the whole text matches (Rust's syntax: no look-around, no back-references). `choice`: the
    text is one of these. `grammar`: a context-free grammar in llguidance's Lark dialect, or GBNF.

    `additional_properties`: objects of the schema may have properties that it does not name, where it says nothing of
    them; otherwise they are closed.

    `frame`: a grammar in Lark of the text around it, for chat formats; `@answer` stands for what is given.
    """

    json_schema: str | Mapping[str, Any] | bool | None = None
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    additional_properties: bool = False
    frame: str | None = None

    def __post_init__(self) -> None:
        given = [name for name in _KINDS if getattr(self, name) is not None and getattr(self, name) is not False]
        if self.json_schema is False:
            raise RequestError("structured.json_schema=False: no text is valid for this schema")
        if len(given) != 1:
            raise RequestError(f"structured: give exactly one of {', '.join(_KINDS)}, not {', '.join(given) or 'none'}")
        if self.json_object is not False and self.json_object is not True:
            raise RequestError(f"structured.json_object={self.json_object!r}: must be True or False")
        if self.additional_properties is not False and self.additional_properties is not True:
            raise RequestError(
                f"structured.additional_properties={self.additional_properties!r}: must be True or False"
            )
        if self.json_schema is not None:
            object.__setattr__(self, "json_schema", _schema_text(self.json_schema))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        for name in ("regex", "grammar", "frame"):
            _check_text(name, getattr(self, name))

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(name for name in _KINDS if getattr(self, name))

    @cached_property
    def size(self) -> int:
        """Its characters, without those of JSON around choices."""
        texts = self.choice or (self.json_schema, self.regex, self.grammar)
        return sum(len(text) for text in (*texts, self.frame) if isinstance(text, str))

    @property
    def schema(self) -> Any:
        """The JSON Schema of `json_schema` or `json_object`, with its objects closed unless they may be open."""
        schema = {"type": "object"} if self.json_schema is None else json.loads(str(self.json_schema))
        return schema if self.additional_properties else closed(schema)

    @classmethod
    def of(cls, value: StructuredOutput | Mapping[str, Any] | None) -> StructuredOutput | None:
        """From a mapping: the fields of this class, or a `response_format` of the OpenAI API; None for plain text.

        A `response_format` has a `type`: "text", "json_object" or "json_schema" (with the schema under
        `json_schema.schema` as in chat completions, or under `schema` as in responses), or the name of another field.
        """
        if value is None or isinstance(value, cls):
            return value
        if not isinstance(value, Mapping) or not all(isinstance(name, str) for name in value):
            raise RequestError(f"structured={value!r:.60}: must be a StructuredOutput or a dict")
        if "type" in value:
            return cls._of_response_format(value)
        _check_names("structured", value, (*_KINDS, "additional_properties", "frame"))
        return cls(**value)

    @classmethod
    def _of_response_format(cls, value: Mapping[str, Any]) -> StructuredOutput | None:
        kind = value["type"]
        if kind == "text":
            _check_names("response_format", value, ("type",))
            return None
        if kind == "json_object":
            _check_names("response_format", value, ("type",))
            return cls(json_object=True)
        if kind == "json_schema":
            nested = "json_schema" in value
            inner = value["json_schema"] if nested else {k: v for k, v in value.items() if k != "type"}
            if nested:
                _check_names("response_format", value, ("type", "json_schema"))
            where = "response_format.json_schema" if nested else "response_format"
            if not isinstance(inner, Mapping) or inner.get("schema") is None:
                raise RequestError(f"{where}: must have the JSON Schema under 'schema'")
            _check_names(where, inner, ("name", "description", "schema", "strict"))
            return cls(json_schema=inner["schema"])
        if isinstance(kind, str) and kind in _KINDS:
            _check_names("response_format", value, ("type", kind))
            return cls.of({kind: value.get(kind)})
        raise RequestError(f"response_format.type={kind!r:.60}: must be one of text, {', '.join(_KINDS)}")


def _check_names(where: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((name for name in value if name not in known), None)
    if unknown is not None:
        raise RequestError(f"{where}.{unknown!s:.60}: is not known; {where} has {', '.join(known)}")


def _schema_text(schema: object) -> str:
    try:
        parsed = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(parsed, (Mapping, bool)):
            raise RequestError("structured.json_schema: must be a JSON object (a dict, or JSON text of one)")
        text = json.dumps(parsed, allow_nan=False, default=_plain_mapping)
    except (TypeError, ValueError, RecursionError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"structured.json_schema: is not JSON ({error})") from error
    _check_size("json_schema", text)
    return text


def _plain_mapping(value: object) -> dict[Any, Any]:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a {type(value).__name__} is no JSON value")


def _choices(choices: object) -> tuple[str, ...]:
    if not isinstance(choices, (list, tuple)) or not choices or any(not isinstance(c, str) or not c for c in choices):
        raise RequestError(f"structured.choice={choices!r:.60}: must be a list of strings, none of them empty")
    _check_size("choice", "".join(choices))
    return tuple(choices)


def _check_text(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str) or not text:
        raise RequestError(f"structured.{name}={text!r:.60}: must be a text that is not empty")
    _check_size(name, text)


def _check_size(name: str, text: str) -> None:
    if len(text) > MAX_CHARACTERS:
        raise RequestError(f"structured.{name}: has {len(text)} characters, at most {MAX_CHARACTERS} are allowed")
    try:
        text.encode()
    except UnicodeError as error:
        raise RequestError(f"structured.{name}: is not valid Unicode ({error})") from error
