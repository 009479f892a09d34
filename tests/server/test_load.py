"""Many clients: the same text as alone, clients that vanish, slow readers, limits, keys, drain, a failing engine."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from conftest import mostly_slow
from fakes import paused_at
from live_server import MODEL, SMALL, SPECULATION, Served, openai, serving, until

from ssd import LLM, SamplingParams
from ssd.core import Work
from ssd.decoding.round import InFlight

PROMPTS = ["Mr. Holmes sat by the fire, and", "A pull request is", "Once upon a time", "The sea was", "def main():"]
CHAT = [{"role": "user", "content": "Tell me a story."}]
ENDLESS: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a time", "max_tokens": 3000, "ignore_eos": True}


@pytest.fixture(autouse=True)
def idle(llm: LLM) -> None:
    """What an earlier test has left to the engine has ended, and is not counted in the next one."""
    until(lambda: llm.engine.num_unfinished_requests == 0)


def random_request(seed: int) -> tuple[dict[str, Any], bool]:
    """The keywords of a completion, and whether it is streamed."""
    draw = random.Random(seed)
    body: dict[str, Any] = {
        "prompt": draw.choice(PROMPTS) * draw.randint(1, 3),
        "temperature": draw.choice([0.0, 0.7, 1.2]),
        "seed": seed,
        "max_tokens": draw.randint(1, 24),
        "n": draw.choice([1, 1, 2]),
        "top_p": draw.choice([1.0, 0.9]),
        "presence_penalty": draw.choice([0.0, 0.6]),
        "stop": draw.choice([None, [" the"], ["\n"]]),
    }
    return body, draw.random() < 0.5


async def answer(client: Any, seed: int) -> list[str]:
    body, stream = random_request(seed)
    if not stream:
        return [choice.text for choice in (await client.completions.create(model=MODEL, **body)).choices]
    texts = [""] * body["n"]
    async for chunk in await client.completions.create(model=MODEL, stream=True, **body):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    return texts


def expected(llm: LLM, seed: int) -> list[str]:
    body, _ = random_request(seed)
    [output] = llm.generate(body.pop("prompt"), SamplingParams(**body))
    return [sample.text for sample in output.samples]


@pytest.fixture(scope="module")
def alone(llm: LLM) -> Callable[[int], list[str]]:
    """The texts of a request alone, by its seed."""
    return functools.cache(functools.partial(expected, llm))


@pytest.mark.parametrize("count", mostly_slow([8, 16, 64], fast={8}))
@pytest.mark.parametrize("mode", mostly_slow(["ar", "sd", "ssd"], fast={"ssd"}))
def test_text_under_load_is_that_of_the_library_alone(alone: Callable[[int], list[str]], mode: str, count: int) -> None:
    """Catches text that depends on the batch, on speculation, or on how it is cut into chunks."""

    async def ask(served: Served) -> list[list[str]]:
        async with served.async_client() as client:
            return await asyncio.gather(*(answer(client, seed) for seed in range(count)))

    with LLM(SMALL, device="cpu", max_num_seqs=8, speculation=SPECULATION[mode]) as own, serving(own) as served:
        assert asyncio.run(ask(served)) == [alone(seed) for seed in range(count)]
        until(lambda: served.admission.sequences == served.admission.tokens == 0)
        accepted = served.llm.engine.metrics.spec_decode_num_accepted_tokens
    assert (accepted > 0) == (mode != "ar")


def test_usage_counts_drafts(llm: LLM) -> None:
    with LLM(SMALL, device="cpu", speculation=SPECULATION["sd"]) as own, serving(own) as served:
        create = served.client().completions.create
        drafted = create(model=MODEL, prompt=PROMPTS[0], max_tokens=30, temperature=0).usage.completion_tokens_details
        plain = create(model=MODEL, prompt=PROMPTS[0], max_tokens=30, temperature=0, extra_body={"speculate": False})
    assert 0 < drafted.accepted_prediction_tokens <= drafted.drafted_tokens
    assert drafted.drafted_tokens == drafted.accepted_prediction_tokens + drafted.rejected_prediction_tokens
    assert plain.usage.completion_tokens_details.drafted_tokens == 0


# --- clients that go away or do not read ------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_vanishes_ends_its_request(served: Served, stream: bool) -> None:
    engine = served.llm.engine
    before, tokens = engine.metrics.num_aborted, engine.metrics.output_tokens
    connections = [_post(served, ENDLESS | {"stream": stream}) for _ in range(4)]
    until(lambda: engine.num_unfinished_requests == 4)
    for connection in connections if stream else ():
        while b"data: " not in connection.recv(4096):
            pass
    for connection in connections:
        connection.close()
    until(lambda: engine.num_unfinished_requests == 0, seconds=5)
    assert engine.metrics.num_aborted == before + 4
    assert engine.metrics.output_tokens < tokens + 4000  # of 12000
    until(lambda: served.admission.sequences == 0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("ahead", ["", "\r\n", "GET /health HTTP/1.1\r\nHost: x\r\n\r\n"])
def test_a_client_that_leaves_during_the_prefill_ends_it_after_the_chunk(
    served: Served, stream: bool, ahead: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a prompt that is computed to its end for nobody.

    `ahead`: what the client has sent behind its request; if it is not read, neither is the end of the connection.
    """
    engine, driver = served.llm.engine, served.llm.driver
    free, aborted, launch = engine.scheduler.pool.num_free, engine.metrics.num_aborted, engine.round.launch
    chunks: list[int] = []
    inside, go_on = threading.Event(), threading.Event()

    def gated(works: list[Work]) -> InFlight:
        chunks.append(sum(work.num_tokens for work in works))
        if len(chunks) == 3:
            inside.set()
            assert go_on.wait(60)
        return launch(works)

    monkeypatch.setattr(engine.scheduler, "max_num_batched_tokens", 64)
    monkeypatch.setattr(engine.round, "launch", gated)
    prompt = [100 + len(ahead), 200 + stream, *range(2000)]
    connection = _post(served, ENDLESS | {"prompt": prompt, "stream": stream}, keep_alive=True)
    try:
        assert inside.wait(60)
        connection.sendall(ahead.encode())
        connection.close()
        until(lambda: driver._inbox.qsize() > 0)  # the abort
    finally:
        go_on.set()
    until(lambda: engine.num_unfinished_requests == 0)
    assert chunks == [64, 64, 64]
    assert engine.metrics.num_aborted == aborted + 1
    driver.call(lambda engine: engine.check())
    assert engine.scheduler.pool.num_free == free
    until(lambda: served.admission.sequences == 0)


def test_a_client_that_leaves_while_its_prompts_are_tokenized_submits_none(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a client that is watched from the submission on only: the other prompts are tokenized for nobody."""
    state, encode = served.server.config.app.state.server, served.llm.encode  # type: ignore[union-attr]
    before, calls = served.llm.engine.metrics.num_requests, list[Any]()
    inside, go_on = threading.Event(), threading.Event()

    def gated(prompt: Any, *args: Any, **kwargs: Any) -> list[int]:
        calls.append(prompt)
        inside.set()
        assert go_on.wait(60)
        return encode(prompt, *args, **kwargs)

    monkeypatch.setattr(served.llm, "encode", gated)
    connection = _post(served, ENDLESS | {"prompt": ["a", "b", "c"]})
    try:
        assert inside.wait(60)
        connection.close()
        until(lambda: not state.watchers)
    finally:
        go_on.set()
    until(lambda: served.admission.sequences == 0)
    assert calls == ["a"]
    assert served.llm.engine.metrics.num_requests == before


def test_a_client_that_leaves_a_stream_of_several_prompts_ends_all_of_them(served: Served) -> None:
    """Catches the prompt whose chunk was sent last: its stream is not being read at that moment."""
    engine, before = served.llm.engine, served.llm.engine.metrics.num_aborted
    connection = _post(served, ENDLESS | {"prompt": ["a", "b", "c"], "stream": True})
    while b"data: " not in connection.recv(4096):
        pass
    connection.close()
    until(lambda: engine.num_unfinished_requests == 0, seconds=5)
    assert engine.metrics.num_aborted == before + 3
    until(lambda: served.admission.sequences == 0)


@pytest.mark.slow
def test_200_clients_that_vanish_leave_nothing_behind(served: Served) -> None:
    """Catches threads, file handles, tasks or admission that leak."""

    def held() -> tuple[int, int, int]:
        state = served.server.config.app.state.server  # type: ignore[union-attr]
        return len(os.listdir("/proc/self/fd")), served.admission.sequences, len(state.watchers)

    until(lambda: served.llm.engine.num_unfinished_requests == 0)
    before, draw = held(), random.Random(1)
    for _ in range(10):
        connections = [_post(served, ENDLESS | {"stream": draw.random() < 0.8, "max_tokens": 300}) for _ in range(20)]
        for connection in connections:
            time.sleep(draw.uniform(0, 0.05))
            connection.close()
    until(lambda: served.llm.engine.num_unfinished_requests == 0, seconds=60)
    until(lambda: held() == before)
    assert served.client().completions.create(model=MODEL, prompt="x", max_tokens=2).usage.completion_tokens == 2


def test_slow_readers_slow_nobody(llm: LLM) -> None:
    """Their requests end at the engine's pace; what they have not read is merged, and complete."""
    body = ENDLESS | {"stream": True, "max_tokens": 150, "temperature": 0, "logprobs": 20}
    [whole] = llm.generate(ENDLESS["prompt"], SamplingParams(max_tokens=150, ignore_eos=True))
    with serving(llm, send_buffer=4096) as served:
        asked = llm.engine.metrics.num_requests
        readers = [_post(served, body, receive_buffer=4096) for _ in range(3)]
        until(lambda: llm.engine.metrics.num_requests == asked + 3)
        until(lambda: served.admission.sequences == 0)
        quick = served.client().completions.create(model=MODEL, prompt="x", max_tokens=2)
        assert quick.usage.completion_tokens == 2
        for reader in readers:
            pieces = _streamed_texts(reader)
            assert "".join(pieces) == whole.text
            assert len(pieces) < 120


def _post(
    served: Served, body: dict[str, Any], *, receive_buffer: int | None = None, keep_alive: bool = False
) -> socket.socket:
    """A request over a bare connection, whose answer nobody has read yet."""
    data, (host, port) = json.dumps(body).encode(), served.url.removeprefix("http://").split(":")
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(60)
    connection.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(data)}"
    end = "" if keep_alive else "\r\nConnection: close"
    connection.sendall(f"{head}{end}\r\n\r\n".encode() + data)
    return connection


def _streamed_texts(connection: socket.socket) -> list[str]:
    with connection, connection.makefile("rb") as file:
        lines = [line[6:] for line in file if line.startswith(b"data: {")]
    return [json.loads(line)["choices"][0]["text"] for line in lines]


# --- limits -----------------------------------------------------------------------------------------------------------


def test_too_many_requests_are_told_to_come_back(llm: LLM) -> None:
    with LLM(SMALL, device="cpu", max_num_seqs=1) as own, serving(own, max_queue=1) as served:
        client = served.client()
        with pytest.raises(openai.BadRequestError, match="the limit is 2"):
            client.completions.create(model=MODEL, prompt="x", n=3)
        streams = [client.completions.create(**_sdk(ENDLESS), stream=True) for _ in range(2)]
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="x")
        assert refused.value.response.headers["retry-after"] == "1"
        for stream in streams:
            stream.close()
        until(lambda: served.admission.sequences == 0)
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices


def test_tokens_in_flight_are_limited(llm: LLM) -> None:
    with serving(llm, max_tokens_in_flight=4000) as served:
        client = served.client()
        stream = client.completions.create(**_sdk(ENDLESS), stream=True)
        with pytest.raises(openai.RateLimitError, match="tokens are in flight"):
            client.completions.create(model=MODEL, prompt="x", max_tokens=2000)
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=2).choices
        with pytest.raises(openai.BadRequestError, match="the limit is 4000"):
            client.completions.create(model=MODEL, prompt="x", n=3, max_tokens=2000)
        stream.close()
        until(lambda: served.admission.tokens == 0)


def test_time_outs(llm: LLM) -> None:
    with serving(llm, request_timeout=0.3) as served:
        client, asked = served.client(max_retries=3), llm.engine.metrics.num_requests
        with pytest.raises(openai.InternalServerError, match="longer than this server allows"):
            client.completions.create(**_sdk(ENDLESS))
        assert llm.engine.metrics.num_requests == asked + 1  # it was not repeated
        with pytest.raises(openai.APIError, match="longer than this server allows"):
            list(client.completions.create(**_sdk(ENDLESS), stream=True))
        until(lambda: served.admission.sequences == 0)


@pytest.mark.parametrize(
    ("path", "ask", "event"),
    [("messages", {"messages": CHAT, "max_tokens": 4}, "ping"), ("responses", {"input": CHAT}, "response.in_progress")],
)
def test_a_stream_is_not_silent_while_its_prompt_is_read(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, path: str, ask: dict[str, Any], event: str
) -> None:
    """Agents give up a stream after minutes without an event, and ask again."""
    launch, body = llm.engine.round.launch, {"model": MODEL, "stream": True, "temperature": 0, "stop": ["e"], **ask}

    def events(served: Served) -> list[str]:
        lines = httpx.post(f"{served.url}/v1/{path}", json=body, timeout=60).text.splitlines()
        return [line.removeprefix("event: ") for line in lines if line.startswith("event: ")]

    def slow(works: list[Work]) -> InFlight:
        time.sleep(0.0 if works[0].sequence.num_output else 0.3)
        return launch(works)

    with serving(llm) as served:
        whole = events(served)
        monkeypatch.setattr(llm.engine.round, "launch", slow)
        assert events(served) == whole
        monkeypatch.setattr("ssd.server.generation.PAUSE", 0.05)
        found = events(served)
        begin = whole.index("response.in_progress") + 1 if path == "responses" else 1
        num_more = len(found) - len(whole)
        assert num_more > 2
        assert found == [*whole[:begin], *[event] * num_more, *whole[begin:]]
    with serving(llm, request_timeout=0.2) as served:
        assert events(served)[-1] in ("error", "response.failed")


def test_keys_sizes_and_origins(llm: LLM) -> None:
    with serving(llm, api_keys=("one", "two"), max_request_bytes=1000, cors_origins=("http://a.example",)) as served:
        for key, right in (("one", True), ("two", True), ("three", False), ("on", False)):
            answer = httpx.get(f"{served.url}/v1/models", headers={"authorization": f"Bearer {key}"})
            assert answer.status_code == (200 if right else 401), key
        assert httpx.get(f"{served.url}/v1/models", headers={"x-api-key": "two"}).status_code == 200
        assert httpx.get(f"{served.url}/health").status_code == 200
        client = served.client(api_key="one")
        with pytest.raises(openai.APIStatusError, match="too large") as refused:
            client.completions.create(model=MODEL, prompt="x" * 2000)
        assert refused.value.status_code == 413
        headers = {"authorization": "Bearer one", "content-type": "application/json"}
        chunked = httpx.post(f"{served.url}/v1/completions", headers=headers, content=iter([b" " * 400] * 9))
        assert chunked.status_code == 413
        asked = {"origin": "http://a.example", "access-control-request-method": "POST"}
        allowed = httpx.options(f"{served.url}/v1/completions", headers=asked)
        assert allowed.headers["access-control-allow-origin"] == "http://a.example"


def test_other_origins_get_no_headers(served: Served) -> None:
    answer = httpx.get(f"{served.url}/health", headers={"origin": "http://a.example"})
    assert "access-control-allow-origin" not in answer.headers


# --- the end ----------------------------------------------------------------------------------------------------------


def test_a_failed_engine_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    with LLM(SMALL, device="cpu") as own, serving(own) as served:
        monkeypatch.setattr(own.engine, "step", lambda: 1 / 0)
        with pytest.raises(openai.InternalServerError, match="the engine's loop failed"):
            served.client().completions.create(model=MODEL, prompt="x")
        for path in ("/health", "/health/ready"):
            answer = httpx.get(served.url + path)
            assert (answer.status_code, answer.json()["error"]["code"]) == (500, "engine_failed")
        with pytest.raises(openai.InternalServerError, match="the engine's loop failed"):
            served.client().completions.create(model=MODEL, prompt="x", stream=True)
        assert served.admission.sequences == 0


def test_a_bug_is_an_error_without_details(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def encode(*_: object) -> list[int]:
        raise ZeroDivisionError("private")

    with serving(llm) as served:
        monkeypatch.setattr(llm, "encode", encode)
        with pytest.raises(openai.InternalServerError, match="internal error") as raised:
            served.client().completions.create(model=MODEL, prompt="x")
        assert "private" not in raised.value.response.text
        assert served.admission.sequences == 0


def test_a_drain_lets_requests_end(llm: LLM) -> None:
    with serving(llm) as served:
        client = served.client()
        with paused_at(llm.driver, 8):
            stream = client.completions.create(**_sdk(ENDLESS | {"max_tokens": 60}), stream=True)
            next(stream)
            served.server.handle_exit(signal.SIGTERM, None)
            until(lambda: served.admission.draining)
            assert httpx.get(f"{served.url}/health/ready").status_code == 503
            assert httpx.get(f"{served.url}/health").status_code == 200
            with pytest.raises(openai.InternalServerError, match="shutting down") as refused:
                client.completions.create(model=MODEL, prompt="x")
            assert refused.value.status_code == 503
        assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
        served.thread.join(20)
        assert not served.thread.is_alive()


def test_without_the_extra_the_command_says_how_to_get_it() -> None:
    """Also: the library and the other commands do without."""
    code = "import sys; sys.modules['fastapi'] = None; from ssd.cli.main import app; app(['serve', 'tiny-llama'])"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "pip install '.[serve]'" in ended.stderr


def test_a_drain_ends_requests_that_take_too_long(llm: LLM) -> None:
    with serving(llm, drain_timeout=0.5) as served:
        stream = served.client().completions.create(**_sdk(ENDLESS), stream=True)
        next(stream)
        served.server.handle_exit(signal.SIGTERM, None)
        served.thread.join(10)
        assert not served.thread.is_alive()
        until(lambda: llm.engine.num_unfinished_requests == 0)


def _sdk(body: dict[str, Any]) -> dict[str, Any]:
    """Keywords of the client, which sends what OpenAI does not know in `extra_body`."""
    body = dict(body)
    return {"extra_body": {"ignore_eos": body.pop("ignore_eos")}, **body}
