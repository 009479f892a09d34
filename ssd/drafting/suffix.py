"""Suffix look-up: the draft is what followed the last tokens earlier in the sequence, or in earlier answers.

Beside a learned draft (a model, a head) the one that is expected to have more tokens accepted is verified. A look-up
takes microseconds on the host, and needs the tokens that the last round has decided. Where that round is in flight, the
next one is launched nevertheless: its first kernel waits for what the host looks up when it is told of the outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from ssd.core import Origin, Outcome, Proposal, Sequence, Status, Work
from ssd.decoding.drafter import Drafter, PerRound, never
from ssd.drafting.estimate import Average
from ssd.drafting.model import undecided
from ssd.drafting.table import DraftAnswers
from ssd.kernels.cpu.suffix import SuffixTree
from ssd.kernels.transfers import to_device

_LONGEST_WAIT = 0.005  # seconds that the device waits for a look-up: as long as another thread may keep the GIL
_MOST_IN_FLIGHT = 128  # draft tokens of a round beyond which none is in flight: then drafts have their own lengths


@dataclass
class _Known:
    """What is known of a sequence."""

    tree: SuffixTree
    accepted: Average  # tokens of its learned drafts
    kept: Average  # accepted tokens of its suffix drafts, relative to their scores, which promise too much


class SuffixDrafter(Drafter):
    """Drafts by suffix look-up; `learned`: a drafter whose drafts are used where they are expected to be better.

    `cached_tokens`: most tokens of earlier answers that are searched, too. `answers`: for rounds in flight.
    """

    def __init__(
        self,
        lookahead: int,
        *,
        learned: Drafter | None = None,
        cached_tokens: int = 0,
        answers: DraftAnswers | None = None,
    ) -> None:
        super().__init__()
        self.lookahead, self.learned = lookahead, learned or Drafter()
        self.stats = self.learned.stats
        self.needs_tokens = answers is None
        self._answers = answers
        self._earlier = SuffixTree(cached_tokens) if cached_tokens else None
        self._sequences: dict[int, _Known] = {}  # by id
        self._accepted = Average(0.99, self.learned.lookahead / 2, 1.0)  # of all sequences
        self._kept = Average(0.99, 7.0, 10.0)  # the same
        self._number = 0  # of the last round proposed for
        self._scores: dict[int, float] = {}  # of its suffix drafts, by sequence id
        self._awaited: list[Work] = []  # its works whose drafts the device waits for
        self._rounds: PerRound[dict[int, float]] = PerRound()

    def slots(self, k: int) -> int:
        """Beside drafts of k tokens those of look-up are as long as ever."""
        return max(self.lookahead, self.learned.slots(k)) if self.learned.lookahead else k

    @property
    def _asks(self) -> bool:
        """Whether there are learned drafts; with k = 0 there are none."""
        return self.learned.lookahead > 0 and self.k != 0

    @property
    def _most_in_flight(self) -> int:
        """Tokens of a draft that is looked up while the round before it is in flight."""
        return self.k if self.k and self.learned.lookahead else self.lookahead

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        """Looks up what follows the tokens that are known. Learned drafts are written for all other works."""
        self._number, self._scores = self._number + 1, {}
        found = {id(work): self._look_up(work) for work in works if work.lookahead and not undecided(work)}
        proposals = {name: Proposal(draft, origin=Origin.SUFFIX) for name, draft in found.items() if draft}
        others = [work for work in works if id(work) not in proposals]
        proposals |= {id(work): Proposal() for work in others}
        if self._asks and (able := [work for work in others if self._is_readable(work)]):
            self.learned.k = self.k
            written = self.learned.propose(able)
            proposals |= {id(work): proposal for work, proposal in zip(able, written, strict=True)}
        self._awaited = []
        if self._answers is not None:
            self.needs_tokens = sum(min(work.lookahead, self._most_in_flight) for work in works) > _MOST_IN_FLIGHT
            if not any(work.sequence.has_host_logits for work in works):  # whose host waits for the device
                self._awaited = [work for work in others if work.lookahead and undecided(work)]
                proposals |= self._await(self._answers, proposals)
        return [proposals[id(work)] for work in works]

    def _await(self, answers: DraftAnswers, written: dict[int, Proposal]) -> dict[int, Proposal]:
        """Launches a wait for drafts; returns the proposals of works without a learned one."""
        empty = [work for work in self._awaited if not written[id(work)].num_tokens]
        if empty:
            slots = np.array([work.slot for work in empty])
            answers.state.origin[to_device(slots, answers.state.device)] = int(Origin.NONE)
        if self._awaited:
            answers.wait([work.slot for work in self._awaited], self._number, _LONGEST_WAIT, Origin.SUFFIX)
        most = self._most_in_flight
        return {id(w): Proposal(num_on_device=min(w.lookahead, most), origin=Origin.SUFFIX) for w in empty}

    def _is_readable(self, work: Work) -> bool:
        """Whether a run of the learned draft can read all tokens that the round in flight may decide."""
        deciding = undecided(work)
        return deciding is None or deciding.num_logits <= self.learned.lookahead + 1

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        """Looks up the drafts that the device waits for."""
        awaited, self._awaited = self._awaited, []
        new = {w.sequence.id: o.token_ids for w, o in zip(works, outcomes, strict=True) if o is not None}
        for work in awaited:
            tokens = new.get(work.sequence.id, (-1,))
            draft = self._look_up(work, tokens) if tokens[-1] >= 0 else ()
            if self._answers is not None:
                self._answers.answer(work.slot, self._number, draft)

    def _look_up(self, work: Work, new: Seq[int] = ()) -> tuple[int, ...]:
        """The draft after a sequence's tokens and `new` ones; none where a learned one is expected to be better."""
        sequence, tree = work.sequence, self._known(work.sequence).tree
        tree.extend([*sequence.tokens[tree.length :], *new])
        draft, score = tree.draft(work.lookahead, self._earlier)
        if not self._is_better(work, score):
            return ()
        self._scores[sequence.id] = score
        return tuple(draft)

    def _is_better(self, work: Work, score: float) -> bool:
        """Whether a suffix draft is expected to have more tokens accepted than a learned one."""
        if not self._asks:
            return score > 0.0
        known = self._known(work.sequence)
        return score * float(known.kept.value) > min(float(known.accepted.value), self.k or work.lookahead)

    def _known(self, sequence: Sequence) -> _Known:
        if sequence.id not in self._sequences:
            accepted = Average(7 / 8, self._accepted.value, 1.0)
            # The guess keeps its weight: a long match is tried again after many that were wrong.
            kept = Average(7 / 8, prior_total=4.0 * self._kept.value, prior_weight=4.0)
            self._sequences[sequence.id] = _Known(SuffixTree(), accepted, kept)
        return self._sequences[sequence.id]

    def settle(self, works: Seq[Work]) -> bool:
        return self.learned.settle(works)

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        """Reads prompts while the target does."""
        if self._asks:
            self.learned.prepare(works, interrupted)
        self._rounds.put(works, self._scores)
        for work in works:
            if work.num_tokens > 1 and work.sequence.params.speculate:
                tree = self._known(work.sequence).tree
                tree.extend(work.sequence.tokens[tree.length : work.end])

    def catch_up(self, works: Seq[Work]) -> bool:
        return self.learned.catch_up(works)

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self.learned.observe(works, outcomes, seconds)
        scores = self._rounds.pop(works) or {}
        for work, outcome in zip(works, outcomes, strict=True):
            known = self._sequences.get(work.sequence.id)
            if known is None or outcome is None or not outcome.draft:
                continue
            if outcome.origin is Origin.DRAFT:
                for average in (known.accepted, self._accepted):
                    average.add(outcome.num_accepted)
            elif outcome.origin is Origin.SUFFIX and work.sequence.id in scores:
                for average in (known.kept, self._kept):
                    average.add(outcome.num_accepted, scores[work.sequence.id])

    def forget(self, sequence: Sequence) -> None:
        self.learned.forget(sequence)
        known = self._sequences.pop(sequence.id, None)
        if known is not None and self._earlier is not None and sequence.status is Status.FINISHED:
            self._earlier.add(sequence.output_token_ids)

    def close(self) -> None:
        self.learned.close()
