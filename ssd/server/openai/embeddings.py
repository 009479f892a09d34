"""`/v1/embeddings`: the pooled hidden states of texts, or of token ids."""

from __future__ import annotations

import base64
from collections.abc import Sequence as Seq
from typing import Any, Literal

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.core import SamplingParams
from ssd.llm import Prompt, embedding_of
from ssd.server.answers import check_model
from ssd.server.errors import AsciiJSON, renaming
from ssd.server.generation import ServerState, start
from ssd.server.http.bodies import JsonRoute
from ssd.server.ignored import current
from ssd.server.protocol import EmbeddingRequest, listed

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    state = ServerState.of(request)
    request.state.user = body.user
    check_model(state, body.model)
    vectors, count = await embedded(state, listed(body.input), body.pooling or "mean", request)
    encoded = [_encoded(vector, body.encoding_format) for vector in vectors]
    return AsciiJSON(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(encoded)],
            "model": state.options.served_model_name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            **current().answer,
        }
    )


async def embedded(
    state: ServerState, prompts: Seq[Prompt], pooling: Literal["mean", "last"], request: Request
) -> tuple[list[list[float]], int]:
    """The embeddings of all prompts, and the number of their tokens."""
    params = SamplingParams(max_new_tokens=1, pooling=pooling)
    with renaming({"prompt": "input"}):
        generations = await start(state, prompts, params, request=request, stream=False)
    try:
        outputs = [await generation.finish() for generation in generations]
    finally:
        for generation in generations:
            generation.abort()
    return [embedding_of(output) for output in outputs], sum(len(output.prompt_token_ids) for output in outputs)


def _encoded(vector: list[float], encoding_format: str | None) -> Any:
    """As numbers, or as float32 in little-endian order, in base64."""
    if encoding_format != "base64":
        return vector
    return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode("ascii")
