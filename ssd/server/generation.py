"""From a request to the engine and back: the one path that every endpoint takes.

Admission, tokenization, submission; then deltas as the engine decides them, until the request ends, times out or its
client goes away. Knows nothing of the shapes of requests and answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Final, ParamSpec, TypeVar

from fastapi import Request

from ssd.core import Delta, RequestOutput, SamplingParams
from ssd.engine.submission import AsyncSubmission
from ssd.errors import EngineFailed
from ssd.llm import LLM, Prompt, check_served
from ssd.server.admission import Admission
from ssd.server.errors import GONE, ApiError
from ssd.server.http.asgi import disconnected
from ssd.server.http.bodies import on_thread
from ssd.server.ignored import IgnoredFields
from ssd.server.metrics import HttpRequests, Metrics
from ssd.server.models.served import Served
from ssd.server.options import ServerOptions
from ssd.server.tracing import Tracer

P = ParamSpec("P")
T = TypeVar("T")
TIMED_OUT: Final = "the request took longer than this server allows"
PAUSE: Final = 10.0  # seconds; clients give up a stream that says nothing for minutes, while a long prompt is read
NO_RETRY: Final = {"x-should-retry": "false"}  # the openai client repeats requests after a 5xx otherwise


@dataclass
class ServerState:
    """What the handlers share; `app.state.server`."""

    llm: LLM
    options: ServerOptions
    admission: Admission
    metrics: Metrics
    http_requests: HttpRequests
    sampling_defaults: dict[str, Any]  # of what a request leaves out
    fingerprint: str
    tracer: Tracer | None = None
    started: int = field(default_factory=lambda: int(time.time()))
    watchers: set[asyncio.Task[None]] = field(default_factory=set)  # the event loop refers to its tasks weakly

    @property
    def ignored(self) -> IgnoredFields:
        """The ignored fields of all requests."""
        return self.metrics.ignored

    @property
    def served(self) -> list[Served]:
        return [Served(self.options, str(self.llm.config.model), self.llm)]

    @property
    def lost(self) -> str | None:
        """Why the server must end: a rank of the model is lost."""
        return self.llm.engine.lost

    @classmethod
    def of(cls, request: Request) -> ServerState:
        state: ServerState = request.app.state.server
        return state


class Generation:
    """A submitted prompt: its deltas, then its output."""

    def __init__(self, submission: AsyncSubmission, prompt_token_ids: list[int], deadline: float | None) -> None:
        self.prompt_token_ids = prompt_token_ids
        self._submission = submission
        self._deadline = deadline  # in the event loop's time; None: no limit

    @property
    def request_id(self) -> str:
        """The id of the request in the engine."""
        return self._submission.request_id

    @property
    def output(self) -> RequestOutput:
        """The complete output, once all deltas are read."""
        if self._submission.output is None:
            raise AssertionError("the request has not ended")
        return self._submission.output

    def abort(self) -> None:
        """Ends the request after the current round. Nothing happens if it has ended."""
        self._submission.abort()

    async def pauses(self) -> AsyncIterator[None]:
        """One every `PAUSE` seconds until the first delta is there, or the request has timed out."""
        loop = asyncio.get_running_loop()
        while (left := PAUSE if self._deadline is None else min(PAUSE, self._deadline - loop.time())) > 0:
            if await self._submission.arrived(left):
                return
            yield

    async def deltas(self) -> AsyncIterator[Delta]:
        """Leaving the iteration aborts the request. Deltas that a slow reader has not read are merged.

        After the last one, RequestFailed is raised if all samples failed.
        """
        try:
            while not self._submission.ended:
                async with asyncio.timeout_at(self._deadline):
                    delta = await anext(self._submission)
                yield delta
        except TimeoutError:
            raise ApiError(504, TIMED_OUT, code="timeout", headers=NO_RETRY) from None
        finally:
            self.abort()
        check_served(self.output)

    async def finish(self) -> RequestOutput:
        """Waits for the whole output; RequestFailed if all samples failed."""
        async for _ in self.deltas():
            pass
        return self.output


async def start(
    state: ServerState,
    prompts: Seq[Prompt],
    params: SamplingParams,
    *,
    request: Request,
    stream: bool,
    chat_options: Mapping[str, Any] | None = None,
) -> list[Generation]:
    """Submits all prompts of an HTTP request, or none. They end when its client goes away.

    Without `stream` there is one delta per sample, at its end.
    """
    driver, limit = state.llm.driver, state.options.max_n
    if driver.failure is not None:
        raise EngineFailed(driver.failure)
    if params.n > limit:
        raise ApiError(400, f"n={params.n}: the limit is {limit}", param="n")
    permit = state.admission.admit(len(prompts) * params.n, "prompt" if len(prompts) > 1 else "n")
    timeout = state.options.request_timeout
    deadline = None if timeout is None else asyncio.get_running_loop().time() + timeout
    submissions: list[AsyncSubmission] = []
    watcher = _watch_client(state, request, submissions)

    async def computed(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        result = await on_thread(request.state.large, function, *args, **kwargs)
        if watcher.done():
            raise ApiError(GONE, "the client has gone")
        return result

    try:
        encoded = [await computed(state.llm.encode, prompt, chat_options, bounded=True) for prompt in prompts]
        async with asyncio.timeout_at(deadline):
            grammar = await driver.compiled(params)  # not on the threads that tokenize
        checked = [await computed(driver.check, token_ids, params, grammar) for token_ids in encoded]
        permit.add_tokens(sum(_cost(state, token_ids, params) for token_ids in encoded))
        for each in checked:
            group = submissions[0].request_id if submissions else ""
            submissions.append(driver.submit_checked(each, stream=stream, group=group))
    except TimeoutError:
        raise ApiError(504, TIMED_OUT, code="timeout", headers=NO_RETRY) from None
    finally:
        ended = asyncio.gather(*(submission.done for submission in submissions))  # in the engine, read or not
        if submissions:
            ended.add_done_callback(lambda _: permit.release())
        else:
            permit.release()
        ended.add_done_callback(lambda _: watcher.cancel())
    if state.tracer is not None:
        _trace(state.tracer, request, submissions)
    return [Generation(s, token_ids, deadline) for s, token_ids in zip(submissions, encoded, strict=True)]


def _cost(state: ServerState, token_ids: Seq[int], params: SamplingParams) -> int:
    """Tokens that a request may need."""
    return params.n * min(len(token_ids) + params.max_new_tokens, state.llm.driver.limits.max_model_len)


def _trace(tracer: Tracer, request: Request, submissions: Seq[AsyncSubmission]) -> None:
    """A span for every submission when it has ended."""
    operation = {"/v1/completions": "text_completion", "/v1/embeddings": "embeddings"}.get(request.url.path, "chat")
    begin, request_id = time.perf_counter(), request.state.request_id
    for submission in submissions:
        submission.done.add_done_callback(
            lambda done: tracer.record(operation, request_id, request.headers, done.result(), begin)
        )


def _watch_client(state: ServerState, request: Request, submissions: Seq[AsyncSubmission]) -> asyncio.Task[None]:
    """A task that ends when the client goes away."""
    watcher = asyncio.create_task(_abort_on_disconnect(request, submissions))
    state.watchers.add(watcher)
    watcher.add_done_callback(state.watchers.discard)
    return watcher


async def _abort_on_disconnect(request: Request, submissions: Seq[AsyncSubmission]) -> None:
    """Aborts the submissions when the client goes away."""
    await disconnected(request.receive)
    for submission in submissions:
        submission.abort()
