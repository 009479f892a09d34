"""A small server that speaks OpenAI's protocol and behaves as it is told: well, or in one particular wrong way.

As a program it takes any arguments and minds `--port` only, so that it can pose as vLLM, SGLang or llama.cpp.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

PIECES = ["It was", " a dark", " night\u2028 and", " it rained"]  # with a character that str.splitlines splits at
TOKENS_A_PIECE = 3
PROMPT_TOKENS = 7
PAUSE = 0.02  # seconds between chunks


class FakeServer(ThreadingHTTPServer):
    """`behaviour`: normal, slow, strict (refuses extra fields), refuses, no-usage, dies, unfinished, garbled, fails,
    sociable (writes another text beside other requests)."""

    daemon_threads = True

    def __init__(self, behaviour: str = "normal", port: int = 0, api_key: str | None = None) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.behaviour, self.api_key = behaviour, api_key
        self.bodies: list[dict[str, Any]] = []
        self.paths: list[str] = []
        self.hung_up = threading.Event()  # a client left before the end
        self.under_way = self.most_under_way = 0
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeServer

    def do_GET(self) -> None:
        answers: dict[str, Any] = {
            "/health": {},
            "/version": {"version": "1.2.3"},
            "/v1/models": {"data": [{"id": "fake-model"}, {"id": "other"}]},
        }
        self._whole(200, answers[self.path]) if self.path in answers else self._whole(404, {"error": "no such page"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            self.server.paths.append(self.path)
        refusal = self._refusal(body)
        if refusal is not None:
            self._whole(refusal[0], {"error": {"message": refusal[1]}})
            return
        try:
            with self._counted():
                self._stream(body)
        except OSError:
            self.server.hung_up.set()
            self.close_connection = True

    def _refusal(self, body: dict[str, Any]) -> tuple[int, str] | None:
        key = self.server.api_key
        if key is not None and self.headers.get("Authorization") != f"Bearer {key}":
            return 401, "invalid API key"
        if body["model"] != "fake-model":
            return 404, f"the model {body['model']} does not exist"
        if self.server.behaviour == "refuses":
            return 400, "the prompt is too long"
        if self.server.behaviour == "strict" and {"ignore_eos", "seed"} & set(body):
            return 400, "unrecognized argument: ignore_eos"
        return None

    def _stream(self, body: dict[str, Any]) -> None:
        behaviour = self.server.behaviour
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        chat = "messages" in body
        if chat:
            self._event({"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        for i, piece in enumerate(PIECES * 50 if behaviour == "slow" else PIECES):
            time.sleep(PAUSE)
            last = i == len(PIECES) - 1
            if behaviour == "sociable" and last and self.server.under_way > 1:
                piece = piece.upper()
            choice: dict[str, Any] = {"delta": {"content": piece}} if chat else {"text": piece}
            self._event({"choices": [{**choice, "finish_reason": "length" if last else None}], "usage": None})
            if i == 1 and behaviour in ("dies", "garbled", "fails", "unfinished"):
                self._misbehave(behaviour)
                return
        if behaviour != "no-usage":
            written = TOKENS_A_PIECE * len(PIECES)
            self._event({"choices": [], "usage": {"prompt_tokens": PROMPT_TOKENS, "completion_tokens": written}})
        self._send(b": a comment\n\ndata: [DONE]\n\n")
        self._send(b"")

    def _misbehave(self, behaviour: str) -> None:
        if behaviour == "dies":
            self.close_connection = True
        elif behaviour == "garbled":
            self._send(b"data: {not json\n\n")
            self._send(b"")
        elif behaviour == "fails":
            self._event({"error": {"message": "out of memory"}})
            self._send(b"")
        else:
            self._send(b"")

    def _event(self, event: dict[str, Any]) -> None:
        self._send(b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\n\n")

    def _send(self, content: bytes) -> None:
        """One chunk of HTTP; an empty one is the last."""
        self.wfile.write(f"{len(content):x}\r\n".encode() + content + b"\r\n")
        self.wfile.flush()

    def _whole(self, status: int, content: dict[str, Any]) -> None:
        encoded = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(encoded)))
        self.end_headers()
        self.wfile.write(encoded)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        server = self.server
        with server.lock:
            server.under_way += 1
            server.most_under_way = max(server.most_under_way, server.under_way)
        try:
            yield
        finally:
            with server.lock:
                server.under_way -= 1

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@contextmanager
def serving(behaviour: str = "normal", api_key: str | None = None) -> Iterator[FakeServer]:
    with FakeServer(behaviour, api_key=api_key) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--port", type=int, required=True)
    FakeServer(port=parser.parse_known_args(sys.argv[1:])[0].port).serve_forever()
