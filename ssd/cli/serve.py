"""`ssd serve`: an OpenAI-compatible HTTP server."""

from __future__ import annotations

import logging
import os
import socket
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Final

import typer

from ssd.cli.console import errors, follow, print_note, stages
from ssd.cli.options import MODEL, Flags, Given, command
from ssd.config import EngineConfig
from ssd.errors import ConfigError, EngineFailed, install_extra
from ssd.parallel.launch import Launch
from ssd.server.options import ServerOptions, is_loopback

if TYPE_CHECKING:
    from fastapi import FastAPI

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
    options = ServerOptions(**{"served_model_name": model, **server})
    if ray_address is not None and replicas is None:
        raise ConfigError("--ray-address: only with --replicas")
    if replicas is not None and Launch.found() is not None:
        raise ConfigError("--replicas: not with torchrun: Ray starts the engines")
    if not options.api_keys and not is_loopback(host):
        errors.print(f"[yellow]no --api-key: whoever reaches {host}:{port} is served[/]", highlight=False)
    elif not options.api_keys and not options.allowed_hosts:
        options = replace(options, allowed_hosts=("localhost",))
    follow(engine)
    sockets = _listen(host, port)  # first: a model may take minutes to load
    addresses = _addresses(options, host, port)
    if replicas is None:
        _serve_engine(model, engine, options, sockets, addresses)
    else:
        cluster = ray_address or os.environ.get("RAY_ADDRESS")
        _serve_replicas(EngineConfig(model, **engine), options, replicas, cluster, sockets, addresses)


def _serve_engine(
    model: str, engine: Given, options: ServerOptions, sockets: list[socket.socket], addresses: list[str]
) -> None:
    with ExitStack() as stack:
        with stages(f"loading {model}", lines=True):
            from ssd.llm import LLM
            from ssd.server.app import create_app

            llm = stack.enter_context(LLM(model, **engine))
            app = create_app(llm, options)
        print_note(llm.note)
        _run(app, sockets, [*_summary(llm.config), *addresses])
        if llm.driver.failure is not None:
            raise EngineFailed(llm.driver.failure)


def _serve_replicas(
    config: EngineConfig,
    options: ServerOptions,
    count: int,
    cluster: str | None,
    sockets: list[socket.socket],
    addresses: list[str],
) -> None:
    with ExitStack() as stack:
        with stages(f"starting {count} replicas of {config.model}", lines=True):
            from ssd.server.replicas.proxy import create_proxy
            from ssd.server.replicas.ray_serve import LOCAL, RayReplicas

            replicas = stack.enter_context(RayReplicas(config, options, count, cluster or LOCAL))
            app = create_proxy(replicas, options)
        _run(app, sockets, [f"replicas    {count}", *addresses])
        if replicas.lost is not None:
            raise EngineFailed(replicas.lost)


def _listen(host: str, port: int) -> list[socket.socket]:
    try:
        from ssd.server.run import listen
    except ModuleNotFoundError as error:
        raise ConfigError(f"ssd serve needs the package {error.name}: {install_extra('serve')}") from error
    return listen(host, port)


def _summary(config: EngineConfig) -> list[str]:
    """What was chosen for an engine."""
    import torch

    device, speculation = config.device, config.speculation
    if device != "cpu":
        device = f"{device} ({torch.cuda.get_device_name(device)})"
    tokens = (config.num_kv_blocks or 0) * (config.block_size or 0)
    drafter = "no draft" if speculation.mode == "ar" else f"draft {speculation.draft}, k {speculation.k}"
    sequences = f"{config.max_num_seqs} sequences of up to {config.max_model_len:,} tokens"
    return [
        f"device      {device}, {config.dtype}{f', weights in {config.quantization}' if config.quantization else ''}",
        f"KV cache    {tokens:,} tokens in {config.kv_dtype}; {sequences}",
        f"mode        {speculation.mode}, {drafter}",
    ]


def _addresses(options: ServerOptions, host: str, port: int) -> list[str]:
    name = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    address = f"http://{f'[{name}]' if ':' in name else name}:{port}"
    return [f"API         {address}/v1, model {options.served_model_name}", f"playground  {address}/"]


def _run(app: FastAPI, sockets: list[socket.socket], notes: list[str]) -> None:
    """Runs the server until a signal ends it."""
    from ssd.server.run import Server

    logging.getLogger("ssd.access").setLevel(logging.INFO)
    text = "\n".join(notes)
    Server(app, ready=lambda: errors.print(text, highlight=False, markup=False, soft_wrap=True)).run(sockets)
