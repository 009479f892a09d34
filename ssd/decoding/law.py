"""The target's law: from logits to the token that a request's parameters and seed choose.

Every row is one position of one sequence, *given the tokens before it, drafted ones included*; so the same code serves
plain decoding and verification. Choosing needs no floating-point reduction at all (maxima, sorts and integer sums
only): the result cannot depend on the order in which a device adds things up, nor on the other rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import torch

from ssd.core import SamplingParams, Sequence, TokenLogprobs, Work
from ssd.decoding.noise import Stream, gumbel, position_key

_ONE = float(2**40)  # fixed-point unit of probability masses
COLDEST = 1e-6  # below this a temperature would overflow float32, and is greedy anyway


@dataclass(frozen=True)
class Row:
    """One position to decide: after `drafted` tokens that follow the sequence's decided ones."""

    sequence: Sequence
    drafted: tuple[int, ...] = ()

    @property
    def params(self) -> SamplingParams:
        return self.sequence.params

    @property
    def position(self) -> int:
        return len(self.sequence.tokens) + len(self.drafted)

    @property
    def num_output(self) -> int:
        return self.sequence.num_output + len(self.drafted)


def rows_of(work: Work) -> list[Row]:
    drafted = work.proposal.token_ids
    return [Row(work.sequence, drafted[:j]) for j in range(work.num_rows)]


def choose(logits: torch.Tensor, rows: Seq[Row]) -> list[int]:
    """The token of every row: logits [R, V] in float32, which may be overwritten."""
    for i, row in enumerate(rows):
        _adjust(logits, i, row)
    sampled = [i for i, row in enumerate(rows) if not row.params.greedy]
    if len(sampled) == len(rows):
        return _argmax(perturbed(logits, rows))
    if sampled:
        index = torch.tensor(sampled, device=logits.device)
        logits.index_copy_(0, index, perturbed(logits[index], [rows[i] for i in sampled]))
    return _argmax(logits)


def _argmax(logits: torch.Tensor) -> list[int]:
    """The first of the largest, in every row (numpy's is six times faster than torch's on a CPU)."""
    best = logits.argmax(dim=-1) if logits.is_cuda else logits.numpy().argmax(axis=-1)
    tokens: list[int] = best.tolist()
    return tokens


def logprobs(logits: torch.Tensor, row: Row, token: int) -> TokenLogprobs:
    """What the model itself (temperature 1, nothing truncated or penalised) gives the token and the likeliest ones."""
    log_p = torch.log_softmax(logits.double(), dim=-1)
    values, ids = log_p.topk(min(row.params.logprobs or 0, log_p.numel()))
    top = dict(zip(ids.tolist(), values.tolist(), strict=True))
    return TokenLogprobs(token, float(log_p[token]), top)


def _adjust(logits: torch.Tensor, i: int, row: Row) -> None:
    """Bias, penalties and forbidden stops of row i, in place; a row that has none of them is not even sliced."""
    params, vocab = row.params, logits.shape[-1]
    if params.logit_bias:
        ids = [t for t in params.logit_bias if t < vocab]
        bias = [params.logit_bias[t] for t in ids]
        logits[i, ids] += torch.tensor(bias, dtype=logits.dtype, device=logits.device)
    if params.penalised:
        _penalise(logits[i], row)
    if row.num_output < params.min_tokens:
        logits[i, [t for t in row.sequence.stop_token_ids if t < vocab]] = -torch.inf  # a model may name one too many


def _penalise(z: torch.Tensor, row: Row) -> None:
    params, prompt = row.params, row.sequence.num_prompt
    tokens = (*row.sequence.tokens, *row.drafted)
    if params.repetition_penalty != 1.0:
        ids = torch.tensor(sorted(set(tokens)), device=z.device)
        seen = z[ids]
        z[ids] = torch.where(seen > 0, seen / params.repetition_penalty, seen * params.repetition_penalty)
    counts = Counter(tokens[prompt:])
    if counts and (params.presence_penalty or params.frequency_penalty):
        ids = torch.tensor(list(counts), device=z.device)
        times = torch.tensor(list(counts.values()), device=z.device)
        z[ids] -= params.presence_penalty + params.frequency_penalty * times


def perturbed(z: torch.Tensor, rows: Seq[Row]) -> torch.Tensor:
    """Scores whose argmax is an exact sample of the truncated law at the rows' temperatures."""
    return Shape.of(rows, z).apply(z) + _noise(rows, z, Stream.CHOICE)


def probabilities(logits: torch.Tensor, rows: Seq[Row]) -> torch.Tensor:
    """The law that each row's parameters describe: float64 [R, V]. The logits may be overwritten."""
    for i, row in enumerate(rows):
        _adjust(logits, i, row)
    return Shape.of(rows, logits).apply(logits).double().softmax(-1)


def sample(laws: torch.Tensor, rows: Seq[Row], stream: Stream) -> list[int]:
    """One draw from each law [R, V], which need not add up to one."""
    return _argmax(laws.log() + _noise(rows, laws, stream))


def reweighted(laws: torch.Tensor, c: float, fan_out: int) -> torch.Tensor:
    """Saguaro's draft laws: in each row of [R, V] the `fan_out` likeliest tokens weigh `c` times as much as before.

    So a rejected draft leaves more of the target's mass on them. A row that has no other tokens keeps its law at c = 0.
    """
    if c == 1.0:
        return laws
    top = laws.topk(min(fan_out, laws.shape[-1]), dim=-1).indices
    weighted = laws.scatter(-1, top, laws.gather(-1, top) * c)
    mass = weighted.sum(-1, keepdim=True)
    return torch.where(mass > 0, weighted / mass, laws)


def _noise(rows: Seq[Row], like: torch.Tensor, stream: Stream) -> torch.Tensor:
    keys = [position_key(row.sequence.seed, row.position, stream) for row in rows]
    return gumbel(keys, like.shape[-1], like.device)


@dataclass(frozen=True)
class Shape:
    """What shapes the laws of some rows, a column [R, 1] each; None where no row asks for it."""

    temperature: torch.Tensor
    min_p: torch.Tensor | None = None
    top_k: torch.Tensor | None = None  # at least 1
    top_p: torch.Tensor | None = None  # there if top_k is

    @classmethod
    def of(cls, rows: Seq[Row], like: torch.Tensor) -> Shape:
        params, vocab = [row.params for row in rows], like.shape[-1]
        temperature = _column([max(p.temperature, COLDEST) for p in params], like)
        min_p = _column([p.min_p for p in params], like) if any(p.min_p > 0 for p in params) else None
        if not any(p.top_k > 0 or p.top_p < 1 for p in params):
            return cls(temperature, min_p)
        top_k = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=like.device)[:, None]
        return cls(temperature, min_p, top_k, _column([p.top_p for p in params], like.double()))

    def apply(self, z: torch.Tensor) -> torch.Tensor:
        """Logits at the rows' temperatures, the largest 0, and -inf where min_p, top_k or top_p leave nothing."""
        z = (z - z.amax(-1, keepdim=True)) / self.temperature
        if self.min_p is not None:
            z = z.masked_fill(z < self.min_p.log(), -torch.inf)
        return z if self.top_k is None or self.top_p is None else _truncate(z, self.top_k, self.top_p)


def _truncate(z: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Keeps the top_k likeliest tokens, then the fewest of those that hold top_p of their mass."""
    ordered, order = z.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(z.shape[-1], device=z.device)
    ordered = ordered.masked_fill(rank >= top_k, -torch.inf)
    mass = (ordered.double().exp() * _ONE).to(torch.int64)  # the largest is 1
    before = mass.cumsum(-1) - mass  # integers: exact in any order
    ordered = ordered.masked_fill(before >= top_p * mass.sum(-1, keepdim=True), -torch.inf)
    return torch.empty_like(z).scatter_(-1, order, ordered)


def _column(values: Seq[float], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor(values, dtype=like.dtype, device=like.device)[:, None]
