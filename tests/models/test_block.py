"""Block drafts: the published layouts, the same drafts as in plain torch, and texts that are plain decoding's."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from bits import same_bits
from block_drafts import Markov, first_draft, make_block
from conftest import TestModel, mostly_slow
from eagle_observers import Drafts
from fakes import wait_until_idle
from first_drafts import write_draft
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from typer.testing import CliRunner

from ssd import LLM, SamplingParams
from ssd.assembly.open import open_checkpoint, open_feature_draft
from ssd.cli.main import app
from ssd.core import Origin, Outcome, Work
from ssd.decoding.observer import RoundObserver
from ssd.drafting.arms import Arm
from ssd.errors import ConfigError, UnsupportedModel
from ssd.grafts.shapes import SHAPES
from ssd.layers.spec import RopeConfig
from ssd.models.block import BlockCheckpoint, BlockConfig
from ssd.models.config import equal_layers
from ssd.models.feature_draft import FeatureCheckpoint


class Launches(TorchDispatchMode):
    """The operations of torch inside `with` that compute."""

    def __init__(self) -> None:
        super().__init__()
        self.names = set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.split(".")[0]
        made = name in ("empty", "empty_strided")
        if name.endswith("_") or not (made or result.untyped_storage()._cdata == args[0].untyped_storage()._cdata):
            self.names.add(name)
        return result


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
WINDOWS: list[tuple[str, dict[str, Any]]] = [
    ("qwen3", {"layout": "dflash", "windows": (9, None), "causal": (True, False)}),
    ("qwen3", {"layout": "dflash", "windows": (9, 9), "second": True, "changes": {"is_causal": False}}),
    ("qwen3", {"layout": "speculators", "windows": (None, 7), "causal": (False, True), "markov": "vanilla"}),
    ("qwen3", {"layout": "speculators", "windows": (7, 7), "changes": {"sliding_window_non_causal": True}}),
    ("qwen3", {"layout": "deepspec", "causal": (True, True), "markov": "gated", "changes": {"is_causal": True}}),
]


@pytest.mark.parametrize(
    ("kind", "options"),
    mostly_slow([*KINDS, *WINDOWS], fast=[KINDS[0], *KINDS[3:5], *KINDS[6:], *WINDOWS[:3], WINDOWS[4]]),
)
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
    told: list[float] | None = [] if options["layout"] == "deepspec" else None
    tokens, logits = block.draft(TOKENS, K, chances=told)
    written, seen, confidence = first_draft(target.path, block.path, TOKENS, K, monkeypatch)
    assert written == tokens
    if told:
        assert confidence == pytest.approx(told, abs=1e-5)
    for ours, theirs in zip(seen, logits, strict=True):
        theirs = theirs[theirs > -torch.inf] if len(ours) < len(theirs) else theirs  # of the draft's own tokens
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "options"), mostly_slow([KINDS[0], KINDS[4], KINDS[6], KINDS[7], WINDOWS[0]], fast=[WINDOWS[0]])
)
@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], fast={1.0}))
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


@pytest.mark.parametrize("rate", mostly_slow([0.0, 0.6, 1.0], fast={0.6}))
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
    ("options", "others"), [(KINDS[0][1], set()), ({"layout": "speculators", "markov": "vanilla"}, {"add"})]
)
def test_a_draft_is_launched_by_kernels_alone(
    make_model: Callable[[str], TestModel], tmp_path: Path, options: dict[str, Any], others: set[str]
) -> None:
    """Between the upload of slots and the copy to the host torch makes views, and adds up what a Markov head says.
    Catches an operation of torch per draft or per place, each of which is a launch on a GPU."""
    target = make_model("qwen3")
    block = make_block(target, tmp_path / "block", **options)
    with LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": block.path, "k": K}) as llm:
        write_draft(llm, TOKENS, K)
        runner = llm.engine.round.drafter.model.runner  # type: ignore[attr-defined]
        _, write = runner._block(runner.shapes.of(1, 1, [SamplingParams(temperature=0.0)]), K, Origin.DRAFT)
        with Launches() as launches:
            write()
    assert launches.names == others


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"vocab_size": 4000}, "block draft has vocab_size=4000, the target 320: use the one that was trained"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 7]}}, "must be different numbers from 1"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 2]}}, "after the target's last layer, 3"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, "x"]}}, "expected a list of layer numbers"),
        ({"dflash_config": {"target_layer_ids": [0, 1]}}, "mask_token_id=None"),
        ({"dflash_config": {"mask_token_id": 400, "target_layer_ids": [0, 1]}}, "mask_token_id=400"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1], "causal": 3}}, "causal=3"),
        ({"dflash_config": {"mask_token_id": 4, "target_layer_ids": [0, 1], "attention_sink_bias": True}}, "sinks"),
        ({"block_size": None}, "block_size=None"),
        ({"block_size": 1}, "writes nothing"),
        ({"block_size": 4}, "writes at most 3 tokens: lower k"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "sliding_window is not set"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 8}, "layer_types has 1 entries"),
        ({"layer_types": ["chunked_attention"] * 2}, "layer type 'chunked_attention'"),
        ({"layer_types": ["sliding_attention"] * 2, "sliding_window": 0}, "sliding_window=0"),
        ({"architectures": ["DFlash2DraftModel"]}, "lacks 11 tensors"),
        ({"architectures": ["DFlash2DraftModel"], "conv_group_size": 7}, "conv_group_size=7 does not divide"),
        ({"architectures": ["DFlash2DraftModel"], "input_embedding_scale": 2}, "input_embedding_scale=2"),
        ({"architectures": ["DFlash2DraftModel"], "draft_vocab_size": 9}, "has the target's vocabulary"),
        ({"num_hidden_layers": 3, "layer_types": None}, "lacks 11 tensors"),
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
    params = SamplingParams(max_new_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    with LLM(target.path, device="cpu") as llm:
        expected = llm.generate([TOKENS], params)[0].token_ids
    with LLM(target.path, device="cpu", speculation={"mode": "auto", "draft": block.path, "k": k}) as llm:
        found = llm.generate([TOKENS], params)[0]
        assert set(llm.engine.metrics.mode_rounds) <= {"ar", "sd"}
    assert found.token_ids == expected


@pytest.mark.parametrize("temperature", mostly_slow([0.0, 1.0], fast={1.0}))
@pytest.mark.parametrize("options", [KINDS[0][1], KINDS[2][1]])
def test_lengths_differ_within_a_batch(
    make_model: Callable[[str], TestModel], tmp_path: Path, options: dict[str, Any], temperature: float
) -> None:
    """By what a confidence head says, or by earlier acceptance: together as many tokens as with equal lengths, and the
    text of plain decoding."""
    target = make_model("qwen3")
    block = make_block(target, tmp_path / "block", **options)
    prompts = [TOKENS[: 4 + 3 * i] for i in range(4)]
    params = SamplingParams(max_new_tokens=30, temperature=temperature, seed=5, ignore_eos=True)
    with LLM(target.path, device="cpu") as llm:
        expected = [output.token_ids for output in llm.generate(prompts, params)]
    observer = Lengths()
    with LLM(target.path, device="cpu", speculation={"mode": "sd", "draft": block.path, "k": "auto"}) as llm:
        controller: Any = llm.engine.round.drafter
        controller._wish = lambda *_: controller._take(Arm(2, 0))
        controller._take(Arm(2, 0))
        with llm.driver.observing(observer):
            found = [output.token_ids for output in llm.generate(prompts, params)]
            wait_until_idle(llm.driver)
    assert found == expected
    whole = [lengths for lengths, limits in observer.seen if set(limits) == {4}]
    assert len(whole) > 3
    assert all(sum(lengths) == 8 and min(lengths) >= 1 for lengths in whole)
    assert any(len(set(lengths)) > 1 for lengths in whole)


class Lengths(RoundObserver):
    """Lengths of drafts in rounds of four sequences, and what there was room for."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[int], list[int]]] = []

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        if len(works) == 4 and all(work.proposal.num_tokens for work in works):
            self.seen.append(([w.proposal.num_tokens for w in works], [w.lookahead for w in works]))


def test_a_confidence_head_that_reads_something_else_is_refused(
    make_model: Callable[[str], TestModel], tmp_path: Path
) -> None:
    block = make_block(make_model("qwen3"), tmp_path / "block", "deepspec", markov="vanilla")
    weights = load_file(tmp_path / "block" / "model.safetensors")
    weights["confidence_head.proj.weight"] = torch.zeros(1, 7)
    save_file(weights, tmp_path / "block" / "model.safetensors")
    with pytest.raises(UnsupportedModel, match=r"confidence_head\.proj\.weight has 7 columns"):
        BlockCheckpoint.open(Path(block.path))


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


@pytest.mark.parametrize(
    ("vocab", "tied", "markov"),
    mostly_slow([(1000, True, "vanilla"), (1000, False, "vanilla"), (320, False, "")], fast=[(1000, True, "vanilla")]),
)
def test_a_graft_drafts_what_the_small_one_drafts(
    make_model: Callable[[str], TestModel],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    vocab: int,
    tied: bool,
    markov: Markov,
) -> None:
    """In the sizes of published ones. Catches random numbers that reach the logits, and the graft's own tokens."""
    shape = equal_layers("llama", vocab, 256, 150, 7, 8, 4, 64, 99, 0.1, RopeConfig(7.0), tied)
    monkeypatch.setitem(SHAPES, "big", shape)
    target = make_model("llama-tied")
    block = make_block(target, tmp_path / "block", "deepspec" if markov else "dflash", markov=markov)
    tokens, logits = block.draft(TOKENS, K)
    big, draft = (f"graft:{each}@big" for each in (target.path, block.path))
    written, seen, _ = first_draft(big, draft, TOKENS, K, monkeypatch)
    assert written == tokens
    for ours, theirs in zip(seen, logits, strict=True):
        torch.testing.assert_close(ours[:320], theirs, rtol=1e-4, atol=1e-3)
        assert vocab == 320 or ours[320:].max() < ours[:320].min() - 1000
    config = open_graft_of(draft, big).config
    assert isinstance(config, BlockConfig)
    assert (config.num_layers, config.markov_rank, config.draft_vocab_size) == (5, 256 if markov else 0, vocab)
    assert config.feature_layers == (2, 4)


def open_graft_of(draft: str, model: str) -> FeatureCheckpoint:
    found = open_feature_draft(draft)
    assert found is not None
    return found.for_target(open_checkpoint(model))


def test_what_cannot_be_grafted_is_refused_with_the_reason(
    make_model: Callable[[str], TestModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "big", equal_layers("qwen3", 1000, 384, 150, 7, 8, 4, 64, 99, 0.1, RopeConfig(7.0)))
    target = make_model("qwen3")
    model = f"graft:{target.path}@big"
    refused: list[tuple[dict[str, Any], str]] = [
        ({"layout": "deepspec", "markov": "rnn"}, "nor DSpark with a vanilla Markov head"),
        ({"second": True}, "it is no DFlash draft"),
        ({"windows": (7, 7), "causal": (True, True)}, "it has sliding windows or causal layers"),
        ({"layout": "speculators", "draft_vocab": 200}, "its draft_vocab_size=200 is not the target's 320"),
    ]
    for i, (options, words) in enumerate(refused):
        block = make_block(target, tmp_path / str(i), **options)
        with pytest.raises(ConfigError, match=words):
            open_graft_of(f"graft:{block.path}@big", model)
    with pytest.raises(ConfigError, match="use model='graft:…@big'"):
        open_graft_of(f"graft:{block.path}@big", target.path)
    with pytest.raises(ConfigError, match="is a graft already"):
        open_graft_of(f"graft:graft:{block.path}@big@big", model)


@pytest.mark.parametrize(("kind", "options"), mostly_slow([*KINDS[2:], *WINDOWS], fast=[KINDS[2], KINDS[6], KINDS[8]]))
def test_an_exported_draft_is_the_same_draft_in_the_authors_layout(
    make_model: Callable[[str], TestModel], tmp_path: Path, kind: str, options: dict[str, Any]
) -> None:
    """Catches a field or a tensor that is lost, renamed or rounded, and layers that are counted otherwise."""
    made = make_block(make_model(kind), tmp_path / "block", **options)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["export-draft", made.path, "--out", str(out), "--dtype", "float32"])
    assert result.exit_code == 0, result.output
    ours, theirs = BlockCheckpoint.open(out), BlockCheckpoint.open(Path(made.path))
    assert replace(ours.config, dtype="float32") == replace(theirs.config, dtype="float32")
    stored = load_file(out / "model.safetensors")
    assert stored.keys() - {"t2d"} == made.weights.keys()
    for name, tensor in made.weights.items():
        assert same_bits(stored[name], tensor), name


def test_a_graft_is_exported_as_a_draft_for_the_graft(
    make_model: Callable[[str], TestModel], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SHAPES, "big", equal_layers("llama", 1000, 256, 150, 7, 8, 4, 64, 99, 0.1, RopeConfig(7.0)))
    target = make_model("llama-tied")
    block = make_block(target, tmp_path / "block", "deepspec", markov="vanilla")
    big, draft, out = f"graft:{target.path}@big", f"graft:{block.path}@big", str(tmp_path / "out")
    command = ["export-draft", draft, "--out", out, "--dtype", "float32"]
    assert "name the graft that it drafts for with --target" in CliRunner().invoke(app, command).output
    result = CliRunner().invoke(app, [*command, "--target", big])
    assert result.exit_code == 0, result.output
    expected, found = (first_draft(big, each, TOKENS, K, monkeypatch) for each in (draft, out))
    assert found[0] == expected[0]
    assert all(same_bits(a, b) for a, b in zip(found[1], expected[1], strict=True))
