"""Which objects of a schema are closed, and that what is valid for a combination of schemas stays valid."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("jsonschema", reason="needs the extras serve and dev")

import jsonschema

from ssd.constraints.closed import closed
from ssd.constraints.structured import StructuredOutput

A: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "integer"}}}
B: dict[str, Any] = {"type": "object", "properties": {"b": {"type": "integer"}}, "required": ["b"]}
REF = {"$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        (A, {"a": 1}, {"a": 1, "x": 2}),
        ({"type": "object", "properties": {}}, {}, {"x": 1}),
        ({"properties": {"o": A}}, {"o": {"a": 1}}, {"o": {"x": 1}}),
        ({"type": "array", "items": A}, [{"a": 1}], [{"x": 1}]),
        ({"type": "array", "prefixItems": [A]}, [{"a": 1}], [{"x": 1}]),
        ({"anyOf": [A, B]}, {"b": 1}, {"b": 1, "x": 1}),
        ({"allOf": [REF], "$defs": {"A": A}}, {"a": 1}, {"x": 1}),
        ({"properties": {"o": REF}, "$defs": {"A": A}}, {"o": {"a": 1}}, {"o": {"x": 1}}),
        ({"properties": {"o": {"$ref": "#"}}}, {"o": {"o": {}}}, {"o": {"x": 1}}),
        ({"additionalProperties": A}, {"x": {"a": 1}}, {"x": {"y": 1}}),
        ({"properties": {"properties": A}}, {"properties": {"a": 1}}, {"properties": {"x": 1}}),
    ],
)
def test_objects_are_closed(schema: dict[str, Any], valid: Any, invalid: Any) -> None:
    before = repr(schema)
    jsonschema.validate(invalid, schema)
    jsonschema.validate(valid, closed(schema))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(invalid, closed(schema))
    assert repr(schema) == before, "the schema of the request has changed"


@pytest.mark.parametrize(
    ("schema", "valid"),
    [
        ({**A, "additionalProperties": True}, {"x": 1}),
        ({**A, "additionalProperties": {"type": "integer"}}, {"x": 1}),
        ({**A, "patternProperties": {"^x": {}}}, {"x": 1}),
        ({"type": "object"}, {"x": 1}),
        ({"allOf": [A, B]}, {"a": 1, "b": 2}),
        ({**A, "anyOf": [B, {"required": ["a"]}]}, {"a": 1, "b": 2}),
        ({"allOf": [REF, B], "$defs": {"A": A}}, {"a": 1, "b": 2}),
        ({**REF, **B, "$defs": {"A": A}}, {"a": 1, "b": 2}),
        ({**A, "required": ["c"]}, {"a": 1, "c": 2}),
        ({"const": {"properties": {}}}, {"properties": {}}),
        ({"properties": {"a": {"enum": [{"properties": {}}]}}}, {"a": {"properties": {}}}),
    ],
)
def test_what_says_otherwise_or_is_combined_stays_open(schema: dict[str, Any], valid: Any) -> None:
    """Catches a schema for which nothing is valid any more."""
    jsonschema.validate(valid, closed(schema))


@pytest.mark.parametrize("schema", [True, {"$ref": "#/nowhere"}, {"$ref": 5}, {"properties": 1}, {"allOf": 1}])
def test_what_is_no_schema_is_left_to_the_grammar_library(schema: Any) -> None:
    closed(schema)


def test_an_option_opens_them() -> None:
    assert StructuredOutput(json_schema=A).schema == {**A, "additionalProperties": False}
    assert StructuredOutput(json_schema=A, additional_properties=True).schema == A
    assert StructuredOutput(json_object=True).schema == {"type": "object"}
