"""`/v1/embeddings`: the pooled hidden states of texts, or of token ids."""

from __future__ import annotations

import base64
from typing import Any

import numpy as np
from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.core import SamplingParams
from ssd.llm import embedding_of
from ssd.server.answers import check_model
from ssd.server.errors import AsciiJSON, renaming
from ssd.server.generation import ServerState, start
from ssd.server.http.bodies import JsonRoute
from ssd.server.ignored import current
from ssd.server.protocol import EmbeddingRequest

router = APIRouter(route_class=JsonRoute)


@router.post("/v1/embeddings")
async def embeddings(body: EmbeddingRequest, request: Request) -> Response:
    state = ServerState.of(request)
    request.state.user = body.user
    check_model(state, body.model)
    params = SamplingParams(max_new_tokens=1, pooling=body.pooling or "mean")
    with renaming({"prompt": "input"}):
        generations = await start(state, body.prompts, params, request=request, stream=False)
    try:
        outputs = [await generation.finish() for generation in generations]
    finally:
        for generation in generations:
            generation.abort()
    vectors = [_encoded(embedding_of(output), body.encoding_format) for output in outputs]
    count = sum(len(output.prompt_token_ids) for output in outputs)
    return AsciiJSON(
        {
            "object": "list",
            "data": [{"object": "embedding", "index": i, "embedding": vector} for i, vector in enumerate(vectors)],
            "model": state.options.served_model_name,
            "usage": {"prompt_tokens": count, "total_tokens": count},
            **current().answer,
        }
    )


def _encoded(vector: list[float], encoding_format: str | None) -> Any:
    """As numbers, or as float32 in little-endian order, in base64."""
    if encoding_format != "base64":
        return vector
    return base64.b64encode(np.array(vector, dtype="<f4").tobytes()).decode("ascii")
