"""Block drafts: the published layouts, the same drafts as in plain torch, and texts that are plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from block_drafts import make_block
from conftest import TestModel, mostly_slow
from eagle_observers import Drafts
from fakes import wait_until_idle

from ssd import LLM, SamplingParams
from ssd.drafting.block import BlockRunner
from ssd.drafting.choice import TokenChoice
from ssd.errors import ConfigError, UnsupportedModel

K = 5
TOKENS = [3, 141, 59, 265, 35, 89, 79, 32, 38, 46, 26, 43, 38, 32, 79, 50, 288, 41, 97, 169, 39, 93]
KINDS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"layout": "dflash"}),
    ("llama-tied", {"layout": "dflash"}),
    ("qwen3", {"layout": "deepspec", "markov": "vanilla"}),
    ("qwen3", {"layout": "deepspec", "markov": "gated"}),
    ("qwen3", {"layout": "speculators", "markov": "rnn"}),
    ("qwen3", {"layout": "speculators", "draft_vocab": 200}),
    ("llama-tied", {"layout": "speculators", "draft_vocab": 200, "markov": "vanilla", "anchored": False}),
    ("qwen3", {"layout": "dflash", "second": True}),
    ("llama-tied", {"layout": "speculators", "second": True}),
]


@pytest.mark.parametrize(("kind", "options"), KINDS)
def test_drafts_are_those_of_a_plain_implementation(
    make_model: Callable[[str], TestModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    options: dict[str, Any],
) -> None:
    """Tokens and logits, of a context that one forward pass of the target has left."""
    target = make_model(kind)
    block = make_block(target, tmp_path / "block", **options)
    tokens, logits = block.draft(TOKENS, K)
    seen: list[torch.Tensor] = []
    keep = TokenChoice._keep

    def spy(self: TokenChoice, found: torch.Tensor, *others: Any) -> None:
        seen.extend(found.clone())
        keep(self, found, *others)

    monkeypatch.setattr(TokenChoice, "_keep", spy)
    with LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": block.path, "k": K}) as llm:
        drafter: Any = llm.engine.round.drafter
        runner: BlockRunner = drafter.model.runner
        llm.engine.round.target.runner.logits_of(TOKENS[:-1], 1)  # type: ignore[attr-defined]
        runner.state.append(0, len(TOKENS) - 1, TOKENS[-1:], 0)
        runner.write([0], [SamplingParams(temperature=0.0)], K, 1)
        assert runner.state.drafts[0].tolist() == tokens
    for ours, theirs in zip(seen, logits, strict=True):
        assert torch.equal(ours.isinf(), theirs.isinf())
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"), mostly_slow([KINDS[0], KINDS[4], KINDS[6], KINDS[7]], fast=[KINDS[0], KINDS[4]])
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_those_of_plain_decoding(
    make_model: Callable[[str], TestModel], tmp_path: Path, kind: str, options: dict[str, Any], temperature: float
) -> None:
    """In a batch of different lengths, with chunks, preemption, prefix hits, penalties and several samples."""
    target = make_model(kind)
    block = make_block(target, tmp_path / "block", **options)
    prompts = [TOKENS[: 3 + 4 * i] for i in range(5)]
    usual = SamplingParams(max_new_tokens=14, temperature=temperature, seed=3, ignore_eos=True)
    params = [
        usual,
        usual,
        SamplingParams(**vars(usual) | {"n": 2}),
        SamplingParams(**vars(usual) | {"top_k": 5}),
        usual,
    ]
    params[4] = SamplingParams(**vars(usual) | {"presence_penalty": 0.5, "logprobs": 2})
    size: dict[str, Any] = {"device": "cpu", "max_model_len": 64, "num_kv_blocks": 12, "block_size": 8}
    size |= {"max_num_batched_tokens": 16, "max_num_seqs": 6}
    with LLM(target.path, **size) as llm:
        expected = llm.generate(prompts, params)
    with LLM(target.path, **size, speculation={"mode": "sd", "draft": block.path, "k": K}) as llm:
        for _ in range(2):  # the second time from the prefix cache
            found = llm.generate(prompts, params)
            assert [s.token_ids for o in found for s in o.samples] == [s.token_ids for o in expected for s in o.samples]
        assert sum(output.metrics.drafted for output in found) > 0
        assert llm.engine.metrics.num_preemptions > 0


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
@pytest.mark.parametrize("options", [{"layout": "deepspec", "markov": "vanilla"}, {"second": True}])
def test_each_draft_is_that_of_the_text_before_it(
    make_model: Callable[[str], TestModel], tmp_path: Path, rate: float, options: dict[str, Any]
) -> None:
    """Catches features, positions or KV that are those of rejected tokens, or of an earlier draft: acceptance is drawn,
    and every draft is the plain implementation's for the text at that point."""
    target = make_model("qwen3")
    block = make_block(target, tmp_path / "block", **options)
    params = SamplingParams(max_new_tokens=20, temperature=0.0, ignore_eos=True)
    observer = Drafts(block)
    with LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": block.path, "k": K}) as llm:
        llm.engine.round.target.pin([rate] * K)  # type: ignore[attr-defined]
        with llm.driver.observing(observer):
            output = llm.generate([TOKENS], params)[0]
            wait_until_idle(llm.driver)
    assert output.metrics.accepted == (
        0 if rate == 0 else output.metrics.drafted if rate == 1 else pytest.approx(12, abs=8)
    )
    assert len(observer.seen) > 2
    for draft, wanted in observer.seen:
        assert draft == wanted


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 4000}, "block draft has vocab_size=4000, the target 320: use the one that was trained"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 7]}}, "must be different numbers from 1"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2]}}, "after the target's last layer, 3"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, "x"]}}, "expected a list of layer numbers"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id=None"),
        ({"dflash_config": {"mask_token_id": 400, "target_layer_ids": [0, 1]}}, "mask_token_id=400"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1], "causal": True}}, "dflash_config.causal"),
        ({"block_size": None}, "block_size=None"),
        ({"block_size": 1}, "writes nothing"),
        ({"block_size": 4}, "writes at most 3 tokens: lower k"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"architectures": ["DFlash2DraftModel"]}, "lacks 11 tensors"),
        ({"architectures": ["DFlash2DraftModel"], "conv_group_size": 7}, "conv_group_size=7 does not divide"),
        ({"architectures": ["DFlash2DraftModel"], "input_embedding_scale": 2}, "input_embedding_scale=2"),
        ({"architectures": ["DFlash2DraftModel"], "draft_vocab_size": 9}, "has the target's vocabulary"),
        ({"num_hidden_layers": 3}, "lacks 11 tensors"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else None,
)
def test_what_does_not_fit_is_refused_with_the_reason(
    make_model: Callable[[str], TestModel], tmp_path: Path, changes: dict[str, Any], words: str
) -> None:
    target = make_model("qwen3")
    block = make_block(target, tmp_path / "block", changes=changes)
    with pytest.raises((ConfigError, UnsupportedModel), match=words):
        LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": block.path, "k": K})


@pytest.mark.parametrize("k", [3, "auto"])
def test_auto_chooses_between_plain_decoding_and_drafts(
    make_model: Callable[[str], TestModel], tmp_path: Path, k: Any
) -> None:
    """A controller that drafts more than a block holds would verify what nobody has written."""
    target = make_model("qwen3")
    block = make_block(target, tmp_path / "block", block_size=4)
    params = SamplingParams(max_new_tokens=60, temperature=1.0, seed=3, ignore_eos=True)
    with LLM(target.path, device="cpu") as llm:
        expected = llm.generate([TOKENS], params)[0].token_ids
    with LLM(target.path, device="cpu", speculation={"mode": "auto", "draft": block.path, "k": k}) as llm:
        found = llm.generate([TOKENS], params)[0]
        assert set(llm.engine.metrics.mode_rounds) <= {"ar", "sd"}
    assert found.token_ids == expected


def test_other_uses_are_refused_with_the_reason(make_model: Callable[[str], TestModel], tmp_path: Path) -> None:
    target = make_model("qwen3")
    block = make_block(target, tmp_path / "block")
    with pytest.raises(UnsupportedModel, match="a block draft is no model"):
        LLM(block.path, device="cpu")
    for options, words in (
        ({"mode": "ssd"}, 'use mode="sd"'),
        ({"mode": "auto", "budget": 4}, "has no option budget"),
        ({"mode": "auto", "placement": "inline"}, "has no option placement"),
    ):
        with pytest.raises(ConfigError, match=words):
            LLM(target.path, device="cpu", speculation={"draft": block.path, "k": 3, **options})
    with pytest.raises(ConfigError, match="use the coupled rule"):
        LLM(
            target.path,
            device="cpu",
            speculation={"mode": "sd", "draft": block.path, "k": 3, "acceptance": "rejection"},
        )
