"""Draft trees: which tokens a tree of a sequence consists of, level by level, on the device.

At each level the `beams` best nodes of a sequence are continued, with several tokens each; in the end the best nodes of
all levels are the tree. A node's score is the sum over its path of the logarithms of a softmax over its siblings'
perturbed scores (logit / temperature + the target's noise; greedy: the logits). That is the probability that the
target chooses it if its own perturbed scores are these plus independent standard Gumbel noise. All shapes are fixed,
and nothing waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ssd.drafting.fan_out import RANKS
from ssd.execution.state import SequenceState
from ssd.sampling.sampler import Needs, Rows, Sampler

MOST_BEAMS = 8  # of a sequence, and children of each


def beams_of(nodes: int) -> int:
    """Beams of a tree with so many nodes, and children of each."""
    return min(MOST_BEAMS, nodes)


class Candidates(NamedTuple):
    """The nodes that trees are chosen from: [sequences, candidates]."""

    scores: torch.Tensor  # float32; -inf: there is none
    tokens: torch.Tensor  # int32
    above: torch.Tensor  # int64: the candidate that each is behind, which comes before it; -1: none


class DraftTrees:
    """Grows the trees of some sequences. `begin` comes first, then `add` for each level, then `store`.

    As many nodes as the SequenceState has room for are stored, each behind better ones: the first of them, however many
    that are, are the best tree of so many nodes.
    """

    def __init__(self, state: SequenceState) -> None:
        assert state.tree is not None
        self.state, self.parents = state, state.tree.parents
        self.nodes = state.drafts.shape[1]
        self.beams = beams_of(self.nodes)
        self.sampler = Sampler(state.sampling)

    def begin(self, scores: torch.Tensor, beams: int) -> None:
        """`scores`: of the tokens that the first level is behind, float32 [sequences, tokens]. `beams`: nodes of each
        level of a sequence that are continued."""
        self._first = torch.arange(len(scores), device=self.state.device)[:, None]
        self._best = scores  # of what the next level is behind
        self._chosen = torch.full_like(scores, -1, dtype=torch.int64)  # which candidates that is
        self._beams, self._count = beams, 0
        self._levels: list[Candidates] = []

    def add(self, logits: torch.Tensor, rows: Rows, needs: Needs) -> tuple[torch.Tensor, torch.Tensor]:
        """The next level: its candidates follow the rows of `logits`, those of each sequence in turn.

        Returns the tokens of the new beams int32 [sequences, beams], and the rows (int64, all of them in one) that they
        are behind.
        """
        n, width = self._best.shape
        tokens, scores = self.ranked(logits, rows, needs)
        tokens, scores = tokens[:, : self.beams].reshape(n, -1), scores[:, : self.beams].reshape(n, width, -1)
        scores = (scores + self._best[:, :, None]).flatten(1)
        self._levels.append(Candidates(scores, tokens, each_times(self._chosen, self.beams)))
        self._best, chosen = scores.topk(self._beams, dim=1)
        self._chosen = chosen + self._count
        self._count += scores.shape[1]
        return tokens.gather(1, chosen), (self._first * width + chosen // self.beams).flatten()

    def ranked(self, logits: torch.Tensor, rows: Rows, needs: Needs) -> tuple[torch.Tensor, torch.Tensor]:
        """The RANKS best tokens that may follow each row, int32, and the logarithms of a softmax of their scores."""
        tokens, scores = self.sampler.best(logits, rows, needs, RANKS)
        # Rows of padding, and those of kernels that are only compiled, may have anything.
        tokens = tokens.clamp(min=0, max=self.state.vocab_size - 1)
        return tokens, scores.log_softmax(-1).nan_to_num(nan=-torch.inf, neginf=-torch.inf)

    def candidates(self) -> Candidates:
        """Those of all levels."""
        return Candidates(*(torch.cat(parts, dim=1) for parts in zip(*self._levels, strict=True)))

    def store(self, slots: torch.Tensor, candidates: Candidates) -> None:
        """Makes the best candidates the drafts of the sequences in these slots, in the order of their scores.

        A candidate is behind the one that it follows: its score is no better, and equal ones stay in order.
        """
        scores, tokens, above = candidates
        order = scores.sort(dim=1, descending=True, stable=True).indices
        place = torch.empty_like(order).scatter_(
            1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
        )
        chosen = order[:, : self.nodes]
        behind, scores = above.gather(1, chosen), scores.gather(1, chosen)
        parents = torch.where(behind < 0, -1, place.gather(1, behind.clamp(min=0)))
        parents = torch.where(scores > -torch.inf, parents, self.nodes).int()  # no node has such a parent
        left, rows = self.nodes - chosen.shape[1], slots.long()  # left: fewer candidates than nodes
        self.parents.index_copy_(0, rows, torch.nn.functional.pad(parents, (0, left), value=self.nodes))
        self.state.drafts.index_copy_(0, rows, torch.nn.functional.pad(tokens.gather(1, chosen), (0, left)))
        self.state.confidence.index_copy_(0, rows, torch.nn.functional.pad(scores, (0, left), value=-torch.inf))


def each_times(values: torch.Tensor, count: int) -> torch.Tensor:
    """Each of the values [rows, columns] so many times, one after the other: [rows, columns * count]."""
    return values[:, :, None].expand(-1, -1, count).flatten(1)
