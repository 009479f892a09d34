"""Structured outputs from what users send, and constraints: which tokens may follow, along drafts."""

from __future__ import annotations

import json
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from ssd import SamplingParams
from ssd.constraints import grammars as grammars_module
from ssd.constraints.compiling import Trial
from ssd.constraints.grammars import Constraint, Grammar, Grammars
from ssd.constraints.structured import MAX_CHARACTERS, StructuredOutput
from ssd.errors import EngineClosed, RequestError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
EOS = 2


# --- StructuredOutput -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        ({"type": "text"}, None),
        ({"type": "json_object"}, StructuredOutput(json_object=True)),
        ({"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA, "strict": True}}, None),
        ({"type": "json_schema", "name": "n", "schema": SCHEMA, "strict": False}, None),
        ({"json_schema": json.dumps(SCHEMA)}, None),
        ({"type": "regex", "regex": "a+"}, StructuredOutput(regex="a+")),
        ({"choice": ["a", "b"]}, StructuredOutput(choice=("a", "b"))),
        ({"type": "grammar", "grammar": "start: /a/"}, StructuredOutput(grammar="start: /a/")),
    ],
)
def test_forms(value: Any, expected: StructuredOutput | None) -> None:
    if expected is None and value is not None and value.get("type") != "text":
        expected = StructuredOutput(json_schema=SCHEMA)
    assert StructuredOutput.of(value) == expected
    assert SamplingParams(structured=value).structured == expected
    assert expected is None or expected.kind in ("json_schema", "json_object", "regex", "choice", "grammar")


@pytest.mark.parametrize(
    ("value", "named"),
    [
        ({}, "structured: give exactly one"),
        ({"regex": "a", "choice": ["a"]}, "structured: give exactly one"),
        ({"regex": ""}, "structured.regex"),
        ({"regex": "a" * (MAX_CHARACTERS + 1)}, "structured.regex"),
        ({"regex": "\ud800"}, "structured.regex"),
        ({"grammar": 5}, "structured.grammar"),
        ({"choice": []}, "structured.choice"),
        ({"choice": "ab"}, "structured.choice"),
        ({"choice": ["a", ""]}, "structured.choice"),
        ({"json_object": "yes"}, "structured.json_object"),
        ({"json_schema": "{"}, "structured.json_schema"),
        ({"json_schema": [1]}, "structured.json_schema"),
        ({"json_schema": False}, "structured.json_schema"),
        ({"json_schema": {"const": float("nan")}}, "structured.json_schema"),
        ({"json_schema": {"const": object()}}, "structured.json_schema"),
        ({"json_schema": {"const": "x" * MAX_CHARACTERS}}, "structured.json_schema"),
        ({"pattern": "a"}, "structured.pattern"),
        ({"type": "yaml"}, "response_format.type"),
        ({"type": "json_object", "schema": {}}, "response_format.schema"),
        ({"type": "json_schema"}, "response_format"),
        ({"type": "json_schema", "json_schema": {"name": "n"}}, "response_format.json_schema"),
        ({"type": "json_schema", "json_schema": {"schema": {}, "stric": True}}, "response_format.json_schema.stric"),
        ({"type": "regex"}, "structured: give exactly one"),
    ],
)
def test_wrong_forms(value: Any, named: str) -> None:
    with pytest.raises(RequestError, match=f"^{named}"):
        StructuredOutput.of(value)


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_parameters_that_contradict_it(other: dict[str, Any]) -> None:
    with pytest.raises(RequestError, match=next(iter(other))):
        SamplingParams(structured={"json_object": True}, **other)


# --- constraints ------------------------------------------------------------------------------------------------------


def byte_fallback() -> tokenizers.Tokenizer:
    """A tokenizer as Llama 2 has it: spaces are U+2581, other characters are bytes."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *'abc{}":,0123▁', "▁a", "ab", '{"']
    backend = tokenizers.Tokenizer(
        models.BPE({word: i for i, word in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True, fuse_unk=True)
    )
    backend.add_special_tokens(["<unk>", "<s>", "</s>"])
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def allowed(row: np.ndarray) -> set[int]:
    return set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist())


@pytest.fixture(scope="module")
def backend() -> tokenizers.Tokenizer:
    return byte_fallback()


@pytest.fixture(scope="module")
def grammars(backend: tokenizers.Tokenizer) -> Grammars:
    pytest.importorskip("llguidance")
    return Grammars(backend, backend.get_vocab_size() + 40, [EOS])  # the model's vocabulary is padded


def constrained(grammars: Grammars, wanted: StructuredOutput) -> Constraint:
    return Constraint(grammars.compiled(wanted).result())


def ids(backend: tokenizers.Tokenizer, *tokens: str) -> list[int]:
    return [backend.token_to_id(token) for token in tokens]


def test_masks(backend: tokenizers.Tokenizer, grammars: Grammars) -> None:
    constraint = constrained(grammars, StructuredOutput(regex="ab? ?a?"))
    [row] = constraint.masks([])
    a, b, ab, space_a, space = ids(backend, "a", "b", "ab", "▁a", "▁")
    byte = {c: backend.token_to_id(f"<0x{ord(c):02X}>") for c in "ab "}
    assert allowed(row) == {a, ab, byte["a"]}
    constraint.advance(a)
    [row] = constraint.masks([])
    assert allowed(row) == {a, b, space, space_a, *byte.values(), EOS}
    constraint.advance(space_a)
    assert constraint.complete


def test_masks_along_a_draft_are_those_of_its_tokens(backend: tokenizers.Tokenizer, grammars: Grammars) -> None:
    """Catches a mask of another position, and a constraint that a draft has advanced."""
    wanted = StructuredOutput(json_schema=SCHEMA)
    draft = ids(backend, '{"', "a", '"', ":", "1", "2", "}")
    constraint, steps = constrained(grammars, wanted), constrained(grammars, wanted)
    masks = constraint.masks(draft)
    assert masks.shape == (8, -(-(backend.get_vocab_size() + 40) // 32))
    for row, token in zip(masks, draft, strict=False):
        assert (steps.masks([])[0] == row).all()
        assert token in allowed(row)
        steps.advance(token)
    assert steps.complete
    assert allowed(masks[7]) == {EOS}
    assert not constraint.complete
    assert (constraint.masks([])[0] == masks[0]).all()


def test_a_draft_that_breaks_the_grammar(backend: tokenizers.Tokenizer, grammars: Grammars) -> None:
    constraint = constrained(grammars, StructuredOutput(choice=["ab", "ac"]))
    a, b, c = ids(backend, "a", "b", "c")
    assert constraint.num_valid([a, a, b]) == 1
    masks = constraint.masks([a, a, b])
    assert allowed(masks[1]) == {b, c, *ids(backend, "<0x62>", "<0x63>")}
    assert constraint.num_valid([a, b, EOS]) == 3
    assert constraint.num_valid([b]) == 0


def test_a_text_in_bytes(backend: tokenizers.Tokenizer, grammars: Grammars) -> None:
    """A character of four bytes, one token each."""
    constraint = constrained(grammars, StructuredOutput(choice=["😀"]))
    for byte in "😀".encode():
        [row] = constraint.masks([])
        assert allowed(row) == {backend.token_to_id(f"<0x{byte:02X}>")}
        constraint.advance(backend.token_to_id(f"<0x{byte:02X}>"))
    assert constraint.complete


def test_a_limit_of_the_library_fails_only_where_it_is_reached() -> None:
    """Catches a constraint that an error on the way of a draft has broken."""

    class Matcher:
        """Allows every token, and fails for good after a 7."""

        def __init__(self) -> None:
            self.tokens: list[int] = []
            self.failed = False

        def deep_copy(self) -> Matcher:
            return Matcher()

        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None:
            self.failed |= 7 in self.tokens

        def try_consume_tokens(self, tokens: list[int]) -> int:
            self.tokens += tokens
            return len(tokens)

        consume_tokens = try_consume_tokens

        def consume_token(self, token: int) -> bool:
            self.tokens.append(token)
            return True

        def rollback(self, count: int) -> None:
            del self.tokens[-count:]

        def is_error(self) -> bool:
            return self.failed

        def get_error(self) -> str:
            return "too complex"

    constraint = Constraint(Grammar(Matcher(), 2, 2))
    constraint.advance(3)
    assert constraint.masks([5, 7, 5]).any(axis=1).tolist() == [True, True, False, True]
    assert constraint.error is None
    assert constraint.masks([5]).all()
    constraint.advance(7)
    assert not constraint.masks([]).any()
    assert constraint.error == "too complex"


def test_a_constraint_whose_masks_take_too_long_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a grammar that slows down the engine's thread for everybody, for as long as its text."""
    clock = iter(range(100))
    monkeypatch.setattr("ssd.constraints.grammars.time.thread_time", lambda: next(clock) * 0.26)

    class Matcher:
        def deep_copy(self) -> Matcher:
            return self

        def unsafe_compute_mask_ptr(self, address: int, size: int) -> None: ...

        def is_error(self) -> bool:
            return False

    constraint = Constraint(Grammar(Matcher(), 1, 1))
    found = [(bool(constraint.masks([]).any()), constraint.error is None) for _ in range(6)]
    assert found == [(True, True)] * 4 + [(True, False), (False, False)]  # 0.24 s over, of 1 s
    assert "0.02 s each" in (constraint.error or "")


# --- compiling --------------------------------------------------------------------------------------------------------

ENDLESS = StructuredOutput(
    json_schema={"allOf": [{"type": "integer", "multipleOf": p} for p in (7, 11, 13, 17, 19, 23)]}
)


def test_many_threads_that_ask_for_one_grammar_compile_it_once(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    defined: list[StructuredOutput] = []
    define = grammars_module._definition
    monkeypatch.setattr(grammars_module, "_definition", lambda wanted: defined.append(wanted) or define(wanted))
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda _: grammars.compiled(StructuredOutput(regex="a{3}")).result(), range(12)))
    assert len(set(map(id, found))) == len(defined) == 1


def test_a_grammar_that_is_refused_is_not_kept(grammars: Grammars) -> None:
    for _ in range(2):
        with pytest.raises(RequestError, match=r"^structured\.regex: "):
            grammars.compiled(StructuredOutput(regex="(")).result()


def test_a_grammar_that_takes_too_long_is_refused_and_others_do_not_wait(
    grammars: Grammars, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A schema of 200 characters that would be compiled for minutes. Others go on meanwhile, and afterwards."""
    monkeypatch.setattr("ssd.constraints.compiling.MAX_SECONDS", 1.0)
    own = Grammars(grammars._backend, 400, [EOS])
    refused = own.compiled(ENDLESS)
    constrained(own, StructuredOutput(regex="ab?"))
    assert not refused.done()
    with pytest.raises(RequestError, match=r"^structured\.json_schema: takes more than 1 seconds of CPU time"):
        refused.result(60)
    constrained(own, StructuredOutput(regex="ab{2}"))
    own.close()


def test_a_grammar_that_would_take_all_memory_ends_another_process_only(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(60.0)
    assert trial.passes("%llguidance {}\nstart: /a/")
    assert trial._process is not None
    trial._process.kill()  # as the system does
    assert not trial.passes("%llguidance {}\nstart: /a/")
    assert trial.passes("%llguidance {}\nstart: /a/")
    trial.close()


def test_grammars_that_wait_end_with_the_engine(backend: tokenizers.Tokenizer) -> None:
    """Catches a request that waits for ever."""
    pytest.importorskip("llguidance")
    own = Grammars(backend, 400, [EOS])
    waiting = [own.compiled(StructuredOutput(regex="x{9}" * i)) for i in range(1, 40)]
    own.close()
    ends = [type(future.exception(60)) for future in waiting]
    assert set(ends) <= {EngineClosed, type(None)}
    with pytest.raises(EngineClosed):
        own.compiled(StructuredOutput(regex="y")).result()


def test_a_grammar_at_a_limit_fails_at_the_same_token_the_second_time(
    backend: tokenizers.Tokenizer, grammars: Grammars
) -> None:
    """Copies of a compiled grammar share its limits: once one is reached, later requests get a new one."""
    wanted = StructuredOutput(regex="(ba){4}c{0,3}(a?){5000}a{5000}")
    text = ids(backend, *"babababa", *"a" * 40)

    def num_tokens() -> int:
        constraint = constrained(grammars, wanted)
        for count, token in enumerate(text):
            if not constraint.masks([]).any():
                return count
            constraint.advance(token)
        return -1

    assert 0 < num_tokens() == num_tokens() < len(text)


def test_grammars_are_kept_up_to_a_size(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used ones are dropped; the latest is kept, whatever its size."""
    monkeypatch.setattr("ssd.constraints.grammars._MOST_CHARACTERS", 2500)
    first, second, third = (StructuredOutput(regex=letter * 1000) for letter in "abc")
    for wanted in (first, second, first, third):
        grammars.compiled(wanted).result()
    assert list(grammars._compiled) == [first, third]
    large = StructuredOutput(choice=["d" * 9000, "e"])
    grammars.compiled(large).result()
    assert list(grammars._compiled) == [large]


def test_without_an_end_of_sequence_token(backend: tokenizers.Tokenizer) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(RequestError, match=r"^structured: the checkpoint names no end-of-sequence token"):
        Grammars(backend, 300, []).compiled(StructuredOutput(json_object=True)).result()


def test_without_the_library(backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install"):
        Grammars(backend, 300, [EOS]).compiled(StructuredOutput(json_object=True)).result()
