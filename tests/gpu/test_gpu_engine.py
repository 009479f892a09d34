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
from ssd.engine.engine import Engine
from ssd.llm import embedding_of

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

PROMPTS = ragged_prompts(32, longest=300)
PARAMS = [
    SamplingParams(temperature=0.8 if i % 2 else 0.0, seed=i, max_new_tokens=48, ignore_eos=True) for i in range(32)
]


@pytest.fixture(
    scope="module",
    params=[
        *((kind, "auto") for kind in ("llama3-scaled", "qwen3", "mistral-windows", "qwen3-windows")),
        *((kind, "fp8") for kind in ("llama3-scaled", "qwen3", "qwen3-windows")),
    ],
    ids="-".join,
)
def model(request: pytest.FixtureRequest, make_model: Callable[[str], TestModel]) -> dict[str, str]:
    """The options that the text may depend on."""
    kind, kv_cache_dtype = request.param
    return {"model": make_model(kind).path, "kv_cache_dtype": kv_cache_dtype}


def answers(model: dict[str, str], batch: int, **options: Any) -> list[list[int]]:
    with LLM(**model, device="cuda", num_kv_blocks=2048, **options) as llm:
        out = []
        for start in range(0, len(PROMPTS), batch):
            out += llm.generate(PROMPTS[start : start + batch], PARAMS[start : start + batch])
        wait_until_idle(llm.driver)
    return [o.token_ids for o in out]


@pytest.fixture(scope="module")
def expected(model: dict[str, str]) -> list[list[int]]:
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
def test_nothing_changes_the_text(
    model: dict[str, str], expected: list[list[int]], batch: int, options: dict[str, Any]
) -> None:
    """Batch sizes, graphs, chunks, block sizes and a warm prefix cache: the same bits, so the same tokens."""
    assert answers(model, batch, **options) == expected


def test_preemption_changes_nothing_either(model: dict[str, str], expected: list[list[int]]) -> None:
    """Generated tokens are recomputed as a prefill and come out the same: prefill and decode agree bit for bit."""
    source = random.Random(3)

    def preempt_one(engine: Engine) -> bool:
        engine.flush()  # nothing may be in flight
        if engine.scheduler.running and source.random() < 0.3:
            engine.scheduler.preempt(source.choice(engine.scheduler.running))
        return engine.has_work

    with LLM(**model, device="cuda", num_kv_blocks=2048, max_num_seqs=12, prefix_caching=False) as llm:
        submissions = llm.driver.submit_many(list(zip(PROMPTS, PARAMS, strict=True)))
        while llm.driver.call(preempt_one):
            pass
        assert [submission.result().token_ids for submission in submissions] == expected
        assert llm.engine.metrics.num_preemptions > 10
        wait_until_idle(llm.driver)


WAYS: list[dict[str, Any]] = [
    {},
    {"mode": "sd", "k": 3},
    {"mode": "ssd", "k": 4, "backup": "fast"},
    {"mode": "ssd", "k": 3, "backup": "jit", "budget": 8},
    {"mode": "ssd", "k": "auto", "budget": "auto"},
]
EXTRAS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9, "top_k": 50},
    {"presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"min_p": 0.05, "min_tokens": 8, "stop_token_ids": [3, 5, 7, 11]},
    {"logit_bias": {5: 2.0}, "stop_token_ids": list(range(0, 320, 16))},
    {"logprobs": 2},
]


@pytest.mark.parametrize(
    ("target", "draft", "kv_cache_dtype"),
    [
        ("llama3-scaled", "llama-tied", "auto"),
        ("qwen3-windows", "mistral-windows", "auto"),
        ("qwen3", "llama-tied", "fp8"),
    ],
)
def test_rounds_in_flight_change_nothing(
    make_model: Callable[[str], TestModel], target: str, draft: str, kv_cache_dtype: str
) -> None:
    """Requests stop, join and are dropped while the next round is under way, under AR, SD and SSD alike."""
    path, draft = make_model(target).path, make_model(draft).path
    params = [
        SamplingParams(temperature=0.9 * (i % 2), seed=i, max_new_tokens=8 + 5 * (i % 9), **EXTRAS[i % len(EXTRAS)])
        for i in range(len(PROMPTS))
    ]
    texts = []
    for way in WAYS:
        source = random.Random(5)
        options: dict[str, Any] = {"speculation": {"draft": draft, **way}} if way else {}
        options["kv_cache_dtype"] = kv_cache_dtype
        with LLM(path, device="cuda", num_kv_blocks=140, max_num_seqs=9, **options) as llm:
            assert not llm.engine.round.synchronous
            submissions = []
            for prompt, each in zip(PROMPTS, params, strict=True):
                submissions.append(llm.driver.submit(prompt, each))
                if source.random() < 0.4:  # another one, which is dropped after some tokens
                    for _ in zip(range(source.randint(1, 5)), llm.stream_deltas(prompt, each), strict=False):
                        pass
            texts.append([submission.result().token_ids for submission in submissions])
            wait_until_idle(llm.driver)
            assert llm.engine.metrics.drafter_failures == 0
    for way, found in zip(WAYS, texts, strict=True):
        assert found == texts[0], way


@pytest.mark.parametrize("kind", ["qwen3", "qwen3-windows"])
def test_float32_on_the_gpu_equals_transformers(make_model: Callable[[str], TestModel], kind: str) -> None:
    test_model = make_model(kind)
    prompts, params = PROMPTS[:8], SamplingParams(max_new_tokens=32, ignore_eos=True)
    with LLM(test_model.path, device="cuda", dtype="float32", num_kv_blocks=512) as llm:
        ours = [out.token_ids for out in llm.generate(prompts, params)]
    for prompt, tokens in zip(prompts, ours, strict=True):
        ids = torch.tensor([prompt])
        options = {"do_sample": False, "max_new_tokens": 32, "min_new_tokens": 32}
        theirs = test_model.reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        assert tokens == theirs[0, len(prompt) :].tolist()


def test_prompts_are_read_alike_in_every_mode_and_chunk(make_model: Callable[[str], TestModel]) -> None:
    """Log-probabilities and embeddings of prompts, beside requests that are decoded with a logits processor."""

    def odd_only(tokens: list[int], logits: Any) -> Any:
        logits[::2] = -torch.inf
        return logits

    path, draft = make_model("llama3-scaled").path, make_model("llama-tied").path
    params = [SamplingParams(prompt_logprobs=2, max_new_tokens=8, ignore_eos=True)] * 4
    params += [SamplingParams(logits_processor=odd_only, temperature=0.5, seed=1, max_new_tokens=24)] * 4
    chunks: dict[str, Any] = {"max_num_batched_tokens": 40}
    found = []
    for options in ({}, chunks, chunks | {"speculation": {"draft": draft, "mode": "ssd", "k": 3}}):
        with LLM(path, device="cuda", num_kv_blocks=2048, max_num_seqs=8, **options) as llm:
            outputs = llm.generate(PROMPTS[:8], params)
            embedded = [embedding_of(output) for output in llm.generate(PROMPTS[:4], SamplingParams(pooling="last"))]
        assert all(token % 2 for output in outputs[4:] for token in output.token_ids)
        found.append(([(output.token_ids, output.prompt_logprobs) for output in outputs], embedded))
    assert found[0][0][0][1][1] is not None
    assert found[1] == found[0]
    assert found[2] == found[0]


def test_close_frees_the_memory(make_model: Callable[[str], TestModel]) -> None:
    path = make_model("qwen3").path
    before = torch.cuda.memory_allocated()
    with LLM(path, device="cuda", num_kv_blocks=2048) as llm:
        llm.generate(PROMPTS[0], PARAMS[0])
        assert torch.cuda.memory_allocated() > before
    assert torch.cuda.memory_allocated() <= before + (1 << 20)
