"""The scheduler: which sequences run in the next round, and over which KV blocks.

Continuous batching: sequences join and leave between any two rounds, and prefill chunks share a batch with decoding. A
round may be scheduled while the one before it is in flight: a sequence's length is then known up to bounds, and blocks
are reserved for the upper one. Knows nothing of tensors, models or text.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as Seq

from ssd.core import Sequence, Status, Work
from ssd.kv.blocks import BlockPool


class Scheduler:
    """Admits, schedules and preempts sequences, oldest first.

    `lookahead`: maximum draft length of the next round. KV slots for draft tokens are reserved, and never counted as
    computed tokens before they are committed.
    """

    def __init__(
        self, pool: BlockPool, *, max_num_seqs: int, max_num_batched_tokens: int, num_slots: int | None = None
    ) -> None:
        self.pool = pool
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.lookahead = 0
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []  # finished, but a round in flight writes to their blocks
        self.preempted: list[Sequence] = []  # since the list was last cleared by the engine
        self.admitted: list[Sequence] = []  # by the last `schedule`
        self.suspects: list[Sequence] = []  # of a round that failed: each runs alone until it has decided a token
        self.num_preemptions = 0
        self._slots = list(range(num_slots or max_num_seqs))  # that are free

    def add(self, sequence: Sequence) -> None:
        self.waiting.append(sequence)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def _is_in_flight(self) -> bool:
        """Whether a round in flight may use KV blocks: none is preempted before it is collected."""
        return bool(self.leaving) or any(sequence.in_flight is not None for sequence in self.running)

    def schedule(self) -> list[Work] | None:
        """The next batch: every decoding sequence, then prefill chunks of running and newly admitted ones.

        None: a sequence must be preempted, and the round in flight must be collected before that.
        """
        self.admitted = []
        if self.suspects:
            return self._schedule_alone(self.suspects[0])
        works = self._reserve(self._plan(self.running))
        if works is None:
            return None
        budget = self.max_num_batched_tokens - sum(work.cost for work in works)
        return works + self._admit(budget)

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence. `released` frees its blocks once no round in flight writes them."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self.leaving.append(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self.acquit(sequence)

    def released(self) -> list[Sequence]:
        """Frees blocks and slots of finished sequences that are in no round in flight; returns those."""
        done = [sequence for sequence in self.leaving if sequence.in_flight is None]
        for sequence in done:
            self.leaving.remove(sequence)
            self._release(sequence)
        return done

    def preempt(self, sequence: Sequence) -> None:
        """Puts a running sequence back to the head of the queue. Its tokens stay; their KV is recomputed later."""
        if sequence.in_flight is not None:
            raise AssertionError("a round in flight must be collected before one of its sequences is preempted")
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.metrics.preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(sequence)
        self.waiting.appendleft(sequence)

    def suspect(self, sequences: Seq[Sequence]) -> None:
        """Preempts sequences of a round that failed; each runs alone until `acquit`, so that the one at fault is found.

        No round is in flight.
        """
        for sequence in reversed(sequences):  # the oldest gets to the head of the queue
            if sequence.status is Status.RUNNING:
                self.preempt(sequence)
        self.suspects += [s for s in sequences if s.status is Status.WAITING and s not in self.suspects]

    def acquit(self, sequence: Sequence) -> None:
        """Lets a suspect run together with others again."""
        if sequence in self.suspects:
            self.suspects.remove(sequence)

    def _schedule_alone(self, sequence: Sequence) -> list[Work] | None:
        if sequence.status is Status.RUNNING:
            return self._reserve(self._plan([sequence]))
        while (work := self._admit_one(sequence, self.max_num_batched_tokens)) is None:
            if self._is_in_flight:
                return None
            self.preempt(self.running[-1])
        return [work]

    def _release(self, sequence: Sequence) -> None:
        self.pool.release(sequence.kv)
        self._slots.append(sequence.slot)
        sequence.slot = -1

    def _work(self, sequence: Sequence, budget: int) -> Work:
        """A sequence's work within a token budget: its pending tokens, then slots for draft tokens."""
        pending, in_flight = sequence.next_pending, sequence.in_flight
        num_tokens = min(pending, budget)
        start = None
        if in_flight is None:
            start = sequence.kv.num_computed
        elif not in_flight.decides:
            start = in_flight.end
        if num_tokens < pending:
            return Work(sequence, num_tokens, start, decides=False, slot=sequence.slot)
        lookahead = min(self._lookahead(sequence), budget - num_tokens)
        return Work(sequence, num_tokens, start, lookahead=lookahead, slot=sequence.slot)

    def _lookahead(self, sequence: Sequence) -> int:
        """Maximum draft length of a sequence: its last token is decided by the target without a draft."""
        if not sequence.params.speculate:
            return 0
        return max(0, min(self.lookahead, sequence.max_tokens - sequence.least_len - 1))

    def _plan(self, running: Seq[Sequence]) -> list[Work]:
        """Works within `max_num_batched_tokens`: one token per decoding sequence, then drafts, then prefill chunks.

        Sequences that reach their maximum length in the round in flight are left out, and those with a constraint until
        it is committed.
        """
        budget = self.max_num_batched_tokens
        works: list[Work] = []
        unfinished = [s for s in running if s.least_len < s.max_tokens and not s.awaits_commit]
        decoding = [s for s in unfinished if s.next_pending == 1]
        for i, sequence in enumerate(decoding):
            works.append(self._work(sequence, budget - (len(decoding) - i - 1)))
            budget -= works[-1].cost
        for sequence in unfinished:
            if sequence.next_pending > 1 and budget > 0:
                works.append(self._work(sequence, budget))
                budget -= works[-1].cost
        return works

    def _reserve(self, works: Iterable[Work]) -> list[Work] | None:
        """Allocates blocks for the works, oldest sequence first; if they run out, the youngest is preempted."""
        planned = {id(work.sequence): work for work in works}
        for sequence in list(self.running):
            work = planned.get(id(sequence))
            while work is not None and sequence.status is Status.RUNNING:
                if self.pool.grow(sequence.kv, _reach(work)):
                    break
                if self._is_in_flight:
                    return None
                self.preempt(self.running[-1])
        return [work for work in planned.values() if work.sequence.status is Status.RUNNING]

    def _admit(self, budget: int) -> list[Work]:
        works: list[Work] = []
        while self.waiting and budget > 0:
            work = self._admit_one(self.waiting[0], budget)
            if work is None:
                break
            works.append(work)
            budget -= work.cost
        return works

    def _admit_one(self, sequence: Sequence, budget: int) -> Work | None:
        """Admits a waiting sequence; None if there is no room for it now."""
        if len(self.running) >= self.max_num_seqs or not self._slots or self._sibling_is_prefilling(sequence):
            return None
        cached = self.pool.attach_prefix(sequence.kv, sequence.tokens)
        if not self._fits(sequence):
            self.pool.release(sequence.kv)
            return None
        sequence.slot = self._slots.pop()
        work = self._work(sequence, budget)
        if not self.pool.grow(sequence.kv, _reach(work)):
            raise AssertionError("admission was granted without enough free blocks")
        self.waiting.remove(sequence)
        self.running.append(sequence)
        self.admitted.append(sequence)
        sequence.status = Status.RUNNING
        if sequence.metrics.preemptions == 0:
            sequence.metrics.cached_tokens = cached
        return work

    def _sibling_is_prefilling(self, sequence: Sequence) -> bool:
        """Samples of one request wait for the first one's prefill, and then find the prompt in the prefix cache."""
        if sequence.index == 0 or not self.pool.prefix_caching:
            return False
        return any(s.request is sequence.request and s.num_pending > 1 for s in self.running)

    def _fits(self, sequence: Sequence) -> bool:
        """Whether a sequence can be prefilled completely without a preemption."""
        needed = self.pool.blocks_for(len(sequence.tokens) + self._lookahead(sequence))
        return needed - len(sequence.kv.blocks) <= self.pool.num_free


def _reach(work: Work) -> int:
    """Upper bound of the tokens with KV slots after a work, at most the sequence's maximum length."""
    sequence = work.sequence
    end = sequence.most_len if work.start is None else work.end
    return min(end + work.lookahead, sequence.max_tokens)
