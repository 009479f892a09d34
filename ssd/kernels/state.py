"""The columns of the SequenceState (`ssd.execution.state`), as kernels of rounds take them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields

import torch

from ssd.kernels.cpu.calls import LAYOUTS


@dataclass(frozen=True, eq=False)
class StateView:
    """Tensors with one row per slot, int32 unless stated otherwise."""

    length: torch.Tensor  # decided tokens
    token_ids: torch.Tensor  # [slots, columns]
    drafts: torch.Tensor  # [slots, K], to be verified in the next round
    confidence: torch.Tensor  # float32 [slots, K]: of each draft token, at least 0
    origin: torch.Tensor  # `Origin` of the draft
    num_accepted: torch.Tensor  # draft tokens accepted in the last round

    @functools.cached_property
    def fields(self) -> bytes:
        """As calls of CPU kernels have it."""
        num_slots, columns = self.token_ids.shape
        own = {field.name: getattr(self, field.name).data_ptr() for field in fields(self)}
        return LAYOUTS["state"].pack(**own, num_slots=num_slots, columns=columns, width=self.drafts.shape[1])
