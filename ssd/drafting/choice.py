"""Which tokens a draft run takes from its logits: with the target's noise, or by the rejection rule's sampling."""

from __future__ import annotations

import torch
from torch.nn.functional import pad

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
        self.sampler, self._ids = Sampler(buffers.state.sampling), buffers.runner.decoder.target_ids
        kept = (*buffers.chain.T.shape, buffers.state.vocab_size) if rejection else (0,)
        self.distributions = torch.zeros(kept, dtype=torch.float64, device=buffers.device)  # of each column of `chain`

    def choose(self, shape: RunShape, column: int, logits: torch.Tensor, rows: Rows) -> None:
        """One token per row, and its confidence (at least 0): the margin of its score, or -log(1 - q)."""
        chain, confidence = self.buffers.chain, self.buffers.confidence
        if not self.rejection:
            self._keep(logits, rows, shape.needs, column, 1)
            return
        q = self.sampler.distribution(self._in_target_vocabulary(logits), rows, shape.needs)
        q = reweighted(q, self.saguaro_c, _SAGUARO_FAN_OUT)
        drawn = self.sampler.draw(q, rows, Stream.DRAFT)
        sure = -torch.log1p(-q.gather(-1, drawn[:, None])[:, 0].clamp(max=1 - 1e-6)).float()
        self.distributions[column, : shape.rows].copy_(q)
        chain[: shape.rows, column].copy_(drawn)
        confidence[: shape.rows, column].copy_(sure)

    def choose_all(self, shape: RunShape, logits: torch.Tensor, rows: Rows) -> None:
        """Likewise, but several tokens of each row of the run at once, by the coupled rule: those of a row follow each
        other in `logits` and `rows`."""
        self._keep(logits, rows, shape.needs, 0, len(logits) // shape.rows)

    def rank(self, logits: torch.Tensor, rows: Rows, needs: Needs, excluded: torch.Tensor) -> torch.Tensor:
        """The RANKS likeliest tokens of each row, best first, without the excluded one: int32 [R, RANKS]."""
        if not self.rejection:
            return self.best(logits, rows, needs, RANKS, excluded)[0].clamp_(min=0)
        q = self.sampler.distribution(self._in_target_vocabulary(logits), rows, needs)
        index = excluded.long()[:, None]
        q = torch.where(index >= 0, q.scatter(-1, index.clamp(min=0), 0.0), q)
        values, tokens = q.topk(min(RANKS, q.shape[-1]), dim=-1)
        tokens = torch.where(values > 0, tokens, 0).int()  # without probability: may be beyond the draft's vocabulary
        return pad(tokens, (0, RANKS - tokens.shape[-1]))

    def _keep(self, logits: torch.Tensor, rows: Rows, needs: Needs, column: int, each: int) -> None:
        """`each`: tokens of a row of the run, from `column` on."""
        best, scores = self.best(logits, rows, needs, 2)
        kernels(self.buffers.device).runs.keep_best(
            best=best,
            scores=scores,
            chain=self.buffers.chain,
            confidence=self.buffers.confidence,
            column=column,
            each=each,
            max_confidence=_MAX_CONFIDENCE,
        )

    def best(
        self, logits: torch.Tensor, rows: Rows, needs: Needs, count: int, excluded: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """As `Sampler.best`, of tokens that the target has."""
        if needs.adjusted:
            return self.sampler.best(self._in_target_vocabulary(logits), rows, needs, count, excluded)
        own = logits[:, : self.buffers.state.vocab_size]
        return self.sampler.best(own, rows, needs, count, excluded, self._ids)

    def _in_target_vocabulary(self, logits: torch.Tensor) -> torch.Tensor:
        """Bias, penalties and the rejection rule need logits of all tokens that the target has, and of no others."""
        (rows, own), size = logits.shape, self.buffers.state.vocab_size
        if self._ids is not None:
            return logits.new_full((rows, size), -torch.inf).index_copy_(1, self._ids.long(), logits)
        return logits[:, :size] if own >= size else pad(logits, (0, size - own), value=-torch.inf)
