"""Requests of Ollama's API, and what they are as requests of chats."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, WithJsonSchema

from ssd.server import parameters
from ssd.server.chat_messages import ROLES, checked_call
from ssd.server.effort import effort_options
from ssd.server.errors import invalid, unsupported
from ssd.server.fields import known_fields
from ssd.server.protocol import ChatRequest, Json, Jsons, Prompts, PublishedRequest, Stops

_SECONDS: Final = {"ns": 1e-9, "us": 1e-6, "µs": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0}
_DURATION: Final = re.compile(r"-?(?:\d+(?:\.\d*)?(?:ns|us|µs|ms|s|m|h))+")
FIELD_NAMES: Final = {  # of a chat's fields
    "chat_template_kwargs": "think",
    "max_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "response_format": "format",
    "response_format.json_schema.schema": "format",
    **{
        name: f"options.{name}"
        for name in (
            *("temperature", "top_k", "top_p", "min_p", "seed", "stop"),
            *("presence_penalty", "frequency_penalty"),
        )
    },
}


class Options(PublishedRequest):
    published = parameters.OLLAMA_OPTIONS
    path = "options"
    temperature: float | None = None
    top_k: int | None = None  # 0 and below: all tokens
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None  # below 0: none
    stop: str | Stops | None = None
    num_predict: int | None = None  # below 0: to the end of the context
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


def seconds(keep_alive: object) -> float | None:
    """The time for which a request wants its model to be kept: a number, or a duration such as "5m"; below 0: for
    ever."""
    if keep_alive is None:
        return None
    if isinstance(keep_alive, int | float) and not isinstance(keep_alive, bool):
        return float(keep_alive)
    if isinstance(keep_alive, str):
        try:
            return float(keep_alive)
        except ValueError:
            if _DURATION.fullmatch(keep_alive):
                parts = re.findall(r"(\d+(?:\.\d*)?)([nuµm]?s|m|h)", keep_alive)
                return (-1 if keep_alive[0] == "-" else 1) * sum(float(n) * _SECONDS[unit] for n, unit in parts)
    raise invalid("keep_alive", f"{keep_alive!r:.60} is neither a number of seconds nor a duration such as '5m'")


KeepAlive = Annotated[
    float | None,
    BeforeValidator(seconds),
    WithJsonSchema({"anyOf": [{"type": "number"}, {"type": "string"}, {"type": "null"}]}),
]


class OllamaRequest(PublishedRequest):
    model: str
    keep_alive: KeepAlive = None  # seconds, for the server of several models, which has read it
    options: Options | None = None


class GeneratingRequest(OllamaRequest):
    stream: bool = True
    think: bool | str | None = None  # or an effort
    format: str | Json | None = None  # "json", or a JSON Schema

    def as_chat(self, messages: list[Json], tools: Jsons | None = None) -> ChatRequest:
        given = {} if self.options is None else self.options.model_dump(exclude_none=True)
        limit, top_k, seed = (given.pop(name, None) for name in ("num_predict", "top_k", "seed"))
        return ChatRequest(
            model=self.model,
            messages=messages,
            tools=tools,
            stream=self.stream,
            max_tokens=None if limit is None or limit < 0 else limit,
            top_k=None if top_k is None else max(0, top_k),
            seed=None if seed is None or seed < 0 else seed,
            repetition_penalty=given.pop("repeat_penalty", None),
            response_format=self._response_format(),
            chat_template_kwargs=self._thinking(),
            **given,
        )

    def _response_format(self) -> Json | None:
        if self.format is None:
            return None
        if isinstance(self.format, str) and self.format != "json":
            raise invalid("format", f"{self.format!r:.60} is neither 'json' nor a JSON Schema")
        if isinstance(self.format, str):
            return {"type": "json_object"}
        return {"type": "json_schema", "json_schema": {"schema": self.format}}

    def _thinking(self) -> Json | None:
        if isinstance(self.think, bool):
            return {"enable_thinking": self.think}
        return effort_options("think", self.think) or None


class OllamaChatRequest(GeneratingRequest):
    published = parameters.OLLAMA_CHAT
    messages: Jsons | None = None  # without: the model is loaded
    tools: Jsons | None = None

    @property
    def chat(self) -> ChatRequest:
        return self.as_chat(_messages(self.messages or []), self.tools)


class GenerateRequest(GeneratingRequest):
    published = parameters.OLLAMA_GENERATE
    prompt: str | None = None  # without: the model is loaded
    system: str | None = None
    raw: bool | None = None  # the prompt is not put into the chat template

    @property
    def chat(self) -> ChatRequest:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self.as_chat([*system, {"role": "user", "content": self.prompt}])


class EmbedRequest(OllamaRequest):
    published = parameters.OLLAMA_EMBED
    input: Prompts


class ShowRequest(PublishedRequest):
    published = parameters.OLLAMA_SHOW
    model: str | None = None
    name: str | None = None  # its former name


def unloads(path: str, body: Mapping[str, Any]) -> bool:
    """Whether a request is for the model to be unloaded."""
    field = {"/api/chat": "messages", "/api/generate": "prompt"}.get(path)
    return field is not None and not body.get(field) and seconds(body.get("keep_alive")) == 0


def _messages(given: Jsons) -> list[Json]:
    """With the ids by which results belong to calls: here they follow from names and order."""
    messages: list[Json] = []
    calls: list[tuple[str, str]] = []  # id and name of those without a result
    for i, message in enumerate(given):
        where = f"messages[{i}]"
        known = ("role", "content", "thinking", "tool_calls", "tool_name", "tool_call_id", "images")
        message = known_fields(where, message, known)
        if message.get("role") not in ROLES:
            raise invalid(f"{where}.role", f"{message.get('role')!r:.60} is not one of {', '.join(ROLES)}")
        if message.get("images"):
            raise unsupported(f"{where}.images", "is not supported: images are not understood")
        content = message.get("content") or ""
        if not isinstance(content, str):
            raise invalid(f"{where}.content", "expected text")
        made: Json = {"role": message["role"], "content": content}
        if message.get("thinking"):
            made["reasoning_content"] = message["thinking"]
        if message.get("tool_calls"):
            made["tool_calls"] = _calls(f"{where}.tool_calls", i, message["tool_calls"])
            calls = [(call["id"], call["function"]["name"]) for call in made["tool_calls"]]
        if message["role"] == "tool":
            made |= _answered(message, calls)
        messages.append(made)
    return messages


def _calls(where: str, turn: int, given: object) -> list[Json]:
    if not isinstance(given, list):
        raise invalid(where, "expected a list")
    return [_call(f"{where}[{j}]", f"call_{turn}_{j}", call) for j, call in enumerate(given)]


def _call(where: str, new_id: str, given: object) -> Json:
    call, function = checked_call(where, given)
    arguments = function.get("arguments") or {}
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    made = {"name": function["name"], "arguments": text}
    return {"id": call.get("id") or new_id, "type": "function", "function": made}


def _answered(message: Json, calls: list[tuple[str, str]]) -> Json:
    """The id and name of the call whose result this is; it is taken out of `calls`."""
    name, own = message.get("tool_name"), message.get("tool_call_id")
    found = next((call for call in calls if own in (None, call[0]) and name in (None, call[1])), None)
    if found is None:
        return {key: value for key, value in (("tool_call_id", own), ("name", name)) if value is not None}
    calls.remove(found)
    return {"tool_call_id": found[0], "name": found[1]}
