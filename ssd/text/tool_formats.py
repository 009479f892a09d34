"""The formats of tool calls, by model family.

Llama 3 writes a message that is a JSON object, `{"name": …, "parameters": {…}}`, or several of them separated by
semicolons; `<|python_tag|>` may precede it. Qwen and Hermes write such objects, with `arguments`, as
`<tool_call>{…}</tool_call>` anywhere in a message. Models that have learned no format write them in fences of Markdown.
DeepSeek and Kimi write a section of calls at the end of a message, each a name and an object between tags. GLM has tags
around the name and the value of every argument. A format is edited here; `ServerOptions.tool_parser` has its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Final

from ssd.text.call_object import Call
from ssd.text.harmony import is_harmony
from ssd.text.tagged_calls import KEY, KEY_END, VALUE, VALUE_END, NamedCall, TaggedCall
from ssd.text.tool_calls import FENCE, ToolParser


def _tag(words: str) -> str:
    """A tag as DeepSeek writes it: a full-width bar at each end, a low block between words."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


class HermesParser(ToolParser):
    """Qwen 2.5, Qwen 3, Hermes: calls in tags, with text around them."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    tail = "}\n"
    separator = "\n"

    @classmethod
    def teaches(cls, chat_template: str) -> bool:
        return cls.opening in chat_template and has_tools(chat_template)

    @classmethod
    def head(cls, name: str, number: str = "0") -> str:
        return "\n" + super().head(name)


class JsonParser(ToolParser):
    """A message that is nothing but calls."""

    closing = ";"
    bare = True
    separator = "; "

    @classmethod
    def head(cls, name: str, number: str = "0") -> str:
        return f'{{"name": {json.dumps(name)}, "parameters": '


class Llama3Parser(JsonParser):
    """Llama 3.1 to 3.3. The tag, which may be missing, is a special token: see `message_format.shown_tokens`."""

    opening = "<|python_tag|>"

    @classmethod
    def teaches(cls, chat_template: str) -> bool:
        return has_tools(chat_template) and (cls.opening in chat_template or "<|start_header_id|>" in chat_template)


class FencedParser(HermesParser):
    """Models whose chat template has no tools: blocks of JSON in Markdown, with text around them."""

    opening, closing = FENCE

    @classmethod
    def teaches(cls, chat_template: str) -> bool:
        return False  # it is what others get


class GlmParser(ToolParser):
    """GLM 4.5 to 4.7: every argument is a pair of tags."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    inner = (KEY, KEY_END, VALUE, VALUE_END)
    tail = ""

    @classmethod
    def teaches(cls, chat_template: str) -> bool:
        return cls.opening in chat_template and KEY in chat_template

    @classmethod
    def head(cls, name: str, number: str = "0") -> str:
        return name

    @classmethod
    def arguments(cls, text: str) -> str:
        pairs = json.loads(text).items()
        values = (
            (key, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)) for key, value in pairs
        )
        return "".join(f"{KEY}{key}{KEY_END}{VALUE}{value}{VALUE_END}" for key, value in values)

    @property
    def _closings(self) -> Sequence[str]:
        return ()  # the closing tag is the end of the arguments

    def _reader(self) -> Call:
        return TaggedCall(self._schemas, self.closing)


class DeepSeekV3Parser(ToolParser):
    """DeepSeek-V3 and R1: the arguments are a block of JSON in Markdown."""

    section = (_tag("tool calls begin"), _tag("tool calls end"))
    opening = _tag("tool call begin")
    closing = _tag("tool call end")
    inner = (_tag("tool sep"),)
    tail = "\n```"
    separator = "\n"
    text_arguments = True

    _HEAD: Final = re.compile(  # of either version
        rf"\s*(?:{opening})?\s*(?:function{inner[0]})?(?P<name>[\w.-]+)\s*(?:{inner[0]}|```json)\s*"
    )

    @classmethod
    def teaches(cls, chat_template: str) -> bool:
        return cls.opening in chat_template and "```json" in chat_template

    @classmethod
    def head(cls, name: str, number: str = "0") -> str:
        return f"function{cls.inner[0]}{name}\n```json\n"

    @property
    def _closings(self) -> Sequence[str]:
        return ("```", self.closing, self.section[1])

    def _reader(self) -> Call:
        return NamedCall(self._schemas, self._HEAD)


class DeepSeekV31Parser(DeepSeekV3Parser):
    """DeepSeek-V3.1: the arguments follow the name."""

    tail = ""
    separator = ""

    @classmethod
    def teaches(cls, chat_template: str) -> bool:
        return cls.opening in chat_template and "```json" not in chat_template

    @classmethod
    def head(cls, name: str, number: str = "0") -> str:
        return f"{name}{cls.inner[0]}"


class KimiK2Parser(ToolParser):
    """Kimi K2: calls have ids, such as `functions.get_weather:0`, with the number of the call in the conversation."""

    section = ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>")
    opening = "<|tool_call_begin|>"
    closing = "<|tool_call_end|>"
    inner = ("<|tool_call_argument_begin|>",)
    tail = ""
    ends_reasoning = True
    text_arguments = True

    _HEAD: Final = re.compile(
        rf"\s*(?:{re.escape(opening)})?\s*(?P<id>(?:functions\.)?(?P<name>[\w.-]+?)(?::\d+)?)\s*{re.escape(inner[0])}\s*"
    )

    @classmethod
    def teaches(cls, chat_template: str) -> bool:
        return cls.opening in chat_template

    @classmethod
    def head(cls, name: str, number: str = "0") -> str:
        return f"functions.{name}:{number}{cls.inner[0]}"

    def _reader(self) -> Call:
        return NamedCall(self._schemas, self._HEAD)


PARSERS: Final[Mapping[str, type[ToolParser]]] = {
    "glm": GlmParser,  # with a tag of Hermes
    "hermes": HermesParser,
    "llama3": Llama3Parser,
    "deepseek_v3": DeepSeekV3Parser,
    "deepseek_v31": DeepSeekV31Parser,
    "kimi_k2": KimiK2Parser,
    "json": JsonParser,
    "fenced": FencedParser,
}


def has_tools(chat_template: str) -> bool:
    """Whether a chat template describes tools to the model."""
    return is_harmony(chat_template) or re.search(r"\btools\b", chat_template) is not None


def parser_for(chat_template: str) -> type[ToolParser] | None:
    """The parser for the calls that a chat template has; None if it has none, or in a format that is not known here."""
    if is_harmony(chat_template):
        return None
    return next((parser for parser in PARSERS.values() if parser.teaches(chat_template)), None)
