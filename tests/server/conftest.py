"""A server of the bundled model, for all tests here."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from ssd import LLM

if TYPE_CHECKING:
    from live_server import Served


@pytest.fixture(scope="session")
def llm() -> Iterator[LLM]:
    with LLM("tiny-llama", device="cpu") as model:
        yield model


@pytest.fixture(scope="session")
def served(llm: LLM) -> Iterator[Served]:
    from live_server import serving  # needs the extra `serve`

    with serving(llm) as running:
        yield running
