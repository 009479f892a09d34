"""Reads an answer of a model in a conversation: what is shown, and the message that goes into the history."""

from __future__ import annotations

import json
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

from ssd.core import SamplingParams
from ssd.errors import ConfigError
from ssd.text.events import CallEnd, Event, Reasoning, Text, message_fields, settled
from ssd.text.harmony import is_harmony
from ssd.text.message_format import PROMPT_END, MessageFormat, format_of, shown_tokens, stop_tokens, takes_text
from ssd.text.tokenizer import Tokenizer
from ssd.text.tool_formats import has_tools, parser_for

Tools = list[dict[str, Any]]


class ReplyFormat:
    """How a model writes its messages. `template`: its chat template; "" for a model without one."""

    def __init__(self, tokenizer: Tokenizer, template: str, tools: Tools) -> None:
        self.tools, self.harmony = tools, is_harmony(template)
        self._tokenizer, self._template = tokenizer, template
        self._parser = parser_for(template) if tools else None
        if tools and (not has_tools(template) or (self._parser is None and not self.harmony)):
            raise ConfigError("--tools: the model's chat template has no tools, or in an unknown format: leave it out")

    def sampling(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the tokens that answers are parsed by, and those that end them."""
        stops = stop_tokens(self._template, self._tokenizer)
        shown = shown_tokens(self._template, self._parser, self._tokenizer)
        return replace(params, shown_token_ids=shown, stop_token_ids=(*params.stop_token_ids, *stops))

    def reader(self, prompt: Seq[int]) -> ReplyReader:
        """For the answer to a prompt."""
        end = self._tokenizer.decode(prompt[-PROMPT_END:], skip_special_tokens=False)
        functions = [tool["function"] for tool in self.tools]
        schemas = {function["name"]: function.get("parameters") or {} for function in functions}
        form = format_of(self._template, end, self._parser, schemas, parallel=False)
        return ReplyReader(form, text=takes_text(self._template))


class ReplyReader:
    """Takes an answer in pieces. `content` and the other `fields` of its message are there at the end."""

    def __init__(self, form: MessageFormat, *, text: bool) -> None:
        """`text`: the arguments of calls stay JSON text in the history."""
        self._parser, self._as_text = form.parser(), text
        self._events: list[Event] = []
        self.content = ""
        self.fields: dict[str, Any] = {}

    def feed(self, text: str) -> list[tuple[str, bool]]:
        """What to show, in pieces, each with whether it is reasoning."""
        return self._shown(self._parser.feed(text))

    def finish(self) -> list[tuple[str, bool]]:
        shown = self._shown(self._parser.finish())
        self.fields = message_fields(settled(self._events))
        self.content = self.fields.pop("content") or ""
        for call in self.fields.get("tool_calls", ()) if not self._as_text else ():
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
        return shown

    def _shown(self, events: Seq[Event]) -> list[tuple[str, bool]]:
        self._events += events
        shown = []
        for event in events:
            match event:
                case Text(text) | CallEnd(broken=str(text)):
                    shown.append((text, False))
                case Reasoning(text):
                    shown.append((text, True))
        return shown


def read_tools(file: Path) -> Tools:
    """A JSON file with a list of tools in OpenAI's shape."""
    try:
        tools: Tools = json.loads(file.read_text(encoding="utf-8"))
        names = {tool["function"]["name"] for tool in tools if tool["type"] == "function"}
        if not tools or len(names) < len(tools) or not all(isinstance(name, str) for name in names):
            raise ValueError("no tools, or not functions of different names")
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = '[{"type": "function", "function": {"name": …, "description": …, "parameters": {…}}}, …]'
        raise ConfigError(f"--tools {file}: cannot be used ({error}): name a JSON file with {what}") from error
    return tools
