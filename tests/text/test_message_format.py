"""Parsers of tool calls: what is a call, what is text, and that the split into pieces changes nothing."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.text import message_format
from ssd.text.events import CallArguments, CallBegin, CallEnd, Event, Text, message_fields
from ssd.text.message_format import MessageFormat, parse
from ssd.text.tool_formats import PARSERS, parser_for

PROPERTIES: dict[str, Any] = {
    "city": {"type": "string"},
    "a": {"type": "integer"},
    "b": {"type": ["string", "null"]},
    "unit": {"enum": ["C", "F"]},
    "deep": {"anyOf": [{"$ref": "#/$defs/list"}, {"type": "boolean"}]},
    "endless": {"$ref": "#/properties/endless"},
}
LIST = {"type": "array", "items": {"type": "integer"}}
SCHEMAS = {"get_weather": {"type": "object", "properties": PROPERTIES, "$defs": {"list": LIST}}, "add": {}}
QWEN_TEMPLATE = "{% if tools %}<tool_call>{{ tools }}</tool_call>{% endif %}"
LLAMA_TEMPLATE = '<|start_header_id|>{% if tools %}{"name": …, "parameters": …}{% endif %}'


def format_of(kind: str, **options: Any) -> MessageFormat:
    return MessageFormat(PARSERS[kind], SCHEMAS, **options)


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


TAGGED = "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"
DS_BEGIN, DS_END, CALL_BEGIN, CALL_END, SEP = (
    f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")
    for words in ("tool calls begin", "tool calls end", "tool call begin", "tool call end", "tool sep")
)
V3_CALL = f'{CALL_BEGIN}function{SEP}add\n```json\n{{"a": 1}}\n```{CALL_END}'
V31_CALL = f'{CALL_BEGIN}add{SEP}{{"a": 1}}{CALL_END}'
KIMI_BEGIN, KIMI_END = "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"


def kimi_call(head: str, arguments: str = '{"a": 1}') -> str:
    return f"<|tool_call_begin|>{head}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


KIMI_CALL = kimi_call("functions.add:0")


@pytest.mark.parametrize(
    ("kind", "text", "content", "calls"),
    [
        ("glm", "<tool_call>add</tool_call>", "", [("add", "{}")]),
        ("glm", "<tool_call>add\n</tool_call>\n<tool_call>add\n</tool_call>", "", [("add", "{}")] * 2),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value></tool_call>", "", [ADD]),
        ("glm", "I add. <tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", "I add.", [ADD]),
        ("glm", "<tool_call>add</tool_call> done", " done", [("add", "{}")]),
        ("deepseek_v3", f"I add.{DS_BEGIN}{V3_CALL}\n{V3_CALL}{DS_END}", "I add.", [ADD, ADD]),
        ("deepseek_v3", f"{DS_BEGIN}\n{V31_CALL}{DS_END}", "", [ADD]),  # either parser reads both versions
        ("deepseek_v31", f"I add.\n\n{DS_BEGIN}{V31_CALL}{V31_CALL}{DS_END}", "I add.", [ADD, ADD]),
        ("deepseek_v31", f"{DS_BEGIN}{V3_CALL}{DS_END}", "", [ADD]),
        ("deepseek_v31", f"{V31_CALL}", "", [ADD]),  # without its section
        ("deepseek_v31", f"{DS_BEGIN}{V31_CALL.removesuffix(CALL_END)}", "", [ADD]),  # ended before the closing tags
        ("deepseek_v31", f"{DS_BEGIN}{V31_CALL}{DS_END}So.", "So.", [ADD]),
        ("kimi_k2", f"I add. {KIMI_BEGIN}{KIMI_CALL}{kimi_call('functions.add:1')}{KIMI_END}", "I add.", [ADD, ADD]),
        ("kimi_k2", f"{KIMI_BEGIN} {kimi_call('add:0')} {KIMI_END}", "", [ADD]),
        ("kimi_k2", kimi_call(" functions.add "), "", [ADD]),
    ],
)
def test_formats_with_tags(kind: str, text: str, content: str, calls: list[tuple[str, str]]) -> None:
    assert parsed(kind, text) == (content, calls)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("glm", "<tool_call>other</tool_call>"),
        ("glm", "<tool_call>add and more"),
        ("glm", "<tool_call></tool_call>"),
        ("glm", "<tool_call>" + "add " * 200),
        ("glm", "<tool_call>add<b></tool_call>"),
        ("glm", "<tool_call>add<arg_key>a</arg_key>1</tool_call> or so"),
        ("glm", "<tool_call>add<arg_key>a</arg_key><arg_value>1</arg_value>"),
        ("glm", "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</tool_call>"),
        ("glm", CALL),
        ("deepseek_v31", f"{DS_BEGIN}{DS_END}"),
        ("deepseek_v31", f"{DS_BEGIN}{CALL_BEGIN}other{SEP}{{}}{CALL_END}{DS_END}"),
        ("deepseek_v31", f"{CALL_BEGIN}add{SEP}[1]{CALL_END} and more"),
        ("deepseek_v31", f'{CALL_BEGIN}add{SEP}{{"a": 1 2}}{CALL_END} and more'),
        ("deepseek_v31", f'{CALL_BEGIN}add{SEP}{{"a": '),
        ("deepseek_v31", f"{DS_BEGIN}{CALL_BEGIN}" + "add" * 300),
        ("kimi_k2", f"{KIMI_BEGIN}{kimi_call('functions.other:0')}{KIMI_END}"),
        ("kimi_k2", kimi_call("functions.add:x")),
        ("kimi_k2", '<|tool_call_begin|>functions.add:0{"a": 1}<|tool_call_end|>'),
    ],
)
def test_what_is_no_call_in_tags_is_text(kind: str, text: str) -> None:
    """Not a character of a message is lost, whether or not its arguments had begun."""
    assert parsed(kind, text) == (text, [])


@pytest.mark.parametrize(
    ("key", "value", "argument"),
    [
        ("city", "São\nPaulo ", '"São\\nPaulo "'),
        ("city", "5", '"5"'),  # the schema says that it is text
        ("city", '<b> "x" \\ </arg_valu', '"<b> \\"x\\" \\\\ </arg_valu"'),
        ("city", "", '""'),
        ("a", " 12 ", "12"),
        ("a", "twelve", '"twelve"'),
        ("a", "1.50", "1.50"),  # of another type, which the tool may refuse
        ("b", "null", "null"),
        ("b", "5", '"5"'),
        ("b", '"quoted"', '"quoted"'),
        ("unit", "C", '"C"'),
        ("deep", "[1, 2]", "[1, 2]"),
        ("deep", "true", "true"),
        ("endless", "x", '"x"'),
        ("other", '{"x": [NaN]}', '"{\\"x\\": [NaN]}"'),
        ("other", '{"x": [1]}', '{"x": [1]}'),
        ("other", "Rome", '"Rome"'),
    ],
)
def test_arguments_in_tags_have_the_types_of_the_schema(key: str, value: str, argument: str) -> None:
    text = f"<tool_call>get_weather<arg_key>{key}</arg_key><arg_value>{value}</arg_value></tool_call>"
    content, [(_, arguments)] = parsed("glm", text)
    assert (content, arguments) == ("", f'{{"{key}": {argument}}}')
    assert list(json.loads(arguments)) == [key]


def test_text_in_tags_is_streamed() -> None:
    """The value of a text comes as it is written, without what may be the beginning of its closing tag."""
    parser = format_of("glm").parser()
    [begin, *first] = parser.feed("<tool_call>get_weather<arg_key>city</arg_key><arg_value>Ro")
    assert isinstance(begin, CallBegin)
    assert "".join(event.text for event in first) == '{"city": "Ro'
    assert parser.feed("me</arg_") == [CallArguments(0, "me")]
    assert parser.feed("value><arg_key>a</arg_key><arg_value>1") == [CallArguments(0, '", "a": ')]
    assert parser.feed("2</arg_value></tool_call>") == [CallArguments(0, "12}"), CallEnd(0)]


def test_the_ids_of_the_model_are_kept() -> None:
    """Kimi's template writes them into the prompt of the next turn. One that is not new would mix up results."""
    text = "".join(kimi_call(f"functions.add:{number}") for number in (3, 4, 4))
    ids = [event.id for event in parse(text, format_of("kimi_k2")) if isinstance(event, CallBegin)]
    assert ids[:2] == ["functions.add:3", "functions.add:4"]
    assert ids[2].startswith("call_")


@pytest.mark.parametrize("opened", [False, True])
def test_a_call_of_kimi_ends_its_reasoning(opened: bool) -> None:
    """The model leaves out the closing tag there."""
    text = ("" if opened else "<think>") + f"Hm. {KIMI_BEGIN}{KIMI_CALL}{KIMI_END}"
    form = format_of("kimi_k2", reasoning=True, reasoning_opened=opened)
    assert streamed(form, list(text)) == contents(parse(text, form)) == ("", "Hm.", [ADD])
    _, reasoning, calls = contents(parse(f"<think>{V31_CALL}</think>So.", format_of("deepseek_v31", reasoning=True)))
    assert (reasoning, calls) == (V31_CALL, [])


@pytest.mark.parametrize("kind", PARSERS)
def test_what_is_written_is_read(kind: str) -> None:
    """The calls that prompts show, and the grammar of forced calls, have the form that is parsed."""
    arguments = {"city": 'São "Paulo"', "a": 1, "deep": [1, 2]}
    calls = [("get_weather", json.dumps(arguments)), ("add", "{}")]
    content, found = parsed(kind, PARSERS[kind].written(calls))
    assert (content, [(name, json.loads(text)) for name, text in found]) == (
        "",
        [("get_weather", arguments), ("add", {})],
    )


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
    return message_format.format_of(template, "", PARSERS["hermes"], SCHEMAS)


MARKUP = [
    ("hermes", f"\n<tool_call>\n{CALL}\n</tool_call>"),
    ("llama3", f"<|python_tag|>{LLAMA_CALL}"),
    ("json", LLAMA_CALL),
    ("fenced", f"\n```json\n{CALL}\n```"),
    ("glm", "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>"),
    ("deepseek_v3", f"{DS_BEGIN}{V3_CALL}{DS_END}"),
    ("deepseek_v31", f"\n\n{DS_BEGIN}{V31_CALL}{DS_END}"),
    ("kimi_k2", f"{KIMI_BEGIN}{KIMI_CALL}{KIMI_END}"),
]


@pytest.mark.parametrize(("kind", "call"), MARKUP)
@pytest.mark.parametrize("forced", [False, True])
def test_no_markup_of_a_call_that_was_cut_is_text(kind: str, call: str, forced: bool) -> None:
    """Wherever the limit of tokens cuts it, at once and piece by piece. A call whose arguments have begun is there, as
    far as it goes. A forced call is cut by stop strings, too."""
    form = format_of(kind, forced=forced)
    last = {"glm": "</tool_call>", **dict.fromkeys(("deepseek_v3", "deepseek_v31", "kimi_k2"), "}")}.get(kind, "}}")
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
        assert ends == ([last in text] if calls else [])


def test_a_message_that_is_not_cut_keeps_every_character() -> None:
    text = "if a <b> and ```js"
    assert parsed("hermes", text, fenced=True) == (text, [])


def test_parallel_calls_can_be_forbidden() -> None:
    text = f"<tool_call>{CALL}</tool_call><tool_call>{CALL}</tool_call>"
    assert parsed("hermes", text, parallel_tool_calls=False) == ("", [ADD])


TAGS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "<|python_tag|>", "<", "<tool", "</")
JSON = (CALL, LLAMA_CALL, "{", "}", '"', "\\", '{"name": "add", "arguments": {"s": "}</tool_call>', ", 1", "; ")
TAGGED_PARTS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "add", "city", "5", "<tool_call>add")
DEEPSEEK_PARTS = (DS_BEGIN, DS_END, CALL_BEGIN, CALL_END, SEP, "function", "```json", "```", f"{CALL_BEGIN}add{SEP}")
KIMI_PARTS = (KIMI_BEGIN, KIMI_END, *kimi_call(" functions.add:0 ").split(" "), KIMI_CALL, "<|tool_call_begin|>add:1")
PARTS = st.sampled_from((*TAGS, *JSON, *TAGGED_PARTS, *DEEPSEEK_PARTS, *KIMI_PARTS, "\n", " ", "é", "🙂", "text"))


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
    for kind in ("hermes", "llama3", "deepseek_v3", "deepseek_v31", "kimi_k2"):
        text = PARSERS[kind].written(("add", t) for t in texts)
        cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)) | {0, len(text)})
        content, _, calls = streamed(format_of(kind), [text[a:b] for a, b in itertools.pairwise(cuts)])
        assert (content, calls) == ("", [("add", t) for t in texts])


@given(st.dictionaries(st.sampled_from([*PROPERTIES, "other"]), json_values, max_size=4), st.data())
def test_all_arguments_in_tags_come_back(arguments: dict[str, Any], data: st.DataObject) -> None:
    """Any value of a type that the schema has; text where nothing else is allowed, or that is no other value."""
    allowed = {
        "city": st.text().filter(lambda text: "</arg_value>" not in text),
        "a": st.integers(),
        "b": st.none() | st.text(min_size=1).map(lambda text: f"a{text}"),
        "unit": st.sampled_from("CF"),
    }
    arguments |= {key: data.draw(values) for key, values in allowed.items() if key in arguments}
    arguments = {key: value for key, value in arguments.items() if key in allowed or not isinstance(value, str)}
    text = PARSERS["glm"].written([("get_weather", json.dumps(arguments))])
    cuts = sorted(data.draw(st.sets(st.integers(0, len(text)), max_size=9)) | {0, len(text)})
    content, _, [(_, found)] = streamed(format_of("glm"), [text[a:b] for a, b in itertools.pairwise(cuts)])
    assert (content, json.loads(found)) == ("", arguments)


@pytest.mark.parametrize(
    ("template", "kind"),
    [
        (QWEN_TEMPLATE, "hermes"),
        (LLAMA_TEMPLATE, "llama3"),
        ("{{ tools }} <tool_call>{{ name }}<arg_key>{{ k }}</arg_key>", "glm"),
        (f"{{# no tools #}}{DS_BEGIN}{CALL_BEGIN}{SEP}\n```json", "deepseek_v3"),
        (f"{DS_BEGIN}{CALL_BEGIN}{SEP}", "deepseek_v31"),
        (f"{{{{ tools }}}}{KIMI_BEGIN}{KIMI_CALL}", "kimi_k2"),
        ("{{ messages }}", None),
        ("<tool_call> without a list of them", None),
        ("{{ tools }} in a format of its own", None),
    ],
)
def test_the_template_chooses_the_parser(template: str, kind: str | None) -> None:
    assert parser_for(template) is (None if kind is None else PARSERS[kind])
