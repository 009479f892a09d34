"""Grammars that force tool calls, for the tokenizers of the families they are for."""

from __future__ import annotations

import functools
import json
import os
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import mostly_slow
from family_templates import TAGS, TEMPLATES
from tokenizers import AddedToken

pytest.importorskip("fastapi", reason="needs the extras serve and dev")


import ssd
from ssd.core import SamplingParams
from ssd.errors import RequestError
from ssd.server.protocol import ChatRequest
from ssd.server.tool_use import ToolUse, read_tools
from ssd.text.events import message_fields
from ssd.text.message_format import MessageFormat, parse
from ssd.text.tokenizer import Tokenizer, load_tokenizer
from ssd.text.tool_formats import PARSERS

pytest.importorskip("llguidance")

from ssd.constraints.grammars import Constraint, Grammars

REAL_TOKENIZERS = Path(os.environ.get("SSD_TEST_TOKENIZERS", "tokenizers"))
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
CALLS = {
    "llama-3.2": '{"name": "add", "parameters": {"a": 12}}',
    "qwen3": '<tool_call>\n{"name": "add", "arguments": {"a": 12}}\n</tool_call>',
}
SEPARATORS = {"llama-3.2": "; ", "qwen3": "\n"}


def real_tokenizer(name: str) -> Tokenizer:
    if not (REAL_TOKENIZERS / name).is_dir():
        pytest.skip(f"no tokenizer {name}: set SSD_TEST_TOKENIZERS")
    return load_tokenizer(REAL_TOKENIZERS / name)


def tools_of(tokenizer: Tokenizer, strict: bool = False, choice: Any = "auto", parallel: bool | None = True) -> ToolUse:
    function = {"name": "add", "parameters": SCHEMA, "strict": strict}
    body = ChatRequest(
        model="m",
        messages=[],
        tools=[{"type": "function", "function": function}],
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )
    use = read_tools(body, tokenizer.template_source(), "auto", tokenizer)
    assert use is not None
    return use


@functools.cache
def grammars(tokenizer: Tokenizer) -> Grammars:
    return Grammars(tokenizer.backend, tokenizer.vocab_size, [tokenizer.eos_token_id or 0])


def follows(tokenizer: Tokenizer, use: ToolUse, text: str, **params: Any) -> bool:
    """Whether every token of the text, as the tokenizer splits it, and then the end are allowed."""
    structured = use.constrained(SamplingParams(**params)).structured
    assert structured is not None
    assert tokenizer.eos_token_id is not None
    ids = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
    return Constraint(grammars(tokenizer).compiled(structured).result()).num_valid(ids) == len(ids)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", CALLS)
def test_forced_calls(name: str) -> None:
    """The model's own tokens of a call are allowed (tags that are tokens included), and nothing else."""
    tokenizer, call, separator = real_tokenizer(name), CALLS[name], SEPARATORS[name]
    use = tools_of(tokenizer, choice="required")
    assert follows(tokenizer, use, call)
    assert follows(tokenizer, use, call + separator + call)
    assert not follows(tokenizer, tools_of(tokenizer, choice="required", parallel=False), call + separator + call)
    assert not follows(tokenizer, use, "Hello")
    assert not follows(tokenizer, use, call.replace("12", '"x"'))
    assert not follows(tokenizer, use, call.replace("add", "other"))


@pytest.mark.parametrize("name", CALLS)
def test_strict_calls(name: str) -> None:
    """Text is free, reasoning included; a call follows its schema."""
    tokenizer, call = real_tokenizer(name), CALLS[name]
    use = tools_of(tokenizer, strict=True)
    assert follows(tokenizer, use, "Hello <b>you</b> {1}")
    assert follows(tokenizer, use, call)
    assert not follows(tokenizer, use, call.replace("12", '"x"'))
    if name == "qwen3":
        assert follows(tokenizer, use, f"<think>\nHm.\n</think>\n\nI look.\n{call}\n{call}")


@pytest.mark.parametrize("strict", mostly_slow([False, True], fast={True}))
def test_an_agent_with_a_structured_answer_can_still_call(strict: bool) -> None:
    """Catches a schema of the answer that forbids calls, and strict tools that are refused beside one."""
    tokenizer = load_tokenizer(Path(ssd.__file__).parent / "bundle" / "tiny-qwen3")
    use = tools_of(tokenizer, strict=strict)
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "additionalProperties": False}
    for text, allowed in (
        (CALLS["qwen3"], True),
        (f"{CALLS['qwen3']}\n{CALLS['qwen3']}", True),
        ('{"ok": true}', True),
        ('{"ok": 1}', False),
        ("Hello", False),
        (CALLS["qwen3"].replace("12", '"x"'), not strict),
    ):
        assert follows(tokenizer, use, text, structured={"json_schema": schema}) == allowed, text
    forced = tools_of(tokenizer, choice="required")
    assert not follows(tokenizer, forced, '{"ok": true}', structured={"json_schema": schema})


@pytest.mark.parametrize(("parallel", "several"), [(None, False), (False, False), (True, True)])
def test_a_required_call_is_one_unless_several_are_asked_for(parallel: bool | None, several: bool) -> None:
    """Catches a small model that repeats the call until its tokens are used up."""
    tokenizer = load_tokenizer(Path(ssd.__file__).parent / "bundle" / "tiny-qwen3")
    use = tools_of(tokenizer, choice="required", parallel=parallel)
    assert follows(tokenizer, use, CALLS["qwen3"])
    assert follows(tokenizer, use, f"{CALLS['qwen3']}\n{CALLS['qwen3']}") == several


@pytest.mark.parametrize("opened", [False, True])
def test_arguments_have_the_properties_of_the_schema_only(opened: bool) -> None:
    """Catches a model that makes up arguments, and an option that opens nothing."""
    tokenizer = load_tokenizer(Path(ssd.__file__).parent / "bundle" / "tiny-qwen3")
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    tool = {"type": "function", "function": {"name": "add", "parameters": schema}}
    body = ChatRequest(model="m", messages=[], tools=[tool], tool_choice="required")
    use = read_tools(body, tokenizer.template_source(), "auto", tokenizer, opened)
    assert use is not None
    assert use.described == [tool]
    assert follows(tokenizer, use, CALLS["qwen3"])
    assert follows(tokenizer, use, CALLS["qwen3"].replace('"a"', '"b"')) == opened


def test_a_named_tool_is_called_once() -> None:
    """Catches a small model that repeats the call until its tokens are used up."""
    tokenizer = load_tokenizer(Path(ssd.__file__).parent / "bundle" / "tiny-qwen3")
    named = tools_of(tokenizer, choice={"type": "function", "function": {"name": "add"}})
    assert follows(tokenizer, named, CALLS["qwen3"])
    assert not follows(tokenizer, named, f"{CALLS['qwen3']}\n{CALLS['qwen3']}")


# --- formats with tags ------------------------------------------------------------------------------------------------


TYPED: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "maxLength": 9},
        "unit": {"enum": ["C", "F"]},
        "code": {"type": "string", "pattern": "^[a-z]/[0-9]$"},
        "days": {"$ref": "#/$defs/days"},
        "note": {"type": ["string", "null"]},
    },
    "required": ["city", "days"],
    "$defs": {"days": {"type": "integer", "minimum": 1}},
}
KINDS = ["glm", "deepseek_v3", "deepseek_v31", "kimi_k2"]


@functools.cache
def family_tokenizer(kind: str, tagged: bool) -> Tokenizer:
    """That of a bundled model, with the template of a family. `tagged`: with its tags as tokens, as the family has."""
    backend = load_tokenizer(Path(ssd.__file__).parent / "bundle" / "tiny-qwen3").backend
    if tagged:
        tags = [AddedToken(tag, special=False, normalized=False) for tag in (*TAGS[kind], "<think>", "</think>")]
        backend.add_tokens(tags)
    return Tokenizer(backend, chat_templates={"default": TEMPLATES[kind]}, special_tokens={"eos_token": "<|im_end|>"})


def weather(tokenizer: Tokenizer, choice: str = "auto", parallel: bool = True) -> ToolUse:
    functions = [{"name": "get", "parameters": TYPED, "strict": True}, {"name": "stop", "parameters": SCHEMA}]
    tools = [{"type": "function", "function": function} for function in functions]
    body = ChatRequest(model="m", messages=[], tools=tools, tool_choice=choice, parallel_tool_calls=parallel)
    use = read_tools(body, tokenizer.template_source(), "auto", tokenizer)
    assert use is not None
    return use


def written(kind: str, *calls: dict[str, Any]) -> str:
    return PARSERS[kind].written(("get", json.dumps(arguments, ensure_ascii=False)) for arguments in calls)


@pytest.mark.parametrize("tagged", mostly_slow([True, False], fast={True}))
@pytest.mark.parametrize("kind", KINDS)
def test_calls_in_tags_follow_their_schema(kind: str, tagged: bool) -> None:
    """Forced and strict, whether or not the tags are tokens."""
    tokenizer = family_tokenizer(kind, tagged)
    good = {"city": "Zürich <", "unit": "F", "code": "a/7", "days": 2, "note": None}
    forced, strict, single = weather(tokenizer, "required"), weather(tokenizer), weather(tokenizer, parallel=False)
    for arguments, allowed in (
        (good, True),
        ({"city": "", "days": 1}, True),
        ({**good, "note": "x"}, kind != "glm"),  # a text that may be something else is in quotes
        ({**good, "note": '"x"'}, True),
        ({**good, "city": "x" * 10}, False),
        ({**good, "unit": "K"}, False),
        ({**good, "code": "A/7"}, False),
        ({**good, "days": 0}, False),
        ({**good, "days": "two"}, False),
        ({"city": "Rome"}, False),
        ({**good, "more": 1}, False),
    ):
        call = written(kind, arguments)
        assert follows(tokenizer, forced, call) == allowed, call
        assert follows(tokenizer, strict, f"I look.\n{call}") == allowed, call
    call, two = written(kind, good), written(kind, good, good)
    assert follows(tokenizer, strict, "Hello <b>you</b> {1}")
    assert follows(tokenizer, strict, two)
    assert follows(tokenizer, forced, two)
    assert not follows(tokenizer, forced, f"Hello {call}")
    assert not follows(tokenizer, forced, call.replace("get", "other"))
    if tagged:
        assert not follows(tokenizer, single, two)
        assert follows(tokenizer, strict, f"Hm.</think>I look.{call}")
    answer = {"json_schema": {"type": "object", "properties": {"ok": {"type": "boolean"}}}}
    assert follows(tokenizer, strict, call, structured=answer)
    assert follows(tokenizer, strict, '{"ok": true}', structured=answer)


def test_line_ends_of_glm() -> None:
    """GLM 4.5 and 4.6 write them, 4.7 does not."""
    tokenizer = family_tokenizer("glm", True)
    pairs = "".join(
        f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in (("city", "Rome"), ("days", 2))
    )
    assert follows(tokenizer, weather(tokenizer, "required"), f"<tool_call>get\n{pairs}</tool_call>")


HOSTILE: list[Any] = [
    {
        "properties": {
            "x": {"anyOf": [{"$ref": "#/properties/y"}] * 9},
            "y": {"anyOf": [{"$ref": "#/properties/x"}] * 9},
        }
    },
    {"properties": {"x": {"$ref": "#/properties/x"}, "y": True, "z": {"$ref": 5}}, "required": 7},
    {"properties": {"x": {"type": "string", "enum": [1, {}]}, "y": {"type": "string", "enum": 3}}},
    {"properties": {"x": {"type": "string", "minLength": "a"}, "y": {"type": [None, 4]}, "z": {"const": "a"}}},
    {"properties": {"x": {"type": "string", "pattern": "a/\nstart: b"}, 'q"\n': {"type": "string", "maxLength": -3}}},
    {"properties": [1], "$defs": 5},
]


@pytest.mark.parametrize("schema", HOSTILE)
def test_absurd_schemas_of_arguments_in_tags(schema: dict[str, Any]) -> None:
    """They end with a grammar or an error of the request, and calls of such tools can be read."""
    tokenizer = family_tokenizer("glm", True)
    tool = {"type": "function", "function": {"name": "get", "parameters": schema}}
    use = read_tools(ChatRequest(model="m", messages=[], tools=[tool]), TEMPLATES["glm"], "auto", tokenizer)
    assert use is not None
    forced = replace(use, forced=True).constrained(SamplingParams()).structured
    with suppress(RequestError):
        grammars(tokenizer).compiled(forced).result()
    text = written("glm", {"x": "1", "y": [1], "z": None})
    fields = message_fields(parse(text, MessageFormat(PARSERS["glm"], use.schemas)))
    assert set(json.loads(fields["tool_calls"][0]["function"]["arguments"])) == {"x", "y", "z"}


def test_arguments_of_no_schema_in_tags() -> None:
    """Any pairs are allowed where the schema names none."""
    tokenizer = family_tokenizer("glm", True)
    tool = {"type": "function", "function": {"name": "get"}}
    body = ChatRequest(model="m", messages=[], tools=[tool], tool_choice="required")
    use = read_tools(body, TEMPLATES["glm"], "auto", tokenizer, additional_properties=True)
    assert use is not None
    assert follows(tokenizer, use, written("glm", {"x": "Rome", "y": 1}))
    assert follows(tokenizer, use, "<tool_call>get</tool_call>")


def test_without_constraint() -> None:
    params = SamplingParams()
    assert tools_of(real_tokenizer("qwen3")).constrained(params) is params
