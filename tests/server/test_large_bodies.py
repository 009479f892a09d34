"""Bodies whose size or number of defects is the attack: their errors are few, short and quick."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import httpx
import pytest
from live_server import MODEL, Served, until
from pydantic import ValidationError

from ssd import SamplingParams
from ssd.server.anthropic.messages import CountTokensRequest, MessagesRequest
from ssd.server.errors import ApiError
from ssd.server.http import bodies
from ssd.server.http.bodies import LARGE, MAX_CONTAINERS, read_json
from ssd.server.openai.responses import ResponsesRequest
from ssd.server.playground.endpoints import PlaygroundRequest
from ssd.server.protocol import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    EmbeddingRequest,
    PublishedRequest,
    Strict,
    TokenizeRequest,
)

REQUESTS = (
    *(ChatRequest, CompletionRequest, CountTokensRequest, DetokenizeRequest, MessagesRequest),
    *(EmbeddingRequest, PlaygroundRequest, ResponsesRequest, TokenizeRequest),
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
    body = {f"x{i}": 1 for i in range(100)}
    if issubclass(request_type, PublishedRequest):
        with pytest.raises(ApiError, match="x0: is not a known parameter"):
            request_type.model_validate(body)
    else:
        found = errors(request_type, body)
        assert [error["loc"] for error in found if error["type"] == "extra_forbidden"] == [("x0",)]


def errors(request_type: type[Strict], body: dict[str, Any], of: str | None = None) -> list[Any]:
    """Of a body, or of one of its fields."""
    try:
        request_type.model_validate(body)
    except ApiError:  # of the one field that is not known
        return []
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


@pytest.mark.parametrize("inner", [False, True])
def test_a_megabyte_of_fields_that_are_not_known_is_refused_at_once(served: Served, inner: bool) -> None:
    """Catches seconds in which each of them is looked up and counted."""
    fields = {f"x{i}": 1 for i in range(50_000)}
    more = {"stream": True, "stream_options": fields} if inner else fields
    answer = post(served, "/v1/completions", {"prompt": "x", "max_tokens": 1, **more})
    assert answer.status_code == 400
    assert "the limit is 2048" in answer.json()["error"]["message"]


# --- what is large does not make others wait --------------------------------------------------------------------------

TEXT = "x" * 2 * LARGE
MESSAGES = [{"role": "user", "content": TEXT}]
LARGE_BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": TEXT},
    "/v1/embeddings": {"input": TEXT},
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 1},
    "/v1/responses": {"input": TEXT},
    "/v1/messages/count_tokens": {"messages": MESSAGES},
    "/tokenize": {"prompt": TEXT},
    "/detokenize": {"tokens": [7] * LARGE},
}
GENERATING = list(LARGE_BODIES)[:5]


def post(served: Served, path: str, fields: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{served.url}{path}", json={"model": MODEL, **fields}, timeout=60)


@pytest.mark.parametrize("path", LARGE_BODIES)
def test_a_large_body_is_read_on_a_thread_of_its_own(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a body of megabytes that is parsed and validated on the event loop, where all others wait for it."""
    threads: list[str] = []

    def watched(body: bytes) -> Any:
        threads.append(threading.current_thread().name)
        return read_json(body)

    monkeypatch.setattr(bodies, "read_json", watched)
    post(served, path, LARGE_BODIES[path])
    assert [name.rpartition("_")[0] for name in threads] == ["ssd-reader"]


def test_other_threads_run_while_a_body_is_read() -> None:
    """Catches json.loads as it is: it holds the GIL until it has read the last of the numbers."""
    body, ticks, over = json.dumps([7] * 1_500_000).encode(), 0, threading.Event()

    def tick() -> None:
        nonlocal ticks
        while not over.is_set():
            ticks += 1
            time.sleep(0.001)

    ticker = threading.Thread(target=tick)
    ticker.start()
    before = ticks
    read_json(body)
    during = ticks - before
    over.set()
    ticker.join()
    assert during > 5  # some 50; it was 0 or 1


@pytest.mark.parametrize("value", [[], {}])
def test_arrays_and_objects_of_a_body_are_limited(value: Any) -> None:
    """Millions of them would take seconds, in which no other thread runs."""
    allowed = [value] * (MAX_CONTAINERS - 1)
    assert read_json(json.dumps(allowed).encode()) == allowed
    with pytest.raises(ApiError, match=f"has {MAX_CONTAINERS + 1} arrays and objects; the limit is {MAX_CONTAINERS}"):
        read_json(json.dumps([*allowed, value]).encode())


def test_brackets_in_a_text_are_no_arrays() -> None:
    """Catches a limit that refuses source code, behind whatever escapes."""
    texts = ['\\"[{' * MAX_CONTAINERS, "\\", "[" * MAX_CONTAINERS]
    for encoding in ("utf-8", "utf-16"):
        assert read_json(json.dumps(texts).encode(encoding)) == texts


@pytest.mark.parametrize("path", GENERATING)
def test_a_text_that_cannot_fit_is_not_tokenized(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its length shows it: 8 MB would take many seconds, for a context of 4096 tokens."""
    limit, text = served.llm.driver.limits.max_model_len, TEXT * 4
    refused = served.llm.engine.metrics.num_refused
    monkeypatch.setattr(served.llm.tokenizer, "encode", None)
    fields = json.loads(json.dumps(LARGE_BODIES[path]).replace(TEXT, text))
    answer = post(served, path, fields)
    error = answer.json()["error"]
    assert answer.status_code == 400
    assert "the prompt is too long: it has at least" in error["message"]
    assert f"maximum context length is {limit} (max_model_len)" in error["message"]
    assert path == "/v1/messages" or error["code"] == "context_length_exceeded"
    until(lambda: served.llm.engine.metrics.num_refused == refused + 1)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/messages"])
def test_a_message_to_be_continued_that_cannot_fit_is_not_tokenized(
    served: Served, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It takes another way: the chat is tokenized before it is submitted."""
    monkeypatch.setattr(served.llm.tokenizer, "encode", None)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": TEXT * 4}]
    more = {"continue_final_message": True} if path == "/v1/chat/completions" else {}
    answer = post(served, path, {"messages": messages, "max_tokens": 1, **more})
    assert answer.status_code == 400
    assert "the prompt is too long: it has at least" in answer.json()["error"]["message"]


@pytest.mark.parametrize(("path", "field"), [("/v1/completions", "prompt"), ("/v1/embeddings", "input")])
@pytest.mark.parametrize("several", [False, True])
def test_token_ids_that_cannot_fit_are_refused_by_their_number(
    served: Served, path: str, field: str, several: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing else looks at millions of them."""
    limit = served.llm.driver.limits.max_model_len
    monkeypatch.setattr("ssd.llm._kind", None)
    monkeypatch.setattr("ssd.engine.driver.check_request", None)
    ids = [7] * limit
    error = post(served, path, {field: [ids] if several else ids}).json()["error"]
    assert error["message"].startswith(f"the prompt is too long: it has {limit} tokens")
    assert (error["param"], error["code"]) == (field, "context_length_exceeded")


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([], "prompt: List should have at least 1 item"),
        ([[]], "prompt.0: List should have at least 1 item"),
        ([7, -1], "prompt.1: Input should be greater than or equal to 0"),
        ([7, True], "prompt.1: Input should be a valid integer"),
        ([[7], [7, "x"]], "prompt.1.1: Input should be a valid integer"),
        ([7] * 50_000 + [1.5], "prompt.50000: Input should be a valid integer"),
        ([[7]] * 300 + [[7] * 50_000 + [-1]], "prompt.300.50000: Input should be greater than or equal to 0"),
        ({}, "prompt: Input should be a valid string"),
    ],
)
def test_an_invalid_prompt_is_named_by_its_place(served: Served, value: Any, message: str) -> None:
    """Whichever way it is validated: large bodies are on a thread, and valid lists are not validated by pydantic."""
    for user in ("u", TEXT):
        answer = post(served, "/v1/completions", {"prompt": value, "user": user})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "prompt")
        assert error["message"].startswith(message)


def test_other_errors_of_a_large_body_are_those_of_a_small_one(strict: Served) -> None:
    """Catches what FastAPI makes of an exception in the reading of a body: 400 without a reason."""
    wrong: tuple[dict[str, Any], ...] = ({"nonsense": 1}, {"best_of": 7}, {"max_tokens": "x"}, {"model": "gpt"})
    for fields in wrong:
        small, large = (
            post(strict, "/v1/completions", {"prompt": "x", "user": user, **fields}) for user in ("u", TEXT)
        )
        assert (small.status_code, small.json()) == (large.status_code, large.json()), fields
        assert small.status_code >= 400
    headers = {"content-type": "application/json"}
    answers = [
        httpx.post(f"{strict.url}/v1/completions", content=b'{"a": NaN' + pad, headers=headers).json()
        for pad in (b"", b" " * 2 * LARGE)
    ]
    assert answers[0] == answers[1]
    assert answers[0]["error"]["code"] == "invalid_json"
