"""A short soak passes, and a soak finds defects that are planted. `make soak` is the long one."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

import serve_process
from live_server import SPECULATION, serving
from serve_process import CAN_BE_MEASURED, Held, gauges
from soak import clients, run
from soak.asks import Choice, read_answer, read_stream
from soak.run import Plan, drive, soak

from ssd import LLM

SHORT = Plan(
    filling=0, requests=150, seed=1, warm_up=70, distinct=20, vanishing=5, slow=1, growth=128
)  # MiB: it is still warming up, and has not given freed memory back


@dataclass(frozen=True)
class Local:
    """A server of this process, whose memory is not its own, without a drafter's process."""

    url: str

    def held(self) -> Held:
        return Held(0, 0, 0, 0)

    def drafters(self) -> list[int]:
        return []


@pytest.mark.slow
def test_a_server_survives_clients_that_vanish_and_read_slowly(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every answer is that of plain decoding."""
    monkeypatch.setattr(serve_process, "GIVE_BACK_SECONDS", 0.0)
    monkeypatch.setattr(clients, "SLOW_SECONDS", 1.0)
    plan = replace(SHORT, requests=40, warm_up=10, distinct=10, vanishing=3)
    with (
        LLM("tiny-llama", device="cpu", max_model_len=512, speculation=SPECULATION["sd"]) as drafting,
        serving(drafting) as served,
    ):
        report = drive(Local(served.url), llm, plan)
    assert report.problems == []
    assert (report.counts["plain"], report.counts["vanishing"], report.counts["slow"]) == (36, 3, 1)
    assert report.metrics["spec_decode_num_drafts_total"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not CAN_BE_MEASURED, reason="what a process holds is read from /proc")
def test_a_server_survives_drafters_that_are_killed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a process of its own: and nothing is left behind."""
    monkeypatch.setattr(serve_process, "GIVE_BACK_SECONDS", 1.0)
    report = soak(llm, SHORT)
    assert report.problems == []
    assert (report.counts["plain"], report.counts["vanishing"], report.counts["slow"]) == (144, 5, 1)
    assert report.metrics["drafter_failures_total"] >= report.counts["killed"] >= 1


def test_streamed_chunks_are_the_whole_answer() -> None:
    def chunk(**changes: Any) -> dict[str, Any]:
        return {"index": 0, "text": "", "finish_reason": None, "logprobs": None, **changes}

    logprobs = {"tokens": ["a"], "token_logprobs": [-1.0], "top_logprobs": [{"a": -1.0}], "text_offset": [0]}
    whole = chunk(text="ab", finish_reason="stop", token_ids=[1, 2], logprobs=logprobs)
    parts = chunk(text="a", token_ids=[1], logprobs=logprobs), chunk(text="b", token_ids=[2], finish_reason="stop")
    assert read_answer({"choices": [whole]}) == read_answer({"choices": parts})
    assert read_answer({"choices": [whole]}) != read_answer({"choices": parts[1:]})
    with pytest.raises(ValueError, match="cut"):
        read_stream(['data: {"choices": []}'])
    with pytest.raises(ValueError, match="private"):
        read_stream(['data: {"error": "private"}', "data: [DONE]"])


def test_a_wrong_answer_and_what_is_left_behind_are_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    """On made-up figures: the comparisons themselves."""
    report = run.Report(before=Held(8, 9, 100, 90))
    ask = run.random_ask(run.random.Random(1))

    async def answer(*_: Any, **__: Any) -> list[Choice]:
        return [Choice("wrong")]

    monkeypatch.setattr(run, "plain", answer)
    one = run._Run(None, SHORT, report, [ask], [], {id(ask): [Choice("right")]}, run.random.Random(1), lambda: None)  # type: ignore[arg-type]
    asyncio.run(one._one(None, "plain"))  # type: ignore[arg-type]
    assert "wrong answer" in report.problems.pop()
    for after, found in (
        (Held(8, 9, 110, 100), False),
        (Held(9, 9, 100, 90), True),
        (Held(8, 10, 100, 90), True),
        (Held(8, 9, 229, 90), True),
        (Held(8, 9, 100, 219), True),
    ):
        report.after, report.problems = after, []
        one._compare()
        assert bool(report.problems) == found, after


def test_metrics_are_read() -> None:
    assert gauges('# HELP x\nssd_rounds_total{model_name="m"} 3.0\npython 1\n') == {"rounds_total": 3.0}
