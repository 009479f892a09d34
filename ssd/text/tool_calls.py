"""Tool calls in a model's own format: streaming parsers, one per family.

Llama 3 writes a message that is a JSON object, `{"name": …, "parameters": {…}}`, or several of them separated by
semicolons; `<|python_tag|>` may precede it. Qwen and Hermes write such objects, with `arguments`, as
`<tool_call>{…}</tool_call>` anywhere in a message. Models that have learned no format write them in fences of Markdown.
A parser is fed text in pieces of any size and returns events. What is not a call of one of the request's tools is text.
Knows nothing of HTTP or the engine.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Collection, Mapping
from typing import Final

from ssd.text.call_object import CallObject
from ssd.text.events import CallArguments, CallBegin, CallEnd, Event, Text
from ssd.text.harmony import is_harmony
from ssd.text.reasoning import partial_length


class ToolParser:
    """Base of the parsers: text outside of calls, and the JSON objects of calls.

    White space before and between calls is dropped. Arguments are returned as they come; when a call turns out broken
    after that, `CallEnd.broken` is its text. A call that is not recognised before its arguments is plain text.
    """

    opening: str = ""  # the tag before a call
    closing: str = ""  # the tag after a call, which may be missing
    bare = False  # whether a message may begin with a call, without a tag
    # how a call is written: opening lead {"name": …, key: {…}} trail closing, with the separator between calls
    lead: str = ""
    trail: str = ""
    key: str = "arguments"
    separator: str = ""

    def __init__(self, names: Collection[str], parallel: bool = True, fenced: bool = False) -> None:
        """`names`: of the request's tools. `parallel` False: calls after the first are dropped. `fenced`: calls in
        fences are calls, too."""
        self._names = names
        self._parallel = parallel
        self._tags = {self.opening: self.closing} if self.opening else {}
        self._tags |= {FencedParser.opening: FencedParser.closing} if fenced else {}
        self._closing = ""  # what may follow the last call
        self._pending = ""  # text that may be the beginning of a call, or white space before one
        self._raw = ""  # text of the current call, from the white space before it
        self._call: CallObject | None = None
        self._begun = False  # CallBegin was returned for the current call
        self._num_calls = 0
        self._at_start = True  # nothing but white space since the message began or a call ended
        self._after_call = False  # what follows a call (closing tag, separator) may be dropped

    def feed(self, text: str) -> list[Event]:
        """Events of the next piece of the message."""
        events: list[Event] = []
        self._pending += text
        while self._call_step(events) if self._call is not None else self._text_step(events):
            pass
        return events

    def finish(self, cut: bool = False) -> list[Event]:
        """Events of what was held back, at the end of the message.

        `cut`: the message would have gone on. What may be the beginning of a call is none of its text then.
        """
        events: list[Event] = []
        if cut:
            if self._begun:
                self._add(events, CallEnd(self._num_calls, complete=False))
            return events
        if self._call is not None:
            self._break_call(events)
        if not self._after_call and (self._pending.strip() or not self._num_calls):
            self._add_text(events, self._pending)
        self._pending = ""
        return events

    def _text_step(self, events: list[Event]) -> bool:
        """Returns text up to the next call; True if one begins."""
        if self._after_call and not self._drop_separator():
            return False
        stripped = self._pending.lstrip()
        if self.bare and self._at_start and stripped.startswith("{"):
            self._begin(len(self._pending) - len(stripped), self.closing)
            return True
        found = min(((at, tag) for tag in self._tags if (at := self._pending.find(tag)) >= 0), default=None)
        partial = max((partial_length(self._pending, tag) for tag in self._tags), default=0)
        cut = len(self._pending) - partial if found is None else found[0]
        before = self._pending[:cut].rstrip()
        self._add_text(events, before)
        self._pending = self._pending[len(before) :]
        if found is not None:
            self._begin(cut - len(before) + len(found[1]), self._tags[found[1]])
        return found is not None

    def _drop_separator(self) -> bool:
        """Drops white space and the closing tag after a call; False if more text is needed to tell."""
        rest = self._pending.lstrip()
        if self._closing.startswith(rest) and rest != self._closing:
            return False
        self._pending = rest.removeprefix(self._closing)
        self._after_call = False
        return True

    def _add_text(self, events: list[Event], text: str) -> None:
        if text:
            self._at_start = self._at_start and text.isspace()
            events.append(Text(text))

    def _begin(self, length: int, closing: str) -> None:
        """A call begins after `length` characters of white space and tag."""
        self._closing = closing
        self._raw, self._pending = self._pending[:length], self._pending[length:]
        self._call, self._begun = CallObject(self._names), False

    def _call_step(self, events: list[Event]) -> bool:
        """Reads the current call; True if it has ended and text follows."""
        call = self._call
        if call is None or not self._pending:
            return False
        num_sent = len(call.arguments)
        used = call.feed(self._pending)
        self._raw += self._pending[:used]
        self._pending = self._pending[used:]
        self._add_call(events, call, num_sent)
        if not call.ended:
            return False
        if call.valid:
            self._add(events, CallEnd(self._num_calls))
            self._end_call()
        else:
            self._break_call(events)
        return True

    def _add_call(self, events: list[Event], call: CallObject, num_sent: int) -> None:
        """What is new of a call."""
        if call.name is not None and not self._begun:
            self._begun = True
            self._add(events, CallBegin(self._num_calls, f"call_{uuid.uuid4().hex[:24]}", call.name))
        if self._begun and len(call.arguments) > num_sent:
            self._add(events, CallArguments(self._num_calls, call.arguments[num_sent:]))

    def _add(self, events: list[Event], event: Event) -> None:
        if self._parallel or self._num_calls == 0:
            events.append(event)

    def _break_call(self, events: list[Event]) -> None:
        if self._begun:
            self._add(events, CallEnd(self._num_calls, broken=self._raw))
            self._end_call()
        else:
            self._call = None
            self._add_text(events, self._raw)
        self._at_start = self._after_call = False

    def _end_call(self) -> None:
        self._call, self._begun = None, False
        self._num_calls += 1
        self._at_start = self._after_call = True


class HermesParser(ToolParser):
    """Qwen 2.5, Qwen 3, Hermes: calls in tags, with text around them."""

    opening = "<tool_call>"
    closing = "</tool_call>"
    lead = "\n"
    trail = "\n"
    separator = "\n"


class JsonParser(ToolParser):
    """A message that is nothing but calls."""

    closing = ";"
    bare = True
    key = "parameters"
    separator = "; "


class Llama3Parser(JsonParser):
    """Llama 3.1 to 3.3. The tag, which may be missing, is a special token: see `message_format.shown_tokens`."""

    opening = "<|python_tag|>"


class FencedParser(ToolParser):
    """Models whose chat template has no tools: blocks of JSON in Markdown, with text around them."""

    opening = "```json"
    closing = "```"
    lead = "\n"
    trail = "\n"
    separator = "\n"


PARSERS: Final[Mapping[str, type[ToolParser]]] = {
    "llama3": Llama3Parser,
    "hermes": HermesParser,
    "json": JsonParser,
    "fenced": FencedParser,
}


def has_tools(chat_template: str) -> bool:
    """Whether a chat template describes tools to the model."""
    return is_harmony(chat_template) or re.search(r"\btools\b", chat_template) is not None


def parser_for(chat_template: str) -> type[ToolParser] | None:
    """The parser for what a chat template teaches; None if it has no tools, or in a format that is not known here."""
    if not has_tools(chat_template) or is_harmony(chat_template):
        return None
    if HermesParser.opening in chat_template:
        return HermesParser
    if Llama3Parser.opening in chat_template or "<|start_header_id|>" in chat_template:
        return Llama3Parser
    return None
