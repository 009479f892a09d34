"""Seconds of a forward pass: what it reads and computes on the ranks of a model, at the shares that were measured."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from ssd.simulation.hardware import COPY, FORMATS, GPU, KV, LAYER, SUM, WHOLE_STEP, interpolated
from ssd.simulation.models import Model


@dataclass(frozen=True)
class Steps:
    """A model on `ranks` GPUs. `slowdown`: of this machine, against what the measured shares give.

    `drafts`: it is a draft that has its GPU to itself, where a step may be one kernel.
    """

    model: Model
    gpu: GPU
    ranks: int = 1
    drafts: bool = False
    slowdown: float = 1.0

    def seconds(self, rows: int, sequences: int, context: float) -> float:
        """A step of so many rows that reads the KV of these sequences."""
        return self.slowdown * (self.busy(rows, sequences, context) + self._around(rows, sequences, context))

    def busy(self, rows: int, sequences: int, context: float) -> float:
        """The part of it in which the memory or the arithmetic of the GPU is used."""
        return _products(self.model, self.gpu, self.ranks, rows) + self._kv(sequences, context)

    def prefill(self, tokens: int) -> float:
        """Reading a prompt, whose attention computes with every earlier token."""
        config, (_, peak) = self.model.config, _speeds(self.gpu, "bf16")
        pairs = tokens * tokens / 2
        attention = sum(4 * pairs * each.attention.num_heads * each.attention.head_dim for each in config.layers)
        return self.seconds(tokens, 0, 0) + self.slowdown * attention / self.ranks / peak

    @property
    def floor(self) -> float:
        """Seconds in which a copy moves the weights that one row reads."""
        return self.model.read_bytes() / self.ranks / (self.gpu.bandwidth * 1e12 * COPY)

    def _kv(self, sequences: int, context: float) -> float:
        return sequences * self.model.kv_bytes(context, self.ranks) / (self.gpu.bandwidth * 1e12 * COPY * KV)

    def _around(self, rows: int, sequences: int, context: float) -> float:
        layers = self.model.config.num_layers
        head = self.model.head_weights * 2  # bytes; those of the layers decide
        each = (self.model.read_bytes(rows) - head) / self.ranks / layers
        seconds = layers * interpolated(LAYER, each / 1e6)
        if self.drafts and self.gpu.hopper and self.ranks == 1 and rows <= WHOLE_STEP[-1][0]:
            seconds = max(0.0, seconds - interpolated(WHOLE_STEP, rows))
        return seconds + (self._sums(rows) if self.ranks > 1 else 0.0)

    def _sums(self, rows: int) -> float:
        """A sum after every attention and MLP and one of the embedding: messages and bytes; then the logits."""
        config, others = self.model.config, self.ranks - 1
        moved = (2 * config.num_layers + 1) * rows * config.hidden_size * 4 * min(others, 2)
        moved += rows * config.vocab_size * 4 * others / self.ranks
        return (2 * config.num_layers + 1) * SUM + moved / (self.gpu.link * 1e9)


def _speeds(gpu: GPU, form: str) -> tuple[float, float]:
    """Bytes/s of weights and FLOP/s of products in this format."""
    known = FORMATS[form]
    return gpu.bandwidth * 1e12 * COPY * known.read, (gpu.fp8 if known.fp8 else gpu.bf16) * 1e12 * known.compute


@lru_cache(maxsize=4096)
def _products(model: Model, gpu: GPU, ranks: int, rows: int) -> float:
    """Reading and computing overlap, but not completely: the root of the sum of squares."""
    total = 0.0
    for each in model.products(rows):
        bandwidth, peak = _speeds(gpu, each.format)
        read = each.weights * FORMATS[each.format].bits / 8 / ranks / bandwidth
        total += math.hypot(read, 2 * each.row_weights * rows / ranks / peak)
    return total
