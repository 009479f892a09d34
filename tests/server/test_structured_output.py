"""`response_format` and `structured_outputs` over HTTP, with the real client."""

from __future__ import annotations

import json
import os
import re
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from conftest import mostly_slow
from live_server import MODEL, SMALL, SPECULATION, Served, openai, serving, until

from ssd import LLM, SamplingParams, StructuredOutput
from ssd.errors import RequestError

pytest.importorskip("llguidance")
httpx, jsonschema = pytest.importorskip("httpx"), pytest.importorskip("jsonschema")

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
BAD = {"type": "objekt"}
SCHEMAS = "response_format.json_schema"
CHAT: Any = [{"role": "user", "content": "Who are you?"}]


@pytest.mark.parametrize("mode", mostly_slow(["ar", "ssd"], fast={"ssd"}))
def test_a_schema(mode: str) -> None:
    """Valid JSON, the same as the library's own."""
    with LLM(SMALL, device="cpu", speculation=SPECULATION[mode]) as llm, serving(llm) as served:
        form: Any = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA, "strict": True}}
        answer = served.client().chat.completions.create(
            model=MODEL, messages=CHAT, response_format=form, max_tokens=96, temperature=1.0, seed=3
        )
        text = answer.choices[0].message.content or ""
        jsonschema.validate(json.loads(text), SCHEMA)
        assert answer.choices[0].finish_reason == "stop"
        params = SamplingParams(max_new_tokens=96, temperature=1.0, seed=3, structured={"json_schema": SCHEMA})
        assert text == llm.chat(CHAT, params)[0].text


def test_the_first_request_does_not_wait_for_the_grammar_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its tokenizer is there when the server is ready."""
    with LLM(SMALL, device="cpu") as llm, serving(llm) as served:
        monkeypatch.setattr("llguidance.LLTokenizer", None)
        answer = served.client().completions.create(
            model=MODEL, prompt="Answer:", max_tokens=8, extra_body={"structured_outputs": {"regex": "[ab]{3}"}}
        )
    assert re.fullmatch("[ab]{3}", answer.choices[0].text)


def test_a_server_starts_without_the_grammar_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests that need it are told so."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with LLM(SMALL, device="cpu") as llm, serving(llm) as served:
        client = served.client()
        assert client.completions.create(model=MODEL, prompt="x", max_tokens=1).choices
        with pytest.raises(openai.BadRequestError, match="needs the package llguidance"):
            client.completions.create(model=MODEL, prompt="x", extra_body={"structured_outputs": {"regex": "a"}})


@pytest.mark.parametrize(
    ("asked", "pattern"),
    [({"regex": "[a-c]{3}"}, "[a-c]{3}"), ({"choice": ["yes", "no"]}, "yes|no"), ({"json": {"const": 7}}, "7")],
)
def test_other_kinds(served: Served, asked: dict[str, Any], pattern: str) -> None:
    answer = served.client().completions.create(
        model=MODEL, prompt="Answer:", max_tokens=16, extra_body={"structured_outputs": asked}
    )
    assert re.fullmatch(pattern, answer.choices[0].text)


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}}, f"{SCHEMAS}.schema"),
        ({"structured_outputs": {"json": BAD}}, "structured_outputs.json"),
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"regex": r"[^\s\S]"}}, "structured_outputs.regex"),  # no text is valid
        ({"structured_outputs": {"json": {"$ref": "#"}}}, "structured_outputs.json"),  # an endless schema
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs"),
        ({"structured_outputs": {"yaml": "a"}}, "structured_outputs.yaml"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 2}, "min_tokens"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "structured_outputs"),
    ],
)
def test_what_cannot_be_is_refused_by_name(strict: Served, change: dict[str, Any], param: str) -> None:
    body = {"model": MODEL, "messages": CHAT, "max_tokens": 4, **change}
    answer = httpx.post(f"{strict.url}/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param), answer.text


def test_a_grammar_that_reaches_a_limit_is_the_clients_error(served: Served) -> None:
    """In the middle of a text. The message is one line, without the library's state."""
    asked = {"structured_outputs": {"regex": "(a?){5000}a{5000}"}}
    answer = httpx.post(f"{served.url}/v1/completions", json={"model": MODEL, "prompt": "x", "max_tokens": 16, **asked})
    error = answer.json()["error"]
    assert (answer.status_code, error["code"]) == (400, "structured_output_failed")
    assert error["message"].startswith("structured output failed: ")
    assert "\n" not in error["message"]


def test_requests_that_wait_for_a_grammar_hold_up_no_others(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches compilation on the threads that tokenize, of which there are a few."""
    grammars: Any = served.llm.driver.limits.grammars
    pending: Future[Any] = Future()
    asked: list[StructuredOutput] = []
    monkeypatch.setattr(grammars, "compiled", lambda wanted: asked.append(wanted) or pending)
    create, count = served.client().completions.create, 2 * (os.cpu_count() or 1) + 9
    structured = {"structured_outputs": {"regex": "a"}}
    with ThreadPoolExecutor(count) as clients:
        waiting = [
            clients.submit(create, model=MODEL, prompt="x", max_tokens=1, extra_body=structured) for _ in range(count)
        ]
        until(lambda: len(asked) == count)
        assert create(model=MODEL, prompt="x", max_tokens=1, timeout=20).choices
        pending.set_exception(RequestError("structured.regex: takes too long"))
        assert {type(each.exception()) for each in waiting} == {openai.BadRequestError}
    until(lambda: served.admission.sequences == 0)
