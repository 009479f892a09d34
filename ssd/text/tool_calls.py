"""Tool calls in a model's own format: what the streaming parsers of all formats have in common.

A parser is fed text in pieces of any size and returns events. What is not a call of one of the request's tools is text.
Knows nothing of HTTP or the engine.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from ssd.text.call_object import Call, CallObject
from ssd.text.events import CallArguments, CallBegin, CallEnd, Event, Text
from ssd.text.reasoning import partial_length

FENCE: Final = ("```json", "```")
Schemas = Mapping[str, Mapping[str, Any]]  # JSON Schema of the arguments, by the name of the tool


class ToolParser:
    """Base of the parsers: text outside of calls, and calls.

    White space before and between calls is dropped. Arguments are returned as they come; when a call turns out broken
    after that, `CallEnd.broken` is its text. A call that is not recognised before its arguments is plain text.

    A format is a subclass with its tags, how calls are written, and what reads one.
    """

    opening: str = ""  # the tag before a call
    closing: str = ""  # the tag after a call, which may be missing
    section: tuple[str, str] = ("", "")  # tags before the first and after the last call of a message
    inner: tuple[str, ...] = ()  # tags within a call
    bare = False  # whether a message may begin with a call, without a tag
    tail: str = "}"  # between the arguments and the closing tag
    separator: str = ""  # between calls
    ends_reasoning = False  # whether a call ends the reasoning that it is in
    text_arguments = False  # whether chat templates get the arguments of earlier calls as text

    @classmethod
    def teaches(cls, chat_template: str) -> bool:
        """Whether a chat template has this format."""
        return False

    @classmethod
    def head(cls, name: str, number: str = "0") -> str:
        """What is between the opening tag and the arguments. `number`: which call it is, in formats that say so."""
        return f'{{"name": {json.dumps(name)}, "arguments": '

    @classmethod
    def begins(cls) -> tuple[str, ...]:
        """The tags that the first call of a message may begin with."""
        return tuple(filter(None, (cls.section[0], cls.opening)))

    @classmethod
    def tags(cls) -> tuple[str, ...]:
        return tuple(tag for tag in (*cls.section, cls.opening, *cls.inner, cls.closing) if tag)

    @classmethod
    def written(cls, calls: Iterable[tuple[str, str]]) -> str:
        """Calls as the model writes them: names, and arguments as JSON."""
        opening, closing = ("", "") if cls.bare else (cls.opening, cls.closing)
        each = [
            f"{opening}{cls.head(name, str(number))}{cls.arguments(text)}{cls.tail}{closing}"
            for number, (name, text) in enumerate(calls)
        ]
        return cls.section[0] + cls.separator.join(each) + cls.section[1]

    @classmethod
    def arguments(cls, text: str) -> str:
        """How a call has arguments that are given as JSON."""
        return text

    def __init__(self, schemas: Schemas, parallel: bool = True, fenced: bool = False) -> None:
        """`schemas`: of the request's tools. `parallel` False: calls after the first are dropped. `fenced`: calls in
        fences are calls, too."""
        self._schemas = schemas
        self._parallel = parallel
        self._tags: dict[str, tuple[Sequence[str], Callable[[], Call]]] = {}  # what may follow a call, what reads it
        if self.opening:
            self._tags = dict.fromkeys(self.begins(), (self._closings, self._reader))
        if fenced:
            self._tags[FENCE[0]] = (FENCE[1:], self._object)
        self._left: Sequence[str] = ()  # what may follow the last call, one after the other
        self._pending = ""  # text that may be the beginning of a call, or white space before one
        self._raw = ""  # text of the current call, from the white space before it
        self._call: Call | None = None
        self._begun = False  # CallBegin was returned for the current call
        self._num_calls = 0
        self._ids: set[str] = set()
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
            self._begin(len(self._pending) - len(stripped), (self._closings, self._object))
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

    @property
    def _closings(self) -> Sequence[str]:
        """What may follow a call, one after the other, each of it or not."""
        return tuple(filter(None, (self.closing, self.section[1])))

    def _reader(self) -> Call:
        """What reads a call in this format, behind its opening tag."""
        return self._object()

    def _object(self) -> Call:
        return CallObject(self._schemas)

    def _drop_separator(self) -> bool:
        """Drops white space and the closing tags after a call; False if more text is needed to tell."""
        while self._left:
            rest = self._pending.lstrip()
            if self._left[0].startswith(rest) and rest != self._left[0]:
                return False
            self._pending, self._left = rest.removeprefix(self._left[0]), self._left[1:]
        self._after_call = False
        return True

    def _add_text(self, events: list[Event], text: str) -> None:
        if text:
            self._at_start = self._at_start and text.isspace()
            events.append(Text(text))

    def _begin(self, length: int, form: tuple[Sequence[str], Callable[[], Call]]) -> None:
        """A call begins after `length` characters of white space and tag."""
        self._raw, self._pending = self._pending[:length], self._pending[length:]
        self._left, reader = form
        self._call, self._begun = reader(), False

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

    def _add_call(self, events: list[Event], call: Call, num_sent: int) -> None:
        """What is new of a call."""
        if call.name is not None and not self._begun:
            self._begun = True
            own = call.id if call.id is not None and call.id not in self._ids else f"call_{uuid.uuid4().hex[:24]}"
            self._ids.add(own)
            self._add(events, CallBegin(self._num_calls, own, call.name))
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
