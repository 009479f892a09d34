"""Who runs in the next round, over which KV blocks.

Continuous batching: sequences join and leave between any two rounds, and prefill chunks share a batch with decoding.
Plain bookkeeping: knows nothing of tensors, models or text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ssd.core import Sequence, Status, Work
from ssd.engine.blocks import BlockPool


class Scheduler:
    """Admits, schedules and preempts sequences, oldest first.

    `lookahead` is how many draft tokens a round may add to a decoding sequence: scratch slots that are reserved
    beside the committed tokens and never counted as tokens.
    """

    def __init__(self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, lookahead: int = 0) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.lookahead = lookahead
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.num_preemptions = 0

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    def schedule(self) -> list[Work]:
        """The next batch: every decoding sequence, then prefill chunks of running and newly admitted ones."""
        works = self._reserve(self._plan_running())
        budget = self.max_num_batched_tokens - sum(_cost(work) for work in works)
        return works + self._admit(budget)

    def finish(self, sequence: Sequence) -> None:
        """Takes a sequence out, wherever it is, and its blocks back."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self.pool.release(sequence)

    def preempt(self, sequence: Sequence) -> None:
        """Sends a running sequence back to the head of the queue. It keeps its tokens; their KV is computed again."""
        self.running.remove(sequence)
        self.pool.release(sequence)
        sequence.status = Status.WAITING
        sequence.metrics.preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(sequence)

    def _work(self, sequence: Sequence, budget: int) -> Work:
        """As much of a sequence as the budget allows: its pending tokens first, then draft tokens after the last."""
        num_tokens = min(sequence.num_pending, budget)
        if num_tokens < sequence.num_pending:
            return Work(sequence, num_tokens)
        return Work(sequence, num_tokens, lookahead=min(self._lookahead(sequence), budget - num_tokens))

    def _lookahead(self, sequence: Sequence) -> int:
        return max(0, min(self.lookahead, sequence.room - 1)) if sequence.params.speculate else 0

    def _plan_running(self) -> list[Work]:
        """A token for every decoding sequence, then drafts for them, then prefill chunks, as far as the budget goes."""
        budget = self.max_num_batched_tokens
        works: list[Work] = []
        decoding = [s for s in self.running if s.num_pending == 1]
        for i, sequence in enumerate(decoding):
            works.append(self._work(sequence, budget - (len(decoding) - i - 1)))
            budget -= _cost(works[-1])
        for sequence in self.running:
            if sequence.num_pending > 1 and budget > 0:
                works.append(self._work(sequence, budget))
                budget -= _cost(works[-1])
        return works

    def _reserve(self, works: Iterable[Work]) -> list[Work]:
        """Gets blocks for the plan, oldest sequence first; whoever is youngest makes way when they run out."""
        planned = {id(work.sequence): work for work in works}
        for sequence in list(self.running):
            work = planned.get(id(sequence))
            while work is not None and sequence.status is Status.RUNNING:
                if self.pool.grow(sequence, sequence.num_computed + _cost(work)):
                    break
                self.preempt(self.running[-1])
        return [work for work in planned.values() if work.sequence.status is Status.RUNNING]

    def _admit(self, budget: int) -> list[Work]:
        works: list[Work] = []
        while self.waiting and len(self.running) < self.max_num_seqs and budget > 0:
            sequence = self.waiting[0]
            if self._sibling_is_prefilling(sequence):
                break
            cached = self.pool.attach_prefix(sequence)
            if not self._fits(sequence):
                self.pool.release(sequence)
                break
            work = self._work(sequence, budget)
            budget -= _cost(work)
            if not self.pool.grow(sequence, sequence.num_computed + _cost(work)):
                raise AssertionError("admission was granted without enough free blocks")
            self.waiting.popleft()
            self.running.append(sequence)
            sequence.status = Status.RUNNING
            if sequence.metrics.preemptions == 0:
                sequence.metrics.cached_tokens = cached
            works.append(work)
        return works

    def _sibling_is_prefilling(self, sequence: Sequence) -> bool:
        """Samples of one request wait for the first one's prompt, and then find it in the prefix cache."""
        if sequence.index == 0 or not self.pool.prefix_caching:
            return False
        return any(s.request is sequence.request and s.num_pending > 1 for s in self.running)

    def _fits(self, sequence: Sequence) -> bool:
        """Admit only what can be prefilled to its end without pushing anybody out."""
        needed = self.pool.blocks_for(len(sequence.tokens) + self._lookahead(sequence))
        return needed - len(sequence.blocks) <= self.pool.num_free


def _cost(work: Work) -> int:
    return work.num_tokens + work.lookahead
