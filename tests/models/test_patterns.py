"""Regular expressions of configs: the same matches as `re`, in a time that no pattern makes long."""

from __future__ import annotations

import re
import time
import warnings
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.models import patterns
from ssd.models.patterns import Pattern

MOST_SECONDS = 0.5  # of this thread's computing time, to read a pattern and match a name; the worst known takes 0.03
LAYERS = [
    f"model.layers.{i}.{layer}"
    for i in (0, 3, 18, 27, 60)
    for layer in (
        *(f"self_attn.{name}_proj" for name in "qkvo"),
        *(f"mlp.{name}" for name in ("gate", "gate_proj", "up_proj", "down_proj", "shared_expert_gate")),
        *(f"mlp.experts.{expert}.{name}_proj" for expert in (0, 17) for name in ("gate", "up", "down")),
    )
]
NAMES = [*LAYERS, "lm_head", "model.embed_tokens", "visual.blocks.0.attn.qkv", "language_model.model.layers.0.mlp.up"]
PUBLISHED = [  # of checkpoints, and of the examples of llm-compressor and GPTQModel
    r".*lm_head",
    r".*mlp.gate$",
    r".*self_attn.(q|k|v|o)_proj$",
    r".*self_attn\..*",
    r".*mlp\.(gate|up|gate_up|down)_proj.*",
    r".*(?:gate_proj|up_proj|down_proj)$",
    r"visual.*",
    r"^model\.layers\.[0-3]\..*",
    r"model.layers.\d+.mlp.(gate|up)_proj",
    r"model\.layers\.\d+\.mlp\.experts\.\d+\..*",
    r"model\.layers\.([3-9]|[1-5]\d|60)\.mlp\.experts\.\d+\.(gate|up|down)_proj$",
    r".*\.18\..*gate.*",
    r".*layers\.(0|1|2|3|18).*",
    r"(language_model\.)?model\.layers\.0\.",
    r"^(?!.*experts).*$",
    r"^(?!.*language_model\.model\.layers\.)",
    r"^(?!.*(?:self_attn\.(?:q_proj|k_proj)|visual\..*)$).*$",
    r"(?=.*mlp)(?!.*\.0\.).*_proj$",
    r".*?\.mlp\.[a-z_]{4,7}$",
]


@pytest.mark.parametrize("text", PUBLISHED)
def test_published_patterns_match_what_they_are_meant_to(text: str) -> None:
    pattern = Pattern(text)
    found = [name for name in NAMES if pattern.match(name)]
    assert found == [name for name in NAMES if re.match(text, name)]


def sequences(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    repeats = st.sampled_from(["", "", "", "*", "+", "?", "*?", "+?", "??"])
    counts = st.sampled_from(["{2}", "{1,}", "{,2}", "{1,2}", "{0}", "{0,1}?"])
    one = st.sampled_from(["a", "b", ".", r"\d", r"\.", "[ab]", "[^a]", "[]a]", r"[\d-]", r"\W", "-"])
    anchors = st.sampled_from(["^", "$"])
    groups = st.tuples(st.sampled_from(["(", "(?:"]), parts, st.just(")"), repeats).map("".join)
    items = st.one_of(st.tuples(one, st.one_of(repeats, counts)).map("".join), groups, anchors)
    return st.lists(st.lists(items, max_size=4).map("".join), min_size=1, max_size=3).map("|".join)


EXPRESSIONS = st.recursive(st.just("a"), sequences, max_leaves=4)
AHEAD = st.tuples(st.sampled_from(["(?!", "^(?!", "(?="]), EXPRESSIONS, st.just(")(?:"), EXPRESSIONS, st.just(")")).map(
    "".join
)


@given(st.one_of(EXPRESSIONS, AHEAD), st.lists(st.text("ab0.-", min_size=1, max_size=6), min_size=10, max_size=10))
def test_any_pattern_matches_as_in_python(text: str, names: list[str]) -> None:
    """Catches a wrong precedence, repetition, anchor or look-ahead. Short texts: `re` may take long."""
    pattern = Pattern(text)
    assert [pattern.match(name) for name in names] == [re.match(text, name) is not None for name in names]


def test_states_that_are_forgotten_are_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches memory that grows with the number of layers, and answers that depend on what was matched before."""
    monkeypatch.setattr(patterns, "_MOST_STATES", 3)
    text = ".*[37].{20,22}d"
    pattern = Pattern(text)
    for name in NAMES:
        assert pattern.match(name) == (re.match(text, name) is not None)
        assert len(pattern._states) <= 3


def seconds(text: str, name: str) -> float:
    """To read a pattern and match a name, or to refuse it."""
    began = time.thread_time()
    with suppress(ValueError):
        Pattern(text).match(name)
    return time.thread_time() - began


@pytest.mark.parametrize(
    "text",
    [
        ".?" * 249 + "!",
        ".*" * 249 + "!",
        ".{0,490}!",
        "(.|.)" * 99 + "!",
        "(.?|)" * 99 + "!",
        "(" * 120 + ".*" + ")*" * 120 + "!",
        "(" * 249 + ")" * 249,
        "(?!" + ".*" * 120 + "!)" + ".?" * 120 + "!",
        "^" * 499 + "!",
        ".*" + "$" * 490 + "!",
        "(" + "|".join(f".*{c}.{{0,40}}" for c in "0123456789m") + ")*!",
        "(" + "|".join(f".*{c}.{{20}}" for c in "0123456789mlsepr.x_tdg") + ")*!",
        ".{999999999}",
        "((.{99}){99}){99}",
        "[" + "a-z" * 160 + "]*!",
    ],
)
def test_the_worst_patterns_take_little_time(text: str) -> None:
    """Catches ways through a pattern that are tried one after the other, and sizes that are not limited."""
    name = "model.layers.12.mlp.experts.117.down_proj" * 4
    assert seconds(text, name) < MOST_SECONDS


OPERATORS = st.sampled_from([".", "a", "[a-m]", "(", ")", "|", "*", "+", "?", "{0,99}", "{2}", "^", "$", "(?:", ".*"])


@given(st.lists(OPERATORS, max_size=250).map("".join), st.lists(EXPRESSIONS, min_size=10, max_size=30))
def test_random_patterns_take_little_time(noise: str, parts: list[str]) -> None:
    name = "a" * 200 + "!"
    with warnings.catch_warnings(action="ignore"):  # of Python, for sets that it may read in another way some day
        for text in (noise, "".join(f"({part})*" for part in parts)[:500], "".join(parts) + "x"):
            assert seconds(text, name) < MOST_SECONDS


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("(", "is no regular expression: missing"),
        ("a**", "is no regular expression: multiple repeat"),
        ("[b-a]", "is no regular expression: bad character range"),
        ("a*+", r"has '\+' where it is not known"),
        ("a(?!b)", r"has '\(\?!' where it is not known"),
        ("(?!a)b|c", "has a look-ahead in one of several alternatives"),
        ("(a){2}", "repeats a group a number of times"),
        ("a{501}", "repeats its characters more than 500 times"),
        ("a{b}", r"has '{b}', which is not known"),
        ("a{\u0663}", "has '{\u0663}', which is not known"),  # no digit of a count, but one of Unicode
        (r"\bfoo", r"has '\\\\bfo', which is not known"),
        (r"(a)\1", r"has '\\\\1', which is not known"),
        ("(?i)a", r"has '\(\?i\)', which is not known"),
        ("(?P<x>a)", r"has '\(\?P<', which is not known"),
        ("a" * 501, "has more than 500 characters"),
    ],
)
def test_what_is_not_known_is_refused(text: str, message: str) -> None:
    """Catches a pattern that is read in another way than Python's."""
    with pytest.raises(ValueError, match=message):
        Pattern(text)
