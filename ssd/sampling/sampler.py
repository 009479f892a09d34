"""The sampler: from logits to tokens, for target and draft model.

A row is one position of one sequence; the sequence's parameters are in the columns of its slot. The token is the argmax
of logit / temperature + Gumbel noise of (seed, position), so target and draft choose the same token where their logits
agree. No floating-point sums (only maxima, integer sums and elementwise arithmetic): a row's result depends neither on
the other rows nor on the order of a device's additions.

On CUDA everything but `SamplingColumns.set` can be captured in a graph.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
import torch

from ssd.core import SamplingParams
from ssd.kernels.device import kernels
from ssd.kernels.state import HAS_BIAS, HAS_COUNTS, IN_PROMPT, IS_STOP, ONE_OUTPUT
from ssd.kernels.transfers import upload
from ssd.sampling import noise
from ssd.sampling.noise import Stream

MIN_TEMPERATURE = 1e-6  # lower ones (above 0) would overflow float32
MIN_TOP_P = 2.0**-126  # lower ones keep one token, too, but may be 0 in float32
MIN_REPETITION = 2.0**-100  # lower ones would overflow float32
_INT32_MAX = 2**31 - 1


class Needs(NamedTuple):
    """Steps that some row of a batch needs; the others are skipped."""

    truncated: bool = False  # top_k, top_p or min_p of a sampled row
    adjusted: bool = False  # penalties, bias or min_tokens

    @classmethod
    def of(cls, params: Iterable[SamplingParams]) -> Needs:
        truncated = adjusted = False
        for p in params:
            truncated |= not p.greedy and (p.top_k > 0 or p.top_p < 1 or p.min_p > 0)
            adjusted |= bool(p.penalised or p.logit_bias or p.min_tokens)
        return cls(truncated, adjusted)


ALL_NEEDS = [Needs(truncated, adjusted) for truncated in (False, True) for adjusted in (False, True)]


class Rows(NamedTuple):
    """The positions to decide."""

    slots: torch.Tensor  # int32 [R]; -1: padding, the result is undefined
    positions: torch.Tensor  # int32 [R]: the index in its sequence of the token to decide
    num_drafted: torch.Tensor | None = None  # int32 [R]: drafts[slot, :num_drafted] are output already; None: 0
    drafts: torch.Tensor | None = None  # int32 [S, K]
    paths: torch.Tensor | None = None  # int32 [R, D]: of trees, paths[row, :num_drafted] in place of the drafts


class SamplingColumns:
    """The sampling parameters of every slot, as device tensors at fixed addresses.

    The dense tables `bias` and `counts` are allocated when the first sequence needs one of them: graphs that read them
    must be captured after that.
    """

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.vocab_size = vocab_size
        self.packed = torch.zeros((num_slots, 12), dtype=torch.int32, device=device)  # one upload sets a slot
        floats = self.packed.view(torch.float32)
        self.seed_key = self.packed.view(torch.int64)[:, 0]  # `noise.seed_key`, signed
        self.temperature = floats[:, 2]  # 0 (greedy) or at least MIN_TEMPERATURE
        self.log_min_p = floats[:, 3]  # -inf: none
        self.top_p = floats[:, 4]
        self.top_k = self.packed[:, 5]  # 0: all
        self.repetition = floats[:, 6]
        self.presence = floats[:, 7]
        self.frequency = floats[:, 8]
        self.min_length = self.packed[:, 9]  # no stop token at positions below this
        self.flags = self.packed[:, 10]  # which tables are valid for this slot
        self.bias: torch.Tensor | None = None  # float32 [S, V]
        self._last_biases: tuple[Mapping[int, float] | None, np.ndarray] = None, np.zeros(0, dtype=np.float32)
        self.counts: torch.Tensor | None = None  # int32 [S, V]: occurrences in the output * 4 + stop * 2 + in prompt

    def allocate_tables(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Bias and counts; both are allocated when the first of them is needed."""
        if self.bias is None or self.counts is None:
            shape = (len(self.packed), self.vocab_size)
            self.bias = torch.zeros(shape, dtype=torch.float32, device=self.packed.device)
            self.counts = torch.zeros(shape, dtype=torch.int32, device=self.packed.device)
        return self.bias, self.counts

    @contextmanager
    def tables(self) -> Iterator[None]:
        """Both tables are allocated inside, and given back if they were not before."""
        before = self.bias, self.counts
        self.allocate_tables()
        try:
            yield
        finally:
            self.bias, self.counts = before

    def set(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        prompt: Seq[int],
        output: Seq[int],
        stop_token_ids: Iterable[int],
    ) -> None:
        """Writes a sequence's parameters to its slot; `output`: its tokens after the prompt. Does not wait."""
        flags = 0
        if params.logit_bias:
            flags |= HAS_BIAS
            upload(self._biases(params.logit_bias), self.allocate_tables()[0][slot])
        if params.penalised or params.min_tokens:
            flags |= HAS_COUNTS
            counts = np.bincount(self._in_vocabulary(output), minlength=self.vocab_size).astype(np.int32) * ONE_OUTPUT
            counts[self._in_vocabulary(prompt)] |= IN_PROMPT
            counts[self._in_vocabulary(stop_token_ids)] |= IS_STOP
            upload(counts, self.allocate_tables()[1][slot])
        row = np.zeros(self.packed.shape[1], dtype=np.int32)
        row[:2].view(np.int64)[0] = noise.signed(noise.seed_key(seed))
        row[2:5].view(np.float32)[:] = (
            0.0 if params.greedy else max(params.temperature, MIN_TEMPERATURE),
            math.log(params.min_p) if params.min_p else -math.inf,
            max(params.top_p, MIN_TOP_P),
        )
        row[5] = min(params.top_k, self.vocab_size)
        repetition = max(params.repetition_penalty, MIN_REPETITION)
        row[6:9].view(np.float32)[:] = (repetition, params.presence_penalty, params.frequency_penalty)
        row[9] = min(len(prompt) + params.min_tokens, _INT32_MAX)
        row[10] = flags
        upload(row, self.packed[slot])

    def count(self, slots: torch.Tensor, tokens: torch.Tensor, valid: torch.Tensor) -> None:
        """Counts decided tokens of slots for the penalties: [N] each, those that are not `valid` are ignored."""
        if self.counts is None:
            return
        slots = slots.long().clamp(min=0)
        valid = valid & (tokens >= 0) & (tokens < self.vocab_size) & (self.flags[slots] & HAS_COUNTS > 0)
        index = torch.where(valid, slots * self.vocab_size + tokens, 0)
        self.counts.view(-1).index_add_(0, index, valid.int() * ONE_OUTPUT)

    def _biases(self, given: Mapping[int, float]) -> np.ndarray:
        """A bias for every token. Samples of one request have one mapping, which is read once."""
        if self._last_biases[0] is not given:
            ids, values = np.fromiter(given, dtype=np.int64), np.fromiter(given.values(), dtype=np.float32)
            biases, known = np.zeros(self.vocab_size, dtype=np.float32), ids < self.vocab_size
            biases[ids[known]] = values[known]
            self._last_biases = given, biases
        return self._last_biases[1]

    def _in_vocabulary(self, ids: Iterable[int]) -> np.ndarray:
        array = np.fromiter(ids, dtype=np.int64)
        return array[array < self.vocab_size]


class Sampler:
    """Chooses tokens by the parameters in `columns`. Logits are float32 [R, V], contiguous in V."""

    def __init__(self, columns: SamplingColumns) -> None:
        self.columns = columns

    def adjust(self, logits: torch.Tensor, rows: Rows) -> None:
        """Applies bias, repetition, presence and frequency penalties and min_tokens to the logits, in place."""
        columns = self.columns
        if columns.counts is None or columns.bias is None:
            return  # no sequence has needed it so far
        kernels(logits.device).sampling.adjust(logits, columns, *rows)

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        """Sets the logits of tokens that are not allowed to -inf, in place.

        `masks` int32 [M, V / 32]: bit t % 32 of word t // 32 is set if token t is allowed. `rows` int64 [M]: their rows
        of the logits.
        """
        kernels(logits.device).sampling.mask(logits, rows, masks)

    def choose(self, logits: torch.Tensor, rows: Rows, needs: Needs) -> torch.Tensor:
        """The token of every row, -1 if there is no choice: int32 [R]. `needs.adjusted` changes the logits."""
        return self.best(logits, rows, needs, 1)[0][:, 0]

    def best(
        self,
        logits: torch.Tensor,
        rows: Rows,
        needs: Needs,
        count: int,
        excluded: torch.Tensor | None = None,
        ids: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` tokens of the highest scores, the lower token where scores are equal: int32, float32 [R, count].

        Tokens that truncation leaves out, and the one of each row in `excluded` (int32 [R]; -1: none), score -inf;
        a score of -inf comes with token 0. The first token is -1 if there is no choice: all scores are -inf, or some
        logits NaN or +inf. `needs.adjusted` changes the logits.

        `ids` (int32 [V]): those of the tokens whose logits are given; None: they are numbered. Which of two is the
        lower one is a question of their places in `logits`. Adjustments know no ids.
        """
        assert ids is None or not needs.adjusted
        if needs.adjusted:
            self.adjust(logits, rows)
        found: tuple[torch.Tensor, torch.Tensor] = kernels(logits.device).sampling.best(
            logits,
            self.columns,
            rows.slots,
            rows.positions,
            truncated=needs.truncated,
            count=count,
            excluded=excluded,
            ids=ids,
            constants=noise.constants(),
        )
        return found

    def distribution(self, logits: torch.Tensor, rows: Rows, needs: Needs) -> torch.Tensor:
        """The distribution of each row: float64 [R, V] (greedy: MIN_TEMPERATURE). `needs.adjusted` changes logits."""
        if needs.adjusted:
            self.adjust(logits, rows)
        if needs.truncated:
            sampling = kernels(logits.device).sampling
            z: torch.Tensor = sampling.tempered(logits, self.columns, rows.slots, MIN_TEMPERATURE)
        else:
            temperature = torch.where(rows.slots < 0, 0.0, self.columns.temperature[rows.slots.clamp(min=0)])
            z = (logits - logits.amax(-1, keepdim=True)) / temperature.clamp(min=MIN_TEMPERATURE)[:, None]
        return z.double().softmax(-1)

    def draw(self, distribution: torch.Tensor, rows: Rows, stream: Stream) -> torch.Tensor:
        """A sample of each distribution [R, V] (not necessarily normalised) with a stream's noise: int64 [R]."""
        return (distribution.log() + noise.gumbel_of(self._keys(rows, stream), distribution.shape[-1])).argmax(dim=-1)

    def _keys(self, rows: Rows, stream: Stream) -> torch.Tensor:
        return noise.position_keys(self.columns.seed_key[rows.slots.clamp(min=0)], rows.positions, stream)


def reweighted(distributions: torch.Tensor, c: float, fan_out: int) -> torch.Tensor:
    """Saguaro's draft distributions: in each row of [R, V] the `fan_out` likeliest tokens are scaled by `c`.

    After a rejection, more of max(p - q, 0) is then on these tokens. At c = 0 a row without other tokens is unchanged.
    """
    if c == 1.0:
        return distributions
    top = distributions.topk(min(fan_out, distributions.shape[-1]), dim=-1).indices
    weighted = distributions.scatter(-1, top, distributions.gather(-1, top) * c)
    mass = weighted.sum(-1, keepdim=True)
    return torch.where(mass > 0, weighted / mass, distributions)


def top_logprobs(
    logits: torch.Tensor, tokens: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under the raw logits, of the tokens [R] and of the `count` likeliest (ids and values)."""
    log_p = torch.log_softmax(logits.double(), dim=-1)
    values, ids = log_p.topk(min(count, log_p.shape[-1]), dim=-1)
    return log_p.gather(-1, tokens.long().clamp(min=0)[:, None])[:, 0], ids, values
