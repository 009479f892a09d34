"""Bodies whose size or number of defects is the attack: their errors are few, short and quick."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest
from live_server import MODEL, Served
from pydantic import ValidationError

from ssd import SamplingParams
from ssd.server.messages import CountTokensRequest, MessagesRequest
from ssd.server.playground import PlaygroundRequest
from ssd.server.protocol import ChatRequest, CompletionRequest, DetokenizeRequest, Strict, TokenizeRequest
from ssd.server.responses import ResponsesRequest

REQUESTS = (
    *(ChatRequest, CompletionRequest, CountTokensRequest, DetokenizeRequest, MessagesRequest),
    *(PlaygroundRequest, ResponsesRequest, TokenizeRequest),
)
MANY: tuple[Any, ...] = (
    [None] * 100,
    [[None] * 100] * 100,
    ["x", 1] * 100,
    [{}] * 100,
    {str(i): None for i in range(100)},
    {str(i): [] for i in range(100)},
)
FEW = 8  # a union has one for every alternative


@pytest.mark.parametrize("request_type", REQUESTS)
def test_a_field_with_many_defects_has_few_errors(request_type: type[Strict]) -> None:
    """Catches a list or dict that collects an error for each of a million items: gigabytes, and a blocked server."""
    for name in request_type.model_fields:
        for value in MANY:
            assert len(errors(request_type, {name: value}, of=name)) <= FEW, (name, value)


@pytest.mark.parametrize("request_type", REQUESTS)
def test_of_many_unknown_fields_one_is_named(request_type: type[Strict]) -> None:
    found = errors(request_type, {f"x{i}": 1 for i in range(100)})
    assert [error["loc"] for error in found if error["type"] == "extra_forbidden"] == [("x0",)]


def errors(request_type: type[Strict], body: dict[str, Any], of: str | None = None) -> list[Any]:
    """Of a body, or of one of its fields."""
    try:
        request_type.model_validate(body)
    except ValidationError as error:
        return [each for each in error.errors() if of in (None, each["loc"][0])]
    return []


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("logit_bias", {"1": 1, "2": None, "3": None}, "logit_bias.2: Input should be a valid number"),
        ("logit_bias", {"9" * 5000: 1}, "logit_bias="),  # Python reads no number with so many digits
        ("stop", ["x" * 100_000, ""], "stop=['"),
        ("stop", [1] * 1000, "stop.0: Input should be a valid string"),
        ("stop", ["x"] * 1001, "stop: List should have at most 1000 items"),  # the engine prepares them for each sample
        ("prompt", [None] * 1000, "prompt.0: Input should be"),
    ],
)
def test_an_error_is_short_and_names_the_field(served: Served, field: str, value: Any, message: str) -> None:
    answer = httpx.post(
        f"{served.url}/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 1, field: value}
    )
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert len(error["message"]) < 1100
    assert error["message"].startswith(message)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
@pytest.mark.parametrize("field", ["stop_token_ids", "logit_bias"])
def test_no_more_tokens_are_listed_than_the_vocabulary_has(
    served: Served, field: str, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused before anything is made of them: millions would hold up the event loop and the engine for seconds."""
    size = served.llm.driver.limits.vocab_size
    count = size + 1
    value: Any = [7] * count if field == "stop_token_ids" else {str(i): 0.0 for i in range(count)}
    prompt: Any = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    monkeypatch.setattr("ssd.server.protocol.SamplingParams", None)
    answer = httpx.post(f"{served.url}/v1/{path}", json={"model": MODEL, **prompt, field: value})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, field)
    assert f"has {count} entries, and the vocabulary has {size}" in error["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_parameters_are_made_on_other_threads_than_the_event_loops(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Checking a bias for every token takes a tenth of a second."""
    threads: list[threading.Thread] = []
    check = SamplingParams.__post_init__

    def watched(self: SamplingParams, max_tokens: int | None) -> None:
        threads.append(threading.current_thread())
        check(self, max_tokens)

    monkeypatch.setattr(SamplingParams, "__post_init__", watched)
    prompt: Any = {"prompt": "x"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    answer = httpx.post(f"{served.url}/v1/{path}", json={"model": MODEL, "max_tokens": 1, **prompt})
    assert answer.status_code == 200
    assert threads
    assert not {thread.name for thread in threads} & {served.thread.name, "ssd-engine"}


def test_a_megabyte_of_defects_is_refused_at_once(served: Served) -> None:
    answer = httpx.post(f"{served.url}/v1/completions", json={"model": MODEL, "prompt": [None] * 1_500_000})
    assert answer.status_code == 400
    assert answer.elapsed.total_seconds() < 10  # it was 20, and 5 GiB
