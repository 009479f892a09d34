"""The parts of drafting: the program against the model itself, how tokens are chosen, which outcomes are prepared."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from fakes import make_sequence
from hypothesis import given, settings
from hypothesis import strategies as st

from ssd import LLM, SamplingParams
from ssd.core import Work
from ssd.decoding import law, noise
from ssd.decoding.law import Row
from ssd.drafting.ahead import AheadDrafter, Worth
from ssd.drafting.choice import Chooser, Needs, Rows, adjustments
from ssd.drafting.fan_out import Adaptive, Geometric, Listed, Outlook
from ssd.drafting.model import DraftModel, Mirror
from ssd.drafting.program import RANKS
from ssd.kernels.choice import best_tokens

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
K = 4


# --- the program ------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Iterator[DraftModel]:
    """The bundled draft, as the engine builds it."""
    speculation = {"mode": "ssd", "draft": "tiny-llama-draft", "k": K, "placement": "inline", "budget": 12}
    with LLM("tiny-llama", device="cpu", max_model_len=256, max_num_seqs=3, speculation=speculation) as llm:
        drafter = llm.engine.round.drafter
        assert isinstance(drafter, AheadDrafter)
        yield drafter.model


@pytest.fixture(scope="module")
def alone() -> Iterator[LLM]:
    """The same model by itself."""
    with LLM("tiny-llama-draft", device="cpu", max_model_len=256, max_num_seqs=32) as llm:
        yield llm


TEXTS = [[5, 6, 7, 8, 9, 10, 11] * 5, [900, 12, 77], [2000, 31, 9] * 21]


def continued(llm: LLM, tokens: list[int], count: int, params: SamplingParams) -> list[int]:
    """What the model writes next, with the noise of the positions where it writes it."""
    params = dataclasses.replace(params, max_new_tokens=count, ignore_eos=True)
    return llm.generate([tokens], params)[0].token_ids


def mirrors_of(model: DraftModel, params: SamplingParams) -> list[Mirror]:
    mirrors = []
    for i, tokens in enumerate(TEXTS):
        mirror = Mirror.of(make_sequence(tokens, params=params, id=100 + i, seed=params.seed or 0))
        mirror.update(tokens, model.runner.vocab_size)
        assert model.pool.grow(mirror.text, len(tokens) + K)
        mirrors.append(mirror)
    return mirrors


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_write_is_what_the_model_writes(model: DraftModel, alone: LLM, temperature: float) -> None:
    params = SamplingParams(temperature=temperature, seed=3, top_p=0.9)
    mirrors = mirrors_of(model, params)
    run = model.write(mirrors, K)
    for tokens, written in zip(TEXTS, run.tokens, strict=True):
        assert written == continued(alone, tokens, K, params)
    assert run.seconds > 0
    for mirror in mirrors:
        model.pool.release(mirror.text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_every_branch_is_what_the_model_writes_there(model: DraftModel, alone: LLM, temperature: float) -> None:
    """Forks at any place of drafts of different lengths, each continued as if it had been decided."""
    params = SamplingParams(temperature=temperature, seed=3)
    mirrors = mirrors_of(model, params)
    drafts = [[40, 41, 42, 43], [50], []]
    forks = [[(0, 0), (0, 1), (2, 0), (4, 0), (4, 2)], [(1, 0), (0, 3)], [(0, 0), (0, 1), (0, 15)]]
    run = model.branch(mirrors, drafts, forks, K)
    for lane, (tokens, draft) in enumerate(zip(TEXTS, drafts, strict=True)):
        for i, (after, rank) in enumerate(forks[lane]):
            root, *written = run.tokens[lane * run.form.width + i]
            assert root == run.likeliest[lane][after][rank]
            assert written == continued(alone, [*tokens, *draft[:after], root], K, params)
        for after in range(len(draft) + 1):
            ranked, best = run.likeliest[lane][after], continued(alone, [*tokens, *draft[:after]], 1, params)[0]
            assert len(set(ranked)) == RANKS
            assert draft[after : after + 1] != ranked[:1]
            assert best == ranked[0] or [best] == draft[after : after + 1]
    for mirror, draft in zip(mirrors, drafts, strict=True):
        assert mirror.ahead == draft  # their KV is there, and stays if they stand
        mirror.update([*mirror.text.tokens, *draft[:2], 7], model.runner.vocab_size)
        assert mirror.text.num_pending == 1
        model.pool.release(mirror.text)


def test_an_interrupted_run_keeps_the_depth_it_has(model: DraftModel) -> None:
    mirrors, asked = mirrors_of(model, SamplingParams()), iter([False, False, True])
    model.program.interrupted = lambda: next(asked)
    try:
        run = model.branch(mirrors, [[40, 41], [], []], [[(0, 0)], [(0, 0)], [(0, 1)]], K)
    finally:
        model.program.interrupted = lambda: False
    assert run.depth == 2
    assert [len(tokens) for tokens in run.tokens] == [3, 3, 3]
    for mirror in mirrors:
        model.pool.release(mirror.text)


# --- choosing ---------------------------------------------------------------------------------------------------------


def rows_for(count: int, temperatures: list[float]) -> Rows:
    seeds = torch.tensor([noise.signed(noise.seed_key(i)) for i in range(count)], device=DEVICE)
    positions = torch.arange(count, dtype=torch.int32, device=DEVICE) * 37
    temperature = torch.tensor(list(itertools.islice(itertools.cycle(temperatures), count)), device=DEVICE)
    ones, zeros = torch.ones(count, device=DEVICE), torch.zeros(count, device=DEVICE)
    return Rows(seeds, positions, temperature, zeros, ones, zeros.int())


@pytest.mark.parametrize("count", [2, RANKS])
@pytest.mark.parametrize("vocab", [1000, 2500])
def test_the_kernel_chooses_as_torch_does(count: int, vocab: int) -> None:
    """Triton's interpreter on a CPU, the device otherwise."""
    logits = torch.randn(5, vocab, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    rows = rows_for(5, [0.0, 1.0, 0.5])
    excluded = torch.tensor([-1, 3, int(logits[2].argmax()), -1, 999], dtype=torch.int32, device=DEVICE)
    columns = (rows.seeds, rows.positions, rows.temperature, excluded)
    ids, scores = best_tokens(logits, *columns, count, noise.constants())
    on_cpu = Rows(*(getattr(rows, f.name).cpu() for f in dataclasses.fields(Rows)))
    expected = Chooser().likeliest(logits.cpu().clone(), on_cpu, Needs(sampled=True), excluded.cpu(), count)
    assert ids.cpu().tolist() == expected.tolist()
    assert (scores[:, :-1] >= scores[:, 1:]).all()


def test_a_drawn_token_comes_with_the_law_that_it_was_drawn_from() -> None:
    logits, rows = torch.randn(4, 50), rows_for(4, [1.0, 0.7])
    rows = Rows(*(getattr(rows, f.name).cpu() for f in dataclasses.fields(Rows)))
    chosen = Chooser(drawn=True, saguaro_c=0.25).choose(logits.clone(), rows, Needs(sampled=True))
    assert chosen.laws is not None
    assert torch.allclose(chosen.laws.sum(-1), torch.ones(4, dtype=torch.float64))
    plain = Chooser(drawn=True).choose(logits.clone(), rows, Needs(sampled=True))
    assert plain.laws is not None
    top = plain.laws.topk(3).indices
    assert (chosen.laws.gather(1, top) < plain.laws.gather(1, top)).all()


some_params = st.builds(
    SamplingParams,
    repetition_penalty=st.sampled_from([1.0, 1.3]),
    presence_penalty=st.sampled_from([0.0, 0.7]),
    frequency_penalty=st.sampled_from([0.0, 0.4]),
    logit_bias=st.sampled_from([{}, {3: -math.inf}]),
    min_tokens=st.sampled_from([0, 9]),
    max_new_tokens=st.just(20),
)


@settings(max_examples=60, deadline=None)
@given(some_params, st.lists(st.integers(0, 19), min_size=1, max_size=12), st.integers(1, 6))
def test_adjustments_are_those_of_the_target(params: SamplingParams, tokens: list[int], prompt: int) -> None:
    """For the token after the decided ones they are the very same."""
    prompt = min(prompt, len(tokens))
    sequence = make_sequence(tokens[:prompt], tokens[prompt:], params=params, stop_token_ids=frozenset({5, 6}))
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(len(tokens)))
    expected = logits.clone()
    law._adjust(expected, 0, Row(sequence))
    ids, factors, added = adjustments(sequence)
    for token, factor, more in zip(ids, factors, added, strict=True):
        value = logits[0, token]
        logits[0, token] = (value / factor if value > 0 else value * factor) + more
    assert torch.allclose(logits, expected)


# --- which outcomes ---------------------------------------------------------------------------------------------------


POLICIES = [Listed((3, 2, 1, 0, 4), (9, 0, 0, 0, 0)), Geometric(), Adaptive()]


@given(
    st.sampled_from(POLICIES),
    st.lists(st.floats(0, 20), max_size=4),
    st.booleans(),
    st.integers(1, 60),
    st.lists(st.tuples(st.integers(0, 4), st.none() | st.integers(0, RANKS - 1)), max_size=30),
)
def test_plans_are_within_their_means(
    policy: Listed | Geometric | Adaptive,
    confidence: list[float],
    hit: bool,
    budget: int,
    past: list[tuple[int, int | None]],
) -> None:
    outlook = Outlook()
    for accepted, rank in past:
        outlook.learn([1.0] * 4, accepted, rank)
    forks = policy.plan(outlook, confidence, hit, budget)
    assert len(forks) == len(set(forks)) <= budget
    assert all(0 <= after <= len(confidence) and 0 <= rank < RANKS for after, rank in forks)
    if not isinstance(policy, Adaptive):  # which goes by what it has seen
        assert all(rank == 0 or (after, rank - 1) in forks for after, rank in forks)


def test_lists_differ_after_a_miss() -> None:
    policy = Listed((1, 1, 1), (3, 0, 0))
    assert sorted(policy.plan(Outlook(), [1.0, 1.0], True, 9)) == [(0, 0), (1, 0), (2, 0)]
    assert sorted(policy.plan(Outlook(), [1.0, 1.0], False, 9)) == [(0, 0), (0, 1), (0, 2)]


def test_geometric_follows_the_formula() -> None:
    """F_k is proportional to a^(k/(1+r)), the last one also to (1-a)^(-1/(1+r))."""
    outlook = Outlook()
    a, r = outlook.acceptance.value, outlook.tail_exponent
    weights = [a ** (k / (1 + r)) * ((1 - a) ** (-1 / (1 + r)) if k == 4 else 1) for k in range(5)]
    forks = Geometric().plan(outlook, [1.0] * 4, True, 24)
    counts = [sum(after == k for after, _ in forks) for k in range(5)]
    assert sum(counts) == 24
    assert all(abs(n - 24 * w / sum(weights)) < 1.5 for n, w in zip(counts, weights, strict=True))


def test_adaptive_looks_where_the_draft_was_unsure() -> None:
    outlook = Outlook()
    for _ in range(300):
        outlook.learn([9.0, 0.01], 1, 0)  # a sure token stands, an unsure one falls
    forks = Adaptive().plan(outlook, [9.0, 9.0, 0.01, 9.0], True, 4)
    assert forks[0] == (2, 0)


def test_a_drafter_that_prepares_nothing_reads_no_token_twice(model: DraftModel) -> None:
    """Catches a whole draft that stood, its bonus and one token more: too many for one reading."""
    drafter = AheadDrafter(model, Adaptive(), lookahead=K, budget=0)
    sequence = make_sequence(TEXTS[0], [8], id=500)
    sequence.num_computed = len(sequence.tokens) - 1
    work = Work(sequence, 1, K)
    [proposal] = drafter.propose([work])
    assert len(proposal.token_ids) == K
    drafter.anticipate([work.with_proposal(proposal)])
    assert model._mirrors[500].text.num_computed == len(sequence.tokens)
    drafter.forget(sequence)


def test_a_preparation_that_is_waited_for_is_narrower_next_time(
    model: DraftModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter = AheadDrafter(model, Adaptive(), lookahead=K, budget=12)
    sequence = make_sequence(TEXTS[0], [8], id=501)

    def width(late: bool) -> int:
        monkeypatch.setattr(model.program, "interrupted", lambda: late)
        sequence.num_computed = len(sequence.tokens) - 1
        work = Work(sequence, 1, K)
        drafter.anticipate([work.with_proposal(drafter.propose([work])[0])])
        prepared = drafter.prepared(sequence)
        sequence.tokens.append(9)
        return len(prepared.forks) if prepared is not None else 0

    widths = [width(late=True) for _ in range(8)]
    assert widths[0] == 12
    assert widths == sorted(widths, reverse=True)
    assert widths[-1] == 2
    widths = [width(late=False) for _ in range(48)]
    assert widths == sorted(widths)
    assert widths[-1] == 12
    drafter.forget(sequence)


def test_waiting_pays_only_while_it_does() -> None:
    worth = Worth()
    assert worth.waiting_pays(1, 1)  # nothing is known yet
    worth.round_seconds.add(0.020)
    worth.write_seconds.add(0.005)
    for origin, tokens in (("jit", 3.0), ("ngram", 1.2), ("hit", 3.5)):
        worth.yields[origin].add(tokens)
    assert worth.waiting_pays(1, 1)
    assert not worth.waiting_pays(1, 16)  # fifteen would wait for one
    assert worth.waiting_pays(16, 16)


def test_a_draft_ends_with_its_stop_and_its_room() -> None:
    sequence = make_sequence([1, 2, 3], stop_token_ids=frozenset({9}))
    assert Work(sequence, 1, 3).usable([5, 6, 7, 8]) == (5, 6, 7)
    assert Work(sequence, 1, 4).usable([5, 9, 7, 8]) == (5, 9)
    assert Work(sequence, 1, 4).usable([]) == ()
