"""Runs the contenders in turns, and computes the figures of a report.

They take turns on every prompt set, so that a change of the machine's speed affects all of them: ratios are those of
one turn. Every contender has a warm-up that is not counted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Final

from ssd.bench.answers import Answer, Asked, Contender, Speed
from ssd.bench.ours import OurContender
from ssd.bench.workload import Workload
from ssd.engine.metrics import EngineMetrics

MEAN: Final = "mean"  # of the sets


@dataclass
class Turn:
    """One run of a contender over one prompt set."""

    answers: list[Answer]
    speed: Speed
    metrics: EngineMetrics | None = None  # of this engine's contenders
    waited: float = 0.0  # target_wait_seconds
    verified: float = 0.0  # verify_seconds


@dataclass
class Measured:
    """All turns of one contender, by set."""

    contender: Contender
    turns: dict[str, list[Turn]] = field(default_factory=dict)


def measure(
    contenders: Seq[Contender],
    workloads: Seq[Workload],
    asked: Asked,
    repeats: int,
    track: Callable[[Iterator[str], int], Iterator[str]] = lambda steps, _: steps,
) -> list[Measured]:
    """`track(steps, count)` displays progress."""
    found = [Measured(contender) for contender in contenders]
    for _ in track(_steps(found, workloads, asked, repeats), len(found) * (1 + repeats * len(workloads))):
        pass
    return found


def _steps(found: list[Measured], workloads: Seq[Workload], asked: Asked, repeats: int) -> Iterator[str]:
    for measured in found:
        measured.contender.answer(workloads[0].prompts[: 2 * asked.batch], asked)  # also prefill beside decoding
        yield f"{measured.contender.name} warms up"
    for _ in range(repeats):
        for workload in workloads:
            for measured in found:
                measured.turns.setdefault(workload.name, []).append(_turn(measured.contender, workload, asked))
                yield f"{measured.contender.name}, {workload.name}"


def _turn(contender: Contender, workload: Workload, asked: Asked) -> Turn:
    answers = contender.answer(workload.prompts, asked)
    turn = Turn(answers, Speed.of(answers))
    if isinstance(contender, OurContender):
        turn.metrics = contender.metrics
        turn.waited, turn.verified = turn.metrics.target_wait_seconds, turn.metrics.verify_seconds
    return turn


def same_text(found: Seq[Measured]) -> bool | None:
    """Whether all contenders of this engine generated the same tokens in every turn; None: there is only one."""
    ours = [measured for measured in found if isinstance(measured.contender, OurContender)]
    if len(ours) < 2:
        return None
    return all(_tokens(measured, name) == _tokens(ours[0], name) for measured in ours for name in measured.turns)


def _tokens(measured: Measured, name: str) -> list[list[list[int] | None]]:
    return [[answer.token_ids for answer in turn.answers] for turn in measured.turns[name]]


# --- figures ----------------------------------------------------------------------------------------------------------


def figures(found: Seq[Measured]) -> list[dict[str, Any]]:
    """One row per contender and set, and one for the mean of the sets; ratios are to the first contender."""
    rows = []
    for measured in found:
        for name, turns in measured.turns.items():
            rows.append(_row(measured, name, turns, _by_set(measured)[name], _by_set(found[0])[name]))
        turns = [turn for turns in measured.turns.values() for turn in turns]
        rows.append(_row(measured, MEAN, turns, _means(measured), _means(found[0])))
    return rows


def _row(measured: Measured, name: str, turns: Seq[Turn], rates: list[float], others: list[float]) -> dict[str, Any]:
    """`rates` (tokens/s) and `others` (the first contender's) have one value per repeat; the rest is over all turns."""
    ratios = [_ratio(rate, other) for rate, other in zip(rates, others, strict=True)]
    return {
        "contender": measured.contender.name,
        "set": name,
        "decode_tokens_per_second": statistics.median(rates),
        "decode_tokens_per_second_range": [min(rates), max(rates)],
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
        **_latencies(turns),
        **_counts(turns),
    }


def _by_set(measured: Measured) -> dict[str, list[float]]:
    """Decode rates of the repeats, by set."""
    return {name: [turn.speed.decode_rate for turn in turns] for name, turns in measured.turns.items()}


def _means(measured: Measured) -> list[float]:
    """Mean decode rate over the sets, one value per repeat."""
    return [statistics.fmean(rates) for rates in zip(*_by_set(measured).values(), strict=True)]


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def _latencies(turns: Seq[Turn]) -> dict[str, Any]:
    """`gap`: time between two deliveries of one request; with speculation one delivery has several tokens."""
    answers = [answer for turn in turns for answer in turn.answers if answer.deliveries]
    gaps = [b[0] - a[0] for answer in answers for a, b in zip(answer.deliveries, answer.deliveries[1:], strict=False)]
    each = [(a.deliveries[-1][0] - a.deliveries[0][0]) / (a.output_tokens - 1) for a in answers if a.output_tokens > 1]
    seconds, prefill = sum(t.speed.seconds for t in turns), sum(t.speed.prefill_seconds for t in turns)
    return {
        "requests": len(answers),
        "output_tokens": sum(a.output_tokens for a in answers),
        "prompt_tokens": sum(a.prompt_tokens for a in answers),
        "tokens_per_second_with_prompts": _ratio(sum(t.speed.output_tokens for t in turns), seconds),
        "prompt_tokens_per_second": _ratio(sum(a.prompt_tokens for a in answers), prefill),
        "ttft_ms": _percentiles([a.time_to_first_token for a in answers]),
        "gap_ms": _percentiles(gaps),
        "ms_per_token": 1e3 * statistics.fmean(each) if each else None,
    }


def _percentiles(seconds: Seq[float]) -> dict[str, float] | None:
    ordered = sorted(seconds)
    if not ordered:
        return None
    at = {f"p{p}": ordered[min(len(ordered) - 1, p * len(ordered) // 100)] for p in (50, 90, 99)}
    return {name: 1e3 * value for name, value in at.items()}


def _counts(turns: Seq[Turn]) -> dict[str, Any]:
    """Speculation statistics and time per round, of this engine's contenders."""
    metrics = [turn.metrics for turn in turns if turn.metrics is not None]
    if not metrics:
        return {}
    rounds, drafted = sum(m.num_rounds for m in metrics), sum(m.spec_decode_num_draft_tokens for m in metrics)
    looked_up = sum(sum(m.ssd_look_ups_after) for m in metrics)
    return {
        "rounds": rounds,
        "tokens_per_round": _ratio(sum(m.output_tokens for m in metrics), sum(m.num_sequence_rounds for m in metrics)),
        "acceptance": sum(m.spec_decode_num_accepted_tokens for m in metrics) / drafted if drafted else None,
        "hit_rate": sum(sum(m.ssd_hits_after) for m in metrics) / looked_up if looked_up else None,
        "ms_waiting_for_drafts": _ratio(1e3 * sum(turn.waited for turn in turns), rounds),
        "ms_verifying": _ratio(1e3 * sum(turn.verified for turn in turns), rounds),
        "drafter_failures": max(m.drafter_failures for m in metrics),
    }
