"""Tools and reasoning over HTTP, with the real openai and anthropic clients."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extras serve and dev")
pytest.importorskip("jsonschema", reason="needs the extras serve and dev")

import httpx
import jsonschema
from conftest import mostly_slow
from live_server import MODEL, Lazy, Served, openai, serving

import ssd
from server.scripted import ARGUMENTS, CALL, LLAMA_TEMPLATE, TEMPLATE, WEATHER, Script, checkpoint
from ssd import LLM, SamplingParams
from ssd.core import RequestMetrics, RequestOutput, Sample
from ssd.server.anthropic.message_events import stop_sequence
from ssd.server.errors import ApiError
from ssd.server.openai.response_tools import chat_name
from ssd.server.protocol import ChatRequest
from ssd.server.tool_use import read_tools
from ssd.text.tokenizer import load_tokenizer

CHAT_TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
BAD_TOOL: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "objekt"}}}
BAD_PATH = "tools[1].tools[1].parameters"
RESPONSES_TOOL: Any = {"type": "function", "name": "get_weather", "parameters": WEATHER, "strict": False}
MESSAGES_TOOL: Any = {"name": "get_weather", "description": "Forecast", "input_schema": WEATHER}
ASK: Any = [{"role": "user", "content": "Weather?"}]


def claude(served: Served) -> Any:
    return Lazy("anthropic").Anthropic(base_url=served.url, api_key="none", max_retries=0)


# --- chat completions -------------------------------------------------------------------------------------------------


def test_chat_call(tool_server: Served, script: Script) -> None:
    """A call is returned as `tool_calls`, and the prompt has the tools."""
    script.text = f"<think>\nRome, then.\n</think>\n\nI look. {CALL}\n{CALL}"
    answer = tool_server.client().chat.completions.create(model=MODEL, messages=ASK, tools=[CHAT_TOOL])
    [choice] = answer.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert choice.message.reasoning_content == "Rome, then."
    assert [(c.function.name, c.function.arguments) for c in choice.message.tool_calls] == [
        ("get_weather", ARGUMENTS),
        ("get_weather", ARGUMENTS),
    ]
    assert '"days"' in script.prompt


def test_chat_call_streamed(tool_server: Served, script: Script) -> None:
    """The client's own accumulation of the deltas gives the same message, and arguments come in pieces."""
    script.text = f"<think>Rome.</think>I look. {CALL}\n{CALL}"
    with tool_server.client().chat.completions.stream(model=MODEL, messages=ASK, tools=[CHAT_TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    [choice] = final.choices
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "I look."
    assert [c.function.arguments for c in choice.message.tool_calls] == [ARGUMENTS] * 2
    assert len({c.id for c in choice.message.tool_calls}) == 2
    assert sum(e.type == "tool_calls.function.arguments.delta" for e in events) > 4
    chunks = [e.chunk.choices[0].delta for e in events if e.type == "chunk"]
    assert "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks) == "Rome."


def test_chat_text_stays_text(tool_server: Served, script: Script) -> None:
    """A broken call is the message's text, whole."""
    script.text = 'See <tool_call>{"name": "get_weather", "arguments": {"city": Rome}}</tool_call>'
    answer = tool_server.client().chat.completions.create(model=MODEL, messages=ASK, tools=[CHAT_TOOL])
    assert answer.choices[0].message.content == script.text
    assert answer.choices[0].message.tool_calls is None
    assert answer.choices[0].finish_reason == "stop"


def test_no_tools_no_parsing(tool_server: Served, script: Script) -> None:
    """Without tools, and with `tool_choice="none"`, the model's text is not interpreted and has no tools in it."""
    script.text = CALL
    client = tool_server.client().chat.completions
    for more in ({}, {"tools": [CHAT_TOOL], "tool_choice": "none"}):
        answer = client.create(model=MODEL, messages=ASK, **more)
        assert answer.choices[0].message.content == CALL
        assert "days" not in script.prompt


def test_tool_results_reach_the_template(tool_server: Served, script: Script) -> None:
    """Calls and results of earlier turns are rendered by the template, arguments as objects."""
    script.text = "Sunny."
    call = {"id": "call_1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}
    messages: Any = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "18 degrees"},
    ]
    tool_server.client().chat.completions.create(model=MODEL, messages=messages, tools=[CHAT_TOOL])
    assert f'<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}</tool_call>' in script.prompt
    assert "tool\n18 degrees" in script.prompt


def test_reasoning_opened_by_the_prompt(tool_server: Served, script: Script) -> None:
    script.text = "Hm.\n</think>\n\nYes."
    answer = tool_server.client().chat.completions.create(
        model=MODEL, messages=ASK, extra_body={"chat_template_kwargs": {"think": True}}
    )
    assert answer.choices[0].message.reasoning_content == "Hm."
    assert answer.choices[0].message.content == "Yes."


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [{"type": "retrieval"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "function", "function": {"name": "f", "schema": {}}}]}, "tools[0].function.schema"),
        ({"tools": [CHAT_TOOL, BAD_TOOL], "tool_choice": "required"}, "tools[1].function.parameters"),
        ({"tools": [CHAT_TOOL, CHAT_TOOL]}, "tools"),
        ({"tools": [CHAT_TOOL], "tool_choice": "sometimes"}, "tool_choice"),
        ({"tools": [CHAT_TOOL], "tool_choice": {"type": "function", "function": {"name": "other"}}}, "tool_choice"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
    ],
)
def test_refusals_name_the_field(strict: Served, more: dict[str, Any], param: str) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        strict.client().chat.completions.create(**{"model": MODEL, "messages": ASK, **more})
    assert caught.value.param == param


# --- templates without tools, or with unknown ones --------------------------------------------------------------------


CALLED: Any = [
    {"role": "system", "content": "Be brief."},
    *ASK,
    {
        "role": "assistant",
        "content": "I look.",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": ARGUMENTS}}],
    },
    {"role": "tool", "tool_call_id": "1", "content": "18 degrees"},
]


@pytest.fixture(scope="module")
def plain_llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    """A model whose template knows neither tools nor messages but those of users and assistants."""
    with LLM(checkpoint(tmp_path_factory.mktemp("plain"), template=PLAIN), device="cpu", max_model_len=1024) as llm:
        yield llm


PLAIN = (
    "{% for message in messages %}{% if message.role not in ('system', 'user', 'assistant') or not message.content %}"
    "{{ raise_exception('what is this?') }}{% endif %}[{{ message.role }}]{{ message.content }}{% endfor %}[assistant]"
)


def test_why_tools_are_refused_is_said_with_a_remedy(plain_llm: LLM) -> None:
    body = ChatRequest(model=MODEL, messages=ASK, tools=[CHAT_TOOL])
    remedy = "its format of calls is not known: if it is one of glm, hermes, .*, start"
    with pytest.raises(ApiError, match=remedy) as caught:
        read_tools(body, PLAIN + "{{ tools }}", "auto", plain_llm.tokenizer)
    assert (caught.value.status, caught.value.param) == (400, "tools")


@pytest.mark.parametrize(
    ("parser", "call"),
    [
        ("hermes", f'<tool_call>\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n</tool_call>'),
        ("json", f'{{"name": "get_weather", "parameters": {ARGUMENTS}}}'),
        ("auto", f'```json\n{{"name": "get_weather", "arguments": {ARGUMENTS}}}\n```'),
    ],
)
def test_a_named_parser_describes_tools_to_a_template_without_any(
    plain_llm: LLM, monkeypatch: pytest.MonkeyPatch, parser: str, call: str
) -> None:
    """Catches tools, calls and results that the model never sees, or a template that is given what it refuses."""
    script = Script()
    monkeypatch.setattr("ssd.server.openai.chat.start", script.start())
    script.text = call
    with serving(plain_llm, tool_parser=parser) as served:
        client = served.client().chat.completions
        message = client.create(model=MODEL, messages=CALLED, tools=[CHAT_TOOL]).choices[0].message
        assert [c.function.arguments for c in message.tool_calls] == [ARGUMENTS]
        assert script.prompt.startswith("[system]Be brief.\n\nYou can call functions.")
        assert json.dumps(CHAT_TOOL) in script.prompt
        results = f"[assistant]I look.\n{call}[user]<tool_response>\n18 degrees\n</tool_response>[assistant]"
        assert script.prompt.endswith(results)
        client.create(model=MODEL, messages=ASK, tools=[CHAT_TOOL])
        assert script.prompt.startswith("[system]You can call functions.")
        client.create(model=MODEL, messages=ASK)
        assert script.prompt == f"[user]{ASK[0]['content']}[assistant]"


# --- bundled models ---------------------------------------------------------------------------------------------------


def test_bundled_models_call_a_tool_that_is_required(served: Served) -> None:
    """Catches a bundled template without tools: the first thing that people try."""
    pytest.importorskip("llguidance")
    client = served.client().chat.completions
    options: dict[str, Any] = {"model": MODEL, "tools": [CHAT_TOOL], "seed": 3, "max_tokens": 100}
    answer = client.create(**options, messages=ASK, tool_choice="required", parallel_tool_calls=False)
    [call] = answer.choices[0].message.tool_calls
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    result = {"role": "tool", "tool_call_id": call.id, "content": "18 degrees"}
    assert client.create(**options, messages=[*ASK, answer.choices[0].message, result]).usage.completion_tokens


@pytest.mark.parametrize("model", ["tiny-llama", "tiny-llama-draft", "tiny-qwen3", "tiny-qwen3-draft"])
def test_bundled_templates_write_chats_without_tools_as_they_did(model: str) -> None:
    """Catches other prompts than those that the models were trained and measured with."""
    tokenizer = load_tokenizer(Path(ssd.__file__).parent / "bundle" / model)
    chat = [{"role": role, "content": f" {role} \n"} for role in ("system", "user", "assistant", "user")]
    if "llama" in model:
        texts = [f"<|start_header_id|>{m['role']}<|end_header_id|>\n\n{m['role']}<|eot_id|>" for m in chat]
        expected = "<|begin_of_text|>" + "".join(texts) + "<|start_header_id|>assistant<|end_header_id|>\n\n"
    else:
        texts = [f"<|im_start|>{m['role']}\n{m['role']}<|im_end|>\n" for m in chat]
        expected = "".join(texts) + "<|im_start|>assistant\n"
    assert tokenizer.apply_chat_template(chat) == expected
    assert tokenizer.apply_chat_template(chat, tools=[]) == expected
    assert "get_weather" in tokenizer.apply_chat_template(chat, tools=[CHAT_TOOL])


# --- forced calls, by the model itself --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice",
    ["required", pytest.param({"type": "function", "function": {"name": "get_weather"}}, marks=pytest.mark.slow)],
)
def test_forced_call(tool_server: Served, choice: Any) -> None:
    """A model that knows nothing of tools calls one, with arguments that follow the schema."""
    pytest.importorskip("llguidance")
    client = tool_server.client().chat.completions
    options: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [CHAT_TOOL], "tool_choice": choice}
    options |= {"parallel_tool_calls": False, "seed": 3, "max_tokens": 100}
    answer = client.create(**options)
    [call] = answer.choices[0].message.tool_calls
    assert call.function.name == "get_weather"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)
    assert answer.choices[0].finish_reason == "tool_calls"
    with client.stream(**options) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls
    assert [c.function.arguments for c in streamed] == [call.function.arguments]


def test_strict_tools_with_auto(tool_server: Served) -> None:
    """The constraint leaves the text free: an answer without a call ends as it would."""
    pytest.importorskip("llguidance")
    tool = {"type": "function", "function": {**CHAT_TOOL["function"], "strict": True}}
    answer = tool_server.client().chat.completions.create(
        model=MODEL, messages=ASK, tools=[tool], seed=1, max_tokens=20
    )
    assert answer.usage.completion_tokens > 0


# --- tags that are special tokens -------------------------------------------------------------------------------------


def special_server(folder: Path, *args: Any) -> Any:
    llm = LLM(checkpoint(folder, *args), device="cpu", max_model_len=1024)
    return llm, serving(llm)


@pytest.fixture(scope="module")
def llama_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    llm, server = special_server(
        tmp_path_factory.mktemp("llama"), "tiny-llama-draft", LLAMA_TEMPLATE, ["<|python_tag|>"]
    )
    with llm, server as running:
        yield running


@pytest.mark.parametrize(
    ("before", "stream"),
    mostly_slow(
        [("", False), ("", True), ("I look. ", False), ("I look. ", True)], fast=[("", False), ("I look. ", True)]
    ),
)
def test_a_llama_call_behind_its_special_token(llama_server: Served, before: str, stream: bool) -> None:
    """The engine writes the tag as the one special token that it is; a grammar makes it write the message."""
    pytest.importorskip("llguidance")
    call = json.dumps({"name": "get_weather", "parameters": json.loads(ARGUMENTS)})
    text = f"{json.dumps(before)} " if before else ""
    grammar = f"start: {text}<|python_tag|> {json.dumps(f'{call}; {call}')}"
    answer = llama_server.client().chat.completions.create(
        model=MODEL,
        messages=ASK,
        tools=[CHAT_TOOL],
        extra_body={"structured_outputs": {"grammar": grammar}},
        stream=stream,
    )
    if stream:
        deltas = [chunk.choices[0].delta for chunk in answer]
        content = "".join(delta.content or "" for delta in deltas)
        calls = [call for delta in deltas for call in delta.tool_calls or []]
        names = [call.function.name for call in calls if call.function.name]
        arguments = "".join(call.function.arguments or "" for call in calls)
        assert (content, names, arguments) == (before.strip(), ["get_weather"] * 2, ARGUMENTS * 2)
    else:
        [choice] = answer.choices
        assert (choice.message.content or "", choice.finish_reason) == (before.strip(), "tool_calls")
        found = [(call.function.name, call.function.arguments) for call in choice.message.tool_calls]
        assert found == [("get_weather", ARGUMENTS)] * 2


def test_a_stop_sequence_behind_a_special_token_is_named(llama_server: Served) -> None:
    """Catches a text whose length is compared with that of one without the tag."""
    tokenizer = llama_server.llm.tokenizer
    tag = tokenizer.token_id("<|python_tag|>")
    params = SamplingParams(stop=["look"], shown_token_ids=[tag])
    ids = [tag, *tokenizer.encode("We look at", add_special_tokens=False)]
    sample = Sample(0, "<|python_tag|>We ", ids, "stop", None, RequestMetrics())
    assert stop_sequence(RequestOutput("x", [1], [sample], None, params), tokenizer) == "look"


def test_special_tokens_are_no_text_without_tools(llama_server: Served) -> None:
    pytest.importorskip("llguidance")
    extra = {"structured_outputs": {"grammar": 'start: <|python_tag|> "{1}"'}}
    answer = llama_server.client().chat.completions.create(model=MODEL, messages=ASK, extra_body=extra)
    assert answer.choices[0].message.content == "{1}"


def test_reasoning_and_calls_whose_tags_are_special(tmp_path: Path) -> None:
    """Some checkpoints mark them so."""
    pytest.importorskip("llguidance")
    special = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
    llm, server = special_server(tmp_path, "tiny-qwen3-draft", TEMPLATE, special)
    body = json.dumps({"name": "get_weather", "arguments": json.loads(ARGUMENTS)})
    grammar = f'start: <think> "Hm." </think> "So." <tool_call> {json.dumps(body)} </tool_call>'
    options: Any = {"model": MODEL, "extra_body": {"structured_outputs": {"grammar": grammar}}, "messages": ASK}
    with llm, server as running:
        client = running.client().chat.completions
        [choice] = client.create(**options, tools=[CHAT_TOOL]).choices
        plain = client.create(**options).choices[0].message
    assert (choice.message.reasoning_content, choice.message.content) == ("Hm.", "So.")
    assert [call.function.arguments for call in choice.message.tool_calls] == [ARGUMENTS]
    assert (plain.reasoning_content, plain.content) == ("Hm.", f"So.{body}")


# --- responses --------------------------------------------------------------------------------------------------------


def test_responses_call(tool_server: Served, script: Script) -> None:
    script.text = f"<think>Hm.</think>I look. {CALL}"
    client = tool_server.client().responses
    answer = client.create(model=MODEL, input="Weather?", tools=[RESPONSES_TOOL])
    assert [item.type for item in answer.output] == ["reasoning", "message", "function_call"]
    reasoning, text, call = answer.output
    assert reasoning.content[0].text == "Hm."
    assert text.content[0].text == "I look." == answer.output_text
    assert (call.name, call.arguments, call.status) == ("get_weather", ARGUMENTS, "completed")
    assert answer.usage.output_tokens_details.reasoning_tokens > 0

    with client.stream(model=MODEL, input="Weather?", tools=[RESPONSES_TOOL]) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call"]
    assert final.output[2].arguments == ARGUMENTS
    for kind in ("reasoning_text.delta", "output_text.delta", "function_call_arguments.delta"):
        assert f"response.{kind}" in kinds

    script.text = "Sunny."
    items: Any = [*ASK, *(item.model_dump(exclude_none=True) for item in answer.output)]
    items.append({"type": "function_call_output", "call_id": call.call_id, "output": "18 degrees"})
    assert client.create(model=MODEL, input=items, instructions="Be brief.").output_text == "Sunny."
    assert "system\nBe brief." in script.prompt
    assert f'<think>Hm.</think>I look.<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}' in script.prompt
    assert "tool\n18 degrees" in script.prompt


NAMESPACE: Any = {
    "type": "namespace",
    "name": "mcp__weather",
    "description": "Forecasts of today.",
    "tools": [{**RESPONSES_TOOL, "defer_loading": False}, {"type": "custom", "name": "patch"}],
}
HOSTED: Any = [{"type": "web_search"}, {"type": "image_generation"}, {"type": "web_search"}]


@pytest.mark.parametrize("stream", [False, True])
def test_functions_of_a_namespace(tool_server: Served, script: Script, stream: bool) -> None:
    """Catches a call by a name that a client does not find, a prompt without the tool, a name that two tools have."""
    script.text = CALL.replace("get_weather", "mcp__weather__get_weather") + f"\n{CALL}"
    client, tools = tool_server.client().responses, [*HOSTED, NAMESPACE, RESPONSES_TOOL]
    answer = client.create(model=MODEL, input="Weather?", tools=tools, stream=stream)
    if stream:
        events = list(answer)
        answer = events[-1].response
        done = [event.item for event in events if event.type == "response.output_item.done"]
        assert [(item.name, item.namespace) for item in done] == [
            ("get_weather", "mcp__weather"),
            ("get_weather", None),
        ]
    first, second = answer.output
    assert (first.name, first.namespace, first.arguments) == ("get_weather", "mcp__weather", ARGUMENTS)
    assert (second.name, second.namespace) == ("get_weather", None)
    assert '"mcp__weather__get_weather"' in script.prompt
    assert '"Forecasts of today."' in script.prompt
    told = "ignored: only functions can be called here, the model is not told of it"
    kinds = ("tools[].type=web_search", "tools[].type=image_generation", "tools[].tools[].type=custom")
    assert answer.model_extra["ssd_warnings"] == [f"{kind}: {told}" for kind in kinds]

    items: Any = [*ASK, *(item.model_dump(exclude_none=True) for item in answer.output)]
    items += [{"type": "function_call_output", "call_id": each.call_id, "output": "sunny"} for each in (first, second)]
    script.text = "Sunny."
    assert client.create(model=MODEL, input=items, tools=tools).output_text == "Sunny."
    assert f'<tool_call>{{"name": "mcp__weather__get_weather", "arguments": {ARGUMENTS}}}' in script.prompt


def test_names_of_functions_in_namespaces() -> None:
    """Catches a name that is too long for a function, or that two long ones share."""
    assert chat_name(None, "f") == "f"
    assert chat_name("mcp__crm__", "f") == "mcp__crm__f"
    assert chat_name("my crm", "f") == "my_crm__f"
    long = [chat_name("mcp__crm", "x" * 70 + end) for end in "ab"]
    assert len(set(long)) == 2
    assert all(len(name) == 64 for name in long)


@pytest.mark.parametrize(
    ("tools", "param"),
    [
        ([{**NAMESPACE, "name": 5}], "tools[0].name"),
        ([{**NAMESPACE, "tools": {}}], "tools[0].tools"),
        ([HOSTED[0], {**NAMESPACE, "tools": [{"type": "function"}]}], "tools[1].tools[0].name"),
        ([HOSTED[0], {**NAMESPACE, "tools": [HOSTED[0], BAD_TOOL["function"] | {"type": "function"}]}], BAD_PATH),
        ([HOSTED[0], {**BAD_TOOL["function"], "type": "function"}], "tools[1].parameters"),
        ([NAMESPACE, NAMESPACE], "tools"),
        (HOSTED, "tool_choice"),
    ],
)
def test_errors_of_tools_name_their_place_in_the_request(tool_server: Served, tools: Any, param: str) -> None:
    """Catches the place in a list that the client has never sent."""
    with pytest.raises(openai.BadRequestError) as caught:
        tool_server.client().responses.create(model=MODEL, input="x", tools=tools, tool_choice="required")
    assert caught.value.param == param


def test_responses_length(tool_server: Served, script: Script) -> None:
    """A call that the limit of tokens has cut is incomplete, and no text."""
    script.text, script.finish_reason = CALL[:50], "length"
    client = tool_server.client().responses
    answer = client.create(model=MODEL, input="Weather?", tools=[RESPONSES_TOOL], max_output_tokens=5)
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    [call] = answer.output
    assert (call.type, call.status) == ("function_call", "incomplete")
    assert ARGUMENTS.startswith(call.arguments)
    events = list(client.create(model=MODEL, input="Weather?", tools=[RESPONSES_TOOL], stream=True))
    assert events[-1].type == "response.incomplete"
    assert events[-1].response.output[0].status == "incomplete"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("length", [3, 12, 30, 50, len(CALL) + 30])
def test_no_markup_of_a_call_that_was_cut_is_content(
    tool_server: Served, script: Script, length: int, stream: bool
) -> None:
    """Catches `<tool_call>` in the content, wherever the limit of tokens has cut the answer, in all APIs."""
    script.text, script.finish_reason = f"{CALL}\n{CALL}"[:length], "length"
    client, messages = tool_server.client(), claude(tool_server).messages
    answer = client.chat.completions.create(model=MODEL, messages=ASK, tools=[CHAT_TOOL], stream=stream)
    if stream:
        chunks = list(answer)
        assert not any(chunk.choices[0].delta.content for chunk in chunks)
        assert chunks[-1].choices[0].finish_reason == "length"
    else:
        assert not answer.choices[0].message.content
    options: Any = {"model": MODEL, "max_tokens": 50, "messages": ASK, "tools": [MESSAGES_TOOL]}
    if stream:
        with messages.stream(**options) as events:
            blocks = [event.content_block.type for event in events if event.type == "content_block_start"]
    else:
        found = messages.create(**options)
        blocks = [block.type for block in found.content]
        assert found.stop_reason == "max_tokens"
        assert all(block.input for block in found.content), "a tool cannot be called with what was cut"
    assert set(blocks) <= {"tool_use"}


def test_a_required_call_of_the_model_itself_leaves_no_content(served: Served) -> None:
    """Catches calls that are repeated up to the limit of tokens, the last one as text."""
    pytest.importorskip("llguidance")
    client = served.client().chat.completions
    options: dict[str, Any] = {"model": MODEL, "messages": ASK, "tools": [CHAT_TOOL], "tool_choice": "required"}
    for limit in (200, 15, 4):
        for seed in range(2):
            message = client.create(**options, max_tokens=limit, seed=seed).choices[0].message
            assert not message.content
            assert len(message.tool_calls or ()) == 1 or limit < 200
            chunks = client.create(**options, max_tokens=limit, seed=seed, stream=True)
            assert not any(chunk.choices[0].delta.content for chunk in chunks)


# --- messages ---------------------------------------------------------------------------------------------------------


def test_messages_call(tool_server: Served, script: Script) -> None:
    script.text = f"<think>Hm.</think>I look. {CALL}"
    client = claude(tool_server).messages
    options: Any = {"model": MODEL, "max_tokens": 50, "messages": ASK, "tools": [MESSAGES_TOOL]}
    answer = client.create(**options)
    assert answer.stop_reason == "tool_use"
    thinking, text, use = answer.content
    assert (thinking.type, thinking.thinking) == ("thinking", "Hm.")
    assert (text.type, text.text) == ("text", "I look.")
    assert (use.type, use.name, use.input) == ("tool_use", "get_weather", {"city": "Rome", "days": 2})

    with client.stream(**options) as stream:
        events = [event.type for event in stream]
        final = stream.get_final_message()
    assert final.content[2].input == use.input
    assert final.stop_reason == "tool_use"
    assert events.count("input_json") > 2

    script.text = "Sunny."
    result = {"type": "tool_result", "tool_use_id": use.id, "content": [{"type": "text", "text": "18 degrees"}]}
    assistant = [block.model_dump(exclude_none=True) for block in answer.content]
    options["messages"] = [
        *ASK,
        {"role": "assistant", "content": assistant},
        {"role": "user", "content": [result, {"type": "text", "text": "So?"}]},
    ]
    assert client.create(**options, system="Be brief.").content[0].text == "Sunny."
    assert "system\nBe brief." in script.prompt
    assert f'<think>Hm.</think>I look.<tool_call>{{"name": "get_weather", "arguments": {ARGUMENTS}}}' in script.prompt
    assert "tool\n18 degrees<|im_end|>\n<|im_start|>user\nSo?" in script.prompt


PICTURE: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"}}


PICTURED: Any = [{"type": "text", "text": "A picture."}, PICTURE]
LOOKED: Any = {"type": "function_call", "call_id": "1", "name": "look", "arguments": "{}"}


@pytest.mark.parametrize(
    ("path", "field", "items", "limit"),
    [
        (
            "messages",
            "messages",
            [{"role": "user", "content": [{"type": "tool_result", "content": PICTURED}]}],
            {"max_tokens": 5},
        ),
        ("responses", "input", [LOOKED, {"type": "function_call_output", "call_id": "1", "output": PICTURED}], {}),
    ],
)
def test_what_is_no_text_in_a_tool_s_result(
    tool_server: Served, strict: Served, script: Script, path: str, field: str, items: Any, limit: dict[str, int]
) -> None:
    """Agents cannot leave it out, so the model is told of it. Catches a conversation that ends there, and a part that
    is dropped in silence. What a person sends is refused."""
    script.text, body = "Nothing.", {"model": MODEL, **limit}
    answer = httpx.post(f"{tool_server.url}/v1/{path}", json={**body, field: items})
    assert answer.status_code == 200, answer.text
    assert "tool\nA picture.[image: not shown, only text can be read]<|im_end|>" in script.prompt
    [warning] = answer.json()["ssd_warnings"]
    assert warning.endswith(
        "type=image: ignored: only text can be read here, the model is told that it cannot see this"
    )
    refused = httpx.post(f"{strict.url}/v1/{path}", json={**body, field: items})
    assert (refused.status_code, "parts of type 'image' are not supported" in refused.text) == (400, True)
    sent = [{"role": "user", "content": [PICTURE]}]
    assert httpx.post(f"{tool_server.url}/v1/{path}", json={**body, field: sent}).status_code == 400


def test_references_to_tools(tool_server: Served, script: Script) -> None:
    """What a search of tools returns: the tools themselves are in the request."""
    script.text, found = "Found.", {"type": "tool_reference", "tool_name": "get_weather"}
    turn: Any = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": [found]}]}
    claude(tool_server).messages.create(model=MODEL, max_tokens=5, messages=[turn], tools=[MESSAGES_TOOL])
    assert "tool\n[tool: get_weather]<|im_end|>" in script.prompt


def test_the_header_for_bills_is_no_part_of_the_prompt(tool_server: Served, script: Script) -> None:
    """Catches conversations of Claude Code whose prompts differ at the beginning: nothing of them would be cached."""
    script.text, messages = "Hello.", claude(tool_server).messages
    header, rest = ({"type": "text", "text": text} for text in ("x-anthropic-billing-header: a=1;", "Be brief."))
    for system in ([header, rest], [rest]):
        messages.create(model=MODEL, max_tokens=5, messages=ASK, system=system)
        assert script.prompt.startswith("<|im_start|>system\nBe brief.<|im_end|>")
    messages.create(model=MODEL, max_tokens=5, messages=ASK, system=[header])
    assert script.prompt.startswith("<|im_start|>user")


def test_messages_count_of_tokens_has_the_tools(tool_server: Served, script: Script) -> None:
    """Catches a count that leaves out the tools, and one that has them though none may be called."""
    client, asked = claude(tool_server).messages, {"model": MODEL, "messages": ASK}
    plain = client.count_tokens(**asked).input_tokens
    asked["tools"] = [MESSAGES_TOOL]
    assert client.count_tokens(**asked, tool_choice={"type": "none"}).input_tokens == plain
    counted = client.count_tokens(**asked).input_tokens
    assert counted == client.create(**asked, max_tokens=5).usage.input_tokens > plain + 20


def test_messages_forced_call(tool_server: Served) -> None:
    pytest.importorskip("llguidance")
    answer = claude(tool_server).messages.create(
        model=MODEL,
        max_tokens=100,
        messages=ASK,
        tools=[MESSAGES_TOOL],
        tool_choice={"type": "any", "disable_parallel_tool_use": True},
    )
    [use] = answer.content
    assert use.type == "tool_use"
    jsonschema.validate(use.input, WEATHER)
