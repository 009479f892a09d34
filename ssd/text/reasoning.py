"""Splits reasoning, `<think>…</think>` at the beginning of a message, from what follows it.

Qwen 3 and DeepSeek-like models write the opening tag themselves, or find it at the end of the prompt. Knows nothing of
the engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Final

OPENING: Final = "<think>"
CLOSING: Final = "</think>"


class _State(Enum):
    START = 0
    REASONING = 1
    TEXT = 2


def marks_reasoning(chat_template: str) -> bool:
    """Whether a chat template knows reasoning, so that its tags are more than text."""
    return CLOSING in chat_template


def opens_reasoning(prompt: str) -> bool:
    """Whether the prompt ends with an opened block, so that the message begins inside of it."""
    return prompt.rstrip().endswith(OPENING)


def partial_length(text: str, tag: str) -> int:
    """Length of the text's end that may be the beginning of the tag."""
    lengths = range(min(len(tag) - 1, len(text)), 0, -1)
    return next((n for n in lengths if text.endswith(tag[:n])), 0)


class ReasoningSplitter:
    """Incremental: takes a message in pieces, returns (reasoning, text) pairs. Drops white space around the tags."""

    def __init__(self, opened: bool = False, ends: Sequence[str] = ()) -> None:
        """`opened`: the prompt ends with the opening tag. `ends`: other tags that end reasoning, and belong to what
        follows it."""
        self._ends = (CLOSING, *ends)
        self._state = _State.REASONING if opened else _State.START
        self._pending = ""
        self._drop_space = opened  # white space that comes next follows a tag

    def feed(self, text: str) -> tuple[str, str]:
        """The new reasoning and the new text; each may be empty."""
        self._pending += text
        if self._state is _State.START:
            self._start()
        reasoning = self._take_reasoning() if self._state is _State.REASONING else ""
        if self._state is not _State.TEXT:
            return reasoning, ""
        text, self._pending = self._without_space(self._pending), ""
        return reasoning, text

    def finish(self) -> tuple[str, str]:
        """What was held back, at the end of the message."""
        held, self._pending = self._pending, ""
        return (self._without_space(held.rstrip()), "") if self._state is _State.REASONING else ("", held)

    def _start(self) -> None:
        """Leaves the start as soon as it is known whether the message begins with the opening tag."""
        stripped = self._pending.lstrip()
        if stripped.startswith(OPENING):
            self._state, self._drop_space = _State.REASONING, True
            self._pending = stripped[len(OPENING) :]
        elif not OPENING.startswith(stripped):
            self._state = _State.TEXT

    def _take_reasoning(self) -> str:
        """Reasoning without white space at its end, and without what may be the beginning of the closing tag."""
        found = min(((at, tag) for tag in self._ends if (at := self._pending.find(tag)) >= 0), default=None)
        held = max(partial_length(self._pending, tag) for tag in self._ends)
        reasoning = self._pending[: found[0] if found is not None else len(self._pending) - held].rstrip()
        taken = self._without_space(reasoning)
        if found is None:
            self._pending = self._pending[len(reasoning) :]
            return taken
        self._pending = self._pending[found[0] :].removeprefix(CLOSING)
        self._state, self._drop_space = _State.TEXT, True
        return taken

    def _without_space(self, text: str) -> str:
        """The text without white space that follows a tag."""
        text = text.lstrip() if self._drop_space else text
        self._drop_space = self._drop_space and not text
        return text
