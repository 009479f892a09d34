"""The features that drafts read: taken from every forward pass of the target, on the device.

A forward pass leaves K and V of the draft for its tokens in the target's own KV slots. So the draft has what the target
has: the same block tables, prefix cache and preemption, and what was computed of a rejected draft is overwritten as the
target's is.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch

from ssd.execution.batch import BatchInputs
from ssd.execution.state import SequenceState
from ssd.kernels.device import kernels
from ssd.kernels.ops import DeviceBatch
from ssd.kernels.state import LastRows, TreeRows
from ssd.models.decoder import KVCache
from ssd.models.feature_draft import FeatureDraft
from ssd.models.head import Head


class Features:
    """The draft's KV of all tokens that the target has computed: that of a position is made of its own feature."""

    recomputed: ClassVar[int] = 0  # tokens of a cached prefix that a forward pass has to compute once more

    def __init__(self, draft: FeatureDraft, kv: KVCache) -> None:
        self.draft, self.kv = draft, kv

    def admit(self, slot: int, start: int) -> None:
        """A slot gets another sequence, whose first forward pass begins at position `start`."""

    def buffer(self, rows: int) -> torch.Tensor:
        """Where a forward pass of so many rows writes its features."""
        width = len(self.draft.feature_config.feature_layers) * self.draft.feature_config.target_hidden_size
        return torch.zeros((rows, width), dtype=self.draft.dtype, device=self.draft.device)

    def by_layer(self, buffer: torch.Tensor) -> dict[int, torch.Tensor]:
        layers = self.draft.feature_config.feature_layers
        return dict(zip(layers, buffer.chunk(len(layers), dim=1), strict=True))

    def store(self, inputs: BatchInputs, batch: DeviceBatch, buffer: torch.Tensor) -> None:
        """Writes the draft's KV of a forward pass."""
        self.draft.store(batch, self.draft.fuse(buffer), self.kv)


class HeadFeatures(Features):
    """For a head, whose KV of position p is made of the token there and the fused feature of p - 1.

    The features of each sequence's last positions are kept for the next forward pass, and for the head's next draft. A
    cached prefix has KV of the head, but no features: its last token is computed once more (`BlockPool.recomputed`).
    """

    recomputed = 1

    @torch.inference_mode(False)  # so that they can be written to inside and outside of inference mode
    def __init__(self, head: Head, kv: KVCache, state: SequenceState) -> None:
        super().__init__(head, kv)
        self.head = head
        self._kept = state.lookahead + 1  # a draft and the token before it
        self._state = state
        shape = (state.num_slots + 1, self._kept, head.config.hidden_size)
        # Of position p at p % kept. Where drafts may be trees, the rows of the last forward pass: which of them are
        # accepted is not known yet.
        self._fused = torch.zeros(shape, dtype=head.dtype, device=head.device)
        self._start = torch.zeros(shape[0], dtype=torch.int32, device=head.device)  # first position with a feature
        self._before: dict[int, torch.Tensor] = {}  # by rows of a batch of chains: the row before each

    def admit(self, slot: int, start: int) -> None:
        self._start[slot].fill_(start)

    def before(self, slots: torch.Tensor, positions: torch.Tensor, out: torch.Tensor) -> None:
        """Writes the fused features of the positions before these, the last ones that have any, to `out`."""
        kernels(self.head.device).features.before(self._fused, slots, positions, self._last_rows(), out)

    def _last_rows(self) -> LastRows | None:
        tree = self._state.tree
        return None if tree is None else LastRows(self._state.num_accepted, tree.path)

    def _row_before(self, rows: int) -> torch.Tensor:
        if rows not in self._before:
            self._before[rows] = torch.arange(-1, rows - 1, dtype=torch.int32, device=self.head.device).clamp_(min=0)
        return self._before[rows]

    def store(self, inputs: BatchInputs, batch: DeviceBatch, buffer: torch.Tensor) -> None:
        """Also keeps the last features."""
        tree = None
        last = self._last_rows()
        if last is not None:
            before = self._row_before(inputs.rows) if inputs.tree is None else inputs.tree.before
            tree = TreeRows(inputs["starts"], before, last)
        hidden, mapping = kernels(self.head.device).features.shift_and_keep(
            self.head.fuse(buffer),
            row_work=inputs["row_work"],
            slots=inputs["slots"],
            query_start=batch.query_start,
            positions=batch.positions,
            slot_mapping=batch.slot_mapping,
            start=self._start,
            kept=self._fused,
            tree=tree,
        )
        self.head.store(replace(batch, slot_mapping=mapping), hidden, self.kv)


def features_of(draft: FeatureDraft, kv: KVCache, state: SequenceState) -> Features:
    return HeadFeatures(draft, kv, state) if isinstance(draft, Head) else Features(draft, kv)
