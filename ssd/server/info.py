"""Small endpoints: models, tokens, health, version."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from ssd.errors import RequestError
from ssd.server.answers import check_model
from ssd.server.errors import ApiError
from ssd.server.generation import ServerState
from ssd.server.http.bodies import JsonRoute, on_thread
from ssd.server.ignored import current
from ssd.server.protocol import DetokenizeRequest, TokenizeRequest
from ssd.version import VERSION

router = APIRouter(route_class=JsonRoute)


@router.get("/v1/models")
async def models(request: Request) -> dict[str, Any]:
    return {"object": "list", "data": [_model(ServerState.of(request))]}


@router.get("/v1/models/{model:path}")
async def model(model: str, request: Request) -> dict[str, Any]:
    state = ServerState.of(request)
    check_model(state, model)
    return _model(state)


def _model(state: ServerState) -> dict[str, Any]:
    return {
        "id": state.options.served_model_name,
        "object": "model",
        "created": state.started,
        "owned_by": "ssd",
        "max_model_len": state.llm.driver.limits.max_model_len,
    }


@router.post("/tokenize")
async def tokenize(body: TokenizeRequest, request: Request) -> dict[str, Any]:
    state = ServerState.of(request)
    check_model(state, body.model)
    token_ids = await on_thread(request.state.large, _encoded, state, body)
    counts = {"count": len(token_ids), "max_model_len": state.llm.driver.limits.max_model_len}
    return {"tokens": token_ids, **counts, **current().answer}


def _encoded(state: ServerState, body: TokenizeRequest) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("prompt: pass either a prompt or messages")
    if body.prompt is not None:
        return state.llm.tokenizer.encode(body.prompt, body.add_special_tokens is not False)
    options = {**(body.chat_template_kwargs or {}), "add_generation_prompt": body.add_generation_prompt is not False}
    return state.llm.tokenizer.encode(state.llm.render_chat(body.messages or [], options), add_special_tokens=False)


@router.post("/detokenize")
async def detokenize(body: DetokenizeRequest, request: Request) -> dict[str, Any]:
    state = ServerState.of(request)
    check_model(state, body.model)
    if max(body.tokens, default=0) >= state.llm.driver.limits.vocab_size:
        raise RequestError(f"tokens: the vocabulary has {state.llm.driver.limits.vocab_size} tokens")
    text = await on_thread(request.state.large, state.llm.decode, body.tokens, bool(body.skip_special_tokens))
    return {"prompt": text, **current().answer}


@router.get("/health")
async def health(request: Request) -> dict[str, str]:
    """Liveness: fails when the engine has failed, and the process should be restarted."""
    failure = ServerState.of(request).llm.driver.failure
    if failure is not None:
        raise ApiError(500, failure, code="engine_failed")
    return {"status": "ok"}


@router.get("/health/ready")
async def ready(request: Request) -> dict[str, str]:
    """Readiness: fails also while the server drains, and should get no more requests."""
    if ServerState.of(request).admission.draining:
        raise ApiError(503, "the server is shutting down", code="draining")
    return await health(request)


@router.get("/version")
async def version() -> dict[str, str]:
    return {"version": VERSION}
