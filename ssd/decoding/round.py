"""One round of decoding: propose, verify, decide.

Autoregressive decoding is the round whose drafter proposes nothing. The round decides tokens; committing them to the
sequences (stops, lengths, KV books) is the engine's.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

from ssd.core import Batch, Outcome, Proposal, Sequence, Work
from ssd.decoding.acceptance import Acceptance, Coupled
from ssd.decoding.drafter import Drafter

log = logging.getLogger("ssd")
T = TypeVar("T")
_LONGEST_REST = 1024


class Target(Protocol):
    """The model whose law is sacred: a batch in, one float32 row of logits for each of its `logit_rows` out."""

    block_size: int
    vocab_size: int

    def forward(self, batch: Batch) -> torch.Tensor: ...


@dataclass
class Clocks:
    """Where the time of all rounds went, in seconds."""

    draft: float = 0.0  # the target waited for proposals
    verify: float = 0.0  # from the forward pass to the decision


class Round:
    """propose → verify → decide, for a batch of sequences. A drafter that fails is left alone for a while."""

    def __init__(self, target: Target, drafter: Drafter, acceptance: Acceptance | None = None) -> None:
        self.target = target
        self.drafter = drafter
        self.acceptance = acceptance or Coupled()
        self.clocks = Clocks()
        self.failures = 0  # of the drafter's calls
        self._rest = 0  # rounds to go without it

    @torch.inference_mode()
    def run(self, works: Seq[Work]) -> tuple[list[Work], list[Outcome | None]]:
        """The works as verified (with their proposals), and what was decided; None for a prefill chunk."""
        began = time.perf_counter()
        works = self._propose(works)
        proposed = time.perf_counter()
        logits = self.target.forward(Batch.build(works, self.target.block_size))  # on a GPU: does not wait
        self._shielded(lambda: self.drafter.anticipate(works), None, works)
        outcomes = self.acceptance.decide(works, logits)
        ended = time.perf_counter()
        self.clocks.draft += proposed - began
        self.clocks.verify += ended - proposed
        self.drafter.round_seconds = ended - began
        return works, outcomes

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
        """Cuts a proposal where it outgrows its slots or makes no sense: a bad drafter costs speed, nothing else."""
        tokens = proposal.token_ids[: work.lookahead]
        usable = tuple(itertools.takewhile(lambda t: 0 <= t < self.target.vocab_size, tokens))
        laws = proposal.laws
        if laws is not None and (laws.dim() != 2 or len(laws) < len(usable) or laws.shape[1] != self.target.vocab_size):
            return work
        return work.with_proposal(replace(proposal, token_ids=usable))

    def _shielded(self, call: Callable[[], T], otherwise: T, works: Seq[Work]) -> T:
        """The call's result; `otherwise` if it fails, and for some rounds after that, more the more often it does."""
        if self._rest:
            return otherwise
        try:
            return call()
        except Exception as error:
            self.failures += 1
            self._rest = min(2**self.failures, _LONGEST_REST)
            log.warning("the drafter failed, decoding goes on without it for %d rounds: %r", self._rest, error)
            log.debug("how it failed", exc_info=error)
            for work in works:
                self.forget(work.sequence)
            return otherwise

    def forget(self, sequence: Sequence) -> None:
        """The sequence has finished, or the drafter is to start afresh with it."""
        try:
            self.drafter.forget(sequence)
        except Exception as error:
            log.debug("the drafter could not forget a sequence", exc_info=error)
