"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.core import Sample, SamplingParams
from ssd.errors import RequestError
from ssd.llm import LLM, Prompt
from ssd.server.answers import STREAMED, chat_logprobs, check_common, event_stream, usage, worth_sending
from ssd.server.chat_messages import message_delta, message_fields, template_message
from ssd.server.constraints import constrained
from ssd.server.errors import ApiError, AsciiJSON
from ssd.server.generation import Generation, Piece, ServerState, start
from ssd.server.parsing import Event, MessageFormat, parse
from ssd.server.protocol import ChatRequest
from ssd.server.tool_use import ToolUse, message_format, read_tools, special_tags

router = APIRouter()
_PROMPT_END: Final = 8  # tokens of the prompt that may open a block of reasoning
_END: Final = "\x00end of the message\x00"  # marks where a message to be continued ends in the rendered chat


@router.post("/v1/chat/completions", responses=STREAMED)
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state = ServerState.of(request)
    generation, form = await start_chat(state, body, request)
    head = {
        "id": f"chatcmpl-{request.state.request_id}",
        "created": int(time.time()),
        "model": state.options.served_model_name,
    }
    if body.stream:
        return event_stream(_chunks(head, body, generation, form))
    output = await generation.finish()
    choices = [_choice(body, sample, form) for sample in output.samples]
    answer = {**head, "object": "chat.completion", "choices": choices, "usage": usage([output])}
    return AsciiJSON(answer | ({"prompt_token_ids": generation.prompt_token_ids} if body.return_token_ids else {}))


async def start_chat(state: ServerState, body: ChatRequest, request: Request) -> tuple[Generation, MessageFormat]:
    """Submits a chat; also returns how its messages are parsed. Other endpoints translate their requests to chats."""
    check_common(request, body)
    params = constrained(body, _params(body, state.llm.driver.limits.max_model_len))
    prompt, options, template, tools = await asyncio.to_thread(_read, state, body)
    if tools is not None:
        params = tools.constrained(params)
    params = replace(params, shown_token_ids=special_tags(template, tools, state.llm.tokenizer))
    generation = await start(state, prompt, params, chat_options=options, request=request, stream=bool(body.stream))
    prompt_end = state.llm.decode(generation.prompt_token_ids[-_PROMPT_END:], skip_special_tokens=False)
    return generation, message_format(template, prompt_end, tools)


async def prompt_tokens(state: ServerState, body: ChatRequest, request: Request) -> list[int]:
    """The tokens of a chat's prompt."""
    check_common(request, body)
    prompt, options, _, _ = await asyncio.to_thread(_read, state, body)
    return await asyncio.to_thread(state.llm.encode, prompt, options)


async def parsed(generation: Generation, form: MessageFormat) -> AsyncIterator[Event]:
    """The events of a chat with one sample."""
    parser = form.parser()
    async for piece in generation.pieces():
        for event in parser.feed(piece.text):
            yield event
    for event in parser.finish():
        yield event


def _params(body: ChatRequest, max_model_len: int) -> SamplingParams:
    given = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(given) > 1:
        raise ApiError(400, "max_completion_tokens: differs from max_tokens", param="max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs=true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling_params(max_tokens=next(iter(given), max_model_len), logprobs=logprobs)


def _read(state: ServerState, body: ChatRequest) -> tuple[Prompt, dict[str, Any], str, ToolUse | None]:
    """The prompt, its chat options, the chat template and the tools."""
    prompt, options = _prompt(state.llm, body)
    template = state.llm.tokenizer.template_source(body.chat_template, body.tools)
    return prompt, options, template, read_tools(body, template, state.options.tool_parser, state.llm.tokenizer)


def _prompt(llm: LLM, body: ChatRequest) -> tuple[Prompt, dict[str, Any]]:
    """The prompt and its chat options."""
    options = dict(body.chat_template_kwargs or {})
    if body.tools and body.tool_choice != "none":
        options["tools"] = body.tools
    messages = [template_message(f"messages[{i}]", message) for i, message in enumerate(body.messages)]
    if not body.messages:
        raise ApiError(400, "messages: the list is empty", param="messages")
    for name in ("chat_template", "add_generation_prompt"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if not body.continue_final_message:
        return messages, options
    if body.add_generation_prompt:
        raise ApiError(400, "continue_final_message: contradicts add_generation_prompt", param="continue_final_message")
    return _continued(llm, messages, options), {}


def _continued(llm: LLM, messages: list[dict[str, Any]], options: dict[str, Any]) -> list[int]:
    """The rendered chat up to the end of its last message."""
    *before, last = messages
    if not isinstance(last.get("content"), str):
        raise RequestError("continue_final_message: the last message has no text")
    marked = [*before, {**last, "content": last["content"] + _END}]
    text, found, _ = llm.render_chat(marked, {**options, "add_generation_prompt": False}).rpartition(_END)
    if not found:
        raise RequestError("continue_final_message: the model's chat template leaves out the last message")
    return llm.tokenizer.encode(text, add_special_tokens=False)


def _choice(body: ChatRequest, sample: Sample, form: MessageFormat) -> dict[str, Any]:
    fields = message_fields(parse(sample.text, form))
    called = sample.finish_reason == "stop" and "tool_calls" in fields
    choice = {
        "index": sample.index,
        "message": {"role": "assistant", **fields},
        "logprobs": None if sample.logprobs is None else chat_logprobs(sample.logprobs),
        "finish_reason": "tool_calls" if called else sample.finish_reason,
    }
    return choice | ({"token_ids": sample.token_ids} if body.return_token_ids else {})


async def _chunks(
    head: dict[str, Any], body: ChatRequest, generation: Generation, form: MessageFormat
) -> AsyncIterator[dict[str, Any]]:
    head = {**head, "object": "chat.completion.chunk"}
    more = {"usage": None} if body.include_usage else {}
    role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    samples = [_StreamedSample(form) for _ in range(body.n or 1)]
    for index in range(len(samples)):
        yield {**head, "choices": [{"index": index, **role}], **more}
    async for piece in generation.pieces():
        if worth_sending(body, piece):
            yield {**head, "choices": [samples[piece.index].choice(body, piece)], **more}
    if body.include_usage:
        yield {**head, "choices": [], "usage": usage([generation.output])}


class _StreamedSample:
    """The chunks of one sample."""

    def __init__(self, form: MessageFormat) -> None:
        self._parser = form.parser()
        self._called = False

    def choice(self, body: ChatRequest, piece: Piece) -> dict[str, Any]:
        events = self._parser.feed(piece.text) + (self._parser.finish() if piece.finish_reason else [])
        delta = message_delta(events)
        self._called |= "tool_calls" in delta
        choice = {
            "index": piece.index,
            "delta": delta,
            "logprobs": chat_logprobs(piece.logprobs) if body.logprobs else None,
            "finish_reason": "tool_calls" if self._called and piece.finish_reason == "stop" else piece.finish_reason,
        }
        return choice | ({"token_ids": piece.token_ids} if body.return_token_ids else {})
