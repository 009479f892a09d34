"""The features that an EAGLE head reads: taken from every forward pass of the target, on the device.

A forward pass leaves K and V of the head for its tokens: that of position p, of the token there and the feature of
p - 1, in the target's own KV slot of p. So the head has what the target has: the same block tables, prefix cache and
preemption, and what was computed of a rejected draft is overwritten as the target's is. The features of each sequence's
last positions are kept for the next forward pass, and for the head's next draft.

A cached prefix has KV of the head, but no features: its last token is computed once more (`BlockPool.recomputed`).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from ssd.execution.batch import BatchInputs
from ssd.execution.state import SequenceState
from ssd.kernels.device import kernels
from ssd.kernels.ops import DeviceBatch
from ssd.models.decoder import KVCache
from ssd.models.eagle import EagleHead


class Features:
    """Fused features of the last positions of every sequence, and the head's KV of all of them."""

    @torch.inference_mode(False)  # so that they can be written to inside and outside of inference mode
    def __init__(self, head: EagleHead, kv: KVCache, state: SequenceState) -> None:
        self.head = head
        self.kv = kv
        self._kept = state.lookahead + 1  # a draft and the token before it
        shape = (state.num_slots + 1, self._kept, head.eagle.hidden_size)
        self._fused = torch.zeros(shape, dtype=head.dtype, device=head.device)  # of position p at p % kept
        self._start = torch.zeros(shape[0], dtype=torch.int32, device=head.device)  # first position with a feature

    def admit(self, slot: int, start: int) -> None:
        """A slot gets another sequence, whose first forward pass begins at position `start`."""
        self._start[slot].fill_(start)

    def buffer(self, rows: int) -> torch.Tensor:
        """Where a forward pass of so many rows writes its features."""
        width = len(self.head.eagle.feature_layers) * self.head.eagle.target_hidden_size
        return torch.zeros((rows, width), dtype=self.head.dtype, device=self.head.device)

    def by_layer(self, buffer: torch.Tensor) -> dict[int, torch.Tensor]:
        layers = self.head.eagle.feature_layers
        return dict(zip(layers, buffer.chunk(len(layers), dim=1), strict=True))

    def before(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Fused features of the positions before these."""
        return self._fused[slots, (positions - 1) % self._kept]

    def store(self, inputs: BatchInputs, batch: DeviceBatch, buffer: torch.Tensor) -> None:
        """Writes the head's KV of a forward pass, and keeps its last features."""
        hidden, mapping = kernels(self.head.device).features.shift_and_keep(
            self.head.fuse(buffer),
            row_work=inputs["row_work"],
            slots=inputs["slots"],
            query_start=batch.query_start,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            start=self._start,
            kept=self._fused,
        )
        self.head.store(replace(batch, slot_mapping=mapping), hidden, self.kv)
