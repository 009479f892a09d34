"""N-gram look-up (prompt look-up decoding): the draft is what followed the last few tokens earlier in the sequence."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from ssd.core import Origin, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter

LONGEST, SHORTEST = 4, 2  # tokens that must match


@dataclass
class _Index:
    """Position after the last occurrence of every n-gram of SHORTEST to LONGEST tokens."""

    followers: dict[tuple[int, ...], int] = field(default_factory=dict)
    num_indexed: int = 0  # leading tokens whose preceding n-grams are in the index

    def extend(self, tokens: Seq[int]) -> None:
        for end in range(max(1, self.num_indexed), len(tokens)):
            for n in range(SHORTEST, min(LONGEST, end) + 1):
                self.followers[tuple(tokens[end - n : end])] = end
        self.num_indexed = len(tokens)

    def look_up(self, tokens: Seq[int]) -> int | None:
        """The position after the last earlier occurrence of the longest matching suffix."""
        for n in range(min(LONGEST, len(tokens)), SHORTEST - 1, -1):
            found = self.followers.get(tuple(tokens[-n:]))
            if found is not None:
                return found
        return None


class NgramDrafter(Drafter):
    """Drafts by n-gram look-up. Needs no model; useful where the output repeats itself or its prompt."""

    needs_tokens = True

    def __init__(self, lookahead: int) -> None:
        super().__init__()
        self.lookahead = lookahead
        self._indices: dict[int, _Index] = {}

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return [self._propose(work) for work in works]

    def _propose(self, work: Work) -> Proposal:
        if work.lookahead == 0:
            return Proposal()
        tokens = work.sequence.tokens
        index = self._indices.setdefault(work.sequence.id, _Index())
        index.extend(tokens)
        start = index.look_up(tokens)
        if start is None:
            return Proposal()
        return Proposal(_continued(tokens, start, work.lookahead), origin=Origin.NGRAM)

    def forget(self, sequence: Sequence) -> None:
        self._indices.pop(sequence.id, None)


def _continued(tokens: Seq[int], start: int, count: int) -> tuple[int, ...]:
    """`count` tokens from `start` on; beyond the end of the sequence the copied tokens repeat."""
    period = len(tokens) - start
    return tuple(tokens[start + i % period] for i in range(count))
