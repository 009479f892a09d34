"""A drafter of the user's own (`Proposer`), as the engine's interface."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import islice

from ssd.config import Proposer
from ssd.core import Origin, Proposal, Work
from ssd.decoding.drafter import Drafter


class CustomDrafter(Drafter):
    """Asks a `Proposer`. It gets copies of the tokens, and whatever it returns or raises is for `Round` to judge."""

    needs_tokens = True

    def __init__(self, proposer: Proposer, lookahead: int) -> None:
        super().__init__()
        self.lookahead = lookahead
        self._proposer = proposer

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        k = max((work.lookahead for work in works), default=0)
        if k == 0:
            return [Proposal()] * len(works)
        drafts = self._proposer.propose([list(work.sequence.tokens) for work in works], k)
        if len(drafts) != len(works):
            raise ValueError(f"propose() returned {len(drafts)} drafts for {len(works)} sequences: return one for each")
        return [Proposal(tuple(islice(draft, k)), origin=Origin.DRAFT) for draft in drafts]
