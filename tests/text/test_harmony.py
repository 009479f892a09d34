"""Harmony, the chat format of GPT-OSS: prompts as its published description has them, and answers in pieces."""

from __future__ import annotations

import re
from typing import Any

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st

from ssd.errors import RequestError
from ssd.text.events import CallBegin, Reasoning, message_fields
from ssd.text.harmony import TOKENS, is_harmony, render
from ssd.text.harmony_parser import HarmonyParser
from ssd.text.message_format import MessageFormat, parse, shown_tokens, stop_tokens
from ssd.text.tokenizer import Tokenizer

DATE = "2025-06-28"
SYSTEM = """\
<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.
Knowledge cutoff: 2024-06
Current date: 2025-06-28

Reasoning: high

# Valid channels: analysis, commentary, final. Channel must be included for every message."""
WITH_TOOLS = f"{SYSTEM}\nCalls to these tools must go to the commentary channel: 'functions'.<|end|>"
FORMAT = {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}
LOCATION = {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}
LOCATIONS = {
    "type": "array",
    "items": {"type": "string"},
    "description": 'List of city and state, e.g. ["San Francisco, CA", "New York, NY"]',
}


def tool(name: str, description: str = "", properties: dict[str, Any] | None = None, *required: str) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "description": description}
    if properties is not None:
        function["parameters"] = {"type": "object", "properties": properties, "required": list(required)}
    return {"type": "function", "function": function}


TOOLS = [
    tool("get_location", "Gets the location of the user."),
    tool(
        "get_current_weather",
        "Gets the current weather in the provided location.",
        {"location": LOCATION, "format": FORMAT},
        "location",
    ),
    tool(
        "get_multiple_weathers",
        "Gets the current weather in the provided list of locations.",
        {"locations": LOCATIONS, "format": FORMAT},
        "locations",
    ),
]
DEVELOPER = """\
<|start|>developer<|message|># Instructions

Use a friendly tone.

# Tools

## functions

namespace functions {

// Gets the location of the user.
type get_location = () => any;

// Gets the current weather in the provided location.
type get_current_weather = (_: {
// The city and state, e.g. San Francisco, CA
location: string,
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

// Gets the current weather in the provided list of locations.
type get_multiple_weathers = (_: {
// List of city and state, e.g. ["San Francisco, CA", "New York, NY"]
locations: string[],
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

} // namespace functions<|end|>"""
ASKED = "<|start|>user<|message|>What is the weather like in SF?<|end|>"
CALLED = (
    "<|start|>assistant<|channel|>analysis<|message|>Need to use function get_current_weather.<|end|>"
    "<|start|>assistant<|channel|>commentary to=functions.get_current_weather <|constrain|>json<|message|>"
    '{"location":"San Francisco"}<|call|>'
    "<|start|>functions.get_current_weather to=assistant<|channel|>commentary<|message|>"
    '{"sunny": true, "temperature": 20}<|end|>'
)
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": None,
    "reasoning_content": "Need to use function get_current_weather.",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_current_weather", "arguments": '{"location":"San Francisco"}'},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "call_1", "content": '{"sunny": true, "temperature": 20}'}
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Use a friendly tone."},
    {"role": "user", "content": "What is the weather like in SF?"},
]


def rendered(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return render(messages, tools, **{"current_date": DATE, "reasoning_effort": "high", **options})


def test_a_chat_without_tools() -> None:
    assert rendered([{"role": "user", "content": "What is 2 + 2?"}]) == (
        f"{SYSTEM}<|end|><|start|>user<|message|>What is 2 + 2?<|end|><|start|>assistant"
    )


def test_tools_and_instructions() -> None:
    """The description's complete example."""
    assert rendered(CHAT, TOOLS) == f"{WITH_TOOLS}{DEVELOPER}{ASKED}<|start|>assistant"


def test_a_call_and_its_result_keep_the_reasoning() -> None:
    assert rendered([*CHAT, CALL, RESULT], TOOLS) == f"{WITH_TOOLS}{DEVELOPER}{ASKED}{CALLED}<|start|>assistant"


def test_past_reasoning_is_dropped_after_an_answer() -> None:
    """Of the answer, and of the calls before it; not of a call that comes after it."""
    answer = {"role": "assistant", "content": "Sunny.", "reasoning_content": "It is sunny."}
    again = {"role": "user", "content": "And now?"}
    later = "<|start|>assistant<|channel|>final<|message|>Sunny.<|end|><|start|>user<|message|>And now?<|end|>"
    before, found, after = rendered([*CHAT, CALL, RESULT, answer, again, CALL, RESULT], TOOLS).partition(later)
    assert found
    assert "analysis<|message|>" not in before
    assert '{"location":"San Francisco"}<|call|>' in before
    assert after == f"{CALLED}<|start|>assistant"


def test_what_is_said_before_a_call_is_commentary() -> None:
    said = rendered([*CHAT, {**CALL, "content": "I look.", "reasoning_content": None}, RESULT], TOOLS)
    assert (
        f"{ASKED}<|start|>assistant<|channel|>commentary<|message|>I look.<|end|><|start|>assistant<|channel|>" in said
    )


def test_types_of_parameters() -> None:
    address = {
        "type": "object",
        "properties": {"street": {"type": "string", "title": "Street", "examples": ["Elm St"]}},
        "required": ["street"],
    }
    size = {
        "description": "How large",
        "default": 3,
        "oneOf": [{"type": "integer", "description": "metres"}, {"type": "string", "default": "m", "nullable": True}],
    }
    properties = {
        "address": address,
        "size": size,
        "tags": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}},
        "many": {"type": "array"},
        "value": {"type": ["integer", "null"]},
        "flag": {"type": "boolean", "default": False},
        "unit": {"type": "string", "default": "m"},
        "other": {"anyOf": [{"type": "string"}]},
    }
    assert rendered([], [tool("f", "Two\nlines.", properties)]).partition("namespace functions {\n\n")[2] == (
        """\
// Two
// lines.
type f = (_: {
address?: {
    // Street
    //
    // Examples:
    // - "Elm St"
    street: string,
    },
// How large
// default: 3
size?:
 | number
 | string | null // default: "m"
,
tags?: "a" | "b"[],
many?: Array<any>,
value?: number | null,
flag?: boolean, // default: false
unit?: string, // default: "m"
other?: any,
}) => any;

} // namespace functions<|end|><|start|>assistant"""
    )


@pytest.mark.parametrize(
    ("messages", "options", "message"),
    [
        ([{"role": "tool", "tool_call_id": "x", "content": "1"}], {}, r"messages\[0\]\.tool_call_id"),
        ([{"role": "poet", "content": "1"}], {}, "role='poet'"),
        (CHAT, {"reasoning_effort": "huge"}, "reasoning_effort='huge'"),
    ],
)
def test_chats_that_cannot_be_written(messages: list[dict[str, Any]], options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        rendered(messages, **options)


@pytest.mark.parametrize(("given", "written"), [("minimal", "low"), ("max", "high"), (None, "medium"), ("low", "low")])
def test_efforts_of_other_apis(given: str | None, written: str) -> None:
    assert f"\n\nReasoning: {written}\n\n" in rendered(CHAT, reasoning_effort=given)


def test_a_template_in_harmony_is_rendered_by_us_with_a_date_that_stays() -> None:
    """One of the request's own is run, and so is any other template."""
    tokenizer = Tokenizer(
        None, chat_templates={"default": "{{ raise_exception('run') }}<|start|><|channel|><|message|>"}
    )
    assert re.search(r"\nCurrent date: \d{4}-\d\d-\d\d\n\nReasoning: medium\n", tokenizer.apply_chat_template(CHAT))
    assert tokenizer.apply_chat_template(CHAT, current_date=DATE, reasoning_effort="high") == rendered(CHAT)
    assert tokenizer.apply_chat_template(CHAT, chat_template="own <|start|><|channel|><|message|>").startswith("own ")
    assert not is_harmony("<|start|>{{ messages }}<|message|>")


# --- answers ----------------------------------------------------------------------------------------------------------


SCHEMAS: dict[str, Any] = {"get_weather": {}, "generate_file": {}}
HARMONY = MessageFormat(tools=SCHEMAS, harmony=True)


def fields(text: str, form: MessageFormat = HARMONY) -> dict[str, Any]:
    found = message_fields(parse(text, form))
    for call in found.get("tool_calls", ()):
        assert call.pop("id").startswith("call_")
    return found


def call(name: str, arguments: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


ANSWER = (
    '<|channel|>analysis<|message|>User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.<|end|>'
    "<|start|>assistant<|channel|>final<|message|>2 + 2 = 4."
)
WEATHER = (
    "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary "
    'to=functions.get_weather <|constrain|>json<|message|>{"location":"San Francisco"}'
)
PREAMBLE = (
    "<|channel|>analysis<|message|>{long}<|end|><|start|>assistant<|channel|>commentary<|message|>**Action plan**:\n"
    "1. Generate<|end|><|start|>assistant<|channel|>commentary to=functions.generate_file<|constrain|>json<|message|>"
    '{"path": "index.html"}'
)
CASES: list[tuple[str, dict[str, Any]]] = [
    (
        ANSWER,
        {
            "content": "2 + 2 = 4.",
            "reasoning_content": 'User asks: "What is 2 + 2?" Simple arithmetic. Provide answer.',
        },
    ),
    (
        WEATHER,
        {
            "content": None,
            "reasoning_content": "Need to use function get_weather.",
            "tool_calls": [call("get_weather", '{"location":"San Francisco"}')],
        },
    ),
    (
        PREAMBLE,
        {
            "content": "**Action plan**:\n1. Generate",
            "reasoning_content": "{long}",
            "tool_calls": [call("generate_file", '{"path": "index.html"}')],
        },
    ),
    (  # the recipient may also be in the role's section
        " to=functions.get_weather<|channel|>commentary json<|message|>{}",
        {"content": None, "tool_calls": [call("get_weather", "{}")]},
    ),
    (  # no tool of the request
        '<|channel|>commentary to=functions.other <|constrain|>json<|message|>{"a": 1}',
        {"content": '{"a": 1}'},
    ),
    (  # a tool of the model's own, in its reasoning
        "<|channel|>analysis to=python<|message|>1 + 1<|end|><|start|>assistant<|channel|>analysis<|message|>So 2.",
        {"content": "", "reasoning_content": "1 + 1\n\nSo 2."},
    ),
    ('<|channel|>commentary to=functions.get_weather<|message|>{"a": ', {"content": '{"a": '}),  # cut off
    (  # no arguments
        "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>",
        {"content": None, "tool_calls": [call("get_weather", "{}")]},
    ),
    (  # no end before the next message
        "<|channel|>analysis<|message|>Hm.<|start|>assistant<|channel|>final<|message|>Yes.",
        {"content": "Yes.", "reasoning_content": "Hm."},
    ),
    ("<|channel|>final<|message|>a < b <| c<|en", {"content": "a < b <| c<|en"}),
    ("No header at all.", {"content": "No header at all."}),
    ("<|channel|>analy", {"content": ""}),
    ("", {"content": ""}),
]


@pytest.mark.parametrize(("text", "expected"), CASES)
def test_what_an_answer_consists_of(text: str, expected: dict[str, Any]) -> None:
    """Whatever token ends it, and whatever its pieces are."""
    for end in ("", "<|return|>", "<|call|>") if "<|message|>" in text and not text.endswith("<|en") else ("",):
        assert fields(text + end) == expected
    for size in (1, 2, 3, 7):
        parser = HARMONY.parser()
        events = [event for i in range(0, len(text), size) for event in parser.feed(text[i : i + size])]
        found = message_fields([*events, *parser.finish()])
        assert found.get("reasoning_content") == expected.get("reasoning_content")
        assert len(found.get("tool_calls", ())) >= len(expected.get("tool_calls", ()))
        if "tool_calls" in expected:
            assert found["tool_calls"][0]["function"] == expected["tool_calls"][0]["function"]


def test_pieces_come_at_once() -> None:
    """Reasoning and arguments are streamed; a call begins when its header ends."""
    parser = HarmonyParser(SCHEMAS)
    assert parser.feed("<|channel|>analysis<|message|>Hm") == [Reasoning("Hm")]
    assert parser.feed(", <") == [Reasoning(", ")]
    assert parser.feed("|end|><|start|>assistant<|channel|>commentary to=functions.get_wea") == []
    [begin] = parser.feed("ther <|constrain|>json<|message|>")
    assert isinstance(begin, CallBegin)
    assert begin.name == "get_weather"


def test_one_call_only_if_asked_so() -> None:
    twice = WEATHER + "<|call|><|start|>assistant" + WEATHER
    assert len(fields(twice)["tool_calls"]) == 2
    assert len(fields(twice, MessageFormat(tools=SCHEMAS, harmony=True, parallel_tool_calls=False))["tool_calls"]) == 1


def test_an_answer_that_continues_a_message() -> None:
    form = MessageFormat(harmony=True, continued=True)
    assert fields(" = 4.", form) == {"content": " = 4."}


@given(st.lists(st.sampled_from([*TOKENS, "analysis", "final", " to=functions.get_weather", "{}", "x", "<|", " "])))
def test_any_order_of_tokens_is_read(pieces: list[str]) -> None:
    """Nothing raises, and the pieces do not matter: the events say the same as those of the whole text."""
    whole, parser = "".join(pieces), HARMONY.parser()
    found = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    at_once = HARMONY.parser()
    expected = [*at_once.feed(whole), *at_once.finish()]
    plain = [
        [(type(e).__name__, getattr(e, "text", getattr(e, "broken", None))) for e in events]
        for events in (_merged(found), _merged(expected))
    ]
    assert plain[0] == plain[1]


def _merged(events: list[Any]) -> list[Any]:
    """Neighbouring pieces of one kind as one."""
    merged: list[Any] = []
    for event in events:
        if merged and hasattr(event, "text") and type(merged[-1]) is type(event):
            merged[-1] = type(event)(**{**vars(event), "text": merged[-1].text + event.text})
        else:
            merged.append(event)
    return merged


def test_tokens_that_are_shown_and_tokens_that_end_an_answer() -> None:
    """Special tokens are left out of a text unless told so, and a checkpoint may name <|return|> alone as its end."""
    backend = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, []))
    backend.add_special_tokens(list(TOKENS))
    tokenizer, template = Tokenizer(backend), "<|start|><|channel|><|message|>"
    assert stop_tokens(template, tokenizer) == [backend.token_to_id("<|return|>"), backend.token_to_id("<|call|>")]
    assert sorted(shown_tokens(template, None, tokenizer)) == list(range(1, 8))
    assert stop_tokens("{{ messages }}", tokenizer) == shown_tokens("{{ messages }}", None, tokenizer) == []
