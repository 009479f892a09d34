"""The rejection rule keeps the target's distribution, by enumeration and by chi-squared; known wrong rules are caught.

Enumeration: the real rule runs on random numbers that are revealed only as far as comparisons ask for them, and every
answer is followed with its exact probability. So the distribution of the emitted tokens comes out without sampling
error, and numbers that are used twice show as what they are: dependent.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from bits import same_bits
from conftest import mostly_slow
from fakes import (
    CPU,
    VOCAB,
    ScriptedDrafter,
    TableModel,
    chi_squared_p,
    logits_after,
    make_harness,
    make_runner,
    make_sequence,
    state_of,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from naive_distribution import naive_distribution

from ssd.core import Outcome, Proposal, RequestOutput, SamplingParams, Sequence, Work
from ssd.decoding import rejection
from ssd.decoding.drafter import Drafter
from ssd.decoding.rejection import RejectionTarget
from ssd.decoding.round import Round
from ssd.drafting.fan_out import Adaptive, FanOut, Geometric
from ssd.drafting.model import DraftModel, ModelDrafter
from ssd.drafting.runner import DraftRunner
from ssd.drafting.shapes import RunShapes
from ssd.drafting.ssd import SSDDrafter
from ssd.drafting.suffix import SuffixDrafter
from ssd.engine.engine import Engine
from ssd.engine.scheduler import Scheduler
from ssd.execution.state import SequenceState
from ssd.execution.target import Target
from ssd.kv.blocks import BlockPool
from ssd.sampling.noise import Stream, gumbel, position_key, uniform
from ssd.sampling.sampler import Needs, Rows, Sampler, SamplingColumns, reweighted

NEVER = -math.inf
SLIVER = 1e-15  # probabilities below this are rounding, and not followed


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny tensors: more threads only wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def make_target(
    model: TableModel, num_slots: int, *, lookahead: int, max_len: int, kind: type[Target] = RejectionTarget
) -> Target:
    vocab_size = model.config.vocab_size
    state = SequenceState(num_slots, max_len=max_len, lookahead=lookahead, vocab_size=vocab_size, device=CPU)
    return kind(make_runner(model, state, num_blocks=num_slots), state)


@torch.inference_mode()
def verified(target: Target, works: Seq[Work]) -> list[Outcome | None]:
    return target.decide(target.forward(target.stage(works))).collect()


# --- numbers that are revealed by and by ------------------------------------------------------------------------------

Key = tuple[int, Stream]  # position and purpose: the noise is a function of them (and the seed)
Known = dict[Key, tuple[float, float]]  # where a uniform number is known to lie


@dataclass
class Fate:
    """One way in which the random numbers of a sequence can turn out, and its probability."""

    script: list[int]  # the answers to give first; then always the first possible one
    known: Known
    probability: float = 1.0
    trail: list[tuple[list[int], int]] = field(default_factory=list)  # possible answers, and the one given

    def piece(self, key: Key, cuts: Seq[float]) -> int:
        """Which piece of [0, 1], cut into these, holds the number: it is known from now on."""
        low, high = self.known.get(key, (0.0, 1.0))
        pieces = [(max(a, low), min(b, high)) for a, b in itertools.pairwise([0.0, *cuts, 1.0])]
        possible = [i for i, (a, b) in enumerate(pieces) if b - a > SLIVER]
        chosen = self.script[len(self.trail)] if len(self.trail) < len(self.script) else possible[0]
        self.trail.append((possible, chosen))
        self.known[key] = pieces[chosen]
        self.probability *= (pieces[chosen][1] - pieces[chosen][0]) / (high - low)
        return chosen

    def draw(self, key: Key, distribution: Seq[float]) -> int:
        ends = list(itertools.accumulate(distribution))
        return self.piece(key, [min(1.0, end / ends[-1]) for end in ends[:-1]])

    def next_script(self) -> list[int] | None:
        """Another way that has not been followed yet; None when this was the last."""
        for i, (possible, chosen) in reversed(list(enumerate(self.trail))):
            if chosen != possible[-1]:
                return [*(c for _, c in self.trail[:i]), possible[possible.index(chosen) + 1]]
        return None


@dataclass(frozen=True)
class Hidden:
    """A uniform number times a factor, in place of the real one: comparing it takes both branches, one a visit."""

    fate: Fate
    key: Key
    factor: float = 1.0

    def __mul__(self, factor: float) -> Hidden:
        return Hidden(self.fate, self.key, self.factor * factor)

    def __lt__(self, bound: float) -> bool:
        if self.factor == 0.0:
            return bound > 0.0
        return self.fate.piece(self.key, [min(1.0, bound / self.factor)]) == 0


class World:
    """Stands in for the noise; a sequence's seed, which is also its slot, tells whose fate it is."""

    def __init__(self) -> None:
        self.fates: list[Fate] = []

    def uniform(self, seed: int, position: int) -> Hidden:
        return Hidden(self.fates[seed], (position, Stream.ACCEPT))


class WorldSampler(Sampler):
    """The sampler, with draws that are followed in every way."""

    def __init__(self, columns: SamplingColumns, world: World) -> None:
        super().__init__(columns)
        self.world = world

    def draw(self, distribution: torch.Tensor, rows: Rows, stream: Stream) -> torch.Tensor:
        places = zip(rows.slots.tolist(), rows.positions.tolist(), distribution.tolist(), strict=True)
        return torch.tensor([self.world.fates[slot].draw((position, stream), p) for slot, position, p in places])

    def choose(self, logits: torch.Tensor, rows: Rows, needs: Needs) -> torch.Tensor:
        """What rows without drafts choose; nobody asks for the others."""
        slots = rows.slots.tolist()
        chosen = torch.zeros(len(slots), dtype=torch.int32)
        times = Counter(slots)
        alone = [i for i, slot in enumerate(slots) if times[slot] == 1]
        if alone:
            own = Rows(rows.slots[alone], rows.positions[alone])
            chosen[alone] = self.draw(self.distribution(logits[alone], own, needs), own, Stream.CHOICE).int()
        return chosen


# --- what is enumerated -----------------------------------------------------------------------------------------------

PROMPT = (0,)
MOST_STATES = 512  # in one batch


@dataclass(frozen=True)
class Case:
    """A target, a draft, and how the draft proposes."""

    vocab: int = 3
    k: int = 2
    length: int = 4  # emitted tokens that are looked at
    target: dict[str, Any] = field(default_factory=dict)  # sampling parameters
    draft: dict[str, Any] = field(default_factory=dict)
    c: float = 1.0
    fan_out: int = 1
    looked_up: bool = False  # proposals without distributions
    ragged: bool = False
    equal: bool = False  # q is p
    seed: int = 0

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**{"temperature": 1.0, **self.target})

    @property
    def target_model(self) -> TableModel:
        return TableModel(self.vocab, seed=2 * self.seed)

    @property
    def draft_model(self) -> TableModel:
        return TableModel(self.vocab, seed=2 * self.seed + (0 if self.equal else 1))


class TableDrafter(Drafter):
    """Draws from the distributions of a table, or looks tokens up in it."""

    stream = Stream.DRAFT

    def __init__(self, case: Case, world: World) -> None:
        super().__init__()
        self.case = case
        self.world = world
        table = case.draft_model.table
        count, params = table.shape[0] * table.shape[1], SamplingParams(**{"temperature": 1.0, **case.draft})
        columns = SamplingColumns(1, case.vocab, CPU)
        columns.set(0, params, 0, PROMPT, (), ())
        rows = Rows(torch.zeros(count, dtype=torch.int32), torch.zeros(count, dtype=torch.int32))
        q = Sampler(columns).distribution(table.flatten(0, 1).clone(), rows, Needs.of([params]))
        self.q = reweighted(q, case.c, case.fan_out).view(table.shape)  # [position, token, next]
        self.as_lists = self.q.tolist()

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return [self._propose(work) for work in works]

    def _propose(self, work: Work) -> Proposal:
        tokens, start = list(work.sequence.tokens), len(work.sequence.tokens)
        while len(tokens) < start + work.lookahead and not (
            self.case.ragged and len(tokens) > start and not tokens[-1]
        ):
            tokens.append(self._token(work.sequence, tokens))
        places = [(i - 1, tokens[i - 1]) for i in range(start, len(tokens))]
        q = self._declared(torch.stack([self.q[place] for place in places])) if places else None
        return Proposal(tuple(tokens[start:]), None if self.case.looked_up else q)

    def _token(self, sequence: Sequence, tokens: list[int]) -> int:
        q = self.as_lists[len(tokens) - 1][tokens[-1]]
        if self.case.looked_up:
            return q.index(max(q))
        return self.world.fates[sequence.seed].draw((len(tokens), self.stream), q)

    def _declared(self, q: torch.Tensor) -> torch.Tensor:
        return q


State = tuple[tuple[int, ...], tuple[tuple[Key, tuple[float, float]], ...]]  # emitted, and what is known of the future
Ways = dict[int, set[str]]  # by output position: how it was decided
Mutation = Callable[[pytest.MonkeyPatch, World], None]


def enumerated(case: Case, mutate: Mutation | None = None) -> tuple[dict[tuple[int, ...], float], Ways]:
    """The exact distribution of the first emitted tokens. Many states of a round are one batch: rows are ragged too."""
    world, found, ways = World(), defaultdict[tuple[int, ...], float](float), defaultdict[int, set[str]](set)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection, "uniform", world.uniform)
        if mutate is not None:
            mutate(patch, world)
        target = make_target(case.target_model, MOST_STATES, lookahead=case.k, max_len=16)
        target.sampler = WorldSampler(target.state.sampling, world)
        round_ = Round(target, TableDrafter(case, world))
        frontier: dict[State, float] = {((), ()): 1.0}
        while frontier:
            reached: dict[State, float] = defaultdict(float)
            for before, tokens, fate in every_end(case, world, round_, list(frontier), ways):
                probability = frontier[before] * fate.probability
                if len(tokens) >= case.length:
                    found[tokens[: case.length]] += probability
                else:
                    future = {k: v for k, v in fate.known.items() if k[0] >= len(PROMPT) + len(tokens)}
                    reached[tokens, tuple(sorted(future.items()))] += probability
            frontier = reached
        assert not round_.stats.drafter_failures
    return found, ways


def every_end(
    case: Case, world: World, round_: Round, states: Seq[State], ways: Ways
) -> Iterator[tuple[State, tuple[int, ...], Fate]]:
    """All that one round can make of each state."""
    waiting = [(state, list[int]()) for state in states]  # with the way to follow next
    while waiting:
        batch, waiting = waiting[:MOST_STATES], waiting[MOST_STATES:]
        world.fates = [Fate(script, dict(state[1])) for state, script in batch]
        works = [work_of(case, state[0], i) for i, (state, _) in enumerate(batch)]
        for work in works:
            round_.admit(work.sequence)
        launched = round_.launch(works)
        outcomes, _ = round_.collect(launched)
        for (state, _), fate, work, outcome in zip(batch, world.fates, launched.works, outcomes, strict=True):
            assert outcome is not None
            note(ways, len(state[0]), work.proposal.num_tokens, outcome.num_accepted)
            yield state, (*state[0], *outcome.token_ids), fate
            script = fate.next_script()
            if script is not None:
                waiting.append((state, script))


def work_of(case: Case, emitted: tuple[int, ...], index: int) -> Work:
    sequence = make_sequence(PROMPT, emitted, params=case.params, id=index, seed=index)
    sequence.slot, sequence.kv.blocks = index, [index]
    limit = case.k - sequence.tokens[-1] if case.ragged else case.k
    lookahead = max(0, min(limit, case.length - len(emitted) - 1))  # as the scheduler does
    return Work(sequence, 1, len(sequence.tokens) - 1, lookahead=lookahead, slot=index)


def note(ways: Ways, start: int, drafted: int, accepted: int) -> None:
    for i in range(accepted):
        ways[start + i].add("accepted")
    ways[start + accepted].add("plain" if not drafted else "bonus" if accepted == drafted else "recovery")


def expected(case: Case) -> dict[tuple[int, ...], float]:
    """What the target writes alone: the product of its conditional distributions, computed naively."""
    table, found = case.target_model.table.tolist(), {(): 1.0}
    for position in range(len(PROMPT), len(PROMPT) + case.length):
        longer: dict[tuple[int, ...], float] = {}
        for tokens, probability in found.items():
            last = (*PROMPT, *tokens)[-1]
            conditional = naive_distribution(table[position - 1][last], case.params, PROMPT, tokens)
            longer |= {(*tokens, t): probability * p for t, p in enumerate(conditional) if p > 0}
        found = longer
    return found


def deviation(found: dict[tuple[int, ...], float], wanted: dict[tuple[int, ...], float]) -> float:
    """The largest error of the joint probability of any beginning, of any length."""
    errors: dict[tuple[int, ...], float] = defaultdict(float)
    for distribution, sign in ((found, 1.0), (wanted, -1.0)):
        for tokens, probability in distribution.items():
            for n in range(len(tokens) + 1):
                errors[tokens[:n]] += sign * probability
    return max(map(abs, errors.values()))


CUT = {"temperature": 2.0, "top_k": 3, "min_p": 0.05}
NUCLEUS = {"temperature": 1.0, "top_p": 0.75}
CASES = {
    "one draft": Case(k=1, length=5),
    "two drafts": Case(k=2, seed=1),
    "three drafts": Case(k=3, seed=2),
    "larger vocabulary": Case(vocab=6, k=2, length=3, seed=3),
    "ragged": Case(k=2, ragged=True, length=5, seed=4),
    "ragged, no q": Case(k=3, ragged=True, looked_up=True, length=5, seed=5),
    "no q, one": Case(k=1, looked_up=True, length=5, seed=6),
    "no q, three": Case(vocab=4, k=3, looked_up=True, length=5, seed=7),
    "q is p": Case(k=3, equal=True, seed=8),
    "target cut": Case(vocab=5, k=2, length=3, target=CUT, seed=9),
    "draft cut": Case(vocab=5, k=2, length=3, draft=CUT, seed=10),
    "both cut alike": Case(vocab=5, k=2, length=4, target=CUT, draft=CUT, seed=11),
    "both cut differently": Case(vocab=5, k=3, length=4, target=NUCLEUS, draft=CUT, seed=12),
    "nucleus, no q": Case(vocab=5, k=3, target=NUCLEUS, looked_up=True, seed=13),
    "disjoint supports": Case(
        vocab=5, k=2, target={"logit_bias": {0: NEVER, 3: NEVER}}, draft={"logit_bias": dict.fromkeys((1, 2, 4), NEVER)}
    ),
    "draft sees half the support": Case(vocab=4, k=3, draft={"logit_bias": {1: NEVER, 2: NEVER}}, seed=14),
    "no q, outside the support": Case(
        vocab=4, k=2, looked_up=True, target={"logit_bias": {1: NEVER, 3: NEVER}}, draft={"logit_bias": {1: 50, 3: 50}}
    ),
    "penalties see the drafts": Case(
        k=3, target={"presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 2.0}, seed=15
    ),
    "colder draft": Case(k=2, draft={"temperature": 0.5}, seed=16),
    **{
        f"Saguaro {c}, top {f}": Case(vocab=v, k=k, c=c, fan_out=f, length=n, seed=17)
        for c, f, v, k, n in [(0, 1, 3, 3, 4), (0.25, 1, 3, 3, 4), (1, 1, 3, 2, 4), (0, 2, 5, 2, 3), (0.25, 3, 5, 2, 3)]
    },
    "Saguaro 0 of all tokens": Case(k=2, c=0, fan_out=3, seed=18),
    "Saguaro, both cut": Case(vocab=5, k=2, c=0.25, fan_out=2, target=NUCLEUS, draft=CUT, seed=19),
}


LARGE = {
    *("three drafts", "larger vocabulary", "no q, three", "both cut alike", "both cut differently"),
    *("draft sees half the support", "Saguaro 0.25, top 1", "Saguaro 1, top 1", "Saguaro 0.25, top 3"),
    *("one draft", "draft cut", "colder draft", "Saguaro 0, top 2", "Saguaro 0 of all tokens"),
    *("penalties see the drafts", "Saguaro, both cut", "disjoint supports"),
}


@pytest.mark.parametrize("name", mostly_slow(CASES, fast=CASES.keys() - LARGE))
def test_emitted_tokens_have_the_targets_distribution(name: str) -> None:
    """Catches any error in acceptance, residual, bonus or the use of noise over rounds. No sampling: exact to 1e-12."""
    found, _ = enumerated(CASES[name])
    assert deviation(found, expected(CASES[name])) < 1e-12


def test_positions_are_decided_in_every_way() -> None:
    """Catches an enumeration that proves less than it says: later positions must have been decided in all ways."""
    _, ways = enumerated(CASES["two drafts"])
    assert {p: ways[p] for p in range(4)} == {
        0: {"accepted", "recovery"},
        1: {"accepted", "recovery"},
        2: {"accepted", "recovery", "bonus"},
        3: {"plain", "bonus"},
    }
    _, ways = enumerated(CASES["ragged"])
    assert ways[2] == ways[3] == {"accepted", "recovery", "bonus", "plain"}


# --- where rounding decides -------------------------------------------------------------------------------------------


def constant(p: Seq[float]) -> TableModel:
    """A model of one distribution."""
    model = TableModel(len(p), seed=0)
    model.table = torch.tensor(p).log().expand_as(model.table).clone()
    return model


def verdict(p: Seq[float], q: Seq[float] | None, token: int, u: float) -> tuple[int, ...]:
    """What the rule makes of one drafted token when the acceptance number is u, in real arithmetic."""
    target = make_target(constant(p), 1, lookahead=1, max_len=4)
    sequence = make_sequence(PROMPT, params=SamplingParams(temperature=1.0), seed=3)
    sequence.slot, sequence.kv.blocks = 0, [0]
    target.admit(sequence)
    proposal = Proposal((token,), None if q is None else torch.tensor([q], dtype=torch.float64))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection, "uniform", lambda seed, position: u)
        [outcome] = verified(target, [Work(sequence, 1, 0, lookahead=1, slot=0, proposal=proposal)])
    assert outcome is not None
    return outcome.token_ids


def impossible_tokens() -> int:
    """How often a token that the target never writes is kept, where u·q is or rounds to nothing."""
    qs = [[1.0, 5e-324, 0.0], [1.0, 0.0, 0.0]]
    found = [verdict([0.5, 0.0, 0.5], q, 1, u) for q in qs for u in (2.0**-53, 0.25, 0.5, 1 - 2.0**-53)]
    return sum(tokens[0] == 1 for tokens in found)


def test_a_token_outside_the_support_never_stands() -> None:
    """Catches `<=`: with p(d) = 0, and q(d) so small that u·q rounds to 0, equality must not be enough."""
    assert impossible_tokens() == 0


def test_a_rejection_by_rounding_draws_from_the_target() -> None:
    """Catches a residual without mass (p is q, and only rounding can reject), which would emit token 0."""
    p = [0.0, 0.0, 0.75, 0.25]
    assert verdict(p, p, 2, u=1.5)[0] in (2, 3)
    assert verdict([0.0, 1.0], None, 1, u=1.5) == (1,)


# --- Saguaro's draft distribution -------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 9), min_size=2, max_size=8).filter(any), st.sampled_from([0.0, 0.25, 0.5, 1.0]))
@pytest.mark.parametrize("fan_out", [1, 3, 20])
def test_reweighting(fan_out: int, weights: list[int], c: float) -> None:
    """Catches the wrong tokens scaled, a sum other than one, a tie that scales more than F, and a row of zeros."""
    q = torch.tensor([weights, weights[::-1]], dtype=torch.float64)
    q /= q.sum(-1, keepdim=True)
    found = reweighted(q.clone(), c, fan_out)
    for before, after in zip(q.tolist(), found.tolist(), strict=True):
        ordered = sorted(before, reverse=True)
        scaled = [c * x for x in ordered[:fan_out]] + ordered[fan_out:]
        wanted = [x / math.fsum(scaled) for x in scaled] if any(scaled) else ordered
        order = sorted(range(len(before)), key=lambda t: (-before[t], after[t]))  # among equals the scaled ones first
        assert [after[t] for t in order] == pytest.approx(wanted, abs=1e-12)
    assert same_bits(found, reweighted(q.clone(), c, fan_out))
    assert c != 1.0 or same_bits(found, q)


# --- the real engine with its own random numbers ----------------------------------------------------------------------

MOST_RUNNING = 128


@dataclass(frozen=True)
class Trial:
    """A pair of models in the real engine, and how it drafts."""

    vocab: int = 24
    prompt: tuple[int, ...] = (1,)
    options: dict[str, Any] = field(default_factory=dict)  # sampling parameters
    c: float | None = 1.0  # None: look-up in the text instead of a draft model
    draft_vocab: int = 24
    fixed: tuple[tuple[float, ...], tuple[float, ...]] | None = None  # p and q everywhere; None: random tables
    length: int = 7
    k: int = 3
    ahead: FanOut | None = None  # how outcomes are prepared; None: they are not

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(**{"temperature": 1.0, "max_new_tokens": self.length, **self.options})

    @property
    def target(self) -> TableModel:
        return TableModel(self.vocab, seed=100) if self.fixed is None else constant(self.fixed[0])

    @property
    def draft(self) -> TableModel:
        """Right enough to be accepted often, wrong enough for rejections."""
        if self.fixed is not None:
            return constant(self.fixed[1])
        draft, size = TableModel(self.draft_vocab, seed=101), self.draft_vocab
        draft.table = (draft.table + self.target.table[:, :size, :size]) / 2
        return draft

    def drafter(self, state: SequenceState) -> Drafter:
        if self.c is None:
            return SuffixDrafter(self.k)
        shapes = RunShapes(self.k, max_sequences=MOST_RUNNING, max_rows=8 * MOST_RUNNING, widths=(8,))
        model_runner = make_runner(self.draft, state, scratch_slots=shapes.scratch_slots)
        runner = DraftRunner(model_runner, shapes, rejection=True, saguaro_c=self.c)
        model = DraftModel(runner, max_len=64, max_num_batched_tokens=1 << 20, prefix_caching=False)
        if self.ahead is None:
            return ModelDrafter(model, self.k)
        return SSDDrafter(model, self.ahead, lookahead=self.k, budget=8)


PAIRS = tuple(t for pair in itertools.product(range(4), repeat=2) for t in pair)  # a look-up never fails for long
TRIALS = {
    "plain": Trial(),
    "Saguaro 0.25": Trial(c=0.25),
    "Saguaro 0": Trial(c=0.0),
    "cut": Trial(options={"temperature": 0.8, "top_p": 0.8, "top_k": 12}),
    "Saguaro and cut": Trial(c=0.25, options={"temperature": 1.3, "top_p": 0.9, "min_p": 0.02}),
    "narrow draft": Trial(draft_vocab=16),
    "ahead": Trial(ahead=Adaptive()),
    "ahead, Saguaro 0.25": Trial(c=0.25, ahead=Geometric()),
    "ahead, Saguaro 0 and cut": Trial(c=0.0, ahead=Adaptive(), options={"temperature": 1.3, "top_p": 0.9}),
    "ahead, few tokens": Trial(vocab=4, draft_vocab=4, ahead=Geometric()),
    "looked up": Trial(vocab=4, prompt=PAIRS, c=None),
    "sensitive": Trial(vocab=3, fixed=((0.25, 0.6, 0.15), (0.5, 0.49, 0.01))),  # shared Gumbel noise is hard to see
}


def emitted(trial: Trial, num_seeds: int) -> tuple[torch.Tensor, Engine]:
    """The tokens [seeds, length] that the engine writes."""
    target = make_target(trial.target, MOST_RUNNING, lookahead=trial.k, max_len=64)
    pool = BlockPool(target.runner.num_blocks, target.runner.block_size, prefix_caching=False)
    scheduler = Scheduler(pool, max_num_seqs=MOST_RUNNING, max_num_batched_tokens=1 << 20)
    engine = Engine(Round(target, trial.drafter(target.state)), scheduler, max_model_len=64)
    for seed in range(num_seeds):
        engine.add(list(trial.prompt), replace(trial.params, seed=seed), str(seed))
    outputs: list[RequestOutput] = []
    while engine.has_work:
        outputs += [delta.output for delta in engine.step() if delta.output is not None]
    engine.check()
    assert not engine.metrics.drafter_failures
    return torch.tensor([output.token_ids for output in outputs]), engine


def smallest_p(trial: Trial, tokens: torch.Tensor) -> float:
    """The smallest p-value of 2·length - 1 tests: of every position, and of it together with the one before."""
    table, start = trial.target.table.tolist(), len(trial.prompt)
    here = [float(t == trial.prompt[-1]) for t in range(trial.vocab)]
    found = []
    for i, drawn in enumerate(tokens.T):
        step = [naive_distribution(row, trial.params, [], []) for row in table[start + i - 1]]
        joint = [a * b for a, conditional in zip(here, step, strict=True) for b in conditional]
        here = [math.fsum(joint[t :: trial.vocab]) for t in range(trial.vocab)]
        found.append(chi_squared_p(torch.bincount(drawn, minlength=trial.vocab).tolist(), here))
        if i > 0:
            pairs = torch.bincount(tokens[:, i - 1] * trial.vocab + drawn, minlength=trial.vocab**2)
            found.append(chi_squared_p(pairs.tolist(), joint))
    return min(found)


FEW = ("ahead",)
SEEDS = [pytest.param(500, id="fast"), pytest.param(25_000, id="many", marks=pytest.mark.slow)]


@pytest.mark.parametrize("num_seeds", SEEDS)
@pytest.mark.parametrize(
    "trial",
    [pytest.param(t, id=name, marks=() if name in FEW else pytest.mark.slow) for name, t in TRIALS.items()],
)
def test_the_engine_keeps_the_distribution(trial: Trial, num_seeds: int) -> None:
    """Catches dependent noise, and a q that the draft was not drawn from: every position by chi-squared.

    False alarm: 12 trials of 13 p-values, each below 1e-9, twice (fast and slow): 3e-7 in all, which leaves a factor of
    three to 1e-6 for Pearson's approximation in the far tail.
    """
    num_seeds //= 5 if trial.options else 1  # rows are cut one by one on a CPU, which takes time
    tokens, engine = emitted(trial, num_seeds)
    assert tokens.shape == (num_seeds, trial.length)
    drafted, accepted = engine.metrics.spec_decode_num_draft_tokens, engine.metrics.spec_decode_num_accepted_tokens
    assert 0.1 * drafted < accepted < 0.95 * drafted, "the trial must see both acceptance and rejection"
    assert smallest_p(trial, tokens) > 1e-9
    if trial.ahead is not None:
        assert set(engine.metrics.ssd_rounds) == {"hit", "jit"}, "the trial must see both hits and misses"


# --- known wrong rules are caught -------------------------------------------------------------------------------------


def whether_argmax(trials: Seq[Any], p: torch.Tensor, starts: Seq[int]) -> list[list[tuple[float, float]]]:
    best = p.argmax(-1).tolist()
    return [
        [(float(token == best[start + j]), 1.0) for j, token in enumerate(trial.drafted)]
        for trial, start in zip(trials, starts, strict=False)
    ]


def accept_argmax(patch: pytest.MonkeyPatch, world: World) -> None:
    patch.setattr(rejection, "_drafted_probabilities", whether_argmax)


def ignore_q(patch: pytest.MonkeyPatch, world: World) -> None:
    real = rejection._drafted_probabilities
    patch.setattr(
        rejection, "_drafted_probabilities", lambda *args: [[(p, 1.0) for p, _ in pairs] for pairs in real(*args)]
    )


def recover_from_p(patch: pytest.MonkeyPatch, world: World) -> None:
    patch.setattr(rejection, "_final", lambda trial, p, accepted: p[accepted])


def bonus_from_residual(patch: pytest.MonkeyPatch, world: World) -> None:
    def rest(trial: Any, p: torch.Tensor, accepted: int) -> torch.Tensor:
        q = trial.work.proposal.distributions[min(accepted, len(trial.drafted) - 1)]
        return (p[accepted] - q).clamp(min=0.0) + 1e-300

    patch.setattr(rejection, "_final", rest)


def other_temperature(patch: pytest.MonkeyPatch, world: World) -> None:
    patch.setattr(TableDrafter, "_declared", lambda self, q: q.sqrt() / q.sqrt().sum(-1, keepdim=True))


def draft_with_recovery_noise(patch: pytest.MonkeyPatch, world: World) -> None:
    patch.setattr(TableDrafter, "stream", Stream.RECOVERY)


def draft_with_acceptance_noise(patch: pytest.MonkeyPatch, world: World) -> None:
    patch.setattr(TableDrafter, "stream", Stream.ACCEPT)


def recover_with_acceptance_noise(patch: pytest.MonkeyPatch, world: World) -> None:
    real = WorldSampler.draw
    patch.setattr(WorldSampler, "draw", lambda self, p, rows, stream: real(self, p, rows, Stream.ACCEPT))


def reuse_uniform(patch: pytest.MonkeyPatch, world: World) -> None:
    patch.setattr(rejection, "uniform", lambda seed, position: world.uniform(seed, position - position % 2))


WRONG_RULES: dict[str, tuple[Mutation, str]] = {
    "accept the argmax": (accept_argmax, "two drafts"),
    "accept the argmax of looked-up tokens": (accept_argmax, "no q, three"),
    "accept with p": (ignore_q, "two drafts"),
    "recovery from p": (recover_from_p, "two drafts"),
    "rejected looked-up token not removed": (recover_from_p, "no q, one"),
    "bonus from a residual": (bonus_from_residual, "one draft"),
    "q of another temperature": (other_temperature, "two drafts"),
    "draft shares the recovery's noise": (draft_with_recovery_noise, "one draft"),
    "draft shares the acceptance's noise": (draft_with_acceptance_noise, "one draft"),
    "recovery shares the acceptance's noise": (recover_with_acceptance_noise, "two drafts"),
    "one uniform for two positions": (reuse_uniform, "three drafts"),
}


@pytest.mark.parametrize("rule", mostly_slow(WRONG_RULES, fast={"bonus from a residual", "recovery from p"}))
def test_enumeration_catches(rule: str) -> None:
    """Catches an enumeration that is blind: each of these rules is known to be wrong."""
    mutate, name = WRONG_RULES[rule]
    found, _ = enumerated(CASES[name], mutate)
    assert math.fsum(found.values()) == pytest.approx(1.0), "the enumeration itself must stay complete"
    assert deviation(found, expected(CASES[name])) > 1e-3


def test_equality_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a check of the support that `<=` would pass."""

    def accepted(trial: Any, pairs: Seq[tuple[float, float]]) -> int:
        fallen = [j for j, (p, q) in enumerate(pairs) if not rejection.uniform(0, 0) * q <= p]
        return fallen[0] if fallen else len(pairs)

    monkeypatch.setattr(rejection, "_accepted", accepted)
    assert impossible_tokens() > 0


SHARED = Stream.RECOVERY
REAL_DRAW = Sampler.draw


def recovery_noise(seed: int, position: int) -> float:
    """A uniform number made of the noise that the recovery uses for token 2."""
    return math.exp(-math.exp(-float(gumbel([position_key(seed, position, SHARED)], 3, CPU)[0, 2])))


def wrong_draft(*, stream: Stream = Stream.DRAFT, shift: int = 0, root: bool = False) -> tuple[Any, str, Any]:
    """Drafts drawn with other noise, or from another distribution, than they should be."""

    def draw(self: Sampler, distribution: torch.Tensor, rows: Rows, purpose: Stream) -> torch.Tensor:
        if purpose is not Stream.DRAFT:
            return REAL_DRAW(self, distribution, rows, purpose)
        moved = rows._replace(positions=rows.positions + shift)
        return REAL_DRAW(self, distribution.sqrt() if root else distribution, moved, stream)

    return Sampler, "draw", draw


ENGINE_MISTAKES: dict[str, tuple[Any, str, Any]] = {
    "draft shares the recovery's noise": wrong_draft(stream=SHARED),
    "draft shares the next recovery's noise": wrong_draft(stream=SHARED, shift=1),
    "recovery shares the acceptance's noise": (rejection, "uniform", recovery_noise),
    "one uniform for two positions": (rejection, "uniform", lambda seed, position: uniform(seed, position & ~1)),
    "q of another temperature": wrong_draft(root=True),
    "recovery from p": (rejection, "_final", lambda trial, p, accepted: p[accepted]),
    "accept the argmax": (rejection, "_drafted_probabilities", whether_argmax),
}


@pytest.mark.slow  # a test of the tests
@pytest.mark.parametrize(("owner", "name", "wrong"), ENGINE_MISTAKES.values(), ids=ENGINE_MISTAKES.keys())
def test_chi_squared_catches(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, wrong: Any) -> None:
    """Catches a chi-squared test without power: each mistake must show with fewer seeds than the fast test has."""
    monkeypatch.setattr(owner, name, wrong)
    tokens, _ = emitted(TRIALS["sensitive"], 1500)
    assert smallest_p(TRIALS["sensitive"], tokens) < 1e-9


# --- rows that are not tried, and the coupled rule --------------------------------------------------------------------


class Wild(ScriptedDrafter):
    """So many tokens, the first of them right, as a list says; with distributions that mean nothing."""

    def __init__(self, plan: Seq[tuple[int, int]], q: float | None = None) -> None:
        super().__init__(lookahead=4)
        self.plan = itertools.cycle(plan)
        self.q = q

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        found = super().propose(works)
        if self.q is None:
            return found
        q = [torch.full((len(p.token_ids), VOCAB), self.q, dtype=torch.float64) for p in found]
        return [replace(p, distributions=each) for p, each in zip(found, q, strict=True)]

    def _script(self, sequence: Sequence, tokens: Seq[int]) -> tuple[int, int]:
        count, right = next(self.plan)
        return min(count, max(0, sequence.max_tokens - len(tokens) - 1)), right


plans = st.lists(st.tuples(st.integers(0, 4), st.integers(0, 4)), min_size=1, max_size=6)
some_params = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.6, 1.0, 3.0]),
    top_k=st.sampled_from([0, 5]),
    top_p=st.sampled_from([1.0, 0.8]),
    presence_penalty=st.sampled_from([0.0, 1.5]),
    logit_bias=st.sampled_from([{}, {1: NEVER, 2: 4.0}]),
    seed=st.integers(0, 10**6),
    max_new_tokens=st.just(14),
    logprobs=st.just(2),
)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=9)


def answer(prompt: list[int], params: SamplingParams, drafter: Drafter, target: type[Target]) -> RequestOutput:
    return make_harness(drafter=drafter, target=target).run(prompt, params)


def check_logprobs(output: RequestOutput) -> None:
    """Every entry is the model's own, of the emitted token, after the emitted ones before it."""
    tokens = [*output.prompt_token_ids, *output.token_ids]
    for i, entry in enumerate(output.logprobs or [], start=len(output.prompt_token_ids)):
        raw = torch.log_softmax(logits_after(state_of(tokens[:i])).double(), -1)
        assert (entry.token_id, entry.logprob) == (tokens[i], pytest.approx(float(raw[tokens[i]])))
        assert sorted(entry.top.values()) == pytest.approx(sorted(raw.topk(2).values.tolist()))
    assert len(output.logprobs or []) == len(output.token_ids)


@given(prompts, some_params, plans, st.sampled_from([None, 0.0, 1.0, math.nan]))
def test_coupled_tokens_are_the_targets_own(
    prompt: list[int], params: SamplingParams, plan: list[tuple[int, int]], q: float | None
) -> None:
    """Catches a draft, right or wrong, or its distributions, that change a token under the coupled rule."""
    output, plain = (answer(prompt, params, drafter, Target) for drafter in (Wild(plan, q), Drafter()))
    assert output.token_ids == plain.token_ids
    check_logprobs(output)
    check_logprobs(plain)


@settings(max_examples=20)
@given(prompts, some_params, plans, st.sampled_from([None, 1 / VOCAB]))
@pytest.mark.slow
def test_untried_rows_are_the_targets_own_under_rejection(
    prompt: list[int], params: SamplingParams, plan: list[tuple[int, int]], q: float | None
) -> None:
    """Catches noise or a rule that changes for requests without drafts, and greedy requests that the ratio decides."""
    harness = make_harness(drafter=Wild(plan, q), target=RejectionTarget)
    kinds = [params, replace(params, speculate=False), replace(params, temperature=0.0)]
    names = [harness.engine.add(prompt, kind) for kind in kinds]
    tried, unspeculative, greedy = (harness.drain()[name] for name in names)
    assert unspeculative.token_ids == answer(prompt, params, Drafter(), Target).token_ids
    assert greedy.token_ids == answer(prompt, kinds[2], Drafter(), Target).token_ids
    assert answer(prompt, params, Drafter(), RejectionTarget).token_ids == unspeculative.token_ids
    for output in (tried, unspeculative, greedy):
        check_logprobs(output)


class Malformed(ScriptedDrafter):
    """Right tokens, with distributions of a wrong shape."""

    def __init__(self, *shape: int) -> None:
        super().__init__(lookahead=4)
        self.shape = shape

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        q = torch.ones(self.shape, dtype=torch.float64)
        return [replace(p, distributions=q) for p in super().propose(works)]


@pytest.mark.parametrize("shape", [(4,), (0, VOCAB), (4, VOCAB - 1), (4, VOCAB + 1), (1, 4, VOCAB)])
def test_malformed_distributions_drop_a_draft(shape: tuple[int, ...]) -> None:
    params = SamplingParams(temperature=1.0, seed=1, max_new_tokens=12)
    harness = make_harness(drafter=Malformed(*shape), target=RejectionTarget)
    output = harness.run([1, 2, 3], params)
    assert output.token_ids == answer([1, 2, 3], params, Drafter(), Target).token_ids
    assert output.metrics.drafted == 0


@st.composite
def batches(draw: st.DrawFn) -> list[Work]:
    """Works of all kinds, prefill chunks among them."""
    works = []
    for i in range(draw(st.integers(1, 6))):
        tokens = draw(st.lists(st.integers(0, 4), min_size=3, max_size=3))
        sequence = make_sequence(tokens, params=draw(some_params), id=i, seed=draw(st.integers(0, 999)))
        sequence.slot, sequence.kv.blocks = i, [i]
        if draw(st.integers(0, 4)) == 0:
            works.append(Work(sequence, 2, 0, decides=False, slot=i))
            continue
        drafted = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
        q = torch.rand(len(drafted), 5, dtype=torch.float64, generator=torch.Generator().manual_seed(i))
        proposal = Proposal(drafted, draw(st.sampled_from([None, q / q.sum(-1, keepdim=True)])))
        start = draw(st.integers(0, 2))
        works.append(Work(sequence, 3 - start, start, lookahead=3, slot=i, proposal=proposal))
    return works


MODEL = TableModel(5, seed=7)


def decide(kind: type[Target], works: Seq[Work]) -> list[Outcome | None]:
    target = make_target(MODEL, 6, lookahead=3, max_len=16, kind=kind)
    for work in works:
        target.admit(work.sequence)
    return verified(target, works)


@given(batches())
def test_a_work_is_decided_alone(works: list[Work]) -> None:
    """Catches rows or distributions of one work that are read for another; chunks and plain works lie in between."""
    for kind in (RejectionTarget, Target):
        for work, outcome in zip(works, decide(kind, works), strict=True):
            assert [outcome] == decide(kind, [work])
            assert (outcome is None) == (not work.decides)
            if outcome is not None:
                assert outcome.token_ids[:-1] == work.proposal.token_ids[: outcome.num_accepted]
                assert outcome.draft == work.proposal.token_ids
            if work.num_logits == 1 or work.sequence.params.greedy:
                assert [outcome] == decide(Target, [work])
