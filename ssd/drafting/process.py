"""A drafter in other processes, the workers, which prepare drafts while the target verifies.

Each worker (replica) prepares its share of the outcomes of every sequence, and sends the drafts before the next round.
A round whose outcomes they cover uses them without waiting for a reply. Where most rounds have to ask all the same, as
in large batches, a single worker keeps its drafts and looks them up itself. A worker that is slow, hangs, crashes or
sends invalid messages costs speed, never a request.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from ssd.core import Origin, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter, Prepared
from ssd.drafting.estimate import Average
from ssd.drafting.replica import DraftReplica
from ssd.drafting.wire import Draft
from ssd.parallel.supervisor import Peer, Supervisor

LEAST_PATIENCE, MOST_PATIENCE = 0.05, 1.0  # seconds
_PATIENCE_PER_REPLY = 8  # times the mean reply
_MOST_BEHIND = 64  # tokens of a sequence that a worker reads while a round waits for it
_CATCH_UP_TOKENS = 2048  # sent to a worker that catches up, before it has read them
_MOST_HIT = 0.5  # share of rounds that need no reply, above which one worker's drafts are sent ahead


class ProcessDrafter(Drafter):
    """Drafts in the workers that `starts` launch, one each.

    A round waits for proposals at most 8 times as long as for the average reply (at first `patience` seconds), and not
    for workers of which an earlier reply is overdue. `on_demand`: they are launched when they are first asked for.
    `name`: for the log.
    """

    needs_tokens = True

    def __init__(
        self,
        starts: Seq[Callable[[], Peer | None]],
        lookahead: int,
        vocab_size: int,
        *,
        budget: int = 16,
        clock: Callable[[], float] = time.monotonic,
        patience: float = 0.25,
        hang_limit: float = 5.0,
        start_limit: float = 600.0,
        cores: int = 0,
        on_demand: bool = False,
        name: str = "the drafter's process",
    ) -> None:
        super().__init__()
        self.cores = cores
        self.lookahead, self.budget = lookahead, budget
        self.replies = 0  # rounds whose reply came in time
        self.at_hand = 0  # rounds that needed no reply
        self.late = 0  # rounds that went on without a reply
        self.wait_seconds = 0.0  # total wait for replies
        self._clock = clock
        self._reply = Average(7 / 8, patience / _PATIENCE_PER_REPLY, 1.0)  # seconds
        self._round_seconds = 0.0  # duration of the last round
        self._watched = False  # an observer has asked for the branches of the last round
        self._all_hit = Average(15 / 16, 4.0, 4.0)  # share of rounds in which every draft had been prepared
        limits = {"hang_limit": hang_limit, "start_limit": start_limit}
        supervisors = [Supervisor(name, start, clock=clock, on_demand=on_demand, **limits) for start in starts]
        self.replicas = [DraftReplica(each, lookahead, vocab_size) for each in supervisors]

    @property
    def patience(self) -> float:
        """Maximum wait of a round, in seconds."""
        return float(min(MOST_PATIENCE, max(LEAST_PATIENCE, _PATIENCE_PER_REPLY * self._reply.value)))

    def wait_ready(self, timeout: float) -> bool:
        """Waits until the workers can take rounds; False on timeout or if one is lost."""
        deadline = time.monotonic() + timeout
        for each in self.replicas:
            each.supervisor.running()  # launches one that is started on demand
        return all([each.available(max(0.0, deadline - time.monotonic())) for each in self.replicas])

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """Empty proposals while the workers are starting or still owe a reply, and if none replies in time."""
        if not any(work.lookahead for work in works):
            return [Proposal()] * len(works)
        available = [each for each in self.replicas if each.available()]
        if not available:
            self.late += any(each.supervisor.ready for each in self.replicas)
            return [Proposal()] * len(works)
        drafts = [self._look_up(work, available) for work in works]
        asked = available[self.replies % len(available)]  # each in turn, and all write the same: one may be wrong
        ahead = len(self.replicas) > 1 or self._watched or bool(self._all_hit.value > _MOST_HIT)
        self._watched = False
        for each in available:
            each.send(works, drafts, self._round_seconds, budget=self.budget, reply=each is asked, ahead=ahead)
        if None in drafts:
            written = iter(self._ask(asked) or [Proposal()] * len(works))
        else:
            self.at_hand += 1
        found = [next(written) if draft is None else draft.proposal for draft in drafts]
        origins = {proposal.origin for proposal in found} - {Origin.NONE}
        if origins:
            self._all_hit.add(origins == {Origin.HIT})
        return found

    def catch_up(self, works: Seq[Work]) -> bool:
        """Sends the workers what they do not have; no round waits until they have read it."""
        available = [each for each in self.replicas if each.available()]
        read = bool(available)
        for each in available:
            chunk, tokens = list[Work](), 0
            for work in works:
                unknown = each.num_unknown(work.sequence)
                if work.decides and unknown > _MOST_BEHIND and tokens < _CATCH_UP_TOKENS:
                    chunk.append(work)
                    tokens += unknown
            if chunk and each.idle:
                nothing, seconds = [Draft()] * len(chunk), self._round_seconds
                each.send(chunk, nothing, seconds, budget=self.budget, reply=False, ahead=True)
            read = read and not chunk and each.idle
        return read

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self._round_seconds = seconds
        self.stats.failures = sum(each.supervisor.failures for each in self.replicas)
        self.stats.busy_seconds = sum(each.busy_seconds for each in self.replicas)

    def prepared(self, sequence: Sequence) -> Prepared:
        """Waits for what is prepared in this round, and has what is prepared in the next one sent in any case."""
        self._watched = True
        found: dict[tuple[int, int], tuple[int, ...]] = {}
        for each in self.replicas:
            found |= each.prepared(sequence, self.patience)
        return found

    def forget(self, sequence: Sequence) -> None:
        for each in self.replicas:
            each.forget(sequence)

    def close(self) -> None:
        for each in self.replicas:
            each.close()

    def _look_up(self, work: Work, replicas: Seq[DraftReplica]) -> Draft | None:
        """The draft that one of them has prepared; None: they have to be asked. A first token waits for no draft."""
        if work.lookahead == 0 or not work.sequence.num_output:
            return Draft()
        found = (each.find(work.sequence) for each in replicas)
        draft = next((draft for draft in found if draft is not None), None)
        return draft.cut(work.lookahead) if draft is not None else None

    def _ask(self, replica: DraftReplica) -> list[Proposal] | None:
        """The proposals asked for; None if they are late, which counts as a reply after `patience` seconds."""
        began = self._clock()
        reply = replica.receive(self.patience)
        waited = self._clock() - began
        self.wait_seconds += waited
        self._reply.add(min(waited, MOST_PATIENCE))
        if reply is None:
            self.late += 1
            return None
        proposals, seconds = reply
        self.replies += 1
        self.stats.hand_over_seconds += max(0.0, waited - seconds)
        return proposals
