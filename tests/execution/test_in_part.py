"""Which graph of a forward pass is replayed: that of the whole GPU, or that of the target's part of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fakes import TableModel, make_runner

from ssd.execution.graphs import BatchGraph
from ssd.execution.runner import Staged
from ssd.execution.state import SequenceState


class Graph:
    def __init__(self) -> None:
        self.replays = 0

    def replay(self) -> None:
        self.replays += 1


@pytest.mark.parametrize("has_part", [False, True])
def test_a_forward_pass_in_a_part_is_another_graph_with_the_same_logits(has_part: bool) -> None:
    """Batches that were not captured in the part run on the whole GPU."""
    state = SequenceState(1, max_len=64, lookahead=3, vocab_size=32, device=torch.device("cpu"))
    runner, logits, inputs = make_runner(TableModel(32, seed=0), state), torch.zeros(1, 32), object()
    whole, part = Graph(), Graph()
    captured: Any = BatchGraph(inputs, whole, logits, part if has_part else None)  # type: ignore[arg-type]
    staged: Any = Staged(inputs, (0, 1), captured)  # type: ignore[arg-type]
    assert runner.run(staged).logits is logits
    assert (whole.replays, part.replays) == (1, 0)
    assert runner.run(staged, in_part=True).logits is logits
    assert (whole.replays, part.replays) == ((1, 1) if has_part else (2, 0))
