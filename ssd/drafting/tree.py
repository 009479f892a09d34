"""Draft trees: which tokens a tree of a sequence consists of, level by level, on the device.

At each level the `beams` best nodes of a sequence are continued, with as many tokens each; in the end the best nodes of
all levels are the tree. A node's score is the sum over its path of the logarithms of a softmax over its siblings'
perturbed scores (logit / temperature + the target's noise; greedy: the logits). That is the probability that the
target chooses it if its own perturbed scores are these plus independent standard Gumbel noise. (Greedy: a little more
likely, see `SHARPNESS`.) All shapes are fixed, and nothing waits for the device.
"""

from __future__ import annotations

import torch

from ssd.drafting.choice import TokenChoice
from ssd.execution.state import SequenceState
from ssd.kernels.device import kernels
from ssd.kernels.state import Candidates
from ssd.sampling.sampler import Needs, Rows

MOST_BEAMS = 8  # of a sequence, and children of each
# The target's best token is the draft's more often than the draft's probability says. Measured with a bundled head,
# trees of 32 nodes: 1.2 gives 1 to 2 % more tokens a round; at T = 1 any factor gives fewer.
SHARPNESS = 1.2


def beams_of(nodes: int) -> int:
    """Beams of a tree with so many nodes."""
    return min(MOST_BEAMS, nodes)


class DraftTrees:
    """Grows the trees of some sequences. `begin` comes first, then `add` for each level, then `store`.

    As many nodes as the SequenceState has room for are stored, each behind better ones: the first of them, however many
    that are, are the best tree of so many nodes.
    """

    def __init__(self, state: SequenceState, choice: TokenChoice, sharpness: float) -> None:
        """`sharpness`: factor on greedy scores."""
        assert state.tree is not None
        self.state, self.parents = state, state.tree.parents
        self.beams = beams_of(state.drafts.shape[1])
        self._choice, self._kernels = choice, kernels(state.device).trees
        self._sharpness, self._known = sharpness, choice.buffers.runner.vocab_size

    def begin(self, slots: torch.Tensor, levels: int) -> None:
        """The trees of the sequences in these slots."""
        sequences, self._slots = len(slots), slots
        total = self.beams + (levels - 1) * self.beams**2
        ints = torch.empty((2, sequences, total), dtype=torch.int32, device=self.state.device)
        scores = torch.empty((sequences, total), dtype=torch.float32, device=self.state.device)
        self._candidates = Candidates(ints[0], scores, ints[1])
        self._beams: tuple[torch.Tensor, torch.Tensor] | None = None
        self._count = 0

    def add(self, logits: torch.Tensor, rows: Rows, needs: Needs, following: torch.Tensor) -> torch.Tensor:
        """The next level: its candidates follow the rows of `logits`, of each sequence one, later its beams, or one
        that all of them have.

        Writes the tokens of the new beams to `following`: int32 [sequences * beams], as the draft knows them. Returns
        the rows (int64) that they are behind.
        """
        tokens, scores = self._choice.best(logits, rows, needs, MOST_BEAMS)
        width = 1 if self._beams is None else self.beams
        if len(tokens) < len(self._candidates.scores) * width:
            tokens, scores = (each.repeat_interleave(width, dim=0) for each in (tokens, scores))
        above: torch.Tensor
        above, self._beams = self._kernels.grow(
            *(tokens, scores, self._slots, self._choice.sampler.columns.temperature),
            *(self._beams, self._candidates, following),
            first=self._count,
            children=self.beams,
            vocab_size=self.state.vocab_size,
            known=self._known,
            sharpness=self._sharpness,
        )
        self._count += width * self.beams
        return above

    def store(self, origin: int) -> None:
        """Makes the best candidates the drafts of the sequences, in the order of their scores.

        A candidate is behind the one that it follows: its score is no better, and equal ones stay in order.
        """
        state = self.state
        self._kernels.keep(self._candidates, self._slots, self.parents, state.drafts, state.origin, origin=origin)
