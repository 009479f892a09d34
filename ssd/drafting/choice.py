"""Which tokens a draft run takes from its logits: with the target's noise, or by the rejection rule's sampling."""

from __future__ import annotations

import torch

from ssd.drafting.buffers import DraftBuffers
from ssd.drafting.fan_out import RANKS
from ssd.drafting.shapes import RunShape
from ssd.kernels.device import kernels
from ssd.sampling.noise import Stream
from ssd.sampling.sampler import Needs, Rows, Sampler, reweighted

_MAX_CONFIDENCE = 1e4  # where only one token is possible
_SAGUARO_FAN_OUT = 3  # number of tokens whose probability saguaro_c lowers


class TokenChoice:
    """Writes a run's tokens to its buffers.

    `rejection`: tokens are sampled from the draft's own distributions, which are kept, instead of being chosen with the
    target's noise; `saguaro_c` below 1 then lowers the probability of its likeliest tokens.
    """

    def __init__(self, buffers: DraftBuffers, *, rejection: bool, saguaro_c: float) -> None:
        self.buffers = buffers
        self.rejection = rejection
        self.saguaro_c = saguaro_c
        self.sampler = Sampler(buffers.state.sampling)
        kept = (*buffers.chain.T.shape, buffers.state.vocab_size) if rejection else (0,)
        self.distributions = torch.zeros(kept, dtype=torch.float64, device=buffers.device)  # of each column of `chain`

    def choose(self, shape: RunShape, column: int, logits: torch.Tensor, rows: Rows) -> None:
        """One token per row, and its confidence (at least 0): the margin of its score, or -log(1 - q)."""
        logits, chain, confidence = self.widened(logits, shape.needs), self.buffers.chain, self.buffers.confidence
        if not self.rejection:
            self._keep(logits, rows, shape.needs, column, 1)
            return
        q = self.sampler.distribution(logits, rows, shape.needs)
        q = reweighted(q, self.saguaro_c, _SAGUARO_FAN_OUT)
        drawn = self.sampler.draw(q, rows, Stream.DRAFT)
        sure = -torch.log1p(-q.gather(-1, drawn[:, None])[:, 0].clamp(max=1 - 1e-6)).float()
        self.distributions[column, : shape.rows].copy_(q)
        chain[: shape.rows, column].copy_(drawn)
        confidence[: shape.rows, column].copy_(sure)

    def choose_all(self, shape: RunShape, logits: torch.Tensor, rows: Rows) -> None:
        """Likewise, but several tokens of each row of the run at once, by the coupled rule: those of a row follow each
        other in `logits` and `rows`."""
        self._keep(self.widened(logits, shape.needs), rows, shape.needs, 0, len(logits) // shape.rows)

    def rank(self, logits: torch.Tensor, rows: Rows, needs: Needs, excluded: torch.Tensor) -> torch.Tensor:
        """The RANKS likeliest tokens of each row, best first, without the excluded one: int32 [R, RANKS]."""
        logits = self.widened(logits, needs)
        if not self.rejection:
            return self.sampler.best(logits, rows, needs, RANKS, excluded)[0].clamp_(min=0)
        q = self.sampler.distribution(logits, rows, needs)
        index = excluded.long()[:, None]
        q = torch.where(index >= 0, q.scatter(-1, index.clamp(min=0), 0.0), q)
        values, tokens = q.topk(min(RANKS, q.shape[-1]), dim=-1)
        tokens = torch.where(values > 0, tokens, 0).int()  # without probability: may be beyond the draft's vocabulary
        return torch.nn.functional.pad(tokens, (0, RANKS - tokens.shape[-1]))

    def _keep(self, logits: torch.Tensor, rows: Rows, needs: Needs, column: int, each: int) -> None:
        """`each`: tokens of a row of the run, from `column` on."""
        best, scores = self.sampler.best(logits, rows, needs, 2)
        kernels(self.buffers.device).rounds.keep_best(
            best=best,
            scores=scores,
            chain=self.buffers.chain,
            confidence=self.buffers.confidence,
            column=column,
            each=each,
            max_confidence=_MAX_CONFIDENCE,
        )

    def widened(self, logits: torch.Tensor, needs: Needs) -> torch.Tensor:
        """Bias, penalties and the rejection rule need the target's vocabulary, which may be larger than the draft's."""
        missing = self.buffers.state.vocab_size - logits.shape[-1]
        if missing > 0 and (self.rejection or needs.adjusted):
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits
