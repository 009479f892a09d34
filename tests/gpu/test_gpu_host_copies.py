"""What a GPU computes is read after it has arrived on the host, never before: every copy, made late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from conftest import TestModel, ragged_prompts
from eagle_heads import make_head
from fakes import wait_until_idle

from ssd import LLM, SamplingParams
from ssd.drafting.late import LateBindingDrafter
from ssd.execution.host_copy import HostCopy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CYCLES = 200_000_000  # of a clock of 2 GHz: 100 ms
PROMPTS = ragged_prompts(4, longest=60)
PARAMS = [
    SamplingParams(max_new_tokens=6, logprobs=2, ignore_eos=True),
    SamplingParams(max_new_tokens=6, temperature=1.0, seed=1, logprobs=3, ignore_eos=True),
    SamplingParams(max_new_tokens=6, prompt_logprobs=2, ignore_eos=True),
    SamplingParams(max_new_tokens=1, pooling="mean"),
]
WAYS: dict[str, dict[str, Any] | None] = {
    "ar": None,
    "sd": {"mode": "sd", "k": 2},
    "rejection": {"mode": "sd", "k": 2, "acceptance": "rejection"},
    "jit": {"mode": "ssd", "k": 2, "budget": 4, "backup": "jit"},
    "fast": {"mode": "ssd", "k": 2, "budget": 4, "backup": "fast"},
    "head": {"mode": "ssd", "draft": "head", "k": 2, "budget": 4, "backup": "jit"},
    "worker": {"mode": "ssd", "k": 2, "budget": 4, "draft_device": "cpu"},
}


@contextmanager
def late_copies() -> Iterator[list[torch.Size]]:
    """Every asynchronous copy to the host waits for 100 ms, and its memory holds something else until then."""
    copy, late = torch.Tensor.copy_, list[torch.Size]()

    def copy_late(self: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if non_blocking and source.is_cuda and not self.is_cuda:
            self.fill_(-7)
            torch.cuda._sleep(CYCLES)
            late.append(self.shape)
        return copy(self, source, non_blocking)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", copy_late)
        yield late


def test_a_copy_is_read_when_it_has_arrived() -> None:
    numbers = torch.arange(5, device="cuda"), torch.ones(2, device="cuda")
    with late_copies():
        found = HostCopy(*numbers)
    assert not found.arrived.reached
    first, second = found.wait()
    assert (first.tolist(), second.tolist()) == ([0, 1, 2, 3, 4], [1.0, 1.0])


@pytest.mark.parametrize("way", WAYS)
def test_answers_are_the_same_with_late_copies(make_model: Callable[[str], TestModel], way: str, tmp_path: Any) -> None:
    """Tokens, log-probabilities, those of prompts, embeddings; and look-ups and origins of drafts, which nobody sees
    unless they are read as numbers that cannot be."""
    target, speculation = make_model("llama3-scaled"), WAYS[way]
    if speculation is not None:
        head = speculation.get("draft") == "head"
        draft = make_head(target, tmp_path / "head").path if head else make_model("llama-tied").path
        speculation = speculation | {"draft": draft}
    options: dict[str, Any] = {"device": "cuda", "num_kv_blocks": 64, "max_num_seqs": 4, "speculation": speculation}
    with LLM(target.path, **options) as llm:
        expected = answers(llm)
        if way == "worker":
            assert isinstance(llm.engine.round.drafter, LateBindingDrafter)
            for each in llm.engine.round.drafter.replicas:
                each.supervisor.hang_limit = 60
        with late_copies() as late:
            assert answers(llm) == expected
        assert len(late) > 4
        assert llm.engine.metrics.drafter_failures == 0


def answers(llm: LLM) -> list[Any]:
    outputs = llm.generate(PROMPTS, PARAMS)
    wait_until_idle(llm.driver)
    assert [output.error for output in outputs] == [None] * len(outputs)
    return [(output.token_ids, output.logprobs, output.prompt_logprobs, output.embedding) for output in outputs]
