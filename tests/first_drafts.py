"""The first draft that an engine writes after some tokens, and what its draft computes meanwhile."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch

from ssd import LLM, SamplingParams
from ssd.models.head import Head


class Step(NamedTuple):
    """One row of a head's step."""

    logits: torch.Tensor
    state: torch.Tensor


def write_draft(llm: LLM, tokens: Seq[int], count: int) -> list[int]:
    """The greedy draft after some tokens, which one forward pass of the target has read."""
    drafter: Any = llm.engine.round.drafter
    runner = drafter.model.runner
    llm.engine.round.target.runner.logits_of(tokens[:-1], 1)  # type: ignore[attr-defined]
    runner.state.append(0, len(tokens) - 1, tokens[-1:], 0)
    runner.write([0], [SamplingParams(temperature=0.0)], count, 1)
    found: list[int] = runner.state.drafts[0].tolist()
    return found


@contextmanager
def steps_of_heads(patch: pytest.MonkeyPatch) -> Iterator[list[Step]]:
    """The first row of every step that heads compute meanwhile."""
    seen: list[Step] = []
    call = Head.__call__

    def spy(self: Head, *args: Any) -> torch.Tensor:
        found = call(self, *args)
        seen.append(Step(found[0].clone(), self.hidden[0].clone()))
        return found

    with patch.context() as context:
        context.setattr(Head, "__call__", spy)
        yield seen
