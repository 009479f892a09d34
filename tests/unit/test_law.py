"""The target's law: every parameter against a naive implementation in plain Python, and each row alone."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import pytest
import torch
from fakes import ROOT, VOCAB, advance, chi_squared_p, logits_after, make_harness, make_sequence
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from naive_law import STOPS, adjusted, naive_law, normalised

from ssd.core import SamplingParams, Sequence
from ssd.decoding.law import Row, choose, logprobs
from ssd.errors import RequestError

NEVER = -math.inf
LOGITS = [1.5, 0.25, -0.5, 2.0, 0.75, -1.0, 1.25, 0.0, -0.25, 1.0]
PROMPT, OUTPUT = [3, 3, 0, 9], [6, 6, 6, 4]


# --- sampling many times ----------------------------------------------------------------------------------------------


def sequence(params: SamplingParams, seed: int = 0, output: Seq[int] = OUTPUT) -> Sequence:
    return make_sequence(PROMPT, output, params=params, seed=seed, stop_token_ids=STOPS)


def draws(params: SamplingParams, n: int, drafted: tuple[int, ...] = (), logits: Seq[float] = LOGITS) -> list[int]:
    """How often each token is chosen over `n` seeds."""
    rows = [Row(sequence(params, seed), drafted) for seed in range(n)]
    counts = Counter(choose(torch.tensor([logits] * n), rows))
    return [counts[t] for t in range(len(logits))]


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.5},
    "hot": {"temperature": 3.0},
    "top_k": {"top_k": 3},
    "top_k beyond the vocabulary": {"top_k": 1000},
    "top_k of one": {"top_k": 1},
    "top_p": {"top_p": 0.7},
    "tiny top_p": {"top_p": 1e-9},
    "min_p": {"min_p": 0.3},
    "min_p of one": {"min_p": 1.0},
    "repetition": {"repetition_penalty": 1.7},
    "attraction": {"repetition_penalty": 0.5},
    "presence": {"presence_penalty": 1.1},
    "frequency": {"frequency_penalty": 0.4},
    "negative penalties": {"presence_penalty": -0.5, "frequency_penalty": -0.25},
    "bias": {"logit_bias": {0: -1.5, 5: 2.0}},
    "forbidden by bias": {"logit_bias": {3: NEVER, 0: NEVER, 1: 0.5}},
    "min_tokens not reached": {"min_tokens": 5},
    "min_tokens just reached": {"min_tokens": 4},
    "top_k then top_p": {"top_k": 5, "top_p": 0.6},
    "everything": {
        "temperature": 0.9,
        "top_k": 7,
        "top_p": 0.93,
        "min_p": 0.06,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.1,
        "logit_bias": {2: 1.3, 9: NEVER},
        "min_tokens": 10,
    },
}


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_each_parameter(options: dict[str, Any]) -> None:
    """Catches any error in a parameter's law or support: 3,000 seeds against the naive law, by chi-squared.

    False alarm: 1e-7 for the law; a token of 1 % or more that is never drawn, below 1e-12.
    """
    params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": 100, **options})
    law = naive_law(LOGITS, params, PROMPT, OUTPUT)
    counts = draws(params, 3000)
    assert {t for t, c in enumerate(counts) if c} <= {t for t, p in enumerate(law) if p > 0}, "outside the support"
    assert {t for t, p in enumerate(law) if p >= 0.01} <= {t for t, c in enumerate(counts) if c}, "support too small"
    assert chi_squared_p(counts, law) > 1e-7


@pytest.mark.parametrize("options", [CASES["plain"], CASES["everything"]], ids=["plain", "everything"])
def test_the_law_holds_over_positions(options: dict[str, Any]) -> None:
    """Catches noise that repeats along a sequence: one seed, 3,000 positions. False alarm: 1e-7."""
    params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": 10_000, **options, "min_tokens": 0})
    params = replace(params, repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0)
    rows = [Row(sequence(params, seed=5, output=[6] * i)) for i in range(1, 3001)]
    counts = Counter(choose(torch.tensor([LOGITS] * len(rows)), rows))
    assert chi_squared_p([counts[t] for t in range(len(LOGITS))], naive_law(LOGITS, params, PROMPT, [6])) > 1e-7


@pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
def test_drafted_tokens_count_as_output(options: dict[str, Any]) -> None:
    """Catches verification under another law than decoding: penalties, min_tokens and noise must see the drafts."""
    params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": 100, **options})
    drafted = (3, 8, 8)
    for j in range(4):
        as_drafts = [Row(sequence(params, seed), drafted[:j]) for seed in range(100)]
        as_output = [Row(sequence(params, seed, [*OUTPUT, *drafted[:j]])) for seed in range(100)]
        assert [r.position for r in as_drafts] == [r.position for r in as_output] == [8 + j] * 100
        logits = torch.tensor([LOGITS] * 100)
        assert choose(logits.clone(), as_drafts) == choose(logits.clone(), as_output)
    law = naive_law(LOGITS, params, PROMPT, [*OUTPUT, *drafted])
    assert chi_squared_p(draws(params, 1000, drafted), law) > 1e-7


params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 4, 50]),
    top_p=st.sampled_from([1.0, 0.95, 0.61, 0.2]),
    min_p=st.sampled_from([0.0, 0.07, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.45]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([NEVER, -1.0, 0.9]), max_size=3),
    min_tokens=st.sampled_from([0, 5, 20]),
    max_new_tokens=st.just(100),
)
rows_of_logits = st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=10, max_size=10)


@settings(max_examples=100, deadline=None)
@given(rows_of_logits, params_of_any_kind, st.lists(st.integers(0, 9), max_size=4))
def test_combinations_stay_in_the_support(logits: list[float], params: SamplingParams, drafted: list[int]) -> None:
    """Catches parameters applied in the wrong order, and ties cut differently: 60 seeds must stay in the support."""
    margin: list[float] = []
    law = naive_law(logits, params, PROMPT, [*OUTPUT, *drafted], margin)
    assume(min(margin, default=1.0) > 1e-5)  # float32 may see a tie where float64 sees none, and the other way round
    counts = draws(params, 60, tuple(drafted), logits)
    assert {t for t, c in enumerate(counts) if c} <= {t for t, p in enumerate(law) if p > 0}


# --- greedy and ties --------------------------------------------------------------------------------------------------


@given(rows_of_logits, params_of_any_kind)
def test_greedy_ignores_truncation_and_seed(logits: list[float], params: SamplingParams) -> None:
    """Catches temperature 0 that samples: the argmax of the adjusted logits, whatever top_k, top_p, min_p and seed."""
    greedy = replace(params, temperature=0.0)
    bare = replace(greedy, top_k=0, top_p=1.0, min_p=0.0)
    [chosen] = choose(torch.tensor([logits]), [Row(sequence(greedy, seed=1))])
    assert [chosen] == choose(torch.tensor([logits]), [Row(sequence(bare, seed=2))])
    z = adjusted(logits, greedy, PROMPT, OUTPUT)
    assert z[chosen] >= max(z) - 1e-5


def test_greedy_ties_go_to_the_lowest_id() -> None:
    """Catches a tie that is broken differently from row to row or from batch to batch."""
    logits = torch.zeros(5, 1000)
    logits[:, [700, 300, 999]] = 2.0
    for n in (1, 2, 5):
        assert choose(logits[:n].clone(), [Row(sequence(SamplingParams()))] * n) == [300] * n


def test_top_k_ties_keep_exactly_k() -> None:
    """Catches a threshold instead of a rank: among equals the lowest ids stay, and no more than k."""
    params = SamplingParams(temperature=1.0, top_k=3)
    counts = draws(params, 600, logits=[0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    assert [t for t, c in enumerate(counts) if c] == [1, 3, 4]


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-38, 1e-45, 1e-60, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """Catches overflow of logits / temperature in float32: several infinities, or NaN, in place of one maximum.

    To refuse such a temperature would do as well.
    """
    try:
        params = SamplingParams(temperature=temperature)
    except RequestError:
        return
    logits = [-3.0, 0.0, 4.0, 5.0, 4.5, -math.inf]
    assert choose(torch.tensor([logits] * 50), [Row(sequence(params, seed, [])) for seed in range(50)]) == [3] * 50


@pytest.mark.parametrize("shift", [-1e4, -100.0, 300.0, 1e4])
def test_the_law_does_not_depend_on_the_level_of_the_logits(shift: float) -> None:
    """Catches exponentials of raw logits (overflow). False alarm: 1e-7. (Quarters survive the shift in float32.)"""
    params = SamplingParams(temperature=0.5, top_p=0.9)
    logits = [x + shift for x in LOGITS]
    assert chi_squared_p(draws(params, 2000, logits=logits), naive_law(LOGITS, params, [], [])) > 1e-7


# --- no row depends on another ----------------------------------------------------------------------------------------


def zoo(n: int, vocab: int) -> tuple[torch.Tensor, list[Row]]:
    """Rows of all kinds of parameters over spiky and flat logits."""
    dice = random.Random(3)
    rows = []
    for i in range(n):
        params = SamplingParams(
            temperature=dice.choice([0.0, 0.2, 0.8, 1.0, 5.0]),
            top_k=dice.choice([0, 0, 1, 20, 300]),
            top_p=dice.choice([1.0, 1.0, 0.9, 0.3]),
            min_p=dice.choice([0.0, 0.0, 0.05]),
            repetition_penalty=dice.choice([1.0, 1.0, 1.2]),
            presence_penalty=dice.choice([0.0, 0.0, 0.5]),
            frequency_penalty=dice.choice([0.0, 0.0, 0.5]),
            logit_bias=dice.choice([{}, {5: 3.0}, {i: NEVER for i in range(50)}]),
            min_tokens=dice.choice([0, 9]),
        )
        rows.append(Row(sequence(params, seed=i), tuple(dice.choices(range(vocab), k=dice.randrange(3)))))
    scale = torch.tensor([dice.choice([0.1, 1.0, 10.0]) for _ in rows])[:, None]
    return torch.randn(n, vocab, generator=torch.Generator().manual_seed(1)) * scale, rows


@pytest.mark.parametrize("vocab", [11, 1000, 4099])
def test_a_rows_choice_is_independent_of_its_company(vocab: int) -> None:
    """Catches a neighbour's top_k, min_p or temperature that leaks, or arithmetic that depends on the batch."""
    logits, rows = zoo(60, vocab)
    alone = [choose(logits[i : i + 1].clone(), [row])[0] for i, row in enumerate(rows)]
    assert choose(logits.clone(), rows) == alone
    order = random.Random(4).sample(range(60), 60)
    assert choose(logits[order].clone(), [rows[i] for i in order]) == [alone[i] for i in order]
    half = [i for i in range(60) if not rows[i].params.greedy]  # all sampled: another branch of the code
    assert choose(logits[half].clone(), [rows[i] for i in half]) == [alone[i] for i in half]


def test_truncation_in_the_neighbourhood_keeps_the_tail() -> None:
    """Catches a row without truncation that loses its tail because a neighbour's row is truncated.

    Flat but for one far token: over 400 seeds every choice must be what it is alone.
    """
    free, cut = SamplingParams(temperature=1.0), SamplingParams(temperature=1.0, top_p=0.5)
    logits = torch.linspace(0, -24, 64)
    for seed in range(400):
        [alone] = choose(logits[None].clone(), [Row(sequence(free, seed, []))])
        rows = [Row(sequence(free, seed, [])), Row(sequence(cut, seed, []))]
        assert choose(torch.stack([logits, logits]), rows)[0] == alone


@pytest.mark.parametrize("options", [{"logit_bias": {2000: 1.0}}, {"min_tokens": 3}, {"top_k": 5000}])
def test_ids_beyond_the_logits_are_ignored(options: dict[str, Any]) -> None:
    """Catches an IndexError for a stop id (1000 here) or a bias beyond the rows of the output layer."""
    params = SamplingParams(temperature=0.7, **options)
    assert 0 <= choose(torch.tensor([LOGITS]), [Row(sequence(params))])[0] < len(LOGITS)


# --- log-probabilities ------------------------------------------------------------------------------------------------


@given(rows_of_logits, params_of_any_kind, st.integers(0, 12), st.integers(0, 9))
def test_logprobs_are_the_models_own(logits: list[float], params: SamplingParams, k: int, token: int) -> None:
    """Catches log-probabilities after temperature, truncation, bias or penalties."""
    found = logprobs(torch.tensor(logits), Row(sequence(replace(params, logprobs=k))), token)
    law = [math.log(p) for p in normalised([math.exp(x) for x in logits])]
    assert found.token_id == token
    assert found.logprob == pytest.approx(law[token], abs=1e-9)
    assert len(found.top) == min(k, 10)
    assert found.top == pytest.approx({t: law[t] for t in found.top}, abs=1e-9)
    assert sorted(law, reverse=True)[: len(found.top)] == pytest.approx(list(found.top.values()), abs=1e-9)


def test_the_engine_reports_raw_logprobs() -> None:
    """Catches logits that `choose` has overwritten before their log-probabilities were taken."""
    params = SamplingParams(
        temperature=0.5,
        seed=1,
        top_k=3,
        repetition_penalty=3.0,
        logit_bias={4: NEVER, 5: 8.0},
        logprobs=VOCAB,
        max_new_tokens=20,
    )
    output = make_harness().run([4, 5, 6], params)
    state = ROOT
    for token in [4, 5, 6]:
        state = advance(state, token)
    for token, entry in zip(output.token_ids, output.logprobs or [], strict=True):
        raw = torch.log_softmax(logits_after(state).double(), -1).tolist()
        assert entry.token_id == token
        assert entry.logprob == pytest.approx(raw[token])
        assert [entry.top[t] for t in range(VOCAB)] == pytest.approx(raw)
        state = advance(state, token)
