"""`/v1/responses`, translated to a chat. Stateless: nothing is stored, and a request brings its whole conversation."""

from __future__ import annotations

import time
import uuid
from typing import Annotated, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ssd.server import parameters
from ssd.server.answers import STREAMED, named_event_stream
from ssd.server.chat_messages import unseen
from ssd.server.effort import effort_options
from ssd.server.errors import invalid, renaming, unsupported
from ssd.server.fields import known_fields
from ssd.server.generation import ServerState
from ssd.server.http.bodies import JsonRoute, on_thread
from ssd.server.ignored import current
from ssd.server.openai.chat import respond, start_chat
from ssd.server.openai.response_events import ResponseWriter
from ssd.server.openai.response_tools import ResponseTools, chat_name, response_tools
from ssd.server.protocol import ChatRequest, Json, Jsons, SamplingRequest, Texts, one_invalid, schema_format

router = APIRouter(route_class=JsonRoute)
_ITEM_FIELDS: Final = {
    "message": {"type", "role", "content"},
    "function_call": {"type", "call_id", "name", "namespace", "arguments"},
    "function_call_output": {"type", "call_id", "name", "output"},
    "reasoning": {"type", "content"},
}
_TEXT_PARTS: Final = ("input_text", "output_text", "text")
_LOGPROBS: Final = "message.output_text.logprobs"
_FIELD_NAMES: Final = {
    "response_format": "text.format",
    "response_format.json_schema": "text.format",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "messages": "input",
    "tools[].function": "tools[]",
}


class ResponsesRequest(SamplingRequest):
    published = parameters.RESPONSES
    input: str | Annotated[Jsons, Field(min_length=1)]
    instructions: str | None = None
    max_output_tokens: int | None = None
    tools: Jsons | None = None
    tool_choice: str | Json | None = None
    parallel_tool_calls: bool | None = None
    text: Json | None = None  # with `format`
    reasoning: Json | None = None  # with `effort`
    include: Texts | None = None  # parts of an answer; most are of tools that are not there
    chat_template_kwargs: Json | None = None
    metadata: Annotated[dict[str, str], one_invalid(str)] | None = None  # returned with the response


@router.post("/v1/responses", responses=STREAMED)
async def create_response(body: ResponsesRequest, request: Request) -> Response:
    state = ServerState.of(request)
    if _LOGPROBS in (body.include or ()):
        raise unsupported("include", f"{_LOGPROBS!r} is not supported: leave it out, or use /v1/chat/completions")
    tools = await on_thread(request.state.large, response_tools, body.tools or [])
    with renaming(tools.paths), renaming(_FIELD_NAMES):
        generation, form = await start_chat(state, await on_thread(request.state.large, _chat, body, tools), request)
    writer = ResponseWriter(_fields(body, state), state.llm.tokenizer, tools.names)
    return await respond(generation, form, writer, named_event_stream if body.stream else None)


def _fields(body: ResponsesRequest, state: ServerState) -> Json:
    """The fields of a response that repeat the request."""
    defaults = state.sampling_defaults
    return {
        "id": f"resp_{uuid.uuid4().hex}",
        "object": "response",
        "created_at": int(time.time()),
        "model": state.options.served_model_name,
        "error": None,
        "incomplete_details": None,
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "store": False,
        "temperature": defaults["temperature"] if body.temperature is None else body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice or "auto",
        "tools": body.tools or [],
        "top_p": defaults.get("top_p", 1.0) if body.top_p is None else body.top_p,
        "truncation": "disabled",
        "usage": None,
        **current().answer,
    }


# --- the request as a chat --------------------------------------------------------------------------------------------


def _chat(body: ResponsesRequest, tools: ResponseTools) -> ChatRequest:
    same = {name: getattr(body, name) for name in SamplingRequest.model_fields}
    return ChatRequest(
        **same,
        messages=_messages(body),
        max_tokens=body.max_output_tokens,
        response_format=_response_format(body.text),
        tools=tools.chat or None,
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        chat_template_kwargs={**_reasoning(body.reasoning or {}), **(body.chat_template_kwargs or {})} or None,
    )


def _reasoning(given: Json) -> Json:
    known = known_fields("reasoning", given, ("effort",), parameters.REASONING)
    return effort_options("reasoning.effort", known.get("effort"))


def _response_format(text: Json | None) -> Json | None:
    if text is None:
        return None
    form = known_fields("text", text, ("format",), parameters.TEXT).get("format")
    if isinstance(form, dict) and form.get("type") == "json_schema":
        return schema_format("text.format", form)
    if form is not None and not isinstance(form, dict):
        raise invalid("text.format", "expected an object")
    return form


def _tool_choice(choice: str | Json | None) -> str | Json | None:
    if not isinstance(choice, dict) or choice.get("type") != "function":
        return choice
    name = chat_name(choice.get("namespace"), choice.get("name"))
    return {"type": "function", "function": {"name": name}}


def _messages(body: ResponsesRequest) -> list[Json]:
    messages: list[Json] = [{"role": "system", "content": body.instructions}] if body.instructions else []
    if isinstance(body.input, str):
        return [*messages, {"role": "user", "content": body.input}]
    reasoning = ""  # belongs to the assistant's message that follows it
    for index, item in enumerate(body.input):
        where, kind = f"input[{index}]", str(item.get("type") or "message")
        if kind not in _ITEM_FIELDS:
            raise unsupported(f"{where}.type", f"items of type {kind!r:.60} are not supported")
        known_fields(where, item, _ITEM_FIELDS[kind], parameters.RESPONSES_ITEM)
        if kind == "message":
            messages.append(_message(where, item))
        elif kind == "function_call":
            if not messages or messages[-1]["role"] != "assistant":
                messages.append({"role": "assistant", "content": ""})
            messages[-1].setdefault("tool_calls", []).append(_call(where, item))
        elif kind == "function_call_output":
            call_id = _string(where, item, "call_id")
            content = _text(f"{where}.output", item.get("output"), of_tool=True)
            messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            reasoning = _text(f"{where}.content", item.get("content") or "", ("reasoning_text",))
            continue
        if reasoning and messages[-1]["role"] == "assistant":
            messages[-1]["reasoning_content"] = reasoning
        reasoning = ""
    return messages


def _message(where: str, item: Json) -> Json:
    role = item.get("role")
    if role not in ("user", "assistant", "system", "developer"):
        raise invalid(f"{where}.role", f"{role!r:.60} is not user, assistant, system or developer")
    return {
        "role": "system" if role == "developer" else role,
        "content": _text(f"{where}.content", item.get("content")),
    }


def _call(where: str, item: Json) -> Json:
    name = chat_name(item.get("namespace"), _string(where, item, "name"))
    function = {"name": name, "arguments": _string(where, item, "arguments")}
    return {"id": _string(where, item, "call_id"), "type": "function", "function": function}


def _text(where: str, content: object, kinds: tuple[str, ...] = _TEXT_PARTS, *, of_tool: bool = False) -> str:
    """Text, or a list of parts that have text. `of_tool`: it is a tool's result, which may have others."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(where, "expected text or a list of parts")
    texts: list[str] = []
    for index, part in enumerate(content):
        at, kind = f"{where}[{index}]", part.get("type") if isinstance(part, dict) else None
        if kind in kinds and isinstance(part.get("text"), str):
            texts.append(part["text"])
        elif of_tool and kind not in kinds:
            texts.append(unseen(at, kind))
        else:
            raise unsupported(at, f"only parts of type {kinds[0]!r} are supported")
    return "".join(texts)


def _string(where: str, item: Json, name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise invalid(f"{where}.{name}", "expected text")
    return value
