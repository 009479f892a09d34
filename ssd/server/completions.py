"""`/v1/completions`: one prompt or several, as text or token ids."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.core import Delta, Sample
from ssd.errors import RequestFailed
from ssd.server.answers import STREAMED, CompletionLogprobs, check_common, event_stream, usage, worth_sending
from ssd.server.errors import AsciiJSON, renaming, unsupported
from ssd.server.generation import Generation, ServerState, start
from ssd.server.protocol import CompletionRequest

router = APIRouter()
_MAX_TOKENS: Final = 16  # OpenAI's default


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionRequest, request: Request) -> Response:
    state = ServerState.of(request)
    check_common(request, body)
    if body.echo and body.logprobs is not None:
        raise unsupported("echo", "log-probabilities of prompts are not supported: leave out echo or logprobs")
    with renaming(body.field_names):
        params = body.sampling_params(state.sampling_defaults, max_tokens=_MAX_TOKENS, logprobs=body.logprobs)
        generations = await start(state, body.prompts, params, request=request, stream=bool(body.stream))
    echoes = [_echo(state, prompt) if body.echo else "" for prompt in body.prompts]
    head = {
        "id": f"cmpl-{request.state.request_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": state.options.served_model_name,
        "system_fingerprint": state.fingerprint,
    }
    if body.stream:
        return event_stream(_chunks(head, body, generations, echoes))
    async with aclosing(_merged(generations)) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            pass
    outputs = [generation.output for generation in generations]
    choices = [
        _choice(body, i, echoes[i], sample, CompletionLogprobs(), output.prompt_token_ids)
        for i, output in enumerate(outputs)
        for sample in output.samples
    ]
    return AsciiJSON({**head, "choices": choices, "usage": usage(outputs)})


def _echo(state: ServerState, prompt: str | list[int]) -> str:
    return prompt if isinstance(prompt, str) else state.llm.decode(prompt)


def _choice(
    body: CompletionRequest, i: int, echo: str, sample: Sample | Delta, logprobs: CompletionLogprobs, prompt: list[int]
) -> dict[str, Any]:
    """A sample of prompt `i`, or the new part of it."""
    choice = {
        "index": i * (body.n or 1) + sample.index,
        "text": echo + sample.text,
        "logprobs": None if body.logprobs is None else logprobs.of(sample.logprobs or ()),
        "finish_reason": sample.finish_reason,
    }
    return choice | ({"token_ids": sample.token_ids, "prompt_token_ids": prompt} if body.return_token_ids else {})


async def _chunks(
    head: dict[str, Any], body: CompletionRequest, generations: list[Generation], echoes: list[str]
) -> AsyncIterator[dict[str, Any]]:
    more = {"usage": None} if body.include_usage else {}
    logprobs: defaultdict[tuple[int, int], CompletionLogprobs] = defaultdict(CompletionLogprobs)  # by prompt and sample
    async with aclosing(_merged(generations)) as deltas:  # type: ignore[type-var]
        async for i, delta in deltas:
            if worth_sending(body, delta):
                echo = "" if (i, delta.index) in logprobs else echoes[i]  # before the first chunk
                offsets = logprobs[i, delta.index]
                choice = _choice(body, i, echo, delta, offsets, generations[i].prompt_token_ids)
                yield {**head, "choices": [choice], **more}
    if body.include_usage:
        yield {**head, "choices": [], "usage": usage(generation.output for generation in generations)}


async def _merged(generations: list[Generation]) -> AsyncIterator[tuple[int, Delta]]:
    """The deltas of all generations as they come, each with the number of its generation.

    RequestFailed is raised if all samples of all generations failed.
    """
    if len(generations) == 1:  # without a task per delta
        async with aclosing(generations[0].deltas()) as deltas:  # type: ignore[type-var]
            async for delta in deltas:
                yield 0, delta
        return
    streams = [generation.deltas() for generation in generations]
    failures: list[RequestFailed] = []
    # One read per stream at a time: deltas that a slow reader has not read are merged in their submission's queue.
    reads = {asyncio.ensure_future(anext(stream, None)): i for i, stream in enumerate(streams)}
    try:
        while reads:
            done, _ = await asyncio.wait(reads, return_when=asyncio.FIRST_COMPLETED)
            for read in done:
                i = reads.pop(read)
                try:
                    read_delta = read.result()
                except RequestFailed as error:
                    failures.append(error)
                    continue
                if read_delta is not None:
                    yield i, read_delta
                    reads[asyncio.ensure_future(anext(streams[i], None))] = i
        if len(failures) == len(generations):
            raise failures[0]
    finally:
        for generation in generations:
            generation.abort()
        for read in reads:
            read.cancel()
