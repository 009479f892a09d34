"""The controller: it finds what pays on a clock of the test's own, and never stops a round from being one."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence as Seq

import pytest
from fakes import make_sequence

from ssd.core import Proposal, Work
from ssd.decoding.drafter import Drafter
from ssd.drafting.pace import PLAIN, Arm, Pace, Paced, make_arms


def yields(acceptance: float) -> object:
    return lambda arm: sum(acceptance**i for i in range(arm.k + 1))


def settle(arms: list[Arm], seconds: object, acceptance: float, rounds: int = 400) -> list[Arm]:
    """The arms that it takes, round after round, in a world where an arm takes `seconds(arm)`."""
    pace, taken = Pace(arms), []
    for _ in range(rounds):
        arm = pace.choose(yields(acceptance))  # type: ignore[arg-type]
        pace.record(arm, seconds(arm))  # type: ignore[operator]
        taken.append(arm)
    return taken


ARMS = make_arms(None, (16,))


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

    taken = settle(ARMS, seconds, acceptance)
    late = taken[100:]
    speed = {arm: sum(acceptance**i for i in range(arm.k + 1)) / seconds(arm) for arm in ARMS}
    assert sum(arm in best for arm in late) > 0.8 * len(late)
    achieved = len(late) / sum(1 / speed[arm] for arm in late)
    assert achieved > 0.9 * max(speed.values())


def test_it_comes_back_when_the_world_changes() -> None:
    pace, slow = Pace(ARMS), True
    for i in range(3000):
        slow = i < 600
        arm = pace.choose(yields(0.8))  # type: ignore[arg-type]
        pace.record(arm, 1.0 + arm.k * (3.0 if slow else 0.05))
        if i == 599:
            assert arm == PLAIN
    assert pace.choose(yields(0.8)) != PLAIN  # type: ignore[arg-type]


class Right(Drafter):
    lookahead = 8

    def propose(self, works: Seq[Work]) -> list[Proposal]:
        return [Proposal((7,) * work.lookahead) for work in works]


def test_it_learns_how_often_each_token_stands() -> None:
    drafter = Paced(Right(), make_arms(4, (0,)))
    drafter.round_seconds = 1.0
    sequence = make_sequence([1, 2, 3])
    for _ in range(200):
        [proposal] = drafter.propose([Work(sequence, 1, drafter.lookahead)])
        sequence.tokens += [*proposal.token_ids[:2], 5]  # two of them stand, whatever is drafted
    pace = drafter._paces[0]
    assert drafter.tokens(Arm(2, 0), pace) == pytest.approx(3.0, abs=0.3)
    assert drafter.tokens(Arm(4, 0), pace) == pytest.approx(3.0, abs=0.5)
    assert drafter.lookahead == 4
    drafter.forget(sequence)


def test_no_tokens_are_asked_for_in_a_plain_round() -> None:
    drafter = Paced(Right(), make_arms(None, (0,)))
    assert drafter.propose([Work(make_sequence([1, 2]), 1, 0)]) == [Proposal()]


def test_prepared_drafts_that_are_not_there_count() -> None:
    """Catches arms that are judged by their rounds' times alone: quick rounds without drafts yield little."""

    class Missing(Right):
        def propose(self, works: Seq[Work]) -> list[Proposal]:
            return [Proposal(() if drafter._arm.width else (7,) * work.lookahead) for work in works]

    drafter = Paced(Missing(), make_arms(None, (16,)))
    sequence, taken = make_sequence([1, 2, 3]), []
    sequence.tokens.append(4)
    for _ in range(300):
        arm = drafter._arm
        [proposal] = drafter.propose([Work(sequence, 1, drafter.lookahead)])
        sequence.tokens += [*proposal.token_ids, 5]
        drafter.round_seconds = 1.0 if arm.width else 1.1 + 0.05 * arm.k
        taken.append(arm)
    assert sum(arm.width == 0 for arm in taken[100:]) > 180


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_change_of_text_is_not_taken_for_a_difference_of_arms(seed: int) -> None:
    """Catches yields learned for each arm by itself: those of an arm not used of late are those of another text."""
    dice = random.Random(seed)

    class Often(Right):
        def propose(self, works: Seq[Work]) -> list[Proposal]:
            there = [not drafter._arm.width or dice.random() < 0.85 for _ in works]
            return [Proposal((7,) * (work.lookahead * here)) for work, here in zip(works, there, strict=True)]

    drafter, taken = Paced(Often(), make_arms(None, (16,))), []
    sequences = [make_sequence([1, 2, 3], [4], id=i) for i in range(8)]
    for i in range(1200):
        arm, stands = drafter._arm, 0.9 if i // 60 % 2 else 0.6
        works = [Work(sequence, 1, drafter.lookahead) for sequence in sequences]
        for sequence, proposal in zip(sequences, drafter.propose(works), strict=True):
            standing = list(itertools.takewhile(lambda _: dice.random() < stands, proposal.token_ids))  # noqa: B023
            sequence.tokens += [*standing, 5]
        drafter.round_seconds = (0.96 if arm.width else 1.0) * (1.0 + 0.15 * arm.k) * dice.gauss(1.0, 0.02)
        taken.append(arm)
    assert sum(arm.width == 0 for arm in taken[100:]) > 0.95 * 1100


def test_a_round_that_only_reads_prompts_is_none_of_its_business() -> None:
    drafter = Paced(Right(), make_arms(None, (0,)))
    assert drafter.propose([]) == []
    assert not drafter._paces
