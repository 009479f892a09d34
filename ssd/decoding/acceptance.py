"""What a verification decides: how many drafted tokens stand, and which token the target adds.

Greedy rows, and rows without a draft, are decided alike under both rules: by the target's own choice. Knows nothing of
models, KV or drafters.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import torch

from ssd.core import Outcome, Work
from ssd.decoding.law import Row, choose, logprobs, probabilities, rows_of, sample
from ssd.decoding.noise import Stream, uniform


class Acceptance(Protocol):
    """A rule for reading the target's logits of verified works."""

    def decide(self, works: Seq[Work], logits: torch.Tensor) -> list[Outcome | None]:
        """One outcome a work; None where nothing is decided (a prefill chunk). The logits may be overwritten."""


class Coupled:
    """Keeps drafted tokens while they are what the target chooses itself, with the noise of each position.

    The target's choice is a function of the tokens before it and the seed, so the text is the one that it writes alone.
    """

    def decide(self, works: Seq[Work], logits: torch.Tensor) -> list[Outcome | None]:
        rows, raw = _rows_and_raw_logits(works, logits)
        chosen = iter(choose(logits, rows) if rows else [])
        decisions = [_while_equal(work, [next(chosen) for _ in range(work.num_rows)]) for work in works]
        return _outcomes(works, rows, decisions, raw)


class Rejection:
    """Keeps a drafted token with probability min(1, p/q); at the first that falls, draws from what p has more than q.

    The text follows the target's law, but differs from what it writes alone with the same seed. A proposal without laws
    was not drawn at all: its q is one on each of its tokens.
    """

    def decide(self, works: Seq[Work], logits: torch.Tensor) -> list[Outcome | None]:
        rows, raw = _rows_and_raw_logits(works, logits)
        trials, plain = _split(works)
        drawn = _draw(trials, rows, logits) if trials else {}
        chosen = iter(choose(logits[plain], [rows[i] for i in plain]) if plain else [])
        decisions = [
            drawn[i] if i in drawn else _while_equal(work, [next(chosen) for _ in range(work.num_rows)])
            for i, work in enumerate(works)
        ]
        return _outcomes(works, rows, decisions, raw)


@dataclass(frozen=True)
class _Trial:
    """A sampled work with a draft, and where its rows are."""

    index: int  # among the works
    work: Work
    first_row: int

    @property
    def drafted(self) -> tuple[int, ...]:
        return self.work.proposal.token_ids


def _split(works: Seq[Work]) -> tuple[list[_Trial], list[int]]:
    """Works to be tried with the ratio rule, and the rows of all others."""
    trials: list[_Trial] = []
    plain: list[int] = []
    start = 0
    for i, work in enumerate(works):
        if work.num_rows > 1 and not work.sequence.params.greedy:
            trials.append(_Trial(i, work, start))
        else:
            plain += range(start, start + work.num_rows)
        start += work.num_rows
    return trials, plain


def _draw(trials: Seq[_Trial], rows: Seq[Row], logits: torch.Tensor) -> dict[int, list[int]]:
    """The tokens that each trial ends with."""
    wanted = [trial.first_row + j for trial in trials for j in range(trial.work.num_rows)]
    p = probabilities(logits[wanted], [rows[i] for i in wanted])
    starts = [0]
    for trial in trials:
        starts.append(starts[-1] + trial.work.num_rows)
    ratios = _drafted_probabilities(trials, p, starts)
    accepted = [_accepted(trial, pairs, rows) for trial, pairs in zip(trials, ratios, strict=True)]
    final = [_final_law(trial, p[start:], n) for trial, start, n in zip(trials, starts, accepted, strict=False)]
    last = [rows[trial.first_row + n] for trial, n in zip(trials, accepted, strict=True)]
    own = sample(torch.stack(final), last, Stream.RECOVERY)
    return {trial.index: [*trial.drafted[:n], token] for trial, n, token in zip(trials, accepted, own, strict=True)}


def _drafted_probabilities(trials: Seq[_Trial], p: torch.Tensor, starts: Seq[int]) -> list[list[tuple[float, float]]]:
    """For every drafted token what the target gives it, and what the draft gave it."""
    positions = [start + j for trial, start in zip(trials, starts, strict=False) for j in range(len(trial.drafted))]
    tokens = [token for trial in trials for token in trial.drafted]
    ps = iter(p[positions, tokens].tolist())
    pairs = []
    for trial in trials:
        laws, k = trial.work.proposal.laws, len(trial.drafted)
        qs = [1.0] * k if laws is None else laws[range(k), list(trial.drafted)].tolist()
        pairs.append([(next(ps), q) for q in qs])
    return pairs


def _accepted(trial: _Trial, pairs: Seq[tuple[float, float]], rows: Seq[Row]) -> int:
    for j, (p, q) in enumerate(pairs):
        row = rows[trial.first_row + j]
        if not uniform(row.sequence.seed, row.position) * q < p:
            return j
    return len(pairs)


def _final_law(trial: _Trial, p: torch.Tensor, accepted: int) -> torch.Tensor:
    """Where the target's own token is drawn from: p after a whole draft, else what p has more than q."""
    law = p[accepted]
    if accepted == len(trial.drafted):
        return law
    laws = trial.work.proposal.laws
    if laws is None:
        rest = law.clone()
        rest[trial.drafted[accepted]] = 0.0
    else:
        rest = (law - laws[accepted].to(law)).clamp_(min=0.0)
    return rest if float(rest.sum()) > 0.0 else law  # p equals q: only rounding can have rejected


# --- both rules -------------------------------------------------------------------------------------------------------


def _rows_and_raw_logits(works: Seq[Work], logits: torch.Tensor) -> tuple[list[Row], dict[int, torch.Tensor]]:
    """The rows, and copies of those whose log-probabilities are wanted (choosing may overwrite them)."""
    rows = [row for work in works for row in rows_of(work)]
    return rows, {i: logits[i].clone() for i, row in enumerate(rows) if row.params.logprobs is not None}


def _while_equal(work: Work, chosen: list[int]) -> list[int]:
    """Drafted tokens as long as the target chooses them too, then its own."""
    accepted = 0
    while accepted < len(work.proposal.token_ids) and work.proposal.token_ids[accepted] == chosen[accepted]:
        accepted += 1
    return chosen[: accepted + 1]


def _outcomes(
    works: Seq[Work], rows: Seq[Row], decisions: Seq[list[int]], raw: dict[int, torch.Tensor]
) -> list[Outcome | None]:
    outcomes: list[Outcome | None] = []
    start = 0
    for work, tokens in zip(works, decisions, strict=True):
        wanted = work.num_rows > 0 and work.sequence.params.logprobs is not None
        details = [logprobs(raw[start + j], rows[start + j], t) for j, t in enumerate(tokens)] if wanted else []
        outcomes.append(Outcome(tuple(tokens), tuple(details)) if work.num_rows else None)
        start += work.num_rows
    return outcomes
