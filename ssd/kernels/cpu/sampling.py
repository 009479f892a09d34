"""The functions of `ssd.kernels.triton.sampling` for a CPU: in C, adjustments and truncation in torch and numpy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from ssd.kernels.cpu import recording
from ssd.kernels.cpu.calls import LAYOUTS
from ssd.kernels.cpu.kernels import Kernels, address
from ssd.kernels.state import HAS_BIAS, HAS_COUNTS, IN_PROMPT, IS_STOP, Columns

_PART = 2**17  # logits that are adjusted at a time: they stay in the cache
Part = slice | torch.Tensor  # an index of rows


class Sampling:
    def __init__(self, kernels: Kernels) -> None:
        self._gumbel, self._best = kernels.function("gumbel"), kernels.function("best")

    def gumbel(self, keys: torch.Tensor, vocab_size: int, golden: int, mix1: int, mix2: int) -> torch.Tensor:
        if keys.dtype is not torch.int64:
            raise TypeError(f"keys are {keys.dtype}, not int64")
        keys, rows = keys.contiguous(), keys.shape[0]
        out = torch.empty(rows, vocab_size, dtype=torch.float32, device="cpu")
        generator = LAYOUTS["generator"].pack(golden=golden, mix1=mix1, mix2=mix2)
        self._gumbel(keys=keys.data_ptr(), out=out.data_ptr(), rows=rows, vocab=vocab_size, g=generator)
        return out

    def adjust(
        self,
        logits: torch.Tensor,
        columns: Columns,
        slots: torch.Tensor,
        positions: torch.Tensor,
        num_drafted: torch.Tensor | None,
        drafts: torch.Tensor | None,
        paths: torch.Tensor | None,
    ) -> None:
        bias, all_counts = columns.bias, columns.counts
        assert bias is not None
        assert all_counts is not None
        flags = torch.where(slots < 0, 0, columns.flags[slots.clamp(min=0)])
        for _, part in _parts(flags & HAS_BIAS > 0, logits.shape[1]):
            logits[part] += bias[slots[part]]
        for _, part in _parts(flags & HAS_COUNTS > 0, logits.shape[1]):
            own, counts = slots[part], all_counts[slots[part]]
            times = counts >> 2  # that a token is output
            if drafts is not None and num_drafted is not None:
                tokens = (drafts[own] if paths is None else paths[part]).long()
                drafted = torch.arange(tokens.shape[1]) < num_drafted[part, None]
                times.scatter_add_(1, torch.where(drafted, tokens, 0), drafted.int())
            x, seen = logits[part], (times > 0) | (counts & IN_PROMPT > 0)
            repetition, presence, frequency = (
                column[own, None] for column in (columns.repetition, columns.presence, columns.frequency)
            )
            x = torch.where(seen, torch.where(x > 0, x / repetition, x * repetition), x)
            x -= presence * (times > 0) + frequency * times
            early = positions[part] < columns.min_length[own]
            if early.any():
                x.masked_fill_((counts & IS_STOP > 0) & early[:, None], -torch.inf)
            logits[part] = x

    def mask(self, logits: torch.Tensor, rows: torch.Tensor, masks: torch.Tensor) -> None:
        allowed = np.unpackbits(masks.numpy().view(np.uint8), axis=1, count=logits.shape[1], bitorder="little")
        for row, bits in zip(rows.tolist(), allowed, strict=True):
            logits[row].numpy()[bits == 0] = -np.inf

    def tempered(
        self, logits: torch.Tensor, columns: Columns, slots: torch.Tensor, min_temperature: float
    ) -> torch.Tensor:
        temperature = _temperature(columns, slots).clamp(min=min_temperature)
        z = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
        _truncate(z, logits, columns, slots)
        return z

    def best(
        self,
        logits: torch.Tensor,
        columns: Columns,
        slots: torch.Tensor,
        positions: torch.Tensor,
        *,
        truncated: bool,
        count: int,
        excluded: torch.Tensor | None,
        ids: torch.Tensor | None,
        constants: tuple[int, int, int],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        types = logits.dtype, slots.dtype, positions.dtype
        if types != (torch.float32, torch.int32, torch.int32):
            raise TypeError(f"logits, slots and positions are {types}, not float32 and int32")
        if truncated:
            given, logits = logits, logits.clone()
            _truncate(logits, given, columns, slots)
        (rows, vocab), slots, positions = logits.shape, slots.contiguous(), positions.contiguous()
        tokens, values = (recording.empty((rows, count), dtype) for dtype in (torch.int32, torch.float32))
        golden, mix1, mix2 = constants
        self._best(
            scores=logits.data_ptr(),
            ld=logits.stride(0),
            ids=address(ids),
            excluded=address(excluded),
            tokens=tokens.data_ptr(),
            values=values.data_ptr(),
            rows=rows,
            vocab=vocab,
            count=count,
            slots=slots.data_ptr(),
            positions=positions.data_ptr(),
            columns=columns.packed.data_ptr(),
            words=columns.packed.shape[1],
            g=LAYOUTS["generator"].pack(golden=golden, mix1=mix1, mix2=mix2),
        )
        return tokens, values


def _parts(chosen: torch.Tensor, vocab_size: int) -> Iterator[tuple[list[int], Part]]:
    """Numbers of the chosen rows (bool [R]), some at a time, and an index (a slice if it can be: no copy)."""
    numbers, size = chosen.nonzero()[:, 0].tolist(), max(1, _PART // vocab_size)
    for part in (numbers[i : i + size] for i in range(0, len(numbers), size)):
        together = part[-1] - part[0] < len(part)
        yield part, slice(part[0], part[-1] + 1) if together else torch.tensor(part)


def _temperature(columns: Columns, slots: torch.Tensor) -> torch.Tensor:
    """float32 [R]; padding is greedy."""
    return torch.where(slots < 0, 0.0, columns.temperature[slots.clamp(min=0)])


def _truncate(scores: torch.Tensor, logits: torch.Tensor, columns: Columns, slots: torch.Tensor) -> None:
    """Sets `scores` to -inf for the tokens that min_p, top_k and top_p drop, in sampled rows."""
    c, temperature, slots = columns, _temperature(columns, slots), slots.clamp(min=0)
    wanted = (c.log_min_p[slots] > -math.inf) | (c.top_k[slots] > 0) | (c.top_p[slots] < 1)
    for numbers, part in _parts(wanted & (temperature > 0), logits.shape[1]):
        x, slot = logits[part], slots[part]
        largest = x.amax(-1, keepdim=True)
        z = torch.where(x == largest, 0.0, (x - largest) / temperature[part, None])  # 0 also where all are -inf
        kept = (z >= c.log_min_p[slot, None]).numpy()
        keys = (z * -(2.0**20)).clamp(max=2.0**25).int().clamp(min=0, max=2**25 - 1).numpy()
        limits = c.top_k[slot].tolist(), c.top_p[slot].tolist()
        for i, distance, key, first, top_k, top_p in zip(numbers, z, keys, kept, *limits, strict=True):
            scores[i].numpy()[~_kept(distance, key, first, top_k, top_p)] = -np.inf


def _kept(z: torch.Tensor, key: np.ndarray, kept: np.ndarray, top_k: int, top_p: float) -> np.ndarray:
    """Which of the tokens that min_p has kept, then top_k, then top_p keep: bool [V].

    `z` are the logits' distances from the largest. Tokens are ordered by them (`key`, in steps of 2**-20), then by id.
    Probability masses are integers, 2**32 for the largest; their exponentials are those of a tensor of its own, so that
    nothing depends on where the row is in the batch.
    """
    if top_k > 0:
        kept &= _first(key, kept.astype(np.float64), top_k)
    if top_p < 1:
        mass = (z.clone().exp() * 2.0**32).floor().double().numpy()
        mass[~kept] = 0.0
        kept &= _first(key, mass, top_p * float(mass.sum()))
    return kept


def _first(key: np.ndarray, weight: np.ndarray, limit: float) -> np.ndarray:
    """Tokens, in the order of (key, id), with a total weight below `limit` before them: bool [V].

    Weights are integers with a sum below 2**53, so sums are exact. Only the bin of keys that reaches the limit is
    sorted.
    """
    bins = key >> 15
    sums = np.bincount(bins, weight, minlength=2**10)
    before = sums.cumsum() - sums
    last = int(np.searchsorted(before, limit)) - 1  # the last bin that begins below the limit
    kept: np.ndarray = bins < last
    inside = (bins == last).nonzero()[0]
    inside = inside[key[inside].argsort(kind="stable")]
    mass = weight[inside]
    kept[inside[before[last] + mass.cumsum() - mass < limit]] = True
    return kept
