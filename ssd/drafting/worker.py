"""The worker: the process that a drafter runs in. Replies to rounds over a socket, and prepares drafts between them.

It keeps a copy of every sequence and a SequenceState of its own, which every ROUND message updates.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ssd.core import Origin, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter
from ssd.drafting.wire import Draft, Entry, Kind, RoundMessage, decode_round, encode_prepared, encode_proposals
from ssd.parallel.process import connect
from ssd.parallel.transport import READY, Channel, ChannelClosed, Message, WireError, Words

if TYPE_CHECKING:
    from ssd.execution.state import SequenceState  # brings torch


@dataclass
class WorkerDrafter:
    """The worker's drafter, sequences and SequenceState (None for a drafter that needs tokens only)."""

    drafter: Drafter
    state: SequenceState | None = None
    sequences: dict[int, Sequence] = field(default_factory=dict)
    last: list[Work] = field(default_factory=list)  # works of the last round, with their proposals
    free_slots: list[int] = field(default_factory=list)
    close: Callable[[], None] = lambda: None  # ends what it has started

    def __post_init__(self) -> None:
        if self.state is not None:
            self.free_slots = list(range(self.state.num_slots))

    def forget(self, sequence_id: int) -> None:
        sequence = self.sequences.pop(sequence_id, None)
        if sequence is not None:
            self.drafter.forget(sequence)
            if self.state is not None:
                self.free_slots.append(sequence.slot)

    def update(self, entries: Seq[Entry], seconds: float) -> list[Work]:
        """Updates the sequences, passes the last round's outcomes to the drafter, and returns the new works."""
        last = {work.sequence.id: work for work in self.last}
        works = [self._work(entry, last.get(entry.id)) for entry in entries]
        decided = {entry.id: entry.new_tokens for entry in entries if entry.sequence is None}
        outcomes: list[Outcome | None] = []
        for work in self.last:
            tokens, known = decided.get(work.sequence.id), work.sequence.last_accepted >= 0
            outcome = Outcome(tuple(tokens), (), work.proposal.token_ids, work.proposal.origin) if tokens else None
            outcomes.append(outcome if known else None)
        if self.last:
            self.drafter.observe(self.last, outcomes, seconds)
        return works

    def propose(self, works: Seq[Work], drafts: Seq[Draft | None]) -> list[Work]:
        """The works with the drafts to be verified: the given ones, and where there is none (None) the drafter's own.

        Its tokens are copied to the host.
        """
        drafter, state = self.drafter, self.state
        given = [(work.slot, draft) for work, draft in zip(works, drafts, strict=True) if draft and draft.token_ids]
        own = iter(drafter.propose([work for work, draft in zip(works, drafts, strict=True) if draft is None]))
        found = [
            work.with_proposal(next(own) if draft is None else draft.proposal)
            for work, draft in zip(works, drafts, strict=True)
        ]
        if state is not None and given:
            slots = [slot for slot, _ in given]
            state.set_prepared(slots, [draft.token_ids for _, draft in given], [draft.confidence for _, draft in given])
        drafter.settle(found)
        if state is not None and any(work.proposal.num_on_device for work in found):
            slots = [work.slot for work in found]
            tokens, origins = state.drafts[slots].tolist(), state.origin[slots].tolist()
            found = [
                work.with_proposal(_fetched(work.proposal, draft, origin))
                for work, draft, origin in zip(found, tokens, origins, strict=True)
            ]
        self.last = found
        return found

    def _work(self, entry: Entry, last: Work | None) -> Work:
        """Updates a sequence and returns its work. As in the engine, one token is pending once there is output.

        `last`: its work in the last round. Whether the new tokens are the outcome of what was proposed then shows in
        them: other drafts may have been verified since.
        """
        if entry.sequence is not None:
            sequence = self.sequences[entry.id] = entry.sequence
            if self.state is not None:
                if not self.free_slots:
                    raise WireError("there are more sequences than slots")
                sequence.slot = self.free_slots.pop()
                self.state.admit(sequence.slot, sequence)
        else:
            known = self.sequences.get(entry.id)
            if known is None or len(known.tokens) != entry.known:
                raise WireError(f"sequence {entry.id}: {entry.known} tokens should be known of it")
            sequence = known
            sequence.tokens += entry.new_tokens
            accepted = len(entry.new_tokens) - 1
            drafted = last.proposal.token_ids[: max(0, accepted)] if last is not None else None
            sequence.last_accepted = accepted if drafted == tuple(entry.new_tokens[:-1]) else -1
            if self.state is not None:
                self.state.append(sequence.slot, entry.known, entry.new_tokens, sequence.last_accepted)
        pending = 1 if sequence.num_output else len(sequence.tokens)
        start = len(sequence.tokens) - pending
        return Work(sequence, pending, start, lookahead=entry.lookahead, slot=sequence.slot)


def _fetched(proposal: Proposal, draft: Seq[int], origin: int) -> Proposal:
    if not proposal.num_on_device:
        return proposal
    tokens = tuple(draft[: proposal.num_on_device])
    return replace(proposal, token_ids=tokens, num_on_device=0, origin=Origin(origin))


def run(fd: int, build: Callable[[dict[str, Any]], WorkerDrafter]) -> None:
    """Main function: receives the setup over the socket `fd`, builds the drafter and serves until the socket closes."""
    with suppress(ChannelClosed):
        channel, setup = connect(fd)
        drafter = build(setup)
        try:
            channel.send(Message(READY))
            serve(drafter, channel)
        finally:
            drafter.close()


def serve(drafter: WorkerDrafter, channel: Channel) -> None:
    """Replies to rounds until the socket closes; between them the drafter prepares."""
    with suppress(ChannelClosed):
        while True:
            message = channel.expect(Kind.ROUND)
            serve_round(drafter, channel, message, decode_round(message.payload))


def serve_round(worker: WorkerDrafter, channel: Channel, message: Message, round_: RoundMessage) -> None:
    """Replies to a ROUND message, whose payload is `round_`."""
    worker.drafter.budget = round_.budget
    for sequence_id in round_.forgotten:
        worker.forget(sequence_id)
    began = time.perf_counter_ns()
    drafts = [entry.draft for entry in round_.entries]
    works = worker.propose(worker.update(round_.entries, message.times[0] / 1e9), drafts)
    asked = [work.proposal for work, draft in zip(works, drafts, strict=True) if draft is None and round_.reply]
    if asked:
        times = _busy(worker), time.perf_counter_ns() - began
        channel.send(Message(Kind.PROPOSALS, message.round, encode_proposals(asked), times))
    worker.drafter.prepare(works, channel.waiting)
    if asked and not round_.ahead:
        return
    payload = encode_prepared({}) if channel.waiting() else _prepared(worker, works)  # the next round is here: too late
    if not asked or payload.any():
        channel.send(Message(Kind.PREPARED, message.round, payload, (_busy(worker), 0)))


def _busy(worker: WorkerDrafter) -> int:
    """Computing time of the drafter, in ns."""
    return int(worker.drafter.stats.busy_seconds * 1e9)


def _prepared(worker: WorkerDrafter, works: Seq[Work]) -> Words:
    drafter = worker.drafter
    prepared = [(work, found) for work in works if (found := drafter.prepared(work.sequence))]
    return encode_prepared(
        {work.sequence.id: (work.proposal.token_ids, found) for work, found in prepared},
        {work.sequence.id: drafter.prepared_confidence(work.sequence) for work, _ in prepared},
    )
