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


def test_answers_are_coherent(smollm2: str) -> None:
    """Catches what parity on random weights cannot: a wrong tokenizer, chat template, stop id or weight layout."""
    with LLM(smollm2, device="cpu", dtype="bfloat16", max_model_len=1024) as llm:
        outs = llm.generate([chat(q) for q in QUESTIONS], SamplingParams(max_new_tokens=48))
        streamed = "".join(llm.stream(chat(QUESTIONS[1]), SamplingParams(max_new_tokens=48)))
    assert "Paris" in outs[0].text
    assert all(out.text.isprintable() or "\n" in out.text for out in outs)
    assert outs[0].finish_reason == "stop"  # <|im_end|>, not the length, ends a short answer
    assert streamed == outs[1].text


def test_log_probabilities_are_those_of_transformers(llm: LLM, smollm2_reference: Any) -> None:
    """Of the text that the same file, loaded by transformers in float32, writes. Rows of GGUF products are rounded to 8
    bits, which may swap two tokens of nearly the same probability: so texts are not compared."""
    for question in QUESTIONS:
        prompt = llm.encode(chat(question))
        text = smollm2_reference.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            do_sample=False,
            max_new_tokens=24,
            min_new_tokens=24,
            eos_token_id=None,
            pad_token_id=0,
        )
        with torch.no_grad():
            expected = smollm2_reference(text).logits[0].log_softmax(-1)
        tokens = text[0].tolist()
        params = SamplingParams(max_new_tokens=1, prompt_logprobs=1)
        found = llm.generate([tokens], params)[0].prompt_logprobs
        assert found is not None
        pairs = [(found[i], expected[i - 1]) for i in range(len(prompt), len(tokens))]
        errors = torch.tensor([abs(own.logprob - float(theirs[own.token_id])) for own, theirs in pairs if own])
        assert len(errors) == 24
        assert errors.mean() < 0.1
        assert errors.max() < 0.7
        best = [max(own.top, key=own.top.__getitem__) for own, _ in pairs if own]
        assert all(theirs.max() - theirs[token] < 0.4 for token, (_, theirs) in zip(best, pairs, strict=True))


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
