"""Parts that the answers of several endpoints share: usage, log-probabilities, server-sent events."""

from __future__ import annotations

import json
import math
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from fastapi import Request
from fastapi.responses import StreamingResponse

from ssd.core import Delta, RequestOutput, TokenLogprobs
from ssd.engine.validation import check_count
from ssd.server.errors import ApiError, api_error, invalid, no_model
from ssd.server.generation import ServerState
from ssd.server.protocol import ChatRequest, CompletionRequest, GenerationRequest

EVENT_STREAM: Final = "text/event-stream"
LINES: Final = "application/x-ndjson"
STREAMED: Final[dict[int | str, dict[str, Any]]] = {200: {"content": {EVENT_STREAM: {}}}}  # beside JSON
Chunks = AsyncIterator[dict[str, Any]]
_DONE: Final = b"data: [DONE]\n\n"
_LEAST_LOGPROB: Final = -9999.0  # JSON has no -inf


def check_common(request: Request, body: GenerationRequest) -> None:
    """Checks what concerns neither sampling nor one endpoint; the access log gets the user."""
    request.state.user = body.user
    state = ServerState.of(request)
    check_model(state, body.model)
    for name in ("logit_bias", "stop_token_ids"):
        check_count(name, getattr(body, name) or (), state.llm.driver.limits.vocab_size)
    if body.include_usage and not body.stream:
        raise invalid("stream_options", "only with stream=true")


def check_model(state: ServerState, model: str | None) -> None:
    if model is not None and not state.options.is_called(model):
        raise no_model(model, [state.options.served_model_name])


def usage(outputs: Iterable[RequestOutput]) -> dict[str, Any]:
    """Token counts of a request's prompts. A prompt counts once, whatever `n` is."""
    outputs = list(outputs)
    samples = [sample for output in outputs for sample in output.samples]
    prompt, completion = sum(len(o.prompt_token_ids) for o in outputs), sum(len(s.token_ids) for s in samples)
    drafted, accepted = sum(s.metrics.drafted for s in samples), sum(s.metrics.accepted for s in samples)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(o.metrics.cached_tokens for o in outputs)},
        "completion_tokens_details": {
            "drafted_tokens": drafted,
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
    }


def chat_logprobs(entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
    """Log-probabilities in the shape of chats."""
    content = [
        _token(entry, entry.token_id, entry.logprob)
        | {"top_logprobs": [_token(entry, token_id, value) for token_id, value in entry.top.items()]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _token(entry: TokenLogprobs, token_id: int, logprob: float) -> dict[str, Any]:
    text = entry.decoded.get(token_id, "")
    whole = "\ufffd" not in text  # else it is a part of a character, whose bytes are unknown
    encoded = list(text.encode()) if whole else None
    return {"token": text, "logprob": max(logprob, _LEAST_LOGPROB), "bytes": encoded}


@dataclass
class CompletionLogprobs:
    """Log-probabilities in the shape of completions, whose offsets continue from chunk to chunk."""

    offset: int = 0  # characters before
    prompt: Iterable[TokenLogprobs] = ()  # of an echo, before the others; the first has the value NaN: there is none
    in_text: Callable[[int], bool] = lambda _: True  # whether the text has a token: an echo has no special ones

    def of(self, entries: Iterable[TokenLogprobs]) -> dict[str, Any]:
        tokens: list[str] = []
        values: list[float | None] = []
        tops: list[dict[str, float] | None] = []
        offsets: list[int] = []
        for entry in (*self.prompt, *entries):
            text, known = entry.decoded.get(entry.token_id, ""), not math.isnan(entry.logprob)
            tokens.append(text)
            values.append(max(entry.logprob, _LEAST_LOGPROB) if known else None)
            tops.append(_by_text(entry) if known else None)
            offsets.append(self.offset)
            self.offset += len(text) if self.in_text(entry.token_id) else 0
        self.prompt = ()
        return {"tokens": tokens, "token_logprobs": values, "top_logprobs": tops, "text_offset": offsets}


def _by_text(entry: TokenLogprobs) -> dict[str, float]:
    """Its tokens' log-probabilities by text: where several tokens have the same, that of the likeliest."""
    found: dict[str, float] = {}
    for token_id, value in ({entry.token_id: entry.logprob} | entry.top).items():
        text = entry.decoded.get(token_id, "")
        found[text] = max(value, found.get(text, _LEAST_LOGPROB))
    return found


def worth_sending(body: ChatRequest | CompletionRequest, delta: Delta) -> bool:
    """False for tokens without text yet (parts of a character, of a stop string), unless tokens were asked for."""
    wants_tokens = body.return_token_ids or body.logprobs not in (None, False)
    return bool(delta.text or delta.finish_reason or wants_tokens)


def event_stream(chunks: Chunks) -> StreamingResponse:
    """Server-sent events, the last of which is `[DONE]`, after an error if there is one."""
    return _stream(_events(chunks), EVENT_STREAM)


def named_event_stream(events: Chunks) -> StreamingResponse:
    """Server-sent events whose `type` is their name. The iterator reports errors itself."""
    return _stream(_encoded(events, _named_event), EVENT_STREAM)


def line_stream(lines: Chunks) -> StreamingResponse:
    """A line of JSON each. The iterator reports errors itself."""
    return _stream(_encoded(lines, _line), LINES)


def _stream(encoded: AsyncIterator[bytes], kind: str) -> StreamingResponse:
    headers = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}  # proxies must not collect events
    return StreamingResponse(encoded, media_type=kind, headers=headers)


def is_stream(content_type: str) -> bool:
    """Whether an answer of this type is sent in parts, and can end with an error."""
    return content_type.startswith((EVENT_STREAM, LINES))


def last_events(path: str, error: ApiError, request_id: str, number: int) -> bytes:
    """Ends a stream of this path that has begun and cannot go on, after `number` events."""
    if path.startswith("/v1/messages"):
        return _named_event(error.messages_body(request_id))
    if path.startswith("/api/"):
        return _line(error.ollama_body())
    if path == "/v1/responses":
        fields = {"code": error.code, "message": error.message, "param": None, "sequence_number": number}
        return _named_event({"type": "error", **fields})
    return _event(error.body()) + _DONE


async def _events(chunks: Chunks) -> AsyncIterator[bytes]:
    async with aclosing(chunks):  # type: ignore[type-var]
        try:
            async for chunk in chunks:
                yield _event(chunk)
        except Exception as error:
            yield _event(api_error(error).body())
    yield _DONE


async def _encoded(chunks: Chunks, encode: Callable[[dict[str, Any]], bytes]) -> AsyncIterator[bytes]:
    async with aclosing(chunks):  # type: ignore[type-var]
        async for chunk in chunks:
            yield encode(chunk)


def _named_event(event: dict[str, Any]) -> bytes:
    return b"event: %s\n" % event["type"].encode() + _event(event)


def _event(data: dict[str, Any]) -> bytes:
    return b"data: %s\n" % _line(data)


def _line(data: dict[str, Any]) -> bytes:
    return json.dumps(data, separators=(",", ":")).encode("ascii") + b"\n"
