"""The engine: takes requests, runs rounds of decoding and returns deltas. Every call of `step` is one iteration.

AR, SD and SSD are the same loop and differ in the drafter only. Knows nothing of models, CUDA or HTTP.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence as Seq

from ssd.constraints.grammars import Grammars
from ssd.constraints.processors import RowProcessor
from ssd.core import Delta, FinishReason, Outcome, Request, SamplingParams, Sequence, Status, Work
from ssd.decoding.drafter import Drafter
from ssd.decoding.round import InFlight, Round
from ssd.engine.failures import RoundFailures
from ssd.engine.metrics import EngineMetrics
from ssd.engine.outputs import OutputProcessor, RunningRequest
from ssd.engine.scheduler import Scheduler
from ssd.engine.validation import CheckedRequest, Limits, check_request
from ssd.errors import EngineFailed, RequestError, one_line
from ssd.text.tokenizer import Tokenizer


class Engine:
    """Serves requests over one target and one drafter."""

    def __init__(
        self,
        round_: Round,
        scheduler: Scheduler,
        *,
        max_model_len: int,
        longest: int | None = None,
        stop_token_ids: frozenset[int] = frozenset(),
        tokenizer: Tokenizer | None = None,
    ) -> None:
        self.round = round_
        self.scheduler = scheduler
        self.max_model_len = max_model_len
        vocab_size = round_.target.vocab_size
        grammars = Grammars(tokenizer.backend, vocab_size, stop_token_ids) if tokenizer is not None else None
        self.limits = Limits(vocab_size, max_model_len, tokenizer is not None, longest, grammars, stop_token_ids)
        self.stop_token_ids = stop_token_ids
        self.tokenizer = tokenizer
        self.metrics = EngineMetrics()
        self._requests: dict[str, RunningRequest] = {}
        self._processors: dict[int, OutputProcessor] = {}  # by sequence id
        self._deltas: list[Delta] = []  # to be returned by the next `step`
        self._ids = itertools.count()
        self._in_flight: InFlight | None = None  # launched, not committed yet
        self._failures = RoundFailures(round_, scheduler)

    @property
    def num_unfinished_requests(self) -> int:
        return len(self._requests)

    @property
    def failure(self) -> str | None:
        """Why no request can be served any more; None while the engine works."""
        error = self._failures.fatal or (None if self.lost is None else EngineFailed(self.lost))
        return None if error is None else f"the engine has failed: load the model again ({one_line(error)})"

    @property
    def lost(self) -> str | None:
        """Which process of the model was lost, if any; known before a request fails."""
        return self.round.target.failure

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to run or to return."""
        return self.scheduler.has_work or self._in_flight is not None or bool(self._deltas)

    def add(
        self,
        prompt_token_ids: Seq[int],
        params: SamplingParams,
        request_id: str | None = None,
        *,
        stream: bool = False,
    ) -> str:
        """Checks and queues a request and returns its id; raises RequestError when it can never be served."""
        request_id = request_id if request_id is not None else self._new_id()
        try:
            checked = check_request(prompt_token_ids, params, self.limits)
            if request_id in self._requests:
                raise RequestError(f"request_id={request_id!r} is already running: choose another one")
        except RequestError:
            self.metrics.num_refused += 1
            raise
        self.add_checked(checked, request_id, stream=stream)
        return request_id

    def add_checked(
        self,
        checked: CheckedRequest,
        request_id: str,
        *,
        stream: bool = False,
        arrival: float | None = None,
        group: str = "",
    ) -> None:
        """Queues a request, whose id no running one has.

        With `stream` there is a delta for every round, otherwise one per sample at its end. `arrival`: when the request
        arrived (seconds, as `time.perf_counter`), if not now. `group`: of requests that were made together.
        """
        if self.failure is not None:
            raise EngineFailed(self.failure) from self._failures.fatal
        request = Request(request_id, checked.prompt_token_ids, checked.params, group)
        arrival = time.perf_counter() if arrival is None else arrival
        sequences = [
            Sequence.of(
                request, next(self._ids), i, self.max_model_len, checked.stop_token_ids, constraint, _processor(request)
            )
            for i, constraint in enumerate(checked.constraints or [None] * request.params.n)
        ]
        vocab_size = self.limits.vocab_size
        processors = [OutputProcessor(s, self.tokenizer, vocab_size, stream=stream) for s in sequences]
        running = RunningRequest(request, processors)
        self._requests[request_id] = running
        for processor in running.processors:
            processor.sequence.metrics.arrival = arrival
            self._processors[processor.sequence.id] = processor
            self.scheduler.add(processor.sequence)
        self.metrics.num_requests += 1
        self.metrics.prompt_tokens += len(request.prompt_token_ids) * request.params.n

    def step(self) -> list[Delta]:
        """Launches the next round, then commits the one before it, which ran on the device meanwhile.

        Where rounds are synchronous (a CPU, a drafter or an acceptance rule that needs the host), the new round is
        committed as well. A round that raises is repeated request by request, and fails the one at fault only.
        """
        if self._in_flight is not None and self.round.synchronous:
            self.flush()
        works = self._schedule()
        before, self._in_flight = self._in_flight, None
        error = self._launch(works) if works else None
        if before is not None:
            self._commit_round(before)
        if error is not None:
            self._round_failed(works, error)
            error = None  # whose traceback refers to this frame
        if self._in_flight is not None and self.round.synchronous:
            self.flush()
        if self._in_flight is None and not self.scheduler.has_work:
            self.round.rest()
        deltas, self._deltas = self._deltas, []
        return deltas

    def use(self, drafter: Drafter, max_num_seqs: int) -> None:
        """Goes on with another drafter and batch size, and with all counters at 0: for measurements."""
        self.flush()
        self.round.use(drafter)
        self.scheduler.max_num_seqs = max_num_seqs
        self.metrics = EngineMetrics()

    def flush(self) -> None:
        """Commits the round in flight, if there is one."""
        round_, self._in_flight = self._in_flight, None
        if round_ is not None:
            self._commit_round(round_)

    def _schedule(self) -> list[Work]:
        self.scheduler.lookahead = self.round.lookahead
        with self.round.part("schedule"):
            works = self.scheduler.schedule()
        if works is None:  # KV blocks are short: collect the round in flight before preempting
            self.flush()
            works = self.scheduler.schedule() or []
        for sequence in self.scheduler.preempted:
            self.round.forget(sequence)
        self.scheduler.preempted.clear()
        now = time.perf_counter()
        for sequence in self.scheduler.admitted:
            self.round.admit(sequence)
            if sequence.metrics.first_scheduled is None:
                sequence.metrics.first_scheduled = now
                self.metrics.cached_prompt_tokens += sequence.metrics.cached_tokens
        return works

    def _launch(self, works: list[Work]) -> Exception | None:
        """Launches a round; returns the exception if it raised."""
        try:
            self._in_flight = self.round.launch(works)
        except Exception as error:
            return error
        for work in self._in_flight.works:
            work.sequence.in_flight = work
        return None

    def _commit_round(self, round_: InFlight) -> None:
        """Waits for a round, appends its tokens to the sequences, and passes the outcomes to the drafter."""
        works = round_.works
        try:
            outcomes, seconds = self.round.collect(round_)
        except Exception as error:
            self._clear_in_flight(works)
            self._round_failed(works, error)
            return
        self._failures.clear()
        self._clear_in_flight(works)
        now = time.perf_counter()
        for i, part in round_.verification.prompt_parts().items():
            if works[i].sequence.status is Status.RUNNING:
                self._processors[works[i].sequence.id].read_prompt(part)
        for work, outcome in zip(works, outcomes, strict=True):
            if work.sequence.status is Status.RUNNING:  # tokens computed after a stop are dropped
                self._commit(work, outcome, now)
        self.round.observe(works, outcomes, seconds)
        self._release()
        self.metrics.count_round(self.round.stats, self.round.drafter.stats, self.scheduler.num_preemptions)

    def _clear_in_flight(self, works: Seq[Work]) -> None:
        for work in works:
            if work.sequence.in_flight is work:
                work.sequence.in_flight = None

    def _release(self) -> None:
        """Frees the blocks and slots of finished sequences that no round in flight uses; the drafter forgets them."""
        for sequence in self.scheduler.released():
            self.round.forget(sequence)

    def abort(self, request_id: str) -> None:
        """Ends a request, if it is still there; the next `step` returns its output so far."""
        if request_id in self._requests:
            self.metrics.num_aborted += 1
            self._end(request_id, "abort")
            self._release()

    def close(self) -> None:
        """Ends the processes of the drafter, of the target and of grammars, if they have any."""
        if self.limits.grammars is not None:
            self.limits.grammars.close()
        self.round.close()

    def check(self) -> None:
        """Raises AssertionError when KV blocks are leaked or shared wrongly. Cheap enough to run when idle."""
        users = (*self.scheduler.running, *self.scheduler.leaving)
        self.scheduler.pool.check([sequence.kv for sequence in users])
        if self._in_flight is None and self.scheduler.leaving:
            raise AssertionError("finished sequences hold KV blocks though no round is in flight")
        if not self._requests and self._processors:
            raise AssertionError("finished requests have left their samples behind")

    def _new_id(self) -> str:
        return next(name for i in self._ids if (name := f"request-{i}") not in self._requests)

    def _commit(self, work: Work, outcome: Outcome | None, now: float) -> None:
        """Commits an outcome to its sequence: KV count, tokens, prefix cache, then finish or delta."""
        sequence, kv = work.sequence, work.sequence.kv
        num_before = len(sequence.tokens)
        if outcome is None:
            kv.num_computed += work.num_tokens
            self.scheduler.pool.commit(kv, sequence.tokens)
            return
        self.scheduler.clear_isolation(sequence)
        processor = self._processors[sequence.id]
        reason = processor.append(outcome)
        num_new = len(sequence.tokens) - num_before
        self.metrics.count_outcome(sequence, outcome, num_new, now)
        sequence.last_accepted = min(outcome.num_accepted, num_new)
        kv.num_computed = len(sequence.tokens) - 1
        self.scheduler.pool.commit(kv, sequence.tokens)
        if reason is not None:
            self._finish(processor, reason, now)
        elif processor.stream:
            self._deltas.append(processor.delta())

    def _finish(self, processor: OutputProcessor, reason: FinishReason, now: float) -> None:
        sequence = processor.sequence
        sequence.finish_reason = reason
        sequence.metrics.finished = now
        processor.finish()
        self.scheduler.finish(sequence)
        del self._processors[sequence.id]
        delta, running = processor.delta(), self._requests[sequence.request.id]
        if running.finished:
            del self._requests[sequence.request.id]
            delta.output = running.output()
            self.metrics.num_finished += 1
            self.metrics.num_failed += delta.output.error is not None
        self._deltas.append(delta)

    def _end(self, request_id: str, reason: FinishReason, error: str | None = None) -> None:
        """Finishes the samples of a request that are not finished yet. `error`: why, if they failed."""
        now = time.perf_counter()
        for processor in self._requests[request_id].processors:
            if processor.sequence.status is not Status.FINISHED:
                processor.error = error
                self._finish(processor, reason, now)

    def _round_failed(self, works: Seq[Work], error: Exception) -> None:
        """Handles a round that raised: ends the requests that fail, and has the others computed again."""
        if self._in_flight is not None:  # it began with what the failed one left behind
            works = [*works, *self._in_flight.works]
            self.round.discard(self._in_flight)
            self._clear_in_flight(self._in_flight.works)
            self._in_flight = None
        for request_id in self._failures.handle(works, error, self._requests):
            self._end(request_id, "error", f"the round that computed this request failed: {one_line(error)}")
        self._release()


def _processor(request: Request) -> RowProcessor | None:
    """The logits processor of one sample."""
    function = request.params.logits_processor
    return None if function is None else RowProcessor(function)
