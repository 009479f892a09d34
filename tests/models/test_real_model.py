"""A real model, end to end: SmolLM2-135M-Instruct from one GGUF file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from ssd import LLM, SamplingParams
from ssd.layers.formats.gguf import Blocks

pytestmark = pytest.mark.slow  # 135 million parameters on a CPU; test_gguf.py reads such files in the short run
QUESTIONS = [
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits.",
    "Why is the sky blue?",
]


@pytest.fixture(scope="module")
def llm(smollm2: str) -> Iterator[LLM]:
    """Rows of its products are not rounded to 8 bits, as transformers' are not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Blocks, "coarse", False)
        loaded = LLM(smollm2, device="cpu", dtype="float32", max_model_len=1024)
    with loaded as llm:
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
        assert out.token_ids == written(smollm2_reference, out.prompt_token_ids)


def written(reference: Any, prompt: list[int]) -> list[int]:
    """The 24 tokens that transformers writes after a prompt, without sampling."""
    ids = torch.tensor([prompt])
    found = reference.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=24,
        min_new_tokens=24,
        eos_token_id=None,
        pad_token_id=0,
    )
    return found[0, len(prompt) :].tolist()


def test_rounded_rows_change_log_probabilities_little(smollm2: str, smollm2_reference: Any) -> None:
    """As users have them. Of transformers' text: tokens of nearly the same probability may change places."""
    with LLM(smollm2, device="cpu", dtype="float32", max_model_len=1024) as llm:
        for question in QUESTIONS:
            compare_log_probabilities(llm, smollm2_reference, llm.encode(chat(question)))


def compare_log_probabilities(llm: LLM, reference: Any, prompt: list[int]) -> None:
    tokens = prompt + written(reference, prompt)
    with torch.no_grad():
        expected = reference(torch.tensor([tokens])).logits[0].log_softmax(-1)
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
