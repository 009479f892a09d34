"""The distribution that SamplingParams describe, written from their documentation in float64, one token at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as Seq

from ssd.core import SamplingParams

STOPS = frozenset({3, 7, 1000})


def adjusted(logits: Seq[float], p: SamplingParams, prompt: Seq[int], output: Seq[int]) -> list[float]:
    z = [x + p.logit_bias.get(t, 0.0) for t, x in enumerate(logits)]
    for t in {*prompt, *output}:
        z[t] = z[t] / p.repetition_penalty if z[t] > 0 else z[t] * p.repetition_penalty
    for t, count in Counter(output).items():
        z[t] -= p.presence_penalty + p.frequency_penalty * count
    return [-math.inf if t in STOPS and len(output) < p.min_tokens else x for t, x in enumerate(z)]


def normalised(weights: Seq[float]) -> list[float]:
    return [w / math.fsum(weights) for w in weights]


def naive_distribution(
    logits: Seq[float], p: SamplingParams, prompt: Seq[int], output: Seq[int], margin: list[float] | None = None
) -> list[float]:
    """The probability of every token. `margin` collects how close a truncation came to going the other way."""
    z = adjusted(logits, p, prompt, output)
    if p.temperature == 0:
        return [float(t == z.index(max(z))) for t in range(len(z))]
    weights = [math.exp((x - max(z)) / p.temperature) for x in z]
    margin = [] if margin is None else margin
    margin += [abs(w - p.min_p) for w in weights if p.min_p]
    weights = [w if w >= p.min_p else 0.0 for w in weights]
    order = sorted(range(len(z)), key=lambda t: (-weights[t], t))
    kept = order[: p.top_k or len(order)]
    total, before = math.fsum(weights[t] for t in kept), 0.0
    nucleus = []
    for t in kept:
        margin += [abs(before / total - p.top_p)] if before else []
        if before < p.top_p * total:
            nucleus.append(t)
        before += weights[t]
    return normalised([w if t in nucleus else 0.0 for t, w in enumerate(weights)])
