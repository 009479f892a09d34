"""What may happen to an engine between two rounds: faults of rounds and drafters, preemption, a lost cache.

The public methods of `Faults`, but for `end`, are kinds of an `Event`. Called on the engine's thread.
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Any

from ssd.core import Proposal, Work
from ssd.decoding.round import InFlight
from ssd.engine.engine import Engine

DRAFTER_CALLS = ("propose", "settle", "prepare", "observe")


class Faults:
    def __init__(self, engine: Engine) -> None:
        self.lost: set[str] = set()  # requests with a round that was made to fail
        self._engine, self._round, self._drafter = engine, engine.round, engine.round.drafter
        self._patched: list[tuple[object, str]] = []

    def end(self) -> None:
        """Takes back the faults that have not happened."""
        for owner, name in self._patched:
            vars(owner).pop(name, None)

    def _once(self, owner: object, name: str, function: Callable[..., Any]) -> None:
        """The next call of a method is function(method, arguments)."""
        method = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            vars(owner).pop(name, None)
            return function(method, *arguments)

        setattr(owner, name, call)
        self._patched.append((owner, name))

    def _lose(self, works: Seq[Work]) -> None:
        self.lost |= {work.sequence.request.id for work in works}

    def preempt(self, dice: random.Random) -> None:
        self._engine.flush()
        if self._engine.scheduler.running:
            self._engine.scheduler.preempt(dice.choice(self._engine.scheduler.running))

    def forget_prefixes(self, dice: random.Random) -> None:
        self._engine.scheduler.pool.clear_prefix_cache()

    def launch_fails(self, dice: random.Random) -> None:
        """Before the device has done anything, or after everything."""
        late = dice.random() < 0.5

        def fail(launch: Callable[[Seq[Work]], InFlight], works: Seq[Work]) -> None:
            self._lose(works)
            if late:
                launch(works)
            raise MemoryError("planned")

        self._once(self._round, "launch", fail)

    def collect_fails(self, dice: random.Random) -> None:
        def fail(collect: Callable[[InFlight], object], round_: InFlight) -> None:
            self._lose(round_.works)
            raise MemoryError("planned")

        self._once(self._round, "collect", fail)

    def drafter_raises(self, dice: random.Random) -> None:
        def fail(method: Callable[..., object], *arguments: Any) -> None:
            raise ValueError("planned")

        self._once(self._drafter, dice.choice(DRAFTER_CALLS), fail)

    def drafter_lies(self, dice: random.Random) -> None:
        """Random tokens, ids that there are not, too many tokens, or too many drafts."""
        high = dice.choice([10, self._round.target.vocab_size, 1 << 30])

        def lie(propose: Callable[[Seq[Work]], list[Proposal]], works: Seq[Work]) -> list[Proposal]:
            propose(works)
            lies = [[dice.randint(-1, high) for _ in range(dice.choice([0, 2, 99]))] for _ in works]
            return [Proposal(tuple(each)) for each in (lies * 2 if dice.random() < 0.2 else lies)]

        self._once(self._drafter, "propose", lie)

    def drafter_killed(self, dice: random.Random) -> None:
        drafters: list[Any] = getattr(self._drafter, "inner", [self._drafter])
        pid = dice.choice(drafters[-1].replicas).supervisor.pid
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    def arm_changes(self, dice: random.Random) -> None:
        """The next round has another mode, draft length or number of branches."""
        controller: Any = self._drafter
        controller._take(dice.choice(controller._arms))
