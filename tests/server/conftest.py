"""Fixtures of several files here. What they need is imported when one is first used: the extra may not be there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A server of a model with a chat template for tools and reasoning."""
    from live_server import serving

    from server.scripted import checkpoint
    from ssd import LLM

    path = checkpoint(tmp_path_factory.mktemp("tools"))
    with LLM(path, device="cpu", max_model_len=1024) as llm, serving(llm) as running:
        yield running


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What the model answers to chats, instead of what it would write."""
    from server.scripted import Script

    given = Script()
    monkeypatch.setattr("ssd.server.openai.chat.start", given.start())
    return given
