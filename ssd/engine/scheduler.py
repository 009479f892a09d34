"""The scheduler: which sequences run in the next round, and over which KV blocks.

Continuous batching: sequences join and leave between any two rounds, and prefill chunks share a batch with decoding. A
round may be scheduled while the one before it is in flight: a sequence's length is then known up to bounds, and blocks
are reserved for the upper one. Knows nothing of tensors, models or text.

Order is by priority, then arrival. A round has a token of every decoding sequence. Of the tokens that are left for
prompts, the first prompt in order gets at least half, and the others share the rest, the shortest first: neither a long
prompt nor many short ones can keep another from its first token.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import Final

from ssd.core import Sequence, Status, Work
from ssd.kv.blocks import BlockPool

_MIN_GROUPS: Final = 4  # while a group waits with no running sequence, another may run max_num_seqs / 4 at most


class Scheduler:
    """Admits and schedules sequences in order, and preempts the last.

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
        self.waiting: list[Sequence] = []  # in order, as `running`
        self.running: list[Sequence] = []
        self.leaving: list[Sequence] = []  # finished, but a round in flight writes to their blocks
        self.preempted: list[Sequence] = []  # since the list was last cleared by the engine
        self.admitted: list[Sequence] = []  # by the last `schedule`
        self.isolated: list[Sequence] = []  # from a failed round: each runs alone until it has decided a token
        self.num_preemptions = 0
        self._slots = list(range(num_slots or max_num_seqs))  # that are free

    def add(self, sequence: Sequence) -> None:
        insort(self.waiting, sequence, key=_order)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    @property
    def _is_in_flight(self) -> bool:
        """Whether a round in flight may use KV blocks: none is preempted before it is collected."""
        return bool(self.leaving) or any(sequence.in_flight is not None for sequence in self.running)

    def schedule(self) -> list[Work] | None:
        """The next batch: every decoding sequence, and prefill chunks of running and newly admitted ones.

        None: a sequence must be preempted, and the round in flight must be collected before that.
        """
        self.admitted = []
        if self.isolated:
            return self._schedule_alone(self.isolated[0])
        if not self._preempt_for_waiting():
            return None
        decoding, prompts = _ready(self.running)
        turns = self._turns(prompts)
        planned = self._plan(decoding, turns)
        works = self._reserve(planned)
        if works is None:
            return None
        if len(works) < len(planned):  # preempted: they come first now
            turns = self._turns([])
        return self._top_up(works + self._admit(turns, self._left(works)), prompts) if turns else works

    def finish(self, sequence: Sequence) -> None:
        """Removes a sequence. `released` frees its blocks once no round in flight writes them."""
        if sequence.status is Status.RUNNING:
            self.running.remove(sequence)
            self.leaving.append(sequence)
        elif sequence.status is Status.WAITING:
            self.waiting.remove(sequence)
        sequence.status = Status.FINISHED
        self.clear_isolation(sequence)

    def released(self) -> list[Sequence]:
        """Frees blocks and slots of finished sequences that are in no round in flight; returns those."""
        done = [sequence for sequence in self.leaving if sequence.in_flight is None]
        for sequence in done:
            self.leaving.remove(sequence)
            self._release(sequence)
        return done

    def preempt(self, sequence: Sequence) -> None:
        """Puts a running sequence back to its place in the queue. Its tokens stay; their KV is recomputed later."""
        if sequence.in_flight is not None:
            raise AssertionError("a round in flight must be collected before one of its sequences is preempted")
        self.running.remove(sequence)
        self._release(sequence)
        sequence.status = Status.WAITING
        sequence.metrics.preemptions += 1
        self.num_preemptions += 1
        self.preempted.append(sequence)
        self.add(sequence)

    def isolate(self, sequences: Seq[Sequence]) -> None:
        """Preempts sequences of a failed round; each runs alone until `clear_isolation`, so that the cause is found.

        No round is in flight.
        """
        for sequence in sequences:
            if sequence.status is Status.RUNNING:
                self.preempt(sequence)
        self.isolated += [s for s in sequences if s.status is Status.WAITING and s not in self.isolated]

    def clear_isolation(self, sequence: Sequence) -> None:
        """Lets an isolated sequence run together with others again."""
        if sequence in self.isolated:
            self.isolated.remove(sequence)

    def _schedule_alone(self, sequence: Sequence) -> list[Work] | None:
        if sequence.status is Status.RUNNING:
            return self._reserve(self._plan(*_ready([sequence])))
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

    def _preempt_for_waiting(self) -> bool:
        """Preempts for higher priorities and unserved groups; False if the round in flight must be collected before."""
        while (candidate := self._preemption_candidate()) is not None:
            if self._is_in_flight:
                return False
            self.preempt(candidate)
        return True

    def _preemption_candidate(self) -> Sequence | None:
        """A running sequence to preempt for a waiting one that cannot be admitted otherwise.

        The last in order, if its priority is lower; or the last of a group that runs more than `_group_limit`
        sequences, if the waiting one's group runs none.
        """
        if not self.waiting or not self.running:
            return None
        head, last = self.waiting[0], self.running[-1]
        if last.params.priority > head.params.priority:
            return None if self._has_room(head) else last
        num_running = self._num_running()
        [(largest, count)] = num_running.most_common(1)
        if count <= self._group_limit:
            return None
        unserved = next((s for s in self.waiting if s.request.group not in num_running), None)
        if unserved is None or self._has_room(unserved):
            return None
        last = next(s for s in reversed(self.running) if s.request.group == largest)
        return last if last.params.priority >= unserved.params.priority else None

    @property
    def _group_limit(self) -> int:
        """Running sequences of a group while another group waits and runs none."""
        return max(1, self.max_num_seqs // _MIN_GROUPS)

    def _num_running(self) -> Counter[str]:
        """Running sequences of every group of requests."""
        return Counter(s.request.group for s in self.running)

    def _turns(self, prompts: list[Sequence]) -> list[Sequence]:
        """Prompts to prefill in the next round, in the order in which they get tokens.

        The running `prompts`, and as many waiting ones as there is room for. Samples of one request wait for the
        prefill of the first, and then find the prompt in the prefix cache.
        """
        turns = [*prompts, *self._next_waiting()] if self.waiting else prompts
        turns.sort(key=_order)
        return turns[:1] + sorted(turns[1:], key=lambda s: (s.params.priority, s.next_pending))

    def _next_waiting(self) -> list[Sequence]:
        room = min(self.max_num_seqs - len(self.running), len(self._slots))
        if room <= 0:
            return []
        found: list[Sequence] = []
        caching, num_running = self.pool.prefix_caching, self._num_running()
        unserved = {s.request.group for s in self.waiting if s.request.group not in num_running}
        prefilling = {s.request.id for s in self.running if caching and s.index == 0 and s.num_pending > 1}
        for sequence in self.waiting:
            if len(found) >= room:
                break
            request = sequence.request
            others_wait = len(unserved) > (request.group in unserved)
            limit = self._group_limit if others_wait else self.max_num_seqs
            if num_running[request.group] < limit and (sequence.index == 0 or request.id not in prefilling):
                found.append(sequence)
                num_running[request.group] += 1
                if caching and sequence.index == 0:
                    prefilling.add(request.id)
        return found

    def _plan(self, decoding: Seq[Sequence], turns: Seq[Sequence]) -> list[Work]:
        """Works within `max_num_batched_tokens`: one token per decoding sequence, then drafts, then prefill chunks.

        If there are prompts, drafts get at most half of the tokens that decoding leaves.
        """
        works: list[Work] = []
        budget = self.max_num_batched_tokens - len(decoding)
        drafts = budget // 2 if turns else budget
        for sequence in decoding:
            works.append(self._work(sequence, 1 + drafts))
            drafts -= works[-1].lookahead
            budget -= works[-1].lookahead
        for sequence in turns:
            if budget > 0:
                work = self._work(sequence, self._limit(sequence, turns, budget))
                works += [work] if sequence.status is Status.RUNNING else []
                budget -= work.cost
        return works

    def _limit(self, sequence: Sequence, turns: Seq[Sequence], budget: int) -> int:
        """Tokens that a prompt may have in the next round: the first leaves half to shorter ones of its priority."""
        if sequence is not turns[0]:
            return budget
        pending, priority = sequence.next_pending, sequence.params.priority
        shorter = sum(s.next_pending for s in turns if s.params.priority == priority and s.next_pending < pending)
        return max(1, budget // 2, budget - shorter)

    def _reserve(self, works: Iterable[Work]) -> list[Work] | None:
        """Allocates blocks for the works, in order; if they run out, the last sequence is preempted."""
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

    def _admit(self, turns: Seq[Sequence], budget: int) -> list[Work]:
        """Admits waiting sequences. One admitted out of order leaves the blocks that earlier ones need."""
        works: list[Work] = []
        waiting = sorted((s for s in turns if s.status is Status.WAITING), key=_order)
        missing = [self._blocks_missing(s) for s in waiting]
        promised = self._promised
        for sequence in turns:
            if sequence.status is Status.WAITING and budget > 0:
                place = waiting.index(sequence)
                limit = self._limit(sequence, turns, budget)
                work = self._admit_one(sequence, limit, promised + sum(missing[:place]))
                if work is not None:
                    works.append(work)
                    budget -= work.cost
                    promised += self._blocks_missing(sequence)
                    del waiting[place], missing[place]
        return works

    def _top_up(self, works: list[Work], prompts: Seq[Sequence]) -> list[Work]:
        """Gives the tokens left in the round to prefill chunks that end before their prompt does.

        `prompts` are running; one that was left without a chunk, for a prompt that could not be admitted, gets one.
        """
        budget = self._left(works)
        found = {work.sequence.id: work for work in works}
        for sequence in (*(work.sequence for work in works), *prompts):
            work = found.get(sequence.id, Work(sequence, 0, decides=False))
            if budget > 0 and not work.decides and sequence.status is Status.RUNNING:
                more = self._work(sequence, work.num_tokens + budget)
                if self.pool.grow(sequence.kv, _reach(more)):
                    found[sequence.id] = more
                    budget -= more.cost - work.cost
        return list(found.values())

    def _left(self, works: Iterable[Work]) -> int:
        """Tokens left of `max_num_batched_tokens`."""
        return self.max_num_batched_tokens - sum(work.cost for work in works)

    @property
    def _promised(self) -> int:
        """Free blocks that the prompts of running sequences still need."""
        return sum(self._blocks_missing(s) for s in self.running if s.num_pending > 1)

    def _admit_one(self, sequence: Sequence, budget: int, promised: int = 0) -> Work | None:
        """Admits a waiting sequence; None if there is no room for it now. `promised`: free blocks that others need."""
        if not self._attach(sequence, promised):
            return None
        cached = sequence.kv.num_computed
        sequence.slot = self._slots.pop()
        work = self._work(sequence, budget)
        if not self.pool.grow(sequence.kv, _reach(work)):
            raise AssertionError("admission was granted without enough free blocks")
        self.waiting.remove(sequence)
        insort(self.running, sequence, key=_order)
        self.admitted.append(sequence)
        sequence.status = Status.RUNNING
        if sequence.metrics.preemptions == 0:
            sequence.metrics.cached_tokens = cached
        return work

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether a waiting sequence could be admitted."""
        attached = self._attach(sequence, self._promised)
        self.pool.release(sequence.kv)
        return attached

    def _attach(self, sequence: Sequence, promised: int) -> bool:
        """Attaches the cached prefix of a waiting sequence; False if it cannot be prefilled without a preemption."""
        if len(self.running) >= self.max_num_seqs or not self._slots:
            return False
        self.pool.attach_prefix(sequence.kv, sequence.tokens)
        if self._blocks_missing(sequence) + promised <= self.pool.num_free:
            return True
        self.pool.release(sequence.kv)
        return False

    def _blocks_missing(self, sequence: Sequence) -> int:
        """Blocks that the rest of a prompt needs."""
        return self.pool.missing(sequence.kv, len(sequence.tokens) + self._lookahead(sequence))


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.params.priority, sequence.id


def _ready(running: Iterable[Sequence]) -> tuple[list[Sequence], list[Sequence]]:
    """Sequences that decode in the next round, and those that are prefilled.

    Those that reach their maximum length in the round in flight are left out, and those with a constraint until it is
    committed.
    """
    decoding: list[Sequence] = []
    prompts: list[Sequence] = []
    for sequence in running:
        if sequence.least_len < sequence.max_tokens and not sequence.awaits_commit:
            (decoding if sequence.next_pending == 1 else prompts).append(sequence)
    return decoding, prompts


def _reach(work: Work) -> int:
    """Upper bound of the tokens with KV slots after a work, at most the sequence's maximum length."""
    sequence = work.sequence
    end = sequence.most_len if work.start is None else work.end
    return min(end + work.lookahead, sequence.max_tokens)
