"""Fields that clients of other servers send: honoured where there is such a thing here, else ignored with a warning."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from conftest import mostly_slow

pytest.importorskip("fastapi", reason="needs the extras serve and dev")
pytest.importorskip("llguidance", reason="needs the extras serve and dev")

import httpx
from live_server import MODEL, Lazy, Served, serving

from ssd.core import SamplingParams

ASK: Any = [{"role": "user", "content": "Hello"}]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
PATHS: dict[str, dict[str, Any]] = {
    CHAT: {"messages": ASK, "max_completion_tokens": 2},
    COMPLETIONS: {"prompt": "Hello", "max_tokens": 2},
    RESPONSES: {"input": "Hello", "max_output_tokens": 2},
    MESSAGES: {"messages": ASK, "max_tokens": 2},
}
CHATS = (CHAT, RESPONSES, MESSAGES)
LIMITS = ("max_completion_tokens", "max_tokens", "max_output_tokens")
SCHEMA = {"type": "object", "properties": {"a": {"const": 1}}, "additionalProperties": False}
SAMPLED = "the text is sampled without it"

# what the engine is asked for
Check = Callable[[SamplingParams], bool]
HONOURED: list[tuple[str, Any, Check]] = [
    ("repeat_penalty", 1.5, lambda p: p.repetition_penalty == 1.5),  # llama.cpp, Ollama, LM Studio
    ("rep_pen", 1.5, lambda p: p.repetition_penalty == 1.5),
    ("top_k", -1, lambda p: p.top_k == 0),  # vLLM
    ("min_p", 0.1, lambda p: p.min_p == 0.1),
    ("random_seed", 5, lambda p: p.seed == 5),
    ("do_sample", False, lambda p: p.temperature == 0),  # TGI
    ("stop_sequences", ["x"], lambda p: p.stop == ("x",)),
    ("ignore_eos", True, lambda p: p.ignore_eos),
    ("ban_eos_token", True, lambda p: p.ignore_eos),
    ("min_new_tokens", 1, lambda p: p.min_tokens == 1),
    ("options", {"repeat_penalty": 1.5, "seed": 7}, lambda p: (p.repetition_penalty, p.seed) == (1.5, 7)),  # Ollama
    ("extra_body", {"top_k": 7}, lambda p: p.top_k == 7),
    ("guided_json", SCHEMA, lambda p: p.structured.kind == "json_schema"),  # type: ignore[union-attr]
    ("json_schema", SCHEMA, lambda p: p.structured.kind == "json_schema"),  # type: ignore[union-attr]
    ("guided_regex", "ab", lambda p: p.structured.regex == "ab"),  # type: ignore[union-attr]
    ("regex", "ab", lambda p: p.structured.regex == "ab"),  # type: ignore[union-attr]
    ("guided_choice", ["a"], lambda p: p.structured.choice == ("a",)),  # type: ignore[union-attr]
    ("guided_grammar", 'root ::= "a"', lambda p: p.structured.kind == "grammar"),  # type: ignore[union-attr]
    ("ebnf", 'root ::= "a"', lambda p: p.structured.kind == "grammar"),  # type: ignore[union-attr]
    ("grammar", 'root ::= "a"', lambda p: p.structured.kind == "grammar"),  # type: ignore[union-attr]
    ("grammar", {"type": "regex", "value": "a"}, lambda p: p.structured.regex == "a"),  # type: ignore[union-attr]
    ("format", "json", lambda p: p.structured.json_object),  # type: ignore[union-attr]
    ("format", SCHEMA, lambda p: p.structured.kind == "json_schema"),  # type: ignore[union-attr]
]
FORMATS: list[tuple[Any, Check]] = [  # of chats and completions
    ({"type": "json_object", "schema": SCHEMA}, lambda p: p.structured.kind == "json_schema"),  # type: ignore[union-attr]
    ({"type": "json", "value": SCHEMA}, lambda p: p.structured.kind == "json_schema"),  # type: ignore[union-attr]
    ({"type": "regex", "value": "ab"}, lambda p: p.structured.regex == "ab"),  # type: ignore[union-attr]
]
THOUGHT: list[tuple[str, Any, dict[str, Any]]] = [  # variables of the chat template
    ("think", True, {"enable_thinking": True}),
    ("think", "low", {"reasoning_effort": "low"}),
    ("enable_thinking", False, {"enable_thinking": False}),
    ("reasoning_budget", 0, {"enable_thinking": False}),
    ("reasoning_budget", -1, {}),
    ("documents", [{"text": "x"}], {"documents": [{"text": "x"}]}),
    ("chat_template_kwargs", {"enable_thinking": True}, {"enable_thinking": True}),
]
IGNORED: list[tuple[str, Any, str]] = [  # with what the warning says
    ("cache_prompt", False, "always looked up"),  # llama.cpp
    ("id_slot", 3, "changes nothing here"),
    ("n_keep", 4, "changes nothing here"),
    ("mirostat", 2, SAMPLED),
    ("typical_p", 0.5, SAMPLED),
    ("dry_multiplier", 0.8, SAMPLED),
    ("xtc_probability", 0.5, SAMPLED),
    ("dynatemp_range", 0.5, SAMPLED),
    ("samplers", ["top_k"], SAMPLED),
    ("repeat_last_n", 64, "counts the whole prompt and text"),
    ("timings_per_token", True, "without it"),
    ("options", {"num_ctx": 8192}, "num_ctx: ignored: it changes nothing here"),
    ("ttl", 300, "changes nothing here"),  # LM Studio
    ("draft_model", "x", "changes nothing here"),
    ("use_beam_search", True, SAMPLED),  # vLLM
    ("num_beams", 4, SAMPLED),
    ("length_penalty", 1.2, SAMPLED),
    ("skip_special_tokens", False, "without special tokens"),
    ("include_stop_str_in_output", True, "before a stop string"),
    ("prompt_logprobs", 1, "use echo and logprobs"),
    ("watermark", True, SAMPLED),  # TGI
    ("details", True, "without it"),
    ("return_hidden_states", True, "changes nothing here"),  # SGLang
    ("provider", {"order": ["x"]}, "not a known parameter"),
    ("temperatur", 0.5, "not a known parameter: did you mean 'temperature'?"),
    ("stop_token_id", [5], "did you mean 'stop_token_ids'?"),
]
SILENT: dict[str, Any] = {  # values that ask for nothing
    **{"typical_p": 1, "tfs_z": 1.0, "mirostat": 0, "mirostat_tau": 5.0, "dry_multiplier": 0, "xtc_probability": 0},
    **{"num_beams": 1, "use_beam_search": False, "skip_special_tokens": True, "cache_prompt": True, "best_of": 1},
    **{"length_penalty": 1.0, "spaces_between_special_tokens": True, "early_stopping": False, "lora": []},
    **{"guided_json": None, "grammar": "", "n_predict": None, "provider": None, "samplers": []},
}
REFUSED: list[tuple[str, Any]] = [  # what a client relies on
    ("grammar", "%invented dialect"),
    ("guided_grammar", "<a> -> <b>"),
    ("structured_outputs", {"structural_tag": {"x": 1}}),
    ("structural_tag", {"x": 1}),
    ("allowed_token_ids", [1, 2]),
    ("bad_words", ["x"]),
    ("lora", [{"id": 0, "scale": 1}]),
    ("images", ["aGk="]),
    ("best_of", 3),
]


@pytest.fixture
def asked(served: Served, monkeypatch: pytest.MonkeyPatch) -> list[SamplingParams]:
    """The parameters of the requests that the engine gets."""
    found: list[SamplingParams] = []
    check = served.llm.driver.check

    def watched(token_ids: Any, params: SamplingParams, grammar: Any = None) -> Any:
        found.append(params)
        return check(token_ids, params, grammar)

    monkeypatch.setattr(served.llm.driver, "check", watched)
    return found


def post(server: Served, path: str, **fields: Any) -> httpx.Response:
    body = {"model": MODEL, **PATHS.get(path, {}), **fields}
    return httpx.post(server.url + path, json={k: v for k, v in body.items() if v is not ...}, timeout=60)


def warnings(answer: httpx.Response) -> list[str]:
    assert answer.status_code == 200, answer.text
    found: list[str] = answer.json().get("ssd_warnings", [])
    return found


@pytest.mark.parametrize("path", PATHS)
def test_what_is_here_under_another_name_is_honoured(served: Served, asked: list[SamplingParams], path: str) -> None:
    """Catches a name that is ignored, or whose value reaches another parameter."""
    for name, value, check in HONOURED:
        asked.clear()
        assert warnings(post(served, path, **{name: value})) == [], name
        assert len(asked) == 1
        assert check(asked[0]), name


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_formats_of_other_servers(served: Served, asked: list[SamplingParams], path: str) -> None:
    for value, check in FORMATS:
        asked.clear()
        assert warnings(post(served, path, response_format=value)) == []
        assert check(asked[0]), value


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("name", ["n_predict", "num_predict", "max_new_tokens"])
def test_limits_under_other_names(served: Served, asked: list[SamplingParams], path: str, name: str) -> None:
    """Catches a text that goes on beyond the limit; -1 is none. Our own name goes before."""
    without = dict.fromkeys(LIMITS, ...)
    assert warnings(post(served, path, **without, **{name: 3})) == []
    assert warnings(post(served, path, **without, stop=list("aeiou "), **{name: -1})) == []
    [own] = [limit for limit in LIMITS if limit in PATHS[path]]
    if path != CHAT:  # which has two of its own
        assert warnings(post(served, path, **{own: 2, name: 5})) == [f"{name}: ignored: {own} is given, too"]
    assert [params.max_new_tokens for params in asked] == [3, 2**31 - 1, 2][: len(asked)]


@pytest.mark.parametrize("path", CHATS)
def test_switches_of_reasoning(served: Served, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches one that is accepted and never reaches the model's template."""
    seen: list[dict[str, Any]] = []
    render = served.llm.render_chat
    monkeypatch.setattr(
        served.llm, "render_chat", lambda chat, options=None: seen.append(options) or render(chat, options)
    )
    for name, value, variables in THOUGHT:
        assert warnings(post(served, path, **{name: value})) == [], name
        both = {"thinking": variables["enable_thinking"]} if "enable_thinking" in variables else {}  # its other name
        assert seen[-1] == variables | both, name
    error = post(served, path, think="banana").json()["error"]
    assert error["message"].startswith("think: 'banana' is not one of none, ")


@pytest.mark.parametrize("path", mostly_slow(PATHS, fast=list(PATHS)[:2]))
def test_the_rest_is_ignored_with_a_warning(served: Served, strict: Served, path: str) -> None:
    """Catches a 400 for a hint, and a field that is ignored in silence."""
    for name, value, said in IGNORED:
        [warning] = warnings(post(served, path, **{name: value}))
        assert said in warning
        assert warning.startswith(("num_ctx" if name == "options" else name) + ": ignored: ")
        answer = post(strict, path, **{name: value})
        assert (answer.status_code, name in answer.text) == (400, True)
    assert warnings(post(served, path, **SILENT)) == []


@pytest.mark.parametrize("path", PATHS)
def test_strict_parameters_refuse_all_of_them(strict: Served, path: str) -> None:
    own = {"top_k", "min_p", "ignore_eos", "chat_template_kwargs", "structured_outputs", "best_of"}
    given = [name for name, *_ in (*HONOURED, *THOUGHT)] + ["n_predict", *SILENT]
    for name in dict.fromkeys(given):
        answer = post(strict, path, **{name: SILENT.get(name, 1)})
        if name not in own and not (path == MESSAGES and name == "stop_sequences"):
            assert answer.status_code == 400, name
            assert f"{name}: is not a known parameter" in answer.text


@pytest.mark.parametrize("path", PATHS)
def test_what_changes_the_meaning_is_refused(served: Served, path: str) -> None:
    """Catches a text that is not what was asked for. The error names the client's field."""
    for name, value in REFUSED:
        answer = post(served, path, **{name: value})
        assert (answer.status_code, name in answer.json()["error"]["message"]) == (400, True), (name, answer.text)


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (CHAT, {"messages": [{**ASK[0], "newer": 1}]}, []),  # the template's own business
        (CHAT, {"response_format": {"type": "text", "newer": 1}}, ["response_format.newer"]),
        (
            CHAT,
            {"tools": [{"type": "function", "newer": 1, "function": {"name": "f"}}] * 2},
            ["tools", "tools[].newer"],
        ),
        (RESPONSES, {"reasoning": {"newer": 1}}, ["reasoning.newer"]),
        (RESPONSES, {"text": {"format": {"type": "json_schema", "schema": {}, "new": 1}}}, ["text.format.new"]),
        (RESPONSES, {"input": [{**ASK[0], "newer": 1}]}, ["input[].newer"]),
        (MESSAGES, {"messages": [{**ASK[0], "newer": 1}]}, ["messages[].newer"]),
        (MESSAGES, {"tools": [{"name": "f", "input_schema": {}, "newer": 1}]}, ["tools[].newer"]),
        (MESSAGES, {"metadata": {"newer": 1}}, ["metadata.newer"]),
        ("/v1/messages/count_tokens", {"messages": ASK, "max_tokens": 5}, ["max_tokens"]),
        ("/v1/embeddings", {"input": "x", "input_type": "query"}, ["input_type"]),
        ("/tokenize", {"prompt": "x", "newer": 1}, ["newer"]),
        ("/detokenize", {"tokens": [5], "newer": 1}, ["newer"]),
    ],
)
def test_objects_inside_of_a_request_likewise(
    served: Served, path: str, fields: dict[str, Any], expected: list[str]
) -> None:
    """Catches an inner object that refuses what the request itself ignores, and one warning for each item of a list."""
    if path == CHAT and "tools" in fields:  # two tools cannot have one name
        fields["tools"][1] = {**fields["tools"][1], "function": {"name": "g"}}
        expected = expected[1:]
    found = warnings(post(served, path, **fields))
    assert [warning.partition(": ignored: ")[0] for warning in found] == expected


def test_what_is_ignored_of_a_tool_does_not_reach_the_prompt(served: Served) -> None:
    """Catches a prompt that changes with a field that the answer calls ignored."""
    function = {"name": "f", "parameters": {"type": "object"}}
    plain, more = (
        {"type": "function", "function": function},
        {"type": "function", "x": 1, "function": {**function, "y": 2}},
    )
    counts = [post(served, CHAT, tools=[tool]).json()["usage"]["prompt_tokens"] for tool in (plain, more)]
    assert counts[0] == counts[1]


# --- where it is told -------------------------------------------------------------------------------------------------


EXTRA = {"mirostat": 2, "nonsense": 1}
TOLD = ["mirostat: ignored: the text is sampled without it", "nonsense: ignored: it is not a known parameter"]


def streamed(served: Served, path: str, **fields: Any) -> list[dict[str, Any]]:
    lines = post(served, path, stream=True, **fields, **EXTRA).text.splitlines()
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("fields", [{}, {"n": 3}, {"stream_options": {"include_usage": True}}])
def test_the_last_chunk_has_the_warnings(served: Served, path: str, fields: dict[str, Any]) -> None:
    *chunks, last = streamed(served, path, **fields)
    assert last["ssd_warnings"] == TOLD
    assert all("ssd_warnings" not in chunk for chunk in chunks)


def test_the_official_clients_accept_the_warnings(served: Served) -> None:
    """Catches a field where a client looks for something else, in every API, streamed or not."""
    client = served.client()
    chat: Any = {"model": MODEL, "messages": ASK, "max_tokens": 3, "extra_body": EXTRA}
    assert client.chat.completions.create(**chat).model_extra["ssd_warnings"] == TOLD
    assert [chunk.model_extra for chunk in client.chat.completions.create(**chat, stream=True)][-1] == {
        "ssd_warnings": TOLD
    }
    with client.chat.completions.stream(**{**chat, "max_tokens": 64, "stop": ["e"]}) as stream:
        assert stream.get_final_completion().choices[0].message.content
    text: Any = {"model": MODEL, "prompt": "Hello", "max_tokens": 3, "extra_body": EXTRA}
    assert client.completions.create(**text).model_extra["ssd_warnings"] == TOLD
    assert list(client.completions.create(**text, stream=True))[-1].model_extra["ssd_warnings"] == TOLD
    response: Any = {"model": MODEL, "input": "Hello", "max_output_tokens": 3, "extra_body": EXTRA}
    assert client.responses.create(**response).model_extra["ssd_warnings"] == TOLD
    with client.responses.stream(**response) as stream:
        assert list(stream)[-1].response.model_extra["ssd_warnings"] == TOLD
    embedded = client.embeddings.create(model=MODEL, input="x", extra_body={"nonsense": 1})
    assert embedded.model_extra["ssd_warnings"] == TOLD[1:]
    claude = Lazy("anthropic").Anthropic(base_url=served.url, api_key="none", max_retries=0).messages
    message: Any = {"model": MODEL, "messages": ASK, "max_tokens": 3, "extra_body": EXTRA}
    assert claude.create(**message).model_extra["ssd_warnings"] == TOLD
    with claude.stream(**message) as stream:
        events = list(stream)
        assert stream.get_final_message().model_extra["ssd_warnings"] == TOLD
    assert [event.model_extra["ssd_warnings"] for event in events if event.type == "message_delta"] == [TOLD]
    counted = claude.count_tokens(model=MODEL, messages=ASK, extra_body={"nonsense": 1})
    assert counted.model_extra["ssd_warnings"] == TOLD[1:]


def test_without_warnings_there_is_no_field(served: Served) -> None:
    for path in PATHS:
        assert "ssd_warnings" not in post(served, path).text
        assert "ssd_warnings" not in post(served, path, stream=True).text


@pytest.fixture
def fresh(served: Served) -> Iterator[Served]:
    """A server whose log and metric have nothing yet."""
    with serving(served.llm) as running:
        yield running


def counts(served: Served) -> dict[str, float]:
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    pairs = (line.partition('parameter="')[2].partition('"} ') for line in lines if "ignored_parameters_total{" in line)
    return {name: float(value) for name, _, value in pairs}


def test_the_metric_has_known_names_only(fresh: Served) -> None:
    """Catches clients that can add labels, and kinds that are counted once."""
    for i in range(3):
        post(fresh, CHAT, mirostat=2, store=True, **{f"nonsense_{i}": 1})
    post(fresh, MESSAGES, messages=[{**ASK[0], "mirostat": 1}])
    large = "x" * 200_000  # read on another thread
    post(fresh, COMPLETIONS, prompt=large, ttl=1)
    assert counts(fresh) == {"mirostat": 3, "store": 3, "other": 4, "ttl": 1}


def test_a_kind_is_logged_once(fresh: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a log that grows with every request, and names that break its lines."""
    with caplog.at_level(logging.WARNING, "ssd"):
        for _ in range(3):
            post(fresh, CHAT, **{"mirostat": 2, "evil\nname": 1})
    texts = [record.getMessage() for record in caplog.records if record.name == "ssd"]
    assert [text for text in texts if "mirostat" in text] == [
        "a field of a request is ignored: mirostat: the text is sampled without it (said once)"
    ]
    assert len([text for text in texts if "evil\\nname" in text and "\n" not in text]) == 1


def test_nothing_grows_with_what_clients_make_up(fresh: Served, caplog: pytest.LogCaptureFixture) -> None:
    """Catches sets of names without a bound: in the answer, in the log, in the metric."""
    fields = [{f"made_up_{i}_{j}": 1 for j in range(100)} for i in range(60)]
    with caplog.at_level(logging.WARNING, "ssd"):
        for each in fields:
            found = warnings(post(fresh, COMPLETIONS, **each))
            assert len(found) == 21
            assert found[-1] == "80 other fields: ignored"
    assert len([r for r in caplog.records if r.name == "ssd"]) == 1000
    assert counts(fresh) == {"other": 6000}
    [warning] = warnings(post(fresh, COMPLETIONS, **{"x" * 100_000: 1}))
    assert len(warning) < 200
