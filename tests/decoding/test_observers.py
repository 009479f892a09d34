"""Observers of rounds: each event is delivered once, in order, and observing changes no token."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager
from typing import Any

import pytest
from fakes import StateDrafter, make_harness

from ssd.core import Outcome, SamplingParams, Sequence, Work
from ssd.decoding.drafter import Prepared
from ssd.decoding.observer import RoundObserver


class Events(RoundObserver):
    """Writes all events down: names of parts, and works of rounds."""

    def __init__(self, *, synchronous: bool = False) -> None:
        self.synchronous = synchronous
        self.parts: list[str] = []
        self.open: list[str] = []
        self.rounds: list[tuple[str, int]] = []  # event, id of the list of works
        self.outcomes: list[Outcome | None] = []
        self.works: list[Seq[Work]] = []  # kept: ids of lists stay different
        self.most_in_flight = 0

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        self.parts.append(".".join([*self.open, name]))
        self.open.append(name)
        yield
        self.open.remove(name)

    def launched(self, works: Seq[Work], prepared: Callable[[Sequence], Prepared]) -> None:
        assert all(prepared(work.sequence) == {} for work in works)
        self.works.append(works)
        self.rounds.append(("launched", id(works)))
        decided = sum(event == "decided" for event, _ in self.rounds)
        self.most_in_flight = max(self.most_in_flight, len(self.works) - decided)

    def decided(self, works: Seq[Work], outcomes: Seq[Outcome | None], seconds: float) -> None:
        self.rounds.append(("decided", id(works)))
        self.outcomes += outcomes


def answers(*observers: RoundObserver) -> dict[str, list[int]]:
    harness = make_harness(drafter=StateDrafter(3), run_ahead=True)
    harness.engine.round.observers += observers
    for i in range(6):
        harness.engine.add([1 + i, 2, 3], SamplingParams(max_new_tokens=9, ignore_eos=True))
    return {name: output.token_ids for name, output in harness.drain().items()}


@pytest.mark.parametrize("synchronous", [False, True])
def test_every_round_is_told_once(synchronous: bool) -> None:
    """Catches rounds that are told twice or never, and rounds in flight for an observer that needs them in turn."""
    events, other = Events(synchronous=synchronous), Events()
    found = answers(events, other)
    assert found == answers()
    assert events.most_in_flight == (1 if synchronous else 2)
    assert [name for name, _ in events.rounds].count("launched") == len(events.works)
    assert len(set(events.rounds)) == len(events.rounds) == 2 * len(events.works)
    assert sum(outcome is not None for outcome in events.outcomes) >= sum(map(len, found.values())) / 4
    assert (other.rounds, other.parts) == (events.rounds, events.parts)


def test_the_parts_of_a_round_come_in_order() -> None:
    """`settle` and `prepare` are parts of the verification."""
    events = Events(synchronous=True)
    answers(events)
    assert events.parts[:9] == [
        *("schedule", "propose", "verify", "verify.settle", "verify.prepare", "decided"),
        *("serve", "collect", "observe"),
    ]
    assert not events.open


def test_target_and_drafter_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a draft that changes after the target has read it, and a preparation that waits for the decision."""
    harness, calls = make_harness(drafter=StateDrafter(3)), list[str]()
    round_ = harness.engine.round
    for owner, names in ((round_.target, ("stage", "forward", "decide")), (round_.drafter, ("settle", "prepare"))):
        for name in names:
            call = getattr(owner, name)

            def spy(*arguments: Any, name: str = name, call: Any = call, **options: Any) -> Any:
                calls.append(name)
                return call(*arguments, **options)

            monkeypatch.setattr(owner, name, spy)
    harness.run([1, 2, 3], SamplingParams(max_new_tokens=9, ignore_eos=True))
    assert calls[:5] == ["stage", "settle", "forward", "prepare", "decide"]
    assert calls == calls[:5] * (len(calls) // 5)


def test_a_drafter_that_does_not_tell_its_branches_has_none() -> None:
    """Catches an observer's question that fails the round."""

    class Silent(StateDrafter):
        def prepared(self, sequence: Sequence) -> Prepared:
            raise RuntimeError("out of order")

    harness, events = make_harness(drafter=Silent(3)), Events()
    harness.engine.round.observers.append(events)
    assert len(harness.run([1, 2, 3], SamplingParams(max_new_tokens=9, ignore_eos=True)).token_ids) == 9
    assert events.works
