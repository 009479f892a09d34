"""What the applications of this server tell each other of a request: its scope and its messages."""

from __future__ import annotations

from typing import Final

from starlette.types import Message, Receive, Scope

_SENT: Final = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


def scope_of(scope: Scope) -> Scope:
    """A request's scope, under the request id of this application."""
    request_id = scope["state"]["request_id"].encode()
    headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
    return {name: scope[name] for name in _SENT} | {"headers": [*headers, (b"x-request-id", request_id)]}


def replayed(message: Message, receive: Receive) -> Receive:
    """Receives this message, then what `receive` does."""
    left = [message]

    async def again() -> Message:
        return left.pop() if left else await receive()

    return again


async def disconnected(receive: Receive) -> None:
    """Waits until the client goes away."""
    while (await receive())["type"] != "http.disconnect":
        pass
