"""One round of decoding: propose, verify, decide.

Autoregressive decoding is the round whose drafter proposes nothing. The round decides tokens; committing them to the
sequences (stops, lengths, KV books) is the engine's.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence as Seq
from typing import Protocol

import torch

from ssd.core import Batch, Outcome, Proposal, Work
from ssd.decoding.drafter import Drafter
from ssd.decoding.law import Row, choose, logprobs, rows_of


class Target(Protocol):
    """The model whose law is sacred: a batch in, one float32 row of logits for each of its `logit_rows` out."""

    block_size: int
    vocab_size: int

    def forward(self, batch: Batch) -> torch.Tensor: ...


class Round:
    """propose → verify → decide, for a batch of sequences."""

    def __init__(self, target: Target, drafter: Drafter) -> None:
        self.target = target
        self.drafter = drafter

    @torch.inference_mode()
    def run(self, works: Seq[Work]) -> tuple[list[Work], list[Outcome | None]]:
        """The works as verified (with their proposals), and what was decided; None for a prefill chunk."""
        works = self._propose(works)
        self.drafter.anticipate(works)
        logits = self.target.forward(Batch.build(works, self.target.block_size))
        outcomes = self._decide(works, logits)
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
        return work.with_proposal(Proposal(tuple(usable)))

    def _decide(self, works: Seq[Work], logits: torch.Tensor) -> list[Outcome | None]:
        rows = [row for work in works for row in rows_of(work)]
        wanted = [i for i, row in enumerate(rows) if row.params.logprobs is not None]
        raw = {i: logits[i].clone() for i in wanted}  # `choose` may overwrite
        tokens = choose(logits, rows) if rows else []
        outcomes: list[Outcome | None] = []
        start = 0
        for work in works:
            stop = start + work.num_rows
            outcomes.append(_accept(work, rows, tokens, raw, start) if stop > start else None)
            start = stop
        return outcomes


def _accept(work: Work, rows: list[Row], tokens: list[int], raw: dict[int, torch.Tensor], start: int) -> Outcome:
    """Keeps drafted tokens while they are what the target chooses itself; then the target's own token.

    The same for greedy and for coupled sampling: in both the target's choice is a function of the tokens before it.
    """
    chosen = tokens[start : start + work.num_rows]
    accepted = 0
    while accepted < len(work.proposal.token_ids) and work.proposal.token_ids[accepted] == chosen[accepted]:
        accepted += 1
    emitted = tuple(chosen[: accepted + 1])
    if work.sequence.params.logprobs is None:
        return Outcome(emitted)
    return Outcome(emitted, tuple(logprobs(raw[start + j], rows[start + j], t) for j, t in enumerate(emitted)))
