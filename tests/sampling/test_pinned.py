"""Acceptance that is drawn: as often as was asked for, whatever the draft is, in every mode."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import mostly_slow

from ssd import LLM, SamplingParams
from ssd.bench.config import BenchConfig
from ssd.bench.run import run
from ssd.errors import ConfigError
from ssd.execution.target import Target
from ssd.sampling.pinned import PinnedAcceptance
from ssd.sampling.rates import rates_of
from ssd.sampling.sampler import Rows

VOCAB, SLOTS, K = 11, 3, 4


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ((0.9,), [0.9] * K),
        ((0.9, 0.5), [0.9, 0.5, 0.5, 0.5]),
        ((0.9, 0.8, 0.7, 0.6, 0.5), [0.9, 0.8, 0.7, 0.6]),
        ((5.0,), [1.0] * K),
        ((0.0,), [0.0] * K),
    ],
)
def test_rates_by_position(accept: tuple[float, ...], expected: list[float]) -> None:
    assert rates_of(accept, K) == pytest.approx(expected)


def test_a_mean_length_is_that_of_equal_rates() -> None:
    found = rates_of((5.5,), 15)
    assert sum(found[0] ** i for i in range(16)) == pytest.approx(5.5)
    with pytest.raises(ValueError, match="at most 5 tokens"):
        rates_of((5.5,), K)


def test_choices_are_drafts_as_often_as_the_rates_say() -> None:
    """By position in the draft. Where a draft is rejected the choice is another token, and none is passed on."""
    pinned = PinnedAcceptance(torch.tensor([0.9, 0.5, 0.25, 0.0]), VOCAB)
    drafts = torch.randint(0, VOCAB, (SLOTS, K), dtype=torch.int32)
    n = 30_000
    slots = torch.arange(n, dtype=torch.int32) % SLOTS
    place = torch.arange(n, dtype=torch.int32) // SLOTS % (K + 1)
    rows = Rows(slots, torch.arange(n, dtype=torch.int32), place, drafts)
    chosen = torch.randint(0, VOCAB, (n,), dtype=torch.int32)
    found = pinned.choices(chosen, rows)
    same = found == drafts[slots.long(), place.clamp(max=K - 1).long()]
    shares = [same[place == j].float().mean().item() for j in range(K)]
    assert shares == pytest.approx([0.9, 0.5, 0.25, 0.0], abs=0.03)
    assert torch.equal(found[place == K], chosen[place == K])
    assert found.min() >= 0
    assert found.max() < VOCAB
    assert torch.equal(found, pinned.choices(chosen, rows))
    nothing = torch.full_like(chosen, -1)
    assert torch.equal(pinned.choices(nothing, rows), nothing)


@pytest.mark.parametrize("mode", mostly_slow(["sd", "ssd"], fast={"sd"}))
def test_an_engine_accepts_as_much_as_it_is_told_to(mode: str) -> None:
    speculation = {"mode": mode, "draft": "tiny-llama-draft", "k": K}
    speculation |= {"placement": "inline", "budget": 4} if mode == "ssd" else {}
    params = SamplingParams(max_new_tokens=100, ignore_eos=True, temperature=1.0, seed=3)
    with LLM("tiny-llama-draft", device="cpu", max_model_len=256, speculation=speculation) as llm:
        for rates, expected in (([1.0] * K, K + 1.0), ([0.0] * K, 1.0), (rates_of((3.0,), K), 3.0)):
            llm.driver.call(lambda engine, rates=rates: pin(engine.round.target, rates))
            outputs = llm.generate(["x", "Once upon a time", "def f(x):"], params)
            per_round = sum(len(o.token_ids) for o in outputs) / sum(o.metrics.rounds for o in outputs)
            assert per_round == pytest.approx(expected, rel=0.15)


@pytest.mark.slow
def test_hits_are_drawn_too() -> None:
    """With a draft whose outcomes are known else: a look-up misses as often as wanted."""
    speculation = {"mode": "ssd", "draft": "tiny-llama-draft", "k": K, "budget": 8, "placement": "inline"}
    params = SamplingParams(max_new_tokens=100, ignore_eos=True, temperature=1.0, seed=3)
    with LLM("tiny-llama-draft", device="cpu", max_model_len=256, speculation=speculation) as llm:
        llm.driver.call(lambda engine: pin(engine.round.target, [0.5] * K))
        for rate in (0.0, 0.5, 1.0):
            llm.driver.call(lambda engine, rate=rate: engine.round.drafter.pin_hits(rate))
            outputs = llm.generate(["Once upon a time", "def f(x):"], params)
            hits, looked = (sum(getattr(o.metrics, name) for o in outputs) for name in ("hits", "look_ups"))
            assert looked > 20
            assert hits / looked == pytest.approx(rate, abs=0.0 if rate == 0.0 else 0.2)


def pin(target: object, rates: list[float]) -> None:
    assert isinstance(target, Target)
    target.pin(rates)


def test_a_benchmark_says_that_its_texts_are_not_the_models() -> None:
    config = BenchConfig(
        "tiny-llama-draft",
        "tiny-llama-draft",
        methods="ar,sd:4",
        accept="3",
        sets=("humaneval",),
        num_prompts=1,
        output_len=60,
        repeats=1,
        engine={"device": "cpu"},
    )
    report = run(config)
    assert report.same_text is None
    assert any("--accept 3" in note and "not the model's" in note for note in report.notes)
    drafted = next(row for row in report.rows if row["contender"] == "sd k=4")
    assert drafted["tokens_per_round"] == pytest.approx(3, rel=0.25)


@pytest.mark.parametrize("accept", ["", "often", "0.9,1.5", "-1", "5.5.5"])
def test_what_is_no_acceptance_is_refused(accept: str) -> None:
    with pytest.raises(ConfigError, match=r"accept=.*: must be a number above 1, or rates"):
        BenchConfig("tiny-llama", accept=accept)


def test_hits_of_another_process_are_refused() -> None:
    options: dict[str, Any] = {"speculation": {"placement": "process"}, "engine": {"device": "cpu"}, "accept": "2"}
    config = BenchConfig("tiny-llama", "tiny-llama-draft", methods="ssd:2", hits=0.5, **options)
    with pytest.raises(ConfigError, match="hits: only of a draft in the target's process"):
        run(config)


def test_more_than_a_draft_holds_is_refused() -> None:
    config = BenchConfig("tiny-llama", "tiny-llama-draft", methods="sd:2", accept="5.5", engine={"device": "cpu"})
    with pytest.raises(ConfigError, match=r"accept=5.5, sd k=2: .* at most 3 tokens"):
        run(config)
    with pytest.raises(ConfigError, match="hits: only with --accept"):
        BenchConfig("tiny-llama", hits=0.5)
    with pytest.raises(ConfigError, match="only with --acceptance coupled"):
        BenchConfig("tiny-llama", accept="2", speculation={"acceptance": "rejection"})
