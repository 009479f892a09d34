"""The rejection rule of speculative sampling (Leviathan et al., Chen et al.), decided on the host.

A draft token is accepted with probability min(1, p/q); in place of the first rejected one, a token is drawn from
norm(max(p - q, 0)). The output follows the target's distribution, but is another sample than plain decoding draws with
the same seed. Greedy rows, and rows without a draft, are decided as under the coupled rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np
import torch

from ssd.core import Outcome, PromptPart, Work
from ssd.execution.clock import Clock, now
from ssd.execution.prompts import PromptReads
from ssd.execution.runner import Forward
from ssd.execution.target import Target, Verification, WorkLogits, first_logit_rows
from ssd.kernels.transfers import to_device
from ssd.sampling.noise import Stream, uniform
from ssd.sampling.sampler import Needs, Rows


@dataclass
class _Decided:
    """A verification whose outcomes are known."""

    outcomes: list[Outcome | None]
    reads: PromptReads | None
    began: Clock
    ended: Clock

    def prompt_parts(self) -> Mapping[int, PromptPart]:
        return {} if self.reads is None else self.reads.parts()

    def collect(self) -> list[Outcome | None]:
        self.ended.wait()
        return self.outcomes


class RejectionTarget(Target):
    """A target that decides by the rejection rule. A proposal without distributions has q = 1 on each of its tokens."""

    synchronous = True

    def decide(self, logits: WorkLogits) -> Verification:
        """Decides on the host: waits for the logits."""
        works, forward, raw = logits.works, logits.forward, self._process(logits)
        self.runner.wait(now(self.state.device))
        starts = first_logit_rows(works, gather=forward.inputs.gather)
        decisions = self._tokens(works, starts, forward.logits, forward.inputs.decided(self.state))
        details = None
        if raw is not None:
            padded = [(decisions[i] + [0] * len(rows))[: len(rows)] for i, rows in raw.rows.items()]
            details = raw.fetch(to_device(np.concatenate(padded), self.state.device))
        outcomes: list[Outcome | None] = []
        for i, (work, tokens) in enumerate(zip(works, decisions, strict=True)):
            if not work.decides:
                outcomes.append(None)
                continue
            self.state.append(work.slot, len(work.sequence.tokens), tokens, len(tokens) - 1)
            logprobs = details.of(i, tokens) if details is not None else ()
            outcomes.append(Outcome(tuple(tokens), logprobs, work.proposal.token_ids, work.proposal.origin))
        return _Decided(outcomes, logits.reads, logits.began, now(self.state.device))

    def _rehearse(self, forward: Forward, needs: Needs) -> None:
        rows = forward.inputs.decided(self.state)
        self.sampler.distribution(forward.logits, rows, needs)
        self.sampler.choose(forward.logits, rows, needs)

    def capture(self) -> None:
        """Captures nothing: decisions are made on the host."""

    def _tokens(self, works: Seq[Work], starts: Seq[int], logits: torch.Tensor, rows: Rows) -> list[list[int]]:
        """The new tokens of each work."""
        needs = Needs.of([work.sequence.params for work in works if work.decides])
        if needs.adjusted:
            self.sampler.adjust(logits, rows)
        needs = Needs(truncated=needs.truncated)
        trials = [
            _Trial(work, start)
            for work, start in zip(works, starts, strict=True)
            if work.num_logits > 1 and not work.sequence.params.greedy
        ]
        drawn = self._draw(trials, logits, rows, needs) if trials else {}
        chosen = self.sampler.choose(logits, rows, needs).tolist() if len(logits) else []
        found = []
        for work, start in zip(works, starts, strict=True):
            own = chosen[start : start + work.num_logits]
            tokens = drawn[id(work)] if id(work) in drawn else _while_equal(work, own)
            if -1 in own[: len(tokens)]:  # there is nothing to draw from
                tokens = [*tokens[: own.index(-1)], -1]
            found.append(tokens)
        return found

    def _draw(self, trials: Seq[_Trial], logits: torch.Tensor, rows: Rows, needs: Needs) -> dict[int, list[int]]:
        wanted = [trial.first_row + j for trial in trials for j in range(trial.work.num_logits)]
        p = self.sampler.distribution(*_select(logits, rows, wanted), needs)
        starts = np.cumsum([0, *(trial.work.num_logits for trial in trials)]).tolist()
        ratios = _drafted_probabilities(trials, p, starts)
        accepted = [_accepted(trial, pairs) for trial, pairs in zip(trials, ratios, strict=True)]
        final = [_final(trial, p[start:], n) for trial, start, n in zip(trials, starts, accepted, strict=False)]
        last = [trial.first_row + n for trial, n in zip(trials, accepted, strict=True)]
        own = self.sampler.draw(torch.stack(final), _select(logits, rows, last)[1], Stream.RECOVERY).tolist()
        return {id(t.work): [*t.drafted[:n], token] for t, n, token in zip(trials, accepted, own, strict=True)}


@dataclass(frozen=True)
class _Trial:
    """A sampled (not greedy) work with a draft."""

    work: Work
    first_row: int  # of its logits

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.work.proposal.token_ids


def _select(logits: torch.Tensor, rows: Rows, wanted: Seq[int]) -> tuple[torch.Tensor, Rows]:
    index = to_device(np.array(wanted), logits.device)
    drafted = None if rows.num_drafted is None else rows.num_drafted[index]
    return logits[index], Rows(rows.slots[index], rows.positions[index], drafted, rows.drafts)


def _drafted_probabilities(trials: Seq[_Trial], p: torch.Tensor, starts: Seq[int]) -> list[list[tuple[float, float]]]:
    """(p, q) of every draft token."""
    positions = [start + j for trial, start in zip(trials, starts, strict=False) for j in range(len(trial.drafted))]
    tokens = [token for trial in trials for token in trial.drafted]
    ps = iter(p[positions, tokens].tolist())
    pairs = []
    for trial in trials:
        q, k = trial.work.proposal.distributions, len(trial.drafted)
        qs = [1.0] * k if q is None else q[range(k), list(trial.drafted)].tolist()
        pairs.append([(next(ps), each) for each in qs])
    return pairs


def _accepted(trial: _Trial, pairs: Seq[tuple[float, float]]) -> int:
    sequence = trial.work.sequence
    for j, (p, q) in enumerate(pairs):
        if not uniform(sequence.seed, len(sequence.tokens) + j) * q < p:
            return j
    return len(pairs)


def _final(trial: _Trial, p: torch.Tensor, accepted: int) -> torch.Tensor:
    """What the target's own token is drawn from: p if the whole draft was accepted, else max(p - q, 0)."""
    own = p[accepted]
    if accepted == len(trial.drafted):
        return own
    q = trial.work.proposal.distributions
    if q is None:
        rest = own.clone()
        rest[trial.drafted[accepted]] = 0.0
    else:
        rest = (own - q[accepted].to(own)).clamp_(min=0.0)
    return rest if float(rest.sum()) > 0.0 else own  # p equals q: rejected by rounding only


def _while_equal(work: Work, chosen: list[int]) -> list[int]:
    """The coupled rule: draft tokens as long as they equal the target's choice, then the target's own."""
    drafted, accepted = work.proposal.token_ids, 0
    while accepted < len(drafted) and drafted[accepted] == chosen[accepted]:
        accepted += 1
    return chosen[: accepted + 1]
