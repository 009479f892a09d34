"""`/v1/messages`: the Messages API of Anthropic, translated to a chat."""

from __future__ import annotations

import json
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.server import parameters
from ssd.server.answers import STREAMED, named_event_stream
from ssd.server.anthropic.message_events import AnthropicMessageWriter
from ssd.server.chat_messages import unseen
from ssd.server.effort import effort_options
from ssd.server.errors import MESSAGES_ERROR_RESPONSES, invalid, renaming, unsupported
from ssd.server.fields import known_fields
from ssd.server.generation import ServerState
from ssd.server.http.bodies import JsonRoute, on_thread
from ssd.server.ignored import current
from ssd.server.openai.chat import prompt_tokens, respond, start_chat
from ssd.server.protocol import ChatRequest, Json, Jsons, PublishedRequest, SamplingRequest, Stops, schema_format

router = APIRouter(route_class=JsonRoute)


_FIELD_NAMES: Final = {
    "response_format.json_schema": "output_config.format",
    "tools[].function.parameters": "tools[].input_schema",
    "tools[].function": "tools[]",
}
# Claude Code's first block of `system`: for bills, and different in every conversation, so that no prompt would begin
# like an earlier one
_BILLING: Final = "x-anthropic-billing-header:"


class CountTokensRequest(PublishedRequest):
    """What the prompt is made of."""

    published = parameters.MESSAGES
    model: str
    messages: Jsons
    system: str | Jsons | None = None
    tools: Jsons | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    output_config: Json | None = None  # with `format` and `effort`
    chat_template_kwargs: Json | None = None


class MessagesRequest(CountTokensRequest, SamplingRequest):
    max_tokens: int
    stop_sequences: Stops | None = None
    metadata: Json | None = None  # with `user_id`, another name of `user`


@router.post("/v1/messages", responses={**STREAMED, **MESSAGES_ERROR_RESPONSES})
async def create_message(body: MessagesRequest, request: Request) -> Response:
    state = ServerState.of(request)
    with renaming(_FIELD_NAMES | ({} if body.stop_sequences is None else {"stop": "stop_sequences"})):
        generation, form = await start_chat(state, await on_thread(request.state.large, _chat, body), request)
    model, num_prompt_tokens = state.options.served_model_name, len(generation.prompt_token_ids)
    writer = AnthropicMessageWriter(model, request.state.request_id, num_prompt_tokens, state.llm.tokenizer)
    return await respond(generation, form, writer, named_event_stream if body.stream else None)


@router.post("/v1/messages/count_tokens", responses=MESSAGES_ERROR_RESPONSES)
async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, Any]:
    with renaming(_FIELD_NAMES):
        chat = await on_thread(request.state.large, lambda: _chat(MessagesRequest(**dict(body), max_tokens=1)))
        token_ids = await prompt_tokens(ServerState.of(request), chat, request)
    return {"input_tokens": len(token_ids), **current().answer}


# --- the request as a chat --------------------------------------------------------------------------------------------


def _chat(body: MessagesRequest) -> ChatRequest:
    same = {name: getattr(body, name) for name in SamplingRequest.model_fields}
    if body.metadata is not None:
        known_fields("metadata", body.metadata, ("user_id",))
        same["user"] = body.metadata.get("user_id", body.user)
    if body.stop is not None and body.stop_sequences is not None:
        raise invalid("stop_sequences", "give either this or stop")
    messages = _messages(body)
    choice, parallel = _tool_choice(body.tool_choice)
    output = body.output_config or {}
    known_fields("output_config", output, ("effort", "format"), parameters.OUTPUT_CONFIG)
    effort = effort_options("output_config.effort", output.get("effort"))
    return ChatRequest(
        **{**same, "stop": body.stop if body.stop_sequences is None else body.stop_sequences},
        messages=messages,
        max_tokens=body.max_tokens,
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
        tools=[_tool(i, tool) for i, tool in enumerate(body.tools or [])] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        response_format=_response_format(output.get("format")),
        chat_template_kwargs={**effort, **_thinking(body.thinking), **(body.chat_template_kwargs or {})} or None,
    )


def _response_format(form: object) -> Json | None:
    if not form:
        return None
    if not isinstance(form, dict) or form.get("type") != "json_schema":
        raise invalid("output_config.format", "expected {'type': 'json_schema', 'schema': {…}}")
    return schema_format("output_config.format", form)


def _thinking(thinking: Json | None) -> Json:
    """As the variable that templates of reasoning models know."""
    if thinking is None:
        return {}
    known_fields("thinking", thinking, ("type",), parameters.THINKING)
    kinds: dict[object, Json] = {
        "adaptive": {},
        "enabled": {"enable_thinking": True},
        "disabled": {"enable_thinking": False},
    }
    kind = thinking.get("type")
    if not isinstance(kind, str) or kind not in kinds:
        raise invalid("thinking.type", f"{kind!r:.60} is not adaptive, enabled or disabled")
    return kinds[kind]


def _tool(index: int, tool: Json) -> Json:
    where = f"tools[{index}]"
    if (tool.get("type") or "custom") != "custom":
        raise unsupported(f"{where}.type", "only tools with a name and an input_schema are supported")
    known_fields(where, tool, ("type", "name", "description", "input_schema", "strict"), parameters.MESSAGES_TOOL)
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _tool_choice(choice: Json | None) -> tuple[str | Json | None, bool | None]:
    """Chat's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    known_fields("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    kind, single = str(choice.get("type")), choice.get("disable_parallel_tool_use")
    kinds: dict[str, str | Json] = {
        "auto": "auto",
        "none": "none",
        "any": "required",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if kind not in kinds:
        raise invalid("tool_choice", f"type {kind!r:.60} is not auto, any, tool or none")
    if not isinstance(single, (bool, type(None))):
        raise invalid("tool_choice.disable_parallel_tool_use", "expected true or false")
    return kinds[kind], None if single is None else not single


def _messages(body: MessagesRequest) -> list[Json]:
    messages: list[Json] = []
    if body.system and (system := _system(body.system)):
        messages.append({"role": "system", "content": system})
    for index, message in enumerate(body.messages):
        where, role = f"messages[{index}]", message.get("role")
        known_fields(where, message, ("role", "content"))
        content = message.get("content")
        if role == "user":
            messages += _user(where, content)
        elif role == "assistant":
            messages.append(_assistant(where, content))
        elif role == "system":
            messages.append({"role": "system", "content": _text(f"{where}.content", content)})
        else:
            raise invalid(f"{where}.role", f"{role!r:.60} is not user, assistant or system")
    return messages


def _system(content: str | Jsons) -> str:
    if isinstance(content, list) and str(content[0].get("text", "")).startswith(_BILLING):
        content = [{**content[0], "text": ""}, *content[1:]]
    return _text("system", content)


def _user(where: str, content: object) -> list[Json]:
    """Tool results are messages of their own, which come first."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, texts = [], []
    for at, block in _blocks(f"{where}.content", content):
        if block.get("type") == "tool_result":
            known_fields(at, block, ("type", "tool_use_id", "content", "is_error"), parameters.MESSAGES_BLOCK)
            text = _result(f"{at}.content", block.get("content") or "")
            text = f"Error: {text}" if block.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            texts.append(_block_text(at, block))
    return [*results, {"role": "user", "content": "".join(texts)}] if texts else results


def _assistant(where: str, content: object) -> Json:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    message: Json = {"role": "assistant", "content": ""}
    for at, block in _blocks(f"{where}.content", content):
        if block.get("type") == "tool_use":
            known_fields(at, block, ("type", "id", "name", "input"), parameters.MESSAGES_BLOCK)
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif block.get("type") == "thinking":
            known_fields(at, block, ("type", "thinking"), parameters.MESSAGES_BLOCK)
            message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
        else:
            message["content"] += _block_text(at, block)
    return message


def _blocks(where: str, content: object) -> list[tuple[str, Json]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise invalid(where, "expected text or a list of content blocks")
    return [(f"{where}[{i}]", block) for i, block in enumerate(content)]


def _text(where: str, content: object) -> str:
    """Text, or a list of text blocks."""
    return content if isinstance(content, str) else "".join(_block_text(at, b) for at, b in _blocks(where, content))


def _result(where: str, content: object) -> str:
    """The text of a tool's result. A reference to a tool is its name: the tool itself is one of the request's."""
    if isinstance(content, str):
        return content
    texts = []
    for at, block in _blocks(where, content):
        if block.get("type") == "text":
            texts.append(_block_text(at, block))
        elif block.get("type") == "tool_reference":
            texts.append(f"[tool: {block.get('tool_name')!s:.64}]")
        else:
            texts.append(unseen(at, block.get("type")))
    return "".join(texts)


def _block_text(where: str, block: Json) -> str:
    if block.get("type") != "text":
        raise unsupported(f"{where}.type", f"blocks of type {block.get('type')!r:.60} are not supported")
    known_fields(where, block, ("type", "text"), parameters.MESSAGES_BLOCK)
    if not isinstance(block.get("text"), str):
        raise invalid(f"{where}.text", "expected text")
    return str(block["text"])
