"""How a draft model chooses its tokens, as tensor operations without a host in between.

Coupled: with the noise that the target will use, so that both choose alike. Drawn (for the rejection rule): from the
draft's own law, with noise of its own, and the law is kept. Penalties count decided tokens only: a draft may be a
little wrong.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ssd.core import SamplingParams, Sequence
from ssd.decoding import noise
from ssd.decoding.law import COLDEST, Shape, reweighted


class Needs(NamedTuple):
    """What the laws of a batch call for; what nobody needs is not computed."""

    sampled: bool = False
    truncated: bool = False
    adjusted: bool = False

    @classmethod
    def of(cls, params: list[SamplingParams]) -> Needs:
        sampled = [p for p in params if not p.greedy]
        truncated = any(p.top_k > 0 or p.top_p < 1 or p.min_p > 0 for p in sampled)
        return cls(bool(sampled), truncated, any(p.penalised or p.logit_bias or p.min_tokens for p in params))


def adjustments(text: Sequence) -> tuple[list[int], list[float], list[float]]:
    """Tokens whose logits a sequence's parameters change: positive ones are divided (negative ones multiplied) by a
    factor, then something is added."""
    params = text.params
    factors = dict.fromkeys(text.tokens, params.repetition_penalty) if params.repetition_penalty != 1.0 else {}
    added = defaultdict(float, params.logit_bias)
    if params.presence_penalty or params.frequency_penalty:
        for token, times in Counter(text.output_token_ids).items():
            added[token] -= params.presence_penalty + params.frequency_penalty * times
    if text.num_output < params.min_tokens:
        added.update(dict.fromkeys(text.stop_token_ids, -math.inf))
    tokens = list(factors.keys() | added.keys())
    return tokens, [factors.get(t, 1.0) for t in tokens], [added.get(t, 0.0) for t in tokens]


@dataclass(frozen=True)
class Rows:
    """The positions to be decided, and their sequences' parameters: [R] each."""

    seeds: torch.Tensor  # int64, as `noise.seed_key` gives them
    positions: torch.Tensor
    temperature: torch.Tensor  # float32
    min_p: torch.Tensor  # float32
    top_p: torch.Tensor  # float32
    top_k: torch.Tensor  # int32; 0: all

    def repeated(self, times: int, positions: torch.Tensor) -> Rows:
        """Several positions for each row."""
        if times == 1:
            return replace(self, positions=positions.flatten())
        columns = (self.seeds, self.temperature, self.min_p, self.top_p, self.top_k)
        seeds, temperature, min_p, top_p, top_k = (c.repeat_interleave(times) for c in columns)
        return Rows(seeds, positions.flatten(), temperature, min_p, top_p, top_k)

    def shape(self, needs: Needs, vocab_size: int) -> Shape:
        temperature = self.temperature.clamp(min=COLDEST)[:, None]
        if not needs.truncated:
            return Shape(temperature)
        top_k = torch.where(self.top_k > 0, self.top_k, vocab_size)[:, None]
        return Shape(temperature, self.min_p[:, None], top_k, self.top_p.double()[:, None])


class Chosen(NamedTuple):
    """One token a row, how sure the draft was of each, and the laws that they were drawn from, if they were."""

    tokens: torch.Tensor  # int32 [R]
    confidence: torch.Tensor  # float32 [R]: at least 0, the more the surer
    laws: torch.Tensor | None = None  # float64 [R, V]


class Chooser:
    """`drawn` is for the rejection rule; a `saguaro_c` below one then draws the `fan_out` likeliest less often."""

    def __init__(self, *, drawn: bool = False, saguaro_c: float = 1.0, fan_out: int = 3) -> None:
        self.drawn = drawn
        self.saguaro_c = saguaro_c
        self.fan_out = fan_out

    def choose(self, logits: torch.Tensor, rows: Rows, needs: Needs) -> Chosen:
        if not self.drawn:
            tokens, scores = self._best(logits, rows, needs, None, 2)
            return Chosen(tokens[:, 0], scores[:, 0] - scores[:, 1])
        laws = reweighted(self._laws(logits, rows, needs), self.saguaro_c, self.fan_out)
        tokens = _draw(laws, rows)
        confidence = -torch.log1p(-laws.gather(-1, tokens).clamp(max=1 - 1e-6))
        return Chosen(tokens[:, 0].int(), confidence[:, 0].float(), laws)

    def likeliest(
        self, logits: torch.Tensor, rows: Rows, needs: Needs, excluded: torch.Tensor, count: int
    ) -> torch.Tensor:
        """What the target may choose in each row, likeliest first, without the excluded token: int32 [R, count]."""
        if not self.drawn:
            return self._best(logits, rows, needs, excluded, count)[0]
        laws = self._laws(logits, rows, needs)
        return _largest(_without(laws, excluded, 0.0), count)[0]

    def _best(
        self, logits: torch.Tensor, rows: Rows, needs: Needs, excluded: torch.Tensor | None, count: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens and scores of what the target's rule, applied to the draft's logits, would choose."""
        if logits.is_cuda and not needs.truncated:
            from ssd.kernels.choice import best_tokens

            nothing = torch.full_like(rows.positions, -1) if excluded is None else excluded
            columns = (rows.seeds, rows.positions, rows.temperature, nothing)
            return best_tokens(logits, *columns, count, noise.constants())
        if needs.sampled:
            keys = noise.position_keys(rows.seeds, rows.positions)
            scores = rows.shape(needs, logits.shape[-1]).apply(logits) + noise.gumbel_of(keys, logits.shape[-1])
            logits = torch.where(rows.temperature[:, None] > 0, scores, logits)
        return _largest(logits if excluded is None else _without(logits, excluded, -torch.inf), count)

    def _laws(self, logits: torch.Tensor, rows: Rows, needs: Needs) -> torch.Tensor:
        return rows.shape(needs, logits.shape[-1]).apply(logits).double().softmax(-1)


def _draw(laws: torch.Tensor, rows: Rows) -> torch.Tensor:
    """One token from each law: int64 [R, 1]."""
    keys = noise.position_keys(rows.seeds, rows.positions, noise.Stream.DRAFT)
    return (laws.log() + noise.gumbel_of(keys, laws.shape[-1])).argmax(-1, keepdim=True)


def _without(scores: torch.Tensor, excluded: torch.Tensor, value: float) -> torch.Tensor:
    index = excluded.long()[:, None]
    return torch.where(index >= 0, scores.scatter(-1, index.clamp(min=0), value), scores)


def _largest(scores: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    if scores.is_cuda or count > 2:
        values, tokens = scores.topk(min(count, scores.shape[-1]), dim=-1)
        missing = (0, count - tokens.shape[-1])  # of a vocabulary that has fewer
        return torch.nn.functional.pad(tokens.int(), missing), torch.nn.functional.pad(
            values, missing, value=-torch.inf
        )
    first = torch.from_numpy(scores.numpy().argmax(axis=-1))[:, None]  # numpy's is several times faster than torch's
    best = scores.gather(-1, first)
    rest = scores.scatter(-1, first, -torch.inf)
    second = torch.from_numpy(rest.numpy().argmax(axis=-1))[:, None]
    return torch.cat((first, second), -1).int(), torch.cat((best, rest.gather(-1, second)), -1)
