"""Seconds of a forward pass: what it reads and computes on the ranks of a model, at the shares that were measured."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

from ssd.simulation.hardware import COPY, FORMATS, GPU, KV, LAYER, MESSAGE, SUM, WHOLE_STEP, interpolated
from ssd.simulation.models import EAGLE, Model


class Steps:
    """A model on `ranks` GPUs, with sequences of `context` tokens.

    `alone`: it is a draft that has its GPU to itself, where a step may be one kernel. `slowdown`: of this machine,
    against what the measured shares give.
    """

    def __init__(
        self, model: Model, gpu: GPU, ranks: int, context: float, *, alone: bool = False, slowdown: float = 1.0
    ) -> None:
        self.model, self.gpu, self.ranks, self.slowdown = model, gpu, ranks, slowdown
        self._one_kernel = alone and gpu.hopper and ranks == 1 and model.name != EAGLE
        self._copy = gpu.bandwidth * 1e12 * COPY
        self._kv = slowdown * model.kv_bytes(context, ranks) / (self._copy * KV)
        self._products: Callable[[int], float] = functools.cache(self._read_and_compute)
        self._others: Callable[[int], float] = functools.cache(self._around)

    def seconds(self, rows: int, sequences: int) -> float:
        """A step of so many rows that reads the KV of these sequences."""
        return self.busy(rows, sequences) + self._others(rows)

    def busy(self, rows: int, sequences: int) -> float:
        """The part of it in which the GPU's memory or arithmetic is used."""
        return self._products(rows) + sequences * self._kv

    def prefill(self, tokens: int) -> float:
        """Reading a prompt, whose attention computes with every earlier token."""
        width = sum(each.attention.num_heads * each.attention.head_dim for each in self.model.config.layers)
        computed = 2 * tokens * tokens * width / self.ranks
        return self.seconds(tokens, 0) + self.slowdown * computed / _peak(self.gpu, "bf16")

    @property
    def floor(self) -> float:
        """Seconds in which a copy moves the weights that one row reads."""
        return self.model.read_bytes() / self.ranks / self._copy

    def _read_and_compute(self, rows: int) -> float:
        """Both overlap, but not completely: the root of the sum of squares."""
        total = 0.0
        for each in self.model.products(rows):
            form = FORMATS[each.format]
            read = each.weights * form.bits / 8 / self.ranks / (self._copy * form.read)
            total += math.hypot(read, 2 * each.row_weights * rows / self.ranks / _peak(self.gpu, each.format))
        return self.slowdown * total

    def _around(self, rows: int) -> float:
        """Launches, norms and attention of the layers, and what ranks send each other."""
        layers = self.model.config.num_layers
        of_layers = self.model.read_bytes(rows) - 2 * self.model.head_weights
        seconds = layers * interpolated(LAYER, of_layers / self.ranks / layers / 1e6)
        if self._one_kernel and rows <= WHOLE_STEP[-1][0]:
            seconds = max(0.0, seconds - interpolated(WHOLE_STEP, rows))
        return self.slowdown * (seconds + (self._sums(rows) if self.ranks > 1 else 0.0))

    def _sums(self, rows: int) -> float:
        """One for the embedding and two for each layer, in float32, gathered whole or, if many, by shares; then the
        logits. Sizes as in docs/scaling.md."""
        config, others = self.model.config, self.ranks - 1
        elements, count = rows * config.hidden_size, 2 * config.num_layers + 1
        each = min(4 * others * elements, 6 * others / self.ranks * elements + MESSAGE)
        logits = 4 * rows * config.vocab_size * others / self.ranks
        return count * SUM + (count * each + logits) / (self.gpu.link * 1e9)


def _peak(gpu: GPU, form: str) -> float:
    """FLOP/s of products in this format."""
    known = FORMATS[form]
    return (gpu.fp8 if known.fp8 else gpu.bf16) * 1e12 * known.compute
