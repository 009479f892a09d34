"""Requests that schemathesis makes from the server's OpenAPI schema, valid and invalid ones, and its checks."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import hypothesis
import requests
import schemathesis
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    negative_data_rejection,
    response_schema_conformance,
    status_code_conformance,
)
from serve_process import MODEL

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
    negative_data_rejection,
]
SETTINGS = hypothesis.settings(
    database=None,
    deadline=None,
    phases=[hypothesis.Phase.generate],
    suppress_health_check=list(hypothesis.HealthCheck),
    report_multiple_bugs=False,
)
TIMEOUT = 20.0  # seconds that an answer may take


def problems(url: str, count: int, seed: int) -> Iterator[str | None]:
    """Sends about `count` requests; for each of them what is wrong, if anything."""
    document = requests.get(f"{url}/openapi.json", timeout=TIMEOUT).json()
    schemas = (GenerationMode.POSITIVE, _narrowed(document)), (GenerationMode.NEGATIVE, document)
    each = max(1, count // (2 * len(document["paths"])))
    with requests.Session() as session:
        for mode, schema in schemas:
            for operation in schemathesis.openapi.from_dict(schema).get_all_operations():
                for case in _cases(operation.ok().as_strategy(generation_mode=mode), each, seed):
                    yield _problem(case, url, session)


def _narrowed(document: dict[str, Any]) -> dict[str, Any]:
    """Only the served model and small numbers get beyond the first checks, with answers that are short."""
    document = copy.deepcopy(document)
    for schema in document["components"]["schemas"].values():
        for name, field in schema.get("properties", {}).items():
            if name == "model":
                schema["properties"][name] = {"const": MODEL}
            for choice in field.get("anyOf", [field]):
                if choice.get("type") in ("integer", "number"):
                    choice.setdefault("minimum", -1)
                    choice.setdefault("maximum", 4)
    return document


def _cases(strategy: Any, count: int, seed: int) -> list[Any]:
    cases: list[Any] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(SETTINGS, max_examples=count)
    @hypothesis.given(strategy)
    def collect(case: Any) -> None:
        cases.append(case)

    try:
        collect()
    except Unsatisfiable:  # nothing about this request can be invalid
        return []
    return cases


def _problem(case: Any, url: str, session: requests.Session) -> str | None:
    try:
        case.call_and_validate(base_url=url, session=session, checks=CHECKS, timeout=TIMEOUT)
    except (AssertionError, BaseExceptionGroup, requests.RequestException) as error:
        return f"{case.as_curl_command()}: {error}"
    return None
