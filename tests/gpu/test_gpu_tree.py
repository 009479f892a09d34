"""Draft trees on a GPU, in graphs and with rounds in flight: the text of plain decoding, to the token."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import make_block
from conftest import TestModel, ragged_prompts
from eagle_heads import make_head
from eagle_observers import FEW
from fakes import wait_until_idle

from ssd import LLM, SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
PROMPTS = ragged_prompts(12, longest=100)


def mixed(count: int) -> list[SamplingParams]:
    """Limited to a few tokens or not, so that random drafts are accepted, too; greedy and sampled; what counts tokens
    before; log-probabilities."""
    return [
        SamplingParams(
            temperature=(0.0, 1.0, 0.7)[i % 3],
            seed=i,
            logit_bias=dict.fromkeys(FEW, 100.0) if i % 2 else {},
            frequency_penalty=(0.0, 0.3)[i % 4 == 1],
            logprobs=(None, 2)[i % 5 == 0],
            max_new_tokens=48 - i,
            ignore_eos=True,
        )
        for i in range(count)
    ]


def answers(llm: LLM, prompts: list[list[int]], params: list[SamplingParams]) -> list[Any]:
    outputs = [
        output for _ in range(2) for output in llm.generate(prompts, params)
    ]  # the prefix cache finds all of them
    wait_until_idle(llm.driver)
    assert llm.engine.metrics.drafter_failures == 0
    return [(output.token_ids, output.samples[0].logprobs) for output in outputs]


@pytest.mark.parametrize("draft", ["model", "head", "dflash", "gated"])
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("qwen3", {}),
        ("llama-tied", {"dtype": "float32"}),
        ("qwen3", {"kv_cache_dtype": "fp8"}),
        ("qwen3", {"eager": True, "max_num_batched_tokens": 48}),
        ("qwen3", {"max_num_seqs": 1}),
    ],
    ids=["bfloat16", "float32", "fp8", "eager", "one"],
)
def test_trees_write_what_plain_decoding_writes(
    make_model: Callable[[str], TestModel], tmp_path: Path, draft: str, kind: str, options: dict[str, Any]
) -> None:
    """Catches bits of a node that are not those of a chain, KV that is not moved in time, and shapes without graphs;
    with tree="auto" also rounds of chains and of trees in turns."""
    target = make_model(kind)
    if draft == "model":
        path = make_model("qwen2").path
    elif draft == "head":
        path = make_head(target, tmp_path / "head", head_dim=64).path
    else:
        more: Any = {"layout": "deepspec", "markov": "gated"} if draft == "gated" else {}
        path = make_block(target, tmp_path / "block", **more).path
    prompts, params = [[*prompt, *prompt] for prompt in PROMPTS], mixed(len(PROMPTS))
    options = {"device": "cuda", "max_num_seqs": 8, "num_kv_blocks": 512} | options
    with LLM(target.path, **options) as llm:
        expected = answers(llm, prompts, params)
    ahead = [("ssd", 6), ("ssd", 20)] if draft == "model" else []
    for mode, tree in [("sd", 6), ("sd", 20), ("sd", "auto"), *ahead]:  # more rows than a few, too
        speculation = {"mode": mode, "draft": path, "k": 4, "tree": tree}
        with LLM(target.path, speculation=speculation, **options) as llm:
            assert answers(llm, prompts, params) == expected
            assert llm.engine.metrics.spec_decode_num_accepted_tokens > 0


def test_long_contexts_have_the_bits_of_chains() -> None:
    """Across pieces of attention: trees at contexts around 512 and beyond 1,024 of a trained model and head."""
    params = [SamplingParams(temperature=i % 2, seed=i, max_new_tokens=40, ignore_eos=True) for i in range(6)]
    text = [(7 * i * i + 3 * i) % 4000 + 10 for i in range(1100)]
    prompts = [text[i : i + length] for i, length in enumerate((470, 495, 505, 511, 900, 1010))]
    found = []
    trees = {"mode": "sd", "draft": "tiny-llama-eagle", "k": 5, "tree": 24}
    for speculation in (None, trees, trees | {"mode": "ssd", "draft": "tiny-llama-draft"}):
        with LLM("tiny-llama", device="cuda", max_num_seqs=8, num_kv_blocks=512, speculation=speculation) as llm:
            found.append(answers(llm, prompts, params))
    assert found[0] == found[1]
    assert found[0] == found[2]


@pytest.mark.parametrize("batch", [1, 6])
def test_prepared_trees_are_worth_it(batch: int) -> None:
    """More tokens a round than with chains, and drafts that had been prepared: catches KV that a path does not find."""
    params = [SamplingParams(temperature=i % 2, seed=i, max_new_tokens=64, ignore_eos=True) for i in range(6)]
    prompts = ["There was once a poor woodcutter who", "def add(a, b):", "Mr. Holmes sat by the fire, and"] * 2
    rounds = []
    chains = {"mode": "ssd", "draft": "tiny-llama-draft", "k": 4, "backup": "jit"}
    for speculation in (chains, chains | {"tree": 16}):
        with LLM("tiny-llama", device="cuda", max_num_seqs=batch, speculation=speculation) as llm:
            rounds.append(sum(output.metrics.rounds for output in llm.generate(prompts, params)))
            assert llm.engine.metrics.ssd_hit_rate > 0.3
    assert rounds[1] < rounds[0]
