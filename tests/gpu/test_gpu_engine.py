"""The whole engine on a GPU, in bfloat16: the text depends on nothing but model, prompt, parameters and seed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import TestModel, ragged_prompts
from fakes import wait_until_idle

from ssd import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = ragged_prompts(32, longest=300)
PARAMS = [
    SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_new_tokens=48, ignore_eos=True) for i in range(32)
]


@pytest.fixture(scope="module", params=["llama3-scaled", "qwen3"])
def model(request: pytest.FixtureRequest, make_model: Callable[[str], TestModel]) -> str:
    return make_model(request.param).path


def answers(model: str, batch: int, **options: Any) -> list[list[int]]:
    with LLM(model, device="cuda", num_kv_blocks=2048, **options) as llm:
        out = []
        for start in range(0, len(PROMPTS), batch):
            out += llm.generate(PROMPTS[start : start + batch], PARAMS[start : start + batch])
        wait_until_idle(llm.driver)
    return [o.token_ids for o in out]


@pytest.fixture(scope="module")
def expected(model: str) -> list[list[int]]:
    return answers(model, 1, prefix_caching=False, max_num_seqs=1)


@pytest.mark.parametrize(
    ("batch", "options"),
    [
        (4, {}),
        (16, {"max_num_seqs": 16}),
        (32, {"max_num_seqs": 32}),
        (16, {"eager": True}),
        (32, {"max_num_seqs": 16, "max_num_batched_tokens": 40}),
        (32, {"max_num_seqs": 7, "max_num_batched_tokens": 333, "block_size": 32}),
    ],
    ids=str,
)
def test_nothing_changes_the_text(model: str, expected: list[list[int]], batch: int, options: dict[str, Any]) -> None:
    """Batch sizes, graphs, chunks, block sizes and a warm prefix cache: the same bits, so the same tokens."""
    assert answers(model, batch, **options) == expected


def test_preemption_changes_nothing_either(
    model: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Generated tokens are recomputed as a prefill and come out the same: prefill and decode agree bit for bit."""
    from ssd.engine.scheduler import Scheduler

    source, schedule = random.Random(3), Scheduler.schedule

    def preempt_somebody(self: Scheduler) -> Any:
        if self.running and source.random() < 0.3:
            self.preempt(source.choice(self.running))
        return schedule(self)

    monkeypatch.setattr(Scheduler, "schedule", preempt_somebody)
    assert answers(model, 32, max_num_seqs=12, prefix_caching=False) == expected


def test_float32_on_the_gpu_equals_transformers(make_model: Callable[[str], TestModel]) -> None:
    test_model = make_model("qwen3")
    prompts, params = PROMPTS[:8], SamplingParams(max_new_tokens=32, ignore_eos=True)
    with LLM(test_model.path, device="cuda", dtype="float32", num_kv_blocks=512) as llm:
        ours = [out.token_ids for out in llm.generate(prompts, params)]
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 32, "min_new_tokens": 32}
        theirs = test_model.reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert tokens == theirs[0, len(prompt) :].tolist()


def test_close_frees_the_memory(make_model: Callable[[str], TestModel]) -> None:
    path = make_model("qwen3").path
    before = torch.cuda.memory_allocated()
    with LLM(path, device="cuda", num_kv_blocks=2048) as llm:
        llm.generate(PROMPTS[0], PARAMS[0])
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
