"""Options of the server. Those of the engine are in `ssd.config`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ssd.errors import ConfigError
from ssd.options import described, option, validate
from ssd.server.tracing import check_endpoint


@dataclass(frozen=True)
class ServerOptions:
    """Limits and identity of a server. Times are in seconds."""

    served_model_name: str = field(metadata=described("Name of the model in requests and answers."))
    api_keys: tuple[str, ...] = option(
        (), "Serve only clients with this key; without one, everybody.", flags=("--api-key",), env="SSD_API_KEY"
    )
    cors_origins: tuple[str, ...] = option(
        (), "Let web pages of this origin use the server ('*': of every origin).", flags=("--cors-origin",)
    )
    access_log: bool = option(True, "Log every request.")
    tool_parser: Literal["auto", "llama3", "hermes", "json"] = option(
        "auto",
        "Format of the model's tool calls. json: a message that is a JSON object. auto: by the chat template.",
    )
    otlp_traces_endpoint: str | None = option(
        None, "Send OpenTelemetry traces to this address, over HTTP: http://localhost:4318/v1/traces."
    )
    max_queue: int = option(
        256, "Sequences that may wait beside the `max_num_seqs` that run; beyond that, clients get 429.", least=0
    )
    max_tokens_in_flight: int | None = option(
        None, "Prompt and output tokens that all admitted requests may need; beyond that, clients get 429.", least=1
    )
    request_timeout: float | None = option(None, "Seconds after which a request is ended.", above=0)
    drain_timeout: float = option(30.0, "Seconds that running requests have to end after SIGTERM.", least=0)
    max_request_bytes: int = option(8 << 20, "Size of the largest request; beyond that, clients get 413.", least=1)
    max_connections: int = option(1000, "Connections at the same time; beyond that, clients get 503.", least=1)
    read_timeout: float = option(60.0, "Seconds that a client has to send a request; then it gets 408.", above=0)
    write_timeout: float = option(
        60.0, "Seconds that a client may read nothing of its answer; then it is disconnected.", above=0
    )
    max_n: int = option(64, "Maximum number of samples per prompt.", least=1)

    def __post_init__(self) -> None:
        validate(self)
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ConfigError("api_key: must be ASCII text, and not empty")
