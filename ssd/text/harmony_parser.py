"""Reads answers in Harmony (see `harmony`): reasoning, text and tool calls, as they are generated."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Final, Literal

from ssd.text.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text
from ssd.text.harmony import CALL, CHANNEL, CONSTRAIN, END, MESSAGE, RETURN, START
from ssd.text.reasoning import partial_length

_ENDS: Final = (END, CALL, RETURN, START)  # what ends the content of a message
_HEADERS: Final = (START, CHANNEL, CONSTRAIN, MESSAGE, " to=")  # how a header begins, behind the prompt or an end
_NAMED: Final = re.compile(rf"{re.escape(CHANNEL)}\s*(\w+)")
_RECIPIENT: Final = re.compile(r"to=([^\s<]+)")


class HarmonyParser:
    """Takes an answer in pieces of any size, returns events.

    Analysis is reasoning, a message to one of the request's functions is a call, anything else is text. Messages of
    one kind that follow each other are separated by an empty line. Text without a header is text.
    """

    def __init__(self, names: Collection[str], parallel: bool = True, opened: bool = False) -> None:
        """`names`: of the request's tools. `parallel` False: calls after the first are dropped. `opened`: the prompt
        ends inside of a message for the user, which the answer continues."""
        self._names, self._parallel = names, parallel
        self._pending = ""
        self._in_header = not opened
        self._kind: Literal["text", "reasoning", "call"] = "text"
        self._new = False  # nothing of the current message was returned yet
        self._separated: set[str] = set()  # kinds of messages that were returned
        self._arguments = ""  # of the current call
        self._num_calls = 0

    def feed(self, text: str) -> list[Event]:
        events: list[Event] = []
        self._pending += text
        while self._header_step(events) if self._in_header else self._content_step(events):
            pass
        return events

    def finish(self, cut: bool = False) -> list[Event]:
        """Events of what was held back, at the end of the answer. A header without content is nothing.

        `cut`: the answer would have gone on. What may be the beginning of a tag is none of its text then.
        """
        events: list[Event] = []
        if not self._in_header and cut and self._kind == "call":
            self._add_call(events, CallEnd(self._num_calls, complete=False))
        elif not self._in_header:
            self._add(events, "" if cut else self._pending)
            self._close(events)
        return events

    def _header_step(self, events: list[Event]) -> bool:
        """Reads a header; True once it is complete."""
        header, found, rest = self._pending.partition(MESSAGE)
        if not any(self._pending.startswith(each) or each.startswith(self._pending) for each in _HEADERS):
            header, rest = "", self._pending
        elif not found:
            return False
        self._pending, self._in_header, self._new = rest, False, True
        channel, recipient = _NAMED.search(header), _RECIPIENT.search(header)
        name = recipient[1].removeprefix("functions.") if recipient is not None else None
        if name in self._names and name is not None:
            self._kind, self._arguments = "call", ""
            self._add_call(events, CallBegin(self._num_calls, f"call_{uuid.uuid4().hex[:24]}", name))
        else:
            self._kind = "reasoning" if channel is not None and channel[1] == "analysis" else "text"
        return True

    def _content_step(self, events: list[Event]) -> bool:
        """Returns content up to its end; True if that was found."""
        ends = [(at, tag) for tag in _ENDS if (at := self._pending.find(tag)) >= 0]
        if not ends:
            cut = len(self._pending) - max(partial_length(self._pending, tag) for tag in _ENDS)
            self._add(events, self._pending[:cut])
            self._pending = self._pending[cut:]
            return False
        at, tag = min(ends)
        self._add(events, self._pending[:at])
        self._close(events)
        self._pending = self._pending[at + (0 if tag == START else len(tag)) :]
        self._in_header = True
        return True

    def _add(self, events: list[Event], content: str) -> None:
        if not content:
            return
        if self._kind == "call":
            self._arguments += content
            self._add_call(events, CallArguments(self._num_calls, content))
            return
        content = f"\n\n{content}" if self._new and self._kind in self._separated else content
        self._separated.add(self._kind)
        self._new = False
        events.append(Text(content) if self._kind == "text" else Reasoning(content))

    def _close(self, events: list[Event]) -> None:
        """Ends the message, which is broken if it is a call whose arguments are no JSON object."""
        if self._kind != "call":
            return
        if not self._arguments.strip():
            self._add(events, "{}")
        self._add_call(events, CallEnd(self._num_calls, None if _is_object(self._arguments) else self._arguments))
        self._num_calls += 1
        self._kind = "text"

    def _add_call(self, events: list[Event], event: Event) -> None:
        if self._parallel or self._num_calls == 0:
            events.append(event)


def _is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
