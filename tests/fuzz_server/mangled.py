"""Random requests as bytes: right bodies that were changed as JSON or as bytes, with odd headers, paths and lengths."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from serve_process import MODEL
from soak.asks import random_ask

CHAT = [{"role": "user", "content": "Hello"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
BODIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (
        "/v1/messages",
        {"model": MODEL, "messages": CHAT, "max_tokens": 4, "system": "Be brief.", "stop_sequences": ["x"]},
    ),
    (
        "/v1/messages",
        {"model": MODEL, "messages": CHAT, "max_tokens": 4, "thinking": {"type": "disabled"}, "stream": True},
    ),
    (
        "/v1/responses",
        {"model": MODEL, "input": "Hello", "max_output_tokens": 4, "stream": True, "metadata": {"a": "b"}},
    ),
    ("/v1/responses", {"model": MODEL, "input": [{"type": "message", **CHAT[0]}], "max_output_tokens": 4}),
    (
        "/v1/chat/completions",
        {"model": MODEL, "messages": CHAT, "max_tokens": 4, "tools": [TOOL], "tool_choice": "auto"},
    ),
    (
        "/v1/chat/completions",
        {"model": MODEL, "messages": CHAT, "max_tokens": 4, "logit_bias": {"5": 2.0}, "user": "me"},
    ),
    ("/v1/chat/completions", {"model": MODEL, "messages": CHAT, "max_tokens": 4, "chat_template_kwargs": {"a": 1}}),
    (
        "/v1/completions",
        {"model": MODEL, "prompt": [[1, 2], [3]], "max_tokens": 4, "echo": True, "stop_token_ids": [3]},
    ),
    ("/tokenize", {"messages": CHAT, "add_generation_prompt": True}),
    ("/tokenize", {"prompt": "Hello", "add_special_tokens": False}),
    ("/detokenize", {"tokens": [1, 2, 3], "skip_special_tokens": True}),
    ("/playground/chat", {"messages": CHAT, "max_tokens": 4, "temperature": 1.0, "seed": 3}),
)
PATHS = (
    "/",
    "/health",
    "/health/ready",
    "/version",
    "/metrics",
    "/openapi.json",
    "/v1/models",
    f"/v1/models/{MODEL}",
    "/docs",
)
VALUES: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2, 65, 1.5, -0.0, 1e308, 5e-324, float("nan"), float("inf"), -float("inf")),
    *(
        2**31,
        2**32,
        2**63,
        -(2**63) - 1,
        2**64,
        10**400,
        "",
        " ",
        "\x00",
        "\ud800",
        "\U0001f600",
        "x" * 3000,
        "[",
        "{{ 1 }}",
    ),
    *(
        "{% for i in range(9) %}",
        "<|endoftext|>",
        "(a+)+$",
        "../..",
        [],
        {},
        [[]],
        [None],
        {"": {}},
        {"type": "object"},
    ),
    *({"type": "text", "text": "x"}, {"type": "json_object"}, {"regex": "[a"}, {"choice": []}, {"grammar": "start: x"}),
    {"type": "json_schema", "json_schema": {"schema": {"$ref": "#"}}},
    {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]},
)
TYPES = (
    b"text/plain",
    b"",
    b"application/json; charset=utf-16",
    b"application/x-www-form-urlencoded",
    b"\xff",
    b"multipart/form-data",
)
HEADERS: tuple[tuple[bytes, bytes], ...] = (
    (b"Transfer-Encoding", b"chunked"),
    (b"Transfer-Encoding", b"gzip"),
    (b"Content-Encoding", b"gzip"),
    (b"Content-Length", b"5"),
    (b"Content-Length", b"-1"),
    (b"Content-Length", b"9" * 30),
    (b"Content-Length", b"\xb2"),
    (b"Expect", b"100-continue"),
    (b"Upgrade", b"websocket"),
    (b"Connection", b"upgrade"),
    (b"X-Request-Id", b"\xe9\x00"),
    (b"X-Request-Id", b"a" * 200),
    (b"Authorization", b"Bearer \xff"),
    (b"Origin", b"null"),
    (b"Range", b"bytes=0-"),
    (b"X" * 300, b"y" * 20000),
    (b"", b""),
    (b"a b", b"c\r\nd: e"),
)
METHODS = (b"GET", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"PATCH", b"TRACE", b"post", b"X" * 50, b"")


def random_request(draw: random.Random) -> bytes:
    """A request that asks the server to close the connection after its answer, unless that was changed."""
    if draw.random() < 0.05:
        return draw.randbytes(draw.randint(1, 300)) + b"\r\n\r\n"
    path, body = _body(draw)
    for _ in range(draw.randint(0, 3)):
        body = draw.choice(JSON_CHANGES)(draw, body)
    content = _encoded(draw, body)
    if draw.random() < 0.25:
        content = draw.choice(BYTE_CHANGES)(draw, content)
    return _head(draw, path, len(content)) + content


def _body(draw: random.Random) -> tuple[str, Any]:
    if draw.random() < 0.4:
        ask = random_ask(draw)
        return ask.path, copy.deepcopy(ask.body) | {"max_tokens": draw.randint(1, 4), "stream": draw.random() < 0.5}
    path, body = draw.choice(BODIES)
    return path, copy.deepcopy(body)


def _head(draw: random.Random, path: str, length: int) -> bytes:
    method, target, version = b"POST", path.encode(), b"HTTP/1.1"
    headers = [(b"Host", b"localhost"), (b"Connection", b"close"), (b"Content-Type", b"application/json")]
    headers.append((b"Content-Length", b"%d" % length))
    if draw.random() < 0.15:
        method = draw.choice(METHODS)
    if draw.random() < 0.15:
        target = draw.choice(PATHS).encode()
    if draw.random() < 0.05:
        target += draw.choice([b"?a=%00", b"/..", b"//", b"%ff%fe", b"/%2e%2e/", b"#x", b"\xe9", b" ", b"a" * 3000])
    if draw.random() < 0.02:
        version = draw.choice([b"HTTP/1.0", b"HTTP/2", b"HTTP/9.9", b""])
    if draw.random() < 0.1:
        headers[2] = (b"Content-Type", draw.choice(TYPES))
    if draw.random() < 0.1:
        headers.insert(draw.randrange(len(headers)), draw.choice(HEADERS))
    if draw.random() < 0.02:
        del headers[draw.randrange(len(headers))]
    lines = [b"%s %s %s" % (method, target, version), *(b"%s: %s" % header for header in headers)]
    return b"\r\n".join(lines) + b"\r\n\r\n"


def _encoded(draw: random.Random, body: Any) -> bytes:
    text = json.dumps(body, ensure_ascii=draw.random() < 0.5)
    codec = "utf-8" if draw.random() < 0.97 else draw.choice(["utf-16", "utf-32", "utf-8-sig", "cp037"])
    return text.encode(codec, "surrogatepass" if codec.startswith("utf") else "replace")


# --- changes of a body as JSON ----------------------------------------------------------------------------------------


def _nodes(value: Any) -> list[tuple[Any, Any]]:
    """All places in it: (container, key)."""
    places: list[tuple[Any, Any]] = []
    containers = [value]
    while containers:
        container = containers.pop()
        if isinstance(container, (dict, list)):
            keys = list(container) if isinstance(container, dict) else range(len(container))
            places += [(container, key) for key in keys]
            containers += [container[key] for key in keys]
    return places


def _replace(draw: random.Random, body: Any) -> Any:
    if nodes := _nodes(body):
        container, key = draw.choice(nodes)
        container[key] = copy.deepcopy(draw.choice(VALUES))
    return body


def _remove(draw: random.Random, body: Any) -> Any:
    if nodes := _nodes(body):
        container, key = draw.choice(nodes)
        del container[key]
    return body


def _repeat(draw: random.Random, body: Any) -> Any:
    """A list that has its items many times."""
    if nodes := [(c, k) for c, k in _nodes(body) if isinstance(c[k], list) and 0 < len(c[k]) < 50]:
        container, key = draw.choice(nodes)
        container[key] = copy.deepcopy(container[key]) * draw.choice([2, 40, 600])
    return body


def _add(draw: random.Random, body: Any) -> Any:
    """A field of another request, with any value, or with its own."""
    if isinstance(body, dict):
        other = draw.choice(BODIES)[1] | random_ask(draw).body
        name = draw.choice(
            [*other, "n", "top_p", "seed", "min_tokens", "response_format", "structured_outputs", "x\ud800"]
        )
        body[name] = copy.deepcopy(draw.choice([other.get(name), draw.choice(VALUES)]))
    return body


def _nest(draw: random.Random, body: Any) -> Any:
    """One value inside many lists or objects."""
    if nodes := _nodes(body):
        container, key = draw.choice(nodes)
        for _ in range(draw.choice([1, 20, 200])):
            container[key] = [container[key]] if draw.random() < 0.5 else {"a": container[key]}
    return body


# --- changes of a body as bytes ---------------------------------------------------------------------------------------


def _flip(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + draw.randbytes(1) + content[at + 1 :]


def _cut(draw: random.Random, content: bytes) -> bytes:
    return content[: draw.randrange(len(content))]


def _insert(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content))
    what = draw.choice(
        [b"\x00", b"\xff\xfe", b'"', b"\\", b"\\ud800", b"[" * 20000, b'{"a":' * 5000, b"9" * 5000, b"1e999"]
    )
    return content[:at] + what + content[at:]


def _double(draw: random.Random, content: bytes) -> bytes:
    return content * 2


Changes = tuple[Callable[[random.Random, Any], Any], ...]
JSON_CHANGES: Changes = (_replace, _replace, _remove, _repeat, _add, _add, _nest)
BYTE_CHANGES: Changes = (_flip, _cut, _insert, _double)
