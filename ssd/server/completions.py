"""`/v1/completions`: one prompt or several, as text or token ids."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.core import FinishReason
from ssd.errors import RequestFailed
from ssd.server.answers import STREAMED, CompletionLogprobs, check_common, event_stream, usage, worth_sending
from ssd.server.constraints import constrained
from ssd.server.errors import AsciiJSON, unsupported
from ssd.server.generation import Generation, Piece, ServerState, start_all
from ssd.server.protocol import CompletionRequest

router = APIRouter()
_MAX_TOKENS: Final = 16  # OpenAI's default


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionRequest, request: Request) -> Response:
    state = ServerState.of(request)
    check_common(request, body)
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "log-probabilities of prompts are not supported: leave out echo or logprobs")
    params = constrained(body, body.sampling_params(max_tokens=_MAX_TOKENS, logprobs=body.logprobs))
    generations = await start_all(state, body.prompts, params, request=request, stream=bool(body.stream))
    echoes = [_echo(state, prompt) if body.echo else "" for prompt in body.prompts]
    head = {
        "id": f"cmpl-{request.state.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": state.options.served_model_name,
    }
    if body.stream:
        return event_stream(_chunks(head, body, generations, echoes))
    async with aclosing(_merged(generations)) as pieces:  # type: ignore[type-var]
        async for _ in pieces:
            pass
    outputs = [generation.output for generation in generations]
    choices = []
    for i, (output, echo) in enumerate(zip(outputs, echoes, strict=True)):
        for sample in output.samples:
            logprobs = None if sample.logprobs is None else CompletionLogprobs().of(sample.logprobs)
            index = i * params.n + sample.index
            ids = _token_ids(body, sample.token_ids, output.prompt_token_ids)
            choices.append(_choice(index, echo + sample.text, logprobs, sample.finish_reason) | ids)
    return AsciiJSON({**head, "choices": choices, "usage": usage(outputs)})


def _echo(state: ServerState, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else state.llm.decode(prompt)


def _choice(
    index: int, text: str, logprobs: dict[str, Any] | None, finish_reason: FinishReason | None
) -> dict[str, Any]:
    return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


def _token_ids(body: CompletionRequest, token_ids: list[int], prompt: list[int]) -> dict[str, Any]:
    return {"token_ids": token_ids, "prompt_token_ids": prompt} if body.return_token_ids else {}


async def _chunks(
    head: dict[str, Any], body: CompletionRequest, generations: list[Generation], echoes: list[str]
) -> AsyncIterator[dict[str, Any]]:
    more, n = {"usage": None} if body.include_usage else {}, body.n or 1
    written = [CompletionLogprobs() for _ in range(n * len(generations))]
    pending = {i: echoes[i // n] for i in range(n * len(generations)) if echoes[i // n]}  # before the first piece
    async with aclosing(_merged(generations)) as pieces:  # type: ignore[type-var]
        async for i, piece in pieces:
            if not worth_sending(body, piece):
                continue
            index = i * n + piece.index
            logprobs = None if body.logprobs is None else written[index].of(piece.logprobs)
            text = pending.pop(index, "") + piece.text
            ids = _token_ids(body, piece.token_ids, generations[i].prompt_token_ids)
            yield {**head, "choices": [_choice(index, text, logprobs, piece.finish_reason) | ids], **more}
    if body.include_usage:
        yield {**head, "choices": [], "usage": usage(generation.output for generation in generations)}


async def _merged(generations: list[Generation]) -> AsyncIterator[tuple[int, Piece]]:
    """The pieces of all generations as they come, each with the number of its generation.

    RequestFailed is raised if all samples of all generations failed.
    """
    if len(generations) == 1:
        async with aclosing(generations[0].pieces()) as pieces:  # type: ignore[type-var]
            async for piece in pieces:
                yield 0, piece
        return
    # No more than one waits here: what a slow reader has not read is merged where it comes from.
    queue: asyncio.Queue[tuple[int, Piece | Exception | None]] = asyncio.Queue(maxsize=1)
    failures: list[RequestFailed] = []

    async def forward(i: int) -> None:
        try:
            async for piece in generations[i].pieces():
                await queue.put((i, piece))
        except RequestFailed as error:
            failures.append(error)
        except Exception as error:
            await queue.put((i, error))
        await queue.put((i, None))

    tasks = [asyncio.create_task(forward(i)) for i in range(len(generations))]
    try:
        left = len(generations)
        while left:
            i, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item
        if len(failures) == len(generations):
            raise failures[0]
    finally:
        for task in tasks:
            task.cancel()
