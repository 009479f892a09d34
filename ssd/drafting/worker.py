"""The worker: the process that a drafter runs in. Replies to rounds over a socket, and prepares drafts between them.

It keeps a copy of every sequence and a SequenceState of its own, which every ROUND message updates.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ssd.core import Origin, Outcome, Proposal, Request, Sequence, Work
from ssd.decoding.drafter import Drafter
from ssd.drafting.wire import (
    Channel,
    ChannelClosed,
    Entry,
    Kind,
    Message,
    SequenceSetup,
    WireError,
    decode_round,
    decode_setup,
    encode_prepared,
    encode_proposals,
)

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
        works = [self._work(entry) for entry in entries]
        decided = {entry.id: entry for entry in entries if entry.accepted >= 0 and entry.setup is None}
        outcomes: list[Outcome | None] = []
        for work in self.last:
            entry = decided.get(work.sequence.id)
            if entry is None:
                outcomes.append(None)
                continue
            drafted, tokens = work.proposal.token_ids, tuple(entry.new_tokens)
            outcomes.append(Outcome(tokens, (), drafted, work.proposal.origin))
        if self.last:
            self.drafter.observe(self.last, outcomes, seconds)
        return works

    def propose(self, works: Seq[Work]) -> list[Work]:
        """The works with their proposals, whose tokens are copied to the host."""
        drafter = self.drafter
        found = [work.with_proposal(p) for work, p in zip(works, drafter.propose(works), strict=True)]
        drafter.settle(found)
        state = self.state
        if state is not None and any(work.proposal.num_on_device for work in found):
            slots = [work.slot for work in found]
            drafts, origins = state.drafts[slots].tolist(), state.origin[slots].tolist()
            found = [
                work.with_proposal(_fetched(work.proposal, draft, origin))
                for work, draft, origin in zip(found, drafts, origins, strict=True)
            ]
        self.last = found
        return found

    def _work(self, entry: Entry) -> Work:
        """Updates a sequence and returns its work. As in the engine, one token is pending once there is output."""
        if entry.setup is not None:
            sequence = self.sequences[entry.id] = _sequence(entry.id, entry.setup, entry.new_tokens)
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
            sequence.last_accepted = max(0, entry.accepted)
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


def _sequence(sequence_id: int, setup: SequenceSetup, tokens: Seq[int]) -> Sequence:
    request = Request(str(sequence_id), tuple(tokens[: setup.num_prompt]), setup.params)
    stops, most = setup.stop_token_ids, setup.max_tokens
    return Sequence(sequence_id, request, 0, setup.seed, stops, most, tokens=list(tokens))


def run(fd: int, build: Callable[[dict[str, Any]], WorkerDrafter]) -> None:
    """Main function: receives the setup over the socket `fd`, builds the drafter and serves until the socket closes."""
    channel = Channel(socket.socket(fileno=fd))
    with suppress(ChannelClosed):
        drafter = build(decode_setup(_receive(channel, Kind.SETUP).payload))
        _send(channel, Message(Kind.READY))
        serve(drafter, channel)


def serve(drafter: WorkerDrafter, channel: Channel) -> None:
    """Replies to rounds until the socket closes; between them the drafter prepares."""
    with suppress(ChannelClosed):
        while True:
            _serve_round(drafter, channel)


def _serve_round(worker: WorkerDrafter, channel: Channel) -> None:
    message = _receive(channel, Kind.ROUND)
    forgotten, entries = decode_round(message.payload)
    for sequence_id in forgotten:
        worker.forget(sequence_id)
    began = time.perf_counter_ns()
    works = worker.propose(worker.update(entries, message.times[0] / 1e9))
    payload = encode_proposals([work.proposal for work in works])
    times = int(worker.drafter.stats.busy_seconds * 1e9), time.perf_counter_ns() - began
    _send(channel, Message(Kind.PROPOSALS, message.round, payload, times))
    worker.drafter.prepare(works, channel.waiting)
    if channel.waiting():  # the next round is here: too late
        return
    prepared = {work.sequence.id: found for work in works if (found := worker.drafter.prepared(work.sequence))}
    if prepared:
        _send(channel, Message(Kind.PREPARED, message.round, encode_prepared(prepared)))


def _receive(channel: Channel, kind: Kind) -> Message:
    message = channel.receive()
    if message is None or message.kind != kind:
        raise WireError(f"a message of kind {kind.name} was due")
    return message


def _send(channel: Channel, message: Message) -> None:
    channel.post(message)
    channel.flush()
