"""A generated message as events: reasoning, text and tool calls, in the format of the model's family."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ssd.text import harmony
from ssd.text.events import Event, Reasoning, Text, settled
from ssd.text.harmony import is_harmony
from ssd.text.harmony_parser import HarmonyParser
from ssd.text.reasoning import CLOSING, OPENING, ReasoningSplitter, marks_reasoning, opens_reasoning
from ssd.text.tokenizer import Tokenizer
from ssd.text.tool_calls import Schemas, ToolParser
from ssd.text.tool_formats import has_tools, parser_for

PROMPT_END: Final = 16  # tokens of a prompt that may open a message, or a block of reasoning


class MessageParser:
    """Incremental parser of one message: takes its text in pieces of any size, returns events."""

    def __init__(self, reasoning: ReasoningSplitter | None, tools: ToolParser | None, forced: bool = False) -> None:
        """`forced`: the message is nothing but calls."""
        self._reasoning = reasoning
        self._tools = tools
        self._forced = forced

    def feed(self, text: str) -> list[Event]:
        return self._events(*(("", text) if self._reasoning is None else self._reasoning.feed(text)))

    def finish(self, cut: bool = False) -> list[Event]:
        """Events of what was held back, at the end of the message. `cut`: it would have gone on."""
        events = self._events(*self._reasoning.finish()) if self._reasoning is not None else []
        return events + (self._tools.finish(cut or self._forced) if self._tools is not None else [])

    def _events(self, reasoning: str, text: str) -> list[Event]:
        events: list[Event] = [Reasoning(reasoning)] if reasoning else []
        if self._tools is not None:
            return events + self._tools.feed(text)
        return [*events, Text(text)] if text else events


@dataclass(frozen=True)
class MessageFormat:
    """How the messages of one request are parsed. The default: all of it is text."""

    tool_parser: type[ToolParser] | None = None
    tools: Schemas = field(default_factory=dict)
    parallel_tool_calls: bool = True
    forced: bool = False  # the message is nothing but calls
    fenced: bool = False  # calls in fences of Markdown are calls, too
    reasoning: bool = False
    reasoning_opened: bool = False  # by the prompt
    harmony: bool = False
    continued: bool = False  # in Harmony: the prompt ends inside of a message for the user

    def parser(self) -> MessageParser | HarmonyParser:
        """A parser for one sample."""
        if self.harmony:
            return HarmonyParser(self.tools, self.parallel_tool_calls, self.continued)
        ends = self.tool_parser.begins() if self.tool_parser is not None and self.tool_parser.ends_reasoning else ()
        splitter = ReasoningSplitter(self.reasoning_opened, ends) if self.reasoning else None
        if self.tool_parser is None:
            return MessageParser(splitter, None)
        tools = self.tool_parser(self.tools, self.parallel_tool_calls, self.fenced)
        return MessageParser(splitter, tools, self.forced)


def format_of(
    chat_template: str,
    prompt_end: str,
    parser: type[ToolParser] | None = None,
    tools: Schemas | None = None,
    parallel: bool = True,
) -> MessageFormat:
    """The format of the answers to a chat.

    `prompt_end`: the end of the rendered prompt, which tells whether reasoning or a message has been opened there.
    `parser`: that of tool calls, `tools`: those that may be called, `parallel`: whether an answer may have several.
    """
    tools = tools or {}
    if is_harmony(chat_template):
        continued = not prompt_end.endswith((harmony.REPLY, harmony.END, harmony.CALL))
        return MessageFormat(None, tools, parallel, harmony=True, continued=continued)
    reasoning = marks_reasoning(chat_template)
    opened = reasoning and opens_reasoning(prompt_end)
    fenced = not has_tools(chat_template) and parser_for(chat_template) is None  # it teaches no format
    return MessageFormat(parser, tools, parallel, fenced=fenced, reasoning=reasoning, reasoning_opened=opened)


def stop_tokens(chat_template: str, tokenizer: Tokenizer) -> list[int]:
    """Tokens that end an answer in this format, whether or not the checkpoint names them."""
    tags = harmony.STOPS if is_harmony(chat_template) else ()
    return [token_id for tag in tags if (token_id := tokenizer.token_id(tag)) is not None]


def takes_text(chat_template: str) -> bool:
    """Whether a chat template gets the arguments of earlier calls as text, as the model has written them."""
    parser = parser_for(chat_template)
    return is_harmony(chat_template) or (parser is not None and parser.text_arguments)


def shown_tokens(chat_template: str, parser: type[ToolParser] | None, tokenizer: Tokenizer) -> list[int]:
    """Tags of tool calls and reasoning that are special tokens, which detokenized text leaves out unless named."""
    tags = (() if parser is None else parser.tags()) + ((OPENING, CLOSING) if marks_reasoning(chat_template) else ())
    tags += harmony.TOKENS if is_harmony(chat_template) else ()
    ids = [token_id for tag in tags if (token_id := tokenizer.token_id(tag)) is not None]
    return [token_id for token_id in ids if tokenizer.is_special(token_id)]


def parse(text: str, format: MessageFormat, *, cut: bool = False) -> list[Event]:
    """The events of a whole message. A call that is broken is text. `cut`: the message would have gone on."""
    parser = format.parser()
    return settled(parser.feed(text) + parser.finish(cut))
