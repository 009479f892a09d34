"""Records the rounds of a text: drafts, prepared branches, outcomes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from ssd.core import LOOKED_UP, Origin, Outcome, RequestOutput, SamplingParams, Sequence, Work
from ssd.decoding.drafter import Prepared
from ssd.decoding.observer import RoundObserver
from ssd.llm import LLM, Prompt, check_served


@dataclass(frozen=True)
class Branch:
    """A prepared draft and its outcome: `accepted` draft tokens, then the target's own `token`."""

    accepted: int
    token: int
    draft: tuple[int, ...]


@dataclass(frozen=True)
class Step:
    """One round: the draft, the branches prepared while it was verified, and the outcome."""

    draft: tuple[int, ...]
    origin: Origin  # of the draft
    branches: tuple[Branch, ...]  # the likeliest first
    accepted: int  # accepted draft tokens
    written: tuple[int, ...]  # those and the target's own token; fewer if the text ends before

    @property
    def hit(self) -> bool:
        """Whether the draft had been prepared in the round before."""
        return self.origin is Origin.HIT

    @property
    def looked_up(self) -> bool:
        """Whether the draft was looked up in prepared branches."""
        return self.origin in LOOKED_UP

    @property
    def own(self) -> tuple[int, ...]:
        """The target's own token, unless the text ended before it."""
        return self.written[self.accepted :]

    def came_true(self, branch: Branch) -> bool:
        return (branch.accepted, (branch.token,)) == (self.accepted, self.own)


class _Branches(RoundObserver):
    """Keeps the branches prepared for a text. Target and draft take turns meanwhile: not for measurements of speed."""

    synchronous = True

    def __init__(self) -> None:
        self.prepared: dict[int, Prepared] = {}  # by the number of output tokens before the round

    def launched(self, works: Seq[Work], prepared: Callable[[Sequence], Prepared]) -> None:
        for work in works:
            if work.decides:
                self.prepared[work.sequence.num_output] = prepared(work.sequence)


def record(llm: LLM, prompt: Prompt, params: SamplingParams) -> tuple[RequestOutput, list[Step]]:
    """Generates a text, while the engine does nothing else, and records its rounds."""
    branches = _Branches()
    with llm.driver.observing(branches):
        answer = llm.stream_deltas(prompt, params)
        outcomes = [outcome for delta in answer for outcome in delta.outcomes]
    output = answer.result()
    check_served(output)
    return output, steps_of(outcomes, branches.prepared, len(output.token_ids))


def steps_of(outcomes: Iterable[Outcome], prepared: Mapping[int, Prepared], num_tokens: int) -> list[Step]:
    """The rounds of a text of `num_tokens` tokens; what the last one decided beyond them is left out."""
    steps, before = [], 0
    for outcome in outcomes:
        branches = tuple(Branch(*key, draft) for key, draft in prepared.get(before, {}).items())
        written = outcome.token_ids[: num_tokens - before]
        steps.append(Step(outcome.draft, outcome.origin, branches, outcome.num_accepted, written))
        before += len(outcome.token_ids)
    return steps
