"""Chats of GLM, DeepSeek and Kimi: prompts equal to those of transformers, and what is rendered is parsed back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from family_templates import ASSISTANT, DEEPSEEK_V31, TEMPLATES, USER

from ssd.server.chat_messages import template_message
from ssd.text.events import message_fields
from ssd.text.message_format import MessageFormat, format_of, parse
from ssd.text.tokenizer import Tokenizer
from ssd.text.tool_formats import PARSERS, parser_for

ARGUMENTS = {"city": "Zürich <b>", "days": 2, "places": ["a", {"b": None}]}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "get_weather", "description": "größer <1>", "parameters": SCHEMA}}]
FUNCTION = {"name": "get_weather", "arguments": json.dumps(ARGUMENTS, ensure_ascii=False)}
CALLS = [{"id": f"functions.get_weather:{i}", "type": "function", "function": FUNCTION} for i in range(2)]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Weather? <b>&'\" 你好 🙂"},
    {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.\n", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": CALLS[0]["id"], "content": "18 degrees"},
    {"role": "tool", "tool_call_id": CALLS[1]["id"], "content": "19 degrees"},
    {"role": "assistant", "content": "<think>\nSo.</think>\nMild.", "reasoning_content": None},
    {"role": "user", "content": "And tomorrow?"},
]
SWITCHES: list[dict[str, Any]] = [
    {},
    {"tools": TOOLS},
    {"enable_thinking": False, "thinking": False},
    {"enable_thinking": True, "thinking": True, "clear_thinking": False, "tools": TOOLS},
    {"add_generation_prompt": False},
]


def tokenizer_of(kind: str) -> Tokenizer:
    return Tokenizer(None, chat_templates={"default": TEMPLATES[kind]}, special_tokens={"bos_token": "<bos>"})


def chat_of(kind: str, turns: int) -> list[dict[str, Any]]:
    """As the server gives it to a template. What is null is left out, as clients do."""
    messages = [{key: value for key, value in message.items() if value is not None} for message in CHAT[:turns]]
    return [template_message(f"messages[{i}]", message, TEMPLATES[kind]) for i, message in enumerate(messages)]


@pytest.mark.parametrize("switches", SWITCHES)
@pytest.mark.parametrize("kind", TEMPLATES)
def test_prompts_equal_transformers(kind: str, switches: dict[str, Any]) -> None:
    """With tools, results, earlier reasoning and the switches of thinking, after every turn."""
    pytest.importorskip("transformers")
    from transformers.utils.chat_template_utils import render_jinja_template

    ours = tokenizer_of(kind)
    options = {"add_generation_prompt": True, **switches}
    for turns in range(1, len(CHAT) + 1):
        chat = chat_of(kind, turns)
        [theirs], _ = render_jinja_template(
            [chat], **{"tools": None, **options}, chat_template=TEMPLATES[kind], bos_token="<bos>"
        )
        assert ours.apply_chat_template(chat, **options) == theirs


@pytest.mark.parametrize("kind", TEMPLATES)
def test_what_a_template_writes_is_read(kind: str) -> None:
    """A call in a prompt has the form in which the model writes one: it is found there with its arguments and id."""
    tokenizer = tokenizer_of(kind)
    before = tokenizer.apply_chat_template(chat_of(kind, 2), tools=TOOLS, add_generation_prompt=True)
    whole = tokenizer.apply_chat_template(chat_of(kind, 3), tools=TOOLS, add_generation_prompt=False)
    head = before.removesuffix("</think>").removesuffix("<think>\n").removesuffix("<think>")
    assert whole.startswith(head)
    parser = parser_for(TEMPLATES[kind])
    assert parser is PARSERS[kind]
    form = format_of(TEMPLATES[kind], head, parser, {"get_weather": SCHEMA})
    fields = message_fields(parse(whole.removeprefix(head).removeprefix("</think>"), form))
    assert fields["content"].startswith("I look.")
    assert fields.get("reasoning_content", "Hm.") == "Hm."
    calls = fields["tool_calls"]
    assert [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in calls] == [
        ("get_weather", ARGUMENTS)
    ] * 2
    if kind == "kimi_k2":
        assert [call["id"] for call in calls] == [call["id"] for call in CALLS]


@pytest.mark.parametrize(
    ("kind", "switches", "opened"),
    [
        ("glm", {}, True),
        ("glm", {"enable_thinking": False}, False),
        ("deepseek_v3", {}, True),
        ("deepseek_v31", {}, False),
        ("deepseek_v31", {"thinking": True}, True),
        ("kimi_k2", {}, True),
        ("kimi_k2", {"thinking": False}, False),
    ],
)
def test_the_prompt_tells_whether_the_answer_begins_with_reasoning(
    kind: str, switches: dict[str, Any], opened: bool
) -> None:
    prompt = tokenizer_of(kind).apply_chat_template(CHAT[:2], add_generation_prompt=True, **switches)
    form = format_of(TEMPLATES[kind], prompt)
    assert (form.reasoning, form.reasoning_opened) == (True, opened)
    text = "Hm.</think>Yes." if opened else "Yes."
    fields = message_fields(parse(text, form))
    assert (fields.get("reasoning_content"), fields["content"]) == ("Hm." if opened else None, "Yes.")


def test_a_chat_of_deepseek_is_what_it_should_be() -> None:
    """Spelled out once, so that the comparisons above compare something."""
    prompt = tokenizer_of("deepseek_v31").apply_chat_template(CHAT[:2], add_generation_prompt=True, thinking=True)
    assert prompt == f"<bos>Be brief.{USER}{CHAT[1]['content']}{ASSISTANT}<think>"
    assert parser_for(DEEPSEEK_V31) is PARSERS["deepseek_v31"]
    assert MessageFormat().parser().feed(prompt)
