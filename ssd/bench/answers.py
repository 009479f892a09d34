"""Requests and answers of a benchmark, the same for every contender: this engine, another library, a server.

Speeds are computed from the answers alone, by the same rule for all of them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Final, Protocol

PERCENTILES: Final = (50, 90, 99)

Message = dict[str, str]
Prompt = str | list[int] | list[Message]  # text, token ids, or a chat


class Progress:
    """Displays the progress of measurements. This one displays nothing."""

    def begin(self, name: str, count: int) -> Callable[..., object]:
        """Called with a number of steps; what it returns is called after each of them, perhaps with a new name."""
        return lambda name="": None

    def tell(self, line: str) -> None:
        """Called with what has been measured, as soon as it has."""


NO_PROGRESS: Final = Progress()


@dataclass(frozen=True)
class RequestSettings:
    """Settings of all requests of a benchmark."""

    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0
    batch: int = 1  # concurrent requests
    ignore_eos: bool = True  # so that all contenders generate the same number of tokens
    max_rounds: int | None = None  # stop after this number of rounds (this engine only)
    logprobs: bool = False  # with the log-probability of every token


@dataclass
class Answer:
    """The answer to one request. Times are those of `time.perf_counter`, in seconds."""

    began: float  # when the request was submitted
    prompt_tokens: int
    text: str
    deliveries: list[tuple[float, float]] = field(default_factory=list)  # (time, number of tokens)
    token_ids: list[int] | None = None  # None: not known
    logprobs: list[tuple[str, float]] | None = None  # every token's text and log-probability; None: not known

    @property
    def output_tokens(self) -> int:
        return round(sum(count for _, count in self.deliveries))

    @property
    def gaps(self) -> list[float]:
        """Seconds between two deliveries; with speculation one delivery has several tokens."""
        return [after - before for (before, _), (after, _) in pairwise(self.deliveries)]

    @property
    def seconds_per_token(self) -> float | None:
        """Of the tokens after the first delivery; None for fewer than two tokens."""
        return sum(self.gaps) / (self.output_tokens - 1) if self.output_tokens > 1 else None


class Contender(Protocol):
    """A system under test."""

    name: str
    note: str  # for the report: a version, a limitation; may be empty

    def answer(self, prompts: Seq[Prompt], asked: RequestSettings) -> list[Answer]:
        """Answers in the order of the prompts, `asked.batch` at a time."""
        ...

    def close(self) -> None:
        """Stops what it has started."""
        ...


@dataclass(frozen=True)
class Speed:
    """Speed of concurrent answers."""

    output_tokens: int
    seconds: float  # from the first request to the last token
    prefill_seconds: float  # time with at least one request in prefill
    decode_seconds: float  # the rest
    decode_tokens: float  # generated in `decode_seconds`

    @property
    def decode_rate(self) -> float:
        """Tokens per second of decoding, without prefill."""
        return self.decode_tokens / self.decode_seconds if self.decode_seconds else 0.0

    @classmethod
    def of(cls, answers: Seq[Answer]) -> Speed:
        answers = [answer for answer in answers if answer.deliveries]
        if not answers:
            return cls(0, 0.0, 0.0, 0.0, 0.0)
        reading = _union([(a.began, a.deliveries[0][0]) for a in answers])
        busy = _union([(a.began, a.deliveries[-1][0]) for a in answers])
        decoded = [(when, count) for a in answers for when, count in a.deliveries if not _within(when, reading)]
        prefill = sum(end - start for start, end in reading)
        return cls(
            sum(a.output_tokens for a in answers),
            sum(end - start for start, end in busy),
            prefill,
            sum(end - start for start, end in busy) - prefill,
            sum(count for _, count in decoded),
        )


def percentiles(seconds: Seq[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None without values."""
    if not seconds:
        return None
    ordered = sorted(seconds)
    found = {f"p{p}": ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in PERCENTILES}
    return {name: 1000 * value for name, value in {"mean": statistics.fmean(ordered), **found}.items()}


def _union(spans: Seq[tuple[float, float]]) -> list[tuple[float, float]]:
    """The union of time spans as disjoint spans, in order."""
    found: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _within(when: float, spans: Seq[tuple[float, float]]) -> bool:
    return any(start < when <= end for start, end in spans)
