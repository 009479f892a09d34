"""`/v1/messages`: the Messages API of Anthropic, translated to a chat."""

from __future__ import annotations

import json
import uuid
from collections.abc import AsyncIterator

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.core import RequestOutput
from ssd.server.answers import STREAMED, named_event_stream, usage
from ssd.server.chat import parsed, prompt_tokens, start_chat
from ssd.server.errors import MESSAGES_ERROR_RESPONSES, ApiError, AsciiJSON, api_error, unsupported
from ssd.server.generation import Generation, ServerState
from ssd.server.message_events import MessageWriter
from ssd.server.parsing import MessageFormat, parse
from ssd.server.protocol import ChatRequest, Json, Jsons, SamplingRequest, Stops, Strict
from ssd.text.tokenizer import IncrementalDecoder, Tokenizer

router = APIRouter()


class CountTokensRequest(Strict):
    """What the prompt is made of."""

    model: str
    messages: Jsons
    system: str | Jsons | None = None
    tools: Jsons | None = None
    tool_choice: Json | None = None
    thinking: Json | None = None
    chat_template_kwargs: Json | None = None


class MessagesRequest(CountTokensRequest, SamplingRequest):
    max_tokens: int
    stop_sequences: Stops | None = None
    metadata: Json | None = None  # user_id: another name of user


@router.post("/v1/messages", responses={**STREAMED, **MESSAGES_ERROR_RESPONSES})
async def create_message(body: MessagesRequest, request: Request) -> Response:
    state = ServerState.of(request)
    generation, form = await start_chat(state, _chat(body), request)
    head = {
        "id": f"msg_{uuid.uuid4().hex}",
        "type": "message",
        "role": "assistant",
        "model": state.options.served_model_name,
    }
    if body.stream:
        request_id = request.state.request_id
        return named_event_stream(_events(head, generation, form, state.llm.tokenizer, request_id))
    output, writer = await generation.finish(), MessageWriter()
    for event in parse(output.text, form):
        writer.add(event)
    stop = _stop(output, writer, state.llm.tokenizer)
    return AsciiJSON({**head, "content": writer.content, **stop, "usage": _usage(output)})


@router.post("/v1/messages/count_tokens", responses=MESSAGES_ERROR_RESPONSES)
async def count_tokens(body: CountTokensRequest, request: Request) -> dict[str, int]:
    chat = _chat(MessagesRequest(**body.model_dump(), max_tokens=1))
    return {"input_tokens": len(await prompt_tokens(ServerState.of(request), chat, request))}


async def _events(
    head: Json, generation: Generation, form: MessageFormat, tokenizer: Tokenizer, request_id: str
) -> AsyncIterator[Json]:
    counts = {"input_tokens": len(generation.prompt_token_ids), "output_tokens": 0}
    empty: Json = {"content": [], "stop_reason": None, "stop_sequence": None, "usage": counts}
    yield {"type": "message_start", "message": {**head, **empty}}
    writer = MessageWriter()
    try:
        async for event in parsed(generation, form):
            for sent in writer.add(event):
                yield sent
    except Exception as error:
        yield api_error(error).messages_body(request_id)
        return
    for sent in writer.close():
        yield sent
    output = generation.output
    yield {"type": "message_delta", "delta": _stop(output, writer, tokenizer), "usage": _usage(output)}
    yield {"type": "message_stop"}


def _usage(output: RequestOutput) -> Json:
    counts = usage([output])
    cached = counts["prompt_tokens_details"]["cached_tokens"]
    return {
        "input_tokens": counts["prompt_tokens"] - cached,  # the total is the sum of both
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": counts["completion_tokens"],
        "output_tokens_details": counts["completion_tokens_details"],
    }


def _stop(output: RequestOutput, writer: MessageWriter, tokenizer: Tokenizer) -> Json:
    """Why the message ended."""
    sequence = _stop_sequence(output, tokenizer) if output.finish_reason == "stop" else None
    if output.finish_reason == "length":
        reason = "max_tokens"
    elif sequence is not None:
        reason = "stop_sequence"
    else:
        reason = "tool_use" if any(block["type"] == "tool_use" for block in writer.content) else "end_turn"
    return {"stop_reason": reason, "stop_sequence": sequence}


def _stop_sequence(output: RequestOutput, tokenizer: Tokenizer) -> str | None:
    """The stop string that has cut the text: what its tokens say after it."""
    if not output.params.stop:
        return None
    shown = output.params.shown_token_ids
    decoder = IncrementalDecoder(tokenizer, output.prompt_token_ids, shown_token_ids=shown)
    rest = (decoder.push(*output.token_ids) + decoder.flush())[len(output.text) :]
    return min((stop for stop in output.params.stop if rest.startswith(stop)), key=len, default=None)


# --- the request as a chat --------------------------------------------------------------------------------------------


def _chat(body: MessagesRequest) -> ChatRequest:
    same = {name: getattr(body, name) for name in SamplingRequest.model_fields}
    if body.metadata is not None:
        _check_names("metadata", body.metadata, ("user_id",))
        same["user"] = body.metadata.get("user_id", body.user)
    if body.stop is not None and body.stop_sequences is not None:
        raise _invalid("stop_sequences", "give either this or stop")
    messages = _messages(body)
    choice, parallel = _tool_choice(body.tool_choice)
    return ChatRequest(
        **{**same, "stop": body.stop if body.stop_sequences is None else body.stop_sequences},
        messages=messages,
        max_tokens=body.max_tokens,
        continue_final_message=bool(messages) and messages[-1]["role"] == "assistant",
        tools=[_tool(i, tool) for i, tool in enumerate(body.tools or [])] or None,
        tool_choice=choice,
        parallel_tool_calls=parallel,
        chat_template_kwargs={**_thinking(body.thinking), **(body.chat_template_kwargs or {})} or None,
    )


def _thinking(thinking: Json | None) -> Json:
    """As the variable that templates of reasoning models know."""
    if thinking in (None, {"type": "adaptive"}):
        return {}
    if thinking == {"type": "disabled"}:
        return {"enable_thinking": False}
    raise unsupported("thinking", "only {'type': 'adaptive'} and {'type': 'disabled'} are supported")


def _tool(index: int, tool: Json) -> Json:
    where = f"tools[{index}]"
    if tool.get("type", "custom") != "custom":
        raise unsupported(f"{where}.type", "only tools with a name and an input_schema are supported")
    _check_names(where, tool, ("type", "name", "description", "input_schema", "strict", "cache_control"))
    function = {name: tool[name] for name in ("name", "description", "strict") if name in tool}
    return {"type": "function", "function": {**function, "parameters": tool.get("input_schema")}}


def _tool_choice(choice: Json | None) -> tuple[str | Json | None, bool | None]:
    """Chat's `tool_choice` and `parallel_tool_calls`."""
    if choice is None:
        return None, None
    _check_names("tool_choice", choice, ("type", "name", "disable_parallel_tool_use"))
    kind, single = str(choice.get("type")), choice.get("disable_parallel_tool_use")
    kinds: dict[str, str | Json] = {
        "auto": "auto",
        "none": "none",
        "any": "required",
        "tool": {"type": "function", "function": {"name": choice.get("name")}},
    }
    if kind not in kinds:
        raise _invalid("tool_choice", f"type {kind!r:.60} is not auto, any, tool or none")
    if not isinstance(single, (bool, type(None))):
        raise _invalid("tool_choice.disable_parallel_tool_use", "expected true or false")
    return kinds[kind], None if single is None else not single


def _messages(body: MessagesRequest) -> list[Json]:
    messages: list[Json] = []
    if body.system:
        messages.append({"role": "system", "content": _text("system", body.system)})
    for index, message in enumerate(body.messages):
        where, role = f"messages[{index}]", message.get("role")
        _check_names(where, message, ("role", "content"))
        content = message.get("content")
        if role == "user":
            messages += _user(where, content)
        elif role == "assistant":
            messages.append(_assistant(where, content))
        else:
            raise _invalid(f"{where}.role", f"{role!r:.60} is neither user nor assistant")
    return messages


def _user(where: str, content: object) -> list[Json]:
    """Tool results are messages of their own, which come first."""
    if isinstance(content, str):
        return [{"role": "user", "content": content}]
    results, texts = [], []
    for at, block in _blocks(where, content):
        if block.get("type") == "tool_result":
            _check_names(at, block, ("type", "tool_use_id", "content", "is_error", "cache_control"))
            text = _text(f"{at}.content", block.get("content") or "")
            text = f"Error: {text}" if block.get("is_error") else text
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            texts.append(_block_text(at, block))
    return [*results, {"role": "user", "content": "".join(texts)}] if texts else results


def _assistant(where: str, content: object) -> Json:
    if isinstance(content, str):
        return {"role": "assistant", "content": content}
    message: Json = {"role": "assistant", "content": ""}
    for at, block in _blocks(where, content):
        if block.get("type") == "tool_use":
            _check_names(at, block, ("type", "id", "name", "input", "cache_control"))
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            function = {"name": block.get("name"), "arguments": arguments}
            call = {"id": block.get("id"), "type": "function", "function": function}
            message.setdefault("tool_calls", []).append(call)
        elif block.get("type") == "thinking":
            _check_names(at, block, ("type", "thinking", "signature"))
            message["reasoning_content"] = message.get("reasoning_content", "") + str(block.get("thinking", ""))
        else:
            message["content"] += _block_text(at, block)
    return message


def _blocks(where: str, content: object) -> list[tuple[str, Json]]:
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise _invalid(f"{where}.content", "expected text or a list of content blocks")
    return [(f"{where}.content[{i}]", block) for i, block in enumerate(content)]


def _text(where: str, content: object) -> str:
    """Text, or a list of text blocks."""
    return content if isinstance(content, str) else "".join(_block_text(at, b) for at, b in _blocks(where, content))


def _block_text(where: str, block: Json) -> str:
    """`cache_control` changes nothing: the prefix cache is always on."""
    if block.get("type") != "text":
        raise unsupported(f"{where}.type", f"blocks of type {block.get('type')!r:.60} are not supported")
    _check_names(where, block, ("type", "text", "cache_control"))
    if not isinstance(block.get("text"), str):
        raise _invalid(f"{where}.text", "expected text")
    return str(block["text"])


def _check_names(where: str, value: Json, known: tuple[str, ...]) -> None:
    if unknown := {name for name in value if value[name] is not None} - set(known):
        raise unsupported(f"{where}.{min(unknown):.60}", "is not a known field")


def _invalid(where: str, why: str) -> ApiError:
    return ApiError(400, f"{where}: {why}", param=where)
