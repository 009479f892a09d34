"""Real clients: the bodies of their requests are served, and (slow) the clients themselves understand the answers.

`tests/data/clients` has what `clients.record` has recorded of them and of coding agents (`test_agents.py`).
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extras serve and dev")
pytest.importorskip("llguidance", reason="needs the extras serve and dev")

import httpx
from clients import coding_agents as agents
from clients import environment
from conftest import mostly_slow
from live_server import MODEL, Lazy, Served, openai

DATA = Path(__file__).parents[1] / "data" / "clients"
CLIENTS = sorted(file.stem for file in DATA.glob("*.json"))
LIMITS = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens", "/v1/completions": "max_tokens"}
SHORT = 4  # tokens: what is asked matters here, not the text


def shortened(path: str, body: dict[str, Any]) -> dict[str, Any]:
    if path in ("/api/chat", "/api/generate"):
        return {**body, "options": {**body.get("options", {}), "num_predict": SHORT}}
    if path == "/v1/chat/completions":
        name = "max_tokens" if "max_tokens" in body else "max_completion_tokens"
    else:
        name = LIMITS.get(path, "")
    return {**body, name: SHORT} if name else body


def events_of(text: str) -> Iterator[dict[str, Any]]:
    for line in text.splitlines():
        if line.startswith("data: ") and line != "data: [DONE]":
            yield json.loads(line.removeprefix("data: "))


def check_answer(path: str, body: dict[str, Any], text: str) -> None:
    """In the shape that the API's own client reads; what it makes of wrong types is an error, too."""
    if path == "/v1/messages/count_tokens":
        assert json.loads(text)["input_tokens"] > 0
    elif path.startswith("/api/"):
        last = json.loads(text.splitlines()[-1])
        assert "error" not in last
        assert last.get("done", True)
    elif path == "/v1/completions":
        assert openai.types.Completion.model_validate_json(text).choices
    elif path == "/v1/chat/completions" and body.get("stream"):
        chunks = [openai.types.chat.ChatCompletionChunk.model_validate(event) for event in events_of(text)]
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] in ("stop", "length", "tool_calls")
    elif path == "/v1/chat/completions":
        assert openai.types.chat.ChatCompletion.model_validate_json(text).usage.completion_tokens > 0
    elif path == "/v1/responses":
        answer = (
            [e["response"] for e in events_of(text) if "response" in e][-1] if body.get("stream") else json.loads(text)
        )
        assert openai.types.responses.Response.model_validate(answer).status in ("completed", "incomplete")
    else:
        events = list(events_of(text)) if body.get("stream") else []
        assert not events or events[-1]["type"] == "message_stop"
        message = Lazy("anthropic").types.Message.model_validate(events[0]["message"] if events else json.loads(text))
        assert message.role == "assistant"


@pytest.mark.parametrize("client", mostly_slow(CLIENTS, fast={"openai", "claude-code"}))
def test_requests_of_real_clients_are_served(served: Served, client: str) -> None:
    """Catches a parameter, an item or a message of theirs that is refused."""
    requests = json.loads((DATA / f"{client}.json").read_text())

    async def answers() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=served.url, timeout=60) as http:
            posts = (http.post(r["path"], json=shortened(r["path"], r["body"])) for r in requests)
            return await asyncio.gather(*posts)

    for request, answer in zip(requests, asyncio.run(answers()), strict=True):
        assert answer.status_code == 200, (request, answer.text)
        check_answer(request["path"], request["body"], answer.text)


def test_every_client_was_recorded() -> None:
    assert set(CLIENTS) == {*environment.SESSIONS, *agents.VERSIONS}


@pytest.fixture(scope="session")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of the clients' environment, in the folder that `SSD_TEST_CLIENTS` names or a temporary one."""
    folder = Path(os.environ.get("SSD_TEST_CLIENTS") or tmp_path_factory.mktemp("clients"))
    try:
        return environment.build(folder / "environment", *environment.PACKAGES)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"the clients cannot be installed: {(error.stderr or '').strip()[-300:]}")


@pytest.mark.slow
@pytest.mark.parametrize("client", environment.SESSIONS)
def test_real_clients_with_a_server(served: Served, python: Path, client: str) -> None:
    """Catches an answer that a client cannot read: agents with a tool, streams, structured answers."""
    script = Path(environment.__file__).with_name("sessions.py")
    done = subprocess.run([python, script, client, served.url, MODEL], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
