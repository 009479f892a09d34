"""Suffix look-up on a GPU: the device waits for what the host looks up while the next round is launched."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import TestModel

from ssd import LLM, SamplingParams
from ssd.core import Outcome, Work
from ssd.drafting.suffix import SuffixDrafter

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
FEW = 4  # tokens of texts that repeat
FORBIDDEN = dict.fromkeys(range(FEW, 320), float("-inf"))
PARAMS = SamplingParams(max_new_tokens=80, ignore_eos=True, logit_bias=FORBIDDEN)
PROMPTS = [[1, 2, 3, 0, 1, 2, 3, i % FEW] for i in range(6)]


def answers(path: str, speculation: dict[str, Any] | None, params: SamplingParams = PARAMS) -> tuple[Any, Any]:
    """The texts, and their metrics."""
    with LLM(path, device="cuda", max_model_len=128, max_num_seqs=4, speculation=speculation) as llm:
        outputs = llm.generate(PROMPTS, params)
        if speculation is not None:
            assert not llm.engine.round.synchronous
            assert llm.engine.round.stats.drafter_failures == 0
        return [output.token_ids for output in outputs], [output.metrics for output in outputs]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("beside", [False, True])
def test_drafts_are_accepted_in_flight(
    make_model: Callable[[str], TestModel], temperature: float, beside: bool
) -> None:
    """Catches another text, and answers that the device does not see: then next to nothing would be accepted.

    As many rounds, nearly, as if each waited for the one before it.
    """
    path = make_model("llama-tied").path
    params = replace(PARAMS, temperature=temperature, seed=1)
    speculation = {"draft": "suffix", "k": 8} | ({"draft": path, "suffix": True} if beside else {})
    expected, _ = answers(path, None, params)
    texts, metrics = answers(path, speculation, params)
    assert texts == expected
    with LLM(path, device="cuda", max_model_len=128, max_num_seqs=4, speculation=speculation) as llm:
        llm.driver.call(lambda engine: setattr(engine.round, "run_ahead", False))
        waiting = llm.generate(PROMPTS, params)
    assert [output.token_ids for output in waiting] == expected
    if not beside:  # a round in flight is launched for an outcome that is not known: its first one has no draft
        rounds = sum(output.metrics.rounds for output in waiting)
        assert sum(each.rounds for each in metrics) < 1.2 * rounds + 6
        assert rounds < 0.8 * 80 * len(PROMPTS)


def test_a_host_that_does_not_answer_costs_no_text(
    make_model: Callable[[str], TestModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a GPU that waits without an end, and drafts of an earlier round that pass for this one's."""
    path, decided, count = make_model("llama-tied").path, SuffixDrafter.decided, 0

    def sometimes(self: SuffixDrafter, works: Seq[Work], outcomes: Seq[Outcome | None]) -> None:
        nonlocal count
        count += 1
        if count % 3 == 1:
            time.sleep(0.02)  # after the device has stopped waiting
        if count % 3:
            decided(self, works, outcomes)

    expected, _ = answers(path, None)
    monkeypatch.setattr(SuffixDrafter, "decided", sometimes)
    texts, _ = answers(path, {"draft": "suffix", "k": 8})
    assert texts == expected
    assert count > 10
