"""`/v1/completions`: one prompt or several, as text or token ids."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import Any, Final

from fastapi import APIRouter, Request
from fastapi.responses import Response

from ssd.core import Delta, RequestOutput, Sample, TokenLogprobs
from ssd.errors import RequestFailed
from ssd.server.answers import STREAMED, CompletionLogprobs, check_common, event_stream, usage, worth_sending
from ssd.server.errors import AsciiJSON, renaming, unsupported
from ssd.server.generation import Generation, ServerState, start
from ssd.server.http.bodies import JsonRoute, on_thread
from ssd.server.ignored import current
from ssd.server.protocol import CompletionRequest

router = APIRouter(route_class=JsonRoute)
_MAX_TOKENS: Final = 16  # OpenAI's default


@router.post("/v1/completions", responses=STREAMED)
async def completions(body: CompletionRequest, request: Request) -> Response:
    state = ServerState.of(request)
    check_common(request, body)
    scored, only = bool(body.echo and body.logprobs is not None), bool(body.echo and body.max_tokens == 0)
    if body.stream and (scored or only):
        raise unsupported("stream", "prompts are not scored in a stream: leave out stream, echo or logprobs")
    if only:  # a token is computed, and left out
        body = body.model_copy(update={"max_tokens": 1})
    with renaming(body.field_names):
        defaults, opened = state.sampling_defaults, state.options.additional_properties
        params = await on_thread(
            request.state.large, body.sampling_params, defaults, _MAX_TOKENS, body.logprobs, opened
        )
        params = replace(params, prompt_logprobs=body.logprobs) if scored else params
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
        return event_stream(_chunks(head, body, generations, echoes, current().answer))
    async with aclosing(_merged(generations)) as deltas:  # type: ignore[type-var]
        async for _ in deltas:
            pass
    outputs = [generation.output for generation in generations]
    for output in outputs if only else ():
        output.samples = [replace(sample, text="", token_ids=[], logprobs=[]) for sample in output.samples]
    choices = [
        _choice(body, i, echoes[i], sample, _logprobs(state, output), output.prompt_token_ids)
        for i, output in enumerate(outputs)
        for sample in output.samples
    ]
    return AsciiJSON({**head, "choices": choices, "usage": usage(outputs), **current().answer})


def _logprobs(state: ServerState, output: RequestOutput) -> CompletionLogprobs:
    """Log-probabilities that begin with those of the prompt, if requested; its first token has none."""
    if output.prompt_logprobs is None:
        return CompletionLogprobs()
    first, tokenizer = output.prompt_token_ids[0], state.llm.tokenizer
    unknown = TokenLogprobs(first, math.nan, {}, {first: tokenizer.token_text(first)})
    prompt = [unknown, *filter(None, output.prompt_logprobs)]
    return CompletionLogprobs(prompt=prompt, in_text=lambda token: not tokenizer.is_special(token))


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
    head: dict[str, Any],
    body: CompletionRequest,
    generations: list[Generation],
    echoes: list[str],
    last: dict[str, Any],
) -> AsyncIterator[dict[str, Any]]:
    """`last`: what the last chunk has beside the others' fields."""
    num_open = len(generations) * (body.n or 1)
    more = {"usage": None} if body.include_usage else {}
    logprobs: defaultdict[tuple[int, int], CompletionLogprobs] = defaultdict(CompletionLogprobs)  # by prompt and sample
    async with aclosing(_merged(generations)) as deltas:  # type: ignore[type-var]
        async for i, delta in deltas:
            if worth_sending(body, delta):
                echo = "" if (i, delta.index) in logprobs else echoes[i]  # before the first chunk
                offsets = logprobs[i, delta.index]
                choice = _choice(body, i, echo, delta, offsets, generations[i].prompt_token_ids)
                num_open -= delta.finish_reason is not None
                yield {**head, "choices": [choice], **(more or ({} if num_open else last))}
    if body.include_usage:
        yield {**head, "choices": [], "usage": usage(generation.output for generation in generations), **last}


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
