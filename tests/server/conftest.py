"""A server of the bundled model, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("fastapi", reason="the extra `serve` is not installed")

from live_server import MODEL, Served, serving

from ssd import LLM


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Served]:
    with serving(llm) as running:
        yield running
