"""Closes the objects of a JSON Schema: they have the properties that it names, and no others.

By the specification an object may have any other property unless `additionalProperties` says otherwise, so a model
could make up some. Where several schemas describe one object together (`allOf`, or `properties` beside `anyOf`, `oneOf`
or `$ref`), or it requires a property that it does not name, its properties are not all known: it stays as it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

_SAYS: Final = ("additionalProperties", "patternProperties", "unevaluatedProperties")
_TOGETHER: Final = ("allOf", "anyOf", "oneOf")  # of the value that the schema itself describes, as is $ref
_BY_NAME: Final = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_INNER: Final = ("items", "prefixItems", "additionalItems", "additionalProperties", "contains")


def closed(schema: Any) -> Any:
    """A copy of a schema with `additionalProperties: false` in every object that names its properties and says nothing
    of others."""
    copy = json.loads(json.dumps(schema))
    found: dict[int, Any] = {}  # objects that name their properties
    shared = set[int]()  # schemas that describe a value together with others
    visited = set[tuple[int, bool]]()
    left = [(copy, False)]
    while left:
        node, together = left.pop()
        if isinstance(node, list):
            left += [(each, together) for each in node]
        if not isinstance(node, dict) or (id(node), together) in visited:
            continue
        visited.add((id(node), together))
        parts = [*_parts(node, copy)]
        own = "properties" in node
        if together or (own and parts):
            shared.add(id(node))
        if own and not any(name in node for name in _SAYS) and _names_all(node):
            found[id(node)] = node
        several = together or own or len(parts) > 1 or len(_listed(node.get("allOf"))) > 1
        left += [(part, several) for part in parts]
        left += [(each, False) for name in _INNER for each in (node.get(name),)]
        left += [(each, False) for name in _BY_NAME for each in _listed(node.get(name))]
    for key, node in found.items():
        if key not in shared:
            node["additionalProperties"] = False
    return copy


def _parts(node: dict[str, Any], root: Any) -> Iterator[Any]:
    """Schemas, or lists of them, that describe the same value as this one."""
    yield from (node[name] for name in _TOGETHER if name in node)
    reference = node.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        yield _target(reference, root)


def _target(reference: str, root: Any) -> Any:
    """What a reference inside of the document names; None if there is nothing."""
    for part in reference[1:].split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        root = root.get(name) if isinstance(root, dict) else None
    return root


def _names_all(node: dict[str, Any]) -> bool:
    """Whether the required properties are among those that are named."""
    required, named = node.get("required"), node["properties"]
    return not isinstance(required, list) or (isinstance(named, dict) and all(name in named for name in required))


def _listed(schemas: Any) -> list[Any]:
    return schemas if isinstance(schemas, list) else list(schemas.values()) if isinstance(schemas, dict) else []
