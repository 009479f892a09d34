"""Structured outputs from what users send, and constraints: which tokens may follow, along drafts."""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from ssd import SamplingParams
from ssd.constraints.grammars import Constraint, Grammars
from ssd.constraints.structured import MAX_CHARACTERS, StructuredOutput
from ssd.errors import RequestError

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


def ids(backend: tokenizers.Tokenizer, *tokens: str) -> list[int]:
    return [backend.token_to_id(token) for token in tokens]


def test_masks(backend: tokenizers.Tokenizer, grammars: Grammars) -> None:
    constraint = grammars.constraint(StructuredOutput(regex="ab? ?a?"))
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
    constraint, steps = grammars.constraint(wanted), grammars.constraint(wanted)
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
    constraint = grammars.constraint(StructuredOutput(choice=["ab", "ac"]))
    a, b, c = ids(backend, "a", "b", "c")
    assert constraint.num_valid([a, a, b]) == 1
    masks = constraint.masks([a, a, b])
    assert allowed(masks[1]) == {b, c, *ids(backend, "<0x62>", "<0x63>")}
    assert constraint.num_valid([a, b, EOS]) == 3
    assert constraint.num_valid([b]) == 0


def test_a_text_in_bytes(backend: tokenizers.Tokenizer, grammars: Grammars) -> None:
    """A character of four bytes, one token each."""
    constraint = grammars.constraint(StructuredOutput(choice=["😀"]))
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

    constraint = Constraint(Matcher(), 2, 2)
    constraint.advance(3)
    assert constraint.masks([5, 7, 5]).any(axis=1).tolist() == [True, True, False, True]
    assert constraint.error is None
    assert constraint.masks([5]).all()
    constraint.advance(7)
    assert not constraint.masks([]).any()
    assert constraint.error == "too complex"


def test_compiled_once(backend: tokenizers.Tokenizer, grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    grammars.check(StructuredOutput(regex="a{3}"))
    monkeypatch.setattr("ssd.constraints.grammars._compile", lambda *_: pytest.fail("compiled again"))
    grammars.check(StructuredOutput(regex="a{3}"))
    grammars.constraint(StructuredOutput(regex="a{3}"))


def test_grammars_are_kept_up_to_a_size(grammars: Grammars, monkeypatch: pytest.MonkeyPatch) -> None:
    """The least recently used ones are dropped; the latest is kept, whatever its size."""
    monkeypatch.setattr("ssd.constraints.grammars._MOST_CHARACTERS", 2500)
    first, second, third = (StructuredOutput(regex=letter * 1000) for letter in "abc")
    for wanted in (first, second, first, third):
        grammars.check(wanted)
    assert list(grammars._compiled) == [first, third]
    large = StructuredOutput(regex="d" * 9000)
    grammars.check(large)
    assert list(grammars._compiled) == [large]


def test_without_an_end_of_sequence_token(backend: tokenizers.Tokenizer) -> None:
    pytest.importorskip("llguidance")
    with pytest.raises(RequestError, match=r"^structured: the checkpoint names no end-of-sequence token"):
        Grammars(backend, 300, []).check(StructuredOutput(json_object=True))


def test_without_the_library(backend: tokenizers.Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(RequestError, match="pip install"):
        Grammars(backend, 300, [EOS]).check(StructuredOutput(json_object=True))
