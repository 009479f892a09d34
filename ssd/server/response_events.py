"""The output of `/v1/responses`: items, and the events that announce them."""

from __future__ import annotations

import uuid
from typing import Any

from ssd.server.parsing import Event, Reasoning
from ssd.server.tools import CallArguments, CallBegin, CallEnd, Text

Json = dict[str, Any]


class ResponseWriter:
    """Turns the events of one message into the events of a response, and keeps the response's state."""

    def __init__(self, response: Json) -> None:
        """`response`: the fields that stay the same."""
        self._response: Json = {**response, "status": "in_progress", "output": []}
        self._output: list[Json] = self._response["output"]
        self._number = 0  # of the next event
        self._open = False  # whether the last item goes on

    @property
    def response(self) -> Json:
        return self._response

    @property
    def reasoning(self) -> str:
        """The text of all reasoning."""
        return "".join(item["content"][0]["text"] for item in self._output if item["type"] == "reasoning")

    def begin(self) -> list[Json]:
        return [self._event(f"response.{name}", response=self._snapshot()) for name in ("created", "in_progress")]

    def add(self, event: Event) -> list[Json]:
        match event:
            case Text(text):
                return self._add_text("message", text)
            case Reasoning(text):
                return self._add_text("reasoning", text)
            case CallBegin(_, id_, name):
                item = {"type": "function_call", "id": _new_id("fc"), "call_id": id_, "name": name, "arguments": ""}
                return [*self._close(), self._add_item(item)]
            case CallArguments(_, text):
                self._output[-1]["arguments"] += text
                return [self._of_item("response.function_call_arguments.delta", delta=text)]
            case CallEnd():
                return self._close(complete=event.broken is None)

    def end(self, complete: bool, usage: Json) -> list[Json]:
        """`complete`: the model has ended its message; False: the limit of tokens has."""
        events = self._close(complete)
        self._response["status"] = "completed" if complete else "incomplete"
        self._response["incomplete_details"] = None if complete else {"reason": "max_output_tokens"}
        self._response["usage"] = usage
        return [*events, self._event(f"response.{self._response['status']}", response=self._snapshot())]

    def fail(self, code: str, message: str) -> list[Json]:
        """The response ends with an error."""
        events = self._close(complete=False)
        self._response |= {"status": "failed", "error": {"code": code, "message": message}}
        return [*events, self._event("response.failed", response=self._snapshot())]

    def _add_text(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if not self._open or self._output[-1]["type"] != kind:
            events = [*self._close(), *self._open_text(kind)]
        part = self._output[-1]["content"][0]
        part["text"] += text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        return [*events, self._of_item(f"response.{part['type']}.delta", content_index=0, delta=text, **logprobs)]

    def _open_text(self, kind: str) -> list[Json]:
        if kind == "message":
            item: Json = {"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []}
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        events = [self._add_item(item), self._of_item("response.content_part.added", content_index=0, part=dict(part))]
        item["content"].append(part)
        return events

    def _add_item(self, item: Json) -> Json:
        item["status"] = "in_progress"
        self._output.append(item)
        self._open = True
        return self._event("response.output_item.added", output_index=len(self._output) - 1, item=_copy(item))

    def _close(self, complete: bool = True) -> list[Json]:
        """Ends the last item if it is open."""
        if not self._open:
            return []
        self._open = False
        item = self._output[-1]
        item["status"] = "completed" if complete else "incomplete"
        if item["type"] == "function_call":
            fields = {"name": item["name"], "arguments": item["arguments"]}
            events = [self._of_item("response.function_call_arguments.done", **fields)]
        else:
            [part] = item["content"]
            logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
            text = {"content_index": 0, "text": part["text"], **logprobs}
            events = [
                self._of_item(f"response.{part['type']}.done", **text),
                self._of_item("response.content_part.done", content_index=0, part=dict(part)),
            ]
        index = len(self._output) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=_copy(item))]

    def _of_item(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._number += 1
        return {"type": kind, "sequence_number": self._number - 1, **fields}

    def _snapshot(self) -> Json:
        return {**self._response, "output": [_copy(item) for item in self._output]}


def _copy(item: Json) -> Json:
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
