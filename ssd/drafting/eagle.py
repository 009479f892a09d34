"""Speculative decoding (SD) with an EAGLE head: `EagleDrafter`.

The target's forward passes leave the head's KV of all tokens that they compute (`ssd.execution.features`). So a draft
begins with the last decided token and the feature before it; from then on the head reads its own hidden states.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import torch

from ssd.core import Outcome, Proposal, Work
from ssd.decoding.drafter import Drafter
from ssd.drafting.model import Runs, proposals_of, wants_draft
from ssd.drafting.runner import DraftRunner, RunShape
from ssd.execution.features import Features
from ssd.execution.runner import ModelRunner


class EagleRunner(DraftRunner):
    """Runs of a head. It reads one token of each sequence: the others have KV."""

    def __init__(self, runner: ModelRunner, features: Features, **options: Any) -> None:
        super().__init__(runner, reads=1, **options)
        self.features = features
        head = features.head
        shape = (self.max_rows, head.config.hidden_size)
        head.hidden = torch.zeros(shape, dtype=head.dtype, device=self.device)

    def _read(self, shape: RunShape, logit_rows: torch.Tensor | None) -> torch.Tensor:
        n, inputs = shape.sequences, self._inputs[False]
        self.features.head.hidden[:n].copy_(self.features.before(inputs.slots(n), inputs.first[:n]))
        return super()._read(shape, logit_rows)


class EagleDrafter(Drafter):
    """The head writes in `propose`, while the target waits."""

    def __init__(self, runner: EagleRunner, lookahead: int) -> None:
        super().__init__()
        self.runner = runner
        self.lookahead = lookahead
        self._runs = Runs()

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        able = [work for work in works if wants_draft(work) and work.decodes]  # else the feature is still to come
        if not able:
            return super().propose(works)
        self.runner.runner.tables.update([(work.slot, work.sequence.kv.blocks) for work in able])
        count = max(work.lookahead for work in able)
        run = self.runner.write([w.slot for w in able], [w.sequence.params for w in able], count, reads=1)
        self._runs.add(run)
        proposals = dict(zip(map(id, able), proposals_of(self.runner, able, run), strict=True))
        return [proposals.get(id(work), Proposal()) for work in works]

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self.stats.busy_seconds += self._runs.ended_seconds()
