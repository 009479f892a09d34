"""Block drafts on a GPU, in graphs and with rounds in flight: drafts of a plain implementation, text of the target."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import make_block
from conftest import TestModel, ragged_prompts
from eagle_observers import Drafts
from fakes import wait_until_idle

from ssd import LLM, SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
PROMPTS = ragged_prompts(12, longest=100)
K = 5
SHARE = 0.98  # of the drafts: sums are taken in another order, so a close choice may be another one


@pytest.mark.parametrize(
    "kind",
    [
        {"layout": "dflash"},
        {"layout": "dflash", "second": True},
        {"layout": "deepspec", "markov": "vanilla"},
        {"layout": "speculators", "markov": "rnn"},
        {"layout": "dflash", "windows": (20, None), "causal": (True, False)},
        {"layout": "dflash", "windows": (20, 20), "changes": {"is_causal": False}},
    ],
)
def test_drafts_are_those_of_a_plain_implementation(
    make_model: Callable[[str], TestModel], tmp_path: Path, kind: dict[str, Any]
) -> None:
    """With half of the tokens accepted: catches KV or features of another position or sequence, and what is missing in
    a graph."""
    target = make_model("qwen3")
    block = make_block(target, tmp_path / "block", **kind)
    observer = Drafts(block, least=K)
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_num_seqs": 4, "num_kv_blocks": 512}
    options |= {"block_size": 16, "max_model_len": 200, "max_num_batched_tokens": 48}
    speculation = {"mode": "sd", "draft": block.path, "k": K}
    params = SamplingParams(max_new_tokens=30, ignore_eos=True, temperature=0.0)
    with LLM(target.path, speculation=speculation, **options) as llm, llm.driver.observing(observer):
        llm.driver.call(lambda engine: engine.round.target.pin([0.5] * K))  # type: ignore[attr-defined]
        llm.generate(PROMPTS, params)
        wait_until_idle(llm.driver)
        assert llm.engine.metrics.drafter_failures == 0
    assert len(observer.seen) > 50
    others = [pair for pair in observer.seen if pair[0] != pair[1]]
    assert len(others) <= (1 - SHARE) * len(observer.seen), others


@pytest.mark.parametrize("layout", ["dflash", "deepspec"])
def test_bfloat16_writes_what_plain_decoding_writes(
    make_model: Callable[[str], TestModel], tmp_path: Path, layout: Any
) -> None:
    target = make_model("qwen3")
    block = make_block(target, tmp_path / "block", layout, markov="gated" if layout == "deepspec" else "")
    prompts = [[*prompt, *prompt] for prompt in PROMPTS]  # the prefix cache finds their beginnings
    params = [SamplingParams(temperature=i % 2, seed=i, max_new_tokens=48, ignore_eos=True) for i in range(12)]
    found = []
    for speculation in (None, {"mode": "sd", "draft": block.path, "k": K}):
        with LLM(target.path, device="cuda", max_num_seqs=8, num_kv_blocks=512, speculation=speculation) as llm:
            found.append([output.token_ids for _ in range(2) for output in llm.generate(prompts, params)])
            assert llm.engine.metrics.drafter_failures == 0
    assert found[0] == found[1]
