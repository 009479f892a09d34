"""The controller of drafting depth: it finds what pays in worlds whose round times the test sets."""

from __future__ import annotations

import itertools
import logging
import random
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq

import pytest
from conftest import mostly_slow
from fakes import make_sequence

from ssd.core import Origin, Outcome, Proposal, Sequence, Work
from ssd.decoding.drafter import Drafter, never
from ssd.drafting.arms import PLAIN, Arm, ArmTimes, arms_for, depths_up_to, make_arms
from ssd.drafting.controller import DepthController
from ssd.drafting.estimate import Average

ALL = ("ar", "sd", "ssd")
ARMS = make_arms(ALL, depths_up_to(8), (16,))
MODES = make_arms(ALL, (4,), (16,))


def tokens_of(arm: Arm, acceptance: float) -> float:
    """What a round yields if every drafted token stands with this probability."""
    return sum(acceptance**i for i in range(arm.k + 1))


# --- choosing an arm --------------------------------------------------------------------------------------------------


def fresh(arms: list[Arm] = ARMS, acceptance: float = 0.8) -> ArmTimes:
    """Every drafted token stands with this probability, and every prepared draft is ready."""
    times = ArmTimes(arms, lambda k: tokens_of(Arm(k, 0), acceptance) - 1)
    times.ready = Average(1.0, 1.0, 1.0)
    return times


def arms_taken(times: ArmTimes, seconds: Callable[[Arm], float], rounds: int) -> list[Arm]:
    """The arms of so many rounds, where a round of an arm takes `seconds(arm)`."""
    taken = []
    for _ in range(rounds):
        arm = times.choose()
        times.record(arm, seconds(arm))
        taken.append(arm)
    return taken


@pytest.mark.parametrize(
    ("draft", "verify_more", "acceptance", "best"),
    [
        (0.1, 0.0, 0.8, {Arm(4, 16), Arm(6, 16), Arm(8, 16)}),  # a draft that costs little, and is hidden
        (0.5, 1.0, 0.6, {PLAIN, Arm(1, 16), Arm(1, 0)}),  # every drafted token costs the target a whole one
        (2.0, 0.0, 0.3, {PLAIN}),  # a draft slower than the target
    ],
)
def test_it_settles_on_what_pays(draft: float, verify_more: float, acceptance: float, best: set[Arm]) -> None:
    """Units: one verification. Ahead, drafting is hidden behind it as far as it is shorter."""

    def seconds(arm: Arm) -> float:
        verify = 1 + verify_more * arm.k
        if arm.k == 0:
            return 1.0
        return max(verify, draft * (arm.k + 1)) + 0.2 * draft * arm.k if arm.width else verify + draft * arm.k

    late = arms_taken(fresh(acceptance=acceptance), seconds, 400)[100:]
    speed = {arm: tokens_of(arm, acceptance) / seconds(arm) for arm in ARMS}
    assert sum(arm in best for arm in late) > 0.8 * len(late)
    achieved = len(late) / sum(1 / speed[arm] for arm in late)
    assert achieved > 0.9 * max(speed.values())


def test_it_comes_back_when_the_world_changes() -> None:
    times = fresh()
    assert arms_taken(times, lambda arm: 1.0 + 3.0 * arm.k, 600)[-1] == PLAIN
    assert arms_taken(times, lambda arm: 1.0 + 0.05 * arm.k, 4800)[-1] != PLAIN


def test_a_slower_machine_is_no_worse_arm() -> None:
    """Catches means of other times that are compared: rounds of all arms become slower, and nothing else changes."""
    times = fresh()
    before = arms_taken(times, lambda arm: 1.0 + 0.05 * arm.k, 400)[-1]
    slower = itertools.count()
    late = arms_taken(times, lambda arm: (1.0 + 0.05 * arm.k) * (1 + next(slower) / 200), 800)[100:]
    near = {arm for arm in ARMS if arm.k >= before.k - 2 > 0}
    assert sum(arm in near for arm in late) > 0.9 * len(late)


def test_a_single_slow_round_does_not_count() -> None:
    times, dice = fresh(), random.Random(1)

    def seconds(arm: Arm) -> float:
        return (1.0 + 0.05 * arm.k) * (40.0 if dice.random() < 0.03 else 1.0)

    late = arms_taken(times, seconds, 800)[200:]
    speed = {arm: tokens_of(arm, 0.8) / (1.0 + 0.05 * arm.k) for arm in ARMS}
    assert len(late) / sum(1 / speed[arm] for arm in late) > 0.9 * max(speed.values())


def test_another_size_of_the_batch_starts_with_what_is_known() -> None:
    """Also where its rounds take much longer: all arms are slower then, not the one that is measured first."""
    times = fresh()
    best = arms_taken(times, lambda arm: 1.0 + 0.05 * arm.k, 400)[-1]
    other = times.like(times.arms)
    taken = arms_taken(other, lambda arm: 3.0 + 0.15 * arm.k, 40)
    assert sum(arm == best for arm in taken) > 25
    assert taken.count(PLAIN) == 1  # which is clear after a round
    another = times.like(times.arms)
    assert arms_taken(another, lambda arm: 3.0 + 6.0 * arm.k, 60)[-1] == PLAIN  # if it is another world there
    assert arms_taken(times, lambda arm: 1.0 + 0.05 * arm.k, 1) == [best]  # of which it is a copy


@pytest.mark.parametrize(
    ("ar", "sd", "ssd"), [(1.0, 1.9, 2.3), (1.0, 1.9, 1.2), (1.0, 5.0, 4.0), (1.0, 2.0, 1.98), (1.0, 3.3, 3.2)]
)
def test_trials_cost_less_than_two_percent(ar: float, sd: float, ssd: float) -> None:
    """Whichever mode is the best. A drafted token stands with 0.8: SD and SSD write 3.36 tokens a round."""
    seconds = {"ar": ar, "sd": sd, "ssd": ssd}
    times, dice = fresh(MODES), random.Random(1)
    speed = {arm: tokens_of(arm, 0.8) / seconds[arm.mode] for arm in MODES}
    taken = arms_taken(times, lambda arm: seconds[arm.mode] * dice.gauss(1.0, 0.03), 4000)[40:]
    achieved = sum(tokens_of(arm, 0.8) for arm in taken) / sum(seconds[arm.mode] for arm in taken)
    assert achieved > 0.985 * max(speed.values())
    assert {arm.mode for arm in taken} == {"ar", "sd", "ssd"}  # all are tried again


@pytest.mark.parametrize("seed", range(20))
def test_ssd_is_not_judged_by_misses_in_a_text_that_is_forgotten(seed: int) -> None:
    """Catches a start-up text with many misses that keeps SSD out; with a hit it is the fastest."""
    dice = random.Random(seed)
    hits = itertools.cycle([False, False, False, True])
    times = fresh(MODES)
    times.thorough = True

    def seconds(arm: Arm) -> float:
        return {"ar": 1.0, "sd": 1.3, "ssd": 1.03 if next(hits) else 1.5}[arm.mode]

    assert arms_taken(times, seconds, 80)[-1].mode == "sd"
    hits = (dice.random() < 0.85 for _ in itertools.count())
    times.forget_text()
    times.ready = Average(1.0, 1.0, 1.0)
    taken = arms_taken(times, seconds, 120)
    assert sum(arm.mode == "ssd" for arm in taken[60:]) > 40
    assert sum(arm.mode == "ar" for arm in taken) <= 3


def test_rounds_around_prompts_put_off_no_trial() -> None:
    """Catches a choice of the start that is never checked: what varies in rounds of the best arm is no trial's loss.

    Plain rounds took twice as long at the start. Every other round is not comparable, as after a prompt.
    """
    times, taken = fresh(MODES), []
    seconds = {"ar": 2.0, "sd": 3.0, "ssd": 6.0}
    arms_taken(times, lambda arm: seconds[arm.mode], 300)
    assert times.best.mode == "sd"
    seconds["ar"] = 0.8
    for i in range(600):
        taken.append(times.choose())
        times.record(taken[-1], seconds[taken[-1].mode] * (1.2 if i % 4 < 2 else 0.8), comparable=i % 2 > 0)
    assert taken[-100:].count(PLAIN) > 90


def test_the_shortest_draft_is_as_good_as_none() -> None:
    """Catches plain decoding that is preferred to a little faster drafts: with one K there is nothing to penalise."""
    times = fresh(make_arms(("ar", "sd"), (4,), ()))
    gain = tokens_of(Arm(4, 0), 0.8) / 1.05
    assert arms_taken(times, lambda arm: gain if arm.k else 1.0, 400)[-1].mode == "sd"


def test_an_arm_that_cannot_be_measured_is_given_up() -> None:
    """Catches a trial that goes on for ever, because a drafter does not catch up: the others must be measured."""
    times, taken = fresh(MODES), []
    for _ in range(600):
        arm = times.choose()
        taken.append(arm.mode)
        run = arm if arm.mode != "ssd" else times.best
        times.record(run, 1.0 + 0.2 * run.k, comparable=arm == run)
    assert times.best.mode == "sd"
    assert taken.count("ssd") > 64
    assert 0 < taken.count("ar") < 60
    assert taken.count("sd") > 100


def test_arms_of_the_modes() -> None:
    assert make_arms(("ssd",), (4,), (8, 16)) == [Arm(4, 8), Arm(4, 16)]
    assert make_arms(("ar", "sd"), (4,), (8,)) == [PLAIN, Arm(4, 0)]
    assert {arm.mode for arm in make_arms(ALL, depths_up_to(8), (8,))} == set(ALL)
    assert make_arms(("sd", "tree"), (8,), (), 32) == [Arm(8, 0), Arm(8, 0, nodes=16), Arm(8, 0, nodes=32)]
    assert make_arms(("sd", "tree"), (4,), (), 10) == [Arm(4, 0), Arm(4, 0, nodes=8), Arm(4, 0, nodes=10)]
    assert str(Arm(4, 0, nodes=8)) == "mode=tree, k=4, 8 nodes"
    assert str(Arm(4, 16)) == "mode=ssd, k=4, 16 branches"


# --- the controller in rounds -----------------------------------------------------------------------------------------


class Fake(Drafter):
    """Drafts nothing that is real; `stands` says how many tokens of a draft stand."""

    lookahead, budget = 8, 16

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[str] = []
        self.budgets: list[int] = []
        self.told: list[Outcome | None] = []

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        self.calls.append("propose")
        origin = Origin.HIT if self.budget else Origin.DRAFT
        return [Proposal((7,) * work.lookahead, origin=origin) for work in works]

    def stands(self, work: Work) -> int:
        return work.proposal.num_tokens

    def accepted_nodes(self, work: Work) -> tuple[int, ...] | None:
        """Of a tree; None: the draft is a chain."""
        return None

    def settle(self, works: Seq[Work]) -> None:
        self.calls.append("settle")
        self.budgets.append(self.budget)

    def prepare(self, works: Seq[Work], interrupted: Callable[[], bool] = never) -> None:
        self.calls.append("prepare")

    def observe(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self.calls.append("observe")
        self.told += outcomes

    def forget(self, sequence: Sequence) -> None:
        self.calls.append("forget")


def controlled(inner: Drafter) -> DepthController:
    """Chooses among all arms of one drafter."""
    return DepthController({"sd": inner, "ssd": inner}, ARMS)


def arm_of(controller: DepthController) -> Arm:
    assert (controller.lookahead, controller.budget) == (controller.arm.lookahead, controller.arm.width)
    return controller.arm


def launch(controller: Drafter, works: Seq[Work]) -> list[Work]:
    deciding = [work for work in works if work.decides]
    proposals = iter(controller.propose(deciding))
    launched = [work.with_proposal(next(proposals)) if work.decides else work for work in works]
    controller.settle(launched)
    controller.prepare(launched)
    return launched


def decided(inner: Fake, work: Work) -> Outcome | None:
    if not work.decides:
        return None
    draft, nodes = work.proposal.token_ids, inner.accepted_nodes(work)
    accepted = inner.stands(work) if nodes is None else len(nodes)
    return Outcome((*draft[:accepted], 5), (), draft, work.proposal.origin, nodes or ())


def rounds(
    inner: Fake,
    controller: DepthController,
    seconds: Callable[[Arm], float],
    count: int,
    *,
    batch: int = 1,
    in_flight: int = 0,
) -> Iterator[Arm]:
    """The arms of some rounds of a batch. `in_flight`: so many rounds are launched before one is observed."""
    sequences = [make_sequence([1, 2, 3], [4], id=i) for i in range(batch)]
    flying: list[tuple[Arm, list[Work]]] = []
    for _ in range(count):
        arm = arm_of(controller)
        works = [Work(s, 1, 3, lookahead=arm.lookahead, slot=i) for i, s in enumerate(sequences)]
        flying.append((arm, launch(controller, works)))
        yield arm
        if len(flying) > in_flight:
            arm, works = flying.pop(0)
            controller.observe(works, [decided(inner, work) for work in works], seconds(arm))


class Text(Fake):
    """In a share of the rounds look-up has a draft of eight tokens; in the others a learned draft is written, unless k
    is 0. Units of time: one plain round."""

    def __init__(self, copied: float, acceptance: float, step: float, row: float) -> None:
        super().__init__()
        self.copied, self.acceptance, self.step, self.row = copied, acceptance, step, row
        self.dice = random.Random(3)

    def slots(self, k: int) -> int:
        return 16

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        if self.dice.random() < self.copied:
            return [Proposal((7,) * 8, origin=Origin.SUFFIX) for _ in works]
        return [Proposal((7,) * (self.k or 0), origin=Origin.DRAFT if self.k else Origin.NONE) for _ in works]

    def stands(self, work: Work) -> int:
        rate = 0.9 if work.proposal.origin is Origin.SUFFIX else self.acceptance
        return next((i for i in range(work.proposal.num_tokens) if self.dice.random() > rate), work.proposal.num_tokens)

    def seconds(self, arm: Arm, work: Work) -> float:
        written = arm.k if work.proposal.origin is Origin.DRAFT else 0
        return self.dice.gauss(1.0, 0.02) * (1 + self.step * written + self.row * work.proposal.num_tokens)

    def speed(self, arm: Arm, copied: float) -> float:
        """Tokens per second of an arm with so many rounds of look-up."""
        look_up = tokens_of(Arm(8, 0), 0.9), 1 + 8 * self.row
        learned = tokens_of(arm, self.acceptance), 1 + arm.k * (self.step + self.row)
        tokens, seconds = (copied * a + (1 - copied) * b for a, b in zip(look_up, learned, strict=True))
        return tokens / seconds


@pytest.mark.parametrize(
    ("copied", "acceptance", "step", "row"),
    mostly_slow(
        [
            (0.02, 0.8, 0.05, 0.02),  # the learned draft
            (0.02, 0.8, 0.4, 0.2),  # neither
            (0.7, 0.3, 0.5, 0.05),  # look-up alone
            (0.3, 0.8, 0.05, 0.02),  # both
            (0.3, 0.5, 0.3, 0.02),
            (0.05, 0.6, 0.15, 0.1),
        ],
        fast={(0.7, 0.3, 0.5, 0.05), (0.3, 0.8, 0.05, 0.02)},
    ),
)
def test_look_up_beside_a_learned_draft_is_as_fast_as_the_best_of_them(
    copied: float, acceptance: float, step: float, row: float
) -> None:
    """Plain decoding, look-up alone, and drafts of any length without look-up."""
    inner = Text(copied, acceptance, step, row)
    arms = make_arms(("ar", "suffix", "sd"), depths_up_to(8), ())
    controller = DepthController({"sd": inner, "suffix": inner}, arms)
    sequence, tokens, seconds = make_sequence([1, 2, 3], [4]), 0, 0.0
    for i in range(5000):
        arm = controller.arm
        looks = Work(sequence, 1, 3, lookahead=controller.lookahead)
        works = launch(controller, [looks])
        outcome = decided(inner, works[0])
        assert outcome is not None
        took = inner.seconds(arm, works[0])
        controller.observe(works, [outcome], took)
        if i >= 200:
            tokens, seconds = tokens + len(outcome.token_ids), seconds + took
    alone = max(inner.speed(PLAIN, 0.0), inner.speed(PLAIN, copied), *(inner.speed(arm, 0.0) for arm in arms))
    assert tokens / seconds > 0.98 * alone


@pytest.mark.parametrize("in_flight", [0, 1])
def test_it_learns_how_often_each_token_stands(in_flight: int) -> None:
    """Of what it is told: two tokens stand, whatever is drafted."""

    class Two(Fake):
        def stands(self, work: Work) -> int:
            return min(2, work.proposal.num_tokens)

    inner = Two()
    controller = DepthController({"sd": inner}, make_arms(("sd",), (4,), ()))
    assert set(rounds(inner, controller, lambda arm: 1.0, 200, in_flight=in_flight)) == {Arm(4, 0)}
    accepted = controller._rates.accepted
    assert accepted(1) == pytest.approx(1.0, abs=0.1)
    assert accepted(2) == pytest.approx(2.0, abs=0.2)
    assert accepted(4) == pytest.approx(2.0, abs=0.3)


@pytest.mark.parametrize("in_flight", [0, 1])
def test_it_finds_the_best_arm(in_flight: int) -> None:
    """Also where a round is launched before the one before it is known; the rounds around a change of arm do not count.

    They are those of two arms at once, and here they take very long.
    """
    inner = Fake()
    controller = controlled(inner)
    last = [PLAIN] * 2

    def seconds(arm: Arm) -> float:
        changed = last[-1] != arm or last[-1 - in_flight] != arm
        last.append(arm)
        return 50.0 if changed else 1.0 + 0.05 * arm.k + 0.5 * (arm.width > 0)

    taken = list(rounds(inner, controller, seconds, 800, in_flight=in_flight))
    assert sum(arm == Arm(8, 0) for arm in taken[200:]) > 0.8 * 600


class Treelike(Fake):
    """Of a chain each token stands with this probability; of a tree also the child that is the second best."""

    def __init__(self, likely: float) -> None:
        super().__init__()
        self.likely, self.dice = likely, random.Random(1)

    def stands(self, work: Work) -> int:
        return next((i for i in range(work.lookahead) if self.dice.random() > self.likely), work.lookahead)

    def accepted_nodes(self, work: Work) -> tuple[int, ...] | None:
        nodes: list[int] = []
        for _ in range(self.levels):
            last, drawn = nodes[-1] if nodes else -1, self.dice.random()
            node = last + 1 if drawn < self.likely else 2 * last + 5
            if node >= work.lookahead or drawn > (1 + self.likely) / 2:
                break
            nodes.append(node)
        return tuple(nodes) if self.levels else None

    def speed(self, arm: Arm, seconds: float) -> float:
        """Tokens per second if a round takes so long."""
        work, self.levels, count = Work(make_sequence([1], [2]), 1, lookahead=arm.lookahead), arm.levels, 4000
        drawn = (self.accepted_nodes(work) for _ in range(count))
        return (1 + sum(self.stands(work) if nodes is None else len(nodes) for nodes in drawn) / count) / seconds


@pytest.mark.parametrize(
    ("likely", "in_flight"), mostly_slow([(0.4, 0), (0.4, 1), (0.7, 0), (0.7, 1)], fast={(0.7, 1)})
)
def test_a_tree_is_no_slower_than_its_chain(likely: float, in_flight: int) -> None:
    """Up to 96 rows a verification takes one unit, then in proportion to them: trees pay in small batches only."""
    arms, inner = make_arms(("ar", "sd", "tree"), (4,), (), 32), Treelike(likely)
    controller = DepthController({"sd": inner, "tree": inner}, arms)
    best = {}
    for batch in (1, 4, 64, 1):

        def seconds(arm: Arm, batch: int = batch) -> float:
            draft = (0.1 + 0.001 * batch * (8 if arm.nodes else 1)) * arm.k
            return max(1.0, batch * (1 + arm.lookahead) / 96) + draft

        taken = list(rounds(inner, controller, seconds, 1000, batch=batch, in_flight=in_flight))[300:]
        speed = {arm: Treelike(likely).speed(arm, seconds(arm)) for arm in arms_for(arms, batch)}
        yielded = sum(speed[arm] * seconds(arm) for arm in taken)
        assert yielded / sum(map(seconds, taken)) > 0.96 * max(speed.values())
        best[batch] = max(speed, key=speed.__getitem__)
    assert best[1].nodes
    assert not best[64].nodes


def work_through(inner: Treelike, controller: Drafter, answers: int, most: int, k: int) -> tuple[float, list[Arm]]:
    """Seconds of so many answers of 128 tokens, `most` at a time, and the arms of their rounds, with times as on a GPU:
    milliseconds of a verification and of each step of the draft, a part of them by row."""
    left, taken, seconds = {i: 128 for i in range(answers)}, list[Arm](), 0.0
    flying: list[tuple[list[Work], Arm, float]] = []
    while left:
        arm = controller.arm if isinstance(controller, DepthController) else Arm(k, 0)
        sequences = [make_sequence([1, 2, 3], [4], id=i) for i in list(left)[:most]]
        works = [Work(s, 1, 3, lookahead=arm.lookahead, slot=i) for i, s in enumerate(sequences)]
        rows, beams = len(works) * (1 + arm.lookahead), len(works) * (8 if arm.nodes else 1)
        took = 4.6 + 0.012 * rows + arm.k * (0.23 + 0.002 * beams)
        flying.append((launch(controller, works), arm, took))
        taken.append(arm)
        seconds += took
        if len(flying) > 1:
            works, arm, took = flying.pop(0)
            inner.levels = arm.levels
            outcomes = [decided(inner, work) for work in works]
            inner.levels = controller.arm.levels if isinstance(controller, DepthController) else 0
            controller.observe(works, outcomes, took)
            for work, outcome in zip(works, outcomes, strict=True):
                assert outcome is not None
                if work.sequence.id in left:
                    left[work.sequence.id] -= len(outcome.token_ids)
                    if left[work.sequence.id] <= 0:
                        del left[work.sequence.id]
    return seconds, taken


@pytest.mark.parametrize(("batch", "k"), [(16, 4), (64, 3)])
def test_looking_for_trees_costs_little_in_large_batches(batch: int, k: int) -> None:
    """Two answers for each place in the batch are some 90 rounds: a few rounds of plain decoding, or of trees that do
    not pay, would be several percent of them."""
    arms = make_arms(("ar", "sd", "tree"), (k,), (), 32)
    ratios = []
    for seed in range(5):
        seconds = []
        for chosen in (False, True):
            inner = Treelike(0.75)
            inner.dice.seed(seed)
            drafter: Drafter = DepthController({"sd": inner, "tree": inner}, arms) if chosen else inner
            seconds.append(work_through(inner, drafter, 2 * batch, batch, k)[0])
        ratios.append(seconds[0] / seconds[1])
    assert sum(ratios) / len(ratios) > 0.99


def test_one_sequence_has_trees_soon() -> None:
    arms, inner = make_arms(("ar", "sd", "tree"), (6,), (), 32), Treelike(0.6)
    taken = work_through(inner, DepthController({"sd": inner, "tree": inner}, arms), 6, 1, 6)[1]
    assert sum(arm.nodes > 0 for arm in taken) > 0.8 * len(taken)


class Opening(Fake):
    """No token of the next `rejected` drafts stands; of those after them all do."""

    rejected = 0

    def stands(self, work: Work) -> int:
        self.rejected -= 1
        return 0 if self.rejected >= 0 else work.proposal.num_tokens


def test_the_first_words_of_a_text_do_not_end_drafting() -> None:
    """Catches plain decoding after three rejected drafts, from which nothing is learned any more."""
    inner = Opening()
    controller = DepthController({"sd": inner}, make_arms(("ar", "sd"), (3,), ()))
    measured = controller.measure(1)
    list(rounds(inner, controller, lambda arm: 2.5 if arm.k else 1.0, 40))
    assert measured()
    controller.forget_text()
    inner.rejected = 5
    taken = list(rounds(inner, controller, lambda arm: 2.5 if arm.k else 1.0, 60))
    assert sum(arm.k > 0 for arm in taken) > 55


def test_the_tokens_of_ssd_follow_from_its_hits() -> None:
    """Catches a ratio of accepted to expected tokens, which is above 1 while the acceptance rates are still learned."""
    inner = Fake()
    controller = DepthController({"ssd": inner}, make_arms(("ssd",), (4,), (16,)))
    list(rounds(inner, controller, lambda arm: 1.0, 40))
    assert controller._times[0].ready.value == pytest.approx(1.0, abs=0.02)
    assert controller._rates.accepted(4) > 3.0


def test_times_are_kept_for_the_sizes_that_were_measured() -> None:
    """Catches trials of plain decoding in the first batch of every size, and a choice made by half a measurement."""
    inner = Fake()
    controller = DepthController({"sd": inner, "ssd": inner}, MODES)
    slow = {"ar": 1.0, "sd": 1.9, "ssd": 2.4}
    for batch, count in ((1, 60), (8, 60), (64, 4)):
        measured = controller.measure(batch)
        list(rounds(inner, controller, lambda arm: slow[arm.mode], count, batch=batch))
        assert measured() == (count == 60)
    controller.forget_text()
    assert set(controller._times) == {0, 3}
    assert {arm.mode for arm in rounds(inner, controller, lambda arm: slow[arm.mode], 24, batch=8)} == {"sd"}


class Rested(Fake):
    """Counts the rounds that it is to catch up in: the first one starts its process."""

    caught_up = 0
    share = 1.0  # of a draft's tokens, that stand

    def catch_up(self, works: Seq[Work]) -> bool:
        self.caught_up += 1
        return True

    def stands(self, work: Work) -> int:
        return round(self.share * work.proposal.num_tokens)


def timed(sd: float, ssd: float, share: float = 1.0) -> tuple[Rested, Rested, DepthController]:
    """The drafters of SD and SSD, and a controller that knows the least seconds of their rounds; plain ones take 1."""
    drafters = Rested(), Rested()
    for each in drafters:
        each.share = share
    least = dict(zip(MODES, (1.0, sd, ssd), strict=True))
    return *drafters, DepthController({"sd": drafters[0], "ssd": drafters[1]}, MODES, least)


def test_a_mode_that_cannot_pay_is_never_tried() -> None:
    """Catches trials of SD whose five tokens a round would take the time of six plain ones, and a process for SSD."""
    sd, ssd, controller = timed(6.0, 9.0)
    assert set(rounds(sd, controller, lambda arm: 1.0, 600)) == {PLAIN}
    assert (sd.caught_up, ssd.caught_up, sd.calls, ssd.calls) == (0, 0, [], [])
    assert set(rounds(sd, controller, lambda arm: 2.0, 200, batch=4)) == {PLAIN}


def test_a_trial_of_sd_is_short_and_shows_that_ssd_cannot_pay() -> None:
    """Catches a first answer that trials make slow: with all drafts accepted both modes would be faster."""
    sd, ssd, controller = timed(3.6, 4.0, share=0.25)
    tokens, seconds = 0, 0.0
    for arm in rounds(sd, controller, lambda arm: {"ar": 1.0, "sd": 3.6}[arm.mode], 100):
        tokens, seconds = tokens + 1 + (arm.k > 0), seconds + (3.6 if arm.k else 1.0)
    assert tokens / seconds > 0.92
    assert 3 < sd.calls.count("propose") < 7
    assert ssd.caught_up == 0
    more = [arm.mode for arm in rounds(sd, controller, lambda arm: {"ar": 1.0, "sd": 3.6}[arm.mode], 3000)]
    assert 0 < more.count("sd") < 40  # another text may be easier
    assert (more.count("ssd"), ssd.caught_up) == (0, 0)


def test_sd_is_found_where_plain_decoding_is_expected_to_be_faster() -> None:
    """Three tokens a round are expected at first; here it is five. The first rounds of SD do not count."""
    sd, ssd, controller = timed(3.6, 9.0)
    times = itertools.chain([9.0] * 3, itertools.repeat(3.6))
    taken = [arm.mode for arm in rounds(sd, controller, lambda arm: next(times) if arm.k else 1.0, 120)]
    assert taken[:4] == ["ar"] * 4
    assert taken[-60:].count("sd") > 50
    assert ssd.caught_up == 0


def test_ssd_is_the_first_choice_where_its_rounds_are_short() -> None:
    """Its process is started before the first request, then."""
    _, ssd, controller = timed(2.4, 1.2)
    assert controller.arm.mode == "ssd"
    taken = [arm.mode for arm in rounds(ssd, controller, lambda arm: {"ar": 1.0, "sd": 2.4, "ssd": 1.2}[arm.mode], 200)]
    assert taken.count("ssd") > 180


def test_a_new_choice_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    """Catches a line for every round or measurement, and a choice that nobody is told."""
    inner = Fake()
    controller = controlled(inner)
    with caplog.at_level(logging.INFO, logger="ssd"):
        list(rounds(inner, controller, lambda arm: 1.0 + 0.05 * arm.k + 0.5 * (arm.width > 0), 400, batch=2))
    said = [record.getMessage() for record in caplog.records]
    assert said[-1].startswith("batches of up to 2: mode=sd, k=8; expected tokens/s of a sequence: ar 1, ")
    assert len(said) < 10
    assert all(a != b for a, b in itertools.pairwise(said))


def test_every_size_of_the_batch_has_a_choice_of_its_own() -> None:
    inner = Fake()
    controller = controlled(inner)
    for _ in range(4):
        alone = list(rounds(inner, controller, lambda arm: 1.0, 300))
        many = list(rounds(inner, controller, lambda arm: 1.0 + 2.0 * arm.k, 300, batch=16))
    assert sum(arm.k == 8 for arm in alone) > 200
    assert sum(arm == PLAIN for arm in many) > 200


def test_rounds_that_read_prompts_do_not_count() -> None:
    """They take as long as their prompts."""
    inner = Fake()
    controller = controlled(inner)
    prompt = make_sequence(range(100), id=9)
    for arm in rounds(inner, controller, lambda arm: 1.0 + 0.05 * arm.k, 400):
        chunk = launch(controller, [Work(prompt, 50, 0, decides=False, slot=9)])
        controller.observe(chunk, [None], 100.0 if arm.k else 0.001)
    assert not any(each.mean for each in controller._times[0].seconds.values())  # no round is like the one before it
    assert sum(arm.k == 8 for arm in rounds(inner, controller, lambda arm: 1.0 + 0.05 * arm.k, 400)) > 200


class Resting(Fake):
    """Has a token to read of every round of another drafter, and catches up with 8 at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.behind = 20
        self.unread: list[int] = []  # at each proposal

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        self.unread.append(self.behind)
        self.behind = 0
        return super().propose(works)

    def catch_up(self, works: Seq[Work]) -> bool:
        self.behind = max(0, self.behind - 8)
        return not self.behind


@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_drafter_that_rested_catches_up_first(in_flight: int) -> None:
    """Catches a round that waits for all that a drafter has not read, and one that is told of the rounds of others."""
    sd, ssd = Fake(), Resting()
    controller = DepthController({"sd": sd, "ssd": ssd}, MODES)
    slow = {"ar": 1.0, "sd": 1.2, "ssd": 1.9}
    taken = []
    for arm in rounds(sd, controller, lambda arm: slow[arm.mode], 600, in_flight=in_flight):
        taken.append(arm.mode)
        ssd.behind += arm.mode != "ssd"
    assert set(taken) == {"ar", "sd", "ssd"}
    assert max(ssd.unread) <= 8
    assert ssd.calls.count("propose") == taken.count("ssd")
    assert sd.calls.count("propose") == taken.count("sd")
    assert taken.count("sd") > 500


def test_plain_rounds_leave_the_drafter_alone() -> None:
    """Catches a draft model that reads the prompts of rounds without drafts, which makes them slower."""
    inner = Fake()
    controller = DepthController({"sd": inner}, [PLAIN, Arm(4, 0)])
    slow = list(rounds(inner, controller, lambda arm: 1.0 + 5.0 * arm.k, 300))
    told = inner.calls.count("prepare")
    assert told == sum(arm.k > 0 for arm in slow) < 30
    assert controller.stats.rounds == {"ar": 300 - told, "sd": told}


def test_cores_and_tokens_are_those_of_the_mode() -> None:
    """The target has all cores, and rounds in flight, where the drafter of the round needs neither."""
    sd, ssd = Fake(), Fake()
    ssd.cores, ssd.needs_tokens = 3, True
    controller = DepthController({"sd": sd, "ssd": ssd}, MODES)
    found = {(arm.mode, controller.cores, controller.needs_tokens) for arm in rounds(sd, controller, lambda _: 1.0, 60)}
    assert {("sd", 0, False), ("ar", 0, False), ("ssd", 3, True)} <= found


def test_what_it_is_told_goes_on_to_its_drafter() -> None:
    inner = Fake()
    controller = DepthController({"ssd": inner}, make_arms(("ssd",), (4,), (16,)))
    works = launch(controller, [Work(make_sequence([1, 2], [3]), 1, 2, lookahead=4)])
    outcome = decided(inner, works[0])
    controller.observe(works, [outcome], 1.0)
    controller.forget(works[0].sequence)
    assert inner.told == [outcome]
    assert inner.calls == ["propose", "settle", "prepare", "observe", "forget"]
    assert controller.stats.busy_seconds == inner.stats.busy_seconds
    controller.observe([], [], 1.0)  # of a round that it knows nothing of: the drafter was left alone


def test_the_whole_interface_is_forwarded() -> None:
    """Catches a method that is new in the interface, and answered by the base class instead of the drafter."""
    inner = Fake()
    inner.needs_tokens = True
    assert controlled(inner).needs_tokens
    methods = {name for name, value in vars(Drafter).items() if callable(value)}
    assert methods <= set(vars(DepthController))


def test_prepared_drafts_that_are_not_there_count() -> None:
    """Catches arms that are judged by their rounds' times alone: quick rounds without drafts yield little."""

    class Missing(Fake):
        """What is prepared is never right: there is only what was prepared for something else."""

        def propose(self, works: Seq[Work]) -> list[Proposal]:
            found = super().propose(works)
            return [Proposal(p.token_ids, None, Origin.SIBLING) for p in found] if self.budget else found

        def stands(self, work: Work) -> int:
            return 0 if work.proposal.origin is Origin.SIBLING else work.proposal.num_tokens

    inner = Missing()
    controller = controlled(inner)
    taken = list(rounds(inner, controller, lambda arm: 1.0 if arm.width else 1.1 + 0.05 * arm.k, 300))
    assert sum(arm.width == 0 for arm in taken[100:]) > 180


@pytest.mark.parametrize("seed", mostly_slow([1, 2, 3], fast={1}))
def test_a_change_of_text_is_not_taken_for_a_difference_of_arms(seed: int) -> None:
    """Catches yields learned for each arm by itself: those of an arm not used of late are those of another text."""
    dice, stands = random.Random(seed), 0.6

    class Often(Fake):
        """Of what is prepared, some is for another outcome, and does not stand."""

        def propose(self, works: Seq[Work]) -> list[Proposal]:
            found = super().propose(works)
            missed = [self.budget and dice.random() >= 0.85 for _ in works]
            return [Proposal(p.token_ids, None, Origin.SIBLING) if m else p for p, m in zip(found, missed, strict=True)]

        def stands(self, work: Work) -> int:
            if work.proposal.origin is Origin.SIBLING:
                return 0
            return len(list(itertools.takewhile(lambda _: dice.random() < stands, work.proposal.token_ids)))

    def seconds(arm: Arm) -> float:
        return (0.96 if arm.width else 1.0) * (1.0 + 0.15 * arm.k) * dice.gauss(1.0, 0.02)

    inner, taken = Often(), list[Arm]()
    controller = controlled(inner)
    for i, arm in enumerate(rounds(inner, controller, seconds, 1200, batch=8)):
        stands = 0.9 if i // 60 % 2 else 0.6
        taken.append(arm)
    assert sum(arm.width == 0 for arm in taken[100:]) > 0.85 * 1100
