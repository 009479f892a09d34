"""`ssd serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import os
import socket
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich.markup import escape

from ssd.cli.console import errors, follow, load, print_note
from ssd.cli.options import MODEL, Flags, Given, command
from ssd.config import EngineConfig
from ssd.errors import ConfigError, EngineFailed
from ssd.parallel.launch import Launch
from ssd.server.options import ServerOptions

if TYPE_CHECKING:
    from fastapi import FastAPI

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
REPLICAS: Final = "Replicas, on Ray Serve"
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")


@command
def serve(
    model: Annotated[str, MODEL] = "tiny-llama",
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=1, max=65535, help="Port to listen on.")] = 8000,
    replicas: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Number of engines, each on GPUs (or cores) of its own. Needs the extra ray.",
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
    *,
    server: Annotated[Given, Flags(ServerOptions)],
    engine: Annotated[Given, Flags(EngineConfig)],
) -> None:
    try:
        from ssd.server.app import create_app
        from ssd.server.proxy import create_proxy
        from ssd.server.run import listen
    except ModuleNotFoundError as error:
        raise ConfigError(f"ssd serve needs the package {error.name}: pip install 'ssd-engine[serve]'") from error
    options = ServerOptions(**{"served_model_name": model, **server})
    if ray_address is not None and replicas is None:
        raise ConfigError("--ray-address: only with --replicas")
    if replicas is not None and Launch.found() is not None:
        raise ConfigError("--replicas: not with torchrun: Ray starts the engines")
    follow(engine)
    sockets = listen(host, port)  # first: a model may take minutes to load
    if not options.api_keys and host not in LOOPBACK:
        errors.print(f"[yellow]no --api-key: whoever reaches {host}:{port} is served[/]", highlight=False)
    note = f"{options.served_model_name} at http://{host}:{port}/v1"
    if replicas is None:
        with load(model, engine) as llm:
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
    """Runs the server until a signal ends it."""
    from ssd.server.run import Server

    logging.getLogger("ssd.access").setLevel(logging.INFO)
    errors.print(note, highlight=False)
    Server(app).run(sockets)
