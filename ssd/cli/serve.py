"""`ssd serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.markup import escape

from ssd.cli import speculation
from ssd.cli.console import Device, DType, Eager, TensorParallelSize, errors, explained, follow, load, print_note
from ssd.config import EngineConfig
from ssd.errors import ConfigError, EngineFailed
from ssd.parallel.launch import Launch

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ssd.server.options import ServerOptions
    from ssd.server.ray_serve import RayReplicas

HELP: Final = """\
Serve a model over HTTP, as OpenAI's API does: [bold]chats, completions, streaming, log-probabilities, seeds[/].

The text of a request is that of [cyan]LLM.generate[/] with the same parameters and seed, whatever else is being \
served and however it is drafted. Ctrl-C or SIGTERM ends the server when running requests have ended; a second one \
ends it at once. Needs the extra [cyan]serve[/].

[bold]Try[/]

  ssd serve tiny-llama --draft tiny-llama-draft --mode ssd

  ssd serve MODEL --host 0.0.0.0 --api-key KEY

  ssd serve MODEL --replicas 8

  curl http://127.0.0.1:8000/v1/completions -H 'Content-Type: application/json' \
-d '{"model": "tiny-llama", "prompt": "Once upon a time"}'
"""
SERVER: Final = "Server"
LIMITS: Final = "Limits"
REPLICAS: Final = "Replicas, on Ray Serve"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


def serve(
    model: Annotated[str, typer.Argument(help="Any MODEL, as `ssd --help` describes them.")] = "tiny-llama",
    host: Annotated[str, typer.Option(help="Address to listen on.", rich_help_panel=SERVER)] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.", rich_help_panel=SERVER)] = 8000,
    api_key: Annotated[
        list[str] | None,
        typer.Option(
            envvar="SSD_API_KEY",
            show_envvar=True,
            help="Serve clients with this key only. May be repeated.",
            rich_help_panel=SERVER,
        ),
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="The model's name in requests.", show_default="MODEL", rich_help_panel=SERVER)
    ] = None,
    cors_origin: Annotated[
        list[str] | None,
        typer.Option(help="Allow pages of this origin ('*': of all). May be repeated.", rich_help_panel=SERVER),
    ] = None,
    access_log: Annotated[
        bool, typer.Option("--access-log/--no-access-log", help="Log every request.", rich_help_panel=SERVER)
    ] = True,
    tool_parser: Annotated[
        str,
        typer.Option(
            help="Format of tool calls: llama3, hermes, json (a message that is a JSON object), or auto.",
            rich_help_panel=SERVER,
        ),
    ] = "auto",
    otlp_traces_endpoint: Annotated[
        str | None,
        typer.Option(
            help="Send OpenTelemetry traces there, over HTTP (http://localhost:4318/v1/traces).",
            rich_help_panel=SERVER,
        ),
    ] = None,
    max_queue: Annotated[
        int, typer.Option(help="Sequences that may wait; beyond that, clients get 429.", rich_help_panel=LIMITS)
    ] = 256,
    max_tokens_in_flight: Annotated[
        int | None,
        typer.Option(help="Prompt and output tokens of all admitted requests; beyond: 429.", rich_help_panel=LIMITS),
    ] = None,
    request_timeout: Annotated[
        float | None, typer.Option(help="Seconds after which a request is ended.", rich_help_panel=LIMITS)
    ] = None,
    drain_timeout: Annotated[
        float, typer.Option(help="Seconds that running requests have after SIGTERM.", rich_help_panel=LIMITS)
    ] = 30.0,
    max_request_bytes: Annotated[
        int, typer.Option(help="Largest body of a request; beyond: 413.", rich_help_panel=LIMITS)
    ] = 8 << 20,
    max_connections: Annotated[
        int, typer.Option(help="Connections at the same time; beyond: 503.", rich_help_panel=LIMITS)
    ] = 1000,
    read_timeout: Annotated[
        float, typer.Option(help="Seconds that a client has to send a request; then 408.", rich_help_panel=LIMITS)
    ] = 60.0,
    write_timeout: Annotated[
        float,
        typer.Option(
            help="Seconds that a client may read nothing of its answer; then cut off.", rich_help_panel=LIMITS
        ),
    ] = 60.0,
    max_n: Annotated[int, typer.Option(help="Most samples per prompt.", rich_help_panel=LIMITS)] = 64,
    mode: speculation.Mode = None,
    draft: speculation.Draft = None,
    k: speculation.K = None,
    draft_quantization: speculation.DraftQuantization = None,
    acceptance: speculation.Acceptance = None,
    fan_out: speculation.FanOut = None,
    budget: speculation.Budget = None,
    backup: speculation.Backup = None,
    placement: speculation.Placement = None,
    draft_replicas: speculation.DraftReplicas = None,
    draft_tensor_parallel_size: speculation.DraftTensorParallelSize = None,
    speculation_json: speculation.Speculation = None,
    device: Device = "auto",
    dtype: DType = "auto",
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and output together.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Sequences decoded at the same time.")] = 64,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory to use.")] = 0.9,
    trust_request_chat_template: Annotated[
        bool, typer.Option("--trust-request-chat-template", help="Run chat templates that requests bring.")
    ] = False,
    tensor_parallel_size: TensorParallelSize = 1,
    eager: Eager = False,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Serve with so many engines, each on GPUs (or cores) of its own. Needs the extra ray.",
            show_default="one, without Ray",
            rich_help_panel=REPLICAS,
        ),
    ] = None,
    ray_address: Annotated[
        str | None,
        typer.Option(
            help="Join this Ray cluster: HOST:PORT, or auto.",
            show_default="RAY_ADDRESS, or a new one on this machine",
            rich_help_panel=REPLICAS,
        ),
    ] = None,
) -> None:
    with explained():
        try:
            from ssd.server.app import create_app
            from ssd.server.options import ServerOptions
            from ssd.server.proxy import create_proxy
            from ssd.server.run import listen
        except ModuleNotFoundError as error:
            raise ConfigError(f"ssd serve needs the package {error.name}: pip install 'ssd-engine[serve]'") from error
        options = ServerOptions(
            served_model_name=served_model_name or model,
            api_keys=tuple(api_key or ()),
            max_queue=max_queue,
            max_tokens_in_flight=max_tokens_in_flight,
            request_timeout=request_timeout,
            drain_timeout=drain_timeout,
            max_request_bytes=max_request_bytes,
            max_connections=max_connections,
            read_timeout=read_timeout,
            write_timeout=write_timeout,
            max_n=max_n,
            cors_origins=tuple(cors_origin or ()),
            access_log=access_log,
            tool_parser=tool_parser,
            otlp_traces_endpoint=otlp_traces_endpoint,
        )
        wanted = speculation.options(
            speculation_json,
            mode=mode,
            draft=draft,
            k=k,
            draft_quantization=draft_quantization,
            acceptance=acceptance,
            fan_out=fan_out,
            budget=budget,
            backup=backup,
            placement=placement,
            draft_replicas=draft_replicas,
            draft_tensor_parallel_size=draft_tensor_parallel_size,
        )
        engine: dict[str, Any] = {
            "device": device,
            "dtype": dtype,
            "max_model_len": max_model_len,
            "max_num_seqs": max_num_seqs,
            "gpu_memory_utilization": gpu_memory_utilization,
            "trust_request_chat_template": trust_request_chat_template,
            "tensor_parallel_size": tensor_parallel_size,
            "eager": eager,
            "speculation": wanted,
        }
        if ray_address is not None and replicas is None:
            raise ConfigError("--ray-address: only with --replicas")
        if replicas is not None and Launch.found() is not None:
            raise ConfigError("--replicas: not with torchrun: Ray starts the engines")
        follow(tensor_parallel_size)
        sockets = listen(host, port)  # first: a model may take minutes to load
        if not options.api_keys and host not in LOOPBACK:
            errors.print(f"[yellow]no --api-key: whoever reaches {host}:{port} is served[/]", highlight=False)
        note = f"{options.served_model_name} at http://{host}:{port}/v1"
        if replicas is None:
            with load(model, **engine) as llm:
                print_note(llm.note)
                _run(create_app(llm, options), sockets, note)
                if llm.driver.failure is not None:
                    raise EngineFailed(llm.driver.failure)
        else:
            with _started(EngineConfig(model, **engine), options, replicas, ray_address) as started:
                _run(create_proxy(started, options), sockets, note)
                if started.lost is not None:
                    raise EngineFailed(started.lost)


def _started(config: EngineConfig, options: ServerOptions, count: int, address: str | None) -> RayReplicas:
    from ssd.server.ray_serve import LOCAL, RayReplicas

    with errors.status(f"starting {count} replicas of {escape(str(config.model))}"):
        return RayReplicas(config, options, count, address or os.environ.get("RAY_ADDRESS") or LOCAL)


def _run(app: FastAPI, sockets: list[socket.socket], note: str) -> None:
    """Until a signal ends it."""
    from ssd.server.run import Server

    logging.getLogger("ssd.access").setLevel(logging.INFO)
    errors.print(note, highlight=False)
    Server(app).run(sockets)
