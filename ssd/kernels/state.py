"""The columns of the SequenceState (`ssd.execution.state`), as kernels of rounds and of the sampler take them."""

from __future__ import annotations

import functools
from dataclasses import dataclass, fields
from typing import NamedTuple, Protocol

import torch

from ssd.kernels.cpu.calls import LAYOUTS

HAS_BIAS, HAS_COUNTS = 1, 2  # bits of `Columns.flags`
IN_PROMPT, IS_STOP, ONE_OUTPUT = 1, 2, 4  # of `Columns.counts`


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


class LastRows(NamedTuple):
    """By slot, in which row of its last work a sequence's last feature was computed: that of the last accepted node, or
    the first one. int32."""

    accepted: torch.Tensor  # [slots]: how many nodes were
    path: torch.Tensor  # [slots, depth]: which ones


class TreeRows(NamedTuple):
    """What `features` need of a batch whose decoding sequences have trees: int32."""

    starts: torch.Tensor  # [works]: below 0 for those
    before: torch.Tensor  # [rows]: the row of the token before
    last: LastRows


class Candidates(NamedTuple):
    """Tokens of which some become nodes of draft trees: [sequences, candidates], all of them level by level."""

    tokens: torch.Tensor  # int32
    scores: torch.Tensor  # float32
    above: torch.Tensor  # int32: the candidate that each is behind; -1: none


class Columns(Protocol):
    """The parameters of every slot, see `ssd.sampling.sampler.SamplingColumns`."""

    packed: torch.Tensor  # int32 [slots, words]: words 0 and 1 are the seed's key, word 2 the temperature (float32)
    seed_key: torch.Tensor
    temperature: torch.Tensor
    log_min_p: torch.Tensor
    top_p: torch.Tensor
    top_k: torch.Tensor
    repetition: torch.Tensor
    presence: torch.Tensor
    frequency: torch.Tensor
    min_length: torch.Tensor
    flags: torch.Tensor
    bias: torch.Tensor | None
    counts: torch.Tensor | None
