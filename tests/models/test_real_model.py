"""A real model, end to end: SmolLM2-135M-Instruct from one GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ssd import LLM, SamplingParams

pytestmark = pytest.mark.slow  # 135 million parameters on a CPU; test_gguf.py reads such files in the short run
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
    "Why is the sky blue?",
]


@pytest.fixture(scope="module")
def llm(smollm2: str) -> Iterator[LLM]:
    with LLM(smollm2, device="cpu", dtype="float32", max_model_len=1024) as llm:
        yield llm


def chat(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


def test_answers_are_coherent(llm: LLM) -> None:
    """Catches what parity on random weights cannot: a wrong tokenizer, chat template, stop id or weight layout."""
    outs = llm.generate([chat(q) for q in QUESTIONS], SamplingParams(max_new_tokens=48))
    assert "Paris" in outs[0].text
    assert all(out.text.isprintable() or "\n" in out.text for out in outs)
    assert outs[0].finish_reason == "stop"  # <|im_end|>, not the length, ends a short answer
    streamed = "".join(llm.stream(chat(QUESTIONS[1]), SamplingParams(max_new_tokens=48)))
    assert streamed == outs[1].text


def test_greedy_tokens_equal_transformers(llm: LLM, smollm2_reference: Any) -> None:
    """The same file, loaded by transformers in float32, writes the same tokens."""
    outs = llm.generate([chat(q) for q in QUESTIONS[:2]], SamplingParams(max_new_tokens=24, ignore_eos=True))
    for out in outs:
        prompt = torch.tensor([out.prompt_token_ids])
        theirs = smollm2_reference.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
        )
        assert out.token_ids == theirs[0, prompt.shape[1] :].tolist()


def test_seeded_sampling_repeats_itself_and_logprobs_are_the_models(llm: LLM) -> None:
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=3, max_new_tokens=16, logprobs=5, n=2)
    first, again = (llm.generate(chat(QUESTIONS[2]), params)[0] for _ in range(2))
    assert [s.token_ids for s in first.samples] == [s.token_ids for s in again.samples]
    assert first.samples[0].token_ids != first.samples[1].token_ids
    assert first.logprobs is not None
    assert len(first.logprobs) == len(first.token_ids)
    for step, token in zip(first.logprobs, first.token_ids, strict=True):
        assert step.token_id == token
        assert len(step.top) == 5
        assert step.logprob <= max(step.top.values()) <= 0
