"""Harmony, the chat format of GPT-OSS, over HTTP: an engine whose tokens are forced, and real clients."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="needs the extras serve and dev")

from live_server import MODEL, Lazy, Served, serving

from server.scripted import WEATHER, Forced, harmony_checkpoint
from ssd import LLM
from ssd.constraints.grammars import Constraint, Grammars
from ssd.server.openai import chat
from ssd.server.protocol import ChatRequest

anthropic: Any = Lazy("anthropic")
TOOL: Any = {"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}
ASK: Any = [{"role": "user", "content": "Weather?"}]
ARGUMENTS = '{"city":"Rome","days":2}'
THOUGHT = "<|channel|>analysis<|message|>Rome, then.<|end|><|start|>assistant"
CALL = f"{THOUGHT}<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{ARGUMENTS}<|call|>"
FINAL = f"{THOUGHT}<|channel|>final<|message|>It is sunny.<|return|>"


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = harmony_checkpoint(tmp_path_factory.mktemp("harmony"))
    with LLM(path, device="cpu", max_model_len=2048) as llm, serving(llm) as running:
        yield running


@pytest.fixture
def force(served: Served, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Forces the answers of the next requests; returns a list that their prompts are appended to."""
    prompts: list[str] = []
    params, submit = chat._params, served.llm.driver.submit_checked

    def submitted(checked: Any, **options: Any) -> Any:
        prompts.append(served.llm.decode(checked.prompt_token_ids, skip_special_tokens=False))
        return submit(checked, **options)

    def forced(*texts: str, pause: float = 0.0) -> list[str]:
        answers = Forced(served.llm.tokenizer, *texts, pause=pause)
        monkeypatch.setattr(chat, "_params", lambda *given: replace(params(*given), logits_processor=answers))
        monkeypatch.setattr(served.llm.driver, "submit_checked", submitted)
        return prompts

    return forced


def test_a_conversation_with_a_tool_call(served: Served, force: Callable[..., list[str]]) -> None:
    """The call, its result and the answer, through the `openai` client: the second prompt repeats what the model wrote,
    to the character, and the third has no reasoning any more."""
    prompts, client = force(CALL, FINAL, FINAL), served.client().chat.completions
    [first] = client.create(model=MODEL, messages=ASK, tools=[TOOL], reasoning_effort="low").choices
    assert first.finish_reason == "tool_calls"
    assert first.message.reasoning_content == "Rome, then."
    assert first.message.content is None
    [call] = first.message.tool_calls
    assert (call.function.name, call.function.arguments) == ("get_weather", ARGUMENTS)
    result = {"role": "tool", "tool_call_id": call.id, "content": '{"sunny": true}'}
    chat_so_far = [*ASK, first.message.model_dump(exclude_none=True), result]
    [second] = client.create(model=MODEL, messages=chat_so_far, tools=[TOOL], reasoning_effort="low").choices
    assert (second.finish_reason, second.message.content) == ("stop", "It is sunny.")
    assert second.message.reasoning_content == "Rome, then."
    last = [*chat_so_far, second.message.model_dump(exclude_none=True), *ASK]
    client.create(model=MODEL, messages=last, tools=[TOOL], reasoning_effort="low")
    assert "\nReasoning: low\n" in prompts[0]
    assert "type get_weather = (_: {\ncity: any,\ndays: number,\n}) => any;" in prompts[0]
    returned = "<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"
    assert prompts[1] == f'{prompts[0]}{CALL}{returned}{{"sunny": true}}<|end|><|start|>assistant'
    assert "analysis<|message|>" not in prompts[2]
    assert "<|channel|>final<|message|>It is sunny.<|end|><|start|>user<|message|>" in prompts[2]


def test_streams(served: Served, force: Callable[..., list[str]]) -> None:
    """Chunks of chats, events of responses and of messages: the same parts everywhere."""
    force(CALL, pause=0.02)
    with served.client().chat.completions.stream(model=MODEL, messages=ASK, tools=[TOOL]) as stream:
        events = list(stream)
        [choice] = stream.get_final_completion().choices
    assert choice.finish_reason == "tool_calls"
    assert [c.function.arguments for c in choice.message.tool_calls] == [ARGUMENTS]
    assert sum(e.type == "tool_calls.function.arguments.delta" for e in events) > 2
    force(CALL, CALL)
    tool = {"type": "function", "strict": False, **TOOL["function"]}
    with served.client().responses.stream(model=MODEL, input="Weather?", tools=[tool]) as stream:
        list(stream)
        thought, called = stream.get_final_response().output
    assert (thought.type, thought.content[0].text) == ("reasoning", "Rome, then.")
    assert (called.type, called.name, called.arguments) == ("function_call", "get_weather", ARGUMENTS)
    claude = anthropic.Anthropic(base_url=served.url, api_key="none", max_retries=0)
    tool = {"name": "get_weather", "input_schema": WEATHER}
    with claude.messages.stream(model=MODEL, messages=ASK, tools=[tool], max_tokens=200) as stream:
        list(stream)
        message = stream.get_final_message()
    assert [block.type for block in message.content] == ["thinking", "tool_use"]
    assert (message.content[1].input, message.stop_reason) == (json.loads(ARGUMENTS), "tool_use")


def test_a_message_is_continued(served: Served, force: Callable[..., list[str]]) -> None:
    """The text of the last message stays open, and the answer is the rest of it."""
    prompts = force(" sunny.<|return|>")
    body = {"continue_final_message": True, "add_generation_prompt": False}
    begun = [*ASK, {"role": "assistant", "content": "It is"}]
    [choice] = served.client().chat.completions.create(model=MODEL, messages=begun, extra_body=body).choices
    assert prompts[0].endswith("<|start|>assistant<|channel|>final<|message|>It is")
    assert choice.message.content == " sunny."


# --- grammars ---------------------------------------------------------------------------------------------------------

SCHEMA: Any = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}},
    "required": ["ok"],
    "additionalProperties": False,
}
STRICT: Any = {"type": "function", "function": {**TOOL["function"], "strict": True}}
FREE = "<|channel|>commentary<|message|>I { look.<|end|><|start|>assistant"
OTHER = CALL.replace("Rome", "Bonn").removesuffix("<|call|>")
CALLED = CALL.removesuffix("<|call|>")
VALID = f'{THOUGHT}<|channel|>final<|message|>{{"ok": true}}'
PLAIN = f"{THOUGHT}<|channel|>final<|message|>Hello."


@pytest.mark.parametrize(
    ("options", "allowed", "refused"),
    [
        (
            {"response_format": {"type": "json_object"}},
            [VALID, VALID.replace("ok", "k")],
            [PLAIN, '{"ok": true}', CALLED],
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}},
            [VALID, VALID.removeprefix(THOUGHT)],
            [PLAIN, VALID.replace("ok", "k"), THOUGHT],
        ),
        ({"response_format": {"type": "regex", "regex": "Hel+o\\."}}, [PLAIN], [VALID, THOUGHT]),
        ({"response_format": {"type": "grammar", "grammar": 'start: "Hello" "."'}}, [PLAIN], [VALID]),
        ({"tools": [STRICT]}, [PLAIN, VALID, CALLED, FREE + CALLED], [OTHER]),
        ({"tools": [TOOL], "tool_choice": "required"}, [CALLED, FREE + CALLED], [PLAIN, OTHER]),
        ({"tools": [TOOL], "response_format": {"type": "json_object"}}, [VALID, CALLED, OTHER], [PLAIN]),
    ],
    ids=["json_object", "json_schema", "regex", "grammar", "strict", "required", "tool or json"],
)
def test_a_grammar_binds_the_final_channel_or_the_body_of_a_call(
    served: Served, options: dict[str, Any], allowed: list[str], refused: list[str]
) -> None:
    """Reasoning and what is said before a call stay free."""
    state = served.server.config.app.state.server  # type: ignore[union-attr]
    body = ChatRequest(model=MODEL, messages=ASK, **options)
    structured, tokenizer = chat._read_all(state, body)[1].structured, served.llm.tokenizer
    stop = tokenizer.token_id("<|return|>")
    grammar = Grammars(tokenizer.backend, tokenizer.vocab_size, [stop]).compiled(structured).result()
    for text, valid in (*((text, True) for text in allowed), *((text, False) for text in refused)):
        ids = [*tokenizer.encode(text, add_special_tokens=False), stop]
        assert (Constraint(grammar).num_valid(ids) == len(ids)) == valid, text


def test_an_answer_in_json(served: Served, force: Callable[..., list[str]]) -> None:
    """Through the engine: masks and forced tokens agree, and only the content is the answer."""
    force(VALID + "<|return|>")
    form: Any = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}
    [choice] = served.client().chat.completions.create(model=MODEL, messages=ASK, response_format=form).choices
    assert (choice.finish_reason, choice.message.content) == ("stop", '{"ok": true}')
