"""The grammar of an answer with tool calls, in llguidance's dialect of Lark: calls in a model's own format, whose
arguments follow the tools' JSON Schemas."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from typing import Any, Final

from ssd.server.protocol import Json
from ssd.text.reasoning import CLOSING, OPENING
from ssd.text.tagged_calls import KEY, KEY_END, TEXT, VALUE, VALUE_END, resolved, types_of
from ssd.text.tool_calls import ToolParser
from ssd.text.tool_formats import GlmParser

# JSON as `json.dumps` writes it, and as models do: no other white space
_LAYOUT: Final = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
_NUMBER: Final = "\0"  # stands for the number of a call
_EMPTY: Final = '""'
_BREAK: Final = '"\\n"?'  # models differ in where they have line ends
_SLASH, _ESCAPED = re.compile(r"(?<!\\)/"), r"\\/"  # in a regular expression of the dialect


def grammar(
    parser: type[ToolParser],
    schemas: Mapping[str, Json],
    tokens: Collection[str],
    *,
    forced: bool,
    parallel: bool,
    answer: Json | None = None,
) -> str:
    """`tokens`: tags that are tokens of the vocabulary, which a grammar names, as text does not match them. `forced`:
    the answer is calls. `answer`: the schema of an answer in place of calls; None: calls are within free text."""
    return "\n".join(_Grammar(parser, tokens, parallel).rules(schemas, forced, answer))


class _Grammar:
    def __init__(self, parser: type[ToolParser], tokens: Collection[str], parallel: bool) -> None:
        self._parser, self._tokens, self._parallel = parser, tokens, parallel
        tags = "|".join(map(re.escape, sorted(tokens, key=len, reverse=True)))
        self._pieces = re.compile(f"({tags}|{_NUMBER})" if tags else f"({_NUMBER})")

    def rules(self, schemas: Mapping[str, Json], forced: bool, answer: Json | None) -> list[str]:
        parser = self._parser
        calls = ["call: " + " | ".join(f"call_{i}" for i in range(len(schemas)))]
        closing = "" if parser.bare else parser.closing
        for i, (name, schema) in enumerate(schemas.items()):
            end = self._text(parser.tail + closing)
            calls.append(f"call_{i}: {self._text(parser.head(name, _NUMBER))} arguments_{i} {end}")
            calls += self._arguments(f"arguments_{i}", schema)
        first, rest = self._block()
        if forced:
            return [f"start: {first} {rest}", *calls]
        if answer is None:
            return [*self._free_text(first, rest), *calls]
        return [f"start: {first} {rest} | answer", _json_rule("answer", answer), *calls]

    def _block(self) -> tuple[str, str]:
        """The calls of a message: the tag that they begin with, and what follows it."""
        parser = self._parser
        opening = "" if parser.bare else self._text(parser.opening)
        more = f"({self._text(parser.separator)} {opening} call)*" if self._parallel else ""
        if not parser.section[0]:
            return opening, f"call {more}"
        return self._text(parser.section[0]), f"{opening} call {more} {self._text(parser.section[1])}"

    def _free_text(self, first: str, rest: str) -> list[str]:
        """Text with calls in it, or in place of it."""
        parser = self._parser
        repeat = "*" if self._parallel else "?"
        if parser.bare:
            return [f"start: {first} {rest} | TEXT?", r"TEXT: /[^\s{][\s\S]*/"]
        tag = parser.begins()[0]
        if tag not in self._tokens:
            return [
                f"start: (open {rest}){repeat} TEXT",
                rf"open[lazy]: /[\s\S]*{re.escape(tag)}/",
                r"TEXT: /[\s\S]*/",
            ]
        words = " | ".join(["TEXT", *(tag for tag in (OPENING, CLOSING) if tag in self._tokens)])
        return [f"start: (text {first} {rest}){repeat} text", f"text: ({words})*", r"TEXT: /[\s\S]+/"]

    def _text(self, text: str) -> str:
        """A text as the tokens and pieces that it consists of."""
        pieces = [piece for piece in self._pieces.split(text) if piece]
        named = {_NUMBER: "/[0-9]{1,4}/", **{tag: tag for tag in self._tokens}}
        return " ".join(named.get(piece, json.dumps(piece, ensure_ascii=False)) for piece in pieces)

    def _arguments(self, rule: str, schema: Json) -> list[str]:
        if not issubclass(self._parser, GlmParser):
            return [_json_rule(rule, schema)]
        properties = given if isinstance(given := schema.get("properties"), dict) else {}
        required = given if isinstance(given := schema.get("required"), list) else []
        pairs, rules = [], []
        for j, (name, value) in enumerate(properties.items()):
            pairs.append(f"{rule}_{j}" if name in required else f"{rule}_{j}?")
            rules += self._pair(f"{rule}_{j}", json.dumps(name, ensure_ascii=False), value, schema)
        if schema.get("additionalProperties", True) is not False:
            pairs.append(f"{rule}_more*")
            rules += self._pair(f"{rule}_more", "/[^<]{1,64}/", {"type": "string"}, schema)
        return [f"{rule}: {' '.join(pairs)} {_BREAK}", *rules]

    def _pair(self, rule: str, key: str, schema: Any, root: Json) -> list[str]:
        """An argument: text, or JSON."""
        before, after = f"{self._text(KEY)} {key} {self._text(KEY_END)}", self._text(VALUE_END)
        pair = f"{rule}: {_BREAK} {before} {_BREAK} {self._text(VALUE)} {rule}_value"
        found = resolved(schema, root)
        if types_of(found, root) != TEXT:
            defined = {name: root[name] for name in ("$defs", "definitions") if name in root}
            value = {**defined, **found} if isinstance(found, dict) else {}
            return [pair, f"{rule}_value: {rule}_json {after}", _json_rule(f"{rule}_json", value)]
        values = found.get("enum", [found["const"]] if "const" in found else None)
        if isinstance(values, list):
            choice = " | ".join(self._text(each) or _EMPTY for each in values if isinstance(each, str))
            return [pair, f"{rule}_value: ({choice}) {after}"]
        text = _regex(found)
        if VALUE_END in self._tokens:
            return [pair, f"{rule}_value: {rule.upper()} {after}", f"{rule.upper()}: /{text}/"]
        return [pair, f"{rule}_value[lazy]: /{text}{_SLASH.sub(_ESCAPED, VALUE_END)}/"]


def _regex(schema: Mapping[str, Any]) -> str:
    """Of a text, with its pattern or else its length."""
    if isinstance(pattern := schema.get("pattern"), str):
        begin = "" if pattern.startswith("^") else "(?s:.*)"
        end = "" if pattern.endswith("$") else "(?s:.*)"
        within = pattern.removeprefix("^").removesuffix("$").replace("\n", r"\n")
        return f"{begin}({_SLASH.sub(_ESCAPED, within)}){end}"
    least, most = schema.get("minLength", 0), schema.get("maxLength", "")
    return f"(?s:.{{{least},{most}}})"


def _json_rule(rule: str, schema: Json) -> str:
    return f"{rule}: %json {json.dumps({**schema, 'x-guidance': _LAYOUT})}"
