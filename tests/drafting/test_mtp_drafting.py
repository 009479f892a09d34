"""SD and SSD with an MTP head write what plain decoding writes; its drafts are those of a plain implementation.

What heads have in common is tested with EAGLE heads (`test_eagle_drafting.py`). Here is what an MTP head has of its
own: the feature (the last hidden states), the states that it goes on from, and layers of all families.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import TestModel, mostly_slow, ragged_prompts
from eagle_observers import FEW, Branches, Drafts
from fakes import wait_until_idle
from mtp_heads import make_mtp

from ssd import LLM, SamplingParams

PROMPTS = ragged_prompts(6, longest=40)
SIZES: dict[str, Any] = {"device": "cpu", "max_num_seqs": 6, "block_size": 4, "num_kv_blocks": 26, "max_model_len": 72}
SIZES |= {"max_num_batched_tokens": 16}
KINDS = ["qwen3", "llama-tied", "qwen3-moe", "gpt-oss", "qwen3-windows"]


def params(temperature: float) -> list[SamplingParams]:
    """Within a few tokens or not: drafts of a random head are accepted, too."""
    return [
        SamplingParams(
            temperature=temperature,
            seed=i,
            logit_bias=dict.fromkeys(FEW, 100.0) if i % 2 else {},
            max_new_tokens=16 - i,
            ignore_eos=True,
        )
        for i in range(len(PROMPTS))
    ]


def texts(llm: LLM, temperature: float) -> list[tuple[int, ...]]:
    """Twice: the second time, prompts are in the prefix cache."""
    found = [tuple(out.token_ids) for _ in range(2) for out in llm.generate(PROMPTS, params(temperature))]
    wait_until_idle(llm.driver)
    assert llm.engine.metrics.drafter_failures == 0
    llm.engine.check()
    return found


@pytest.mark.parametrize("kind", mostly_slow(KINDS, fast=["qwen3"]))
@pytest.mark.parametrize("mode", mostly_slow(["sd", "ssd"], fast={"ssd"}))
def test_texts_are_those_of_plain_decoding_and_drafts_those_of_a_plain_implementation(
    make_model: Callable[[str], TestModel], tmp_path: Path, kind: str, mode: str
) -> None:
    """Batches with chunks of prompts, preemption and prefix hits: every greedy draft, and every branch in SSD, is right
    only if all KV and hidden states that it begins from are."""
    head = make_mtp(make_model(kind), tmp_path / "head")
    sizes = SIZES | {"num_kv_blocks": SIZES["num_kv_blocks"] * (2 if kind in ("gpt-oss", "qwen3-windows") else 1)}
    with LLM(head.model, **sizes | {"max_num_seqs": 1, "prefix_caching": False}) as llm:
        expected = [texts(llm, temperature) for temperature in (0.0, 1.0)]
    observer = Drafts(head) if mode == "sd" else Branches(head)
    speculation = {"mode": mode, "draft": "mtp", "k": 3} | ({"budget": 8, "backup": "jit"} if mode == "ssd" else {})
    with LLM(head.model, **sizes, speculation=speculation) as llm:
        with llm.driver.observing(observer):
            assert texts(llm, 0.0) == expected[0]
        assert texts(llm, 1.0) == expected[1]
        counts = llm.engine.metrics
        assert 0 < counts.spec_decode_num_accepted_tokens < counts.spec_decode_num_draft_tokens
        assert counts.num_preemptions > 0
        assert counts.cached_prompt_tokens > 0
        assert mode == "sd" or sum(counts.ssd_hits_after) > 0
    assert len(observer.seen) > 50
    assert [draft for draft, _ in observer.seen] == [wanted for _, wanted in observer.seen]


@pytest.mark.parametrize(
    "speculation",
    [
        {"mode": "auto", "k": "auto", "placement": "inline"},
        pytest.param({"mode": "ssd", "k": 4, "acceptance": "rejection"}, marks=pytest.mark.slow),
        pytest.param({"mode": "sd", "k": 4, "draft_quantization": "int8"}, marks=pytest.mark.slow),
    ],
    ids=lambda value: value["mode"],
)
def test_other_options_change_no_greedy_text(
    make_model: Callable[[str], TestModel], tmp_path: Path, speculation: dict[str, Any]
) -> None:
    """The mode and K left to the engine, the other rule, a head in 8 bits; in a directory of its own."""
    head = make_mtp(make_model("qwen3"), tmp_path / "head", "nextn")
    with LLM(head.model, **SIZES) as llm:
        expected = texts(llm, 0.0)
    with LLM(head.model, **SIZES, speculation=speculation | {"draft": head.path}) as llm:
        assert texts(llm, 0.0) == expected
        assert llm.engine.metrics.spec_decode_num_draft_tokens > 0
