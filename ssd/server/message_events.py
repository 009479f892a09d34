"""The output of `/v1/messages`: content blocks, and the events that announce them."""

from __future__ import annotations

import json
from typing import Any

from ssd.server.parsing import Event, Reasoning
from ssd.server.tools import CallArguments, CallBegin, CallEnd, Text

Json = dict[str, Any]


class MessageWriter:
    """Turns the events of one message into those of the Messages API, and keeps the content."""

    def __init__(self) -> None:
        self.content: list[Json] = []
        self._arguments = ""  # of the last tool_use block
        self._open = False  # whether the last block goes on

    def add(self, event: Event) -> list[Json]:
        match event:
            case Text(text):
                return self._add_text("text", text)
            case Reasoning(text):
                return self._add_text("thinking", text)
            case CallBegin(_, id_, name):
                self._arguments = ""
                return [*self.close(), self._open_block({"type": "tool_use", "id": id_, "name": name, "input": {}})]
            case CallArguments(_, text):
                self._arguments += text
                return [self._delta("input_json_delta", partial_json=text)]
            case CallEnd():
                if event.broken is None:
                    self.content[-1]["input"] = json.loads(self._arguments)
                return self.close()

    def close(self) -> list[Json]:
        """Ends the last block if it is open."""
        if not self._open:
            return []
        self._open = False
        return [{"type": "content_block_stop", "index": len(self.content) - 1}]

    def _add_text(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if not self._open or self.content[-1]["type"] != kind:
            block = {"type": kind, kind: ""} | ({"signature": ""} if kind == "thinking" else {})
            events = [*self.close(), self._open_block(block)]
        self.content[-1][kind] += text
        return [*events, self._delta(f"{kind}_delta", **{kind: text})]

    def _open_block(self, block: Json) -> Json:
        self.content.append(block)
        self._open = True
        return {"type": "content_block_start", "index": len(self.content) - 1, "content_block": dict(block)}

    def _delta(self, kind: str, **fields: str) -> Json:
        return {"type": "content_block_delta", "index": len(self.content) - 1, "delta": {"type": kind, **fields}}
