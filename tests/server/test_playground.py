"""The playground's endpoints: what they tell about rounds, and that they change nothing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import httpx
import pytest
from live_server import SMALL, SPECULATION, Served, serving, until

from ssd import LLM, SamplingParams
from ssd.server.playground.endpoints import PAGE

MESSAGES = [{"role": "user", "content": "Tell me about the sea."}]


@pytest.fixture(scope="module")
def drafted() -> Iterator[Served]:
    with LLM(SMALL, device="cpu", speculation=SPECULATION["ssd"]) as llm, serving(llm) as served:
        yield served


@pytest.fixture(scope="module")
def drafted_apart() -> Iterator[Served]:
    speculation = {**SPECULATION["ssd"], "placement": "process"}
    with LLM(SMALL, device="cpu", speculation=speculation) as llm, serving(llm) as served:
        yield served


def streamed(served: Served, **body: Any) -> list[dict[str, Any]]:
    body = {"messages": MESSAGES, "temperature": 0.9, "seed": 5, "max_tokens": 40, **body}
    lines = httpx.post(f"{served.url}/playground/chat", json=body, trust_env=False).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]


def rounds_of(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [round_ for event in events[:-1] for round_ in event["rounds"]]


@pytest.mark.parametrize("settings", [{}, {"branches": True}, {"speculate": False}])
def test_rounds_are_those_of_the_engine(drafted: Served, settings: dict[str, Any]) -> None:
    """Texts, counts and origins agree with `LLM.generate`, branches watched or not."""
    params = SamplingParams(temperature=0.9, seed=5, max_tokens=40)
    [output] = drafted.llm.generate(MESSAGES, params)
    *events, summary = streamed(drafted, **settings)
    rounds = rounds_of([*events, summary])
    assert "".join(text for round_ in rounds for text in round_["tokens"]) == output.text
    assert sum(len(round_["tokens"]) for round_ in rounds) == len(output.token_ids) == summary["output_tokens"]
    assert len(rounds) == summary["rounds_total"]
    assert sum(round_["accepted"] for round_ in rounds) == summary["accepted"]
    assert sum(round_["looked_up"] for round_ in rounds) == summary["look_ups"]
    assert sum(round_["origin"] == "hit" for round_ in rounds) == summary["hits"]
    assert (summary["finish_reason"], summary["seed"]) == (output.finish_reason, 5)
    if settings.get("speculate") is False:
        assert summary["drafted"] == 0
        assert all(len(round_["tokens"]) == 1 for round_ in rounds)
    else:
        assert summary["accepted"] > 0


@pytest.mark.parametrize("served", ["drafted", pytest.param("drafted_apart", marks=pytest.mark.slow)])
def test_a_hit_was_among_the_branches(served: str, request: pytest.FixtureRequest) -> None:
    """Catches branches of another round: the next draft is a hit if and only if a branch came true.

    Also where they were prepared in a process of the draft model's own.
    """
    rounds = rounds_of(streamed(request.getfixturevalue(served), branches=True, max_tokens=80))
    assert sum(bool(round_["branches"]) for round_ in rounds) > len(rounds) / 2
    for before, after in pairwise(rounds):
        if before["branches"] and after["looked_up"]:
            assert (after["origin"] == "hit") == any(branch["came_true"] for branch in before["branches"])


def test_watching_ends_with_the_request(drafted: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if the client goes away in the middle."""
    watch: Any = drafted.llm.engine.round.observers[0]
    begin, watched = watch.watch, []
    monkeypatch.setattr(watch, "watch", lambda request_id: (watched.append(request_id), begin(request_id)))
    body = {"messages": MESSAGES, "max_tokens": 400, "branches": True}
    with (
        httpx.Client(trust_env=False) as client,
        client.stream("POST", f"{drafted.url}/playground/chat", json=body) as response,
    ):
        next(response.iter_bytes())
        assert watched  # not `watch._found`: a short answer may have ended by now
    until(lambda: not watch._found)
    until(lambda: not drafted.llm.engine.scheduler.running)


def test_branches_that_cannot_be_seen_are_refused(served: Served) -> None:
    answer = httpx.post(f"{served.url}/playground/chat", json={"messages": MESSAGES, "branches": True}, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "branches")
    state = httpx.get(f"{served.url}/playground/state", trust_env=False).json()
    assert (state["mode"], state["branches"], state["draft"]) == ("ar", False, None)


@pytest.mark.parametrize(
    "wrong", [{"top_q": 1}, {"messages": []}, {"temperature": -1.0}, {"max_tokens": 0}, {"seed": "x"}]
)
def test_what_is_wrong_is_named(served: Served, wrong: dict[str, Any]) -> None:
    answer = httpx.post(f"{served.url}/playground/chat", json={"messages": MESSAGES, **wrong}, trust_env=False)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(wrong)))


def test_state_counts(drafted: Served) -> None:
    def state() -> dict[str, Any]:
        return httpx.get(f"{drafted.url}/playground/state", trust_env=False).json()

    before = state()
    summary = streamed(drafted)[-1]
    after = state()
    for name in ("output_tokens", "drafted", "accepted", "look_ups", "hits"):
        assert after[name] - before[name] == summary[name]
    assert after["seconds"] > before["seconds"]
    assert (after["model"], after["mode"], after["branches"]) == ("tiny-llama", "ssd", True)


def test_the_page_is_open_and_the_rest_is_not(llm: LLM) -> None:
    with serving(llm, api_keys=("secret",)) as served, httpx.Client(base_url=served.url, trust_env=False) as client:
        for path in PAGE:
            answer = client.get(path)
            assert answer.status_code == 200
            assert "default-src 'none'" in answer.headers["content-security-policy"]
            assert answer.headers["x-dns-prefetch-control"] == "off"
            if "/vendor/" not in path:
                assert "://" not in answer.text.replace("http://www.w3.org/2000/svg", ""), "nothing from outside"
        assert client.get("/playground/state").status_code == 401
        assert client.get("/metrics").status_code == 401
        assert client.post("/playground/chat", json={"messages": MESSAGES}).status_code == 401
        allowed = {"Authorization": "Bearer secret"}
        assert client.get("/playground/state", headers=allowed).status_code == 200


def test_metrics_count_every_request(llm: LLM) -> None:
    """Also one whose client has gone away before its end."""
    with serving(llm) as served, httpx.Client(base_url=served.url, trust_env=False) as client:
        body = {"model": "tiny-llama", "prompt": "One", "max_tokens": 300, "ignore_eos": True, "stream": True}
        assert client.post("/v1/completions", json={**body, "max_tokens": 3}).status_code == 200
        with client.stream("POST", "/v1/completions", json=body) as response:
            next(response.iter_bytes())
        until(lambda: not llm.engine.scheduler.running)
        answer = client.get("/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        for reason in ("length", "abort"):
            line = f'ssd_request_success_total{{finished_reason="{reason}",model_name="tiny-llama"}} 1.0'
            assert line in answer.text
