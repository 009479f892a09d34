"""Chat templates within limits: what would hang or fill the memory is refused, quickly, and for its request alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jinja2.sandbox
import pytest
from conftest import TestModel

from ssd import LLM, RequestError, SamplingParams
from ssd.text import chat_template
from ssd.text.tokenizer import Tokenizer

CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi", "tool_calls": [{"a": 1}]}]
HOSTILE = {
    "nested ranges": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "nested loops": "{% set x = 'a' * 5000 %}" + "{% for a in x %}" * 9 + "{% endfor %}" * 9,
    "recursive loop": "{% for a in [1, 2] recursive %}{{ loop([1, 2]) }}{{ loop([1, 2]) }}{% endfor %}",
    "recursive macro": "{% macro m() %}{{ m() }}{{ m() }}{% endmacro %}{{ m() }}",
    "branching macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}",
    "repetition": "{{ 'a' * 10**9 }}",
    "repeated list": "{{ [1] * 10**9 }}",
    "power": "{{ 10 ** 999999999 }}",
    "squares": "{% set n = namespace(x=9) %}{% for i in range(60) %}{% set n.x = n.x * n.x %}{% endfor %}",
    "rounding": "{{ 5 | round(999999999, 'ceil') }}",
    "doubling": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}",
    "concatenation": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "lists of lists": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = [n.x, n.x] %}{% endfor %}",
    "dicts of dicts": "{% set n = namespace(x=1) %}{% for i in range(60) %}{% set n.x = {1:n.x, 2:n.x} %}{% endfor %}",
    "set blocks": "{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x %}{{ n.x }}{{ n.x }}{% endset %}"
    "{% endfor %}",
    "output": "{% set x = 'a' * 1000000 %}{% for i in range(99999) %}{{ x }}{% endfor %}",
    "JSON indent": "{{ messages | tojson(indent=99999999) }}",
    "JSON separators": "{{ messages | tojson(separators=('a' * 1000000, 'b')) }}",
    "center": "{{ 'a' | center(10**9) }}",
    "center by map": "{{ ['a'] | map('center', 10**9) | list }}",
    "indent": "{{ 'a\nb' | indent(10**9) }}",
    "slice": "{{ [1] | slice(10**9) | list }}",
    "batch": "{{ [1] | batch(10**9, 0) | list }}",
    "sum of lists": "{{ [[1]] | sum(start=[]) }}",
    "replace": "{{ ('a' * 10**6) | replace('a', 'b' * 10**6) }}",
    "join": "{{ range(9999) | join('b' * 10**6) }}",
    "ljust": "{{ 'a'.ljust(10**9) }}",
    "zfill": "{{ 'a'.zfill(10**9) }}",
    "expandtabs": "{{ '\t'.expandtabs(10**9) }}",
    "replace method": "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
    "join method": "{{ ('b' * 10**6).join('a' * 10**6) }}",
    "to_bytes": "{{ (1).to_bytes(10**9, 'big') }}",
    "translate": "{{ 'a'.translate({97: 'b'}) }}",
    "format method": "{{ '{:999999999}'.format(1) }}",
    "format of a width": "{{ '{:{}}'.format(1, 999999999) }}",
    "format of many": "{{ ('{0}' * 100000).format('a' * 10**6) }}",
    "percent": "{{ '%999999999d' % 1 }}",
    "percent of a width": "{{ '%*d' % (999999999, 1) }}",
    "percent of many": "{{ ('%(a)s' * 100000) % {'a': 'a' * 10**6} }}",
    "format filter": "{{ '%999999999d' | format(1) }}",
    "date": "{{ strftime_now('%999999999d') }}",
    "lorem ipsum": "{{ lipsum(n=10**9) }}",
    "division by zero": "{{ 1 // 0 }}",
    "deep nesting": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a long template": "{# a #}" * 200_000,
    "a syntax error": "{% for %}",
}


@pytest.mark.parametrize("name", sorted(HOSTILE))
def test_a_template_without_bounds_is_refused_soon(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 0.1)
    start = time.thread_time()  # of this thread alone: test machines are shared
    with pytest.raises(RequestError, match="chat template"):
        Tokenizer(None).apply_chat_template(CHAT, chat_template=HOSTILE[name])
    assert time.thread_time() - start < 5.0


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ m.role }}{{ loop.last }};{% endfor %}",
        "{% set n = namespace(x='') %}{% for m in messages %}{% set n.x = n.x + m['content'] %}{% endfor %}{{ n.x }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | join(', ') }}",
        "{{ ('ab' * 1000000) | length }}{{ ([1, 2] * 10000) | length }}",
        "{{ messages[::-1] | tojson(indent=2) }}{{ messages | tojson }}",
        "{{ 'a' ~ 1 ~ none }}{{ 'b' * 3 }}{{ 2 ** 10 }}{{ '%5.1f|%s' % (1.25, 'x') }}{{ '{:>4}{{}}'.format(7) }}",
        "{% for k, v in {'a': 1, 'b': (2, 3)}.items() %}{{ k }}{{ v }}{% else %}none{% endfor %}",
        "{% macro m(x) %}<{{ x }}>{% endmacro %}{{ m('a') }}{% set y %}{{ m('b') }}{% endset %}{{ y | trim | upper }}",
        "{% for x in [1, [2, 3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}",
        "{{ (messages | first).content.split('l') }}{{ messages | length }}{{ range(3) | list }}",
        "{{ 'a\nb' | indent(2, true) }}{{ 'abc' | replace('b', 'x') }}{{ 3.14159 | round(2) }}{{ [1, 2] | sum }}",
        "{%- set first, rest = messages[0], messages[1:] %}{{ first.role }}{{ rest | length }}{{ undefined_name }}",
    ],
)
def test_ordinary_templates_are_rendered_as_without_limits(template: str) -> None:
    plain = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = chat_template._environment().filters["tojson"]
    chat_template._environment().start()
    expected = plain.from_string(template).render(messages=CHAT)
    assert expected
    assert Tokenizer(None).apply_chat_template(CHAT, chat_template=template) == expected


def test_a_long_chat_is_within_the_limits() -> None:
    """A million characters in 1000 messages, copied again and again as careless templates do."""
    copying = "{% for m in messages %}{% set n.x = n.x + m.content | trim %}{% endfor %}"
    template = "{% set n = namespace(x='') %}" + copying + "{{ n.x }}"
    chat = [{"role": "user", "content": "a" * 1000}] * 1000
    assert len(Tokenizer(None).apply_chat_template(chat, chat_template=template)) == 1_000_000


def test_threads_render_with_limits_of_their_own() -> None:
    tokenizer = Tokenizer(None, chat_templates={"default": "{{ messages[0].content * 10 }}"})
    texts: list[str] = []
    threads = [threading.Thread(target=lambda: texts.append(tokenizer.apply_chat_template(CHAT))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["Hello" * 10] * 4


@pytest.fixture(scope="module")
def llm(make_model: Callable[[str], TestModel]) -> Iterator[LLM]:
    with LLM(make_model("llama-tied").path, device="cpu", max_num_seqs=2) as llm:
        yield llm


def test_a_template_of_a_request_needs_permission(llm: LLM, make_model: Callable[[str], TestModel]) -> None:
    options = {"chat_template": "{{ messages[0].content }}"}
    with pytest.raises(RequestError, match="trust_request_chat_template=True"):
        llm.encode(CHAT, options)
    with LLM(make_model("llama-tied").path, device="cpu", max_num_seqs=2, trust_request_chat_template=True) as trusting:
        assert trusting.encode(CHAT, options) == trusting.encode("Hello")


def test_a_template_that_fails_affects_its_request_alone(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    template = "{% if messages[0].content == 'bad' %}{{ 1 // 0 }}{% else %}{{ messages[0].content }}{% endif %}"
    monkeypatch.setattr(
        llm.engine, "tokenizer", Tokenizer(llm.engine.tokenizer.backend, chat_templates={"default": template})
    )
    chats: list[Any] = [[{"role": "user", "content": content}] for content in ("good", "bad", "fine")]
    outputs = llm.generate(chats, SamplingParams(max_new_tokens=2))
    assert [output.error is None for output in outputs] == [True, False, True]
    assert "division" in str(outputs[1].error)


@pytest.mark.parametrize("options", [{"messages": []}, {"self": 1}, {1: 2}, "x", {"chat_template": 7}])
def test_options_that_are_none_are_refused_for_their_request(options: Any, llm: LLM) -> None:
    with pytest.raises(RequestError, match="chat_"):
        llm.encode(CHAT, options)
