"""What is served, as the endpoints that list models see it."""

from __future__ import annotations

from typing import NamedTuple

from ssd.llm import LLM
from ssd.server.options import ServerOptions


class Served(NamedTuple):
    """A model of this server, loaded or not."""

    options: ServerOptions  # with its name and aliases
    model: str  # what is loaded: a path, a bundled model, a hub id or a graft
    llm: LLM | None  # None: it is not loaded
    expires: float | None = None  # when it is unloaded unless it is used before, as `time.time` counts; None: never

    @property
    def name(self) -> str:
        return self.options.served_model_name
