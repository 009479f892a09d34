"""The playground: a page to chat with the model and to see how its tokens came about.

`/` is the page, `/playground/chat` streams an answer round by round, `/playground/state` has the engine's totals.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from collections.abc import Sequence as Seq
from importlib import resources
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import Field

from ssd.config import SUFFIX
from ssd.core import LOOKED_UP, Origin, Outcome, RequestOutput, SamplingParams, Sequence, Work
from ssd.decoding.drafter import Prepared
from ssd.decoding.observer import RoundObserver
from ssd.llm import LLM
from ssd.server.answers import event_stream
from ssd.server.errors import unsupported
from ssd.server.generation import Generation, ServerState, start
from ssd.server.http.bodies import JsonRoute
from ssd.server.protocol import Strict
from ssd.text.detokenizer import IncrementalDecoder
from ssd.text.tokenizer import Tokenizer

PAGE: Final = {  # by path: open without an API key, which the page asks for
    "/": ("index.html", "text/html"),
    "/playground/style.css": ("style.css", "text/css"),
    "/playground/app.js": ("app.js", "text/javascript"),
    "/playground/answer.js": ("answer.js", "text/javascript"),
    "/playground/markdown.js": ("markdown.js", "text/javascript"),
    "/playground/paths.js": ("paths.js", "text/javascript"),
    "/playground/vendor/marked.umd.js": ("vendor/marked.umd.js", "text/javascript"),
    "/playground/vendor/purify.min.js": ("vendor/purify.min.js", "text/javascript"),
}
_HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-DNS-Prefetch-Control": "off",  # of the hosts that links in an answer name
    "Cache-Control": "no-cache",
}
# totals and counts of the state
TOTALS: Final = ("running", "waiting", "output_tokens", "drafted", "accepted", "look_ups", "hits")
_MOST_BRANCHES: Final = 12  # branches that are sent per round: the likeliest, and the one that came true
_DEFAULT_TOKENS: Final = 256


class PlaygroundMessage(Strict):
    role: Literal["system", "user", "assistant"]
    content: str


class PlaygroundRequest(Strict):
    messages: Annotated[list[PlaygroundMessage], Field(fail_fast=True, min_length=1)]
    temperature: float = 0.0
    seed: int | None = None
    max_tokens: int = _DEFAULT_TOKENS
    speculate: bool = True
    branches: bool = False  # tell which branches were prepared


class BranchWatch(RoundObserver):
    """Keeps the branches that the drafter prepares for watched requests.

    While a request is watched, a round is collected before the next one is launched, because a later round would
    overwrite the branches, and waits for those of another process: that costs some speed, for every request. Nothing
    changes while none is watched.
    """

    def __init__(self) -> None:
        self._found: dict[str, dict[int, Prepared]] = {}  # by request, then by the number of output tokens before

    def watch(self, request_id: str) -> None:
        """For any thread, as are `take` and `unwatch`."""
        self._found[request_id] = {}

    def take(self, request_id: str, num_output: int) -> Prepared:
        """Branches of the round that began after `num_output` output tokens, the likeliest first."""
        return self._found[request_id].pop(num_output, {})

    def unwatch(self, request_id: str) -> None:
        self._found.pop(request_id, None)

    @property
    def synchronous(self) -> bool:  # type: ignore[override]
        return bool(self._found)

    def launched(self, works: Seq[Work], prepared: Callable[[Sequence], Prepared]) -> None:
        for work in works if self._found else ():
            found = self._found.get(work.sequence.request.id)
            earlier = work.sequence.in_flight is not None  # launched before the request was watched
            if found is not None and work.decides and work.sequence.index == 0 and not earlier:
                found[work.sequence.num_output] = prepared(work.sequence)


def page() -> APIRouter:
    """The page, and what it loads."""
    made = APIRouter(route_class=JsonRoute, include_in_schema=False)
    for path, (name, kind) in PAGE.items():
        made.add_api_route(path, _static(name, kind), methods=["GET"])
    return made


def router(llm: LLM) -> APIRouter:
    """The playground's endpoints. Observes the LLM's rounds if its branches can be seen."""
    made = page()
    watch = BranchWatch() if _branches_visible(llm) else None
    if watch is not None:
        llm.driver.call(lambda engine: engine.round.observers.append(watch))

    @made.post("/playground/chat")
    async def chat(body: PlaygroundRequest, request: Request) -> Response:
        if body.branches and watch is None:
            raise unsupported("branches", "the prepared branches of this server's drafter cannot be seen")
        params = SamplingParams(
            temperature=body.temperature, seed=body.seed, max_tokens=body.max_tokens, speculate=body.speculate
        )
        prompt = [message.model_dump() for message in body.messages]
        [generation] = await start(ServerState.of(request), [prompt], params, request=request, stream=True)
        return event_stream(_events(generation, llm.tokenizer, watch if body.branches else None))

    @made.get("/playground/state")
    async def state(request: Request) -> dict[str, Any]:
        return state_of(ServerState.of(request))

    return made


def _static(name: str, kind: str) -> Any:
    content = (resources.files("ssd.server.playground") / "static" / name).read_bytes()

    async def page() -> Response:
        return Response(content, media_type=f"{kind}; charset=utf-8", headers=_HEADERS)

    return page


def _branches_visible(llm: LLM) -> bool:
    """Branches are prepared by SSD; under the rejection rule they are of no use without their distributions."""
    wanted = llm.config.speculation
    return wanted.mode in ("ssd", "auto") and wanted.placement != "auto" and wanted.acceptance == "coupled"


def state_of(server: ServerState) -> dict[str, Any]:
    """What is served, and totals since the start; speeds are differences of two of these."""
    llm = server.llm
    engine, wanted = llm.engine, llm.config.speculation
    metrics, pool = engine.metrics, engine.scheduler.pool
    return {
        "model": server.options.served_model_name,
        "mode": wanted.mode,
        "draft": wanted.draft if wanted.mode != "ar" else None,
        "branches": _branches_visible(llm),
        "note": llm.note,
        "seconds": time.perf_counter(),
        "running": len(engine.scheduler.running),
        "waiting": len(engine.scheduler.waiting),
        "kv_usage": 1 - pool.num_free / max(1, pool.num_blocks),
        "output_tokens": metrics.output_tokens,
        "drafted": metrics.spec_decode_num_draft_tokens,
        "accepted": metrics.spec_decode_num_accepted_tokens,
        "look_ups": sum(metrics.ssd_look_ups_after),
        "hits": sum(metrics.ssd_hits_after),
    }


async def _events(
    generation: Generation, tokenizer: Tokenizer, watch: BranchWatch | None
) -> AsyncIterator[dict[str, Any]]:
    """One event per delta with its rounds, and at the end one with the counts of the request."""
    decoder, written = IncrementalDecoder(tokenizer, generation.prompt_token_ids), 0
    request_id = generation.request_id
    if watch is not None:
        watch.watch(request_id)
    try:
        async for delta in generation.deltas():
            left, rounds = len(delta.token_ids), []
            for outcome in delta.outcomes:
                prepared = watch.take(request_id, written) if watch is not None else {}
                tokens = outcome.token_ids[:left]
                texts = [decoder.push(token) for token in tokens]
                rounds.append(_round(outcome, texts, prepared, tokenizer))
                written, left = written + len(tokens), left - len(tokens)
            if delta.finish_reason is not None and rounds and rounds[-1]["tokens"]:
                rounds[-1]["tokens"][-1] += decoder.flush()
            yield {"rounds": rounds}
        yield _summary(generation.output)
    finally:
        if watch is not None:
            watch.unwatch(request_id)


def _round(outcome: Outcome, texts: list[str], prepared: Prepared, tokenizer: Tokenizer) -> dict[str, Any]:
    """`tokens`: the texts of the tokens that were written: accepted ones, then the target's own."""
    accepted = min(outcome.num_accepted, len(texts))
    outcome_key = (outcome.num_accepted, outcome.token_ids[-1])
    shown = [key for i, key in enumerate(prepared) if i < _MOST_BRANCHES or key == outcome_key]
    return {
        "origin": outcome.origin.name.lower(),
        "looked_up": outcome.origin in LOOKED_UP,
        "by": SUFFIX if outcome.origin is Origin.SUFFIX else "draft",
        "accepted": accepted,
        "tokens": texts,
        "rejected": [tokenizer.token_text(token) for token in outcome.draft[outcome.num_accepted :]],
        "num_branches": len(prepared),
        "branches": [
            {
                "after": after,
                "token": tokenizer.token_text(token),
                "draft": tokenizer.decode(list(prepared[after, token]), False),
                "came_true": (after, token) == outcome_key,
            }
            for after, token in shown
        ],
    }


def _summary(output: RequestOutput) -> dict[str, Any]:
    metrics = output.metrics
    return {
        "finish_reason": output.finish_reason,
        "seed": output.params.seed,
        "prompt_tokens": metrics.prompt_tokens,
        "output_tokens": metrics.output_tokens,
        "rounds_total": metrics.rounds,
        "drafted": metrics.drafted,
        "accepted": metrics.accepted,
        "look_ups": metrics.look_ups,
        "hits": metrics.hits,
        "first_token_seconds": metrics.time_to_first_token,
        "tokens_per_second": metrics.decode_tokens_per_second,
    }
