"""What another application of this server gets of a request."""

from __future__ import annotations

from typing import Final

from starlette.types import Scope

_SENT: Final = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "headers")


def scope_of(scope: Scope) -> Scope:
    """A request's scope, under the request id of this application."""
    request_id = scope["state"]["request_id"].encode()
    headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
    return {name: scope[name] for name in _SENT} | {"headers": [*headers, (b"x-request-id", request_id)]}
