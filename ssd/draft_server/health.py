"""/health, /ready and /metrics of a draft server, on a port of their own."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final

from ssd.draft_server.server import DraftServer
from ssd.errors import ConfigError
from ssd.version import VERSION

_CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_TIMEOUT: Final = 10.0  # seconds that a client has for its request


@contextmanager
def health_server(server: DraftServer) -> Iterator[str]:
    """Serves them meanwhile, if there is a port for it; the URL, or ""."""
    port = server.options.http_port
    if port is None:
        yield ""
        return

    class Handler(BaseHTTPRequestHandler):
        timeout = _TIMEOUT
        server_version, sys_version = f"ssd/{VERSION}", ""

        def do_GET(self) -> None:
            status, text = answer(server, self.path.partition("?")[0])
            body = text.encode()
            self.send_response(status)
            self.send_header("Content-Type", _CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            return

    host = server.options.http_host
    try:
        http = ThreadingHTTPServer((host, port), Handler)
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {host}, port {port}: {error.strerror}: choose another --http-host or --http-port"
        ) from error
    http.daemon_threads = True
    threading.Thread(target=http.serve_forever, daemon=True).start()
    try:
        yield f"http://{host}:{http.server_port}"
    finally:
        http.shutdown()
        http.server_close()


def answer(server: DraftServer, path: str) -> tuple[int, str]:
    """Status and text of a page. Ready: it takes engines."""
    if path == "/health":
        return 200, "ok\n"
    if path == "/ready":
        reason = "draining" if server.draining else "" if server.draft.free_places else "all places are taken"
        return (503, f"{reason}\n") if reason else (200, "ok\n")
    if path == "/metrics":
        return 200, metrics(server)
    return 404, "there are /health, /ready and /metrics\n"


def metrics(server: DraftServer) -> str:
    """Prometheus text. A tenant is the number of its token, from 1 on."""
    draft, sessions, refused = server.draft, server.sessions, dict(server.refused)
    pool, turns = draft.pool, draft.turns
    sequences = sum(each.sequences for each in sessions)
    tenants = {str(tenant + 1): count for tenant, count in server.rounds.items()}
    return "".join(
        [
            _family("engines", "gauge", "Engines that are connected.", {"": len(sessions)}),
            _family("free_places", "gauge", "Engines that may still come.", {"": draft.free_places}),
            _family("sequences", "gauge", "Sequences of all engines.", {"": sequences}),
            _family("kv_blocks_free", "gauge", "KV blocks without users.", {"": pool.num_free}),
            _family("kv_blocks", "gauge", "KV blocks in all.", {"": pool.num_blocks}),
            _family("rounds_total", "counter", "Rounds of engines.", _labelled("tenant", tenants)),
            _family("joint_passes_total", "counter", "Forward passes of several engines together.", {"": turns.passes}),
            _family("joint_rows_total", "counter", "Their rows.", {"": turns.rows}),
            _family("refused_total", "counter", "Connections that were refused.", _labelled("reason", refused)),
        ]
    )


def _labelled(name: str, values: dict[str, int]) -> dict[str, int]:
    return {f'{{{name}="{label}"}}': value for label, value in sorted(values.items())}


def _family(name: str, kind: str, text: str, values: dict[str, int]) -> str:
    full = f"ssd_draft_server_{name}"
    samples = "".join(f"{full}{label} {value}\n" for label, value in values.items())
    return f"# HELP {full} {text}\n# TYPE {full} {kind}\n{samples}"
