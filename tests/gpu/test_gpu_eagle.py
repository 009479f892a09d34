"""Heads on a GPU, in graphs and with rounds in flight: drafts of a plain implementation, text of the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TestModel, ragged_prompts
from eagle_heads import make_head
from eagle_observers import FEW, Branches, Drafts
from fakes import wait_until_idle
from mtp_heads import make_mtp

from ssd import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = ragged_prompts(12, longest=100)
PARAMS = SamplingParams(max_new_tokens=40, ignore_eos=True, logit_bias=dict.fromkeys(FEW, 100.0))
SHARE = 0.98  # of the drafts: sums are taken in another order, so a close choice may be another one


@pytest.mark.parametrize("kind", ["eagle", "mtp"])
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_drafts_are_those_of_a_plain_implementation(
    make_model: Callable[[str], TestModel], tmp_path: Path, mode: str, kind: str
) -> None:
    """Catches KV or features of another position or sequence, and what is missing in a graph."""
    target = make_model("llama-tied")
    head = make_head(target, tmp_path / "head") if kind == "eagle" else make_mtp(target, tmp_path / "head", "nextn")
    observer = Drafts(head) if mode == "sd" else Branches(head, enough=150)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "num_kv_blocks": 512}
    options |= {"block_size": 16, "max_model_len": 200, "max_num_batched_tokens": 48}
    with LLM(target.path, **options) as llm:
        expected = [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]
    speculation = {"mode": mode, "draft": head.path, "k": 3} | ({"budget": 6, "backup": "jit"} if mode == "ssd" else {})
    with LLM(target.path, speculation=speculation, **options) as llm, llm.driver.observing(observer):
        outputs = llm.generate(PROMPTS, PARAMS)
        wait_until_idle(llm.driver)
        assert llm.engine.metrics.drafter_failures == 0
    assert [output.token_ids for output in outputs] == expected
    assert sum(output.metrics.accepted for output in outputs) > 0
    assert len(observer.seen) > 100
    assert sum(draft == wanted for draft, wanted in observer.seen) >= SHARE * len(observer.seen)


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_bfloat16_writes_what_plain_decoding_writes(
    make_model: Callable[[str], TestModel], tmp_path: Path, mode: str
) -> None:
    """With heads of 64 dimensions and blocks of 64 tokens, as published models have: other kernels."""
    target = make_model("qwen3")
    head = make_head(target, tmp_path / "head", head_dim=64)
    prompts = [[*prompt, *prompt] for prompt in PROMPTS]  # the prefix cache finds their beginnings
    params = [SamplingParams(temperature=i % 2, seed=i, max_new_tokens=48, ignore_eos=True) for i in range(12)]
    found = []
    for speculation in (None, {"mode": mode, "draft": head.path, "k": 4}):
        with LLM(target.path, device="cuda", max_num_seqs=8, num_kv_blocks=512, speculation=speculation) as llm:
            found.append([output.token_ids for _ in range(2) for output in llm.generate(prompts, params)])
            assert llm.engine.metrics.drafter_failures == 0
    assert found[0] == found[1]
