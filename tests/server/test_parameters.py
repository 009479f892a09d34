"""Parameters of the published APIs: which are accepted, ignored or refused, and that the docs say so."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extras serve and dev")

import httpx
from live_server import MODEL, Served

from ssd.server import parameters
from ssd.server.anthropic.messages import CountTokensRequest, MessagesRequest
from ssd.server.fields import EMPTY, Alias, Foreign, Published, Table
from ssd.server.ollama.protocol import EmbedRequest, GenerateRequest, OllamaChatRequest, Options
from ssd.server.openai.responses import ResponsesRequest
from ssd.server.protocol import ChatRequest, CompletionRequest, EmbeddingRequest, PublishedRequest

DOCS = Path(__file__).parents[2] / "docs" / "serving.md"
CHAT = [{"role": "user", "content": "Hello"}]
DOORS: dict[str, tuple[type[PublishedRequest], dict[str, Any]]] = {
    "/v1/chat/completions": (ChatRequest, {"messages": CHAT, "max_tokens": 1}),
    "/v1/completions": (CompletionRequest, {"prompt": "Hello", "max_tokens": 1}),
    "/v1/responses": (ResponsesRequest, {"input": "Hello", "max_output_tokens": 1}),
    "/v1/messages": (MessagesRequest, {"messages": CHAT, "max_tokens": 1}),
    "/v1/messages/count_tokens": (CountTokensRequest, {"messages": CHAT}),
    "/v1/embeddings": (EmbeddingRequest, {"input": "Hello"}),
    "/api/chat": (OllamaChatRequest, {"messages": CHAT, "options": {"num_predict": 1}, "stream": False}),
    "/api/generate": (GenerateRequest, {"prompt": "Hello", "options": {"num_predict": 1}, "stream": False}),
    "/api/embed": (EmbedRequest, {"input": "Hello"}),
}
PUBLISHED = {  # parameters of the APIs' own clients: the types that list them
    "/v1/chat/completions": [("openai.types.chat.completion_create_params", "CompletionCreateParamsBase")],
    "/v1/completions": [("openai.types.completion_create_params", "CompletionCreateParamsBase")],
    "/v1/responses": [("openai.types.responses.response_create_params", "ResponseCreateParamsBase")],
    "/v1/messages": [
        ("anthropic.types.message_create_params", "MessageCreateParamsBase"),
        ("anthropic.types.beta.message_create_params", "MessageCreateParamsBase"),
    ],
    "/v1/messages/count_tokens": [("anthropic.types.message_count_tokens_params", "MessageCountTokensParams")],
    "/v1/embeddings": [("openai.types.embedding_create_params", "EmbeddingCreateParams")],
    "/api/chat": [("ollama._types", "ChatRequest")],
    "/api/generate": [("ollama._types", "GenerateRequest")],
    "/api/embed": [("ollama._types", "EmbedRequest")],
}


def published(path: str) -> set[str]:
    types = [getattr(pytest.importorskip(module), name) for module, name in PUBLISHED[path]]
    header = {"betas"} if path == "/v1/messages" else set()
    names = (getattr(each, "model_fields", each.__annotations__) for each in types)  # those of base classes, too
    return {parameter for each in names for parameter in each} - header


def published_of(model: type[PublishedRequest]) -> dict[str, Published]:
    return {name: entry for name, entry in model.published.items() if isinstance(entry, Published)}


def post(served: Served, path: str, **fields: Any) -> tuple[int, dict[str, Any]]:
    answer = httpx.post(served.url + path, json={"model": MODEL, **DOORS[path][1], **fields}, timeout=60)
    error = answer.json().get("error") or {}
    return answer.status_code, {"message": error} if isinstance(error, str) else error


@pytest.mark.parametrize("path", DOORS)
def test_every_parameter_of_the_published_api_is_known(path: str) -> None:
    """Catches a parameter that a newer client sends, and that would be refused as not known."""
    model, _ = DOORS[path]
    table = published_of(model)
    assert not published(path) - model.model_fields.keys() - table.keys()
    assert not model.model_fields.keys() & table.keys()


@pytest.mark.parametrize("path", DOORS)
def test_what_is_null_or_empty_is_accepted(served: Served, strict: Served, path: str) -> None:
    """Catches `"include": []`, `"dimensions": null` and the like, which clients send for what nobody has set."""
    model, given = DOORS[path]
    table = published_of(model)
    names = [name for name in (*published(path), *table) if name not in ("model", *given, "stream")]
    for server in (served, strict):
        assert post(server, path, **dict.fromkeys(names)) == (200, {})
        for empty in EMPTY[1:]:
            accepted = {n: empty for n in names if n not in table or empty in (table[n].values or EMPTY)}
            assert post(server, path, **accepted) == (200, {}), empty


NULLS: dict[str, dict[str, Any]] = {  # null inside of fields, where the published APIs allow it
    "/v1/chat/completions": {
        "messages": [{"role": "user", "content": "x", "name": None}],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": None, "strict": None}}],
        "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}, "strict": None}},
        "stream_options": {"include_usage": None, "include_obfuscation": None},
    },
    "/v1/completions": {"prompt": None},
    "/v1/responses": {
        "tools": [{"type": "function", "name": "f", "parameters": None, "strict": None, "description": None}],
        "text": {"format": None, "verbosity": None},
        "reasoning": {"effort": None, "summary": None},
    },
    "/v1/messages": {
        "tools": [{"type": None, "name": "f", "input_schema": {}, "cache_control": None}],
        "output_config": {"effort": None, "format": None},
        "metadata": {"user_id": None},
    },
    "/tokenize": {"prompt": "x", "messages": None, "add_special_tokens": None, "model": None},
    "/detokenize": {"tokens": [5], "skip_special_tokens": None},
}


@pytest.mark.parametrize("path", NULLS)
def test_null_is_accepted_inside_of_fields(served: Served, strict: Served, path: str) -> None:
    """Catches a library's `null` for what nobody has set, where the server has a default that is not null."""
    given = DOORS[path][1] if path in DOORS else {}
    for server in (served, strict):
        answer = httpx.post(server.url + path, json={"model": MODEL, **given, **NULLS[path]}, timeout=60)
        assert answer.status_code == 200, answer.text
        assert "ssd_warnings" not in answer.json()


@pytest.mark.parametrize(
    ("path", "field", "known"),
    [
        ("/v1/chat/completions", "structured_outputs", {"choice": ["a"]}),
        ("/v1/responses", "reasoning", {"effort": "low"}),
        ("/v1/messages", "metadata", {"user_id": "x"}),
    ],
)
def test_null_counts_as_left_out_inside_of_fields_too(
    strict: Served, path: str, field: str, known: dict[str, Any]
) -> None:
    """Catches clients that are refused because their library writes null for a newer field that nobody has set."""
    assert post(strict, path, **{field: {**known, "newer": None}}) == (200, {})
    status, error = post(strict, path, **{field: {**known, "newer": 0}})
    assert status == 400
    assert f"{field}.newer: is not a known parameter" in error["message"]


@pytest.mark.parametrize("path", DOORS)
def test_hints_and_defaults_are_accepted_and_others_are_not_supported(
    served: Served, strict: Served, path: str
) -> None:
    """Catches a hint that is refused, a default that is, and what would change the answer but is ignored."""
    table = published_of(DOORS[path][0])
    hints = {name: {"x": 1} for name, parameter in table.items() if parameter.values is None}
    defaults = {name: parameter.values[-1] for name, parameter in table.items() if parameter.values}
    for server in (served, strict):
        assert post(server, path, **hints) == (200, {})
        assert post(server, path, **defaults) == (200, {})
    for name in defaults:
        status, error = post(strict, path, **{name: "something else"})
        assert status == 400
        assert f"{name}: is not supported: " in error["message"]
        status, again = post(served, path, **{name: "something else"})
        assert (status, again) == ((200, {}) if table[name].ignored else (400, error))
    status, error = post(strict, path, nonsense=1)
    assert status == 400
    assert "nonsense: is not a known parameter" in error["message"]


def test_every_option_of_ollama_is_known() -> None:
    options = pytest.importorskip("ollama._types").Options.model_fields
    assert not options.keys() - Options.model_fields.keys() - parameters.OLLAMA_OPTIONS.keys()


def test_not_known_and_not_supported_have_codes(strict: Served) -> None:
    path = "/v1/chat/completions"
    for name, code in (("nonsense", "unknown_parameter"), ("audio", "unsupported_parameter")):
        _, error = post(strict, path, **{name: {"voice": "x"}})
        assert (error["param"], error["code"]) == (name, code)


def listed(table: Table) -> str:
    """A table of `parameters.py` as the docs write it: hints; then the others, with their values."""
    published = sorted((name, entry) for name, entry in table.items() if isinstance(entry, Published))
    hints = [f"`{name}`" for name, parameter in published if parameter.values is None]
    others = []
    for name, parameter in published:
        values = [value for value in parameter.values or () if value not in EMPTY]
        texts = [f"`{json.dumps(value)}`" for value in values] + ([PASSED] if parameter.ignored else [])
        others += [f"`{name}`" + (f" ({', '.join(texts)})" if texts else "")] if parameter.values is not None else []
    return f"| {', '.join(hints)} | {', '.join(others)} |"


PASSED = "others with a warning"


def test_the_docs_list_what_is_ignored_and_what_is_not_supported() -> None:
    """Catches a table in the code that the docs do not have, or have otherwise."""
    text = DOCS.read_text()
    for name, table in vars(parameters).items():
        if name.isupper() and name[0] != "_" and isinstance(table, dict):
            row = listed(table)
            assert row == "|  |  |" or row in text, f"{name}: {row}"


def test_the_docs_list_the_parameters_of_other_servers() -> None:
    """Catches one that is honoured, ignored or refused and that the docs do not have, or have elsewhere."""
    _, _, text = DOCS.read_text().partition("\n## Parameters of other servers\n")
    honoured, ignored, refused = (line for line in text.partition("\n## ")[0].splitlines() if line.startswith("| *"))
    tables = [table for name, table in vars(parameters).items() if name.isupper() and isinstance(table, dict)]
    for name, entry in (item for table in tables for item in table.items()):
        if isinstance(entry, Alias) and entry.field not in ("", name):
            assert f"`{name}`" in honoured
        elif isinstance(entry, Foreign):
            assert f"`{name}`" in (refused if entry.refused else ignored), name


@pytest.mark.parametrize("path", DOORS)
def test_the_schema_has_them(served: Served, path: str) -> None:
    schema = httpx.get(f"{served.url}/openapi.json").json()
    body = schema["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
    properties = schema["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"]
    assert published_of(DOORS[path][0]).keys() <= properties.keys()


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "-1e999"])
def test_numbers_that_are_not_finite_are_no_json(served: Served, number: str) -> None:
    """Catches a 500 where an answer repeats such a number, and a grammar or a bias that is made of one."""
    tool = f'{{"type": "function", "name": "f", "parameters": {{"const": {number}}}}}'
    bodies = {
        "/v1/chat/completions": f'{{"model": "{MODEL}", "messages": [], "logit_bias": {{"5": {number}}}}}',
        "/v1/responses": f'{{"model": "{MODEL}", "input": "x", "max_output_tokens": 1, "tools": [{tool}]}}',
        "/tokenize": f'{{"prompt": {number}}}',
    }
    for path, body in bodies.items():
        answer = httpx.post(served.url + path, content=body, headers={"content-type": "application/json"}, timeout=60)
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "invalid_json")
        assert f"{number} is not a finite number" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "field", "param"),
    [
        ("/v1/chat/completions", "messages", "messages"),
        ("/v1/completions", "prompt", "prompt"),
        ("/v1/responses", "input", "input"),
        ("/v1/messages", "messages", None),
    ],
)
def test_a_prompt_that_is_too_long_is_named_as_clients_expect_it(
    served: Served, path: str, field: str, param: str | None
) -> None:
    """Catches agents that cannot tell when to shorten their history. The wording is that which clients look for."""
    text = "word " * 5000
    prompt = text if field in ("prompt", "input") else [{"role": "user", "content": text}]
    status, error = post(served, path, **{field: prompt})
    assert status == 400
    assert re.search("prompt is too long.*this model's maximum context length is", error["message"])
    if param is not None:
        assert (error["param"], error["code"]) == (param, "context_length_exceeded")


def test_efforts_are_variables_of_the_chat_template(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an effort that is accepted and never reaches the model's template."""
    seen: list[dict[str, Any]] = []
    render = served.llm.render_chat

    def watched(messages: Any, options: Any = None) -> str:
        seen.append(dict(options or {}))
        return render(messages, options)

    monkeypatch.setattr(served.llm, "render_chat", watched)
    asked = (
        ("/v1/chat/completions", {"reasoning_effort": "low"}),
        ("/v1/responses", {"reasoning": {"effort": "low"}}),
        ("/v1/messages", {"output_config": {"effort": "low"}}),
        ("/v1/chat/completions", {"reasoning_effort": "none"}),
        ("/v1/messages", {"thinking": {"type": "enabled", "budget_tokens": 1024}}),
    )
    for path, fields in asked:
        assert post(served, path, **fields) == (200, {})
    low: list[dict[str, Any]] = list(itertools.repeat({"reasoning_effort": "low"}, 3))
    off, on = ({"enable_thinking": value, "thinking": value} for value in (False, True))
    assert seen == [*low, {"reasoning_effort": "none", **off}, on]
