"""Observers that hold every draft of a head, or a block draft, against that of a plain implementation."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq

import torch
from block_drafts import Block
from eagle_heads import Head
from mtp_heads import MTP

from ssd.core import Origin, Outcome, Sequence, Work
from ssd.decoding.drafter import Prepared
from ssd.decoding.observer import RoundObserver

FEW = (3, 17, 60, 101, 222)  # tokens that requests are limited to, so that drafts of a random head are accepted, too


class Drafts(RoundObserver):
    """The drafts of greedy requests in `seen`, each beside that of a plain implementation.

    `least`: tokens of a draft that is compared. Of a block draft all: one that is cut was written with more masks than
    a short one has, because another sequence of its batch needed them.
    """

    def __init__(self, head: Head | MTP | Block, least: int = 1) -> None:
        self.head, self.least = head, least
        self.seen = list[tuple[list[int], list[int]]]()

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        for work, outcome in zip(works, outcomes, strict=True):
            tokens = work.sequence.tokens
            if outcome is None or not work.sequence.params.greedy:
                continue
            if outcome.token_ids == tuple(tokens[-len(outcome.token_ids) :]):  # not cut at the end of the text
                allowed = FEW if work.sequence.params.logit_bias else None
                self.compare(work, outcome, tokens[: len(tokens) - len(outcome.token_ids)], allowed)

    def compare(self, work: Work, outcome: Outcome, before: list[int], allowed: Seq[int] | None) -> None:
        if len(outcome.draft) >= self.least:
            self.seen.append((list(outcome.draft), self.head.draft(before, len(outcome.draft), allowed)[0]))


class Branches(Drafts):
    """The branches that SSD prepares for greedy requests, until there are enough of them.

    The plain implementation reads a draft that was prepared with the states of its branch, moved by the feature that is
    known since.
    """

    head: Head | MTP
    synchronous = True  # what was prepared last is for the round that is decided

    def __init__(self, head: Head | MTP, enough: int = 60) -> None:
        super().__init__(head)
        self.enough, self.num_after_hits = enough, 0
        self.states: dict[int, list[torch.Tensor]] = {}  # by sequence id: of its next draft, if it was prepared

    def launched(self, works: Seq[Work], prepared: Callable[[Sequence], Prepared]) -> None:
        self.prepared = {work.sequence.id: prepared(work.sequence) for work in works}

    def compare(self, work: Work, outcome: Outcome, before: list[int], allowed: Seq[int] | None) -> None:
        if len(self.seen) >= self.enough and self.num_after_hits > 10:
            return
        states, given = self.states.pop(work.sequence.id, []), list[torch.Tensor]()
        if outcome.origin is Origin.HIT:
            moved = self.head.fused(before[:-1])[-1] - states[0]
            given = [state + self.head.carried**place * moved for place, state in enumerate(states)][1:]
        for (after, root), draft in self.prepared[work.sequence.id].items():
            path = [*outcome.draft[:after], root]
            count = len(path) + len(draft)
            wanted, _, found = self.head.draft(before, count, allowed, path, given[:after])
            self.seen.append((list(draft), wanted[len(path) :]))
            self.num_after_hits += after > 0 and len(given) > 0
            if (after, root) == (outcome.num_accepted, outcome.token_ids[-1]):
                self.states[work.sequence.id] = found[after:]
