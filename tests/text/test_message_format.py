"""Parsers of tool calls: what is a call, what is text, and that the split into pieces changes nothing."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.server.chat_messages import message_fields
from ssd.text import message_format
from ssd.text.events import CallArguments, CallBegin, CallEnd, Event, Text
from ssd.text.message_format import MessageFormat, parse
from ssd.text.tool_calls import PARSERS, parser_for

NAMES = frozenset({"get_weather", "add"})
QWEN_TEMPLATE = "{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}"
LLAMA_TEMPLATE = '<|start_header_id|>{% if tools %}{"name": …, "parameters": …}{% endif %}'


def format_of(kind: str, **options: Any) -> MessageFormat:
    return MessageFormat(PARSERS[kind], NAMES, **options)


def parsed(kind: str, text: str, **options: Any) -> tuple[str, list[tuple[str, str]]]:
    content, _, calls = contents(parse(text, format_of(kind, **options)))
    return content, calls


def streamed(format: MessageFormat, pieces: list[str]) -> tuple[str, str, list[tuple[str, str]]]:
    parser = format.parser()
    events = [event for piece in pieces for event in parser.feed(piece)] + parser.finish()
    return contents(events)


def contents(events: list[Event]) -> tuple[str, str, list[tuple[str, str]]]:
    """Text, reasoning and calls of a message."""
    fields = message_fields(events)
    functions = [call["function"] for call in fields.get("tool_calls", [])]
    calls = [(function["name"], function["arguments"]) for function in functions]
    return fields["content"] or "", fields.get("reasoning_content", ""), calls


CALL = '{"name": "add", "arguments": {"a": 1}}'
LLAMA_CALL = '{"name": "add", "parameters": {"a": 1}}'
ADD = ("add", '{"a": 1}')
FENCED_DATA = 'See:\n```json\n{"name": "Ada", "age": 36}\n```\nand ```json {"a": 1}```.'


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("hermes", f"<tool_call>\n{CALL}\n</tool_call>", "", [ADD]),
        ("hermes", f"Let me see. \n<tool_call>{CALL}</tool_call>\n", "Let me see.", [ADD]),
        ("hermes", f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [ADD, ADD]),
        ("hermes", f"<tool_call>{CALL}</tool_call> done", " done", [ADD]),
        ("hermes", f"<tool_call>{CALL}", "", [ADD]),  # ended before the closing tag
        ("hermes", f"<tool_call>{CALL}</tool_", "", [ADD]),
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "add"}</tool_call>', "", [ADD]),
        ("hermes", '<tool_call>{"name": "add", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [ADD]),
        ("hermes", f'<tool_call>{{"type": "function", "function": {CALL}}}</tool_call>', "", [ADD]),
        ("hermes", '<tool_call>{"name": "add"}</tool_call>', "", [("add", "{}")]),
        ("hermes", CALL, CALL, []),  # no tag
        ("llama3", LLAMA_CALL, "", [ADD]),
        ("llama3", f"<|python_tag|>{LLAMA_CALL}", "", [ADD]),
        ("llama3", f"{LLAMA_CALL}; {LLAMA_CALL}", "", [ADD, ADD]),
        ("llama3", f"{LLAMA_CALL}\n{LLAMA_CALL}", "", [ADD, ADD]),
        ("llama3", f"\n\n{LLAMA_CALL}", "", [ADD]),
        ("llama3", f"The call is {LLAMA_CALL}", f"The call is {LLAMA_CALL}", []),
        ("json", CALL, "", [ADD]),
        ("json", f"<|python_tag|>{CALL}", f"<|python_tag|>{CALL}", []),
        ("fenced", f"I add.\n\n```json\n{CALL}\n```", "I add.", [ADD]),
        ("fenced", f"```json\n{CALL}\n```\n\n```json\n{CALL}\n```", "", [ADD, ADD]),
        ("fenced", f"```json\n{LLAMA_CALL}\n``` Done.", " Done.", [ADD]),
        ("fenced", FENCED_DATA, FENCED_DATA, []),
        ("fenced", f"```python\n{CALL}\n```", f"```python\n{CALL}\n```", []),
    ],
)
def test_formats(kind: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    """Each family's own format, and the variants that models write."""
    assert parsed(kind, text) == (content, calls)


@pytest.mark.parametrize(
    "arguments",
    [
        '{"city": "São Paulo", "note": "} ] </tool_call> {"}',
        '{"a": {"b": [1, {"c": {}}, "\\"}\\\\"]}, "d": "\\u00e9\\ud83d\\ude00"}',
        "{}",
        '{ "x" : [ ] , "y" : null }',
    ],
)
def test_arguments_are_the_model_s_own_text(arguments: str) -> None:
    """Braces and tags in strings, escapes, nesting: the arguments come out as they were written."""
    text = f'<tool_call>{{"name": "get_weather", "arguments": {arguments}}}</tool_call>'
    assert parsed("hermes", text) == ("", [("get_weather", arguments)])


@pytest.mark.parametrize(
    "text",
    [
        "just text",
        "  spaces around  ",
        "<tool_call>nothing</tool_call>",
        "<tool_call>[1, 2]</tool_call>",
        '<tool_call>{"title": "add"}</tool_call>',
        '<tool_call>{"name": "unknown", "arguments": {"a": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"a": 1 2}}</tool_call> and more',
        'see <tool_call>{"name": "add", "arguments": {"a": NaN}}</tool_call>',
        'see <tool_call>{"name": "add", "arguments": {"a": "cut of',
        "a < b, <tool_ca",
        "<tool_call>" + "{" * 5000,
        '<tool_call>{"name": ' + "[" * 100_000 + "]" * 100_000 + "}",
    ],
)
def test_what_is_no_call_is_text(text: str) -> None:
    """Broken JSON, unknown tools and tags alone: not a character of the message is lost."""
    assert parsed("hermes", text) == (text, [])


@pytest.mark.parametrize(
    "text", ['{"answer": 42}', '{"name": "Ada", "parameters": {}}', "{ not JSON", '{"name": "add"']
)
def test_json_that_is_no_call_is_text(text: str) -> None:
    """A model that answers in JSON is not mistaken for one that calls."""
    assert parsed("llama3", text) == (text, [])


def test_other_json_is_not_held_back() -> None:
    """An answer in JSON is streamed from its first key on."""
    parser = format_of("llama3").parser()
    assert parser.feed('{"answer"') == [Text('{"answer"')]
    assert parser.feed(': "long') == [Text(': "long')]


def test_arguments_are_streamed() -> None:
    """The call begins when its arguments do, and their pieces come as they are fed."""
    parser = format_of("hermes").parser()
    [begin, first] = parser.feed('<tool_call>{"name": "add", "arguments": {"a"')
    assert isinstance(begin, CallBegin)
    assert begin.name == "add"
    assert first == CallArguments(0, '{"a"')
    assert parser.feed(": 1") == [CallArguments(0, ": 1")]


@pytest.mark.parametrize("kind", ["hermes", "json", "llama3"])
def test_fences_where_the_template_teaches_no_format(kind: str) -> None:
    """Catches a model that has learned no format, and writes what Markdown has instead of what it was told."""
    text = f"I add.\n```json\n{CALL}\n```"
    assert parsed(kind, text, fenced=True) == ("I add.", [ADD])
    assert parsed(kind, text) == (text, [])
    assert format_in("{{ messages }}").fenced
    assert not format_in(QWEN_TEMPLATE).fenced


def format_in(template: str) -> MessageFormat:
    return message_format.format_of(template, "", PARSERS["hermes"], NAMES)


MARKUP = [
    ("hermes", f"\n<tool_call>\n{CALL}\n</tool_call>"),
    ("llama3", f"<|python_tag|>{LLAMA_CALL}"),
    ("json", LLAMA_CALL),
    ("fenced", f"\n```json\n{CALL}\n```"),
]


@pytest.mark.parametrize(("kind", "call"), MARKUP)
@pytest.mark.parametrize("forced", [False, True])
def test_no_markup_of_a_call_that_was_cut_is_text(kind: str, call: str, forced: bool) -> None:
    """Wherever the limit of tokens cuts it, at once and piece by piece. A call whose arguments have begun is there, as
    far as it goes. A forced call is cut by stop strings, too."""
    form = format_of(kind, forced=forced)
    before = "" if forced or kind == "json" else "I see."
    for length in range(len(call) + 1):
        text = before + (call if before else call.lstrip())[:length]
        parser = form.parser()
        events = [event for character in text for event in parser.feed(character)] + parser.finish(not forced)
        content, _, calls = contents(events)
        assert content.rstrip() == before
        whole, _, same = contents(parse(text, form, cut=not forced))
        assert (whole.rstrip(), same) == (before, calls)
        assert not calls or ADD[1].startswith(calls[0][1])
        ends = [event.complete for event in events if isinstance(event, CallEnd)]
        assert ends == (["}}" in text] if calls else [])


def test_a_message_that_is_not_cut_keeps_every_character() -> None:
    text = "if a <b> and ```js"
    assert parsed("hermes", text, fenced=True) == (text, [])


def test_parallel_calls_can_be_forbidden() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    assert parsed("hermes", text, parallel_tool_calls=False) == ("", [ADD])


TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<", "<tool", "</")
JSON = (CALL, LLAMA_CALL, "{", "}", '"', "\\", '{"name": "add", "arguments": {"s": "}</tool_call>', ", 1", "; ")
PARTS = st.sampled_from((*TAGS, *JSON, "\n", " ", "é", "🙂", "text"))


@given(st.lists(PARTS, max_size=8).map("".join), st.sampled_from(list(PARSERS)), st.booleans(), st.data())
def test_pieces_do_not_matter(text: str, kind: str, reasoning: bool, data: st.DataObject) -> None:
    """However a message is split, text, reasoning and calls are the same."""
    form = format_of(kind, reasoning=reasoning)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=12)) | {0, len(text)})
    pieces = [text[a:b] for a, b in itertools.pairwise(cuts)]
    assert streamed(form, pieces) == streamed(form, [text]) == streamed(form, list(text))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(st.dictionaries(st.text(), json_values, max_size=3), min_size=1, max_size=3), st.booleans(), st.data())
def test_all_arguments_come_back(values: list[dict[str, Any]], ascii_only: bool, data: st.DataObject) -> None:
    """Any JSON object survives as arguments, in every format and every split."""
    texts = [json.dumps(value, ensure_ascii=ascii_only) for value in values]
    for kind, text in (
        ("hermes", "".join(f'<tool_call>\n{{"name": "add", "arguments": {t}}}\n</tool_call>\n' for t in texts)),
        ("llama3", "; ".join(f'{{"name": "add", "parameters": {t}}}' for t in texts)),
    ):
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)) | {0, len(text)})
        content, _, calls = streamed(format_of(kind), [text[a:b] for a, b in itertools.pairwise(cuts)])
        assert (content, calls) == ("", [("add", t) for t in texts])


def test_the_template_chooses_the_parser() -> None:
    assert parser_for(QWEN_TEMPLATE) is PARSERS["hermes"]
    assert parser_for(LLAMA_TEMPLATE) is PARSERS["llama3"]
    assert parser_for("{{ messages }}") is None
    assert parser_for("{{ tools }} in a format of its own") is None
