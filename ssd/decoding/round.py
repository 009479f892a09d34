"""One round of decoding: propose, verify, decide.

Autoregressive decoding is the round whose drafter proposes nothing. The round decides tokens; committing them to the
sequences (stops, lengths, KV books) is the engine's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Protocol

import torch

from ssd.core import Batch, Outcome, Proposal, Work
from ssd.decoding.acceptance import Acceptance, Coupled
from ssd.decoding.drafter import Drafter


class Target(Protocol):
    """The model whose law is sacred: a batch in, one float32 row of logits for each of its `logit_rows` out."""

    block_size: int
    vocab_size: int

    def forward(self, batch: Batch) -> torch.Tensor: ...


class Round:
    """propose → verify → decide, for a batch of sequences."""

    def __init__(self, target: Target, drafter: Drafter, acceptance: Acceptance | None = None) -> None:
        self.target = target
        self.drafter = drafter
        self.acceptance = acceptance or Coupled()

    @torch.inference_mode()
    def run(self, works: Seq[Work]) -> tuple[list[Work], list[Outcome | None]]:
        """The works as verified (with their proposals), and what was decided; None for a prefill chunk."""
        works = self._propose(works)
        self.drafter.anticipate(works)
        logits = self.target.forward(Batch.build(works, self.target.block_size))
        outcomes = self.acceptance.decide(works, logits)
        self.drafter.observe(works, outcomes)
        return works, outcomes

    def _propose(self, works: Seq[Work]) -> list[Work]:
        deciding = [work for work in works if work.decides]
        proposals = self.drafter.propose(deciding)
        drafted = {id(work): self._usable(work, p) for work, p in zip(deciding, proposals, strict=True)}
        return [drafted.get(id(work), work) for work in works]

    def _usable(self, work: Work, proposal: Proposal) -> Work:
        """Cuts a proposal where it outgrows its slots or makes no sense: a bad drafter costs speed, nothing else."""
        usable = itertools.takewhile(lambda t: 0 <= t < self.target.vocab_size, proposal.token_ids[: work.lookahead])
        return work.with_proposal(replace(proposal, token_ids=tuple(usable)))
