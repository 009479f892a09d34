"""One round of decoding: `launch` proposes drafts and verifies them, `collect` returns what was decided.

Autoregressive decoding (AR) is the round whose drafter proposes nothing; in speculative decoding (SD) the drafter
writes its proposal in `propose`; in speculative speculative decoding (SSD) it prepared it during the round before.
Committing tokens to sequences (stops, lengths, KV bookkeeping) is up to the engine.
"""

from __future__ import annotations

import itertools
import logging
import operator
from collections.abc import Callable
from collections.abc import Sequence as Seq
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from ssd.core import Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter, PerRound, Prepared
from ssd.decoding.isolation import Isolation
from ssd.decoding.observer import RoundObserver
from ssd.execution.clock import Clock, now
from ssd.execution.state import SequenceState
from ssd.execution.target import StagedWorks, Verification, WorkLogits

log = logging.getLogger("ssd")
T = TypeVar("T")


class Verifier(Protocol):
    """The target: verifies works and their drafts, which it reads from the SequenceState. Called in inference mode."""

    state: SequenceState
    vocab_size: int
    synchronous: bool  # True: it decides on the host, so a round must be collected before the next is launched

    def admit(self, sequence: Sequence) -> None: ...

    def stage(self, works: Seq[Work]) -> StagedWorks: ...

    def forward(self, staged: StagedWorks, *, in_part: bool) -> WorkLogits: ...

    def decide(self, logits: WorkLogits) -> Verification: ...

    @property
    def failure(self) -> str | None:
        """Why it can compute no longer; None while it can, as far as is known."""

    def close(self) -> None: ...

    def probe(self) -> None:
        """A forward pass of padding, which raises if the device cannot compute."""


@dataclass
class RoundStats:
    """Device time of all rounds, in seconds."""

    target_wait_seconds: float = 0.0  # from the start of a round to its verification: drafting
    verify_seconds: float = 0.0  # from the forward pass to the decision
    host_wait_seconds: float = 0.0  # from a decision to what the device computes next: it waits for the host
    round_seconds: float = 0.0  # from a decision to the next, while there are requests
    drafter_failures: int = 0  # calls of the drafter that raised


@dataclass
class InFlight:
    """A round that was launched and is not collected yet."""

    works: list[Work]  # with their proposals
    began: Clock
    verification: Verification
    before: Clock | None  # end of the round before; None: there was nothing to compute since then
    drafting: Clock | None  # when the drafter was asked, if there is one


@dataclass
class _DraftedWorks:
    """The works of a round that the drafter is asked for; none once it has raised."""

    works: Seq[Work]
    failures_before: int


class Round:
    """Runs rounds with one target and one drafter. What a drafter that raises is asked for is up to `Isolation`."""

    def __init__(self, target: Verifier, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter
        self.stats = RoundStats()
        self.observers: list[RoundObserver] = []  # to be changed on the engine's thread
        self.run_ahead = target.state.device.type == "cuda"  # on a CPU a call returns when its work is done
        self.isolation = Isolation()
        self._asked: PerRound[_DraftedWorks] = PerRound()
        self._newest = _DraftedWorks([], 0)  # of the last round launched
        self._last_end: Clock | None = None  # end of the last round launched; None: the device is idle
        self._before: Clock | None = None  # the same; None: the engine is idle

    @property
    def synchronous(self) -> bool:
        """Whether a round must be collected before the next one is launched."""
        if not self.run_ahead or self.target.synchronous or self.drafter.needs_tokens:
            return True
        return any(observer.synchronous for observer in self.observers)

    @property
    def lookahead(self) -> int:
        """Maximum draft length of the next round: what the drafter proposes and the SequenceState has room for."""
        return min(self.drafter.lookahead, self.target.state.lookahead)

    def use(self, drafter: Drafter) -> None:
        """Goes on with another drafter, while no round is in flight; its statistics begin at 0."""
        self.drafter, self.stats, self.isolation = drafter, RoundStats(), Isolation()

    def part(self, name: str) -> AbstractContextManager[object]:
        """The observers' contexts around a part of a round."""
        if not self.observers:
            return nullcontext()
        with ExitStack() as stack:
            for observer in self.observers:
                stack.enter_context(observer.part(name) or nullcontext())
            return stack.pop_all()

    def admit(self, sequence: Sequence) -> None:
        """Writes a sequence, which has just got a slot, to the SequenceState."""
        self.target.admit(sequence)

    def launch(self, works: Seq[Work]) -> InFlight:
        """Launches a round without waiting for the device (on a CPU it is complete on return)."""
        alone = self._last_end is None
        began = self._last_end or now(self.target.state.device)
        before, drafting = self._before, now(self.target.state.device) if self.drafter.lookahead else None
        asked = _DraftedWorks(self.isolation.asked(works), self.stats.drafter_failures)
        works = self._propose(works, asked)
        self._asked.put(works, asked)
        self._newest = asked
        with self.part("verify"), torch.inference_mode():
            staged = self.target.stage(works)
            in_part = self._guarded(asked, "settle", self.drafter.settle, False)
            logits = self.target.forward(staged, in_part=in_part)
            self._guarded(asked, "prepare", self.drafter.prepare, None)
            verification = self.target.decide(logits)
        self._last_end = self._before = verification.ended
        if alone:
            self._decided([], [])
        for observer in self.observers:
            observer.launched(works, self._prepared)
        return InFlight(works, began, verification, before, drafting)

    def rest(self) -> None:
        """The engine is idle: the time until the next round is not counted as waiting."""
        self._before = None

    def collect(self, round_: InFlight) -> tuple[list[Outcome | None], float]:
        """Waits for the device; returns the outcomes and how many seconds the round took."""
        verification = round_.verification
        self._guarded(self._newest, "serve", lambda _: self.drafter.serve(verification.ended), None)
        with self.part("collect"):
            outcomes = verification.collect()
        if self._last_end is verification.ended:  # nothing was launched after it
            self._last_end = None
        else:
            self._decided(round_.works, outcomes)
        self.stats.target_wait_seconds += max(0.0, verification.began.since(round_.began))
        self.stats.verify_seconds += verification.ended.since(verification.began)
        if round_.before is not None:
            self.stats.host_wait_seconds += max(0.0, (round_.drafting or verification.began).since(round_.before))
        self.stats.round_seconds += verification.ended.since(round_.before or round_.began)
        return outcomes, verification.ended.since(round_.began)

    def discard(self, round_: InFlight) -> None:
        """Waits for a round, whatever becomes of it."""
        try:
            self.collect(round_)
        except Exception as error:
            log.debug("the round after a failed one failed, too", exc_info=error)

    def can_compute(self) -> bool:
        """Whether the device still computes: a forward pass of padding."""
        try:
            self.target.probe()
        except Exception as error:
            log.debug("the device computes no longer", exc_info=error)
            return False
        return True

    def close(self) -> None:
        """Ends the processes of the drafter and of the target."""
        try:
            self.drafter.close()
        finally:
            self.target.close()

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        """Passes the outcomes of a committed round to the observers and to the drafter."""
        for observer in self.observers:
            observer.decided(works, outcomes, seconds)
        asked = self._asked.pop(works)
        if asked is None or asked.failures_before != self.stats.drafter_failures:
            return  # it has raised since, and starts afresh
        ids = {id(work) for work in asked.works}
        decided = [outcome for work, outcome in zip(works, outcomes, strict=True) if id(work) in ids]
        self._guarded(asked, "observe", lambda works: self.drafter.observe(works, decided, seconds), None)
        self.isolation.succeeded(asked.works)

    def forget(self, sequence: Sequence) -> None:
        """Makes the drafter drop its state of a sequence."""
        self.isolation.forget(sequence.id)
        self._forget(sequence)

    def _forget(self, sequence: Sequence) -> None:
        try:
            self.drafter.forget(sequence)
        except Exception as error:
            log.debug("the drafter could not forget a sequence", exc_info=error)

    def _decided(self, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        self._guarded(self._newest, "decided", lambda _: self.drafter.decided(works, outcomes), None)

    def _prepared(self, sequence: Sequence) -> Prepared:
        try:
            return self.drafter.prepared(sequence)
        except Exception as error:
            log.debug("the drafter does not tell what it has prepared", exc_info=error)
            return {}

    def _propose(self, works: Seq[Work], asked: _DraftedWorks) -> list[Work]:
        """The works, and those asked for, with their proposals."""
        deciding = [work for work in asked.works if work.decides]
        nothing: dict[int, Work] = {}
        drafted = self._guarded(asked, "propose", lambda _: self._drafted(deciding), nothing)
        asked.works = [drafted.get(id(work), work) for work in asked.works]
        return [drafted.get(id(work), work) for work in works]

    def _drafted(self, works: Seq[Work]) -> dict[int, Work]:
        """The works with what the drafter proposes, by the id of the work without it."""
        proposals = self.drafter.propose(works)
        if len(proposals) != len(works):
            return {}
        return {id(work): self._usable(work, proposal) for work, proposal in zip(works, proposals, strict=True)}

    def _usable(self, work: Work, proposal: Proposal) -> Work:
        """Cuts a proposal to its KV slots and at the first invalid token; malformed distributions drop it.

        A token that breaks a structured output is invalid. It stays in a draft that only the device knows, and in one
        with distributions (the rejection rule is right for all tokens that were sampled): its position's mask excludes
        it, so it cannot be accepted.
        """
        if not proposal.num_tokens or (self.target.state.tree is not None and not work.is_decode):
            return work  # where drafts may be trees they are behind single tokens only
        if proposal.num_on_device:
            fits = proposal.num_on_device <= work.lookahead
            return work.with_proposal(proposal if fits else replace(proposal, num_on_device=work.lookahead))
        tokens = tuple(map(operator.index, proposal.token_ids[: work.lookahead]))
        usable = tuple(itertools.takewhile(lambda t: 0 <= t < self.target.vocab_size, tokens))
        constraint, parents = work.sequence.constraint, proposal.parents
        if parents is not None:
            in_order = len(parents) == len(proposal.token_ids) and all(-1 <= p < i for i, p in enumerate(parents))
            tree = replace(proposal, token_ids=usable, parents=parents[: len(usable)])
            return work.with_proposal(tree) if in_order else work
        if constraint is not None and proposal.distributions is None:
            usable = usable[: constraint.num_valid(usable)]
        q = proposal.distributions
        if q is not None and (q.dim() != 2 or len(q) < len(usable) or q.shape[1] != self.target.vocab_size):
            return work
        return work.with_proposal(replace(proposal, token_ids=usable))

    def _guarded(self, asked: _DraftedWorks, part: str, call: Callable[[Seq[Work]], T], otherwise: T) -> T:
        """Calls the drafter for the works that it is asked for; `otherwise` if there are none or it raises."""
        if not asked.works:
            return otherwise
        try:
            with self.part(part):
                return call(asked.works)
        except Exception as error:
            self.stats.drafter_failures += 1
            self.isolation.failed(asked.works)
            log.warning("the drafter failed, decoding goes on without it for a while: %r", error)
            log.debug("how it failed", exc_info=error)
            for work in asked.works:
                self._forget(work.sequence)
            asked.works = []
            return otherwise
