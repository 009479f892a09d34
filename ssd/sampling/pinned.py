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


def rates_of(accept: tuple[float, ...], k: int) -> list[float]:
    """Rates by position of drafts of `k` tokens. `accept`: such rates, the last of which is repeated; or one number
    above 1, the mean number of tokens of a round, the target's own among them, which equal rates give.

    ValueError if there are none.
    """
    if len(accept) != 1 or accept[0] <= 1:
        return [*accept, *[accept[-1]] * k][:k]
    if accept[0] > k + 1:
        raise ValueError(f"a round with {k} draft tokens has at most {k + 1} tokens")
    low, high = 0.0, 1.0
    for _ in range(60):
        rate = (low + high) / 2
        low, high = (rate, high) if sum(rate**i for i in range(k + 1)) < accept[0] else (low, rate)
    return [low] * k
