"""The answer of `/v1/responses`: its items, and the events of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from typing import Any

from ssd.core import RequestOutput
from ssd.server.answers import usage
from ssd.server.errors import ApiError
from ssd.server.protocol import Json
from ssd.text.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text
from ssd.text.tokenizer import Tokenizer


class ResponseWriter:
    """Turns the events of one message into the events of a response, and keeps the response."""

    def __init__(self, response: Json, tokenizer: Tokenizer, names: Mapping[str, Json]) -> None:
        """`response`: the fields that stay the same. `names`: as in `ResponseTools`."""
        self._output: list[Json] = []
        self.answer: Json = {**response, "status": "in_progress", "output": self._output}
        self._tokenizer, self._names = tokenizer, names
        self._num_events = 0
        self._open = False  # whether the last item is open

    def begin(self) -> list[Json]:
        return [self._event(f"response.{name}", response=self._snapshot()) for name in ("created", "in_progress")]

    def pause(self) -> list[Json]:
        return [self._event("response.in_progress", response=self._snapshot())]

    def add(self, event: Event) -> list[Json]:
        match event:
            case Text(text):
                return self._add_text("message", text)
            case Reasoning(text):
                return self._add_text("reasoning", text)
            case CallBegin(_, id_, name):
                called = self._names.get(name, {"name": name})
                item = {"type": "function_call", "id": _new_id("fc"), "call_id": id_, **called, "arguments": ""}
                return [*self._close(), self._add_item(item)]
            case CallArguments(_, text):
                self._output[-1]["arguments"] += text
                return [self._item("response.function_call_arguments.delta", delta=text)]
            case CallEnd():
                return self._close(complete=event.broken is None and event.complete)

    def end(self, output: RequestOutput) -> list[Json]:
        complete = output.finish_reason != "length"
        events = self._close(complete)
        self.answer["status"] = "completed" if complete else "incomplete"
        self.answer["incomplete_details"] = None if complete else {"reason": "max_output_tokens"}
        self.answer["usage"] = self._usage(output)
        return [*events, self._event(f"response.{self.answer['status']}", response=self._snapshot())]

    def fail(self, error: ApiError) -> list[Json]:
        events = self._close(complete=False)
        code = "server_error" if error.status >= 500 else "invalid_prompt"  # two of the API's own
        self.answer |= {"status": "failed", "error": {"code": code, "message": error.message}}
        return [*events, self._event("response.failed", response=self._snapshot())]

    def _usage(self, output: RequestOutput) -> Json:
        counts = usage([output])
        reasoning = "".join(item["content"][0]["text"] for item in self._output if item["type"] == "reasoning")
        num_reasoning = len(self._tokenizer.encode(reasoning, add_special_tokens=False))
        return {
            "input_tokens": counts["prompt_tokens"],
            "input_tokens_details": {**counts["prompt_tokens_details"], "cache_write_tokens": 0},
            "output_tokens": counts["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": num_reasoning, **counts["completion_tokens_details"]},
            "total_tokens": counts["total_tokens"],
        }

    def _add_text(self, kind: str, text: str) -> list[Json]:
        events: list[Json] = []
        if not self._open or self._output[-1]["type"] != kind:
            events = [*self._close(), *self._open_text(kind)]
        part = self._output[-1]["content"][0]
        part["text"] += text
        logprobs: Json = {"logprobs": []} if kind == "message" else {}
        return [*events, self._item(f"response.{part['type']}.delta", content_index=0, delta=text, **logprobs)]

    def _open_text(self, kind: str) -> list[Json]:
        if kind == "message":
            item: Json = {"type": "message", "id": _new_id("msg"), "role": "assistant", "content": []}
            part: Json = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
        else:
            item = {"type": "reasoning", "id": _new_id("rs"), "summary": [], "content": []}
            part = {"type": "reasoning_text", "text": ""}
        events = [
            self._add_item(item),
            self._item("response.content_part.added", content_index=0, part=dict(part)),
        ]
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
            events = [self._item("response.function_call_arguments.done", **fields)]
        else:
            [part] = item["content"]
            logprobs: Json = {"logprobs": []} if item["type"] == "message" else {}
            text = {"content_index": 0, "text": part["text"], **logprobs}
            events = [
                self._item(f"response.{part['type']}.done", **text),
                self._item("response.content_part.done", content_index=0, part=dict(part)),
            ]
        index = len(self._output) - 1
        return [*events, self._event("response.output_item.done", output_index=index, item=_copy(item))]

    def _item(self, kind: str, **fields: Any) -> Json:
        return self._event(kind, item_id=self._output[-1]["id"], output_index=len(self._output) - 1, **fields)

    def _event(self, kind: str, **fields: Any) -> Json:
        self._num_events += 1
        return {"type": kind, "sequence_number": self._num_events - 1, **fields}

    def _snapshot(self) -> Json:
        return {**self.answer, "output": [_copy(item) for item in self._output]}


def _copy(item: Json) -> Json:
    return {**item, "content": [dict(part) for part in item["content"]]} if "content" in item else dict(item)


def _new_id(prefix: str) -> str:
    return f"{prefix}_{uuid.uuid4().hex}"
