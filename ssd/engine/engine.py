"""The engine: requests in, rounds of decoding, outputs out. One loop, driven by `step`.

Knows nothing of models, CUDA or HTTP: the target and the drafter are handed in.
"""

from __future__ import annotations

import itertools
import time
from dataclasses import dataclass

from ssd.core import (
    FinishReason,
    Outcome,
    Proposal,
    Request,
    RequestMetrics,
    RequestOutput,
    SamplingParams,
    Sequence,
    Status,
    Work,
    sequence_seed,
)
from ssd.decoding.round import Round
from ssd.engine.metrics import LOOKED_UP, EngineMetrics, count_positions
from ssd.engine.outputs import Writer
from ssd.engine.scheduler import Scheduler
from ssd.errors import RequestError
from ssd.text.tokenizer import Tokenizer


@dataclass
class _Running:
    """A request's sequences and their writers, until all of them have finished."""

    request: Request
    writers: list[Writer]

    @property
    def finished(self) -> bool:
        return all(writer.sequence.status is Status.FINISHED for writer in self.writers)

    def output(self) -> RequestOutput:
        return RequestOutput(self.request.id, list(self.request.prompt_token_ids), [w.sample() for w in self.writers])


class Engine:
    """Serves requests over one target and one drafter."""

    def __init__(
        self,
        round_: Round,
        scheduler: Scheduler,
        *,
        max_model_len: int,
        stop_token_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.round = round_
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        self.vocab_size = round_.target.vocab_size
        self.stop_token_ids = stop_token_ids
        self.tokenizer = tokenizer
        self.metrics = EngineMetrics()
        self._requests: dict[str, _Running] = {}
        self._writers: dict[int, Writer] = {}  # by sequence id
        self._outputs: list[RequestOutput] = []  # finished and not yet handed out: a failing round loses none
        self._ids = itertools.count()

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    def add(self, prompt_token_ids: list[int], params: SamplingParams, request_id: str | None = None) -> str:
        """Queues a request and returns its id; raises RequestError when it can never be served."""
        request_id = request_id if request_id is not None else self._new_id()
        try:
            self._check(prompt_token_ids, params, request_id)
        except RequestError:
            self.metrics.num_refused += 1
            raise
        request = Request(request_id, tuple(prompt_token_ids), params)
        running = _Running(request, [Writer(self._sequence(request, i), self.tokenizer) for i in range(params.n)])
        self._requests[request_id] = running
        for writer in running.writers:
            self._writers[writer.sequence.id] = writer
            self.scheduler.add(writer.sequence)
        self.metrics.num_requests += 1
        self.metrics.prompt_tokens += len(prompt_token_ids) * params.n
        return request_id

    def step(self) -> list[RequestOutput]:
        """One round. Returns the outputs of the requests that finished since the last one."""
        self.scheduler.lookahead = self.round.drafter.lookahead
        works = self.scheduler.schedule()
        if works:
            self._round(works)
        outputs, self._outputs = self._outputs, []
        return outputs

    def _round(self, works: list[Work]) -> None:
        now = time.perf_counter()
        for work in works:
            if work.sequence.metrics.first_scheduled is None:
                work.sequence.metrics.first_scheduled = now
                self.metrics.cached_prompt_tokens += work.sequence.metrics.cached_tokens
        works, outcomes = self.round.run(works)
        now = time.perf_counter()
        for work, outcome in zip(works, outcomes, strict=True):
            self._commit(work, outcome, now)
        self.metrics.num_rounds += 1
        self.metrics.num_preemptions = self.scheduler.num_preemptions
        clocks, drafter = self.round.clocks, self.round.drafter
        self.metrics.target_wait_seconds, self.metrics.verify_seconds = clocks.draft, clocks.verify
        self.metrics.draft_busy_seconds = drafter.busy_seconds
        self.metrics.hand_over_seconds = drafter.hand_over_seconds
        self.metrics.drafter_failures = self.round.failures + drafter.failures

    def abort(self, request_id: str) -> RequestOutput | None:
        """Ends a request wherever it is; returns what it had written, or None when there is no such request."""
        running = self._requests.get(request_id)
        if running is None:
            return None
        self.metrics.num_aborted += 1
        for writer in running.writers:
            if writer.sequence.status is not Status.FINISHED:
                self._finish(writer, "abort", time.perf_counter())
        return self._outputs.pop()

    def close(self) -> None:
        """Ends whatever the drafter has started."""
        self.round.drafter.close()

    def knows(self, request_id: str) -> bool:
        """Whether a request is waiting or running here."""
        return request_id in self._requests

    def new_text(self, request_id: str) -> str:
        """Text of a request's first sample that was not handed out before (for streaming)."""
        running = self._requests.get(request_id)
        return running.writers[0].new_text() if running is not None else ""

    def check(self) -> None:
        """Raises AssertionError when KV blocks are leaked or shared wrongly. Cheap enough to run when idle."""
        self.scheduler.pool.check(self.scheduler.running)

    def _new_id(self) -> str:
        return next(name for i in self._ids if (name := f"request-{i}") not in self._requests)

    def _sequence(self, request: Request, index: int) -> Sequence:
        params, num_prompt = request.params, len(request.prompt_token_ids)
        stops = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.stop_token_ids)
        return Sequence(
            id=next(self._ids),
            request=request,
            index=index,
            seed=sequence_seed(params.seed, index),
            stop_token_ids=stops,
            max_tokens=min(num_prompt + params.max_new_tokens, self.max_model_len),
            tokens=list(request.prompt_token_ids),
            metrics=RequestMetrics(arrival=time.perf_counter(), prompt_tokens=num_prompt),
        )

    def _commit(self, work: Work, outcome: Outcome | None, now: float) -> None:
        """Takes a round's result into the sequence: KV first, then tokens, then the prefix cache, then a finish."""
        sequence = work.sequence
        num_before = len(sequence.tokens)
        sequence.num_computed += work.num_tokens
        if outcome is None:
            self.scheduler.pool.commit(sequence)
            return
        writer = self._writers[sequence.id]
        reason = writer.append(outcome)
        num_new = len(sequence.tokens) - num_before
        self._count(sequence, work.proposal, outcome.num_accepted, num_new)
        sequence.num_computed += min(outcome.num_accepted, num_new - 1)
        self.scheduler.pool.commit(sequence)
        sequence.metrics.output_tokens += num_new
        sequence.metrics.deliveries.append((now, num_new))
        self.metrics.output_tokens += num_new
        if sequence.metrics.first_token is None:
            sequence.metrics.first_token = now
        if reason is not None:
            self._finish(writer, reason, now)

    def _count(self, sequence: Sequence, proposal: Proposal, accepted: int, num_new: int) -> None:
        drafted, metrics = len(proposal.token_ids), sequence.metrics
        metrics.rounds += 1
        self.metrics.num_sequence_rounds += 1
        if drafted:
            metrics.drafted += drafted
            metrics.accepted += accepted
            count_positions(metrics.accepted_per_position, drafted, accepted)
            self.metrics.count_draft(drafted, accepted)
        if proposal.origin in LOOKED_UP:
            metrics.look_ups += 1
            metrics.hits += proposal.origin == "hit"
            self.metrics.count_look_up(proposal.origin, sequence.last_accepted, num_new)
        sequence.last_accepted = accepted

    def _finish(self, writer: Writer, reason: FinishReason, now: float) -> None:
        sequence = writer.sequence
        sequence.finish_reason = reason
        sequence.metrics.finished = now
        writer.finish()
        self.scheduler.finish(sequence)
        self.round.forget(sequence)
        del self._writers[sequence.id]
        running = self._requests[sequence.request.id]
        if running.finished:
            del self._requests[sequence.request.id]
            self.metrics.num_finished += 1
            self._outputs.append(running.output())

    def _check(self, prompt: list[int], params: SamplingParams, request_id: str) -> None:
        if request_id in self._requests:
            raise RequestError(f"request_id={request_id!r} is already running: choose another one")
        if not prompt:
            raise RequestError("the prompt is empty: pass at least one token (a BOS token, say)")
        if any(not isinstance(t, int) or not 0 <= t < self.vocab_size for t in prompt):
            raise RequestError(
                f"the prompt holds token ids outside 0..{self.vocab_size - 1}: use the model's tokenizer"
            )
        if len(prompt) >= self.max_model_len:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, but max_model_len={self.max_model_len} must also hold "
                "at least one new token: shorten the prompt or raise max_model_len"
            )
        for name in ("logit_bias", "stop_token_ids"):
            if any(t >= self.vocab_size for t in getattr(params, name)):
                raise RequestError(f"{name} holds token ids beyond the vocabulary of {self.vocab_size} tokens")
        if params.stop and self.tokenizer is None:
            raise RequestError("stop strings need a tokenizer, and this checkpoint has none: use stop_token_ids")
