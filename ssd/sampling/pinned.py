"""Acceptance that is drawn instead of decided: for measurements of drafts whose weights are random, or are not there.

Rounds are computed in full. Then the target's choices are replaced: by the draft's tokens as far as it is accepted, by
another token where it is rejected. So the text is not the model's.
"""

from __future__ import annotations

import torch

from ssd.sampling.sampler import Rows

_DRAWS = 1 << 16  # uniform numbers, looked up: computing them would take longer than the whole decision


class PinnedAcceptance:
    """`rates` float32 [K]: by position in the draft, the probability that its token is accepted if those before are.

    A draw depends on the position of the token and on the one that the target would have chosen.
    """

    def __init__(self, rates: torch.Tensor, vocab_size: int) -> None:
        self.rates = rates
        self._draws = torch.rand(_DRAWS, generator=torch.Generator().manual_seed(0)).to(rates.device)
        self._vocab_size = vocab_size

    def choices(self, chosen: torch.Tensor, rows: Rows) -> torch.Tensor:
        """In place of the target's choices int32 [R]; those after a whole draft stay."""
        assert rows.num_drafted is not None
        assert rows.drafts is not None
        slots, place = rows.slots.clamp(min=0).long(), rows.num_drafted.clamp(max=len(self.rates) - 1).long()
        uniform = self._draws[torch.add(rows.positions * 40503, chosen, alpha=30011) & (_DRAWS - 1)]
        draft = rows.drafts[slots, place]
        other = torch.where(chosen == draft, (chosen + 1) % self._vocab_size, chosen)
        pinned = torch.where(uniform < self.rates[place], draft, other)
        return torch.where((chosen < 0) | (rows.num_drafted >= len(self.rates)), chosen, pinned)
