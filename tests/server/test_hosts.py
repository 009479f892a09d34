"""Host names that a server answers to, redirects, and the page of its API."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from live_server import MODEL, Served, serving
from typer.testing import CliRunner

from ssd import LLM
from ssd.cli import serve
from ssd.cli.main import app
from ssd.server.options import ServerOptions, is_loopback

BODY = {"model": MODEL, "prompt": "x", "max_tokens": 1}


@pytest.fixture(scope="module")
def local(llm: LLM) -> Any:
    with serving(llm, allowed_hosts=("API.example",)) as served:
        yield served


LOOPBACK = ["localhost", "LOCALHOST:8000", "localhost.", "127.0.0.1:1", "127.0.0.2", "[::1]:8000"]
OTHERS = ["evil.example", "localhost.evil.example", "api.example.evil", "10.0.0.1:8000", "", "["]


@pytest.mark.parametrize("host", LOOPBACK)
def test_loopback_names_and_allowed_hosts_are_served(local: Served, host: str) -> None:
    for name in (host, "api.example", "api.example:443"):
        assert httpx.post(f"{local.url}/v1/completions", json=BODY, headers={"host": name}).status_code == 200


@pytest.mark.parametrize("host", OTHERS)
def test_a_page_under_another_name_cannot_read_answers(local: Served, host: str) -> None:
    """DNS rebinding: the browser takes this server for the page's own."""
    for path in ("/v1/models", "/", "/metrics", "/playground/state", "/openapi.json", "/docs"):
        answer = httpx.get(local.url + path, headers={"host": host})
        assert answer.status_code == 403, path
        assert "--allowed-hosts" in answer.json()["error"]["message"]
    assert httpx.post(f"{local.url}/v1/completions", json=BODY, headers={"host": host}).status_code == 403
    assert httpx.get(f"{local.url}/health", headers={"host": host}).status_code == 200, "probes of a cluster"


@pytest.mark.parametrize(
    ("flags", "allowed"),
    [
        ([], ("localhost",)),
        (["--host", "::1"], ("localhost",)),
        (["--host", "127.0.0.5"], ("localhost",)),
        (["--allowed-hosts", "a.example, b.example"], ("a.example", "b.example")),
        (["--api-key", "secret"], ()),
        (["--host", "0.0.0.0"], ()),
        (["--host", "0.0.0.0", "--allowed-hosts", "a.example"], ("a.example",)),
    ],
)
def test_names_are_checked_on_the_loopback_interface_without_a_key(
    monkeypatch: pytest.MonkeyPatch, flags: list[str], allowed: tuple[str, ...]
) -> None:
    seen: list[ServerOptions] = []
    monkeypatch.setattr(serve, "_listen", lambda *_: [])
    monkeypatch.setattr(serve, "_serve_engine", lambda _, __, options, *rest: seen.append(options))
    monkeypatch.delenv("SSD_API_KEY", raising=False)
    assert CliRunner().invoke(app, ["serve", MODEL, *flags]).exit_code == 0
    assert [options.allowed_hosts for options in seen] == [allowed]


def test_names_that_only_look_like_loopback_are_not() -> None:
    assert not any(map(is_loopback, ["localhost.example", "127.0.0.1.example", "0.0.0.0", "::", "128.0.0.1", ""]))


@pytest.mark.parametrize("path", ["/v1/completions/", "/health/", "//evil.example/v1/models/", "/playground/state/"])
def test_no_redirect_is_made_of_the_client_s_host(served: Served, path: str) -> None:
    for method in ("GET", "POST"):
        answer = httpx.request(method, served.url + path, headers={"host": "evil.example"})
        assert answer.status_code in (404, 405)
        assert "location" not in answer.headers


def test_the_page_of_the_api_has_every_endpoint_and_loads_nothing(served: Served) -> None:
    page = httpx.get(f"{served.url}/docs")
    schema = httpx.get(f"{served.url}/openapi.json").json()
    for path, methods in schema["paths"].items():
        for method in methods:
            assert f"<code>{method.upper()} {path}</code>" in page.text
    for field in ("messages", "response_format", "max_tokens"):
        assert f"<code>{field}</code>" in page.text
    assert "default-src 'none'" in page.headers["content-security-policy"]
    assert "<script" not in page.text
    assert "http" not in page.text.split("<h1>")[0]


def test_the_page_of_the_api_needs_the_key(llm: LLM) -> None:
    with serving(llm, api_keys=("secret",)) as guarded:
        for path in ("/docs", "/openapi.json"):
            assert httpx.get(guarded.url + path).status_code == 401
            assert httpx.get(guarded.url + path, headers={"authorization": "Bearer secret"}).status_code == 200
