"""Options of the server. Those of the engine are in `ssd.config`."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from ssd.core import SamplingParams
from ssd.errors import ConfigError, RequestError
from ssd.options import described, option, validate
from ssd.server.tracing import check_endpoint

SAMPLING: Final = (  # what a server may have defaults of
    *("temperature", "top_p", "top_k", "min_p"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty"),
)
TAG: Final = ":latest"  # that Ollama's clients add to names


@dataclass(frozen=True)
class ServerOptions:
    """Limits and identity of a server. Times are in seconds."""

    served_model_name: str = field(metadata=described("Name of the model in requests and answers."))
    aliases: tuple[str, ...] = option((), "Another name by which requests may ask for the model.", flags=("--alias",))
    api_keys: tuple[str, ...] = option(
        (), "Serve only clients with this key; without one, everybody.", flags=("--api-key",), env="SSD_API_KEY"
    )
    cors_origins: tuple[str, ...] = option(
        (), "Let web pages of this origin use the server ('*': of every origin).", flags=("--cors-origin",)
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        "Host names by which clients may address the server, beside loopback names. Without it: loopback names only if "
        "the server listens on one and has no API key, else any.",
        env="SSD_ALLOWED_HOSTS",
        listed=True,
    )
    access_log: bool = option(True, "Log every request, probes and scrapes that succeed excepted.")
    chat_template: str | None = option(None, "File with a chat template, Jinja's, in place of the model's.")
    generation_config: Literal["auto", "none"] = option(
        "auto",
        "Sampling parameters that requests leave out. auto: those of the model's generation_config.json, if any.",
    )
    override_generation_config: Mapping[str, Any] = field(
        default_factory=dict,
        metadata=described(
            'The same as JSON, or @FILE, before those of the model: \'{"temperature": 0.6, "top_p": 0.95}\'.'
        ),
    )
    tool_parser: Literal[
        "auto", "glm", "hermes", "llama3", "deepseek_v3", "deepseek_v31", "kimi_k2", "json", "fenced"
    ] = option(
        "auto",
        "Format of the model's tool calls. json: a message that is a JSON object. fenced: JSON in fences of Markdown. "
        "auto: by the chat template; fenced if it has no tools.",
    )
    additional_properties: bool = option(
        False,
        "Objects of JSON Schemas (answers, arguments of tools) may have properties that are not named, unless they say "
        "otherwise; without it they are closed.",
    )
    strict_parameters: bool = option(
        False, "Refuse requests with fields that this API does not have; otherwise these are ignored, with a warning."
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
        if self.chat_template is not None:
            object.__setattr__(self, "chat_template", str(Path(self.chat_template).expanduser().absolute()))
            self.read_chat_template()
        self._check_sampling()

    def is_called(self, name: str) -> bool:
        """Whether a request that names this model means the one that is served."""
        return not {name, name.removesuffix(TAG)}.isdisjoint((self.served_model_name, *self.aliases))

    def read_chat_template(self) -> str | None:
        """The template of the file; ConfigError if it cannot render a chat."""
        from ssd.text.chat_template import compile_template, render  # not worth the time at each start of the command

        if self.chat_template is None:
            return None
        messages = [{"role": "user", "content": "Hello"}]
        try:
            source = Path(self.chat_template).read_text(encoding="utf-8")
            render(compile_template(source), {"messages": messages, "add_generation_prompt": True})
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"chat_template {self.chat_template}: cannot be read ({error}): name a text file"
            ) from error
        except Exception as error:  # a template is a program, which can fail in any way
            line = f", line {error.lineno}" if hasattr(error, "lineno") else ""
            reason = str(error) or type(error).__name__
            raise ConfigError(f"chat_template {self.chat_template}{line}: cannot render a chat ({reason})") from error
        return source

    def _check_sampling(self) -> None:
        given = self.override_generation_config
        if unknown := sorted(set(given) - set(SAMPLING)):
            raise ConfigError(f"override_generation_config {unknown[0]!r}: is none of {', '.join(SAMPLING)}")
        try:
            SamplingParams(**given)
        except RequestError as error:
            raise ConfigError(f"override_generation_config {error}") from error


def is_loopback(host: str) -> bool:
    """Whether a host name, or an address, is one of the loopback interface."""
    name = host.lower().removesuffix(".")
    try:
        return name == "localhost" or ipaddress.ip_address(name.strip("[]")).is_loopback
    except ValueError:
        return False
