"""One round of decoding: propose → verify → prepare when it is launched, and what it decided when it is collected.

Autoregressive decoding (AR) is the round whose drafter proposes nothing; in speculative decoding (SD) the drafter
writes its proposal first; in speculative speculative decoding (SSD) it has prepared it during the round before. A round
decides tokens; committing them to the sequences (stops, lengths, KV bookkeeping) is the engine's.
"""

from __future__ import annotations

import functools
import itertools
import logging
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

from ssd.core import Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter
from ssd.execution.clock import Clock, now
from ssd.execution.state import SequenceState
from ssd.execution.target import Hook, Verification

log = logging.getLogger("ssd")
T = TypeVar("T")
_LONGEST_REST = 1024  # rounds


class Verifier(Protocol):
    """The target: verifies works and their drafts over the state of their sequences."""

    state: SequenceState
    vocab_size: int
    synchronous: bool  # True: it decides on the host, so a round cannot be launched before the last one is collected

    def admit(self, sequence: Sequence) -> None: ...

    def launch(self, works: Seq[Work], settle: Hook, prepare: Hook) -> Verification: ...


@dataclass
class RoundStats:
    """Where the time of all rounds went, in seconds of the device."""

    target_wait_seconds: float = 0.0  # the target waited for proposals
    verify_seconds: float = 0.0  # from the forward pass to the decision
    drafter_failures: int = 0  # calls of the drafter that raised


@dataclass
class InFlight:
    """A round that was launched and is not collected yet."""

    works: list[Work]  # with their proposals
    began: Clock
    verification: Verification


class Round:
    """propose → verify → decide, for a batch of sequences. A drafter that fails is left alone for a while."""

    def __init__(self, target: Verifier, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter
        self.stats = RoundStats()
        self.run_ahead = target.state.device.type == "cuda"  # a CPU's work is done when its call returns
        self._rest = 0  # rounds to go without the drafter
        self._last_end: Clock | None = None  # of the round that was launched last, until the device is idle

    @property
    def synchronous(self) -> bool:
        """Whether a round must be collected before the next one is launched."""
        return not self.run_ahead or self.target.synchronous or self.drafter.needs_tokens

    def admit(self, sequence: Sequence) -> None:
        """The sequence has got a slot of the state."""
        self.target.admit(sequence)

    def launch(self, works: Seq[Work]) -> InFlight:
        """Puts a round on the device without waiting for it (on a CPU it is done then)."""
        began = self._last_end or now(self.target.state.device)
        works = self._propose(works)
        settle = functools.partial(self._shielded, lambda: self.drafter.settle(works), None, works)
        prepare = functools.partial(self._shielded, lambda: self.drafter.prepare(works), None, works)
        verification = self.target.launch(works, settle, prepare)
        self._last_end = verification.ended
        return InFlight(works, began, verification)

    def collect(self, round_: InFlight) -> tuple[list[Outcome | None], float]:
        """What was decided, and how many seconds the round took. Waits for the device."""
        outcomes = round_.verification.collect()
        verification = round_.verification
        if self._last_end is verification.ended:  # nothing was launched after it: the device is idle now
            self._last_end = None
        self.stats.target_wait_seconds += max(0.0, verification.began.since(round_.began))
        self.stats.verify_seconds += verification.ended.since(verification.began)
        return outcomes, verification.ended.since(round_.began)

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        """Tells the drafter what a round decided, after it was committed."""
        self._shielded(lambda: self.drafter.observe(works, outcomes, seconds), None, works)

    def forget(self, sequence: Sequence) -> None:
        """The sequence has finished, or the drafter is to start afresh with it."""
        try:
            self.drafter.forget(sequence)
        except Exception as error:
            log.debug("the drafter could not forget a sequence", exc_info=error)

    def _propose(self, works: Seq[Work]) -> list[Work]:
        self._rest = max(0, self._rest - 1)
        deciding = [work for work in works if work.decides]
        nothing: list[Proposal] = []
        proposals = self._shielded(lambda: self.drafter.propose(deciding), nothing, works)
        if len(proposals) != len(deciding):
            proposals = [Proposal()] * len(deciding)
        drafted = {id(work): self._usable(work, p) for work, p in zip(deciding, proposals, strict=True)}
        return [drafted.get(id(work), work) for work in works]

    def _usable(self, work: Work, proposal: Proposal) -> Work:
        """Cuts a proposal where it outgrows its KV slots or makes no sense: a bad drafter costs speed, nothing else."""
        if not proposal.num_tokens:
            return work
        if proposal.num_on_device:
            fits = proposal.num_on_device <= work.lookahead
            return work.with_proposal(proposal if fits else replace(proposal, num_on_device=work.lookahead))
        tokens = proposal.token_ids[: work.lookahead]
        usable = tuple(itertools.takewhile(lambda t: 0 <= t < self.target.vocab_size, tokens))
        q = proposal.distributions
        if q is not None and (q.dim() != 2 or len(q) < len(usable) or q.shape[1] != self.target.vocab_size):
            return work
        return work.with_proposal(replace(proposal, token_ids=usable))

    def _shielded(self, call: Callable[[], T], otherwise: T, works: Seq[Work]) -> T:
        """The call's result; `otherwise` if it fails, and for some rounds after that, more the more often it does."""
        if self._rest:
            return otherwise
        try:
            return call()
        except Exception as error:
            self.stats.drafter_failures += 1
            self._rest = min(2**self.stats.drafter_failures, _LONGEST_REST)
            log.warning("the drafter failed, decoding goes on without it for %d rounds: %r", self._rest, error)
            log.debug("how it failed", exc_info=error)
            for work in works:
                self.forget(work.sequence)
            return otherwise
