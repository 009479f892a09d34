"""The sampler against a naive one in plain Python, one token at a time, and every row against itself in company."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from fakes import chi_squared_p
from hypothesis import assume, given
from hypothesis import strategies as st
from naive_distribution import STOPS, adjusted, naive_distribution

from ssd.core import SamplingParams
from ssd.sampling import noise
from ssd.sampling.noise import Stream
from ssd.sampling.sampler import Needs, Rows, Sampler, SamplingColumns, reweighted, top_logprobs

CPU = torch.device("cpu")
F = np.float32


# --- the naive implementation -----------------------------------------------------------------------------------------


def naive_adjusted(logits: Seq[F], p: SamplingParams, prompt: Seq[int], output: Seq[int]) -> list[F]:
    out = []
    for token, x in enumerate(logits):
        x = F(x + F(p.logit_bias.get(token, 0.0)))
        times = output.count(token)
        if times or token in prompt:
            x = F(x / F(p.repetition_penalty)) if x > 0 else F(x * F(p.repetition_penalty))
        x = F(x - F(F(p.presence_penalty) * F(times > 0) + F(p.frequency_penalty) * F(times)))
        out.append(F(-math.inf) if token in STOPS and len(output) < p.min_tokens else x)
    return out


def naive_kept(x: Seq[F], p: SamplingParams) -> list[int]:
    tokens = list(range(len(x)))
    if p.greedy:
        return tokens
    z = [F(0) if v == max(x) else F(F(v - max(x)) / F(max(p.temperature, 1e-6))) for v in x]
    keys = [2**25 - 1 if v * 2**20 <= 1 - 2**25 else int(-v * F(2**20)) for v in z]
    kept = sorted((t for t in tokens if not p.min_p or z[t] >= F(math.log(p.min_p))), key=lambda t: (keys[t], t))
    kept = kept[: p.top_k or len(kept)]
    if p.top_p < 1:
        mass = {t: int(float(F(math.exp(z[t]))) * 2**32) for t in kept}
        total, before, nucleus = sum(mass.values()), 0, []
        for t in kept:
            if before < float(F(p.top_p)) * total:
                nucleus.append(t)
            before += mass[t]
        kept = nucleus
    return kept


def naive_best(x: Seq[F], p: SamplingParams, seed: int, position: int, count: int, excluded: int) -> list[int]:
    gumbel = noise.gumbel([noise.position_key(seed, position)], len(x), CPU)[0].numpy()
    scores = {}
    for t in naive_kept(x, p):
        if t != excluded and x[t] > -math.inf:
            scores[t] = x[t] if p.greedy else F(F(x[t] / F(max(p.temperature, 1e-6))) + gumbel[t])
    order = sorted(scores, key=lambda t: (-scores[t], t))
    return ((order or [-1]) + [0] * count)[:count]


# --- many sequences of many kinds -------------------------------------------------------------------------------------


def some_params(rng: random.Random) -> SamplingParams:
    def maybe(value: float, otherwise: float) -> float:
        return value if rng.random() < 0.4 else otherwise

    return SamplingParams(
        temperature=rng.choice([0.0, 1e-9, 0.3, 1.0, 2.5]),
        top_k=int(maybe(rng.choice([1, 2, 5, 30, 10**10]), 0)),
        top_p=maybe(rng.choice([1e-6, 0.3, 0.9, 0.999]), 1.0),
        min_p=maybe(rng.choice([1e-5, 0.05, 1.0]), 0.0),
        repetition_penalty=maybe(rng.choice([0.8, 1.3]), 1.0),
        presence_penalty=maybe(rng.choice([-0.5, 0.7]), 0.0),
        frequency_penalty=maybe(rng.choice([-0.25, 0.6]), 0.0),
        logit_bias={rng.randrange(50): rng.uniform(-5, 5), 10**6: 9.0} if rng.random() < 0.3 else {},
        min_tokens=int(maybe(4, 0)),
        seed=rng.randrange(2**63),
    )


class Case:
    """Sequences with drafted tokens, in the slots 1, 2, ... (0 stays empty), and one row of logits for each."""

    def __init__(self, seed: int, num_rows: int = 12, vocab_size: int = 200) -> None:
        rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self.vocab_size, self.columns = vocab_size, SamplingColumns(num_rows + 1, vocab_size, CPU)
        self.logits = torch.randn((num_rows, vocab_size), generator=generator) * rng.choice([0.5, 3.0, 12.0])
        if seed % 3 == 1:
            self.logits = (self.logits * 2).round() / 2  # ties, as of bfloat16
        if seed % 3 == 2:
            self.logits[torch.rand(self.logits.shape, generator=generator) < 0.2] = -torch.inf

        def some_tokens(most: int) -> list[int]:
            return [rng.randrange(min(vocab_size, 50)) for _ in range(rng.randint(0, most))]

        self.params = [some_params(rng) for _ in range(num_rows)]
        self.prompts = [[1, *some_tokens(9)] for _ in range(num_rows)]
        self.outputs = [some_tokens(5) for _ in range(num_rows)]
        self.drafted = [some_tokens(3) for _ in range(num_rows)]
        self.excluded = [rng.randrange(-1, min(vocab_size, 50)) for _ in range(num_rows)]
        drafts = torch.zeros((num_rows + 1, 4), dtype=torch.int32)
        for i, p in enumerate(self.params):
            self.columns.set(i + 1, some_params(rng), 5, [1, 2], [3, 4], STOPS)  # of an earlier sequence
            self.columns.set(i + 1, p, p.seed or 0, self.prompts[i], self.outputs[i], STOPS)
            drafts[i + 1, : len(self.drafted[i])] = torch.tensor(self.drafted[i])
        parts = zip(self.prompts, self.outputs, self.drafted, strict=True)
        self.rows = Rows(
            slots=torch.arange(1, num_rows + 1, dtype=torch.int32),
            positions=torch.tensor([sum(map(len, part)) for part in parts], dtype=torch.int32),
            num_drafted=torch.tensor([len(d) for d in self.drafted], dtype=torch.int32),
            drafts=drafts,
        )
        self.needs = Needs.of(self.params)

    def naive(self, i: int, count: int = 1, *, excluding: bool = False) -> list[int]:
        p = self.params[i]
        x = naive_adjusted(list(self.logits[i].numpy()), p, self.prompts[i], self.outputs[i] + self.drafted[i])
        excluded = self.excluded[i] if excluding else -1
        return naive_best(x, p, p.seed or 0, int(self.rows.positions[i]), count, excluded)


@pytest.mark.parametrize("seed", mostly_slow(range(12), fast=range(4)))
def test_the_naive_sampler_chooses_the_same(seed: int) -> None:
    case = Case(seed)
    sampler, count = Sampler(case.columns), 1 + seed % 3
    tokens, _ = sampler.best(case.logits.clone(), case.rows, case.needs, count)
    assert tokens.tolist() == [case.naive(i, count) for i in range(len(tokens))]
    excluded = torch.tensor(case.excluded, dtype=torch.int32)
    tokens, scores = sampler.best(case.logits.clone(), case.rows, case.needs, count, excluded)
    assert tokens.tolist() == [case.naive(i, count, excluding=True) for i in range(len(tokens))]
    assert tokens.dtype is torch.int32
    assert bool((scores[:, :-1] >= scores[:, 1:]).all())


@pytest.mark.parametrize("seed", range(6))
def test_logits_of_some_tokens(seed: int) -> None:
    """Those of a draft's own vocabulary, with their ids: as if all others had -inf."""
    case = Case(seed, num_rows=9, vocab_size=900)
    ids = torch.tensor(sorted(random.Random(seed).sample(range(900), 300)), dtype=torch.int32)
    whole, own = torch.full_like(case.logits, -torch.inf), case.logits[:, :300]
    whole[:, ids.long()] = own
    sampler, needs = Sampler(case.columns), Needs(truncated=True)
    for excluded in (None, ids[:9].contiguous(), torch.tensor(case.excluded, dtype=torch.int32)):
        expected = sampler.best(whole, case.rows, needs, 3, excluded)
        found = sampler.best(own, case.rows, needs, 3, excluded, ids)
        assert all(same_bits(a, b) for a, b in zip(found, expected, strict=True))
    whole[:, ids[7]] = own[:, 7] = math.inf
    assert sampler.best(own, case.rows, needs, 2, None, ids)[0][:, 0].tolist() == [-1] * 9


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_is_what_the_naive_sampler_keeps(seed: int) -> None:
    case = Case(seed, num_rows=20, vocab_size=60)
    distribution = Sampler(case.columns).distribution(case.logits.clone(), case.rows, Needs(truncated=True))
    for i, p in enumerate(case.params):
        x = case.logits[i].double()
        expected = torch.zeros(60, dtype=torch.float64)
        kept = naive_kept(list(case.logits[i].numpy()), p)
        if p.greedy:  # all the mass is on the largest
            assert float(distribution[i][x == x.max()].sum()) == pytest.approx(1.0)
            continue
        expected[kept] = ((x[kept] - x.max()) / max(p.temperature, 1e-6)).exp()
        torch.testing.assert_close(distribution[i], expected / expected.sum(), atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("seed", range(6))
def test_company_and_variants_do_not_matter(seed: int) -> None:
    """A row alone, in company, with padding and in every variant that covers its needs: the same tokens and bits."""
    case = Case(seed, num_rows=6)
    sampler = Sampler(case.columns)
    expected = sampler.best(case.logits.clone(), case.rows, Needs(True, True), 2)
    padding = torch.tensor([-1, -1], dtype=torch.int32)
    for i, p in enumerate(case.params):
        own = Needs.of([p])
        for needs in {own, Needs(True, own.adjusted), Needs(own.truncated, True)}:
            rows = Rows(*(c[i : i + 1] for c in case.rows[:3]), case.rows.drafts)
            found = sampler.best(case.logits[i : i + 1].clone(), rows, needs, 2)
            assert all(same_bits(a, b[i : i + 1]) for a, b in zip(found, expected, strict=True))
            padded = Rows(*(torch.cat((padding, c[i : i + 1])) for c in case.rows[:3]), case.rows.drafts)
            logits = case.logits[[0, 0, i]]
            found = sampler.best(logits, padded, needs, 2)
            assert all(same_bits(a[2], b[i]) for a, b in zip(found, expected, strict=True))
            assert bool((found[0] < case.vocab_size).all())


def test_the_order_of_rows_does_not_matter() -> None:
    case = Case(4, num_rows=30, vocab_size=1000)
    order = torch.tensor(random.Random(4).sample(range(30), 30))
    rows = Rows(*(column[order] for column in case.rows[:3]), case.rows.drafts)
    tokens = Sampler(case.columns).choose(case.logits.clone(), case.rows, case.needs)
    assert torch.equal(Sampler(case.columns).choose(case.logits[order], rows, case.needs), tokens[order])


@pytest.mark.parametrize("seed", range(3))
def test_the_size_of_parts_does_not_matter(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Many rows are adjusted and truncated in parts: catches a part that takes parameters of another."""
    case = Case(seed, num_rows=30)
    whole, parts = case.logits.clone(), case.logits.clone()
    expected = Sampler(case.columns).best(whole, case.rows, Needs(True, True), 2)
    monkeypatch.setattr("ssd.kernels.cpu.sampling._PART", 4 * case.vocab_size)
    found = Sampler(case.columns).best(parts, case.rows, Needs(True, True), 2)
    assert all(same_bits(a, b) for a, b in zip((parts, *found), (whole, *expected), strict=True))


def test_rows_without_adjustments_keep_their_bits() -> None:
    columns = SamplingColumns(2, 50, CPU)
    columns.set(0, SamplingParams(repetition_penalty=2.0), 0, [1], [2], ())
    columns.set(1, SamplingParams(), 0, [1], [2], ())
    logits = torch.randn(2, 50)
    adjusted = logits.clone()
    Sampler(columns).adjust(adjusted, Rows(torch.tensor([0, 1]), torch.tensor([2, 2])))
    assert same_bits(adjusted[1], logits[1])
    assert not torch.equal(adjusted[0], logits[0])


def test_rows_without_a_choice() -> None:
    """NaN or +inf anywhere, or -inf everywhere."""
    columns = SamplingColumns(2, 300, CPU)
    columns.set(1, SamplingParams(temperature=1.0, top_p=0.9), 0, [1], (), ())
    logits = torch.randn(8, 300)
    logits[0], logits[2:4, 299], logits[4:6, 7], logits[6] = torch.nan, torch.nan, torch.inf, -torch.inf
    rows = Rows(torch.tensor([0, 1] * 4, dtype=torch.int32), torch.arange(8, dtype=torch.int32))
    tokens = Sampler(columns).choose(logits, rows, Needs(truncated=True)).tolist()
    assert [token < 0 for token in tokens] == [True, False, True, True, True, True, True, False]


def test_a_score_of_minus_infinity_comes_with_token_0() -> None:
    columns = SamplingColumns(1, 3, CPU)
    columns.set(0, SamplingParams(temperature=1.0, top_k=1), 0, [1], (), ())
    rows = Rows(torch.tensor([0], dtype=torch.int32), torch.tensor([1], dtype=torch.int32))
    tokens, scores = Sampler(columns).best(torch.tensor([[1.0, 5.0, 2.0]]), rows, Needs(truncated=True), 5)
    assert tokens.tolist() == [[1, 0, 0, 0, 0]]
    assert scores[0, 1:].tolist() == [-math.inf] * 4
    nothing = torch.full((1, 3), -torch.inf)
    assert Sampler(columns).choose(nothing, rows, Needs(truncated=True)).tolist() == [-1]


def test_tables_are_allocated_when_they_are_needed() -> None:
    columns = SamplingColumns(2, 10, CPU)
    columns.set(0, SamplingParams(temperature=1.0, top_p=0.5), 0, [1], (), STOPS)
    columns.count(torch.tensor([0]), torch.tensor([1]), torch.tensor([True]))
    assert columns.counts is None
    columns.set(1, SamplingParams(min_tokens=1), 0, [1], (), STOPS)
    assert columns.counts is not None
    assert columns.bias is not None


def test_counting_decided_tokens_is_setting_them_as_output() -> None:
    params = SamplingParams(frequency_penalty=1.0, repetition_penalty=1.5)
    columns, expected = SamplingColumns(3, 10, CPU), SamplingColumns(3, 10, CPU)
    for slot in (0, 2):
        columns.set(slot, params, 0, [1, 2], [2], STOPS)
        expected.set(slot, params, 0, [1, 2], [2, 9, 9] if slot == 2 else [2], STOPS)
    slots, tokens = torch.tensor([2, 2, 2, -1, 2, 1]), torch.tensor([9, 9, 4, 5, 11, 3])
    columns.count(slots.int(), tokens.int(), torch.tensor([True, True, False, False, True, True]))
    assert columns.counts is not None
    assert expected.counts is not None
    assert torch.equal(columns.counts, expected.counts)


def test_integers_and_huge_values_are_taken_as_they_are() -> None:
    """Whatever is legal: they must not raise for the whole batch."""
    plain = SamplingParams(temperature=1.0, top_k=200, logit_bias={3: 2.0}, presence_penalty=1.0, min_tokens=9)
    odd = SamplingParams(
        temperature=1, top_k=2**63, logit_bias={3: 2}, presence_penalty=1, min_tokens=2**63, max_new_tokens=2**64
    )
    logits = torch.randn(1, 200, generator=torch.Generator().manual_seed(1))
    found = []
    for params in (plain, odd):
        columns = SamplingColumns(1, 200, CPU)
        columns.set(0, params, 2**64 - 1, [1], [2], [3])
        rows = Rows(torch.tensor([0], dtype=torch.int32), torch.tensor([2], dtype=torch.int32))
        found.append(Sampler(columns).best(logits.clone(), rows, Needs.of([params]), 5)[0].tolist())
    assert found[0] == found[1]


def test_draws_follow_the_distribution() -> None:
    n, weights = 4000, torch.tensor([0.1, 0.5, 0.0, 0.4], dtype=torch.float64)
    columns = SamplingColumns(1, 4, CPU)
    columns.set(0, SamplingParams(temperature=1.0), 7, [1], (), ())
    rows = Rows(torch.zeros(n, dtype=torch.int32), torch.arange(n, dtype=torch.int32))
    drawn = Sampler(columns).draw(weights.expand(n, 4), rows, Stream.DRAFT)
    assert drawn.dtype is torch.int64
    observed = drawn.bincount(minlength=4).tolist()
    assert observed[2] == 0
    assert chi_squared_p([observed[t] for t in (0, 1, 3)], [0.1, 0.5, 0.4]) > 1e-4
    other = Sampler(columns).draw(weights.expand(n, 4), rows, Stream.RECOVERY)
    assert not torch.equal(drawn, other)


def test_reweighted_distributions_add_up_to_one() -> None:
    weights = torch.tensor([[0.5, 0.3, 0.2], [1.0, 0.0, 0.0]], dtype=torch.float64)
    assert reweighted(weights, 1.0, 1) is weights
    expected = torch.tensor([[0.25 / 0.75, 0.4, 0.2 / 0.75], [1.0, 0.0, 0.0]], dtype=torch.float64)
    torch.testing.assert_close(reweighted(weights, 0.5, 1), expected)
    torch.testing.assert_close(reweighted(weights, 0.0, 1)[1], weights[1])


def test_logprobs_are_of_the_model_itself() -> None:
    logits = torch.randn(3, 20)
    logprob, ids, values = top_logprobs(logits, torch.tensor([4, 0, 19]), 5)
    expected = logits.double().log_softmax(-1)
    torch.testing.assert_close(logprob, expected[torch.arange(3), torch.tensor([4, 0, 19])])
    torch.testing.assert_close(values, expected.sort(descending=True).values[:, :5])
    assert torch.equal(ids, expected.argsort(descending=True)[:, :5])
    assert top_logprobs(logits, torch.tensor([4, 0, 19]), 0)[1].shape == (3, 0)


# --- the distribution of what is chosen -------------------------------------------------------------------------------

LOGITS = [1.5, 0.25, -0.5, 2.0, 0.75, -1.0, 1.25, 0.0, -0.25, 1.0]
PROMPT, OUTPUT = [3, 3, 0, 9], [6, 6, 6, 4]
OPTIONS: dict[str, dict[str, Any]] = {
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
    "forbidden by bias": {"logit_bias": {3: -math.inf, 0: -math.inf, 1: 0.5}},
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
        "logit_bias": {2: 1.3, 9: -math.inf},
        "min_tokens": 10,
    },
}


def chosen(
    params: SamplingParams, n: int, output: Seq[int] = OUTPUT, drafted: Seq[int] = (), logits: Seq[float] = LOGITS
) -> list[int]:
    """What n sequences with the seeds 0, 1, … choose after the same tokens."""
    columns = SamplingColumns(n, len(logits), CPU)
    columns.set(0, params, 0, PROMPT, output, STOPS)
    for table in (columns.packed, columns.bias, columns.counts):
        if table is not None:
            table[1:] = table[0].clone()  # setting thousands of slots one by one takes most of a test's time
    columns.seed_key[:] = torch.tensor([noise.signed(noise.seed_key(seed)) for seed in range(n)])
    rows = Rows(
        slots=torch.arange(n, dtype=torch.int32),
        positions=torch.full((n,), len(PROMPT) + len(output) + len(drafted), dtype=torch.int32),
        num_drafted=torch.full((n,), len(drafted), dtype=torch.int32),
        drafts=torch.tensor([[*drafted, 0]] * n, dtype=torch.int32),
    )
    return Sampler(columns).choose(torch.tensor([logits] * n), rows, Needs.of([params])).tolist()


def counts(tokens: Seq[int], vocab_size: int = len(LOGITS)) -> list[int]:
    return torch.bincount(torch.tensor(tokens), minlength=vocab_size).tolist()


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_choices_follow_each_parameter(options: dict[str, Any]) -> None:
    """3,000 seeds against the documented distribution, by chi-squared.

    False alarm: 1e-7 for the distribution; a token of 1 % or more that is never drawn, below 1e-12.
    """
    params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": 100, **options})
    expected = naive_distribution(LOGITS, params, PROMPT, OUTPUT)
    observed = counts(chosen(params, 3000))
    assert {t for t, c in enumerate(observed) if c} <= {t for t, p in enumerate(expected) if p > 0}
    assert {t for t, p in enumerate(expected) if p >= 0.01} <= {t for t, c in enumerate(observed) if c}
    assert chi_squared_p(observed, expected) > 1e-7


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_drafted_tokens_count_as_output(options: dict[str, Any]) -> None:
    """Catches verification by another rule than decoding: penalties, min_tokens and noise must see the draft."""
    params = SamplingParams(**{"temperature": 1.0, "max_new_tokens": 100, **options})
    drafted = (3, 8, 8)
    for j in range(4):
        assert chosen(params, 100, drafted=drafted[:j]) == chosen(params, 100, [*OUTPUT, *drafted[:j]])


def test_choices_follow_the_parameters_along_a_sequence() -> None:
    """Catches noise that repeats: one seed, 3,000 positions. False alarm: 1e-7."""
    options = OPTIONS["everything"] | {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    params = SamplingParams(**options | {"min_tokens": 0})
    columns = SamplingColumns(1, len(LOGITS), CPU)
    columns.set(0, params, 5, PROMPT, (), STOPS)
    rows = Rows(torch.zeros(3000, dtype=torch.int32), torch.arange(4, 3004, dtype=torch.int32))
    observed = Sampler(columns).choose(torch.tensor([LOGITS] * 3000), rows, Needs.of([params])).tolist()
    assert chi_squared_p(counts(observed), naive_distribution(LOGITS, params, PROMPT, [])) > 1e-7


params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 2, 4, 50]),
    top_p=st.sampled_from([1.0, 0.95, 0.61, 0.2]),
    min_p=st.sampled_from([0.0, 0.07, 0.4]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, -0.3, 0.45]),
    logit_bias=st.dictionaries(st.integers(0, 9), st.sampled_from([-math.inf, -1.0, 0.9]), max_size=3),
    min_tokens=st.sampled_from([0, 5, 20]),
    max_new_tokens=st.just(100),
)
rows_of_logits = st.lists(st.integers(-40, 40).map(lambda i: i / 8), min_size=10, max_size=10)


@given(rows_of_logits, params_of_any_kind, st.lists(st.integers(0, 9), max_size=4))
def test_combinations_stay_in_the_support(logits: list[float], params: SamplingParams, drafted: list[int]) -> None:
    """Catches parameters applied in the wrong order, and ties cut differently: 60 seeds must stay in the support."""
    margin: list[float] = []
    expected = naive_distribution(logits, params, PROMPT, [*OUTPUT, *drafted], margin)
    assume(min(margin, default=1.0) > 1e-5)  # float32 may see a tie where float64 sees none, and the other way round
    assert set(chosen(params, 60, OUTPUT, drafted, logits)) <= {t for t, p in enumerate(expected) if p > 0}


@given(rows_of_logits, params_of_any_kind)
def test_greedy_ignores_truncation_and_seed(logits: list[float], params: SamplingParams) -> None:
    """Temperature 0 is the argmax of the adjusted logits, whatever top_k, top_p, min_p and seed."""
    greedy = replace(params, temperature=0.0)
    [token] = set(chosen(greedy, 3, logits=logits))
    assert [token] == chosen(replace(greedy, top_k=0, top_p=1.0, min_p=0.0), 1, logits=logits)
    z = adjusted(logits, greedy, PROMPT, OUTPUT)
    assert z[token] >= max(z) - 1e-5


def test_ties_go_to_the_lowest_ids() -> None:
    """Catches a threshold instead of a rank: of equal tokens the lowest ids stay, and no more than k."""
    tied = [0.0, 1.0, 0.0, 1.0, 1.0, 1.0, 0.0, 0.0, 0.0, 0.0]
    assert set(chosen(SamplingParams(), 5, logits=tied)) == {1}
    assert set(chosen(SamplingParams(temperature=1.0, top_k=3), 600, logits=tied)) == {1, 3, 4}


@pytest.mark.parametrize("temperature", [1e-3, 1e-6, 1e-20, 1e-38, 1e-45, 1e-60, 5e-324])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """Catches overflow of logits / temperature in float32: several infinities, or NaN, in place of one maximum."""
    logits = [-3.0, 0.0, 4.0, 5.0, 4.5, -math.inf, 0.0, 0.0, 0.0, 0.0]
    assert chosen(SamplingParams(temperature=temperature), 50, (), (), logits) == [3] * 50


@pytest.mark.parametrize("tiny", [1e-30, 1e-38, 1e-45, 1e-60, 5e-324])
def test_tiny_top_p_keeps_the_likeliest_token(tiny: float) -> None:
    """Catches a bound that is 0 in float32, and keeps none."""
    assert chosen(SamplingParams(temperature=1.0, top_p=tiny), 50) == chosen(SamplingParams(), 50)


@pytest.mark.parametrize("tiny", [1e-30, 1e-38, 1e-45, 1e-60, 5e-324])
def test_tiny_repetition_penalties_choose_what_was_seen(tiny: float) -> None:
    """Catches overflow of logits / penalty: the larger of two infinities is not known."""
    logits = [1.0, 3.0, 4.0, 1.0, *[5.0] * 5, 1.0]  # of the prompt: 1
    for seen in ((1, 2), (2, 1)):
        assert chosen(SamplingParams(temperature=1.0, repetition_penalty=tiny), 50, seen, (), logits) == [2] * 50


@pytest.mark.parametrize("shift", [-1e4, -100.0, 300.0, 1e4])
def test_the_level_of_the_logits_does_not_matter(shift: float) -> None:
    """Catches exponentials of raw logits (overflow). False alarm: 1e-7. (Quarters survive the shift in float32.)"""
    params = SamplingParams(temperature=0.5, top_p=0.9)
    observed = counts(chosen(params, 2000, logits=[x + shift for x in LOGITS]))
    assert chi_squared_p(observed, naive_distribution(LOGITS, params, [], [])) > 1e-7


def test_biases_are_read_once_for_all_samples_of_a_request() -> None:
    """Reading a bias for every token takes milliseconds, on the engine's thread."""

    class Biases(dict[int, float]):
        reads = 0

        def __iter__(self) -> Iterator[int]:
            self.reads += 1
            return super().__iter__()

    params, read = SamplingParams(logit_bias={1: 1.5, 9: -2.0, 900: 3.0}), Biases({1: 1.5, 9: -2.0, 900: 3.0})
    object.__setattr__(params, "logit_bias", read)
    columns = SamplingColumns(3, 16, torch.device("cpu"))
    for slot in range(3):
        columns.set(slot, params, slot, [1], [], ())
    assert read.reads == 1
    assert columns.bias is not None
    assert columns.bias[2].tolist() == [0, 1.5, *[0] * 7, -2.0, *[0] * 6]  # 900 is no token of this model
