"""Tools and reasoning of GLM, DeepSeek and Kimi in all APIs, with their real clients."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extras serve and dev")
pytest.importorskip("jsonschema", reason="needs the extras serve and dev")

import jsonschema
from conftest import mostly_slow
from family_templates import TEMPLATES
from live_server import MODEL, Lazy, Served, serving

from server.scripted import WEATHER, Script, checkpoint
from ssd import LLM
from ssd.text.tool_formats import PARSERS

ARGUMENTS = {"city": "Rome", "days": 2}
FUNCTION: Any = {"name": "get_weather", "description": "Forecast", "parameters": WEATHER}
CHAT_TOOL: Any = {"type": "function", "function": FUNCTION}
MESSAGES_TOOL: Any = {"name": "get_weather", "description": "Forecast", "input_schema": WEATHER}
ASK: Any = [{"role": "user", "content": "Weather?"}]
KINDS = list(TEMPLATES)


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A server whose model takes any of the templates."""
    path = checkpoint(tmp_path_factory.mktemp("families"))
    with LLM(path, device="cpu", max_model_len=2048) as llm, serving(llm) as running:
        yield running


@pytest.fixture(params=KINDS)
def family(families: Served, request: pytest.FixtureRequest) -> tuple[Served, str]:
    families.llm.tokenizer.use_chat_template(TEMPLATES[request.param])
    return families, request.param


def answered(kind: str, thinking: bool = True) -> str:
    """Reasoning that the prompt may have opened, text, and two calls."""
    calls = PARSERS[kind].written([("get_weather", json.dumps(ARGUMENTS))] * 2)
    return ("Rome, then.</think>" if thinking else "") + f"I look.{calls}"


def opens(kind: str) -> dict[str, Any]:
    return {"chat_template_kwargs": {"enable_thinking": True}} if kind == "deepseek_v31" else {}


@pytest.mark.parametrize("stream", [False, True])
def test_chat_completions(family: tuple[Served, str], script: Script, stream: bool) -> None:
    """The message, its streamed deltas, and the prompt of the next turn with calls and results."""
    served, kind = family
    script.text = answered(kind)
    client = served.client().chat.completions
    options: Any = {"model": MODEL, "tools": [CHAT_TOOL], "extra_body": opens(kind)}
    if stream:
        with client.stream(messages=ASK, **options) as events:
            chunks = [event.chunk.choices[0].delta for event in events if event.type == "chunk"]
            [choice] = events.get_final_completion().choices
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in chunks)
    else:
        [choice] = client.create(messages=ASK, **options).choices
        reasoning = choice.message.reasoning_content
    assert (reasoning, choice.message.content, choice.finish_reason) == ("Rome, then.", "I look.", "tool_calls")
    calls = choice.message.tool_calls
    assert [(c.function.name, json.loads(c.function.arguments)) for c in calls] == [("get_weather", ARGUMENTS)] * 2
    assert len({call.id for call in calls}) == 2
    assert '"get_weather"' in script.prompt
    assert "Forecast" in script.prompt

    results = [{"role": "tool", "tool_call_id": call.id, "content": f"{i} degrees"} for i, call in enumerate(calls)]
    turn = {"role": "assistant", "content": choice.message.content, "tool_calls": [c.model_dump() for c in calls]}
    script.text = "Mild."
    client.create(messages=[*ASK, turn, *results], **options)
    assert PARSERS[kind].written([("get_weather", calls[0].function.arguments)] * 2) in script.prompt
    assert "0 degrees" in script.prompt
    assert "1 degrees" in script.prompt


@pytest.mark.parametrize("stream", mostly_slow([False, True], fast={True}))
def test_messages(family: tuple[Served, str], script: Script, stream: bool) -> None:
    served, kind = family
    script.text = answered(kind)
    client = Lazy("anthropic").Anthropic(base_url=served.url, api_key="none", max_retries=0).messages
    options: Any = {"model": MODEL, "max_tokens": 50, "tools": [MESSAGES_TOOL]}
    options["thinking"] = {"type": "enabled", "budget_tokens": 1024}  # which DeepSeek's template calls `thinking`
    if stream:
        with client.stream(messages=ASK, **options) as events:
            answer = events.get_final_message()
    else:
        answer = client.create(messages=ASK, **options)
    thinking, text, *calls = answer.content
    assert (thinking.thinking, text.text, answer.stop_reason) == ("Rome, then.", "I look.", "tool_use")
    assert [(call.name, call.input) for call in calls] == [("get_weather", ARGUMENTS)] * 2
    results = [{"type": "tool_result", "tool_use_id": call.id, "content": "18 degrees"} for call in calls]
    blocks = [block.model_dump(exclude_none=True) for block in answer.content]
    script.text = "Mild."
    turns = [*ASK, {"role": "assistant", "content": blocks}, {"role": "user", "content": results}]
    client.create(messages=turns, **options)
    assert PARSERS[kind].written([("get_weather", json.dumps(ARGUMENTS))] * 2) in script.prompt
    if kind == "kimi_k2":
        assert "## Return of functions.get_weather:1\n18 degrees" in script.prompt


@pytest.mark.parametrize("stream", mostly_slow([False, True], fast={True}))
def test_ollama(family: tuple[Served, str], script: Script, stream: bool) -> None:
    served, kind = family
    script.text = answered(kind)
    asked = Lazy("ollama").Client(host=served.url).chat(MODEL, ASK, tools=[CHAT_TOOL], think=True, stream=stream)
    messages = [each.message for each in (asked if stream else [asked])]
    assert "".join(message.thinking or "" for message in messages) == "Rome, then."
    assert "".join(message.content or "" for message in messages) == "I look."
    calls = [call.function for message in messages for call in message.tool_calls or []]
    assert [(call.name, call.arguments) for call in calls] == [("get_weather", ARGUMENTS)] * 2


def test_without_thinking(family: tuple[Served, str], script: Script) -> None:
    """An effort of none reaches each template's own switch."""
    served, kind = family
    script.text = answered(kind, thinking=kind == "deepseek_v3")  # which always thinks
    client = served.client().chat.completions
    message = client.create(model=MODEL, messages=ASK, tools=[CHAT_TOOL], reasoning_effort="none").choices[0].message
    assert getattr(message, "reasoning_content", None) == ("Rome, then." if kind == "deepseek_v3" else None)
    assert (message.content, len(message.tool_calls)) == ("I look.", 2)
    assert script.prompt.endswith("<think>\n" if kind == "deepseek_v3" else "</think>")


@pytest.mark.parametrize("stream", [False, True])
def test_broken_calls_are_text(family: tuple[Served, str], script: Script, stream: bool) -> None:
    served, kind = family
    call = PARSERS[kind].written([("get_wether", json.dumps(ARGUMENTS))])
    script.text = f"So.</think>See {call}"
    options: Any = {"model": MODEL, "tools": [CHAT_TOOL], "extra_body": opens(kind)}
    asked = served.client().chat.completions.create(messages=ASK, stream=stream, **options)
    parts = [chunk.choices[0].delta for chunk in asked] if stream else [asked.choices[0].message]
    assert "".join(part.content or "" for part in parts) == f"See {call}"
    assert not any(part.tool_calls for part in parts)


def test_a_forced_call_of_the_model_itself(family: tuple[Served, str]) -> None:
    """A model that knows nothing of the format writes it, with arguments that follow the schema."""
    pytest.importorskip("llguidance")
    served, _ = family
    options: Any = {"model": MODEL, "messages": ASK, "tools": [CHAT_TOOL], "tool_choice": "required"}
    [choice] = served.client().chat.completions.create(**options, seed=3, max_tokens=200).choices
    [call] = choice.message.tool_calls
    assert choice.finish_reason == "tool_calls"
    jsonschema.validate(json.loads(call.function.arguments), WEATHER)


def test_tools_are_described_where_the_template_does_not(families: Served, script: Script) -> None:
    """DeepSeek's knows calls and results: these stay its own, unless another format is asked for."""
    families.llm.tokenizer.use_chat_template(TEMPLATES["deepseek_v31"])
    call = {"id": "1", "type": "function", "function": {"name": "get_weather", "arguments": json.dumps(ARGUMENTS)}}
    turns: Any = [*ASK, {"role": "assistant", "content": None, "tool_calls": [call]}]
    turns.append({"role": "tool", "tool_call_id": "1", "content": "18 degrees"})
    script.text = "Mild."
    families.client().chat.completions.create(model=MODEL, messages=turns, tools=[CHAT_TOOL])
    own = PARSERS["deepseek_v31"].written([("get_weather", json.dumps(ARGUMENTS))])
    assert "You can call functions." in script.prompt
    assert own in script.prompt
    assert "<tool_response>" not in script.prompt
    with serving(families.llm, tool_parser="hermes") as served:
        served.client().chat.completions.create(model=MODEL, messages=turns, tools=[CHAT_TOOL])
    assert own not in script.prompt
    assert PARSERS["hermes"].written([("get_weather", json.dumps(ARGUMENTS))]) in script.prompt
    assert "<tool_response>\n18 degrees\n</tool_response>" in script.prompt
