"""Options of a server of several models."""

from __future__ import annotations

from dataclasses import dataclass

from ssd.config import EngineConfig
from ssd.options import option, validate
from ssd.server.options import ServerOptions


@dataclass(frozen=True)
class CatalogOptions:
    """How many models are loaded, and for how long. Times are in seconds."""

    keep_alive: float = option(
        300.0, "Seconds without a request after which a model is unloaded; below 0: only when memory is needed."
    )
    max_loaded_models: int | None = option(
        None, "Maximum number of loaded models. Without it, as many as fit into the memory.", least=1
    )
    load_timeout: float = option(
        600.0, "Seconds that a request waits for its model; then the client gets 503, and the load goes on.", above=0
    )

    def __post_init__(self) -> None:
        validate(self)


@dataclass(frozen=True)
class ServedModel:
    """A model that can be loaded. `options` has its name and aliases."""

    config: EngineConfig
    options: ServerOptions
    keep_alive: float
    pinned: bool = False  # loaded before the server is ready, and never unloaded

    @property
    def name(self) -> str:
        return self.options.served_model_name
