"""Models with sliding windows in the whole engine: their text is that of plain decoding, and their KV is freed."""

from __future__ import annotations

import random
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any

import pytest
from conftest import KINDS, TestModel, mostly_slow, ragged_prompts, save_model
from eagle_heads import make_head
from fakes import wait_until_idle

from ssd import LLM, ConfigError, SamplingParams
from ssd.core import Outcome, Work
from ssd.decoding.observer import RoundObserver
from ssd.engine.engine import Engine
from ssd.kv.blocks import NULL, most_blocks

PROMPTS = ragged_prompts(6, longest=180)
PARAMS = [
    SamplingParams(temperature=0.8 * (i % 2), seed=i, max_new_tokens=16, ignore_eos=True) for i in range(len(PROMPTS))
]
WAYS: list[dict[str, Any]] = [{}, {"mode": "sd", "k": 3}, {"mode": "ssd", "k": 3, "placement": "inline"}]
WINDOWS = {"mistral-windows": (37,), "qwen2-windows": (None, 16), "qwen3-windows": (None, 21)}
SIZES: dict[str, Any] = {"device": "cpu", "max_model_len": 280, "block_size": 8, "max_num_batched_tokens": 32}


@pytest.mark.parametrize(
    ("kind", "draft"),
    mostly_slow(
        [
            ("qwen3-windows", "mistral-windows"),
            ("mistral-windows", "qwen3-windows"),
            ("qwen2-windows", "llama-tied"),
        ],
        fast={("qwen3-windows", "mistral-windows")},
    ),
)
def test_all_modes_write_the_same_text(make_model: Callable[[str], TestModel], kind: str, draft: str) -> None:
    """With few blocks: prompts in chunks, preemption, prefix hits, and a stream that is dropped.

    Catches KV that is freed while a round needs it, and a hit on a prefix whose window is gone.
    """
    dice = random.Random(3)

    def preempt_one(engine: Engine) -> bool:
        if engine.scheduler.running and dice.random() < 0.2:
            engine.scheduler.preempt(dice.choice(engine.scheduler.running))
        return engine.has_work

    path, fewest = make_model(kind).path, most_blocks(280, 8, WINDOWS[kind], 2 * 32)
    with LLM(path, max_num_seqs=1, prefix_caching=False, device="cpu") as llm:
        expected = [llm.generate(prompt, params)[0].token_ids for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    for way in WAYS:
        options = {"speculation": {"draft": make_model(draft).path, **way}} if way else {}
        with LLM(path, num_kv_blocks=fewest + 4, max_num_seqs=8, **SIZES, **options) as llm:
            submissions = llm.driver.submit_many(list(zip(PROMPTS, PARAMS, strict=True)))
            while llm.driver.call(preempt_one):
                pass
            first = [submission.result() for submission in submissions]
            second = llm.generate(PROMPTS, PARAMS)
            for _ in zip(range(3), llm.stream_deltas(PROMPTS[0], PARAMS[0]), strict=False):
                pass
            turns = llm.generate([[*output.prompt_token_ids, *output.token_ids] for output in first[:2]], PARAMS[:2])
            wait_until_idle(llm.driver)
            counts = llm.engine.metrics
        assert [output.token_ids for output in first] == expected, way
        assert [output.token_ids for output in second] == expected, way
        assert counts.num_preemptions > 5
        assert sum(output.metrics.cached_tokens for output in (*second, *turns)) > 0
        assert not way or counts.spec_decode_num_draft_tokens > 0


def test_a_draft_with_windows_is_the_model_that_it_is(make_model: Callable[[str], TestModel]) -> None:
    """A target that drafts for itself has all its greedy drafts accepted: catches a branch that sees too much."""
    path = make_model("qwen3-windows").path
    params = SamplingParams(max_new_tokens=60, ignore_eos=True)
    for way in WAYS[1:]:
        with LLM(path, max_num_seqs=4, speculation={"draft": path, **way}, **SIZES) as llm:
            llm.generate(PROMPTS[:4], params)
            counts = llm.engine.metrics
        accepted, drafted = counts.spec_decode_num_accepted_tokens, counts.spec_decode_num_draft_tokens
        assert accepted > 0.97 * drafted > 0


def test_a_head_has_the_blocks_of_full_attention(make_model: Callable[[str], TestModel], tmp_path: Path) -> None:
    """Catches an EAGLE head whose KV is in the blocks of a window: its drafts are those of a plain implementation."""
    model = make_model("qwen3-windows")
    head = make_head(model, tmp_path)
    tokens, k = PROMPTS[1][:60], 4
    seen = Drafts()
    speculation = {"mode": "sd", "draft": head.path, "k": k}
    with LLM(model.path, max_num_seqs=4, dtype="float32", speculation=speculation, **SIZES) as llm:
        with llm.driver.observing(seen):
            output = llm.generate(tokens, SamplingParams(max_new_tokens=40, ignore_eos=True))[0]
        wait_until_idle(llm.driver)
    with LLM(model.path, max_num_seqs=1, dtype="float32", device="cpu") as llm:
        assert llm.generate(tokens, output.params)[0].token_ids == output.token_ids
    text = [*tokens, *output.token_ids]
    full = [(end, draft) for end, draft in seen.found if len(draft) == k]
    assert len(full) > 10
    for end, draft in full:
        assert head.draft(text[:end], k)[0] == list(draft)
    with pytest.raises(ConfigError, match="all layers of the target have sliding windows"):
        LLM(make_model("mistral-windows").path, speculation=speculation, max_num_seqs=4, **SIZES)


class Drafts(RoundObserver):
    """Every draft that was verified, and how many tokens its sequence had before it."""

    def __init__(self) -> None:
        self.found: list[tuple[int, tuple[int, ...]]] = []

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        for work, outcome in zip(works, outcomes, strict=True):
            if outcome is not None:
                self.found.append((len(work.sequence.tokens) - len(outcome.token_ids), outcome.draft))


class BlocksHeld(RoundObserver):
    """Blocks of each group of layers that the only sequence has, after every round."""

    def __init__(self, groups: int) -> None:
        self.groups, self.held = groups, []

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        blocks = works[0].sequence.kv.blocks
        if blocks:
            self.held.append([sum(b != NULL for b in blocks[g :: self.groups]) for g in range(self.groups)])


def test_a_long_prompt_frees_the_blocks_of_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """GPT-OSS's pattern: a window of 128 in every other layer, from the first on. A prompt of 900 tokens, read in
    chunks, holds all blocks of the full layers, and of the others those of the window and a chunk."""
    pattern = {**KINDS["gpt-oss"][1], "sliding_window": 128, "num_hidden_layers": 4, "max_position_embeddings": 1024}
    monkeypatch.setitem(KINDS, "gpt-oss", ("GptOss", pattern))
    path, observer = save_model("gpt-oss", tmp_path).path, BlocksHeld(2)
    caplog.set_level("INFO", logger="ssd")
    sizes: dict[str, Any] = {"max_model_len": 1024, "block_size": 16, "max_num_batched_tokens": 64}
    with LLM(path, device="cpu", dtype="float32", max_num_seqs=1, **sizes) as llm:
        with llm.driver.observing(observer):
            llm.generate([i * 7 % 300 for i in range(900)], SamplingParams(max_new_tokens=20, ignore_eos=True))
        wait_until_idle(llm.driver)
        most = most_blocks(1024, 16, (None, 128), 2 * 64)
    full, window = map(list, zip(*observer.held, strict=True))
    assert full[-2] == -(-918 // 16)
    assert max(window) <= (128 + 64) // 16 + 2
    assert window[-2] <= 128 // 16 + 1
    each = 2 * 2 * 32 * 4  # bytes of a token in a layer: keys and values of 2 heads of 32 float32
    bound, whole = most * 16 * 2 * each // 1024, 4 * each
    assert f"1024 tokens has {bound} bytes a token at most, with full attention {whole}" in caplog.text
    assert bound < 0.65 * whole


def test_a_text_may_be_longer_than_the_pool(make_model: Callable[[str], TestModel]) -> None:
    """Catches memory that is counted by the length of the text where windows need less."""
    path, fewest = make_model("mistral-windows").path, most_blocks(280, 8, (37,), 2 * 32)
    assert fewest * 8 < 150
    params = SamplingParams(max_new_tokens=200, ignore_eos=True)
    with LLM(path, num_kv_blocks=fewest, max_num_seqs=1, **SIZES) as llm:
        assert len(llm.generate([*range(80)], params)[0].token_ids) == 200
        assert llm.engine.metrics.num_preemptions == 0
    with pytest.raises(ConfigError, match=rf"raise num_kv_blocks to at least {fewest}$"):
        LLM(path, num_kv_blocks=fewest - 1, max_num_seqs=1, **SIZES)
