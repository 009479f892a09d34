"""Draft trees: which tokens a tree of a sequence consists of, level by level, on the device.

At each level the `beams` best nodes of a sequence are continued, with as many tokens each; in the end the best nodes of
all levels are the tree. A node's score is the sum over its path of the logarithms of a softmax over its siblings'
perturbed scores (logit / temperature + the target's noise; greedy: the logits). That is the probability that the
target chooses it if its own perturbed scores are these plus independent standard Gumbel noise. All shapes are fixed,
and nothing waits for the device.
"""

from __future__ import annotations

import torch

from ssd.drafting.fan_out import RANKS
from ssd.execution.state import SequenceState
from ssd.sampling.sampler import Needs, Rows, Sampler

MOST_BEAMS = 8  # of a sequence, and children of each


def beams_of(nodes: int) -> int:
    """Beams of a tree with so many nodes."""
    return min(MOST_BEAMS, nodes)


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
        self._sampler = Sampler(state.sampling)

    def begin(self, sequences: int) -> None:
        self._first = torch.arange(sequences, device=self.state.device)[:, None]
        self._scores: list[torch.Tensor] = []  # of the candidates of each level: [sequences, candidates]
        self._tokens: list[torch.Tensor] = []
        self._above: list[torch.Tensor] = []  # the candidate that each is behind, counted over all levels; -1: none
        self._count = 0
        self._best = self._chosen = self._first  # scores of the beams, and which candidates they are

    def add(self, logits: torch.Tensor, rows: Rows, needs: Needs) -> tuple[torch.Tensor, torch.Tensor]:
        """The next level: its candidates follow the rows of `logits`, of each sequence one, later its beams.

        Returns the tokens of the new beams int32 [sequences, beams], and the rows (int64, all of them in one) that they
        are behind.
        """
        n, width = len(self._first), len(logits) // len(self._first)
        tokens, scores = self._sampler.best(logits, rows, needs, RANKS)
        scores = scores.log_softmax(-1).nan_to_num(-torch.inf)[:, : self.beams]
        # Rows of padding, and those of kernels that are only compiled, may have anything.
        tokens = tokens[:, : self.beams].clamp(min=0, max=self.state.vocab_size - 1)
        if self._scores:
            scores = scores.view(n, width, -1) + self._best[:, :, None]
            above = self._chosen[:, :, None].expand(-1, -1, self.beams).reshape(n, -1)
        else:
            above = torch.full((n, self.beams), -1, device=logits.device)
        scores, tokens = scores.view(n, -1), tokens.view(n, -1)
        self._scores.append(scores)
        self._tokens.append(tokens)
        self._above.append(above)
        self._best, chosen = scores.topk(self.beams, dim=1)
        self._chosen = chosen + self._count
        self._count += scores.shape[1]
        return tokens.gather(1, chosen), (self._first * width + chosen // self.beams).flatten()

    def store(self, slots: torch.Tensor, origin: int) -> None:
        """Makes the best candidates the drafts of the sequences in these slots, in the order of their scores.

        A candidate is behind the one that it follows: its score is no better, and equal ones stay in order.
        """
        scores, tokens, above = (torch.cat(parts, dim=1) for parts in (self._scores, self._tokens, self._above))
        order = scores.sort(dim=1, descending=True, stable=True).indices
        place = torch.empty_like(order).scatter_(
            1, order, torch.arange(self._count, device=order.device).expand_as(order)
        )
        chosen = order[:, : self.nodes]
        behind = above.gather(1, chosen)
        parents = torch.where(behind < 0, -1, place.gather(1, behind.clamp(min=0))).int()
        left = self.nodes - chosen.shape[1]  # fewer candidates than nodes: no node has the parent of the others
        rows = slots.long()
        self.parents.index_copy_(0, rows, torch.nn.functional.pad(parents, (0, left), value=self.nodes))
        self.state.drafts.index_copy_(0, rows, torch.nn.functional.pad(tokens.gather(1, chosen), (0, left)))
        self.state.origin.index_fill_(0, rows, origin)
