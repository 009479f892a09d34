"""The answers of `/api/chat` and `/api/generate`: as a whole, or as the lines of a stream."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any

from ssd.core import RequestMetrics, RequestOutput
from ssd.server.errors import ApiError
from ssd.server.ignored import current
from ssd.server.protocol import Json
from ssd.text.events import CallArguments, CallBegin, CallEnd, Event, Reasoning, Text


class OllamaWriter:
    """Turns the events of one message into lines, and keeps the message. A call of a tool is a line of its own."""

    def __init__(self, model: str, began: float, loaded: float, *, in_message: bool) -> None:
        """`began`, `loaded`: when the request arrived and when its model was loaded, as `time.perf_counter` counts.
        `in_message`: the text is the content of a message, else the field `response`."""
        self._model, self._began, self._loaded, self._in_message = model, began, loaded, in_message
        self._warnings = current().answer
        self._message: Json = {"content": ""}
        self._name = self._arguments = ""  # of the call that is being written
        self.answer: Json = {}

    def begin(self) -> list[Json]:
        return []

    def pause(self) -> list[Json]:
        return []  # there is no line that says nothing

    def add(self, event: Event) -> list[Json]:
        match event:
            case Text(text):
                return [self._add("content", text)]
            case Reasoning(text):
                return [self._add("thinking", text)]
            case CallBegin(_, _, name):
                self._name, self._arguments = name, ""
            case CallArguments(_, text):
                self._arguments += text
            case CallEnd(broken=broken) if broken is not None:
                return [self._add("content", broken)]
            case CallEnd(complete=True):
                function = {"name": self._name, "arguments": json.loads(self._arguments)}
                return [self._add("tool_calls", [{"function": function}])]
        return []

    def end(self, output: RequestOutput) -> list[Json]:
        reason = "length" if output.finish_reason == "length" else "stop"
        ended = {"done_reason": reason, **_durations(output.metrics, self._began, self._loaded), **self._warnings}
        self.answer = self._line(self._message) | {"done": True} | ended
        return [self._line({"content": ""}) | {"done": True} | ended]

    def fail(self, error: ApiError) -> list[Json]:
        return [error.ollama_body()]

    def _add(self, field: str, more: Any) -> Json:
        before = self._message.get(field)
        self._message[field] = more if before is None else before + more
        return self._line({"content": "", field: more}) | {"done": False}

    def _line(self, message: Json) -> Json:
        return _line(self._model, message, in_message=self._in_message)


def done(model: str, reason: str, *, in_message: bool) -> Json:
    """The answer to a request that is not for a text."""
    return _line(model, {"content": ""}, in_message=in_message) | {"done": True, "done_reason": reason}


def timestamp(when: datetime) -> str:
    return when.astimezone(UTC).isoformat().replace("+00:00", "Z")


def nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


def _line(model: str, message: Json, *, in_message: bool) -> Json:
    head = {"model": model, "created_at": timestamp(datetime.now(UTC))}
    if in_message:
        return {**head, "message": {"role": "assistant", **message}}
    return {**head, "response": message["content"], **{key: message[key] for key in message if key != "content"}}


def _durations(metrics: RequestMetrics, began: float, loaded: float) -> Json:
    """In nanoseconds, with the numbers of tokens."""
    scheduled = metrics.first_scheduled or loaded
    first = metrics.first_token or scheduled
    end = metrics.finished or first
    return {
        "total_duration": nanoseconds(end - began),
        "load_duration": nanoseconds(loaded - began),
        "prompt_eval_count": metrics.prompt_tokens,
        "prompt_eval_duration": nanoseconds(first - scheduled),
        "eval_count": metrics.output_tokens,
        "eval_duration": nanoseconds(end - first),
    }
