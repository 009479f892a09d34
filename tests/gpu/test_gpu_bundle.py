"""Grafts at full size on a GPU, in bfloat16: the tiny model's text, and the same text with speculation on."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from fakes import wait_until_idle

from ssd import LLM, SamplingParams
from ssd.prompts import OWN_SETS, load_prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.gpu_memory(30),
]


def prompts(count: int) -> list[Any]:
    """The four sets in turn."""
    sets = [load_prompts(name).asked() for name in OWN_SETS]
    return [prompt for group in zip(*sets, strict=True) for prompt in group][:count]


def write(model: str, count: int, params: SamplingParams | list[SamplingParams], **options: Any) -> list[list[int]]:
    with LLM(model, device="cuda", max_model_len=2048, max_num_seqs=16, **options) as llm:
        outputs = llm.generate(prompts(count), params)
        wait_until_idle(llm.driver)
        assert llm.engine.metrics.drafter_failures == 0
    return [output.token_ids for output in outputs]


def test_a_graft_writes_the_tiny_models_text() -> None:
    """Sums of squares are taken in another order at another width, so a rounding may flip now and then."""
    greedy = SamplingParams(max_new_tokens=64, ignore_eos=True)
    expected = write("tiny-llama", 50, greedy)
    began = time.perf_counter()
    with LLM("graft:tiny-llama@llama-3.1-8b", device="cuda", max_model_len=2048, max_num_seqs=16) as llm:
        assert time.perf_counter() - began < 60
        got = [output.token_ids for output in llm.generate(prompts(50), greedy)]
    assert sum(a == b for a, b in zip(got, expected, strict=True)) >= 45


WAYS: list[dict[str, Any]] = [
    {"mode": "sd", "k": 2},
    {"mode": "sd", "k": 7},
    {"mode": "ssd", "k": 4, "backup": "jit"},
    {"mode": "ssd", "k": 7, "backup": "fast", "budget": 24},
    {"mode": "ssd", "k": "auto", "budget": "auto"},
]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8"])
def test_speculation_changes_no_token_of_an_8b(kv_cache_dtype: str) -> None:
    """64 prompts of 128 tokens, greedy and sampled: what row-invariant kernels are for. Some requests cut or adjust
    their laws."""
    plain: dict[str, Any] = {"max_new_tokens": 128, "ignore_eos": True}
    extras: list[dict[str, Any]] = [{}, {}, {"top_p": 0.9, "top_k": 50}, {"presence_penalty": 0.5}, {"min_p": 0.05}, {}]
    params = [SamplingParams(**plain, temperature=float(i % 7 % 2), seed=i, **extras[i % 6]) for i in range(64)]
    target, draft = "graft:tiny-llama@llama-3.1-8b", "graft:tiny-llama-draft@llama-3.2-1b"
    expected = write(target, 64, params, kv_cache_dtype=kv_cache_dtype)
    for way in WAYS:
        options = {"speculation": {"draft": draft, **way}, "kv_cache_dtype": kv_cache_dtype}
        assert write(target, 64, params, **options) == expected, way
