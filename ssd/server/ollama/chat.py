"""`/api/chat`, `/api/generate` and `/api/embed`: Ollama's API, translated to that of chats and embeddings."""

from __future__ import annotations

import time
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.server.answers import LINES, check_common, check_model, line_stream
from ssd.server.errors import OLLAMA_ERROR_RESPONSES, AsciiJSON, renaming
from ssd.server.generation import Generation, ServerState, start
from ssd.server.http.bodies import JsonRoute, on_thread
from ssd.server.ignored import current
from ssd.server.ollama.protocol import (
    FIELD_NAMES,
    EmbedRequest,
    GenerateRequest,
    GeneratingRequest,
    OllamaChatRequest,
)
from ssd.server.ollama.writer import OllamaWriter, done, nanoseconds
from ssd.server.openai.chat import respond, start_chat
from ssd.server.openai.embeddings import embedded
from ssd.server.protocol import listed
from ssd.text.message_format import MessageFormat

router = APIRouter(route_class=JsonRoute, responses=OLLAMA_ERROR_RESPONSES)
STREAM: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {LINES: {}}}}  # beside JSON


@router.post("/api/chat", responses=STREAM)
async def chat(body: OllamaChatRequest, request: Request) -> Response:
    """An answer to a conversation."""
    state, loaded = ServerState.of(request), time.perf_counter()
    if body.messages is None:
        return _loaded(body, request, in_message=True)
    with renaming(FIELD_NAMES):
        started = await start_chat(state, await on_thread(request.state.large, lambda: body.chat), request)
    return await _respond(body, request, loaded, started)


@router.post("/api/generate", responses=STREAM)
async def generate(body: GenerateRequest, request: Request) -> Response:
    """An answer to a prompt. With `raw`, and where the model has no chat template, the prompt is continued."""
    state, loaded = ServerState.of(request), time.perf_counter()
    if body.prompt is None:
        return _loaded(body, request, in_message=False)
    with renaming({**FIELD_NAMES, "messages": "prompt"}):
        if body.raw or not state.llm.tokenizer.chat_template_names:
            started = await _continued(state, body, request)
        else:
            started = await start_chat(state, body.chat, request)
    return await _respond(body, request, loaded, started)


@router.post("/api/embed")
async def embed(body: EmbedRequest, request: Request) -> Response:
    """The embeddings of texts: the mean of their tokens' hidden states, of length 1."""
    state, loaded = ServerState.of(request), time.perf_counter()
    check_model(state, body.model)
    vectors, count = await embedded(state, listed(body.input), "mean", request)
    times = {
        "total_duration": nanoseconds(time.perf_counter() - request.state.arrived),
        "load_duration": nanoseconds(loaded - request.state.arrived),
    }
    answer = {"model": body.model, "embeddings": vectors, **times, "prompt_eval_count": count}
    return AsciiJSON(answer | current().answer)


async def _respond(
    body: GeneratingRequest, request: Request, loaded: float, started: tuple[Generation, MessageFormat]
) -> Response:
    in_message = isinstance(body, OllamaChatRequest)
    writer = OllamaWriter(body.model, request.state.arrived, loaded, in_message=in_message)
    return await respond(*started, writer, line_stream if body.stream else None)


async def _continued(state: ServerState, body: GenerateRequest, request: Request) -> tuple[Generation, MessageFormat]:
    """Of a prompt as it is."""
    chat = body.chat
    check_common(request, chat)
    most, opened = state.llm.driver.limits.max_model_len, state.options.additional_properties
    large = request.state.large
    params = await on_thread(large, chat.sampling_params, state.sampling_defaults, most, None, opened)
    [generation] = await start(state, [body.prompt or ""], params, request=request, stream=body.stream)
    return generation, MessageFormat()


def _loaded(body: GeneratingRequest, request: Request, *, in_message: bool) -> Response:
    """The answer to a request without a prompt, which is for the model to be loaded: that has been done."""
    check_model(ServerState.of(request), body.model)
    reason = "unload" if body.keep_alive == 0 else "load"
    return AsciiJSON(done(body.model, reason, in_message=in_message) | current().answer)
