"""Priorities and fair shares over HTTP: who is served first, and that nobody's text depends on it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from conftest import mostly_slow
from fakes import paused_at
from live_server import MODEL, SMALL, Served, openai, serving, until

from ssd import LLM, SamplingParams

PROMPT = "Once upon a time"
LONG: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 120, "temperature": 0, "stream": True}
ASK: dict[str, Callable[[Any, dict[str, Any]], object]] = {
    "chat": lambda client, extra: client.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Hello"}], max_tokens=3, extra_body=extra
    ),
    "completions": lambda client, extra: client.completions.create(
        model=MODEL, prompt="Hello", max_tokens=3, extra_body=extra
    ),
    "responses": lambda client, extra: client.responses.create(
        model=MODEL, input="Hello", max_output_tokens=3, extra_body=extra
    ),
}


@pytest.fixture(scope="module")
def single() -> Iterator[Served]:
    """A server that decodes one sequence at a time."""
    with LLM(SMALL, device="cpu", max_num_seqs=1) as llm, serving(llm) as served:
        yield served


@pytest.fixture(scope="module")
def alone(llm: LLM) -> str:
    """The text of LONG."""
    return llm.generate(PROMPT, SamplingParams(max_tokens=120, ignore_eos=True))[0].text


@pytest.mark.parametrize("endpoint", mostly_slow(ASK, fast={"chat"}))
def test_a_request_of_higher_priority_is_answered_first(single: Served, alone: str, endpoint: str) -> None:
    """Also: the one that made way goes on, with the text that it has alone."""
    client = single.client()
    extra = {"priority": 1, "ignore_eos": True}
    with paused_at(single.llm.driver, 8):
        stream = client.completions.create(**LONG, extra_body=extra)
        begin = next(stream).choices[0].text
        preemptions = single.llm.engine.scheduler.num_preemptions
        ASK[endpoint](client, {"priority": -1})
        assert single.llm.engine.num_unfinished_requests == 1
    assert single.llm.engine.scheduler.num_preemptions == preemptions + 1
    assert begin + "".join(chunk.choices[0].text for chunk in stream) == alone


def test_the_queue_is_in_order_of_priority(single: Served) -> None:
    """Catches a priority that is lost between HTTP and the scheduler."""
    client = single.client()

    async def ask(stream: Any) -> list[int]:
        ended: list[int] = []

        async def one(http: httpx.AsyncClient, priority: int) -> None:
            body = {"model": MODEL, "prompt": "Hello", "max_tokens": 24, "ignore_eos": True, "priority": priority}
            (await http.post(f"{single.url}/v1/completions", json=body, timeout=60)).raise_for_status()
            ended.append(priority)

        async with httpx.AsyncClient() as http:
            tasks = [asyncio.create_task(one(http, priority)) for priority in (5, 0, 3, -1)]
            await asyncio.to_thread(until, lambda: len(single.llm.engine.scheduler.waiting) == 4)
            stream.close()
            await asyncio.gather(*tasks)
        return ended

    with paused_at(single.llm.driver, 24):  # those that ask end before
        stream = client.completions.create(**LONG, extra_body={"ignore_eos": True, "priority": -9})
        next(stream)
        assert asyncio.run(ask(stream)) == [-1, 0, 3, 5]


@pytest.mark.parametrize("endpoint", ASK)
def test_a_priority_that_is_no_integer_is_refused(single: Served, endpoint: str) -> None:
    with pytest.raises(openai.BadRequestError, match="priority"):
        ASK[endpoint](single.client(), {"priority": 0.5})


@pytest.mark.parametrize("prompts", mostly_slow([1, 6], fast={6}))
def test_many_samples_or_prompts_do_not_hold_up_another_request(llm: LLM, prompts: int) -> None:
    """A request with many of them gives places to others, and their texts are those that they have alone."""
    body: dict[str, Any] = {"model": MODEL, "max_tokens": 60, "temperature": 1, "seed": 4}
    body |= {"prompt": [PROMPT] * prompts, "n": 6 // prompts}
    with LLM(SMALL, device="cpu", max_num_seqs=4) as own, serving(own) as served:
        client = served.client()
        texts = [""] * 6
        with paused_at(own.driver, 30):
            stream = client.completions.create(**body, stream=True, extra_body={"ignore_eos": True})
            until(lambda: len(own.engine.scheduler.running) == 4)
            client.completions.create(model=MODEL, prompt="Hello", max_tokens=1)
            assert len(own.engine.scheduler.running) + len(own.engine.scheduler.waiting) == 6, "none of them has ended"
        for chunk in stream:
            texts[chunk.choices[0].index] += chunk.choices[0].text
    params = SamplingParams(n=6 // prompts, max_tokens=60, temperature=1.0, seed=4, ignore_eos=True)
    [whole] = llm.generate(PROMPT, params)
    assert texts == [sample.text for sample in whole.samples] * prompts
