"""Connections: slow uploads, answers that nobody reads, too many of them; ports that are taken; the end under load."""

from __future__ import annotations

import asyncio
import json
import re
import resource
import signal
import socket
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from live_server import DRAFT, MODEL, Served, serving, until
from serve_process import free_port, serve
from typer.testing import CliRunner

from ssd import LLM
from ssd.cli.main import app
from ssd.errors import ConfigError
from ssd.server import run
from ssd.server.app import create_app
from ssd.server.options import ServerOptions
from ssd.server.run import Server, listen

TIMEOUT = 0.3
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2}).encode()
REQUEST = POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY


def connected(served: Served) -> socket.socket:
    host, port = served.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=10)


def dripped(connection: socket.socket, content: bytes, pause: float = 0.02) -> bytes:
    """Sends a byte at a time until the server closes the connection; returns what it has answered."""
    connection.settimeout(pause)
    answer, end = b"", time.monotonic() + 10
    for byte in content:
        assert time.monotonic() < end, "it is not cut off"
        try:
            connection.sendall(bytes([byte]))
            received = connection.recv(4096)
        except TimeoutError:
            continue
        except OSError:
            return answer
        answer += received
        if not received:
            return answer
    raise AssertionError("it is not cut off")


def status(answer: bytes) -> int:
    return int(answer.split()[1])


SLOW: dict[str, Callable[[int], tuple[bytes, bytes]]] = {  # what is sent at once, what is sent slowly
    "head": lambda n: (POST, b"X-Header: " + b"x" * n),
    "body": lambda n: (POST + b"Content-Length: %d\r\n\r\n" % n, b" " * n),
    "chunked body": lambda n: (POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n" * n),
}


@pytest.mark.parametrize("part", SLOW)
def test_a_client_that_sends_slowly_is_cut_off(llm: LLM, part: str) -> None:
    """Bytes that keep coming do not prolong the time: it is for the whole request."""
    at_once, slowly = SLOW[part](400)
    with serving(llm, read_timeout=TIMEOUT) as served:
        begin = time.monotonic()
        with connected(served) as connection:
            connection.sendall(at_once)
            answer = dripped(connection, slowly)
        assert time.monotonic() - begin >= TIMEOUT
        assert status(answer) == 408
        assert b"within 0.3 seconds" in answer
        until(lambda: not served.server.server_state.connections and not served.server.server_state.tasks)
        assert served.admission.sequences == 0


def test_a_client_that_sends_nothing_is_cut_off(llm: LLM) -> None:
    with serving(llm, read_timeout=TIMEOUT) as served, connected(served) as connection, connection.makefile() as file:
        assert file.readline() == "HTTP/1.1 408 Request Timeout\n"
        assert "within 0.3 seconds" in file.read()  # to the end of the connection


def test_a_second_request_has_the_same_time(llm: LLM) -> None:
    """And a whole request stops the clock, however long its answer takes."""
    long = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 60, "ignore_eos": True}).encode()
    with serving(llm, read_timeout=TIMEOUT) as served, connected(served) as connection:
        begin = time.monotonic()
        while time.monotonic() < begin + TIMEOUT:
            connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(long) + long)
            assert status(received(connection)) == 200
        assert status(dripped(connection, POST * 3)) == 408


def received(connection: socket.socket, got: bytes = b"") -> bytes:
    """One whole answer, of which there is a part."""
    while not (head := re.search(rb"content-length: (\d+)\r\n.*?\r\n\r\n", got, re.DOTALL)):
        got += more(connection)
    while len(got) < head.end() + int(head[1]):
        got += more(connection)
    return got


def more(connection: socket.socket) -> bytes:
    data = connection.recv(2048)
    assert data, "the connection is closed"
    return data


def test_a_body_after_its_refusal_is_cut_off_too(llm: LLM) -> None:
    """The answer is 413 at once; who goes on sending does not keep the connection."""
    with serving(llm, read_timeout=TIMEOUT, max_request_bytes=10) as served, connected(served) as connection:
        connection.sendall(POST + b"Content-Length: 400\r\n\r\n")
        assert status(dripped(connection, b" " * 400)) == 413
        until(lambda: not served.server.server_state.connections)


@pytest.mark.parametrize(
    ("request_bytes", "expected"),
    [
        (b"\x00\x01\r\n\r\n", 400),
        (b"HEAD / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nno size\r\n", 400),
        (b"HEAD / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n", 408),
        (b"OPTIONS / HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n\r\n", 408),
        (REQUEST + b"\x00\r\n\r\n", 200),  # garbage behind a request
        (POST + b"Transfer-Encoding: chunked\r\n\r\n80\r\n%s\r\nno size\r\n" % (b" " * 128), 400),  # and too large
    ],
)
def test_what_is_hardly_http_is_answered(
    llm: LLM, caplog: pytest.LogCaptureFixture, request_bytes: bytes, expected: int
) -> None:
    """And leaves no traceback. An answer to HEAD has no body."""
    with serving(llm, read_timeout=TIMEOUT, max_request_bytes=100) as served, connected(served) as connection:
        connection.sendall(request_bytes)
        with connection.makefile("rb") as file:
            answer = file.read()
    assert status(answer) == expected
    assert answer.endswith(b"\r\n\r\n") == request_bytes.startswith(b"HEAD")
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_connections_are_limited(llm: LLM) -> None:
    with serving(llm, max_connections=2) as served:
        idle = [connected(served) for _ in range(2)]
        until(lambda: len(served.server.server_state.connections) == 2)
        with connected(served) as third:
            third.sendall(REQUEST)
            answer = received(third)
        assert status(answer) == 503
        assert b"retry-after: 1" in answer.lower()
        idle[0].close()
        until(lambda: len(served.server.server_state.connections) == 1)
        with connected(served) as third:
            third.sendall(REQUEST)
            assert status(received(third)) == 200
        idle[1].close()


def asked_for_much(served: Served) -> socket.socket:
    """A connection with an answer that is larger than all buffers."""
    body = json.dumps({"model": MODEL, "prompt": list(range(10, 500)), "echo": True, "max_tokens": 1, "n": 60}).encode()
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    host, port = served.url.removeprefix("http://").split(":")
    connection.connect((host, int(port)))
    connection.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    until(lambda: len(served.server.server_state.connections) == 1)
    return connection


def test_an_answer_that_nobody_reads_does_not_keep_its_connection(llm: LLM) -> None:
    with serving(llm, send_buffer=4096, write_timeout=TIMEOUT) as served, asked_for_much(served):
        until(lambda: not served.server.server_state.connections)


def test_a_slow_reader_is_not_cut_off(llm: LLM) -> None:
    """The time is from one sign of life to the next."""
    with serving(llm, send_buffer=4096, write_timeout=TIMEOUT) as served, asked_for_much(served) as connection:
        got, begin = connection.recv(1), time.monotonic()
        while time.monotonic() < begin + 4 * TIMEOUT:
            got += more(connection)
            time.sleep(TIMEOUT / 10)
        assert len(received(connection, got)) > len(got)


@pytest.mark.parametrize("name", ["max_connections", "read_timeout", "write_timeout"])
@pytest.mark.parametrize("value", [0, -1, float("nan")])
def test_limits_that_would_shut_everybody_out_are_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        ServerOptions(served_model_name=MODEL, **{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("soft", "hard", "raised"),
    [
        (1024, 4096, (1256, 4096)),
        (1024, 1100, (1100, 1100)),
        (2000, 4096, None),
        (1024, -1, (1256, -1)),
        (-1, -1, None),
    ],
)
def test_the_limit_of_file_handles_fits_the_connections(
    monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, raised: tuple[int, int] | None
) -> None:
    """It is raised as far as the system allows, never lowered; -1: none."""
    limits = [(soft, hard)]
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits[-1])
    monkeypatch.setattr(resource, "setrlimit", lambda _, limit: limits.append(limit))
    run._allow_files(1256)
    assert limits[1:] == ([raised] if raised else [])


# --- ports ------------------------------------------------------------------------------------------------------------


def test_a_port_that_is_taken_is_a_clear_error() -> None:
    """Before a model is loaded, which this one does not exist to be."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        ended = CliRunner().invoke(app, ["serve", "no-such-model", "--port", port])
    assert ended.exit_code == 1
    expected = (
        f"error: cannot listen on 127.0.0.1, port {port}: Address already in use: choose another --host or --port"
    )
    assert " ".join(ended.stderr.split()) == expected


def test_of_two_servers_that_start_together_the_second_says_that_the_port_is_taken(llm: LLM) -> None:
    port = free_port()
    [first], [second] = listen("127.0.0.1", port), listen("127.0.0.1", port)
    with first, second:
        first.listen()
        server = Server(create_app(llm, ServerOptions(served_model_name=MODEL)))
        with pytest.raises(ConfigError, match="Address already in use"):
            asyncio.run(server.serve([second]))


def test_a_host_that_is_unknown_is_a_clear_error() -> None:
    with pytest.raises(ConfigError, match=r"cannot listen on no-such-host\.invalid, port 8000: "):
        listen("no-such-host.invalid", 8000)


def test_a_port_refuses_connections_until_the_server_runs() -> None:
    """A health check must not hang while the model is loaded."""
    port = free_port()
    [bound] = listen("127.0.0.1", port)
    with bound, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=1)


# --- the end under load -----------------------------------------------------------------------------------------------


def body(tokens: int) -> dict[str, Any]:
    return {"model": MODEL, "prompt": "Once upon a time", "max_tokens": tokens, "ignore_eos": True, "temperature": 0}


@pytest.mark.slow
def test_sigterm_under_load_lets_all_requests_end_and_refuses_new_ones() -> None:
    """Answers under way are complete, streamed or not; what comes later gets 503; the process exits with 0."""
    signalled, texts, refused = False, set[str](), list[int]()

    async def client(http: httpx.AsyncClient, number: int) -> None:
        """Asks until it is refused."""
        while True:
            late = signalled
            try:
                answer = await http.post("/v1/completions", json=body(30) | {"stream": number % 2 == 0})
            except httpx.TransportError:
                assert late  # the process has ended
                return
            if answer.status_code != 200:
                assert answer.headers["connection"] == "close"
                refused.append(answer.status_code)
                return
            texts.add(whole(answer.text, number))

    def whole(text: str, number: int) -> str:
        if number % 2:
            return str(json.loads(text)["choices"][0]["text"])
        *events, done = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        assert done == "[DONE]"
        return "".join(json.loads(event)["choices"][0]["text"] for event in events)

    async def load(url: str) -> None:
        nonlocal signalled
        key = {"Authorization": "Bearer secret"}
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=key) as http:
            clients = [asyncio.create_task(client(http, number)) for number in range(12)]
            while not texts:
                await asyncio.sleep(0.01)
            signalled = True
            served.process.send_signal(signal.SIGTERM)
            await asyncio.gather(*clients)

    with serve("--max-num-seqs", "4", "--draft", DRAFT, "--mode", "sd", "--api-key", "secret") as served:
        asyncio.run(load(served.url))
        assert served.process.wait(30) == 0
        log = served.log
    assert "POST '/v1/completions' 200" in log
    assert "Traceback" not in log
    assert "secret" not in log
    assert len(texts) == 1
    assert refused
    assert set(refused) == {503}


@pytest.mark.slow  # `test_a_drain_ends_requests_that_take_too_long` is the short one
def test_a_drain_that_takes_too_long_cuts_requests_off() -> None:
    """Without a traceback: handlers are not cancelled, their clients are gone."""
    with serve("--drain-timeout", "0.5") as served:
        with httpx.stream("POST", f"{served.url}/v1/completions", json=body(3000) | {"stream": True, "n": 8}) as answer:
            lines = answer.iter_lines()
            next(lines)
            begin = time.monotonic()
            served.process.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.TransportError):
                list(lines)
            assert served.process.wait(20) == 0
            assert time.monotonic() - begin < 20  # of the minutes that the request would take
        assert "some requests did not end within 0.5 seconds" in served.log
        assert "Traceback" not in served.log


@pytest.mark.slow
def test_a_second_ctrl_c_ends_the_process_at_once() -> None:
    with serve() as served:
        endless = body(3000) | {"stream": True, "n": 8}
        with httpx.stream("POST", f"{served.url}/v1/completions", json=endless, timeout=60) as answer:
            next(answer.iter_lines())
            served.process.send_signal(signal.SIGINT)
            until(lambda: httpx.get(f"{served.url}/health/ready").status_code == 503)
            begin = time.monotonic()
            served.process.send_signal(signal.SIGINT)
            assert served.process.wait(20) == 0
            assert time.monotonic() - begin < 20  # of the 30 seconds that requests would have
        assert "Traceback" not in served.log
