"""Ollama's API, with its official client: the text of a request is that of the other APIs."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extras serve and dev")

import httpx
from live_server import MODEL, SMALL, Lazy, Served, until

from server.scripted import CALL, WEATHER, Script
from server.test_models import catalog_of, server_of
from server.test_models import served as model_of
from ssd.server.models.catalog import make
from ssd.server.ollama.protocol import seconds
from ssd.server.options import ServerOptions

ollama: Any = Lazy("ollama")
CHAT: Any = [{"role": "user", "content": "Tell me a story."}]
GREEDY: dict[str, Any] = {"temperature": 0, "num_predict": 12}
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "description": "x", "parameters": WEATHER}}


def client(served: Served) -> Any:
    return ollama.Client(host=served.url, timeout=60)


def theirs(served: Served, path: str, **fields: Any) -> Any:
    """The answer of another API."""
    body = {"model": MODEL, "temperature": 0, "max_tokens": 12, **fields}
    return httpx.post(f"{served.url}{path}", json=body, timeout=60).json()["choices"][0]


def test_a_chat_has_the_text_of_the_other_apis(served: Served) -> None:
    expected = theirs(served, "/v1/chat/completions", messages=CHAT)["message"]["content"]
    whole = client(served).chat(MODEL, CHAT, options=GREEDY)
    assert (whole.message.role, whole.message.content) == ("assistant", expected)
    assert (whole.done, whole.done_reason, whole.eval_count, whole.model) == (True, "length", 12, MODEL)
    parts = list(client(served).chat(f"{MODEL}:latest", CHAT, options=GREEDY, stream=True))
    assert "".join(part.message.content for part in parts) == expected
    assert [part.done for part in parts[-2:]] == [False, True]
    last = parts[-1]
    assert 0 <= last.load_duration <= last.prompt_eval_duration + last.eval_duration <= last.total_duration
    assert last.prompt_eval_count == whole.prompt_eval_count > 1
    assert last.created_at.endswith("Z")


def test_the_options_are_those_of_the_other_apis(served: Served) -> None:
    """Catches an option that is dropped on its way."""
    options = {"seed": 5, "top_k": 40, "top_p": 0.9, "min_p": 0.01, "stop": ["\n", "zz"]}
    penalties = {"presence_penalty": 0.5, "frequency_penalty": 0.25}
    ours = {**options, **penalties, "temperature": 0.9, "repetition_penalty": 1.3, "max_tokens": 20}
    expected = theirs(served, "/v1/completions", prompt="Once", **ours)
    options |= {**penalties, "temperature": 0.9, "repeat_penalty": 1.3, "num_predict": 20}
    found = client(served).generate(MODEL, "Once", raw=True, options=options)
    assert (found.response, found.done_reason) == (expected["text"], expected["finish_reason"])
    no_limits = {"num_predict": -1, "top_k": -1, "seed": -1, "temperature": 0, "stop": [" "]}
    assert client(served).generate(MODEL, "Once", options=no_limits).done


def test_generate_writes_an_answer_or_a_continuation(served: Served) -> None:
    system = {"role": "system", "content": "Be brief."}
    expected = theirs(served, "/v1/chat/completions", messages=[system, *CHAT])["message"]["content"]
    text = CHAT[0]["content"]
    assert client(served).generate(MODEL, text, system="Be brief.", options=GREEDY).response == expected
    parts = client(served).generate(MODEL, text, raw=True, options=GREEDY, stream=True)
    assert "".join(part.response for part in parts) == theirs(served, "/v1/completions", prompt=text)["text"]


def test_a_model_without_a_chat_template_continues_prompts(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served.llm.tokenizer, "_chat_templates", {})
    assert client(served).generate(MODEL, "Once", options=GREEDY).response
    with pytest.raises(ollama.ResponseError, match="no chat template"):
        client(served).chat(MODEL, CHAT, options=GREEDY)


@pytest.mark.parametrize("stream", [False, True])
def test_format_is_json_or_a_schema(served: Served, stream: bool) -> None:
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    asked = client(served).chat(MODEL, CHAT, format=schema, options={"seed": 1}, stream=stream)
    text = "".join(part.message.content for part in (asked if stream else [asked]))
    assert json.loads(text)["n"] in (1, 2)
    found = client(served).generate(MODEL, "x", format="json", options={"seed": 1, "num_predict": 40})
    assert found.done_reason == "length" or json.loads(found.response) is not None


def test_embeddings(served: Served) -> None:
    found = client(served).embed(MODEL, ["one", "two words"])
    body = {"model": MODEL, "input": ["one", "two words"]}
    expected = httpx.post(f"{served.url}/v1/embeddings", json=body, timeout=60).json()
    assert [list(each) for each in found.embeddings] == [each["embedding"] for each in expected["data"]]
    assert found.prompt_eval_count == expected["usage"]["prompt_tokens"]


def test_the_model_is_described(served: Served) -> None:
    [listed] = client(served).list().models
    assert (listed.model, listed.details.family, listed.details.quantization_level) == (MODEL, "llama", "BF16")
    assert listed.size > 1_000_000
    [running] = client(served).ps().models
    assert (running.digest, running.context_length) == (listed.digest, served.llm.config.max_model_len)
    shown = client(served).show(f"{MODEL}:latest")
    assert shown.modelinfo["general.architecture"] == "llama"
    assert shown.modelinfo["llama.context_length"] == served.llm.config.max_model_len
    assert shown.modelinfo["general.parameter_count"] > 1_000_000
    assert shown.capabilities[:2] == ["completion", "tools"]
    assert "messages" in shown.template
    numbers = httpx.get(f"{served.url}/api/version").json()["version"].split(".")
    assert [int(number) for number in numbers] >= [0, 6, 4]  # what clients ask for


def test_curl_without_a_content_type_is_served_but_no_foreign_page(served: Served) -> None:
    """Catches the examples of Ollama's documentation being refused, and a page of another site being served: a browser
    sends its requests without asking first, unless they say that they are JSON."""
    body = json.dumps({"model": MODEL, "prompt": "x", "stream": False, "options": {"num_predict": 1}})
    form = {"content-type": "application/x-www-form-urlencoded"}
    for headers in (form, {"content-type": "text/plain"}, {}):
        path = f"{served.url}/api/generate"
        assert httpx.post(path, content=body, headers=headers, timeout=60).status_code == 200
        answer = httpx.post(path, content=body, headers={**headers, "origin": "http://example.com"}, timeout=60)
        assert answer.status_code == 400


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"options": {"temperature": "hot"}}, "options.temperature: "),
        ({"options": {"temperature": -1}}, "options.temperature"),
        ({"options": {"num_predict": 0}}, "options.num_predict"),
        ({"options": {"repeat_penalty": -1}}, "options.repeat_penalty"),
        ({"format": "yaml"}, "format: 'yaml' is neither"),
        ({"format": {"type": "objekt"}}, "format: "),
        ({"keep_alive": "soon"}, "keep_alive: 'soon' is neither"),
        ({"think": "very"}, "think: 'very' is not one of"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role: 'robot'"),
        ({"messages": [{"role": "user", "content": [1]}]}, "messages[0].content: expected text"),
        ({"messages": [{"role": "user", "content": "x", "images": ["AAAA"]}]}, "messages[0].images: is not supported"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": 5}]}]}, "messages[0].tool_calls[0]: "),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "messages[0].tool_calls: expected a list"),
        ({"messages": [{"role": "user", "content": "word " * 5000}]}, "the prompt is too long"),
        ({"tools": [{"type": "function"}]}, "tools[0]: "),
    ],
)
def test_errors_name_the_field(served: Served, fields: dict[str, Any], expected: str) -> None:
    body = {"model": MODEL, "messages": CHAT, **fields}
    answer = httpx.post(f"{served.url}/api/chat", json=body, timeout=60)
    assert answer.status_code == 400
    assert list(answer.json()) == ["error"]
    assert answer.json()["error"].startswith(expected), answer.json()


def test_errors_of_other_endpoints(served: Served) -> None:
    with pytest.raises(ollama.ResponseError, match="'gpt-5' is not served here: use 'tiny-llama'") as refused:
        client(served).chat("gpt-5", CHAT)
    assert refused.value.status_code == 404
    assert httpx.post(f"{served.url}/api/show", json={"model": "gpt-5"}).status_code == 404
    assert httpx.post(f"{served.url}/api/show", json={}).json()["error"].startswith("model: is missing")
    for field, value in {"context": [1, 2], "suffix": "x", "template": "{{ .Prompt }}"}.items():
        with pytest.raises(ollama.ResponseError, match=f"{field}: is not supported"):
            client(served).generate(MODEL, "x", **{field: value})


def test_what_is_not_honoured_is_told(served: Served) -> None:
    body = {"model": MODEL, "messages": CHAT, "options": {**GREEDY, "mirostat": 2, "num_ctx": 512}, "logprobs": True}
    lines = httpx.post(f"{served.url}/api/chat", json=body, timeout=60).text.splitlines()
    warnings = json.loads(lines[-1])["ssd_warnings"]
    assert [warning.partition(":")[0] for warning in warnings] == ["logprobs", "options.mirostat"]
    assert not any("ssd_warnings" in line for line in lines[:-1])


# --- tools and reasoning, with answers that a test writes -------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
def test_calls_and_reasoning(tool_server: Served, script: Script, stream: bool) -> None:
    script.text = f"<think>\nRome, then.\n</think>\n\nI look. {CALL}\n{CALL}"
    asked = client(tool_server).chat(MODEL, CHAT, tools=[TOOL], think=True, stream=stream)
    parts = list(asked) if stream else [asked]
    calls = [call.function for part in parts for call in part.message.tool_calls or ()]
    assert [(call.name, dict(call.arguments)) for call in calls] == [("get_weather", {"city": "Rome", "days": 2})] * 2
    assert "".join(part.message.thinking or "" for part in parts).strip() == "Rome, then."
    assert "".join(part.message.content or "" for part in parts).strip() == "I look."
    assert parts[-1].done_reason == "stop"
    assert "get_weather" in script.prompt


@pytest.mark.parametrize("stream", [False, True])
def test_a_broken_call_is_text_and_a_cut_one_is_left_out(tool_server: Served, script: Script, stream: bool) -> None:
    for reason, text, expected in (("stop", "see " + CALL.replace("2}", "2"), "see "), ("length", CALL[:60], "")):
        script.text, script.finish_reason = text, reason
        asked = client(tool_server).chat(MODEL, CHAT, tools=[TOOL], stream=stream)
        parts = list(asked) if stream else [asked]
        assert not any(part.message.tool_calls for part in parts)
        assert "".join(part.message.content or "" for part in parts) == (text if reason == "stop" else expected)


def test_results_belong_to_their_calls(tool_server: Served, script: Script) -> None:
    """Catches results of two calls that change places: they have names, or only an order."""
    script.text = "Fine."
    call = {"function": {"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}}
    other = {"function": {"name": "get_time", "arguments": {}}}
    turn = {"role": "assistant", "content": "", "thinking": "hm", "tool_calls": [call, other]}
    results = [{"role": "tool", "tool_name": "get_time", "content": "noon"}, {"role": "tool", "content": "sunny"}]
    client(tool_server).chat(MODEL, [*CHAT, turn, *results])
    assert '{"name": "get_weather", "arguments": {"city": "Rome", "days": 1}}' in script.prompt
    assert "<think>hm</think>" in script.prompt
    from ssd.server.ollama.protocol import OllamaChatRequest

    messages = OllamaChatRequest(model=MODEL, messages=[turn, *results]).chat.messages
    ids = {each["function"]["name"]: each["id"] for each in messages[0]["tool_calls"]}
    assert [each["tool_call_id"] for each in messages[1:]] == [ids["get_time"], ids["get_weather"]]


def test_thinking_can_be_turned_off(tool_server: Served, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    render = tool_server.llm.render_chat
    monkeypatch.setattr(
        tool_server.llm, "render_chat", lambda chat, options=None: seen.append(dict(options)) or render(chat, options)
    )
    for think in (False, True, "low"):
        client(tool_server).chat(MODEL, CHAT, think=think)
    wanted = [{"enable_thinking": False}, {"enable_thinking": True}, {"reasoning_effort": "low"}]
    assert [{key: each[key] for key in want} for each, want in zip(seen, wanted, strict=True)] == wanted


# --- several models ---------------------------------------------------------------------------------------------------


def test_models_are_loaded_kept_and_unloaded_as_requests_say() -> None:
    models = (
        model_of("tiny-llama", SMALL, keep_alive=600.0),
        model_of("other", "tiny-qwen3-draft", aliases=("gpt-4o",)),
    )
    catalog = catalog_of(*models, load=make)
    with server_of(catalog) as url:
        ours = ollama.Client(host=url, timeout=60)
        assert [each.model for each in ours.list().models] == ["tiny-llama", "other"]
        assert ours.show("gpt-4o").modelinfo["qwen3.block_count"] > 0
        assert not ours.ps().models  # neither was loaded for that
        assert ours.generate("other", "x", keep_alive=0, options=GREEDY).done
        until(lambda: not ours.ps().models)
        assert httpx.post(f"{url}/api/generate", json={"model": "tiny-llama:latest"}, timeout=60).json()["done"]
        [running] = ours.ps().models
        assert 500 < running.expires_at.timestamp() - time.time() <= 600
        assert ours.chat("tiny-llama", CHAT, keep_alive="1h", options=GREEDY).load_duration < 1e9
        assert ours.ps().models[0].expires_at.timestamp() - time.time() > 3000
        assert ours.chat("tiny-llama", [], keep_alive=0).done_reason == "unload"
        assert not ours.ps().models
        assert ours.generate("other", keep_alive=0).done_reason == "unload"
        assert [slot.loads for slot in catalog.slots.values()] == [1, 1]
        with pytest.raises(ollama.ResponseError, match="keep_alive"):
            ours.generate("other", "x", keep_alive="soon")
        with pytest.raises(ollama.ResponseError, match="use 'tiny-llama' or 'other'"):
            ours.chat("gpt-5", CHAT)
        parts = list(ours.chat("other", CHAT, options=GREEDY, stream=True))  # a load with no comments before it
        assert parts[-1].load_duration > 1e6


def test_a_pinned_model_stays() -> None:
    model = model_of("tiny-llama", SMALL, pinned=True)
    catalog = catalog_of(model, load=make)
    catalog.preload(model)
    with server_of(catalog) as url:
        ours = ollama.Client(host=url, timeout=60)
        ours.generate("tiny-llama", keep_alive=0)
        ours.generate("tiny-llama", "x", keep_alive=0, options=GREEDY)
        [running] = ours.ps().models
        assert running.expires_at.year == 9999
        assert catalog.slots["tiny-llama"].loads == 1


def test_a_model_that_is_not_on_this_machine_is_listed_without_details() -> None:
    catalog = catalog_of(model_of("far", "nobody/there-is-none"), load=make)
    with server_of(catalog) as url:
        [listed] = ollama.Client(host=url).list().models
    assert (listed.model, listed.size, listed.details.family) == ("far", 0, "")


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (5, 5.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("250ms", 0.25),
        ("-1", -1.0),
        ("-1m", -60.0),
        ("0", 0.0),
        (None, None),
    ],
)
def test_durations(given: Any, expected: float) -> None:
    assert seconds(given) == expected


def test_tags_are_left_out_of_names() -> None:
    options = ServerOptions("a", aliases=("b", "c:latest"))
    assert [name for name in ("a", "a:latest", "b:latest", "c:latest", "c", "d") if options.is_called(name)] == [
        *("a", "a:latest", "b:latest", "c:latest"),
    ]
