"""Runs the contenders in turns, and computes the figures of a report.

They take turns on every prompt (on every prompt set where several are answered at once), in alternating order, so that
a change of the machine's speed affects all of them: ratios are those of one turn. Every contender has a warm-up that is
not counted.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, Final

from ssd.bench.answers import NO_PROGRESS, Answer, Contender, Progress, Prompt, RequestSettings, Speed, percentiles
from ssd.bench.load import LoadMeter, load_warning
from ssd.bench.ours import OurContender
from ssd.bench.workload import Workload
from ssd.engine.metrics import EngineMetrics

MEAN: Final = "mean"  # of the sets
# 97.5 % quantile of Student's t distribution by degrees of freedom, from 1 on; beyond, see `_quantile`.
_QUANTILES: Final = (12.71, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


@dataclass
class Turn:
    """One run of a contender over one prompt, or over a set of them."""

    repeat: int
    group: int  # number of the prompt within its set; 0 if all of them were answered at once
    answers: list[Answer]
    speed: Speed
    others: float  # cores in use by other processes
    metrics: EngineMetrics | None = None  # of this engine's contenders


@dataclass
class Measured:
    """All turns of one contender, by set."""

    contender: Contender
    turns: dict[str, list[Turn]] = field(default_factory=dict)


def measure(
    contenders: Seq[Contender],
    workloads: Seq[Workload],
    asked: RequestSettings,
    repeats: int,
    progress: Progress = NO_PROGRESS,
) -> list[Measured]:
    found = [Measured(contender) for contender in contenders]
    count = sum(len(_groups(workload, asked)) for workload in workloads)
    done = progress.begin("warm-up", len(found) * (1 + repeats * count))
    seconds = _warm_up(found, workloads[0], asked, done) * repeats * sum(len(each.prompts) for each in workloads)
    progress.tell(f"turns of each method: {repeats * count}, about {seconds / 60:.1f} minutes in all")
    for repeat in range(repeats):
        for workload in workloads:
            groups = _groups(workload, asked)
            for group, prompts in enumerate(groups):
                for measured in found if (repeat + group) % 2 == 0 else found[::-1]:
                    turn = _turn(measured.contender, prompts, asked, repeat, group)
                    measured.turns.setdefault(workload.name, []).append(turn)
                    done(f"{measured.contender.name}, {workload.name}")
                    if group == len(groups) - 1:
                        progress.tell(_line(measured, workload.name, f"{repeat + 1} of {repeats}"))
    return found


def _warm_up(found: Seq[Measured], workload: Workload, asked: RequestSettings, done: Callable[[str], object]) -> float:
    """Returns about how many seconds all contenders take for a prompt."""
    began, prompts = time.perf_counter(), workload.prompts[: 2 * asked.batch]  # also prefill beside decoding
    for measured in found:
        measured.contender.answer(prompts, asked)
        done(f"{measured.contender.name} warms up")
    return (time.perf_counter() - began) / len(prompts)


def _line(measured: Measured, name: str, which: str) -> str:
    """What a contender has just done on a set."""
    return f"{measured.contender.name}, {name}, {which}: {_rates(measured.turns[name])[-1]:.1f} tokens/s"


def _groups(workload: Workload, asked: RequestSettings) -> list[list[Prompt]]:
    """The prompts of each turn: one; all of a set if they are batched, as requests that end make room for others."""
    alone = asked.batch == 1 and asked.max_rounds is None
    return [[prompt] for prompt in workload.prompts] if alone else [workload.prompts]


def _turn(contender: Contender, prompts: Seq[Prompt], asked: RequestSettings, repeat: int, group: int) -> Turn:
    meter = LoadMeter()
    answers = contender.answer(prompts, asked)
    metrics = contender.metrics if isinstance(contender, OurContender) else None
    return Turn(repeat, group, answers, Speed.of(answers), meter.others(), metrics)


def same_text(found: Seq[Measured]) -> bool | None:
    """Whether all contenders of this engine generated the same tokens in every turn; None: there is only one."""
    ours = [measured for measured in found if isinstance(measured.contender, OurContender)]
    if len(ours) < 2:
        return None
    return all(_tokens(measured, name) == _tokens(ours[0], name) for measured in ours for name in measured.turns)


def _tokens(measured: Measured, name: str) -> list[list[list[int] | None]]:
    return [[answer.token_ids for answer in turn.answers] for turn in measured.turns[name]]


def warnings(found: Seq[Measured]) -> list[str]:
    """Why the figures of this engine's methods are not to be trusted: a busy machine, different numbers of cores."""
    busy: dict[float, str] = {}  # by cores in use by others
    cores: dict[str, int] = {}
    for measured in found:
        contender = measured.contender
        if isinstance(contender, OurContender):
            others = statistics.fmean(turn.others for turns in measured.turns.values() for turn in turns)
            if warning := load_warning(others, contender.cores - contender.server_cores):
                busy[others] = warning
            if contender.on_cpu:
                cores[contender.name] = contender.cores
    told = [busy[max(busy)]] if busy else []
    if len(set(cores.values())) > 1:
        used = ", ".join(f"{name} {count}" for name, count in cores.items())
        told.append(f"the methods used different numbers of cores ({used}): allow more threads (OMP_NUM_THREADS)")
    return told


# --- figures ----------------------------------------------------------------------------------------------------------


def figures(found: Seq[Measured]) -> list[dict[str, Any]]:
    """One row per contender and set, and one for the mean of the sets; ratios are to the first contender."""
    rows = []
    for measured in found:
        for name in measured.turns:
            rows.append(_row(measured, name, [name], found[0]))
        rows.append(_row(measured, MEAN, list(measured.turns), found[0]))
    return rows


def _row(measured: Measured, name: str, sets: Seq[str], first: Measured) -> dict[str, Any]:
    """Figures over the turns of some sets."""
    turns = [turn for each in sets for turn in measured.turns[each]]
    by_repeat = zip(*(_rates(measured.turns[each]) for each in sets), strict=True)
    rates = [statistics.fmean(each) for each in by_repeat]
    ratio, interval = _ratio_and_interval(measured, first, sets)
    return {
        "contender": measured.contender.name,
        "set": name,
        **_threads(measured.contender),
        "decode_tokens_per_second": statistics.median(rates),
        "decode_tokens_per_second_range": [min(rates), max(rates)],
        "ratio": ratio,
        "ratio_interval": interval,
        "other_cores": statistics.fmean(turn.others for turn in turns),
        **_latencies(turns),
        **_counts(turns),
    }


def _threads(contender: Contender) -> dict[str, Any]:
    if not isinstance(contender, OurContender) or not contender.on_cpu:
        return {}
    return {"threads": contender.threads, "draft_processes": contender.draft_processes}


def _rates(turns: Seq[Turn]) -> list[float]:
    """Decode rate over a set, tokens/s, one value per repeat."""
    repeats: dict[int, list[Speed]] = {}
    for turn in turns:
        repeats.setdefault(turn.repeat, []).append(turn.speed)
    totals = [(sum(s.decode_tokens for s in each), sum(s.decode_seconds for s in each)) for each in repeats.values()]
    return [_ratio(tokens, seconds) for tokens, seconds in totals]


def _ratio_and_interval(measured: Measured, first: Measured, sets: Seq[str]) -> tuple[float, list[float] | None]:
    """Geometric mean of the ratios of paired turns to the first contender's, and its 95 % confidence interval.

    Prompts differ more than repeats of one do, and repeats of a prompt are no independent samples of the prompts: the
    interval is that of the prompts' means. With one prompt (or one set, if its prompts are batched) it is that of the
    repeats, which says nothing of other prompts; with one of each there is none.
    """
    logs: dict[tuple[str, int], list[float]] = {}
    for name in sets:
        for turn, other in zip(measured.turns[name], first.turns[name], strict=True):
            if turn.speed.decode_rate and other.speed.decode_rate:
                ratio = turn.speed.decode_rate / other.speed.decode_rate
                logs.setdefault((name, turn.group), []).append(math.log(ratio))
    if not logs:
        return 0.0, None
    samples = [statistics.fmean(each) for each in logs.values()]
    mean = statistics.fmean(samples)
    if len(samples) == 1:
        samples = next(iter(logs.values()))
    if len(samples) == 1:
        return math.exp(mean), None
    half = _quantile(len(samples) - 1) * statistics.stdev(samples) / math.sqrt(len(samples))
    return math.exp(mean), [math.exp(mean - half), math.exp(mean + half)]


def _quantile(freedom: int) -> float:
    return _QUANTILES[freedom - 1] if freedom <= len(_QUANTILES) else 1.96 + 2.6 / freedom


def _ratio(a: float, b: float) -> float:
    return a / b if b else 0.0


def _latencies(turns: Seq[Turn]) -> dict[str, Any]:
    answers = [answer for turn in turns for answer in turn.answers if answer.deliveries]
    each = [a.seconds_per_token for a in answers if a.seconds_per_token is not None]
    seconds, prefill = sum(t.speed.seconds for t in turns), sum(t.speed.prefill_seconds for t in turns)
    return {
        "requests": len(answers),
        "output_tokens": sum(a.output_tokens for a in answers),
        "prompt_tokens": sum(a.prompt_tokens for a in answers),
        "tokens_per_second_with_prompts": _ratio(sum(t.speed.output_tokens for t in turns), seconds),
        "prompt_tokens_per_second": _ratio(sum(a.prompt_tokens for a in answers), prefill),
        "ttft_ms": percentiles([a.deliveries[0][0] - a.began for a in answers]),
        "gap_ms": percentiles([gap for a in answers for gap in a.gaps]),
        "ms_per_token": 1e3 * statistics.fmean(each) if each else None,
    }


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
        "ms_waiting_for_drafts": _ratio(1e3 * sum(m.target_wait_seconds for m in metrics), rounds),
        "ms_verifying": _ratio(1e3 * sum(m.verify_seconds for m in metrics), rounds),
        "drafter_failures": max(m.drafter_failures for m in metrics),
    }
