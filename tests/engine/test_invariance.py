"""Nothing changes the text: not the batch, the prefix cache, the chunks, preemption or a crowded KV pool."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
import torch
from conftest import TestModel, mostly_slow, ragged_prompts
from fakes import wait_until_idle

from ssd import LLM, SamplingParams
from ssd.execution.threads import ThreadController

PROMPTS = ragged_prompts(20, longest=120)
SEEDED = SamplingParams(temperature=0.8, seed=11, max_new_tokens=16)
GREEDY = SamplingParams(max_new_tokens=16)


def answers(llm: LLM, batch: int = 32, params: SamplingParams | None = None) -> list[list[int]]:
    """All prompts, `batch` at a time; greedy and seeded ones mixed."""
    mixed = [GREEDY if i % 2 else SEEDED for i in range(len(PROMPTS))]
    out = []
    for start in range(0, len(PROMPTS), batch):
        part = slice(start, start + batch)
        out += llm.generate(PROMPTS[part], params or mixed[part])
    wait_until_idle(llm.driver)
    return [o.token_ids for o in out]


@pytest.fixture(scope="module")
def model(make_model: Callable[[str], TestModel]) -> str:
    return make_model("llama3-scaled").path


@pytest.fixture(scope="module")
def expected(model: str) -> Iterator[list[list[int]]]:
    """One at a time, no prefix cache, every prompt in one chunk."""
    with LLM(model, device="cpu", prefix_caching=False, max_num_seqs=1) as llm:
        yield answers(llm, batch=1)


@pytest.mark.parametrize("batch", [1, pytest.param(7, marks=pytest.mark.slow), 32])
def test_batch_size(model: str, expected: list[list[int]], batch: int) -> None:
    with LLM(model, device="cpu", max_num_seqs=batch) as llm:
        assert answers(llm, batch) == expected


def test_a_number_of_threads_that_changes_from_step_to_step(
    model: str, expected: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also catches an engine that does not ask for the number, or uses more threads than it may."""
    seen, source = [], random.Random(0)

    def count(_: ThreadController, limit: int, taken: int) -> int:
        seen.append(limit)
        return source.randint(1, limit)

    monkeypatch.setattr(ThreadController, "count", count)
    threads = torch.get_num_threads()
    torch.set_num_threads(4)
    try:
        with LLM(model, device="cpu") as llm:
            assert answers(llm, batch=8) == expected
    finally:
        torch.set_num_threads(threads)
    assert set(seen) == {4}
    assert len(seen) >= 40


def test_prefix_cache_cold_and_warm(model: str, expected: list[list[int]]) -> None:
    with LLM(model, device="cpu") as llm:
        assert answers(llm) == expected
        before = llm.engine.metrics.cached_prompt_tokens
        assert answers(llm) == expected
        assert llm.engine.metrics.cached_prompt_tokens > before + sum(map(len, PROMPTS)) // 2
        assert answers(llm, batch=1) == expected


@pytest.mark.parametrize(
    ("tokens", "seqs"),
    mostly_slow([(1, 1), (3, 2), (8, 8), (33, 32), (64, 5)], fast={(33, 32)}),
)
def test_any_chunk_size(model: str, expected: list[list[int]], tokens: int, seqs: int) -> None:
    with LLM(model, device="cpu", max_num_batched_tokens=tokens, max_num_seqs=seqs) as llm:
        assert answers(llm) == expected


@pytest.mark.parametrize("prefix_caching", [True, False])
def test_preemption_at_random_steps(model: str, expected: list[list[int]], prefix_caching: bool) -> None:
    source = random.Random(5)
    with LLM(model, device="cpu", max_num_seqs=9, prefix_caching=prefix_caching) as llm:
        scheduler, schedule = llm.engine.scheduler, llm.engine.scheduler.schedule

        def preempt_somebody() -> object:
            if scheduler.running and source.random() < 0.4:
                scheduler.preempt(source.choice(scheduler.running))
            return schedule()

        scheduler.schedule = preempt_somebody  # type: ignore[assignment, method-assign]
        assert answers(llm) == expected
        assert llm.engine.metrics.num_preemptions > 20
        assert llm.engine.metrics.output_tokens == sum(map(len, expected))


def test_pool_of_one_sequence(model: str, expected: list[list[int]]) -> None:
    """Blocks for the longest sequence and no more: sequences push each other out, and still nothing changes."""
    longest = max(map(len, PROMPTS)) + GREEDY.max_new_tokens
    blocks = -(-longest // 8)
    with LLM(model, device="cpu", block_size=8, num_kv_blocks=blocks, max_model_len=blocks * 8) as llm:
        assert answers(llm) == expected
        assert llm.engine.metrics.num_preemptions > 0


def test_plain_sampling_parameters_do_not_leak_between_requests(model: str, expected: list[list[int]]) -> None:
    """A neighbour with every switch thrown must not move anybody else's tokens."""
    wild = SamplingParams(
        temperature=1.3, top_k=7, top_p=0.8, min_p=0.02, repetition_penalty=1.3, presence_penalty=0.5,
        frequency_penalty=0.2, logit_bias={3: 5.0, 9: float("-inf")}, seed=1, min_tokens=4, logprobs=3, n=2,
        max_new_tokens=30,
    )  # fmt: skip
    with LLM(model, device="cpu", max_num_seqs=16) as llm:
        mixed = [GREEDY if i % 2 else SEEDED for i in range(len(PROMPTS))]
        prompts = [p for pair in zip(PROMPTS, PROMPTS, strict=True) for p in pair]
        params = [p for own in mixed for p in (own, wild)]
        out = llm.generate(prompts, params)
    assert [o.token_ids for o in out[::2]] == expected
    assert len({tuple(s.token_ids) for s in out[1].samples}) == 2
