"""`/v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.core import Sample, SamplingParams
from ssd.errors import RequestError
from ssd.llm import LLM, Prompt
from ssd.server.answers import chat_logprobs, check_common, event_stream, usage, worth_sending
from ssd.server.constraints import constrained
from ssd.server.errors import ApiError, AsciiJSON
from ssd.server.generation import Generation, Piece, ServerState, start
from ssd.server.protocol import ChatRequest

router = APIRouter()
_END: Final = "\x00end of the message\x00"  # marks where a message to be continued ends in the rendered chat


@router.post("/v1/chat/completions")
async def chat_completions(body: ChatRequest, request: Request) -> Response:
    state = ServerState.of(request)
    check_common(request, body)
    params = constrained(body, _params(body, state.llm.driver.limits.max_model_len))
    prompt, options = await asyncio.to_thread(_prompt, state.llm, body)
    streamed = bool(body.stream)
    generation = await start(state, prompt, params, chat_options=options, request=request, stream=streamed)
    head = {
        "id": f"chatcmpl-{request.state.request_id}",
        "created": int(time.time()),
        "model": state.options.served_model_name,
    }
    if streamed:
        return event_stream(_chunks(head, body, generation))
    output = await generation.finish()
    choices = [_choice(body, sample) for sample in output.samples]
    answer = {**head, "object": "chat.completion", "choices": choices, "usage": usage([output])}
    return AsciiJSON(answer | ({"prompt_token_ids": generation.prompt_token_ids} if body.return_token_ids else {}))


def _params(body: ChatRequest, max_model_len: int) -> SamplingParams:
    given = {limit for limit in (body.max_tokens, body.max_completion_tokens) if limit is not None}
    if len(given) > 1:
        raise ApiError(400, "max_completion_tokens: differs from max_tokens", param="max_completion_tokens")
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, "top_logprobs: only with logprobs=true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    return body.sampling_params(max_tokens=next(iter(given), max_model_len), logprobs=logprobs)


def _prompt(llm: LLM, body: ChatRequest) -> tuple[Prompt, dict[str, Any]]:
    """The prompt and its chat options."""
    options = dict(body.chat_template_kwargs or {})
    if not body.messages:
        raise ApiError(400, "messages: the list is empty", param="messages")
    for name in ("chat_template", "add_generation_prompt"):
        if (value := getattr(body, name)) is not None:
            options[name] = value
    if not body.continue_final_message:
        return body.messages, options
    if body.add_generation_prompt:
        raise ApiError(400, "continue_final_message: contradicts add_generation_prompt", param="continue_final_message")
    return _continued(llm, body.messages, options), {}


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


def _choice(body: ChatRequest, sample: Sample) -> dict[str, Any]:
    choice = {
        "index": sample.index,
        "message": {"role": "assistant", "content": sample.text},
        "logprobs": None if sample.logprobs is None else chat_logprobs(sample.logprobs),
        "finish_reason": sample.finish_reason,
    }
    return choice | ({"token_ids": sample.token_ids} if body.return_token_ids else {})


async def _chunks(head: dict[str, Any], body: ChatRequest, generation: Generation) -> AsyncIterator[dict[str, Any]]:
    head = {**head, "object": "chat.completion.chunk"}
    more = {"usage": None} if body.include_usage else {}
    role = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    for index in range(body.n or 1):
        yield {**head, "choices": [{"index": index, **role}], **more}
    async for piece in generation.pieces():
        if worth_sending(body, piece):
            yield {**head, "choices": [_chunk_choice(body, piece)], **more}
    if body.include_usage:
        yield {**head, "choices": [], "usage": usage([generation.output])}


def _chunk_choice(body: ChatRequest, piece: Piece) -> dict[str, Any]:
    choice = {
        "index": piece.index,
        "delta": {"content": piece.text},
        "logprobs": chat_logprobs(piece.logprobs) if body.logprobs else None,
        "finish_reason": piece.finish_reason,
    }
    return choice | ({"token_ids": piece.token_ids} if body.return_token_ids else {})
