"""Options of the server. Those of the engine are in `ssd.config`."""

from __future__ import annotations

from dataclasses import dataclass

from ssd.errors import ConfigError
from ssd.server.tools import PARSERS
from ssd.server.tracing import check_endpoint


@dataclass(frozen=True)
class ServerOptions:
    """Limits and identity of a server. Sizes and times are per request unless the comment says otherwise."""

    served_model_name: str
    api_keys: tuple[str, ...] = ()  # none: every client is served
    max_queue: int = 256  # sequences that may wait beside the `max_num_seqs` that run, in all
    max_tokens_in_flight: int | None = None  # prompt and output tokens that admitted requests may need, in all
    request_timeout: float | None = None  # seconds
    drain_timeout: float = 30.0  # seconds that running requests have to end after SIGTERM
    max_request_bytes: int = 8 << 20
    max_connections: int = 1000  # in all
    read_timeout: float = 60.0  # seconds that a client has to send a request
    write_timeout: float = 60.0  # seconds that a client may read nothing of an answer
    max_n: int = 64
    cors_origins: tuple[str, ...] = ()  # none: no CORS headers
    access_log: bool = True
    tool_parser: str = "auto"  # format of tool calls: a name of `ssd.server.tools.PARSERS`, or by the chat template

    otlp_traces_endpoint: str | None = None  # of an OpenTelemetry collector; None: no traces

    def __post_init__(self) -> None:
        least_one = "max_request_bytes", "max_n", "max_connections"
        for name, least in (("max_queue", 0), ("drain_timeout", 0), *((name, 1) for name in least_one)):
            if not getattr(self, name) >= least:
                raise ConfigError(f"{name}={getattr(self, name)!r}: must be at least {least}")
        for name in ("max_tokens_in_flight", "request_timeout", "read_timeout", "write_timeout"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ConfigError(f"{name}={value!r}: must be above 0")
        if self.tool_parser not in ("auto", *PARSERS):
            raise ConfigError(f"tool_parser={self.tool_parser!r}: must be auto, {', '.join(PARSERS)}")
        if self.otlp_traces_endpoint is not None:
            check_endpoint(self.otlp_traces_endpoint)
        if any(not key or not key.isascii() for key in self.api_keys):
            raise ConfigError("api_key: must be ASCII text, and not empty")
